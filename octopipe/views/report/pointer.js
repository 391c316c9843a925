// Hands on the chart: wheel, drag, click, hover and keys.

const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";

Object.assign(Gantt.prototype, {
  // What lies under a point: {entry, rank, op, time, strip}, op -1 between ops and on the memory strip, or null outside.
  hit(x, y) {
    if (x < GUTTER || x > GUTTER + this.plot || y < AXIS) return null;
    const at = y + this.scroll;
    const row = this.rows.find((r) => !r.title && at >= r.y - 1 && at < r.y + this.laneHeight
      + (r.entry.memory ? this.memoryHeight : 0) + LANE_GAP - 1);
    if (!row) return null;
    const { entry, rank } = row, time = this.timeAt(x);
    const lo = entry.offsets[rank], hi = entry.offsets[rank + 1];
    const strip = this.memoryHeight > 0 && Boolean(entry.memory) && at > row.y + this.laneHeight + 1;
    let op = lowerBound(entry.now.end, time, lo, hi);
    const slack = (this.to - this.from) / this.plot * 1.5; // ops thinner than a pixel can still be pointed at
    if (strip || op >= hi || entry.now.start[op] > time + slack) op = -1;
    if (op >= 0 && entry.partner[op] >= 0 && this.hasLanes(entry)) {
      // Of two ops that run together, the one whose compute or exchange is pointed at.
      this.pieces(row, at < row.y + COMPUTE_SHARE * this.laneHeight ? 0 : 1, (i, begin, finish) => {
        if (begin <= time && time <= finish) op = i;
      });
    }
    return { entry, rank, op, time, strip };
  },

  listen() {
    const canvas = this.canvas;
    let drag = null;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    canvas.addEventListener("wheel", (event) => {
      const { x } = place(event), sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (sideways) {
        event.preventDefault();
        this.pan((event.deltaX || event.deltaY) / this.plot);
        return;
      }
      // Fully zoomed out, wheeling on belongs to the page.
      const all = this.to - this.from >= this.horizon * 1.0149;
      if (event.deltaY > 0 && all && !event.ctrlKey) return;
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY * (event.deltaMode === 1 ? 0.05 : 0.0016)), x);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { ...place(event), from: this.from, to: this.to, scroll: this.scroll, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = place(event);
      if (drag) {
        const dx = now.x - drag.x, dy = now.y - drag.y;
        if (!drag.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
        drag.moved = true;
        canvas.classList.add("dragging");
        const by = dx / this.plot * (drag.to - drag.from);
        const most = this.horizon * 1.015;
        const from = Math.min(Math.max(drag.from - by, 0), Math.max(most - (drag.to - drag.from), 0));
        this.from = from;
        this.to = from + drag.to - drag.from;
        this.scroll = Math.max(0, Math.min(drag.scroll - dy, this.content - this.height));
        this.events.hover(null, now);
      } else {
        this.point(now);
      }
      this.pointer = now;
      this.redraw();
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) this.click(place(event));
      drag = null;
      canvas.classList.remove("dragging");
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", () => {
      this.pointer = this.focus = null;
      this.events.hover(null, null);
      this.redraw();
    });
    canvas.addEventListener("dblclick", () => this.fit());
    canvas.addEventListener("keydown", (event) => {
      if (this.key(event.key, event.shiftKey)) event.preventDefault();
    });
    // Keys also work before anything has the focus, but for those that scroll the page or press a button.
    document.addEventListener("keydown", (event) => {
      if (!canvas.isConnected || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      if (event.target !== document.body && event.target !== document.documentElement) return;
      const scrolls = ["ArrowUp", "ArrowDown", "Enter", " ", "Home"].includes(event.key) && !this.focus;
      if (!scrolls && this.key(event.key, event.shiftKey)) event.preventDefault();
    });
  },

  point(at) {
    const found = this.hit(at.x, at.y);
    this.focus = found && found.op >= 0 ? { entry: found.entry, op: found.op } : null;
    this.events.hover(found, at);
  },

  click(at) {
    const found = this.hit(at.x, at.y);
    if (found && found.op >= 0) this.select(found.entry, found.op);
    else this.select(null);
  },

  select(entry, op) {
    this.selected = entry ? { entry, op, micro: entry.micro[op] } : null;
    this.events.select(this.selected);
    this.redraw();
  },

  key(key, shift) {
    switch (key) {
      case "ArrowLeft": this.pan(shift ? -0.8 : -0.12); return true;
      case "ArrowRight": this.pan(shift ? 0.8 : 0.12); return true;
      case "ArrowUp": this.step(-1, true); return true;
      case "ArrowDown": this.step(1, true); return true;
      case "+": case "=": this.zoom(1.5); return true;
      case "-": case "_": this.zoom(1 / 1.5); return true;
      case "0": case "Home": this.fit(); return true;
      case "n": case "N": this.step(1, false); return true;
      case "p": case "P": this.step(-1, false); return true;
      case "Enter": case " ": if (this.focus) this.select(this.focus.entry, this.focus.op); return true;
      case "/": if (this.events.find) this.events.find(); return true;
      case "Escape": this.select(null); this.focus = null; this.events.hover(null, null); return true;
      default: return false;
    }
  },

  // Move the keyboard's place: along a lane, or to the op at the same time one lane further.
  step(by, acrossLanes) {
    const lanes = this.rows.filter((r) => !r.title && r.entry.offsets[r.rank] < r.entry.offsets[r.rank + 1]);
    if (!lanes.length) return;
    let next;
    if (!this.focus) {
      next = { entry: lanes[0].entry, op: this.range(lanes[0]).first };
      next.op = Math.min(next.op, lanes[0].entry.offsets[lanes[0].rank + 1] - 1);
    } else {
      const { entry, op } = this.focus;
      const at = lanes.findIndex((l) => l.entry === entry && l.rank === entry.rank[op]);
      if (acrossLanes) {
        const lane = lanes[Math.max(0, Math.min(at + by, lanes.length - 1))];
        const lo = lane.entry.offsets[lane.rank], hi = lane.entry.offsets[lane.rank + 1];
        next = { entry: lane.entry, op: Math.min(lowerBound(lane.entry.now.end, entry.now.start[op], lo, hi), hi - 1) };
      } else {
        const lo = entry.offsets[entry.rank[op]], hi = entry.offsets[entry.rank[op] + 1] - 1;
        next = { entry, op: Math.max(lo, Math.min(op + by, hi)) };
      }
    }
    this.focus = next;
    const { start, end } = next.entry.now, span = this.to - this.from;
    if (start[next.op] < this.from || end[next.op] > this.to) {
      this.show(start[next.op] - span / 2, start[next.op] + span / 2);
    }
    const y = this.laneY(next.entry, next.entry.rank[next.op]);
    if (y < this.scroll + AXIS) this.scroll = Math.max(0, y - AXIS);
    if (y + this.laneHeight > this.scroll + this.height) this.scroll = y + this.laneHeight + 8 - this.height;
    const x = Math.max(this.xAt(start[next.op]), GUTTER);
    this.events.hover({ ...next, rank: next.entry.rank[next.op], time: start[next.op] }, { x, y: y - this.scroll }, true);
    this.redraw();
  },
});
