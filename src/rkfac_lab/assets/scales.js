/* How an axis is spaced and where its ticks stand; evenly spaced ones are left to uPlot. */

/* Powers of ten with their 2s and 5s where there is room, else every power or every n-th; null where too few fit. */
function logTicks(low, high, count) {
  const powers = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) powers.push(power);
  const inside = (factors, every) => powers.filter((power) => power % every === 0)
    .flatMap((power) => factors.map((factor) => Number((factor * 10 ** power).toPrecision(12)))).filter((tick) => tick >= low && tick <= high);
  const fine = inside([1, 2, 5], 1);
  if (fine.length < 3) return null;
  return fine.length <= 1.5 * count + 2 ? fine : inside([1], Math.ceil(powers.length / (count + 2)));
}

/* Ticks for accuracies, the ones a reader wants most first. */
const ACCURACIES = [0.9, 0.99, 0.999, 0.5, 0.95, 0.995, 0.8, 0.98, 0.998, 0.97, 0.7, 0.6, 0.85, 0.92, 0.94, 0.96, 0, 0.3, 0.2, 0.4, 0.1];

function accuracyTicks(low, high, count) {
  const { warp } = SPACINGS.error;
  const gap = (warp(high) - warp(low)) / (1.6 * count);
  const kept = [];
  for (const tick of ACCURACIES.filter((value) => value >= low && value <= high)) {
    if (kept.every((other) => Math.abs(warp(other) - warp(tick)) >= gap)) kept.push(tick);
  }
  return kept.length < 3 ? null : kept.sort((a, b) => a - b);
}

/* The three ways to space an axis. "error" spaces accuracies by the logarithm of 1 - accuracy, so that 90, 99 and
   99.9 per cent are equally far apart; its floor keeps a perfect score on the page. */
const SPACINGS = {
  linear: { warp: (value) => value, unwarp: (place) => place, accepts: () => true, ticks: () => null },
  log: { warp: Math.log, unwarp: Math.exp, accepts: (value) => value > 0, ticks: logTicks },
  error: { warp: (value) => -Math.log(Math.max(1 - value, 1e-4)), unwarp: (place) => 1 - Math.exp(-place), accepts: () => true, ticks: accuracyTicks },
};

/* The range of some values with a margin on both sides, as the spacing measures it. */
function roomy(values, spacing, margin) {
  const { warp, unwarp } = SPACINGS[spacing];
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const more = (warp(high) - warp(low)) * margin;
  return [unwarp(warp(low) - more), unwarp(warp(high) + more)];
}

/* A scale of uPlot: `full` until somebody zooms, and again when they go back to all of the data. */
function scale(spacing, full, [first, last]) {
  const { warp, unwarp } = SPACINGS[spacing];
  return { time: false, distr: spacing === "linear" ? 1 : 100, fwd: warp, bwd: unwarp,
    range: (plot, low, high, key) => (key === "x" && !(low === first && high === last) ? [low, high] : full) };
}

/* Ticks of our own, or evenly spaced ones at the distance that uPlot found. */
function splits(spacing, room) {
  return (plot, side, low, high, step) => {
    const length = (side === 0 ? plot.bbox.width : plot.bbox.height) / devicePixelRatio;
    const own = SPACINGS[spacing].ticks(low, high, Math.max(side === 0 ? 2 : 3, length / room));
    if (own || !(step > 0)) return own || [low, high];
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
  };
}

const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();
