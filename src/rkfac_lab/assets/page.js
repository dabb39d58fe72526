/* The page: one state, and one function a section that draws it from the state. */

const data = JSON.parse(byId("data").textContent);
const state = { group: 0, metric: null, axis: "epoch", scale: "log", time: "linear", seeds: "band", hidden: new Set(), view: null,
  sort: null, run: 0, layer: 0 };

function group() {
  return data.groups[state.group];
}

function isAccuracy(metric) {
  return metric.endsWith("accuracy");
}

function metricLabel(metric) {
  const words = metric.replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
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

function drawHeader() {
  const { workload, runs, optimizers, machines } = group();
  byId("title").replaceChildren(workload);
  const seeds = new Set(runs.map((run) => run.seed)).size;
  const statuses = new Map();
  for (const run of runs) statuses.set(run.status, (statuses.get(run.status) || 0) + 1);
  const outcome = [...statuses].map(([status, count]) => `${count} ${status}`).join(", ");
  byId("compared").replaceChildren(`${optimizers.map((optimizer) => optimizer.label).join(", ")} compared over `
    + `${plural(seeds, "seed")}: ${plural(runs.length, "run")} (${outcome}).`);
  const choices = data.groups.map((entry, index) => [index, entry.workload]);
  replaceKeepingFocus(byId("workloads"), ...(choices.length > 1 ? [segments("Workload", choices, state.group, chooseGroup)] : []));
  const remarks = runs.flatMap((run) => run.remarks.map((remark) => `${run.name}: ${remark}`));
  if (machines.length > 1) remarks.unshift("These runs come from different machines, thread counts or versions: their seconds do not compare.");
  byId("warnings").replaceChildren(...remarks.map((remark) => element("li", {}, remark)));
  byId("promises").replaceChildren(...group().promises.map((promise) => element("li", {}, promise.sentence)));
  byId("highlights").replaceChildren(...highlights(group().table));
  byId("facts").replaceChildren(...machines.flatMap(machineFacts));
  byId("made").replaceChildren(`Page made ${data.created} by rkfac ${data.version}.`);
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
      `${formatSeconds(result.seconds.mean)}, reached by ${result.hits} of ${plural(result.runs, "run")}`));
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

/* Table 1 */

/* A column: its heading (under `over` where it belongs to a group), the number it sorts by, its text, a remark in small
   print, whether low or high is best (absent: neither), and which rows may be best (absent: all): a mean time over a
   few lucky runs is not marked. */
function columns(table) {
  const { targets, rows } = table;
  const last = targets.length - 1;
  const oneMetric = new Set(targets.map((target) => target.metric + target.mode)).size === 1;
  const value = (target) => metricValue(target.metric, target.value, "short");
  const short = (target) => (oneMetric ? `${target.mode === "max" ? "≥" : "≤"} ${value(target)}` : targetLabel(target));
  const missed = ({ hits, runs }) => (hits > 0 && hits < runs ? `${hits} of ${runs} runs` : "");
  const metric = metricLabel(table.metric).toLowerCase();
  const always = (index) => (row) => row.targets[index].hits === row.targets[index].runs;
  return [
    { name: "Optimizer", sort: (row) => row.label, text: (row) => row.label },
    ...targets.map((target, index) => ({ over: oneMetric ? `Seconds to ${metricLabel(target.metric).toLowerCase()}` : "Seconds to", name: short(target),
      best: "low", eligible: always(index), sort: (row) => row.targets[index].seconds?.mean, text: (row) => spreadText(row.targets[index].seconds, timeDecimals),
      remark: (row) => missed(row.targets[index]) })),
    { name: "Seconds per epoch", best: "low", sort: (row) => row.epoch_seconds?.mean, text: (row) => spreadText(row.epoch_seconds, timeDecimals) },
    ...(last < 0 ? [] : [
      { name: `Runs that hit ${value(targets[last])}`, sort: (row) => row.targets[last].hits / row.targets[last].runs,
        text: (row) => `${row.targets[last].hits} of ${row.targets[last].runs}` },
      { name: `Steps to ${value(targets[last])}`, best: "low", eligible: always(last), sort: (row) => row.targets[last].steps?.mean,
        text: (row) => spreadText(row.targets[last].steps, () => 0) },
      { name: `CPU seconds to ${value(targets[last])}`, best: "low", eligible: always(last), sort: (row) => row.targets[last].cpu_seconds?.mean,
        text: (row) => spreadText(row.targets[last].cpu_seconds, timeDecimals) }]),
    { name: `Best ${metric}${isAccuracy(table.metric) ? ", %" : ""}`, best: table.mode === "max" ? "high" : "low", sort: (row) => row.best?.mean,
      text: (row) => (isAccuracy(table.metric) ? spreadText(row.best, () => 2, 100) : spreadText(row.best, timeDecimals)) },
    ...(rows.some((row) => row.notes) ? [{ name: "Notes", sort: (row) => row.notes, text: (row) => row.notes }] : []),
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

function drawTable() {
  const { table, optimizers } = group();
  const all = columns(table);
  const rows = state.sort ? sorted(table.rows, all[state.sort.column], state.sort.direction) : table.rows;
  const heading = (column, index) => {
    const active = state.sort?.column === index;
    const direction = active && state.sort.direction === 1 ? -1 : 1;
    return element("th", { scope: "col", "aria-sort": active ? (state.sort.direction === 1 ? "ascending" : "descending") : "none" },
      button(column.name, { class: column.over ? "short" : null }, () => { state.sort = { column: index, direction }; drawTable(); }));
  };
  const bests = all.map((column) => bestOf(table.rows, column));
  const line = (row) => element("tr", {}, ...all.map((column, index) => {
    const optimizer = index === 0 ? optimizers.find((entry) => entry.label === row.label) : null;
    const isBest = bests[index] !== null && column.sort(row) === bests[index] && (column.eligible?.(row) ?? true);
    return element("td", { class: isBest ? "best" : null }, optimizer ? swatch(optimizer) : null, column.text(row),
      column.remark?.(row) ? element("small", {}, column.remark(row)) : null);
  }));
  replaceKeepingFocus(byId("table"), element("thead", {}, groupHeadings(all), element("tr", {}, ...all.map(heading))), element("tbody", {}, ...rows.map(line)));
  byId("table-note").replaceChildren("Mean ± sample standard deviation over the runs that reached the target; seconds per epoch over every "
    + "epoch of every run. Seconds are training only, evaluation excluded. The best of a column is marked, among those that always reached the target; click a heading to sort.");
}

/* Curves */

/* Log seconds when the slowest optimizer took so long that the others would be squeezed to the left. */
function timeScale(runs) {
  const ends = runs.map((run) => run.epochs.train_seconds.at(-1)).filter(finite);
  return Math.max(...ends) > 6 * Math.min(...ends) ? "log" : "linear";
}

/* The summary over seeds comes with the page, computed by the same code as the printed figures. */
function bandPoints(band, metric, axis) {
  return (band?.epoch ?? []).map((epoch, index) => {
    const [low, high, seconds] = [band.low[index], band.high[index], band.seconds[index]];
    const range = high > low ? `${metricValue(metric, low)} to ${metricValue(metric, high)} · ` : "";
    return { x: axis === "epoch" ? epoch : seconds, y: band.middle[index], low, high, note: `${range}epoch ${formatNumber(epoch)} · ${formatSeconds(seconds)}` };
  });
}

function runPoints(run, metric, axis) {
  return run.epochs.epoch.map((epoch, index) => {
    const seconds = run.epochs.train_seconds[index];
    return { x: axis === "epoch" ? epoch : seconds, y: run.epochs[metric]?.[index], low: null, high: null, note: `epoch ${formatNumber(epoch)} · ${formatSeconds(seconds)}` };
  });
}

function series() {
  const { optimizers, runs } = group();
  return optimizers.filter((optimizer) => !state.hidden.has(optimizer.label)).flatMap((optimizer) => {
    const style = { slot: optimizer.slot, dash: optimizer.dash };
    if (state.seeds === "band") return [{ name: optimizer.label, ...style, points: bandPoints(optimizer.bands[state.metric], state.metric, state.axis) }];
    return runs.filter((run) => run.label === optimizer.label).map((run) => (
      { name: `${optimizer.label}, seed ${run.seed}`, ...style, thin: true, points: runPoints(run, state.metric, state.axis) }));
  });
}

function change(part) {
  return (value) => {
    state[part] = value;
    state.view = null;
    drawCurves();
  };
}

function drawControls() {
  const spacings = [["linear", "Linear"], ["log", "Log"]];
  const reset = button("Reset zoom", { class: "plain", id: "reset-zoom" }, () => change("view")(null));
  replaceKeepingFocus(byId("controls"),
    segments("Shown", group().metrics.map((metric) => [metric, metricLabel(metric)]), state.metric, change("metric")),
    segments("Against", [["epoch", "Epochs"], ["seconds", "Seconds"]], state.axis, change("axis")),
    segments("Scale", spacings, state.scale, change("scale")),
    ...(state.axis === "seconds" ? [segments("Time scale", spacings, state.time, change("time"))] : []),
    segments("Seeds", [["band", "Median and range"], ["each", "Every run"]], state.seeds, change("seeds")), ...(state.view ? [reset] : []));
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
  drawControls();
  const rules = group().table.targets.filter((target) => target.metric === state.metric)
    .map((target) => ({ y: target.value, label: metricValue(target.metric, target.value, "short") }));
  const ySpacing = state.scale === "log" && isAccuracy(state.metric) ? "error" : state.scale;
  const xSpacing = state.axis === "seconds" ? state.time : "linear";
  lineChart(byId("curves"), { series: series(), rules, xSpacing, ySpacing, view: state.view, wholeX: state.axis === "epoch",
    fromZero: state.axis === "seconds", xLabel: (state.axis === "epoch" ? "Epoch" : "Training seconds") + SCALE_REMARK[xSpacing],
    yLabel: metricLabel(state.metric) + SCALE_REMARK[ySpacing],
    tickY: (value) => metricValue(state.metric, value, "short"), formatY: (value) => metricValue(state.metric, value),
    formatX: (value) => (state.axis === "epoch" ? `Epoch ${formatNumber(value)}` : `${formatSeconds(value)} of training`),
    onZoom: (view) => { state.view = view; drawCurves(); } });
  const how = "Point to read values, drag to zoom, click a name above to hide it.";
  byId("curves-note").replaceChildren(state.seeds === "band"
    ? `Line: median over seeds at each evaluation; band: smallest to largest; dotted: the targets. Against seconds, an evaluation stands at its median training time. ${how}`
    : `One line a run. ${how}`);
}

function chooseGroup(index) {
  Object.assign(state, { group: index, metric: data.groups[index].metrics[0], time: timeScale(data.groups[index].runs),
    hidden: new Set(), view: null, sort: null, run: 0, layer: 0 });
  drawHeader();
  drawTable();
  drawCurves();
  drawTime();
  drawLayers();
  drawRuns();
}
