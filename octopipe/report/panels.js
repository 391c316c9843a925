// Everything around the chart: cards, partition strips, idle-time bars, search curve, what-if, numbers.

const RANK_COLOURS = ["#4477aa", "#ee8866", "#44aa77", "#ccbb44", "#aa5599", "#66bbdd", "#cc6677", "#999933",
  "#8899aa", "#dd99bb"];
const PHASES = { start: "#7c8794", partition: "#f7bb42", placement: "#c6aac4", schedule: "#4f8fd0", recompute: "#2cbe6a" };
const OTHER_PHASES = ["#d66233", "#cc6699", "#66bbdd", "#999933"];

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

function shape(tag, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function section(title, note, ...children) {
  const id = `s-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return element("section", { class: "card", "aria-labelledby": id },
    element("h2", { id }, title), note ? element("p", { class: "note" }, note) : null, ...children);
}

function cards(entries) {
  const first = entries[0].base.step;
  return element("div", { class: "cards" }, ...entries.map((e) => {
    const gain = first / e.base.step;
    const peak = Math.max(...e.numbers.peak_bytes, 0);
    const facts = [`${percent(e.numbers.bubble_ratio)} bubble`];
    if (peak > 0) facts.push(`peak ${gib(peak)}`);
    if (!e.numbers.fits) facts.push("does not fit");
    if (e.lower_bound_ms) facts.push(`${percent(e.base.step / e.lower_bound_ms - 1)} above the lower bound`);
    return element("div", { class: `kpi${e.numbers.fits ? "" : " bad"}` },
      element("div", { class: "name" }, e.label, e.measured ? element("span", { class: "tag" }, "measured") : null),
      element("div", { class: "big" }, formatMs(e.base.step),
        entries.length > 1 && e !== entries[0]
          ? element("span", { class: gain >= 1 ? "gain" : "loss" }, `×${gain.toFixed(2)}`) : null),
      element("div", { class: "facts" }, facts.join("  ·  ")));
  }));
}

// Layers as bars as high as their time, over a strip in the colour of their rank, cut into stages.
function partition(entries) {
  const shown = entries.filter((e) => e.stages && e.num_layers);
  if (!shown.length) return null;
  const parts = shown.flatMap((e) => e.routes.map((route, r) => partitionStrip(e, route, r)));
  return section("Partition and placement",
    "Each bar is a layer, as high as its forward and backward time; colour and number say which rank holds it.", ...parts);
}

function partitionStrip(entry, route, number) {
  const width = 1200, top = 46, strip = 22, gap = 2;
  const layers = entry.num_layers, stages = route.length;
  const cell = (width - gap * (stages - 1)) / layers;
  const highest = entry.layer_ms ? Math.max(...entry.layer_ms) : 1;
  const letters = entry.symbols && cell > 9;
  const svg = shape("svg", {
    viewBox: `0 0 ${width} ${top + strip + (letters ? 16 : 2)}`, role: "img", class: "strip",
    "aria-label": `${entry.label}: ` + route.map((s) => `stage ${s}, ${layersOf(entry, s).trim()}, rank ${entry.stages[s][2]}`).join("; "),
  });
  let x = 0;
  for (const s of route) {
    const [first, stop, rank, again] = entry.stages[s], colour = RANK_COLOURS[rank % RANK_COLOURS.length];
    const group = shape("g");
    group.append(shape("title", {}, `stage ${s} on rank ${rank}: ${layersOf(entry, s)}${again ? `, ${again} recomputed` : ""}`));
    for (let k = first; k < stop; k++) {
      const at = x + (k - first) * cell;
      const high = entry.layer_ms ? Math.max(entry.layer_ms[k] / highest * (top - 4), 0.5) : 0;
      group.append(shape("rect", { x: at + 0.5, y: top - high, width: Math.max(cell - 1, 0.5), height: high, fill: colour, opacity: 0.55 }));
      if (letters) {
        group.append(shape("text", { x: at + cell / 2, y: top + strip + 12, "text-anchor": "middle", class: "letter" }, entry.symbols[k]));
      }
    }
    const wide = (stop - first) * cell;
    group.append(shape("rect", { x, y: top, width: wide, height: strip, rx: 2, fill: colour }));
    if (wide > 6 * String(rank).length) {
      const style = wide < 12 ? "font-size:9px" : "";
      group.append(shape("text", { x: x + wide / 2, y: top + strip / 2 + 4.5, "text-anchor": "middle", class: "on", style },
        wide > 52 ? `rank ${rank}` : rank));
    }
    svg.append(group);
    x += wide + gap;
  }
  const name = entry.routes.length > 1 ? `${entry.label}, route ${number}` : entry.label;
  return element("figure", {}, element("figcaption", {}, name), svg);
}

const PARTS = ["boundary", "communication", "imbalance", "residual"];
const PART_WORDS = {
  boundary: "before the first and after the last op", communication: "waiting for a transfer in flight",
  imbalance: "less work than the busiest rank", residual: "the rest",
};

function bubbles(entries, colours) {
  const longest = Math.max(...entries.map((e) => e.base.makespan));
  const legend = element("div", { class: "legend" },
    element("span", {}, element("i", { class: "swatch busy" }), "computing"),
    ...PARTS.map((p) => element("span", { title: PART_WORDS[p] },
      element("i", { class: "swatch", style: `background:rgb(${colours[p]})` }), `${p}: ${PART_WORDS[p]}`)));
  const blocks = entries.map((e) => element("figure", {}, element("figcaption", {}, e.label),
    element("div", { class: "bars" }, ...Array.from({ length: e.num_ranks }, (_, r) => {
      const b = e.numbers.bubbles_ms, share = (ms) => `width:${(100 * ms / longest).toFixed(3)}%`;
      const words = PARTS.map((p) => `${p} ${formatMs(b[p][r])}`).join(", ");
      return element("div", { class: "bar-row" }, element("span", { class: "bar-name" }, `rank ${r}`),
        element("div", { class: "bar", role: "img", "aria-label": `rank ${r}: computing ${formatMs(e.numbers.busy_ms[r])}, ${words}`,
          title: `computing ${formatMs(e.numbers.busy_ms[r])}, ${words}` },
        element("i", { class: "busy", style: share(e.numbers.busy_ms[r]) }),
        ...PARTS.map((p) => element("i", { style: `${share(b[p][r])};background:rgb(${colours[p]})` }))),
        element("span", { class: "bar-value" }, percent(b.idle[r] / Math.max(e.base.makespan, 1e-12))));
    }))));
  return section("Where the time goes", "Idle time of every rank within the step, and why; the parts add up exactly.", legend, ...blocks);
}

function searchCurve(entries) {
  const shown = entries.filter((e) => e.search && e.search.length);
  if (!shown.length) return null;
  return section("The search", "Best step time found so far, coloured by the phase that found it.",
    ...shown.map((e) => element("figure", {}, element("figcaption", {}, e.label), curve(e.search, e.lower_bound_ms))));
}

function curve(points, bound, height = 250) {
  const width = 1200, left = 64, bottom = 28, top = 12;
  const phases = [...new Set(points.map((p) => p[1]))];
  const others = phases.filter((p) => !PHASES[p]);
  const colourOf = (p) => PHASES[p] ?? OTHER_PHASES[others.indexOf(p) % OTHER_PHASES.length];
  const last = Math.max(points[points.length - 1][0], 1e-9);
  const values = points.map((p) => p[2]).concat(bound ? [bound] : []);
  const low = Math.min(...values), high = Math.max(...values), pad = (high - low || high * 0.05 || 1) * 0.06;
  const x = (t) => left + t / last * (width - left - 16);
  const y = (v) => top + (high + pad - v) / (high - low + 2 * pad) * (height - top - bottom);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "curve",
    "aria-label": `best step time from ${formatMs(points[0][2])} to ${formatMs(points[points.length - 1][2])} in ${last.toFixed(1)} seconds` });
  for (const v of axisTicks(low - pad, high + pad, 4)) {
    svg.append(shape("line", { x1: left, x2: width - 16, y1: y(v), y2: y(v), class: "grid" }),
      shape("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end", class: "tick" }, `${+v.toPrecision(6)} ms`));
  }
  for (const t of axisTicks(0, last, 8)) {
    svg.append(shape("text", { x: x(t), y: height - 8, "text-anchor": "middle", class: "tick" }, `${+t.toPrecision(4)} s`));
  }
  if (bound) {
    svg.append(shape("line", { x1: left, x2: width - 16, y1: y(bound), y2: y(bound), class: "bound" }),
      shape("text", { x: width - 18, y: y(bound) - 5, "text-anchor": "end", class: "tick" }, `lower bound ${formatMs(bound)}`));
  }
  points.forEach(([t, phase, best], i) => {
    const until = i + 1 < points.length ? points[i + 1] : [last, "", best];
    svg.append(shape("path", { d: `M${x(t)},${y(best)}H${x(until[0])}V${y(until[2])}`, stroke: colourOf(phase), class: "step" }));
  });
  const legend = element("div", { class: "legend" }, ...phases.map((p) => element("span", {},
    element("i", { class: "swatch", style: `background:${colourOf(p)}` }), p || "search")));
  return element("div", {}, svg, legend);
}

function numbersTable(entries) {
  const rows = [
    ["step time", (e) => formatMs(e.base.step)],
    ["relative to the first", (e) => `${(e.base.step / entries[0].base.step).toFixed(4)}`],
    ["makespan of the compute", (e) => formatMs(e.base.makespan)],
    ["bubble", (e) => percent(e.numbers.bubble_ratio, 2)],
    ["lower bound", (e) => (e.lower_bound_ms ? formatMs(e.lower_bound_ms) : "")],
    ...PARTS.map((p) => [`idle: ${p} (mean of the ranks)`, (e) => formatMs(e.numbers.bubbles_ms[p].reduce((a, b) => a + b, 0) / e.num_ranks)]),
    ["peak memory (fullest rank)", (e) => (Math.max(...e.numbers.peak_bytes, 0) > 0 ? gib(Math.max(...e.numbers.peak_bytes)) : "not known")],
    ["fits in memory", (e) => (e.numbers.fits ? "yes" : "no")],
    ["transfers hidden behind compute", (e) => (e.numbers.communications ? percent(e.numbers.overlap_rate) : "no transfers")],
    ["ranks", (e) => String(e.num_ranks)],
    ["micro-batches", (e) => String(e.num_micro_batches ?? e.index.micros)],
    ["stages", (e) => String(e.stages ? e.stages.length : e.index.stages)],
    ["ops", (e) => String(e.count)],
  ].filter(([, value]) => entries.some((e) => value(e) !== ""));
  return section("Numbers", "", element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of numbers" },
    element("table", {},
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, ""),
        ...entries.map((e) => element("th", { scope: "col" }, e.label)))),
      element("tbody", {}, ...rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name),
        ...entries.map((e) => element("td", {}, value(e)))))))));
}
