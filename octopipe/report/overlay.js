// What is drawn over the lanes: transfer arrows, the critical path, the chosen micro-batch.

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

  drawTransfers(lanes) {
    const shown = [];
    this.arrows = 0;
    for (const { entry, first, stop } of lanes) {
      for (let i = first; i < stop; i++) {
        const t = entry.transferTo[i];
        if (t >= 0 && !this.isDim(entry, i)) shown.push([entry, t]);
      }
      if (shown.length > this.plot / ARROW_ROOM) return; // closer together they hide the ops
    }
    this.arrows = shown.length;
    const colour = this.ink.dark ? "rgba(220,228,238,0.62)" : "rgba(30,42,56,0.55)";
    shown.forEach(([entry, t]) => this.arrow(entry, t, colour, 1));
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
