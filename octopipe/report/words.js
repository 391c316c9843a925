// Numbers and ops in words.

const GIB = 2 ** 30;

function formatMs(ms) {
  const size = Math.abs(ms);
  if (size < 1e-7) return "0 ms";
  if (size >= 1000) return `${(ms / 1000).toFixed(3)} s`;
  if (size >= 100) return `${ms.toFixed(1)} ms`;
  if (size >= 1) return `${ms.toFixed(2)} ms`;
  return `${(ms * 1000).toFixed(size >= 0.01 ? 1 : 2)} µs`;
}

const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const gib = (bytes) => `${(bytes / GIB).toFixed(bytes >= 10 * GIB ? 1 : 2)} GiB`;

function formatBytes(bytes) {
  return bytes >= GIB ? gib(bytes) : bytes >= 2 ** 20 ? `${(bytes / 2 ** 20).toFixed(1)} MiB`
    : bytes >= 1024 ? `${(bytes / 1024).toFixed(1)} KiB` : `${bytes} B`;
}

function bubbleRatio(entry) {
  const now = entry.now, mean = now.busy.reduce((a, b) => a + b, 0) / entry.num_ranks;
  return now.step > 0 ? 1 - mean / now.step : 0;
}

function headline(entry) {
  const parts = [formatMs(entry.now.step), `${percent(bubbleRatio(entry))} bubble`];
  if (entry.measured) parts.push("measured");
  if (!entry.numbers.fits) parts.push("does not fit in memory");
  return parts.join("  ·  ");
}

const opName = (entry, i) => `${entry.stage[i]}${KINDS[entry.kind[i]]}${entry.micro[i]}`;

function layersOf(entry, stage) {
  if (!entry.stages || !entry.stages[stage]) return "";
  const [first, stop] = entry.stages[stage];
  const range = stop - first === 1 ? `layer ${first}` : `layers ${first} to ${stop - 1}`;
  return entry.symbols ? `${range}   ${entry.symbols.slice(first, stop)}` : range;
}

// Why an op started when it did: [what it waited for, how long the rank stood idle for it].
function waitedFor(entry, i) {
  const now = entry.now, because = now.binding[i];
  const first = i === entry.offsets[entry.rank[i]];
  const idle = now.start[i] - (first ? 0 : now.end[i - 1]);
  if (because < 0) return ["nothing: it starts the step", idle];
  if (because >= entry.count) {
    const t = because - entry.count, from = entry.producer[t];
    const size = entry.bytesOf(t) > 0 ? `, ${formatBytes(entry.bytesOf(t))}` : "";
    const took = formatMs(now.tEnd[t] - now.tStart[t]);
    return [`${opName(entry, from)} and its transfer from rank ${entry.rank[from]} (${took}${size})`, idle];
  }
  if (entry.rank[because] === entry.rank[i] && because === i - 1) return [`its rank: ${opName(entry, because)} ran until then`, idle];
  return [`${opName(entry, because)} on rank ${entry.rank[because]}`, idle];
}

function memoryAt(entry, rank, time) {
  const curve = entry.memory && entry.now === entry.base && entry.memory.curves[rank];
  if (!curve || !curve.time.length) return null;
  const i = Math.max(upperBound(curve.time, time, 0, curve.time.length) - 1, 0);
  return curve.level[i];
}

// Rows of [name, value] about a place in the chart.
function describe(found) {
  const { entry, rank, op, time } = found, now = entry.now;
  const rows = [];
  if (op >= 0) {
    rows.push(["", `${opName(entry, op)}   ${KIND_NAMES[KINDS[entry.kind[op]]]} of micro-batch ${entry.micro[op]}`]);
    rows.push(["where", `stage ${entry.stage[op]} on rank ${rank}`]);
    const layers = layersOf(entry, entry.stage[op]);
    if (layers) rows.push(["layers", layers]);
    rows.push(["start", formatMs(now.start[op])], ["duration", formatMs(now.end[op] - now.start[op])]);
    const [what, idle] = waitedFor(entry, op);
    rows.push(["waited for", what]);
    if (idle > 1e-9 * now.step) rows.push(["rank idle before", formatMs(idle)]);
  } else {
    rows.push(["", `rank ${rank}, idle at ${formatMs(time)}`]);
  }
  const level = memoryAt(entry, rank, time);
  if (level !== null) {
    const limit = entry.capacity[rank];
    rows.push(["memory here", limit === null || limit === undefined ? gib(level) : `${gib(level)} of ${gib(limit)}`]);
  }
  return rows;
}

// The first index in [lo, hi) whose value is >= (lower) or > (upper) the one sought, in a sorted array.
function lowerBound(values, sought, lo, hi) {
  while (lo < hi) {
    const middle = (lo + hi) >> 1;
    if (values[middle] < sought) lo = middle + 1; else hi = middle;
  }
  return lo;
}

function upperBound(values, sought, lo, hi) {
  while (lo < hi) {
    const middle = (lo + hi) >> 1;
    if (values[middle] <= sought) lo = middle + 1; else hi = middle;
  }
  return lo;
}

function axisTicks(from, to, count) {
  const span = to - from;
  if (!(span > 0)) return [from];
  const raw = span / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * (1 - 1e-9));
  const out = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to; k++) out.push(k * step);
  return out;
}

function parseColour(text) {
  const hex = text.replace("#", "");
  const full = hex.length === 3 ? [...hex].map((d) => d + d).join("") : hex;
  return [0, 2, 4].map((i) => parseInt(full.slice(i, i + 2), 16));
}
