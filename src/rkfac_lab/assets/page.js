/* The page: one state, and one function a section that draws it from the state. */

const data = JSON.parse(byId("data").textContent);
const state = { group: 0, metric: null, axis: "seconds", scale: "log", time: "linear", seeds: "band", hidden: new Set(),
  sort: null, reference: null, run: 0, layer: 0 };

function group() {
  return data.groups[state.group];
}

function isAccuracy(metric) {
  return metric.endsWith("accuracy");
}

function capital(words) {
  return words.charAt(0).toUpperCase() + words.slice(1);
}

function metricLabel(metric) {
  return capital(metric.replaceAll("_", " "));
}

function metricValue(metric, value, digits) {
  if (isAccuracy(metric)) return digits === "short" ? `${formatNumber(100 * value)} %` : formatPercent(value);
  return formatNumber(value, digits === "short" ? 4 : 6);
}

function targetLabel(target) {
  const metric = isAccuracy(target.metric) ? "accuracy" : target.metric.replaceAll("_", " ");
  return `${metric} ${target.mode === "max" ? "≥" : "≤"} ${metricValue(target.metric, target.value, "short")}`;
}

function swatch(optimizer) {
  return element("span", { class: `swatch s${optimizer.slot} d${optimizer.dash}` });
}

/* Header */

function title(entry) {
  const alone = data.groups.filter((other) => other.workload === entry.workload).length === 1;
  return alone ? entry.workload : `${entry.workload}, ${entry.budget || "budget not recorded"}`;
}

function drawHeader() {
  const { workload, budget, runs, optimizers, machines, warnings } = group();
  byId("title").replaceChildren(workload);
  const seeds = new Set(runs.map((run) => run.seed)).size;
  const statuses = new Map();
  for (const run of runs) statuses.set(run.status, (statuses.get(run.status) || 0) + 1);
  const outcome = [...statuses].map(([status, count]) => `${count} ${status}`).join(", ");
  byId("compared").replaceChildren(`${optimizers.map((optimizer) => optimizer.label).join(", ")} compared over `
    + `${plural(seeds, "seed")}: ${plural(runs.length, "run")} (${outcome})${budget ? ` of ${budget}` : ""}.`);
  const choices = data.groups.map((entry, index) => [index, title(entry)]);
  replaceKeepingFocus(byId("workloads"), ...(choices.length > 1 ? [segments("Workload", choices, state.group, chooseGroup)] : []));
  const remarks = runs.flatMap((run) => run.remarks.map((remark) => `${run.name}: ${remark}`));
  byId("warnings").replaceChildren(...warnings.map((warning) => element("li", {}, element("b", {}, warning))), ...remarks.map((remark) => element("li", {}, remark)));
  byId("promises").replaceChildren(...group().promises.map((promise) => element("li", {}, promise.sentence)));
  byId("highlights").replaceChildren(...highlights(group().table));
  byId("facts").replaceChildren(...machines.flatMap(machineFacts));
  byId("made").replaceChildren(`Page made ${data.created} by rkfac ${data.version}. Charts by uPlot (MIT licence).`);
}

function card(what, value, more) {
  return element("div", { class: "card" }, element("div", { class: "what" }, what), element("div", { class: "value" }, value),
    element("div", { class: "more" }, more));
}

function lowest(rows, value) {
  const usable = rows.filter((row) => finite(value(row)));
  return usable.length ? usable.reduce((best, row) => (value(row) < value(best) ? row : best)) : null;
}

/* The hardest target that some optimizer reached in every run, else the hardest reached at all; and who was fastest
   among those that reached it most often, so that one lucky run does not win. */
function fastest(table) {
  const share = (row, index) => row.targets[index].hits / row.targets[index].runs;
  const most = (index) => Math.max(...table.rows.map((row) => share(row, index)));
  const places = table.targets.map((_, index) => index).reverse();
  const hardest = places.find((index) => most(index) === 1) ?? places.find((index) => most(index) > 0);
  if (hardest === undefined) return null;
  const often = table.rows.filter((row) => share(row, hardest) === most(hardest));
  return { target: table.targets[hardest], winner: lowest(often, (row) => row.targets[hardest].seconds?.mean), index: hardest };
}

function highlights(table) {
  const cards = [];
  const found = fastest(table);
  if (found) {
    const result = found.winner.targets[found.index];
    cards.push(card(`Fastest to ${targetLabel(found.target)}`, found.winner.label,
      `${formatSeconds(result.seconds.mean)}, ${result.steps.mean.toFixed(0)} steps, reached by ${result.hits} of ${plural(result.runs, "run")}`));
  }
  const sign = table.mode === "max" ? -1 : 1;
  const best = lowest(table.rows, (row) => (row.best ? sign * row.best.mean : null));
  if (best) {
    cards.push(card(`Best ${metricLabel(table.metric).toLowerCase()}`, best.label, `${metricValue(table.metric, best.best.mean)}, mean over runs`));
  }
  const cheapest = lowest(table.rows, (row) => row.epoch_seconds?.mean);
  if (cheapest) cards.push(card("Cheapest epoch", cheapest.label, `${formatSeconds(cheapest.epoch_seconds.mean)} per epoch`));
  return cards;
}

function machineFacts({ name, size, versions, dates }) {
  const facts = [["Machine", name], ["Device", size], ["Versions", versions], ["Run on", dates]];
  return facts.filter(([, value]) => value).map(([key, value]) => element("div", {}, element("dt", {}, key), element("dd", {}, value)));
}

/* Tables */

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

/* Curves */

const AXES = [["seconds", "Seconds", "Training seconds"], ["cpu_seconds", "CPU seconds", "CPU seconds of training"], ["step", "Steps", "Step"], ["epoch", "Epochs", "Epoch"]];

function isTime(axis) {
  return axis.endsWith("seconds");
}

/* Log seconds when the slowest optimizer took so long that the others would be squeezed to the left. */
function timeScale(runs) {
  const ends = runs.map((run) => run.epochs.seconds.at(-1)).filter(finite);
  return Math.max(...ends) > 6 * Math.min(...ends) ? "log" : "linear";
}

function where(places, index) {
  return `${formatSeconds(places.seconds[index])} · step ${formatNumber(places.step[index], 7)} · epoch ${formatNumber(places.epoch[index])}`;
}

/* The summary over seeds comes with the page, computed by the same code as the printed figures. */
function bandPoints(band, metric, axis) {
  return (band?.middle ?? []).map((y, index) => {
    const [low, high] = [band.low[index], band.high[index]];
    const range = high > low ? `${metricValue(metric, low)} to ${metricValue(metric, high)} · ` : "";
    return { x: band[axis][index], y, low, high, step: band.step[index], note: `${range}${where(band, index)}` };
  });
}

function runPoints({ epochs }, metric, axis) {
  return epochs.step.map((step, index) => ({ x: epochs[axis][index], y: epochs[metric]?.[index], low: null, high: null, step, note: where(epochs, index) }));
}

function series() {
  const { optimizers, runs } = group();
  const all = optimizers.filter((optimizer) => !state.hidden.has(optimizer.label)).flatMap((optimizer) => {
    const style = { slot: optimizer.slot, dash: optimizer.dash };
    if (state.seeds === "band") return [{ name: optimizer.label, ...style, points: bandPoints(optimizer.bands[state.metric], state.metric, state.axis) }];
    return runs.filter((run) => run.label === optimizer.label).map((run) => (
      { name: `${optimizer.label}, seed ${run.seed}`, ...style, thin: true, points: runPoints(run, state.metric, state.axis) }));
  });
  return all.map((entry) => ({ ...entry, same: JSON.stringify(entry.points.map(({ step, y }) => [step, y])) }));
}

/* Curves that are the same at every evaluation, said in words: no colour shows two lines in one place. */
function equalCurves(shown) {
  const groups = new Map();
  for (const entry of shown.filter((one) => one.points.length)) groups.set(entry.same, [...(groups.get(entry.same) ?? []), entry.name]);
  const metric = metricLabel(state.metric).toLowerCase();
  return [...groups.values()].filter((names) => names.length > 1).map((names) => `${names.slice(0, -1).join(", ")} and ${names.at(-1)} have exactly the same ${metric} at every evaluation.`
    + `${isTime(state.axis) ? "" : " Where one lies on the other, the lower one is drawn wider."}`);
}

function change(part) {
  return (value) => {
    state[part] = value;
    drawCurves();
  };
}

function drawControls() {
  const spacings = [["linear", "Linear"], ["log", "Log"]];
  const axes = AXES.filter(([axis]) => group().optimizers.every((optimizer) => axis in optimizer.bands[state.metric]));
  replaceKeepingFocus(byId("controls"),
    segments("Shown", group().metrics.map((metric) => [metric, metricLabel(metric)]), state.metric, change("metric")),
    segments("Against", axes, state.axis, change("axis")),
    segments("Scale", spacings, state.scale, change("scale")),
    ...(isTime(state.axis) ? [segments("Time scale", spacings, state.time, change("time"))] : []),
    segments("Seeds", [["band", "Median and range"], ["each", "Every run"]], state.seeds, change("seeds")),
    button("Reset zoom", { class: "plain", id: "reset-zoom", hidden: true }, drawCurves));
  const name = group().workload.replaceAll(/[^A-Za-z0-9.-]+/g, "-");
  replaceKeepingFocus(byId("downloads"),
    button("Curves as CSV", { class: "plain", id: "curves-csv" }, () => download(`${name}-curves.csv`, "text/csv", curvesCsv(group()))),
    button("Table as CSV", { class: "plain", id: "table-csv" }, () => download(`${name}-table.csv`, "text/csv", group().csv)),
    button("Chart as SVG", { class: "plain", id: "chart-svg", disabled: !charts.has(byId("curves")) },
      () => download(`${name}-${state.metric}-${state.axis}.svg`, "image/svg+xml", chartSvg(charts.get(byId("curves"))))));
  replaceKeepingFocus(byId("legend"), ...group().optimizers.map((optimizer) => {
    const entry = button("", { "aria-pressed": String(!state.hidden.has(optimizer.label)), title: "Show or hide" }, () => {
      if (!state.hidden.delete(optimizer.label)) state.hidden.add(optimizer.label);
      drawCurves();
    });
    entry.append(swatch(optimizer), optimizer.label);
    return entry;
  }));
}

const SCALE_REMARK = { linear: "", log: " (log scale)", error: " (spaced by the log of the error)" };

function drawCurves() {
  const rules = group().table.targets.filter((target) => target.metric === state.metric)
    .map((target) => ({ y: target.value, label: metricValue(target.metric, target.value, "short") }));
  const ySpacing = state.scale === "log" && isAccuracy(state.metric) ? "error" : state.scale;
  const xSpacing = isTime(state.axis) ? state.time : "linear";
  const shown = series();
  const [, , xLabel] = AXES.find(([axis]) => axis === state.axis);
  lineChart(byId("curves"), { series: shown, rules, xSpacing, ySpacing, wholeX: !isTime(state.axis), fromZero: state.axis !== "epoch",
    xLabel: xLabel + SCALE_REMARK[xSpacing], yLabel: metricLabel(state.metric) + SCALE_REMARK[ySpacing],
    tickY: (value) => metricValue(state.metric, value, "short"), formatY: (value) => metricValue(state.metric, value),
    formatX: (value) => (isTime(state.axis) ? `${formatSeconds(value)}${state.axis === "seconds" ? "" : " of CPU time"}` : `${xLabel} ${formatNumber(value, 7)}`),
    onZoom: () => { byId("reset-zoom").hidden = false; } });
  drawControls();
  byId("equal").replaceChildren(...equalCurves(shown).map((sentence) => element("p", {}, sentence)));
  const how = "Point to read values, drag to zoom, click a name above to hide it.";
  byId("curves-note").replaceChildren(state.seeds === "band"
    ? `Line: median over seeds at each evaluation; band: smallest to largest; dotted: the targets. Against time, an evaluation stands at its median. ${how}`
    : `One line a run. ${how}`);
}

function chooseGroup(index) {
  const { metrics, runs, table } = data.groups[index];
  Object.assign(state, { group: index, metric: metrics[0], axis: "seconds", time: timeScale(runs), hidden: new Set(), sort: null,
    reference: Math.max(0, table.rows.findIndex((row) => row.label === table.reference)), run: 0, layer: 0 });
  for (const draw of [drawHeader, drawTable, drawRatios, drawSettings, drawCurves, drawTime, drawLayers, drawRuns]) draw();
}
