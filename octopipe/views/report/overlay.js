// What is drawn over and under the lanes: transfer arrows, memory, the critical path, the chosen micro-batch.

// Pixels between two arrows of one pair of ranks: closer together they hide the ops. Where ops are too many to be drawn one by
// one, a few arrows still show who sends to whom.
const ARROW_STEP = 7, SPARSE_ARROW_STEP = 60;

Object.assign(Gantt.prototype, {
  laneY(entry, rank) {
    return entry.laneTop + rank * (this.laneHeight + (entry.memory ? this.memoryHeight : 0) + LANE_GAP);
  },

  // A transfer's arrow leaves the sender's lane when it starts and enters the receiver's when it ends.
  arrow(entry, t, colour, width) {
    const c = this.context, h = this.laneHeight;
    const a = entry.rank[entry.producer[t]], b = entry.rank[entry.consumer[t]];
    const down = b > a, x0 = this.xAt(entry.now.tStart[t]), x1 = this.xAt(entry.now.tEnd[t]);
    const y0 = this.laneY(entry, a) + (down ? h : 0), y1 = this.laneY(entry, b) + (down ? 0 : h);
    const bend = (y1 - y0) / 2, tip = down ? -5 : 5;
    c.strokeStyle = c.fillStyle = colour;
    c.lineWidth = width;
    c.beginPath();
    c.moveTo(x0, y0);
    c.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1 + tip);
    c.stroke();
    c.beginPath();
    c.moveTo(x1, y1);
    c.lineTo(x1 - 3, y1 + tip * 1.2);
    c.lineTo(x1 + 3, y1 + tip * 1.2);
    c.fill();
  },

  // Every transfer in the window, or as many as can be told apart; `arrows` of `arrowsOf` are drawn.
  drawTransfers(lanes) {
    const shown = [], apart = this.detailed ? ARROW_STEP : SPARSE_ARROW_STEP;
    for (const { entry, first, stop } of lanes) {
      const lastOf = new Float64Array(entry.num_ranks).fill(-Infinity); // per sender, where its last arrow ends
      for (let i = first; i < stop; i++) {
        const t = entry.transferTo[i];
        if (t < 0 || this.isDim(entry, i)) continue;
        this.arrowsOf++;
        const way = entry.rank[entry.producer[t]], x = this.xAt(entry.now.tEnd[t]);
        if (Math.abs(x - lastOf[way]) < apart) continue;
        lastOf[way] = x;
        shown.push([entry, t]);
      }
    }
    this.arrows = shown.length;
    const crowd = Math.min(1, Math.max(0, shown.length / this.plot - 0.1) * 2); // many arrows are drawn fainter
    const alpha = (this.ink.dark ? 0.62 : 0.55) * (1 - 0.45 * crowd);
    const colour = this.ink.dark ? `rgba(220,228,238,${alpha})` : `rgba(30,42,56,${alpha})`;
    shown.forEach(([entry, t]) => this.arrow(entry, t, colour, 1));
  },

  // A rank's memory, part upon part, each pixel as high as its fullest moment; dashed where the limit is near.
  drawMemory({ entry, rank, y }) {
    const memory = memoryOf(entry, entry.now), curve = memory && memory.curves[rank];
    if (!curve || !curve.time.length) return;
    const c = this.context, h = this.memoryHeight - 2, bottom = y + this.laneHeight + 1 + h;
    const n = curve.time.length, step = 1 / this.ratio, scale = h / this.memoryTop;
    const names = memoryParts(entry), edge = Math.min(GUTTER + this.plot, this.xAt(entry.now.step)); // no memory after the step
    if (edge <= GUTTER) return;
    // What never changes is a band; above it, what is held at the fullest moment of every pixel.
    const fixed = curve.held ? entry.memoryModel.shares.length : 0, stack = curve.held ?? [curve.level];
    let floor = bottom;
    for (let p = 0; p < fixed; p++) {
      const high = entry.memoryModel.shares[p][1] * entry.memoryModel.static[rank] * scale;
      c.fillStyle = MEMORY_COLOURS[names[p]];
      c.fillRect(GUTTER, floor - high, edge - GUTTER, high);
      floor -= high;
    }
    const tops = stack.map(() => []), last = stack.map(() => NaN), next = stack.map(() => 0);
    let i = Math.max(lowerBound(curve.time, this.from, 0, n) - 1, 0), now = i;
    for (let x = GUTTER; x < edge; x += step) {
      const until = this.timeAt(x + step);
      let highest = now;
      for (; i < n && curve.time[i] <= until; i++) {
        now = i;
        if (curve.level[i] > curve.level[highest]) highest = i;
      }
      let sum = 0, moved = false;
      for (let p = 0; p < stack.length; p++) {
        sum += stack[p][highest];
        next[p] = Math.round((floor - sum * scale) * 2) / 2;
        moved ||= next[p] !== last[p];
      }
      if (!moved) continue;
      for (let p = 0; p < stack.length; p++) {
        if (x > GUTTER) tops[p].push(x, last[p]);
        tops[p].push(x, next[p]);
        last[p] = next[p];
      }
    }
    for (let p = stack.length - 1; p >= 0; p--) {
      const line = tops[p];
      c.beginPath();
      c.moveTo(GUTTER, floor);
      for (let k = 0; k < line.length; k += 2) c.lineTo(line[k], line[k + 1]);
      c.lineTo(edge, last[p]);
      c.lineTo(edge, floor);
      c.fillStyle = MEMORY_COLOURS[names[fixed + p]];
      c.fill();
    }
    const limit = entry.capacity[rank];
    if (limit !== null && limit !== undefined && limit <= this.memoryTop) {
      const over = peakBytes(entry, entry.now)[rank] > limit * (1 + 1e-12), at = bottom - limit * scale;
      c.strokeStyle = over ? this.ink.over : this.ink.quiet;
      c.lineWidth = over ? 1.5 : 0.8;
      c.setLineDash([4, 3]);
      this.line(GUTTER, at, GUTTER + this.plot, at);
      c.setLineDash([]);
    }
  },

  // What a search found: outlined, and where ops are thin a tick above the lane.
  drawMarked(lanes) {
    for (const { entry, first, stop, y } of lanes) {
      const found = this.marked.get(entry);
      this.context.fillStyle = this.ink.found;
      for (let i = first; i < stop && found && found.size; i++) {
        if (!found.has(i)) continue;
        this.outline(entry, i, this.ink.found, 2);
        this.context.fillRect(Math.max(this.xAt(entry.now.start[i]), GUTTER), y - 3, 2, 3);
      }
    }
  },

  // Bring an op into view, wide enough to read, and follow its micro-batch.
  reveal(entry, op) {
    const { start, end } = entry.now, took = Math.max(end[op] - start[op], this.horizon * 1e-9);
    const span = Math.min(this.to - this.from, took * this.plot / 60), middle = (start[op] + end[op]) / 2;
    if (span < this.to - this.from || start[op] < this.from || end[op] > this.to) this.show(middle - span / 2, middle + span / 2);
    const y = this.laneY(entry, entry.rank[op]);
    if (y < this.scroll + AXIS || y + this.laneHeight > this.scroll + this.height) {
      this.scroll = Math.max(0, Math.min(y - this.height / 2, this.content - this.height));
    }
    this.focus = { entry, op };
    this.pointer = null;
    this.events.hover(null, null);
    this.select(entry, op);
  },

  outline(entry, i, colour, width) {
    const { start, end } = entry.now;
    const x0 = Math.max(this.xAt(start[i]), GUTTER), x1 = Math.min(this.xAt(end[i]), GUTTER + this.plot);
    if (x1 < GUTTER || x0 > GUTTER + this.plot) return;
    this.context.strokeStyle = colour;
    this.context.lineWidth = width;
    this.context.strokeRect(x0 - 0.5, this.laneY(entry, entry.rank[i]) - 0.5, Math.max(x1 - x0, 1), this.laneHeight + 1);
  },

  drawCritical(entry) {
    const c = this.context, { start, end, tStart, tEnd } = entry.now;
    if (entry.pathOf !== entry.now) {
      entry.path = criticalPath(entry, entry.now);
      entry.pathOf = entry.now;
    }
    c.fillStyle = c.strokeStyle = this.ink.critical;
    c.lineWidth = 2;
    let lastX = -10, lastRank = -1;
    for (const node of entry.path) {
      if (node >= entry.count) {
        const t = node - entry.count;
        if (tEnd[t] < this.from || tStart[t] > this.to) continue;
        if (!this.detailed && this.xAt(tEnd[t]) - lastX < 2) continue;
        this.arrow(entry, t, this.ink.critical, 2);
        continue;
      }
      if (end[node] < this.from || start[node] > this.to) continue;
      const x0 = Math.max(this.xAt(start[node]), GUTTER), x1 = Math.min(this.xAt(end[node]), GUTTER + this.plot);
      if (x1 - lastX < 0.7 && entry.rank[node] === lastRank) continue;
      const y = this.laneY(entry, entry.rank[node]);
      if (x1 - x0 > 4) c.strokeRect(x0 + 0.6, y + 1, x1 - x0 - 1.6, this.laneHeight - 2);
      else c.fillRect(x0, y + this.laneHeight - 3, Math.max(x1 - x0, 1), 3);
      lastX = x1;
      lastRank = entry.rank[node];
    }
  },

  // The chosen micro-batch's way through the pipeline: its ops, and lines from each to the next.
  drawSelected() {
    const { micro } = this.selected, c = this.context;
    for (const entry of this.entries) {
      const { start, end } = entry.now;
      for (let i = 0; i < entry.count; i++) {
        if (entry.micro[i] !== micro || end[i] < this.from || start[i] > this.to) continue;
        const x0 = Math.max(this.xAt(start[i]), GUTTER), x1 = Math.min(this.xAt(end[i]), GUTTER + this.plot);
        if (!this.detailed) {
          c.fillStyle = this.names[entry.tint[i]][0];
          c.fillRect(x0, this.laneY(entry, entry.rank[i]), Math.max(x1 - x0, 1.2), this.laneHeight);
        }
        const t = entry.transferTo[i];
        if (t >= 0 && this.options.transfers) this.arrow(entry, t, this.ink.text, 1.3);
      }
    }
    const { entry, op } = this.selected;
    this.outline(entry, op, this.ink.text, 2);
  },
});
