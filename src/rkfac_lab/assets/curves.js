/* The curves: what is shown against what, and the controls that say so. */

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
