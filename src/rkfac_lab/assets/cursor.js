/* Reading exact values off a line chart (pointer or arrow keys), and zooming into it by dragging. */

function nearest(points, x) {
  let best = null;
  for (const point of points) {
    if (finite(point.y) && (best === null || Math.abs(point.x - x) < Math.abs(best.x - x))) best = point;
  }
  return best;
}

/* A series is read at the cursor unless it ended well before it or starts well after it. */
function reachable(series, x, tolerance) {
  const places = series.points.filter((point) => finite(point.y)).map((point) => point.x);
  return places.length > 0 && x >= Math.min(...places) - tolerance && x <= Math.max(...places) + tolerance;
}

const MOST_ROWS = 10;

/* At most MOST_ROWS of the rows, those nearest to the pointer, in their own order. */
function fewest(rows, distance) {
  if (rows.length <= MOST_ROWS) return rows;
  const near = new Set([...rows].sort((a, b) => distance(a) - distance(b)).slice(0, MOST_ROWS));
  return rows.filter((row) => near.has(row));
}

function attachCursor(picture, tip, frame, spec) {
  const { box, ranges, x } = frame;
  const line = shape("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  picture.append(line);
  const stops = [...new Set(spec.series.flatMap((series) => series.points.map((point) => point.x)))]
    .filter((stop) => stop >= ranges.x[0] && stop <= ranges.x[1]).sort((a, b) => a - b);
  const tolerance = (ranges.x[1] - ranges.x[0]) * 0.03;
  let stopIndex = -1;

  const hide = () => { tip.hidden = true; line.setAttribute("visibility", "hidden"); };
  const show = (value, height) => {
    const all = spec.series.filter((series) => reachable(series, value, tolerance))
      .map((series) => [series, nearest(series.points, value)]);
    if (!all.length) { hide(); return; }
    const rows = fewest(all, ([, point]) => (height === undefined ? 0 : Math.abs(frame.y(point.y) - height)));
    tip.replaceChildren(element("div", { class: "at" }, spec.formatX(value)), ...rows.map(([series, point]) =>
      element("div", { class: "row" }, element("span", { class: `swatch s${series.slot} d${series.dash || 0}` }),
        element("span", {}, series.name), element("b", {}, spec.formatY(point.y)), point.note ? element("small", {}, point.note) : null)),
      all.length > rows.length ? element("div", { class: "at" }, `and ${all.length - rows.length} more`) : "");
    tip.hidden = false;
    const ratio = picture.getBoundingClientRect().width / picture.viewBox.baseVal.width;
    const place = x(value) * ratio;
    const beside = place + 18 + tip.offsetWidth > picture.getBoundingClientRect().width ? place - 18 - tip.offsetWidth : place + 18;
    tip.style.transform = `translate(${Math.max(0, beside)}px, ${box.top}px)`;
    line.setAttribute("x1", x(value));
    line.setAttribute("x2", x(value));
    line.setAttribute("visibility", "visible");
  };
  picture.addEventListener("pointermove", (event) => {
    const [place, height] = placeIn(picture, event);
    if (place < box.left - 5 || place > box.right + 5) { hide(); return; }
    const value = x.invert(Math.min(box.right, Math.max(box.left, place)));
    const stop = stops.length ? stops.reduce((best, next) => (Math.abs(next - value) < Math.abs(best - value) ? next : best)) : null;
    stopIndex = stops.indexOf(stop);
    if (stop !== null) show(stop, height);
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!move || !stops.length) return;
    event.preventDefault();
    stopIndex = Math.min(stops.length - 1, Math.max(0, stopIndex + move));
    show(stops[stopIndex]);
  });
}

/* The pointer in the picture's own coordinates. */
function placeIn(picture, event) {
  const outer = picture.getBoundingClientRect();
  const ratio = picture.viewBox.baseVal.width / outer.width;
  return [(event.clientX - outer.left) * ratio, (event.clientY - outer.top) * ratio];
}

function attachZoom(picture, frame, spec) {
  const { box } = frame;
  const inside = ([x, y]) => [Math.min(box.right, Math.max(box.left, x)), Math.min(box.bottom, Math.max(box.top, y))];
  let start = null;
  const rectangle = shape("rect", { class: "zoom", visibility: "hidden" });
  picture.append(rectangle);
  const corners = (event) => {
    const end = inside(placeIn(picture, event));
    return [Math.min(start[0], end[0]), Math.max(start[0], end[0]), Math.min(start[1], end[1]), Math.max(start[1], end[1])];
  };
  picture.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    start = inside(placeIn(picture, event));
    picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    if (!start) return;
    const [x0, x1, y0, y1] = corners(event);
    fill(rectangle, { x: x0, y: y0, width: x1 - x0, height: y1 - y0, visibility: "visible" }, []);
  });
  picture.addEventListener("pointerup", (event) => {
    if (!start) return;
    const [x0, x1, y0, y1] = corners(event);
    start = null;
    rectangle.setAttribute("visibility", "hidden");
    // A click or a shaky hand is not a zoom.
    if (x1 - x0 < 8 || y1 - y0 < 8) return;
    spec.onZoom({ x: [frame.x.invert(x0), frame.x.invert(x1)], y: [frame.y.invert(y1), frame.y.invert(y0)] });
  });
  picture.addEventListener("dblclick", () => { if (spec.view) spec.onZoom(null); });
}
