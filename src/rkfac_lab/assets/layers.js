/* What the optimizers say about themselves: time by phase, each layer over training, and the details of every run. */

const PHASES = [["statistics", "Statistics"], ["refresh", "Refresh"], ["apply", "Apply"]];

function phaseSeconds(run) {
  const parts = {};
  for (const [phase] of PHASES) parts[phase] = run.layers.items.reduce((sum, layer) => sum + (layer.seconds?.[phase] || 0), 0);
  return parts;
}

/* Mean seconds per epoch of one optimizer by phase; the phases' clock stops at the last layers record. */
function epochParts(runs) {
  const usable = runs.filter((run) => run.epochs.epoch.length);
  if (!usable.length) return null;
  const shares = usable.map((run) => {
    const measured = run.layers.items.length > 0;
    const count = (measured ? run.layers : run.epochs).epoch.at(-1);
    const total = (measured ? run.layers : run.epochs).seconds.at(-1);
    const own = measured ? phaseSeconds(run) : {};
    const spent = Object.values(own).reduce((sum, value) => sum + value, 0);
    const parts = { ...own, rest: Math.max(0, total - spent) };
    return Object.fromEntries(Object.entries(parts).map(([key, value]) => [key, value / count]));
  });
  return Object.fromEntries([...PHASES.map(([key]) => key), "rest"].map((key) => [key, mean(shares.map((share) => share[key] || 0))]));
}

/* Rows of stacked bars: rows [{name, parts: {key: seconds}}], keys [[key, label]]. */
function stackedBars(host, rows, keys) {
  const total = (row) => keys.reduce((sum, [key]) => sum + (row.parts[key] || 0), 0);
  const largest = Math.max(...rows.map(total)) || 1;
  const bar = (row) => ([key, label]) => {
    const made = element("span", { class: `bar phase-${key}`, "data-phase": key, title: `${row.name}: ${label} ${formatSeconds(row.parts[key] || 0)}` });
    made.style.width = `${(100 * (row.parts[key] || 0)) / largest}%`;
    return made;
  };
  const line = (row) => element("div", { class: "bars", "data-row": row.name }, element("span", { class: "name" }, row.name),
    element("span", { class: "track" }, element("span", { class: "stack" }, ...keys.map(bar(row))), element("span", { class: "total" }, formatSeconds(total(row)))));
  host.replaceChildren(element("div", { class: "legend" }, ...keys.map(([key, label]) => element("span", { class: "key" }, element("span", { class: `swatch block phase-${key}` }), label))),
    ...rows.map(line));
}

function drawTime() {
  const { optimizers, runs } = group();
  const rows = optimizers.map(({ label }) => ({ name: label, parts: epochParts(runs.filter((run) => run.label === label)) })).filter((row) => row.parts);
  const measured = runs.some((run) => run.layers.items.length);
  byId("time").hidden = !measured;
  if (measured) stackedBars(byId("phases"), rows, [...PHASES, ["rest", "The rest"]]);
}

/* Layers */

const LAYER_CHARTS = [
  { title: "Rank kept", about: "Eigenvectors kept of each factor.", fields: ["rank_input", "rank_output"], limits: [0, Infinity], format: formatNumber },
  { title: "Share of the trace captured", about: "The eigenvalues kept, added up, as a share of all eigenvalues of the factor: 100 % means that nothing is left to the damping alone.", fields: ["captured_input", "captured_output"], limits: [0, 1], format: (value) => formatPercent(value, 2),
    tick: (value) => `${formatNumber(100 * value)} %` },
  { title: "Damping", about: "What is added to every eigenvalue of the factor.", fields: ["damping_input", "damping_output"], spacing: "log", format: formatNumber },
  { title: "Clip factor", about: "What the step of this layer was multiplied by; 1 where it was short enough.", fields: ["clip"], format: formatNumber },
];
const FIELD_NAMES = { rank_input: "Input factor", captured_input: "Input factor", damping_input: "Input factor",
  rank_output: "Output factor", captured_output: "Output factor", damping_output: "Output factor", clip: "Clip factor" };

/* Such as "features.3 Conv2d 64×576": the module, and the size of its gradient as K-FAC sees it. */
function layerName({ name, kind, output_dim, input_dim }) {
  return `${name} ${kind ?? ""}${finite(output_dim) && finite(input_dim) ? ` ${output_dim}×${input_dim}` : ""}`;
}

function layerChart(layer, times, chart) {
  const host = element("div", { class: "multiple", "data-chart": chart.title }, element("h3", {}, chart.title), element("p", { class: "note" }, chart.about));
  const drawing = element("div", { class: "chart" });
  host.append(drawing);
  const curves = chart.fields.map((field, slot) => ({ name: FIELD_NAMES[field], slot, dash: slot,
    points: times.epoch.map((epoch, index) => ({ x: epoch, y: layer[field][index], low: null, high: null })).filter((point) => finite(point.y)) }))
    .filter((curve) => curve.points.length);
  const legend = element("div", { class: "legend" }, ...curves.map((curve) =>
    element("span", { class: "key" }, element("span", { class: `swatch s${curve.slot} d${curve.dash}` }), curve.name)));
  if (curves.length > 1) drawing.before(legend);
  return [host, () => lineChart(drawing, { series: curves, ySpacing: chart.spacing || "linear", limits: chart.limits, height: 220, xLabel: "Epoch", wholeX: true,
    title: chart.title, tickY: chart.tick || chart.format, formatY: chart.format, formatX: (value) => `Epoch ${formatNumber(value)}`, empty: "Not recorded for this layer." })];
}

function drawLayers() {
  const runs = group().runs.filter((run) => run.layers.items.length);
  byId("layers").hidden = runs.length === 0;
  if (!runs.length) return;
  const run = runs[state.run];
  const covered = run.layers.items.filter((layer) => layer.covered);
  const choices = runs.map((entry, index) => [index, `${entry.label}, seed ${entry.seed}`]);
  state.layer = Math.max(0, Math.min(state.layer, covered.length - 1));
  replaceKeepingFocus(byId("layer-controls"),
    dropdown("Run", "layer-run", choices, state.run, (value) => { state.run = value; drawLayers(); }),
    dropdown("Layer", "layer-name", covered.map((layer, index) => [index, layerName(layer)]), state.layer, (value) => { state.layer = value; drawLayers(); }));
  const charts = covered.length ? LAYER_CHARTS.map((chart) => layerChart(covered[state.layer], run.layers, chart)) : [];
  byId("layer-charts").replaceChildren(...charts.map(([host]) => host));
  for (const [, draw] of charts) draw();
  const timed = covered.filter((layer) => layer.seconds);
  if (timed.length) stackedBars(byId("layer-phases"), timed.map((layer) => ({ name: layerName(layer), parts: layer.seconds })), PHASES);
  else byId("layer-phases").replaceChildren(element("p", { class: "empty" }, "No times were recorded."));
  drawLayerTable(run, covered);
  drawUncovered(run.layers.items.filter((layer) => !layer.covered));
}

function drawLayerTable(run, covered) {
  const last = (layer, field) => layer[field].at(-1);
  const both = (layer, stem, format) => `${format(last(layer, `${stem}_input`))} / ${format(last(layer, `${stem}_output`))}`;
  const names = ["Layer", "Rank in / out", "Trace captured in / out", "Damping in / out", "Clip", "Seconds", "Memory", "Failures"];
  const sum = (parts) => (parts ? Object.values(parts).reduce((total, value) => total + value, 0) : null);
  const rows = covered.map((layer, index) => element("tr", { class: index === state.layer ? "chosen" : null }, ...[
    button(layerName(layer), { class: "link" }, () => { state.layer = index; drawLayers(); }), both(layer, "rank", formatNumber),
    both(layer, "captured", (value) => formatPercent(value, 1)), both(layer, "damping", (value) => formatNumber(value, 3)),
    formatNumber(last(layer, "clip"), 3), formatNumber(sum(layer.seconds), 3), formatBytes(sum(layer.bytes)), formatNumber(layer.failures),
  ].map((cell) => element("td", {}, cell))));
  replaceKeepingFocus(byId("layer-table"), element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, element("span", {}, name))))),
    element("tbody", {}, ...rows));
}

function drawUncovered(layers) {
  if (!layers.length) { byId("uncovered").replaceChildren(); return; }
  byId("uncovered").replaceChildren(element("h3", {}, "Layers left to the fallback rule"),
    element("ul", {}, ...layers.map((layer) => element("li", {}, element("b", {}, layer.name),
      ` (${layer.kind}${layer.parameters ? `, ${plural(layer.parameters, "parameter")}` : ""}): ${layer.reason || "no reason given"}`))));
}

/* Runs */

function targetLine(target) {
  return element("li", {}, target.reached
    ? `${targetLabel(target)}: reached after ${formatSeconds(target.seconds)}, in epoch ${formatNumber(target.epoch)}`
    : `${targetLabel(target)}: not reached`);
}

function collapsible(title, value) {
  return element("details", {}, element("summary", {}, title), element("pre", { tabindex: 0 }, JSON.stringify(value, null, 2)));
}

function drawRuns() {
  const { runs, optimizers } = group();
  byId("runs").replaceChildren(...runs.map((run) => {
    const count = run.epochs.epoch.at(-1) ?? 0;
    const facts = `${plural(Number(formatNumber(count)), "epoch")} · ${formatSeconds(run.epochs.seconds.at(-1))} of training`;
    return element("details", { class: "run" },
      element("summary", {}, swatch(optimizers.find((entry) => entry.label === run.label)), element("span", { class: "grow" }, `${run.label}, seed ${run.seed}`),
        element("span", { class: "note" }, facts), element("span", { class: run.status === "finished" ? "status" : "status other" }, run.status)),
      element("div", { class: "inside" }, element("h4", {}, "Targets"),
        run.targets.length ? element("ul", {}, ...run.targets.map(targetLine)) : element("p", { class: "note" }, "This run had no targets."),
        ...run.remarks.map((remark) => element("p", { class: "note" }, remark)), element("p", { class: "note" }, `Folder: ${run.name}`),
        ...(run.command ? [element("h4", {}, "The command that repeats it"), element("pre", { tabindex: 0 }, run.command)] : []),
        collapsible("Configuration", run.config), collapsible("Environment", run.environment)));
  }));
}

chooseGroup(0);
