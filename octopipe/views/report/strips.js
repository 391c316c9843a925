// Drawings of the panels, at the width they are shown with so that their letters keep their size.

// Layers as bars as high as their time, over a strip in the colour of their rank, cut into stages.
function partition(entries, width) {
  const shown = entries.filter((e) => e.stages && e.num_layers);
  if (!shown.length) return null;
  const parts = shown.flatMap((e) => e.routes.map((route, r) => (e.edges ? pathPicture : partitionStrip)(e, route, r, width)));
  const forks = shown.some((e) => e.edges) ? " Where a micro-batch's path forks or joins, boxes are stages, and lines lead to the stages that take their output." : "";
  const again = shown.some(recomputedCount) ? " Hatched layers (and the sign ↻) are computed again in the backward pass." : "";
  const bars = shown.every((e) => e.edges) ? "Colour and number say which rank holds a stage."
    : "Each bar is a layer, as high as its forward and backward time; colour and number say which rank holds it.";
  return section("Partition and placement", `${bars}${again}${forks}`, ...parts);
}

// Diagonal lines across a rectangle.
function hatching(x, y, wide, high, step = 5) {
  let path = "";
  for (let d = step / 2; d < wide + high; d += step) {
    path += `M${x + Math.max(0, d - high)},${y + Math.min(d, high)}L${x + Math.min(d, wide)},${y + Math.max(0, d - wide)}`;
  }
  return path;
}

function partitionStrip(entry, route, number, width) {
  const top = 46, strip = 22, gap = 2;
  const layers = entry.num_layers, stages = route.length;
  const cell = (width - gap * (stages - 1)) / layers;
  const layerMs = entry.layer_ms && entry.layer_ms.map((ms, k) => ms * ((entry.now.scale ?? {})[entry.symbols[k]] ?? 1));
  const highest = layerMs ? Math.max(...layerMs, 1e-12) : 1;
  const letters = entry.symbols && cell > 9;
  const svg = shape("svg", {
    viewBox: `0 0 ${width} ${top + strip + (letters ? 16 : 2)}`, role: "img", class: "strip",
    "aria-label": `${entry.label}: ` + route.map((s) => `stage ${s}, ${layersOf(entry, s).trim()}, rank ${entry.stages[s][2]}`
      + (recomputes(entry, s) ? `, recomputes ${recomputedWords(entry, s)}` : "")).join("; "),
  });
  let x = 0;
  for (const s of route) {
    const [first, stop, rank, again] = entry.stages[s], colour = RANK_COLOURS[rank % RANK_COLOURS.length];
    const group = shape("g");
    group.append(shape("title", {}, `stage ${s} on rank ${rank}: ${layersOf(entry, s)}${again.length ? `, recomputes ${recomputedWords(entry, s)}` : ""}`));
    for (let k = first; k < stop; k++) {
      const at = x + (k - first) * cell;
      const high = layerMs ? Math.max(layerMs[k] / highest * (top - 4), 0.5) : 0;
      group.append(shape("rect", { x: at + 0.5, y: top - high, width: Math.max(cell - 1, 0.5), height: high, fill: colour, opacity: 0.55 }));
      if (again.includes(k)) {
        group.append(shape("path", { class: "again", d: hatching(at + 0.5, top - Math.max(high, 4), Math.max(cell - 1, 0.5), Math.max(high, 4)) }));
      }
      if (letters) {
        group.append(shape("text", { x: at + cell / 2, y: top + strip + 12, "text-anchor": "middle", class: "letter" }, entry.symbols[k]));
      }
    }
    const wide = (stop - first) * cell;
    group.append(shape("rect", { x, y: top, width: wide, height: strip, rx: 2, fill: colour }));
    // The fullest of these that fits at a readable size; the title says it all where none does.
    const mark = again.length ? " ↻" : "", names = [`rank ${rank}${mark}`, `${rank}${mark}`, String(rank)];
    const name = names.find((text) => text.length * 7.4 + 4 < wide);
    if (name) group.append(shape("text", { x: x + wide / 2, y: top + strip / 2 + 4.5, "text-anchor": "middle", class: "on" }, name));
    svg.append(group);
    x += wide + gap;
  }
  const name = entry.routes.length > 1 ? `${caption(entry)}, route ${number}` : caption(entry);
  return element("figure", {}, element("figcaption", {}, name), svg);
}

function searchCurve(entries, width) {
  const shown = entries.filter((e) => e.search && e.search.length);
  if (!shown.length) return null;
  return section("The search", "Best step time found so far, coloured by the phase that found it.",
    ...shown.map((e) => element("figure", {}, element("figcaption", {}, e.label), curve(e.search, e.lower_bound_ms, width, 250, e.search_unit))));
}

function curve(points, bound, width, height = 250, unit = "s") {
  const bottom = 28, top = 12, right = 16;
  const phases = [...new Set(points.map((p) => p[1]))];
  const others = phases.filter((p) => !PHASES[p]);
  const colourOf = (p) => PHASES[p] ?? OTHER_PHASES[others.indexOf(p) % OTHER_PHASES.length];
  const last = Math.max(points[points.length - 1][0], 1e-9);
  const values = points.map((p) => p[2]).concat(bound ? [bound] : []);
  const low = Math.min(...values), high = Math.max(...values), pad = (high - low || high * 0.05 || 1) * 0.06;
  const marks = axisTicks(low - pad, high + pad, 4), seconds = axisTicks(0, last, Math.max(2, width / 140));
  // As many digits as tell the marks apart, and a margin as wide as the widest of them.
  const digits = marks.length > 1 ? Math.min(Math.max(0, -Math.floor(Math.log10(marks[1] - marks[0]) + 1e-9)), 6) : 2;
  const labels = marks.map((v) => `${v.toFixed(digits)} ms`);
  const left = 14 + 7.2 * Math.max(...labels.map((text) => text.length), 4);
  const x = (t) => left + t / last * (width - left - right);
  const y = (v) => top + (high + pad - v) / (high - low + 2 * pad) * (height - top - bottom);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "curve",
    "aria-label": `best step time from ${formatMs(points[0][2])} to ${formatMs(points[points.length - 1][2])} in ${+last.toFixed(1)} ${unit === "s" ? "seconds" : unit}` });
  marks.forEach((v, i) => svg.append(shape("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), class: "grid" }),
    shape("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end", class: "tick" }, labels[i])));
  for (const t of seconds) {
    const text = `${+t.toPrecision(4)} ${unit}`, room = width - 3.8 * text.length; // half a label must fit beside its mark
    svg.append(shape("text", { x: Math.min(x(t), room), y: height - 8, "text-anchor": "middle", class: "tick" }, text));
  }
  if (bound) {
    svg.append(shape("line", { x1: left, x2: width - right, y1: y(bound), y2: y(bound), class: "bound" }),
      shape("text", { x: width - 18, y: y(bound) - 5, "text-anchor": "end", class: "tick" }, `lower bound ${bound.toFixed(Math.max(digits, 1))} ms`));
  }
  points.forEach(([t, phase, best], i) => {
    const until = i + 1 < points.length ? points[i + 1] : [last, "", best];
    svg.append(shape("path", { d: `M${x(t)},${y(best)}H${x(until[0])}V${y(until[2])}`, stroke: colourOf(phase), class: "step" }));
  });
  const legend = element("div", { class: "legend" }, ...phases.map((p) => element("span", {},
    element("i", { class: "swatch", style: `background:${colourOf(p)}` }), p || "search")));
  return element("div", {}, svg, legend);
}
