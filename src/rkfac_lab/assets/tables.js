/* The table of results, the ratios, and what was compared. */

function targetName(target, oneMetric) {
  return oneMetric ? `${target.mode === "max" ? "≥" : "≤"} ${metricValue(target.metric, target.value, "short")}` : targetLabel(target);
}

/* One column a target, under what they have in common. */
function targetColumns(targets, what, column) {
  const oneMetric = new Set(targets.map((target) => target.metric + target.mode)).size === 1;
  return targets.map((target, index) => ({ over: oneMetric ? `${what} to ${metricLabel(target.metric).toLowerCase()}` : `${what} to`,
    name: targetName(target, oneMetric), ...column(index) }));
}

/* A column: its heading (under `over` where it belongs to a group), the number it sorts by, its text, remarks in small
   print, whether low or high is best (absent: neither), and which rows may be best (absent: all): a mean time over a
   few lucky runs is not marked. */
function columns({ targets, rows, metric, mode }) {
  const costs = ({ cpu_seconds, steps }) => [cpu_seconds ? `${spreadText(cpu_seconds, timeDecimals)} CPU s` : "", steps ? `${spreadText(steps, () => 0)} steps` : ""];
  const missed = ({ hits, runs }) => (hits < runs ? `${hits} of ${plural(runs, "run")}` : "");
  return [
    { name: "Optimizer", sort: (row) => row.label, text: (row) => row.label },
    ...targetColumns(targets, "Seconds", (index) => ({ best: "low", eligible: (row) => row.targets[index].hits === row.targets[index].runs,
      sort: (row) => row.targets[index].seconds?.mean, text: (row) => spreadText(row.targets[index].seconds, timeDecimals),
      remarks: (row) => [missed(row.targets[index]), ...costs(row.targets[index])] })),
    { name: "Seconds per epoch", best: "low", sort: (row) => row.epoch_seconds?.mean, text: (row) => spreadText(row.epoch_seconds, timeDecimals) },
    { name: `Best ${metricLabel(metric).toLowerCase()}${isAccuracy(metric) ? ", %" : ""}`, best: mode === "max" ? "high" : "low", sort: (row) => row.best?.mean,
      text: (row) => (isAccuracy(metric) ? spreadText(row.best, () => 2, 100) : spreadText(row.best, timeDecimals)) },
    ...(rows.some((row) => row.notes) ? [{ name: "Notes", sort: (row) => row.notes, text: (row) => row.notes }] : []),
  ];
}

/* Each row's means divided by those of the reference. */
function ratioColumns({ targets }, base) {
  const share = (mine, its) => (mine && its?.mean ? mine.mean / its.mean : null);
  const text = (value) => (value === null ? ABSENT : value.toFixed(2));
  const of = (row, index, cost) => share(row.targets[index][cost], base.targets[index][cost]);
  return [
    { name: "Optimizer", text: (row) => row.label },
    ...targetColumns(targets, "Seconds", (index) => ({ text: (row) => text(of(row, index, "seconds")),
      remarks: (row) => [["cpu_seconds", "CPU"], ["steps", "steps"]].map(([cost, name]) => [of(row, index, cost), name]).filter(([value]) => value !== null)
        .map(([value, name]) => `${name} ${text(value)}`) })),
    { name: "Seconds per epoch", text: (row) => text(share(row.epoch_seconds, base.epoch_seconds)) },
  ];
}

/* As many decimals as three digits need. */
function timeDecimals(size) {
  return size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.1 ? 3 : 4;
}

function spreadText(spread, decimals, factor = 1) {
  if (!spread) return ABSENT;
  const show = (value) => (factor * value).toFixed(decimals(spread.mean));
  return spread.std === null ? show(spread.mean) : `${show(spread.mean)} ± ${show(spread.std)}`;
}

/* The row above the headings that names groups of columns; null where no column belongs to one. */
function groupHeadings(all) {
  if (!all.some((column) => column.over)) return null;
  const cells = [];
  for (const { over } of all) {
    if (cells.length && over && cells.at(-1).over === over) cells.at(-1).span += 1;
    else cells.push({ over, span: 1 });
  }
  return element("tr", { class: "groups" }, ...cells.map(({ over, span }) => (over
    ? element("th", { colspan: span, scope: "colgroup" }, element("span", {}, over)) : element("td", {}))));
}

function bestOf(rows, column) {
  const values = rows.filter(column.eligible ?? (() => true)).map(column.sort).filter(finite);
  if (!column.best || rows.length < 2 || !values.length) return null;
  return column.best === "low" ? Math.min(...values) : Math.max(...values);
}

function sorted(rows, column, direction) {
  const missing = (value) => value === null || value === undefined || value === "";
  return [...rows].sort((a, b) => {
    const x = column.sort(a), y = column.sort(b);
    if (missing(x) || missing(y)) return Number(missing(x)) - Number(missing(y));
    return direction * (typeof x === "string" ? x.localeCompare(y) : x - y);
  });
}

function cell(row, column, index, best) {
  const optimizer = index === 0 ? group().optimizers.find((entry) => entry.label === row.label) : null;
  const isBest = best !== null && best !== undefined && column.sort(row) === best && (column.eligible?.(row) ?? true);
  return element("td", { class: isBest ? "best" : null }, optimizer ? swatch(optimizer) : null, column.text(row),
    ...(column.remarks?.(row) ?? []).filter(Boolean).map((remark) => element("small", {}, remark)));
}

function drawTable() {
  const { table } = group();
  const all = columns(table);
  const rows = state.sort ? sorted(table.rows, all[state.sort.column], state.sort.direction) : table.rows;
  const heading = (column, index) => {
    const active = state.sort?.column === index;
    const direction = active && state.sort.direction === 1 ? -1 : 1;
    return element("th", { scope: "col", "aria-sort": active ? (state.sort.direction === 1 ? "ascending" : "descending") : "none" },
      button(column.name, { class: column.over ? "short" : null }, () => { state.sort = { column: index, direction }; drawTable(); }));
  };
  const bests = all.map((column) => bestOf(table.rows, column));
  replaceKeepingFocus(byId("table"), element("thead", {}, groupHeadings(all), element("tr", {}, ...all.map(heading))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...all.map((column, index) => cell(row, column, index, bests[index]))))));
  byId("table-note").replaceChildren("Mean ± sample standard deviation over the runs that reached the target, with the CPU seconds and steps it took; seconds per epoch over every "
    + "epoch of every run. Seconds are training only, evaluation excluded. The best of a column is marked, among those that always reached the target; click a heading to sort.");
}

function drawRatios() {
  const { table } = group();
  byId("ratios-part").hidden = table.rows.length < 2;
  const base = table.rows[state.reference];
  const all = ratioColumns(table, base);
  replaceKeepingFocus(byId("ratio-controls"), dropdown("Divided by those of", "reference", table.rows.map((row, index) => [index, row.label]), state.reference,
    (value) => { state.reference = value; drawRatios(); }));
  byId("ratios").replaceChildren(element("thead", {}, groupHeadings(all), element("tr", {}, ...all.map((column) => element("th", { scope: "col" }, element("span", {}, column.name))))),
    element("tbody", {}, ...table.rows.map((row) => element("tr", { class: row === base ? "chosen" : null }, ...all.map((column, index) => cell(row, column, index))))));
  byId("ratios-note").replaceChildren(base.targets.some((result) => result.hits) || !base.targets.length ? ""
    : `${base.label} never reached a target, so that there is nothing to divide by; choose another row.`);
}

/* What was compared */

function settingsText(settings) {
  return Object.entries(settings).map(([name, value]) => `${name} = ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
}

function drawSettings() {
  const { optimizers, commands } = group();
  const several = new Set(optimizers.map((optimizer) => optimizer.budget)).size > 1;
  byId("settings").replaceChildren(element("tbody", {}, ...optimizers.map((optimizer) => element("tr", {}, element("td", {}, swatch(optimizer), optimizer.label),
    element("td", {}, element("code", {}, settingsText(optimizer.settings) || "its defaults"), element("small", {}, capital(optimizer.chosen)),
      optimizer.rate ? element("small", {}, `${capital(optimizer.rate)}.`) : null,
      several ? element("small", {}, `Budget: ${optimizer.budget || "not recorded"}.`) : null)))));
  byId("commands").replaceChildren(...(commands.length ? commands.map((command) => element("pre", { tabindex: 0 }, command))
    : [element("p", { class: "note" }, "No command of a comparison was kept with these runs. The command of each run stands with it, at the end.")]));
}
