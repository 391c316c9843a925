// Everything around the chart that is text and bars: set-up, cards, idle time, memory, numbers. All of it reads `e.now`, so that
// what-if moves it along.

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

const changed = (entry) => entry.now !== entry.base;
// A bound holds for the costs it was computed with, not for others; one above the step time was computed for others.
const boundHolds = (entry) => Boolean(entry.lower_bound_ms) && !changed(entry) && entry.lower_bound_ms <= entry.now.step * (1 + 1e-9);
const whole = (value) => Math.round(value).toLocaleString("en");
const sameFacts = (entries) => entries.every((e) => JSON.stringify(e.facts) === JSON.stringify(entries[0].facts));

// What the numbers are for, and what the fastest of the plans achieves.
function setupStrip(entries) {
  const fact = (name, value, note) => element("div", { class: "fact", title: note ?? null }, element("dt", {}, name), element("dd", {}, value));
  const facts = sameFacts(entries) ? entries[0].facts.map(([name, value]) => fact(name, value)) : [];
  const rated = entries.filter((e) => throughput(e));
  if (rated.length) {
    const best = rated.reduce((a, b) => (b.now.step < a.now.step ? b : a)), rate = throughput(best);
    const of = `${best.label}${changed(best) ? " (what if)" : ""}`, suffix = entries.length > 1 ? `, ${of}` : changed(best) ? ", what if" : "";
    if (rate.tokens !== null) {
      facts.push(fact(`tokens/s${suffix}`, whole(rate.all), of), fact("tokens/s per GPU", whole(rate.tokens), of));
    }
    if (rate.mfu !== null) facts.push(fact("MFU", percent(rate.mfu), `${of}: model FLOPs over the GPU's peak; recomputation does not count`));
  }
  return element("dl", { class: "setup", "aria-label": "Set-up" }, ...facts);
}

function cards(entries) {
  const first = entries[0].now.step, same = sameFacts(entries);
  return element("div", { class: "cards" }, ...entries.map((e) => {
    const n = numbersOf(e), gain = first / e.now.step, rate = throughput(e), again = recomputedCount(e);
    const peak = Math.max(...n.peak_bytes, 0);
    const facts = [`${percent(n.bubble_ratio)} bubble`];
    if (rate && rate.tokens !== null) facts.push(`${whole(rate.tokens)} tokens/s per GPU`);
    if (rate && rate.mfu !== null) facts.push(`${percent(rate.mfu)} MFU`);
    if (peak > 0) facts.push(`peak ${gib(peak)}`);
    if (!n.fits) facts.push("does not fit");
    if (again) facts.push(`↻ ${again} of ${e.num_layers} layers recomputed`);
    if (boundHolds(e)) facts.push(`${percent(Math.max(e.now.step / e.lower_bound_ms - 1, 0))} above the lower bound${e.bound_of ? ` of ${e.bound_of}` : ""}`);
    return element("div", { class: `kpi${n.fits ? "" : " bad"}` },
      element("div", { class: "name" }, e.label, e.measured ? element("span", { class: "tag" }, "measured") : null,
        changed(e) ? element("span", { class: "tag" }, "what if") : null),
      element("div", { class: "big" }, formatMs(e.now.step),
        entries.length > 1 && e !== entries[0]
          ? element("span", { class: gain >= 1 ? "gain" : "loss" }, `×${gain.toFixed(2)}`) : null),
      element("div", { class: "facts" }, facts.join("  ·  ")),
      same ? null : element("div", { class: "facts" }, e.facts.map(([name, value]) => `${name} ${value}`).join("  ·  ")));
  }));
}

const PARTS = ["boundary", "communication", "imbalance", "residual"];
const PART_WORDS = {
  boundary: "before the first and after the last op", communication: "waiting for a transfer in flight",
  imbalance: "less work than the busiest rank", residual: "the rest",
};

// One bar per rank: parts of [name, amount, colour], and a number at its end.
function barRow(rank, parts, longest, shown, value) {
  const words = parts.map(([name, amount]) => `${name} ${shown(amount)}`).join(", ");
  return element("div", { class: "bar-row" }, element("span", { class: "bar-name" }, `rank ${rank}`),
    element("div", { class: "bar", role: "img", "aria-label": `rank ${rank}: ${words}`, title: words },
      ...parts.map(([, amount, colour]) => element("i", { style: `width:${(100 * amount / longest).toFixed(3)}%;background:${colour}` }))),
    element("span", { class: "bar-value" }, value));
}

function bubbles(entries, colours) {
  const longest = Math.max(...entries.map((e) => e.now.makespan));
  const colourOf = (p) => `rgb(${colours[p]})`;
  const legend = element("div", { class: "legend" },
    element("span", {}, element("i", { class: "swatch busy" }), "computing"),
    ...PARTS.map((p) => element("span", { title: PART_WORDS[p] },
      element("i", { class: "swatch", style: `background:${colourOf(p)}` }), `${p}: ${PART_WORDS[p]}`)));
  const blocks = entries.map((e) => {
    const n = numbersOf(e), b = n.bubbles_ms;
    return element("figure", {}, element("figcaption", {}, caption(e)), element("div", { class: "bars" },
      ...n.busy_ms.map((busy, r) => barRow(r, [["computing", busy, "#4f8fd0"], ...PARTS.map((p) => [p, b[p][r], colourOf(p)])],
        longest, formatMs, percent(b.idle[r] / Math.max(e.now.makespan, 1e-12))))));
  });
  return section("Where the time goes", "Idle time of every rank within the step, and why; the parts add up exactly.", legend, ...blocks);
}

const caption = (entry) => entry.label + (changed(entry) ? " (what if)" : "");

// Every rank's fullest moment, by what its memory holds then.
function memoryPanel(entries) {
  const shown = entries.filter((e) => e.memoryModel && memoryOf(e, e.now));
  if (!shown.length) return null;
  const names = [...new Set(shown.flatMap(memoryParts))];
  const longest = Math.max(...shown.flatMap((e) => memoryOf(e, e.now).curves.map((c) => c.peak)), 1);
  const legend = element("div", { class: "legend" }, ...names.map((name) => element("span", {},
    element("i", { class: "swatch", style: `background:${MEMORY_COLOURS[name]}` }), name)));
  const blocks = shown.map((e) => element("figure", {}, element("figcaption", {}, caption(e)),
    element("div", { class: "bars memory" }, ...memoryOf(e, e.now).curves.map((curve, r) => {
      const parts = partsAt(e, r, curve, curve.peakAt), limit = e.capacity[r] ?? null;
      return barRow(r, memoryParts(e).map((name, p) => [name, parts[p], MEMORY_COLOURS[name]]), longest, formatBytes,
        limit === null ? gib(curve.peak) : `${gib(curve.peak)} (${percent(curve.peak / limit, 0)})`);
    }))));
  const split = shown.some((e) => memoryParts(e).includes("weights, gradients and optimizer state"))
    ? " Costs that were measured, or given, do not say how weights, gradients and optimizer state divide." : "";
  return section("Where the memory goes", `Every rank at its fullest moment; hover a memory strip above for any other.${split}`, legend, ...blocks);
}

function numbersTable(entries) {
  const rate = (e, name, shown) => {
    const value = (throughput(e) ?? {})[name] ?? null;
    return value === null ? "" : shown(value);
  };
  const peak = (e) => Math.max(...numbersOf(e).peak_bytes, 0);
  const rows = [
    ["step time", (e) => formatMs(e.now.step)],
    ["relative to the first", (e) => `${(e.now.step / entries[0].now.step).toFixed(4)}`],
    ["tokens/s", (e) => rate(e, "all", whole)],
    ["tokens/s per GPU", (e) => rate(e, "tokens", whole)],
    ["model TFLOP/s per GPU", (e) => rate(e, "tflops", (v) => v.toFixed(1))],
    ["MFU", (e) => rate(e, "mfu", (v) => percent(v, 2))],
    ["pipeline time", (e) => formatMs(e.now.makespan)],
    ["bubble", (e) => percent(numbersOf(e).bubble_ratio, 2)],
    ["lower bound", (e) => (!e.lower_bound_ms ? "" : boundHolds(e) ? `${formatMs(e.lower_bound_ms)}${e.bound_of ? ` (${e.bound_of})` : ""}` : changed(e) ? "not proven for changed times" : "not proven for these costs")],
    ...PARTS.map((p) => [`idle: ${p} (mean of the ranks)`, (e) => formatMs(numbersOf(e).bubbles_ms[p].reduce((a, b) => a + b, 0) / e.num_ranks)]),
    ["peak memory (fullest rank)", (e) => (peak(e) > 0 ? gib(peak(e)) : "not known")],
    ["fits in memory", (e) => (!(peak(e) > 0) ? "not known" : !e.capacity.some((c) => c !== null) ? "no limit given" : numbersOf(e).fits ? "yes" : "no")],
    ["layers recomputed", (e) => (e.stages ? `${recomputedCount(e)} of ${e.num_layers}` : "")],
    ["transfers hidden behind compute", (e) => (numbersOf(e).communications ? percent(numbersOf(e).overlap_rate) : "no transfers")],
    ["ranks", (e) => String(e.num_ranks)],
    ["micro-batches", (e) => String(e.num_micro_batches ?? e.index.micros)],
    ["stages", (e) => String(e.stages ? e.stages.length : e.index.stages)],
    ["ops", (e) => String(e.count)],
  ].filter(([, value]) => entries.some((e) => value(e) !== ""));
  return section("Numbers", "", element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of numbers" },
    element("table", {},
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, ""),
        ...entries.map((e) => element("th", { scope: "col" }, caption(e))))),
      element("tbody", {}, ...rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name),
        ...entries.map((e) => element("td", {}, value(e)))))))));
}
