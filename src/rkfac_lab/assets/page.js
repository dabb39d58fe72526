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

function chooseGroup(index) {
  const { metrics, runs, table } = data.groups[index];
  Object.assign(state, { group: index, metric: metrics[0], axis: "seconds", time: timeScale(runs), hidden: new Set(), sort: null,
    reference: Math.max(0, table.rows.findIndex((row) => row.label === table.reference)), run: 0, layer: 0 });
  for (const draw of [drawHeader, drawTable, drawRatios, drawSettings, drawCurves, drawTime, drawLayers, drawRuns]) draw();
}
