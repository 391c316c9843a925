// Numbers and ops in words.

const GIB = 2 ** 30;

function formatMs(ms) {
  const size = Math.abs(ms);
  if (size < 1e-7) return "0 ms";
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

function headline(entry) {
  const parts = [formatMs(entry.now.step), `${percent(bubbleRatio(entry))} bubble`];
  if (entry.measured) parts.push("measured");
  if (!numbersOf(entry).fits) parts.push("does not fit in memory");
  return parts.join("  ·  ");
}

const opName = (entry, i) => `${entry.stage[i]}${KINDS[entry.kind[i]]}${entry.micro[i]}`;

function layersOf(entry, stage) {
  if (!entry.stages || !entry.stages[stage]) return "";
  const [first, stop] = entry.stages[stage];
  const range = stop - first === 1 ? `layer ${first}` : `layers ${first} to ${stop - 1}`;
  return entry.symbols ? `${range}   ${entry.symbols.slice(first, stop)}` : range;
}

const recomputes = (entry, stage) => Boolean(entry.stages && entry.stages[stage] && entry.stages[stage][3].length);

// Whole numbers in a row as ranges: 3 to 5, 8.
function ranges(numbers) {
  const out = [];
  for (const n of numbers) {
    const last = out[out.length - 1];
    if (last && n === last[1] + 1) last[1] = n; else out.push([n, n]);
  }
  return out.map(([a, b]) => (a === b ? String(a) : `${a} to ${b}`)).join(", ");
}

// What a stage computes again in its backward pass, in words; empty where it keeps everything.
function recomputedWords(entry, stage) {
  if (!recomputes(entry, stage)) return "";
  const [first, stop, , again] = entry.stages[stage];
  return again.length === stop - first ? `all ${again.length} layers` : `layers ${ranges(again)} (${again.length} of ${stop - first})`;
}

const recomputedCount = (entry) => (entry.stages ? new Set(entry.stages.flatMap((s) => s[3])).size : 0);

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

// The op that runs on a rank at a time, or -1.
function opAt(entry, rank, time) {
  const { start, end } = entry.now, hi = entry.offsets[rank + 1];
  const i = upperBound(end, time, entry.offsets[rank], hi);
  return i < hi && start[i] <= time ? i : -1;
}

// What a rank does at a time, in words.
function stateAt(entry, rank, time) {
  const op = opAt(entry, rank, time), now = entry.now;
  if (op >= 0) return `running ${opName(entry, op)}`;
  const other = now.extras.find(([, r, begin, finish]) => r === rank && begin <= time && time < finish);
  if (other) return other[0];
  if (time > now.step) return "the step has ended";
  const last = entry.offsets[rank + 1] - 1;
  return last < entry.offsets[rank] || time >= now.end[last] ? "idle, all its ops are done" : "idle";
}

// Rows about a rank's memory at a time: in all, and by what it is.
function memoryRows(entry, rank, time, whole) {
  const memory = memoryOf(entry, entry.now), curve = memory && memory.curves[rank];
  if (!curve || !curve.time.length || time > entry.now.step) return [];
  const point = pointAt(curve, time), limit = entry.capacity[rank] ?? null;
  const fixed = entry.memoryModel ? entry.memoryModel.static[rank] : entry.numbers.static_bytes[rank];
  const level = point < 0 ? fixed : curve.level[point];
  const rows = [["memory here", limit === null ? gib(level) : `${gib(level)} of ${gib(limit)}`]];
  if (!whole || !entry.memoryModel) return rows;
  partsAt(entry, rank, curve, point).forEach((bytes, p) => {
    if (bytes > 0) rows.push([memoryParts(entry)[p], formatBytes(bytes)]);
  });
  return rows;
}

// Rows of [name, value] about a place in the chart.
function describe(found) {
  const { entry, rank, op, time, strip } = found, now = entry.now;
  const rows = [];
  if (strip || op < 0) {
    rows.push(["", `rank ${rank} at ${formatMs(time)}: ${stateAt(entry, rank, time)}`]);
    return [...rows, ...memoryRows(entry, rank, time, true)];
  }
  rows.push(["", `${opName(entry, op)}   ${KIND_NAMES[KINDS[entry.kind[op]]]} of micro-batch ${entry.micro[op]}`]);
  rows.push(["where", `stage ${entry.stage[op]} on rank ${rank}`]);
  const layers = layersOf(entry, entry.stage[op]), again = recomputedWords(entry, entry.stage[op]);
  if (layers) rows.push(["layers", layers]);
  if (again) rows.push(["recomputes", again]);
  // The first of a pair has the time of both.
  const other = entry.partner[op], lead = other < 0 ? op : Math.min(op, other);
  if (other >= 0) rows.push(["together with", opName(entry, other)]);
  rows.push(["start", formatMs(now.start[lead])], ["duration", formatMs(now.end[lead] - now.start[lead])]);
  const [what, idle] = waitedFor(entry, lead);
  rows.push(["waited for", what]);
  if (idle > 1e-9 * now.step) rows.push(["rank idle before", formatMs(idle)]);
  return [...rows, ...memoryRows(entry, rank, time, false)];
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
