/* What can be taken away: the curves and the table as CSV, a chart as SVG. */

function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/* A cell that a spreadsheet takes for text; numbers stay numbers. */
function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^ *[=+\-@\t\r\n]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/* Every evaluation of every run, with all digits. */
function curvesCsv({ runs, metrics }) {
  const columns = ["epoch", "step", "seconds", "cpu_seconds", ...metrics];
  const lines = runs.flatMap((run) => run.epochs.epoch.map((_, index) =>
    [run.label, run.seed, run.name, ...columns.map((column) => run.epochs[column][index])]));
  return [["optimizer", "seed", "run", ...columns], ...lines].map((line) => `${line.map(csvCell).join(",")}\n`).join("");
}

/* A chart as it stands on the screen, zoomed or not: axes, targets, bands, curves and their names. */
function chartSvg({ plot, series, spec, ticks }) {
  const { width: boxWidth, height: boxHeight } = plot.over.getBoundingClientRect();
  const left = plot.over.offsetLeft, top = 22 * (series.length + 1) + 12;
  const right = left + boxWidth, bottom = top + boxHeight;
  const x = (value) => left + plot.valToPos(value, "x"), y = (value) => top + plot.valToPos(value, "y");
  const places = (points, field) => points.map((point) => `${x(point.x).toFixed(2)},${y(point[field]).toFixed(2)}`);
  const ink = css("--ink"), muted = css("--muted"), grid = css("--line");
  const text = (attributes, ...words) => shape("text", { fill: muted, ...attributes }, ...words);
  const inside = ([low, high]) => (tick) => tick >= low && tick <= high;
  const range = ({ min, max }) => [min, max];
  const picture = shape("svg", { viewBox: `0 0 ${plot.width} ${bottom + 46}`, width: plot.width, height: bottom + 46,
    "font-family": "system-ui, sans-serif", "font-size": 12 }, shape("rect", { width: "100%", height: "100%", fill: css("--paper") }),
    shape("clipPath", { id: "inside" }, shape("rect", { x: left, y: top, width: boxWidth, height: boxHeight })));
  series.forEach((entry, index) => {
    const { stroke, width, dash } = lineStyle(entry);
    picture.append(shape("line", { x1: left, x2: left + 30, y1: 22 * index + 14, y2: 22 * index + 14, stroke, "stroke-width": Math.min(width, 6), "stroke-dasharray": dash.join(" ") || null }),
      text({ x: left + 40, y: 22 * index + 18, fill: ink }, entry.name));
  });
  for (const tick of ticks.y.filter(inside(range(plot.scales.y)))) {
    picture.append(shape("line", { x1: left, x2: right, y1: y(tick), y2: y(tick), stroke: grid }), text({ x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, spec.tickY(tick)));
  }
  for (const tick of ticks.x.filter(inside(range(plot.scales.x)))) {
    picture.append(shape("line", { x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 5, stroke: muted }), text({ x: x(tick), y: bottom + 19, "text-anchor": "middle" }, spec.tickX(tick)));
  }
  for (const rule of rulePlaces(plot, spec)) {
    picture.append(shape("line", { class: "rule", x1: left, x2: right, y1: top + rule.y, y2: top + rule.y, stroke: muted, "stroke-dasharray": "2 4" }),
      text({ class: "rule", x: right + 8, y: top + rule.text + 4 }, rule.label));
  }
  picture.append(shape("line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: muted }), text({ x: 2, y: top - 8, fill: ink }, spec.yLabel || spec.title),
    text({ x: (left + right) / 2, y: bottom + 38, "text-anchor": "middle", fill: ink }, spec.xLabel));
  const curves = shape("g", { "clip-path": "url(#inside)" });
  for (const entry of series) {
    const { stroke, width, dash } = lineStyle(entry);
    if (spread([entry]).length) {
      const known = entry.points.filter((point) => finite(point.low));
      curves.prepend(shape("polygon", { class: "band", fill: stroke, opacity: 0.16, points: [...places(known, "high"), ...places(known, "low").reverse()].join(" ") }));
    }
    curves.append(shape("polyline", { class: "curve", "data-name": entry.name, fill: "none", stroke, "stroke-width": width, "stroke-dasharray": dash.join(" ") || null,
      points: places(entry.points, "y").join(" ") }));
  }
  picture.append(curves);
  return new XMLSerializer().serializeToString(picture);
}
