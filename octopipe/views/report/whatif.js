// The directed-channel simulator, for the what-if panel: the same rules as _engine.py's `evaluate`.
// An op starts when its rank is free and its input is there; one in-order queue per direction of a rank pair.

const KINDS = "FRIWB";
const F = 0, R = 1, I = 2, W = 3, B = 4;

// scale: {kind of layer: factor}, transfers: {factor, plus_ms}
function simulateEntry(entry, scale, transfers) {
  const w = entry.whatIf, stages = entry.stages.length, kinds = w.kinds.length;
  const rankOf = entry.stages.map((s) => s[2]);
  const { before, after } = neighbours(entry);
  const factor = w.kinds.map((k) => scale[k] ?? 1);
  const classes = w.forward.length / stages;
  const cost = new Float64Array(classes * KINDS.length * stages);
  for (let i = 0; i < cost.length; i++) {
    for (let k = 0; k < kinds; k++) cost[i] += w.times[i * kinds + k] * factor[k];
  }
  const durationOf = (i) => cost[(w.classOf[entry.micro[i]] * KINDS.length + entry.kind[i]) * stages + entry.stage[i]];
  const hop = (table, s, m) => table[w.classOf[m] * stages + s] * transfers.factor + transfers.plus_ms;

  const ranks = entry.num_ranks, micros = entry.num_micro_batches;
  const forwardAt = new Float64Array(stages * micros).fill(-1), gradientAt = forwardAt.slice();
  const forwardBy = new Int32Array(stages * micros).fill(-1), gradientBy = forwardBy.slice();
  const channel = new Float64Array(ranks * ranks), channelBy = new Int32Array(ranks * ranks).fill(-1);
  const clock = new Float64Array(ranks), head = entry.offsets.slice(0, ranks);
  const out = {
    start: new Float64Array(entry.count), end: new Float64Array(entry.count),
    tStart: new Float64Array(entry.transferCount), tEnd: new Float64Array(entry.transferCount),
    binding: new Int32Array(entry.count + entry.transferCount).fill(-1), busy: new Array(ranks).fill(0),
  };
  let left = entry.count;
  while (left > 0) {
    let moved = false;
    for (let r = 0; r < ranks; r++) {
      let i = head[r], now = clock[r];
      for (; i < entry.offsets[r + 1]; i++) {
        const s = entry.stage[i], m = entry.micro[i], k = entry.kind[i], cell = s * micros + m;
        const route = entry.routeOf[m] * stages;
        const forward = k === F, backward = k === I || k === B;
        const source = forward ? before[route + s] : backward ? after[route + s] : -1;
        let because = i > entry.offsets[r] ? i - 1 : -1;
        if (source >= 0) {
          const at = forward ? forwardAt[source * micros + m] : gradientAt[source * micros + m];
          if (at < 0) break;
          if (at > now || because < 0) {
            because = (forward ? forwardBy : gradientBy)[source * micros + m];
            now = Math.max(now, at);
          }
        }
        out.binding[i] = because;
        out.start[i] = now;
        const took = durationOf(i);
        now += took;
        out.end[i] = now;
        out.busy[r] += took;
        moved = true;
        left--;
        if (!forward && !backward) continue;
        let arrived = now, by = i;
        const next = forward ? after[route + s] : before[route + s];
        if (next >= 0 && rankOf[next] !== r) {
          const lane = r * ranks + rankOf[next], t = entry.transferFrom[i];
          const begin = Math.max(channel[lane], now);
          out.binding[entry.count + t] = channel[lane] > now ? channelBy[lane] : i;
          arrived = begin + hop(forward ? w.forward : w.gradient, s, m);
          out.tStart[t] = begin;
          out.tEnd[t] = arrived;
          channel[lane] = arrived;
          channelBy[lane] = by = entry.count + t;
        }
        (forward ? forwardAt : gradientAt)[cell] = arrived;
        (forward ? forwardBy : gradientBy)[cell] = by;
      }
      head[r] = i;
      clock[r] = now;
    }
    if (!moved) throw new Error("the orders wait for each other");
  }
  out.makespan = Math.max(...clock);
  out.extras = followUps(entry, out, w.twins);
  out.step = out.extras.reduce((latest, e) => Math.max(latest, e[3]), out.makespan);
  return out;
}

function neighbours(entry) {
  const stages = entry.stages.length;
  const before = new Int32Array(entry.routes.length * stages).fill(-1), after = before.slice();
  entry.routes.forEach((route, r) => {
    for (let i = 1; i < route.length; i++) {
      before[r * stages + route[i]] = route[i - 1];
      after[r * stages + route[i - 1]] = route[i];
    }
  });
  return { before, after };
}

// Gradient reductions and the optimizer keep their lengths and start when their gradients are there.
function followUps(entry, times, twins) {
  const done = new Float64Array(entry.stages.length);
  for (let i = 0; i < entry.count; i++) {
    if (entry.kind[i] === W || entry.kind[i] === B) {
      done[entry.stage[i]] = Math.max(done[entry.stage[i]], times.end[i]);
    }
  }
  const readyAt = twins.map((copies) => Math.max(...copies.map((s) => done[s])));
  const out = [];
  for (let r = 0; r < entry.num_ranks; r++) {
    const mine = entry.extras.filter((e) => e[1] === r);
    const reductions = mine.filter((e) => e[0].startsWith("reduce stage "))
      .map((e) => ({ name: e[0], stage: Number(e[0].slice(13)), took: e[3] - e[2] }))
      .sort((a, b) => readyAt[a.stage] - readyAt[b.stage] || entry.stages[a.stage][0] - entry.stages[b.stage][0]);
    let clock = 0;
    for (const { name, stage, took } of reductions) {
      const begin = Math.max(clock, readyAt[stage]);
      clock = begin + took;
      out.push([name, r, begin, clock]);
    }
    const own = entry.stages.flatMap((s, i) => (s[2] === r ? [done[i]] : []));
    for (const e of mine.filter((x) => !x[0].startsWith("reduce stage "))) {
      const begin = Math.max(clock, ...own);
      out.push([e[0], r, begin, begin + e[3] - e[2]]);
    }
  }
  return out;
}

// The nodes (ops, then transfers) that decided the makespan, from the start to the last op.
function criticalPath(entry, times) {
  let last = 0;
  for (let i = 1; i < entry.count; i++) if (times.end[i] > times.end[last]) last = i;
  const path = [];
  const most = entry.count + entry.transferCount; // a file of foreign origin could run in a circle
  for (let node = last; node >= 0 && path.length < most; node = times.binding[node]) path.push(node);
  return path.reverse();
}
