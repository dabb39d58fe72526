/* Line charts and stacked bars as SVG, drawn at the width of their host and drawn again when it changes. */

function niceTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
}

/* Powers of ten with their 2s and 5s where there is room, else every power or every n-th. */
function logTicks(low, high, count) {
  const powers = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) powers.push(power);
  const inside = (factors, every) => powers.filter((power) => power % every === 0)
    .flatMap((power) => factors.map((factor) => Number((factor * 10 ** power).toPrecision(12)))).filter((tick) => tick >= low && tick <= high);
  const fine = inside([1, 2, 5], 1);
  if (fine.length < 3) return niceTicks(low, high, count);
  return fine.length <= 1.5 * count + 2 ? fine : inside([1], Math.ceil(powers.length / (count + 2)));
}

/* Ticks for accuracies, the ones a reader wants most first. */
const ACCURACIES = [0.9, 0.99, 0.999, 0.5, 0.95, 0.995, 0.8, 0.98, 0.998, 0.97, 0.7, 0.6, 0.85, 0.92, 0.94, 0.96, 0, 0.3, 0.2, 0.4, 0.1];

/* The three ways to space an axis. "error" spaces accuracies by the logarithm of 1 - accuracy, so that 90, 99 and
   99.9 per cent are equally far apart; its floor keeps a perfect score on the page. */
const SPACINGS = {
  linear: { warp: (value) => value, unwarp: (place) => place, accepts: () => true, ticks: niceTicks },
  log: { warp: Math.log, unwarp: Math.exp, accepts: (value) => value > 0, ticks: logTicks },
  error: { warp: (value) => -Math.log(Math.max(1 - value, 1e-4)), unwarp: (place) => 1 - Math.exp(-place), accepts: () => true, ticks: accuracyTicks },
};

function accuracyTicks(low, high, count) {
  const { warp } = SPACINGS.error;
  const gap = (warp(high) - warp(low)) / (1.6 * count);
  const kept = [];
  for (const tick of ACCURACIES.filter((value) => value >= low && value <= high)) {
    if (kept.every((other) => Math.abs(warp(other) - warp(tick)) >= gap)) kept.push(tick);
  }
  return kept.length < 3 ? niceTicks(low, high, count) : kept.sort((a, b) => a - b);
}

function extent(values, spacing) {
  const usable = values.filter((value) => finite(value) && SPACINGS[spacing].accepts(value));
  if (!usable.length) return null;
  const low = usable.reduce((a, b) => Math.min(a, b)), high = usable.reduce((a, b) => Math.max(a, b));
  const around = (Math.abs(low) || 1) * 0.1;
  return low === high ? [low - around, high + around] : [low, high];
}

function padded([low, high], share, { warp, unwarp }) {
  const margin = (warp(high) - warp(low)) * share;
  return [unwarp(warp(low) - margin), unwarp(warp(high) + margin)];
}

/* Maps [low, high] to [start, end] and back. */
function scaleOf([low, high], start, end, { warp, unwarp }) {
  const a = warp(low), b = warp(high);
  const scale = (value) => start + ((warp(value) - a) / (b - a)) * (end - start);
  scale.invert = (place) => unwarp(a + ((place - start) / (end - start)) * (b - a));
  return scale;
}

function rangesOf(spec) {
  const points = spec.series.flatMap((series) => series.points);
  const rules = spec.rules.map((rule) => rule.y);
  const x = extent(points.map((point) => point.x), spec.xSpacing);
  const y = extent([...points.flatMap((point) => [point.y, point.low, point.high]), ...rules], spec.ySpacing);
  if (!x || !y || !points.some((point) => finite(point.y))) return null;
  if (spec.view) return spec.view;
  const roomy = padded(y, 0.05, SPACINGS[spec.ySpacing]);
  if (spec.limits) return { x, y: [Math.max(roomy[0], spec.limits[0]), Math.min(roomy[1], spec.limits[1])] };
  return { x: spec.fromZero && spec.xSpacing === "linear" ? [0, x[1]] : x, y: roomy };
}

function pathOf(points) {
  return points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`).join("");
}

function drawAxes(frame, spec) {
  const { x, y, box, ranges } = frame;
  const group = shape("g", { class: "axes" });
  const yTicks = SPACINGS[spec.ySpacing].ticks(ranges.y[0], ranges.y[1], Math.max(3, box.height / 45));
  for (const tick of yTicks) {
    group.append(shape("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }),
      shape("text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, spec.tickY(tick)));
  }
  let xTicks = SPACINGS[spec.xSpacing].ticks(ranges.x[0], ranges.x[1], Math.max(2, box.width / 90));
  const whole = xTicks.filter(Number.isInteger);
  if (spec.wholeX && whole.length > 1) xTicks = whole;
  for (const tick of xTicks) {
    group.append(shape("line", { class: "axis", x1: x(tick), x2: x(tick), y1: box.bottom, y2: box.bottom + 5 }),
      shape("text", { x: x(tick), y: box.bottom + 20, "text-anchor": "middle" }, formatNumber(tick)));
  }
  group.append(shape("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    shape("text", { class: "title x-title", x: (box.left + box.right) / 2, y: box.bottom + 42, "text-anchor": "middle" }, spec.xLabel));
  if (spec.yLabel) {
    group.append(shape("text", { class: "title y-title", x: 2, y: 14 }, spec.yLabel));
  }
  return group;
}

function drawSeries(frame, spec, clip) {
  const { x, y } = frame;
  const group = shape("g", { "clip-path": `url(#${clip})` });
  const horizontal = SPACINGS[spec.xSpacing].accepts, vertical = SPACINGS[spec.ySpacing].accepts;
  const place = (point, value) => [x(point.x), y(value)];
  for (const series of spec.series) {
    const usable = series.points.filter((point) => finite(point.y) && horizontal(point.x) && vertical(point.y));
    const spread = usable.filter((point) => finite(point.low) && vertical(point.low));
    if (spread.length > 1 && spread.some((point) => point.high > point.low)) {
      const edge = [...spread.map((point) => place(point, point.high)), ...spread.reverse().map((point) => place(point, point.low))];
      group.append(shape("path", { class: `band s${series.slot}`, "data-name": series.name, d: `${pathOf(edge)}Z` }));
    }
    const style = `s${series.slot} d${series.dash || 0}${series.thin ? " thin" : ""}`;
    const line = usable.map((point) => place(point, point.y));
    group.append(shape("path", { class: `curve ${style}`, "data-name": series.name, "data-points": usable.length, d: pathOf(line) }));
    if (!series.thin && line.length * 22 < frame.box.width) {
      for (const [cx, cy] of line) group.append(shape("circle", { class: `dot s${series.slot}`, cx, cy, r: 3 }));
    }
  }
  return group;
}

/* Horizontal lines with their names in the right margin, moved apart where they would overlap. */
function drawRules(frame, spec) {
  const group = shape("g", { class: "rules" });
  const { box, ranges } = frame;
  const inside = spec.rules.filter((rule) => rule.y >= ranges.y[0] && rule.y <= ranges.y[1]).sort((a, b) => frame.y(a.y) - frame.y(b.y));
  let free = -Infinity;
  for (const rule of inside) {
    const height = frame.y(rule.y);
    free = Math.max(free + 14, height + 4);
    group.append(shape("line", { class: "rule", x1: box.left, x2: box.right, y1: height, y2: height }),
      shape("text", { x: box.right + 8, y: free }, rule.label));
  }
  return group;
}

let clipCount = 0;

/* given: series [{name, slot, dash, thin, points [{x, y, low, high, note}]}], xLabel, yLabel or title, xSpacing and
   ySpacing (keys of SPACINGS), rules [{y, label}], tickY, formatX, formatY, height, limits of y, and for zooming:
   view {x, y} or null, and onZoom(view). */
function lineChart(host, given) {
  const spec = { xSpacing: "linear", ySpacing: "linear", rules: [], ...given };
  const draw = () => {
    const width = Math.max(260, host.clientWidth);
    const height = spec.height || Math.min(470, Math.max(280, width * 0.5));
    const ranges = rangesOf(spec);
    if (!ranges) {
      host.replaceChildren(element("p", { class: "empty" }, spec.empty || "Nothing to draw: choose an optimizer above."));
      return;
    }
    const box = { left: 62, right: width - (spec.rules.length ? 58 : 12), top: spec.yLabel ? 30 : 12, bottom: height - 52 };
    box.width = box.right - box.left;
    box.height = box.bottom - box.top;
    const frame = { box, ranges, x: scaleOf(ranges.x, box.left, box.right, SPACINGS[spec.xSpacing]),
      y: scaleOf(ranges.y, box.bottom, box.top, SPACINGS[spec.ySpacing]) };
    clipCount += 1;
    const clip = `clip-${clipCount}`;
    const picture = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
      "aria-label": `${spec.yLabel || spec.title} against ${spec.xLabel}; arrow keys read the values` },
      shape("clipPath", { id: clip }, shape("rect", { x: box.left - 5, y: box.top - 5, width: box.width + 10, height: box.height + 10 })),
      drawAxes(frame, spec), drawRules(frame, spec), drawSeries(frame, spec, clip));
    const tip = element("div", { class: "tip", role: "status", hidden: true });
    host.replaceChildren(picture, tip);
    attachCursor(picture, tip, frame, spec);
    if (spec.onZoom) attachZoom(picture, frame, spec);
  };
  redrawOnResize(host, draw);
}

/* One observer a host: a later chart in the same host takes the place of the earlier one. */
const drawings = new Map();
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const known = drawings.get(target);
    if (known && known.width !== target.clientWidth) {
      known.width = target.clientWidth;
      known.draw();
    }
  }
});

function redrawOnResize(host, draw) {
  for (const old of drawings.keys()) {
    if (!old.isConnected) { observer.unobserve(old); drawings.delete(old); }
  }
  drawings.set(host, { draw, width: host.clientWidth });
  observer.observe(host);
  draw();
}

/* Rows of stacked horizontal bars: rows [{name, parts: {key: value}}], keys [[key, label]]. */
function stackedBars(host, rows, keys, format) {
  const draw = () => {
    const width = Math.max(260, host.clientWidth);
    const left = Math.min(width * 0.32, 18 + 7.4 * Math.max(...rows.map((row) => row.name.length)));
    const room = Math.max(4, Math.floor(left / 7));
    const total = (row) => keys.reduce((sum, [key]) => sum + (row.parts[key] || 0), 0);
    const largest = Math.max(...rows.map(total)) || 1;
    const scale = (width - left - 84) / largest;
    const step = rows.length > 12 ? 24 : 34;
    const picture = shape("svg", { viewBox: `0 0 ${width} ${rows.length * step + 8}`, role: "img",
      "aria-label": rows.map((row) => `${row.name}: ${keys.map(([key, label]) => `${label} ${format(row.parts[key] || 0)}`).join(", ")}`).join("; ") });
    rows.forEach((row, index) => {
      let x = left;
      const y = index * step + 4;
      const name = row.name.length > room ? `${row.name.slice(0, room - 1)}…` : row.name;
      picture.append(shape("text", { x: left - 10, y: y + step / 2, "text-anchor": "end" }, shape("title", {}, row.name), name));
      for (const [key, label] of keys) {
        const value = row.parts[key] || 0;
        picture.append(shape("rect", { class: `bar phase-${key}`, "data-row": row.name, "data-phase": key, "data-value": value,
          x, y, width: value * scale, height: step - 10 }, shape("title", {}, `${row.name}: ${label} ${format(value)}`)));
        x += value * scale;
      }
      picture.append(shape("text", { x: x + 8, y: y + step / 2 }, format(total(row))));
    });
    const legend = keys.map(([key, label]) => element("span", { class: "key" }, element("span", { class: `swatch block phase-${key}` }), label));
    host.replaceChildren(element("div", { class: "legend" }, ...legend), picture);
  };
  redrawOnResize(host, draw);
}
