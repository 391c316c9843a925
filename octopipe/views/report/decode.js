// Columns of numbers out of the page's packed text; the twin of pack.py.

async function unpackColumns(specs, text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = await new Response(stream).arrayBuffer();
  const out = [];
  let at = 0;
  for (const [kind, size, width, delta] of specs) {
    if (kind === "f") {
      // slice, because a Float64Array must start at a multiple of eight bytes
      out.push(new Float64Array(data.slice(at, at + size * 8)));
    } else {
      out.push(decodeIntegers(new Uint8Array(data, at, size * width), size, width, delta));
    }
    at += size * width;
  }
  return out;
}

function decodeIntegers(bytes, size, width, delta) {
  const out = new Int32Array(size);
  let sum = 0;
  for (let i = 0; i < size; i++) {
    let folded = bytes[i];
    for (let b = 1; b < width; b++) folded += bytes[b * size + i] * 2 ** (8 * b);
    const value = folded % 2 ? -(folded + 1) / 2 : folded / 2;
    sum = delta ? sum + value : value;
    out[i] = sum;
  }
  return out;
}

// One timeline, ready to draw: times in milliseconds, neighbours of every op, memory curves.
function openEntry(raw, columns, number) {
  const tick = raw.tick_ms;
  const pick = (group) => Object.fromEntries(
    Object.entries(group).map(([name, column]) => [name, columns[column]]));
  const spans = pick(raw.spans), moved = pick(raw.transfers);
  const count = spans.kind.length, transfers = moved.producer.length;
  const offsets = new Int32Array(raw.num_ranks + 1);
  raw.ops_of_rank.forEach((n, r) => { offsets[r + 1] = offsets[r] + n; });
  const rank = new Int32Array(count), start = new Float64Array(count), end = new Float64Array(count);
  for (let r = 0; r < raw.num_ranks; r++) {
    let clock = 0;
    for (let i = offsets[r]; i < offsets[r + 1]; i++) {
      rank[i] = r;
      const begin = clock + spans.gap[i];
      clock = begin + spans.duration[i];
      start[i] = begin * tick;
      end[i] = clock * tick;
    }
  }
  const tStart = new Float64Array(transfers), tEnd = new Float64Array(transfers);
  const transferFrom = new Int32Array(count).fill(-1), transferTo = new Int32Array(count).fill(-1);
  for (let i = 0; i < transfers; i++) {
    tStart[i] = end[moved.producer[i]] + moved.wait[i] * tick;
    tEnd[i] = tStart[i] + moved.duration[i] * tick;
    transferFrom[moved.producer[i]] = i;
    const known = transferTo[moved.consumer[i]];
    if (known < 0 || tEnd[i] > tEnd[known]) transferTo[moved.consumer[i]] = i;
  }
  const partner = new Int32Array(count).fill(-1);
  for (const second of raw.stages ? columns[raw.pairs] : []) {
    partner[second] = second - 1;
    partner[second - 1] = second;
  }
  const entry = {
    ...raw, partner, number, count, offsets, rank, transferCount: transfers, transferFrom, transferTo,
    kind: spans.kind, stage: spans.stage, micro: spans.micro_batch,
    producer: moved.producer, consumer: moved.consumer,
    bytesOf: (i) => moved.sizes[moved.size[i]],
    memory: raw.memory && openMemory(raw.memory, columns, tick),
    routeOf: raw.stages ? columns[raw.route_of_micro_batch] : null,
    memoryModel: raw.memory_model ? openMemoryModel(raw.memory_model, columns) : null,
    lanes: raw.lanes ? openLanes(raw.lanes, columns, tick) : null,
    whatIf: raw.what_if ? openWhatIf(raw.what_if, columns) : null,
  };
  entry.index = indexOps(entry);
  entry.base = {
    start, end, tStart, tEnd, extras: raw.extras,
    step: raw.numbers.step_ms, makespan: raw.numbers.makespan_ms, busy: raw.numbers.busy_ms,
    binding: raw.binding === null ? null : unfoldBinding(columns[raw.binding]),
  };
  if (!entry.base.binding) entry.base.binding = guessBinding(entry, entry.base);
  entry.now = entry.base;
  checkMemoryModel(entry);
  return entry;
}

function unfoldBinding(back) {
  const out = new Int32Array(back.length);
  for (let i = 0; i < back.length; i++) out[i] = back[i] === 0 ? -1 : i - back[i];
  return out;
}

// Measured timelines do not say what an op waited for: take what ended last before it.
function guessBinding(entry, times) {
  const out = new Int32Array(entry.count + entry.transferCount).fill(-1);
  for (let i = 0; i < entry.count; i++) {
    const before = i > entry.offsets[entry.rank[i]] ? i - 1 : -1;
    const t = entry.transferTo[i];
    const arrived = t < 0 ? -Infinity : times.tEnd[t];
    out[i] = t >= 0 && (before < 0 || arrived > times.end[before]) ? entry.count + t : before;
  }
  for (let t = 0; t < entry.transferCount; t++) out[entry.count + t] = entry.producer[t];
  return out;
}

// What the compute (0) and the exchange lane (1) of every rank did, by rank and time.
function openLanes(raw, columns, tick) {
  const offsets = [0];
  for (const n of raw.pieces_of_rank) offsets.push(offsets[offsets.length - 1] + n);
  const start = Float64Array.from(columns[raw.start], (v) => v * tick);
  const end = start.map((v, i) => v + columns[raw.duration][i] * tick);
  // The latest end so far: with it the pieces that touch a window are found by halving.
  const reach = new Float64Array(end.length);
  for (let r = 0; r + 1 < offsets.length; r++) {
    for (let i = offsets[r], far = 0; i < offsets[r + 1]; i++) reach[i] = far = Math.max(far, end[i]);
  }
  return { offsets, start, end, reach, op: columns[raw.span], lane: columns[raw.lane], hidden: raw.hidden };
}

function openMemory(raw, columns, tick) {
  const time = Float64Array.from(columns[raw.time], (v) => v * tick);
  const level = Float64Array.from(columns[raw.level], (v) => v * raw.unit_bytes);
  let at = 0;
  const curves = raw.points.map((n) => {
    const curve = { time: time.subarray(at, at + n), level: level.subarray(at, at + n) };
    at += n;
    return curve;
  });
  return { curves, exact: raw.exact };
}

function openWhatIf(raw, columns) {
  return {
    kinds: raw.kinds, twins: raw.twins, classOf: columns[raw.class_of_micro_batch],
    times: columns[raw.times], forward: columns[raw.forward], gradient: columns[raw.gradient],
  };
}

// Op numbers by kind, stage and micro-batch.
function indexOps(entry) {
  const stages = entry.stage.reduce((a, b) => Math.max(a, b), -1) + 1;
  const micros = entry.micro.reduce((a, b) => Math.max(a, b), -1) + 1;
  const table = new Int32Array(KINDS.length * stages * micros).fill(-1);
  for (let i = 0; i < entry.count; i++) {
    table[(entry.kind[i] * stages + entry.stage[i]) * micros + entry.micro[i]] = i;
  }
  return {
    stages, micros,
    find: (kind, stage, micro) => stage < 0 ? -1 : table[(kind * stages + stage) * micros + micro],
  };
}
