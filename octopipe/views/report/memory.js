// What every rank's memory is filled with over time: the same rules as simulator.py's `memory_curves`, part by part.

const HELD = ["activations", "buffers between stages", "workspace of the running op"];
const ACTIVATION = 0, BUFFER = 1, WORKSPACE = 2;
const MEMORY_COLOURS = {
  weights: "#5b7fa6", gradients: "#8fb3d9", "optimizer state": "#3f5873", "weights, gradients and optimizer state": "#5b7fa6",
  activations: "#e0a458", "buffers between stages": "#b56576", "workspace of the running op": "#8d9f5c",
  "in use": "#9db2c8",
};

function openMemoryModel(raw, columns) {
  const out = { static: raw.static, shares: raw.shares, classOf: columns[raw.class_of_micro_batch] };
  for (const name of ["kept", "activation", "stash", "out", "gradient", "workspace"]) out[name] = columns[raw[name]];
  return out;
}

// Names of the parts, from the bottom up; a curve without a model has one.
function memoryParts(entry) {
  return entry.memoryModel ? [...entry.memoryModel.shares.map((s) => s[0]), ...HELD] : ["in use"];
}

// The curves of all ranks under these times, or null where nothing is known about them.
function memoryOf(entry, times) {
  if (times.memory === undefined) {
    times.memory = entry.memoryModel ? modelledMemory(entry, times)
      : times === entry.base && entry.memory ? entry.memory : null;
  }
  return times.memory;
}

function peakBytes(entry, times) {
  if (times === entry.base) return entry.numbers.peak_bytes;
  const memory = memoryOf(entry, times);
  return memory ? memory.curves.map((c) => c.peak) : null;
}

// Bytes of every part at a point of a curve, in the order of memoryParts.
function partsAt(entry, rank, curve, point) {
  if (!curve.held) return [curve.level[point] ?? 0];
  const fixed = entry.memoryModel.shares.map((s) => s[1] * entry.memoryModel.static[rank]);
  return [...fixed, ...curve.held.map((h) => h[point] ?? 0)];
}

function modelledMemory(entry, times) {
  const model = entry.memoryModel, stages = entry.stages.length, { before, after } = neighbours(entry);
  const cell = (i) => model.classOf[entry.micro[i]] * stages + entry.stage[i];
  // What every op changes when it starts and when it ends; transfers change buffers at both of their ends.
  const starts = HELD.map(() => new Float64Array(entry.count)), ends = HELD.map(() => new Float64Array(entry.count));
  const moves = Array.from({ length: entry.num_ranks }, () => []);
  for (let i = 0; i < entry.count; i++) {
    const s = entry.stage[i], m = entry.micro[i], k = entry.kind[i], at = cell(i), whole = model.activation[at];
    starts[WORKSPACE][i] += model.workspace[s];
    ends[WORKSPACE][i] -= model.workspace[s];
    if (k === F) starts[ACTIVATION][i] += entry.index.find(R, s, m) >= 0 ? model.kept[at] : whole;
    else if (k === R) starts[ACTIVATION][i] += whole - model.kept[at];
    else if (k === I) ends[ACTIVATION][i] += model.stash[at] - whole;
    else if (k === W) ends[ACTIVATION][i] -= model.stash[at];
    else if (k === B) ends[ACTIVATION][i] -= whole;
    if (k === R || k === W) continue;
    const source = (k === F ? before : after)[entry.routeOf[m] * stages + s];
    if (source < 0) continue;
    let from = entry.index.find(k === F ? F : I, source, m);
    if (from < 0) from = entry.index.find(B, source, m);
    if (from < 0) continue;
    const size = (k === F ? model.out : model.gradient)[cell(from)];
    ends[BUFFER][from] += size;
    (k === F ? starts : ends)[BUFFER][i] -= size;
    const t = entry.transferTo[i];
    if (t >= 0) {
      moves[entry.rank[from]].push([times.tEnd[t], -size]);
      moves[entry.rank[i]].push([times.tStart[t], size]);
    }
  }
  const curves = moves.map((list, rank) => rankMemory(entry, times, rank, list.sort((a, b) => a[0] - b[0]), starts, ends));
  return { curves, exact: true };
}

// Merge a rank's op starts and ends with its transfers; changes at one instant make one point.
function rankMemory(entry, times, rank, moves, starts, ends) {
  const first = entry.offsets[rank], stop = entry.offsets[rank + 1], most = 2 * (stop - first) + moves.length;
  const time = new Float64Array(most), level = new Float64Array(most), held = HELD.map(() => new Float64Array(most));
  const [activations, buffers, scratch] = held, fixed = entry.memoryModel.static[rank], same = entry.tick_ms / 2;
  const [startA, startB, startW] = starts, [endA, endB, endW] = ends;
  let points = 0, move = 0, peak = fixed, peakAt = 0, inA = 0, inB = 0, inW = 0;
  const put = (at) => {
    if (points && at - time[points - 1] <= same) points--; else time[points] = at;
    activations[points] = inA > 0 ? inA : 0;
    buffers[points] = inB > 0 ? inB : 0;
    scratch[points] = inW > 0 ? inW : 0;
    const sum = inA + inB + inW;
    level[points++] = fixed + (sum > 0 ? sum : 0);
  };
  const moveUntil = (at) => {
    for (; move < moves.length && moves[move][0] <= at; move++) {
      inB += moves[move][1];
      put(moves[move][0]);
    }
  };
  for (let i = first; i < stop; i++) {
    moveUntil(times.start[i]);
    inA += startA[i];
    inB += startB[i];
    inW += startW[i];
    put(times.start[i]);
    moveUntil(times.end[i]);
    inA += endA[i];
    inB += endB[i];
    inW += endW[i];
    put(times.end[i]);
  }
  moveUntil(Infinity);
  for (let i = 0; i < points; i++) {
    if (level[i] > peak) {
      peak = level[i];
      peakAt = i;
    }
  }
  const cut = (values) => values.subarray(0, points);
  return { time: cut(time), level: cut(level), held: held.map(cut), peak, peakAt };
}

// The point of a curve that holds at a time; -1 before the first.
const pointAt = (curve, time) => upperBound(curve.time, time, 0, curve.time.length) - 1;

// A model that does not add up to the file's own curve (other costs, a real measurement) explains nothing: leave it.
function checkMemoryModel(entry) {
  if (!entry.memoryModel) return;
  const known = entry.numbers.peak_bytes, found = modelledMemory(entry, entry.base).curves;
  const agrees = known.length === found.length && found.every((c, r) => Math.abs(c.peak - known[r]) <= 1e-6 * known[r] + 1);
  if (!agrees) entry.memoryModel = null;
  else entry.base.memory = { curves: found, exact: true };
}
