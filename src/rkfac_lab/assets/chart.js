/* Line charts by uPlot: bands, targets, reading values with the pointer or the arrow keys, zooming by dragging. */

const charts = new Map(); // from the element a chart stands in to its uPlot, its series, its ticks and how it was asked for

function css(name, slot) {
  const probe = slot === undefined ? document.documentElement : document.querySelector(`.colours .s${slot}`);
  return getComputedStyle(probe).getPropertyValue(name).trim();
}

/* Of curves in one place the lower ones are drawn wider, so that all are seen. */
function samePlace(one, other) {
  return one.points.length === other.points.length && one.points.every(({ x, y }, index) => x === other.points[index].x && y === other.points[index].y);
}

const DASHES = [[], [13, 5], [4, 4], [13, 5, 2, 5]];

function lineStyle(series) {
  return { stroke: css("--c", series.slot), width: (series.thin ? 1.4 : 2.2) + 3 * (series.beneath || 0), dash: DASHES[series.dash || 0] };
}

/* given: series [{name, slot, dash, thin, points [{x, y, low, high, note}]}], xLabel, yLabel or title, xSpacing and ySpacing (keys of SPACINGS), rules [{y, label}], tickX, tickY, formatX,
   formatY, height, limits of y, fromZero, wholeX, and onZoom, which is told when a part was chosen. */
function lineChart(host, given) {
  const spec = { xSpacing: "linear", ySpacing: "linear", rules: [], tickX: formatNumber, ...given };
  forget(host);
  const across = (x) => finite(x) && SPACINGS[spec.xSpacing].accepts(x), up = (y) => finite(y) && SPACINGS[spec.ySpacing].accepts(y);
  const bounded = (point) => (up(point.low) && up(point.high) ? point : { ...point, low: null, high: null });
  const series = spec.series.map((entry) => ({ ...entry, points: entry.points.filter(({ x, y }) => across(x) && up(y)).map(bounded) })).filter((entry) => entry.points.length)
    .map((entry, index, all) => ({ ...entry, beneath: all.slice(index + 1).filter((other) => samePlace(entry, other)).length }));
  if (!series.length) {
    host.replaceChildren(element("p", { class: "empty" }, spec.empty || "Nothing to draw: choose an optimizer above."));
    return;
  }
  const tip = element("div", { class: "tip", role: "status", hidden: true });
  const place = element("div", { class: "plot", role: "img", tabindex: 0,
    "aria-label": `${spec.yLabel || spec.title} against ${spec.xLabel}; arrow keys read the values` });
  host.replaceChildren(spec.yLabel ? element("div", { class: "y-title" }, spec.yLabel) : "", place, element("div", { class: "x-title" }, spec.xLabel), tip);
  const chart = { series, spec, tip, place, ticks: {} };
  chart.plot = new uPlot(options(chart, host), table(series), place);
  charts.set(host, chart);
  place.addEventListener("keydown", (event) => step(chart, event));
  place.addEventListener("blur", () => { tip.hidden = true; });
  observer.observe(host);
}

function forget(host) {
  for (const [known, { plot }] of charts) {
    if (known === host || !known.isConnected) { plot.destroy(); observer.unobserve(known); charts.delete(known); }
  }
}

/* Those that have a band. */
function spread(series) {
  return series.filter(({ points }) => points.some(({ low, high }) => high > low));
}

/* uPlot's table: one column of abscissas for all, the two edges of each band, then the curves, which lie on all bands. */
function table(series) {
  const column = (points, field) => points.map((point) => point[field] ?? null);
  return uPlot.join([...spread(series).map(({ points }) => [column(points, "x"), column(points, "low"), column(points, "high")]),
    ...series.map(({ points }) => [column(points, "x"), column(points, "y")])]);
}

function sizeOf(host, spec) {
  const width = Math.max(240, host.clientWidth);
  return { width, height: spec.height || Math.min(470, Math.max(280, width * 0.5)) };
}

function options(chart, host) {
  const { series, spec, ticks } = chart;
  const points = series.flatMap((entry) => entry.points);
  const across = points.map((point) => point.x);
  const first = across.reduce((a, b) => Math.min(a, b)), last = across.reduce((a, b) => Math.max(a, b));
  const x = first === last ? roomy(across, "linear", 0) : [spec.fromZero && spec.xSpacing === "linear" ? 0 : first, last];
  const heights = [...points.flatMap((point) => [point.y, point.low, point.high]), ...spec.rules.map((rule) => rule.y)];
  let y = roomy(heights.filter((value) => finite(value) && SPACINGS[spec.ySpacing].accepts(value)), spec.ySpacing, 0.05);
  if (spec.limits) y = [Math.max(y[0], spec.limits[0]), Math.min(y[1], spec.limits[1])];
  const dots = (entry) => !entry.thin && entry.points.length * 22 < host.clientWidth;
  const edge = { width: 0, spanGaps: true, points: { show: false } };
  const axis = (key, spacing, room, format, size) => ({ scale: key, size, font: "12px system-ui, sans-serif", stroke: () => css("--muted"), splits: splits(spacing, room),
    space: room, ...(key === "x" && spec.wholeX ? { incrs: WHOLE } : {}),
    filter: (plot, found) => found, grid: { stroke: () => css("--line"), width: 1, show: key === "y" }, ticks: { stroke: () => css("--muted"), width: 1, size: 5, show: key === "x" },
    border: { show: key === "x", stroke: () => css("--muted"), width: 1 }, values: (plot, found) => { ticks[key] = found; return found.map((tick) => format(tick)); } });
  return {
    ...sizeOf(host, spec), legend: { show: false }, padding: [12, spec.rules.length ? 58 : 14, 0, 0],
    scales: { x: scale(spec.xSpacing, x, [first, last]), y: scale(spec.ySpacing, y, []) },
    axes: [axis("x", spec.xSpacing, 90, spec.tickX, 30), axis("y", spec.ySpacing, 45, spec.tickY, 58)],
    series: [{}, ...spread(series).flatMap(() => [edge, edge]), ...series.map((entry) => ({ spanGaps: true, ...lineStyle(entry), stroke: () => css("--c", entry.slot),
      points: { show: dots(entry), size: 7, width: 1, stroke: () => css("--paper"), fill: () => css("--c", entry.slot), filter: null } }))],
    bands: spread(series).map((entry, index) => ({ series: [2 * index + 2, 2 * index + 1], fill: () => `${css("--c", entry.slot)}29` })),
    cursor: { y: false, drag: { x: true, y: true, dist: 8, setScale: Boolean(spec.onZoom) }, points: { show: false } },
    hooks: { setCursor: [(plot) => read(chart, plot)], drawAxes: [(plot) => drawRules(plot, spec)],
      setSelect: [(plot) => { if (spec.onZoom && plot.select.width > 0) spec.onZoom(); }] },
  };
}

/* Where the targets stand and where their names do: beside them, moved apart where they would overlap. */
function rulePlaces(plot, spec) {
  const { min, max } = plot.scales.y;
  let free = -Infinity;
  return spec.rules.filter((rule) => rule.y >= min && rule.y <= max).map((rule) => ({ label: rule.label, y: plot.valToPos(rule.y, "y") }))
    .sort((a, b) => a.y - b.y).map((rule) => ({ ...rule, text: (free = Math.max(free + 14, rule.y)) }));
}

function drawRules(plot, spec) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  ctx.save();
  Object.assign(ctx, { strokeStyle: css("--muted"), fillStyle: css("--muted"), lineWidth: ratio, textAlign: "left", textBaseline: "middle", font: `${12 * ratio}px system-ui, sans-serif` });
  ctx.setLineDash([2 * ratio, 4 * ratio]);
  for (const { y, text, label } of rulePlaces(plot, spec)) {
    ctx.beginPath();
    ctx.moveTo(bbox.left, bbox.top + y * ratio);
    ctx.lineTo(bbox.left + bbox.width, bbox.top + y * ratio);
    ctx.stroke();
    ctx.fillText(label, bbox.left + bbox.width + 8 * ratio, bbox.top + text * ratio);
  }
  ctx.restore();
}

/* Reading values. A series is read at the cursor unless it ended well before it or starts well after it. */

const MOST_ROWS = 10;

function readable(chart, x) {
  const { min, max } = chart.plot.scales.x, slack = 0.03 * (max - min);
  return chart.series.filter(({ points }) => x >= points[0].x - slack && x <= points.at(-1).x + slack)
    .map((series) => [series, series.points.reduce((best, point) => (Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best))]);
}

function read(chart, plot) {
  const { spec, tip, place } = chart, { idx, left, top } = plot.cursor;
  const x = plot.data[0][idx];
  const all = chart.plot && left >= 0 && finite(x) ? readable(chart, x) : [];
  tip.hidden = !all.length;
  if (!all.length) return;
  // Of many, those nearest to the pointer, in their own order.
  const distance = ([, point]) => Math.abs(plot.valToPos(point.y, "y") - top);
  const near = new Set([...all].sort((a, b) => distance(a) - distance(b)).slice(0, MOST_ROWS));
  const rows = all.filter((row) => near.has(row));
  tip.replaceChildren(element("div", { class: "at" }, spec.formatX(x)), ...rows.map(([series, point]) =>
    element("div", { class: "row" }, element("span", { class: `swatch s${series.slot} d${series.dash || 0}` }),
      element("span", {}, series.name), element("b", {}, spec.formatY(point.y)), point.note ? element("small", {}, point.note) : null)),
    all.length > rows.length ? element("div", { class: "at" }, `and ${all.length - rows.length} more`) : "");
  const at = plot.over.offsetLeft + plot.valToPos(x, "x");
  const beside = at + 18 + tip.offsetWidth > place.clientWidth ? at - 18 - tip.offsetWidth : at + 18;
  tip.style.transform = `translate(${Math.max(0, beside)}px, ${place.offsetTop + 12}px)`;
}

function step({ plot, tip }, event) {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") tip.hidden = true;
  if (!move) return;
  event.preventDefault();
  const from = tip.hidden ? (move > 0 ? -1 : 0) : plot.cursor.idx;
  const x = plot.data[0][Math.min(plot.data[0].length - 1, Math.max(0, from + move))];
  plot.setCursor({ left: plot.valToPos(x, "x"), top: plot.over.clientHeight / 2 });
}

/* Canvases know neither their width nor the colours of the screen: they are told when one of them changes. */
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = charts.get(target);
    if (chart && chart.plot.width !== sizeOf(target, chart.spec).width) chart.plot.setSize(sizeOf(target, chart.spec));
  }
});
for (const query of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(query).addEventListener("change", () => charts.forEach(({ plot }) => plot.redraw(false, true)));
}
