// The chart: lanes of ops on a canvas, several timelines on one time axis.
// Zoomed out, a lane is painted pixel by pixel (each pixel the mean colour of the ops in it); zoomed in, op by
// op with labels and arrows. So a frame costs about the same for a hundred ops and for a hundred thousand.

const COMPUTE_SHARE = 0.62; // of a lane's height, where compute and exchange are drawn one above the other
const GUTTER = 100, AXIS = 30, TITLE = 26, LANE_GAP = 4, DETAIL_LIMIT = 4000;
const SHADES = 4;

class Gantt {
  constructor(canvas, entries, colours, events) {
    Object.assign(this, { canvas, entries, colours, events });
    this.context = canvas.getContext("2d", { alpha: false });
    this.raster = document.createElement("canvas");
    this.options = { shade: "micro-batch", memory: true, transfers: true, critical: false };
    this.selected = null; // {entry, micro, op}
    this.marked = null; // Map of entry -> Set of ops that a search found
    this.arrows = this.arrowsOf = 0; // transfers drawn, and how many there are in the window
    this.focus = null; // {entry, op}: what the keyboard or the pointer is at
    this.pointer = null;
    this.scroll = 0;
    this.frames = []; // milliseconds of the last frames, for tests
    this.theme();
    this.measure();
    this.fit();
    this.listen();
  }

  theme() {
    const style = getComputedStyle(this.canvas);
    const read = (name) => style.getPropertyValue(name).trim();
    this.ink = {
      page: read("--card"), lane: read("--lane"), text: read("--text"), quiet: read("--quiet"),
      line: read("--line"), critical: read("--critical"), memory: read("--memory"), over: read("--over"), found: read("--found"),
      dark: read("--theme") === "dark",
    };
    const lane = parseColour(this.ink.lane);
    this.palette = new Float32Array(KINDS.length * SHADES * 3);
    this.dimmed = new Float32Array(this.palette.length);
    this.names = [];
    for (let k = 0; k < KINDS.length; k++) {
      for (let s = 0; s < SHADES; s++) {
        const base = this.colours[KINDS[k]];
        const mixed = base.map((c) => c + (255 - c) * 0.42 * s / (SHADES - 1));
        const at = (k * SHADES + s) * 3;
        mixed.forEach((c, i) => {
          this.palette[at + i] = c;
          this.dimmed[at + i] = c * 0.22 + lane[i] * 0.78;
        });
        const text = (set) => `rgb(${[0, 1, 2].map((i) => Math.round(set[at + i])).join(",")})`;
        this.names.push([text(this.palette), text(this.dimmed)]);
      }
    }
    this.laneColour = lane;
    this.tint();
  }

  // The palette entry of every op: its kind, shaded by its stage or its micro-batch.
  tint() {
    for (const e of this.entries) {
      e.tint = new Uint8Array(e.count);
      const chunk = new Map();
      const seen = new Array(e.num_ranks).fill(0);
      if (e.stages) e.stages.forEach((s, i) => chunk.set(i, seen[s[2]]++));
      for (let i = 0; i < e.count; i++) {
        const by = this.options.shade === "stage" ? chunk.get(e.stage[i]) ?? e.stage[i]
          : this.options.shade === "micro-batch" ? e.micro[i] : 0;
        e.tint[i] = e.kind[i] * SHADES + by % SHADES;
      }
    }
  }

  // Where every lane lies; called when size, entries or options change.
  measure() {
    const lanes = this.entries.reduce((n, e) => n + e.num_ranks, 0);
    const room = Math.max(440, Math.min(window.innerHeight * 0.72, 780)) - AXIS - TITLE * this.entries.length;
    const memory = this.options.memory && this.entries.some((e) => e.memory);
    const each = Math.max(memory ? 34 : 12, Math.min(memory ? 52 : 30, room / lanes - LANE_GAP));
    const own = memory ? Math.min(24, each * 0.5) : Math.min(26, each);
    this.laneHeight = Math.round(own);
    this.memoryHeight = memory ? Math.round(each - own) : 0;
    this.rows = [];
    let y = AXIS;
    for (const e of this.entries) {
      this.rows.push({ title: true, entry: e, y });
      y += TITLE;
      e.laneTop = y;
      for (let r = 0; r < e.num_ranks; r++) {
        this.rows.push({ entry: e, rank: r, y });
        y += this.laneHeight + (e.memory ? this.memoryHeight : 0) + LANE_GAP;
      }
    }
    this.content = y + 4;
    this.height = Math.min(this.content, 1100); // beyond, dragging scrolls
    this.width = this.canvas.parentElement.clientWidth;
    this.ratio = Math.min(window.devicePixelRatio || 1, 2);
    this.canvas.width = Math.round(this.width * this.ratio);
    this.canvas.height = Math.round(this.height * this.ratio);
    this.canvas.style.height = `${this.height}px`;
    this.plot = this.width - GUTTER - 8;
    this.scaleMemory();
    this.scroll = Math.max(0, Math.min(this.scroll, this.content - this.height));
  }

  // The curves fill their strips; a limit far above them is a number in the gutter, not a line.
  scaleMemory() {
    const peak = Math.max(...this.entries.flatMap((e) => peakBytes(e, e.now) ?? []), 1);
    const limits = this.entries.flatMap((e) => e.capacity).filter((c) => c !== null && c < 2 * peak);
    this.memoryTop = Math.max(peak * 1.12, ...limits.map((c) => c * 1.06));
  }

  get horizon() { return Math.max(...this.entries.map((e) => e.now.step), 1e-9); }

  fit() {
    this.from = 0;
    this.to = this.horizon * 1.015;
    this.redraw();
  }

  show(from, to) {
    const most = this.horizon * 1.015, least = most / 2e6;
    const span = Math.min(Math.max(to - from, least), most);
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(middle - span / 2, 0), most - span);
    this.to = this.from + span;
    this.redraw();
  }

  zoom(factor, x = GUTTER + this.plot / 2) {
    const at = this.timeAt(x), span = (this.to - this.from) / factor;
    const share = (x - GUTTER) / this.plot;
    this.show(at - share * span, at + (1 - share) * span);
  }

  pan(share) {
    const by = (this.to - this.from) * share;
    const most = this.horizon * 1.015;
    const from = Math.min(Math.max(this.from + by, 0), Math.max(most - (this.to - this.from), 0));
    this.to += from - this.from;
    this.from = from;
    this.redraw();
  }

  scrollBy(pixels) {
    this.scroll = Math.max(0, Math.min(this.scroll + pixels, this.content - this.height));
    this.redraw();
  }

  timeAt(x) { return this.from + (x - GUTTER) / this.plot * (this.to - this.from); }
  xAt(time) { return GUTTER + (time - this.from) / (this.to - this.from) * this.plot; }

  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = null;
      this.draw();
    });
  }

  draw() {
    const began = performance.now(), c = this.context;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.fillStyle = this.ink.page;
    c.fillRect(0, 0, this.width, this.height);
    c.save();
    c.beginPath();
    c.rect(0, AXIS, this.width, this.height - AXIS);
    c.clip();
    c.translate(0, -this.scroll);
    const visible = this.rows.filter((row) => row.y + 90 > this.scroll && row.y < this.scroll + this.height);
    const lanes = visible.filter((row) => !row.title).map((row) => ({ ...row, ...this.range(row) }));
    // An op of a few layers has a dozen pieces.
    const weight = (l) => (l.stop - l.first) * (this.hasLanes(l.entry) ? 12 : 1);
    this.detailed = lanes.reduce((n, l) => n + weight(l), 0) <= DETAIL_LIMIT;
    this.drawGrid();
    for (const lane of lanes) {
      c.fillStyle = this.ink.lane;
      c.fillRect(GUTTER, lane.y, this.plot, this.laneHeight);
    }
    if (this.detailed) lanes.forEach((lane) => this.drawOps(lane));
    else this.paintLanes(lanes);
    lanes.forEach((lane) => this.drawExtras(lane));
    if (this.memoryHeight) lanes.forEach((lane) => this.drawMemory(lane));
    this.arrows = this.arrowsOf = 0;
    if (this.options.transfers) this.drawTransfers(lanes);
    if (this.options.critical) this.entries.forEach((e) => this.drawCritical(e));
    if (this.selected) this.drawSelected();
    if (this.marked) this.drawMarked(lanes);
    if (this.focus) this.outline(this.focus.entry, this.focus.op, this.ink.text, 1.5);
    this.drawFrame(visible);
    c.restore();
    this.drawAxis();
    if (this.events.drawn) this.events.drawn();
    this.frames.push(performance.now() - began);
    if (this.frames.length > 240) this.frames.shift();
  }

  // The ops of a lane that touch the window.
  range({ entry, rank }) {
    const { start, end } = entry.now;
    const lo = entry.offsets[rank], hi = entry.offsets[rank + 1];
    return { first: lowerBound(end, this.from, lo, hi), stop: lowerBound(start, this.to, lo, hi) };
  }

  isDim(entry, i) { return this.selected !== null && entry.micro[i] !== this.selected.micro; }

  // The pixels to paint lanes on; made anew only when their size changes.
  canvasFor(width, height) {
    if (!this.paint || this.raster.width !== width || this.raster.height !== height) {
      Object.assign(this.raster, { width, height });
      const brush = this.raster.getContext("2d", { willReadFrequently: true });
      const image = brush.createImageData(width, height), cells = width * KINDS.length;
      this.paint = {
        brush, image, pixels: new Uint32Array(image.data.buffer),
        share: new Float32Array(cells), most: new Float32Array(cells), tint: new Uint8Array(cells),
      };
    }
    return this.paint;
  }

  // Zoomed out: every pixel column of a lane is a stack of kinds, each as high as its share of that time.
  paintLanes(lanes) {
    const width = Math.round(this.plot * this.ratio), high = Math.round(this.laneHeight * this.ratio);
    const scale = width / (this.to - this.from), from = this.from, kinds = KINDS.length;
    const { brush, image, pixels, share, most, tint } = this.canvasFor(width, high * lanes.length);
    const pack = (set, at) => (0xff000000 | set[at + 2] << 16 | set[at + 1] << 8 | set[at]) >>> 0;
    const chosen = this.selected === null ? this.palette : this.dimmed;
    const colours = Array.from({ length: kinds * SHADES }, (_, i) => pack(chosen, i * 3));
    const idle = pack(this.laneColour, 0);
    // One row of pixels: what ran in it, of the ops or of one of their lanes, between two heights.
    const paint = (row, visit, top, bottom) => {
      share.fill(0);
      most.fill(0);
      visit((i, begin, finish) => {
        const x0 = Math.max((begin - from) * scale, 0), x1 = Math.min((finish - from) * scale, width);
        const last = Math.min(x1 | 0, width - 1), kind = row.entry.kind[i];
        for (let x = x0 | 0; x <= last; x++) {
          const part = Math.min(x1, x + 1) - Math.max(x0, x), cell = x * kinds + kind;
          share[cell] += part;
          if (part > most[cell]) {
            most[cell] = part;
            tint[cell] = row.entry.tint[i];
          }
        }
      });
      const high = bottom - top;
      for (let x = 0; x < width; x++) {
        let y = bottom, sum = 0;
        for (let k = 0; k < kinds; k++) {
          const cell = x * kinds + k;
          if (share[cell] === 0) continue;
          sum += share[cell];
          // Many ops in one pixel have no shade of their own: take the middle one.
          const colour = colours[most[cell] > 0.5 ? tint[cell] : k * SHADES + 1];
          const until = top + Math.round(high * (1 - Math.min(sum, 1)));
          for (; y > until; y--) pixels[(y - 1) * width + x] = colour;
        }
        for (; y > top; y--) pixels[(y - 1) * width + x] = idle;
      }
    };
    lanes.forEach((lane, number) => {
      const y = number * high, { start, end } = lane.entry.now;
      if (this.hasLanes(lane.entry)) {
        const middle = y + Math.round(COMPUTE_SHARE * high);
        paint(lane, (each) => this.pieces(lane, 0, each), y, middle);
        paint(lane, (each) => this.pieces(lane, 1, each), middle, y + high);
      } else {
        paint(lane, (each) => {
          for (let i = lane.first; i < lane.stop; i++) each(i, start[i], end[i]);
        }, y, y + high);
      }
    });
    brush.putImageData(image, 0, 0);
    this.context.imageSmoothingEnabled = false;
    lanes.forEach((lane, row) => this.context.drawImage(
      this.raster, 0, row * high, width, high, GUTTER, lane.y, this.plot, this.laneHeight));
  }

  // Lanes were simulated with the times that the entry came with.
  hasLanes(entry) { return entry.lanes !== null && entry.now === entry.base; }

  // Op, start and end of a rank's pieces on one lane that touch the window.
  pieces({ entry, rank }, which, each) {
    const { offsets, start, end, reach, op, lane } = entry.lanes;
    let i = lowerBound(reach, this.from, offsets[rank], offsets[rank + 1]);
    for (; i < offsets[rank + 1] && start[i] < this.to; i++) {
      if (lane[i] === which && end[i] > this.from) each(op[i], start[i], end[i]);
    }
  }

  // Compute above, exchange below; what runs on both at once stands one above the other.
  drawPieces(lane) {
    const c = this.context, e = lane.entry, h = this.laneHeight, middle = Math.round(COMPUTE_SHARE * h);
    for (const which of [0, 1]) {
      const y = lane.y + (which ? middle + 1 : 0), high = which ? h - middle - 1 : middle;
      c.font = `${Math.min(11, high)}px ${FONT}`;
      this.pieces(lane, which, (i, begin, finish) => {
        const x0 = Math.max(this.xAt(begin), GUTTER), x1 = Math.min(this.xAt(finish), GUTTER + this.plot);
        const w = x1 - x0, dim = this.isDim(e, i);
        c.fillStyle = this.names[e.tint[i]][dim ? 1 : 0];
        c.fillRect(x0, y, Math.max(w > 3 ? w - 0.7 : w, 0.4), high);
        const brief = String(e.micro[i]), named = KINDS[e.kind[i]] + brief;
        const text = [e.stage[i] + named, named, brief].find((words) => words.length * 6.6 + 3 < w);
        if (!which && high >= 9 && text) {
          c.fillStyle = dim ? this.ink.quiet : "#0c1620";
          c.fillText(text, (x0 + x1) / 2, y + high / 2 + 0.5);
        }
      });
    }
  }

  drawOps(lane) {
    const c = this.context, e = lane.entry, { start, end } = e.now, h = this.laneHeight;
    c.font = `11px ${FONT}`;
    c.textBaseline = "middle";
    c.textAlign = "center";
    if (this.hasLanes(e)) return this.drawPieces(lane);
    const letter = 6.6;
    for (let i = lane.first; i < lane.stop; i++) {
      const x0 = Math.max(this.xAt(start[i]), GUTTER), x1 = Math.min(this.xAt(end[i]), GUTTER + this.plot);
      const w = x1 - x0, dim = this.isDim(e, i);
      c.fillStyle = this.names[e.tint[i]][dim ? 1 : 0];
      c.fillRect(x0, lane.y, Math.max(w > 3 ? w - 0.7 : w, 0.4), h);
      // A forward whose stage recomputes keeps its inputs alone: a foot in the colour of what will be computed again.
      if (w > 3 && e.kind[i] === F && recomputes(e, e.stage[i])) {
        c.fillStyle = this.names[R * SHADES][dim ? 1 : 0];
        c.fillRect(x0, lane.y + h - 4, w - 0.7, 4);
      }
      if (h < 12 || w < 12) continue;
      const brief = String(e.micro[i]), named = KINDS[e.kind[i]] + brief, whole = e.stage[i] + named;
      const text = [whole, named, brief].find((words, at) => words.length * letter + (at < 2 ? 6 : 3) < w);
      if (text) {
        c.fillStyle = dim ? this.ink.quiet : "#0c1620";
        c.fillText(text, (x0 + x1) / 2, lane.y + h / 2 + 0.5);
      }
    }
  }

  drawExtras({ entry, rank, y }) {
    const c = this.context;
    c.font = `11px ${FONT}`;
    c.textAlign = "center";
    c.textBaseline = "middle";
    const stop = entry.offsets[rank + 1], lastEnd = stop > entry.offsets[rank] ? entry.now.end[stop - 1] : 0;
    for (const [name, r, begin, finish] of entry.now.extras) {
      if (r !== rank || finish < this.from || begin > this.to) continue;
      // Beside compute it is a foot of the lane, so that no op is hidden; alone it fills the lane.
      const clear = Math.max(begin, Math.min(finish, lastEnd));
      const [x0, x1, foot] = [clear, finish, begin].map((at) => Math.min(Math.max(this.xAt(at), GUTTER), GUTTER + this.plot));
      c.fillStyle = this.ink.quiet;
      c.fillRect(foot, y + this.laneHeight - 2, x0 - foot, 2);
      c.fillStyle = this.ink.line;
      c.fillRect(x0, y + 2, Math.max(x1 - x0, 0.5), this.laneHeight - 4);
      if (x1 - x0 > name.length * 6.6) {
        c.fillStyle = this.ink.text;
        c.fillText(name, (x0 + x1) / 2, y + this.laneHeight / 2);
      }
    }
  }

  line(x0, y0, x1, y1) {
    this.context.beginPath();
    this.context.moveTo(x0, y0);
    this.context.lineTo(x1, y1);
    this.context.stroke();
  }

  drawGrid() {
    const c = this.context;
    c.strokeStyle = this.ink.line;
    c.lineWidth = 0.6;
    for (const at of axisTicks(this.from, this.to, this.plot / 110)) {
      const x = Math.round(this.xAt(at)) + 0.5;
      this.line(x, this.scroll, x, this.scroll + this.height);
    }
  }

  // Names, step ends, and a clean gutter over whatever ran past the plot's edge.
  drawFrame(rows) {
    const c = this.context;
    c.fillStyle = this.ink.page;
    c.fillRect(0, this.scroll, GUTTER - 0.5, this.height);
    c.fillRect(GUTTER + this.plot, this.scroll, 8, this.height);
    c.textBaseline = "middle";
    for (const row of rows) {
      if (row.title) {
        c.fillStyle = this.ink.page;
        c.fillRect(0, row.y, this.width, TITLE - 2);
        c.textAlign = "left";
        c.font = `600 13px ${FONT}`;
        c.fillStyle = this.ink.text;
        const name = this.fitting(row.entry.label + (row.entry.now === row.entry.base ? "" : " (what if)"), this.width * 0.55);
        c.fillText(name, 4, row.y + TITLE / 2 + 2);
        const wide = c.measureText(name).width;
        c.font = `12px ${FONT}`;
        c.fillStyle = this.ink.quiet;
        c.fillText(this.fitting(headline(row.entry), this.width - wide - 22), wide + 14, row.y + TITLE / 2 + 2);
        const x = this.xAt(row.entry.now.step);
        if (x > GUTTER && x <= GUTTER + this.plot + 1) {
          c.strokeStyle = this.ink.text;
          c.lineWidth = 1;
          const y0 = this.laneY(row.entry, 0) - 2;
          const y1 = this.laneY(row.entry, row.entry.num_ranks) - LANE_GAP + 1;
          this.line(x, y0, x, y1);
        }
      } else if (this.laneHeight > 8) {
        c.textAlign = "right";
        c.font = `${this.laneHeight > 13 ? 12 : 11}px ${FONT}`;
        c.fillStyle = this.ink.quiet;
        c.fillText(`rank ${row.rank}`, GUTTER - 10, row.y + this.laneHeight / 2 + 0.5);
        const peaks = this.memoryHeight > 12 && row.entry.memory ? peakBytes(row.entry, row.entry.now) : null;
        if (peaks) {
          const peak = peaks[row.rank], limit = row.entry.capacity[row.rank] ?? null;
          const short = (bytes) => (bytes / GIB).toFixed(bytes < 10 * GIB ? 1 : 0);
          c.font = `11px ${FONT}`;
          c.fillStyle = limit !== null && peak > limit * (1 + 1e-12) ? this.ink.over : this.ink.quiet;
          c.fillText(limit === null ? `${short(peak)} GiB` : `${short(peak)} of ${short(limit)} GiB`,
            GUTTER - 10, row.y + this.laneHeight + this.memoryHeight / 2);
        }
      }
    }
  }

  // The text, cut with an ellipsis where it is wider than its place.
  fitting(text, width) {
    const c = this.context;
    if (c.measureText(text).width <= width) return text;
    let keep = text.length;
    while (keep > 1 && c.measureText(`${text.slice(0, keep)}…`).width > width) keep--;
    return `${text.slice(0, keep)}…`;
  }

  drawAxis() {
    const c = this.context;
    c.fillStyle = this.ink.page;
    c.fillRect(0, 0, this.width, AXIS);
    c.font = `11px ${FONT}`;
    c.textBaseline = "middle";
    c.textAlign = "center";
    c.fillStyle = this.ink.quiet;
    const marks = axisTicks(this.from, this.to, this.plot / 110);
    const digits = marks.length > 1 ? Math.max(0, -Math.floor(Math.log10(marks[1] - marks[0]) + 1e-9)) : 1;
    const seconds = this.from + this.to > 20000 && digits === 0;
    for (const at of marks) {
      const text = seconds ? String(+(at / 1000).toFixed(3)) : at.toFixed(Math.min(digits, 9));
      c.fillText(text, Math.min(this.xAt(at), this.width - c.measureText(text).width / 2 - 1), 12);
    }
    c.textAlign = "right";
    c.fillText(seconds ? "seconds" : "ms", GUTTER - 28, 12);
    const most = this.horizon * 1.015, share = (this.to - this.from) / most;
    if (share < 0.999) {
      c.fillStyle = this.ink.line;
      c.fillRect(GUTTER, AXIS - 6, this.plot, 3);
      c.fillStyle = this.ink.quiet;
      c.fillRect(GUTTER + this.from / most * this.plot, AXIS - 6, Math.max(share * this.plot, 3), 3);
    }
    if (this.pointer && this.pointer.x > GUTTER && this.pointer.x < GUTTER + this.plot) {
      c.strokeStyle = this.ink.quiet;
      c.lineWidth = 0.8;
      this.line(this.pointer.x, AXIS, this.pointer.x, this.height);
      const text = `${formatMs(this.timeAt(this.pointer.x))}`;
      const wide = c.measureText(text).width + 10;
      c.fillStyle = this.ink.text;
      const middle = Math.min(this.pointer.x, this.width - wide / 2);
      c.fillRect(middle - wide / 2, 3, wide, 18);
      c.fillStyle = this.ink.page;
      c.textAlign = "center";
      c.fillText(text, middle, 12);
    }
  }
}
