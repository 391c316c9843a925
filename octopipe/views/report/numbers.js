// Every number read off a timeline: the same definitions as timeline.py, for times that were simulated in this page.

function numbersOf(entry, times = entry.now) {
  if (times === entry.base) return entry.numbers;
  if (times.numbers) return times.numbers;
  const peak = peakBytes(entry, times);
  const limit = (r) => entry.capacity[r] ?? Infinity;
  times.numbers = {
    step_ms: times.step, makespan_ms: times.makespan, busy_ms: times.busy, bubble_ratio: bubbleRatio(entry, times),
    bubbles_ms: idleParts(entry, times), peak_bytes: peak ?? [], memory_known: peak !== null,
    fits: peak === null || peak.every((p, r) => p <= limit(r) * (1 + 1e-12)),
    communications: 2 * entry.transferCount, overlap_rate: overlapRate(entry, times),
  };
  return times.numbers;
}

function bubbleRatio(entry, times = entry.now) {
  const mean = times.busy.reduce((a, b) => a + b, 0) / entry.num_ranks;
  return times.step > 0 ? 1 - mean / times.step : 0;
}

// Idle time of every rank within the makespan: boundary, communication, imbalance, and the rest.
function idleParts(entry, times) {
  const out = { idle: [], boundary: [], communication: [], imbalance: [], residual: [] };
  const busiest = Math.max(...times.busy, 0);
  for (let r = 0; r < entry.num_ranks; r++) {
    const lo = entry.offsets[r], hi = entry.offsets[r + 1];
    const idle = Math.max(times.makespan - times.busy[r], 0);
    const edges = hi > lo ? times.start[lo] + times.makespan - times.end[hi - 1] : idle;
    const boundary = Math.min(edges, idle);
    let waited = 0;
    for (let i = lo; i < hi; i++) {
      const t = entry.transferTo[i];
      if (t < 0 || i === lo) continue;
      waited += Math.max(Math.min(times.start[i], times.tEnd[t]) - Math.max(times.end[i - 1], times.tStart[t]), 0);
    }
    const communication = Math.min(waited, idle - boundary), left = idle - boundary - communication;
    const imbalance = Math.min(busiest - times.busy[r], left);
    out.idle.push(idle);
    out.boundary.push(boundary);
    out.communication.push(communication);
    out.imbalance.push(imbalance);
    out.residual.push(left - imbalance);
  }
  return out;
}

// The share of sends and receives during the whole of which their rank was computing.
function overlapRate(entry, times) {
  if (!entry.transferCount) return 1;
  const work = new Float64Array(entry.count + 1); // compute time of all ops before this one
  for (let i = 0; i < entry.count; i++) work[i + 1] = work[i] + times.end[i] - times.start[i];
  const busyUntil = (rank, at) => {
    const lo = entry.offsets[rank], k = upperBound(times.start, at, lo, entry.offsets[rank + 1]);
    if (k === lo) return 0;
    return work[k - 1] - work[lo] + Math.max(Math.min(at, times.end[k - 1]) - times.start[k - 1], 0);
  };
  let hidden = 0;
  for (let t = 0; t < entry.transferCount; t++) {
    const took = times.tEnd[t] - times.tStart[t];
    for (const rank of [entry.rank[entry.producer[t]], entry.rank[entry.consumer[t]]]) {
      const covered = busyUntil(rank, times.tEnd[t]) - busyUntil(rank, times.tStart[t]);
      if (covered >= took - 1e-9 * (1 + took)) hidden++;
    }
  }
  return hidden / (2 * entry.transferCount);
}

// Tokens per second of a GPU and of all, TFLOP/s of a GPU and its share of the peak, where they are known.
function throughput(entry, times = entry.now) {
  const rates = entry.rates, seconds = times.step / 1000;
  if (!rates || !(seconds > 0)) return null;
  const per = (value) => (value === null || value === undefined ? null : value / seconds);
  const tokens = per(rates.tokens_per_gpu_per_second);
  return { tokens, all: tokens === null ? null : tokens * rates.gpus, tflops: per(rates.model_tflops_per_gpu), mfu: per(rates.mfu) };
}
