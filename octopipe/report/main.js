// Puts a report together: the chart with its controls, the what-if panel, and the panels below.

let KIND_NAMES = {}, SYMBOL_NAMES = {};

async function mountReport(root, head, text) {
  KIND_NAMES = head.kind_names;
  SYMBOL_NAMES = head.symbol_names;
  if (root.release) root.release();
  const columns = await unpackColumns(head.columns, text);
  const entries = head.entries.map((raw, i) => openEntry(raw, columns, i));
  const canvas = element("canvas", {
    tabindex: "0", role: "application", "aria-describedby": "keys",
    "aria-label": `Timeline of ${entries.map((e) => `${e.label}, ${headline(e)}`).join("; ")}`,
  });
  const tip = element("div", { class: "tip", role: "presentation" });
  const live = element("div", { class: "unseen", "aria-live": "polite" });
  const picked = element("p", { class: "picked", "aria-live": "polite" });
  const frame = element("div", { class: "chart" }, canvas, tip);
  const tools = element("div", { class: "tools", role: "toolbar", "aria-label": "Timeline" });
  const chart = section("Timeline", "", tools, frame, picked, live, element("p", { class: "note", id: "keys" },
    "Wheel or + and − zoom, drag or ← → move, double click or 0 shows all. Click an op to follow its micro-batch; Esc lets go. "
    + "Without a mouse: N and P step along a rank, ↑ and ↓ across ranks, Enter follows."));
  root.replaceChildren(...[cards(entries), chart, whatIfPanel(entries, () => view), partition(entries),
    bubbles(entries, head.bubble_colours), searchCurve(entries), numbersTable(entries)].filter(Boolean));

  const box = {};
  const view = new Gantt(canvas, entries, head.colours, {
    hover(found, at, spoken) {
      showTip(tip, frame, found, at);
      if (spoken) live.textContent = describe(found).map(([k, v]) => `${k} ${v}`).join(", ");
    },
    select(chosen) {
      picked.textContent = chosen ? selectionWords(chosen) : "";
      view.options.critical = chosen !== null || box.critical.checked;
    },
  });
  buildTools(tools, view, head, entries, box);
  const resize = () => { view.measure(); view.draw(); };
  const watcher = new ResizeObserver(resize), stop = new AbortController(), until = { signal: stop.signal };
  watcher.observe(frame);
  root.release = () => { watcher.disconnect(); stop.abort(); };
  const restyle = () => { view.theme(); view.draw(); };
  document.addEventListener("themechange", restyle, until);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle, until);
  addEventListener("beforeprint", () => { document.documentElement.dataset.printing = ""; restyle(); }, until);
  addEventListener("afterprint", () => { delete document.documentElement.dataset.printing; restyle(); }, until);
  view.draw();
  return { view, entries };
}

function buildTools(tools, view, head, entries, box) {
  const button = (name, label, act) => element("button", { type: "button", "aria-label": label, title: label, onclick: act }, name);
  const check = (key, label) => {
    const input = element("input", { type: "checkbox", checked: view.options[key] });
    input.addEventListener("change", () => {
      view.options[key] = input.checked;
      view.measure();
      view.redraw();
    });
    box[key] = input;
    return element("label", {}, input, label);
  };
  const shade = element("select", { "aria-label": "Shade ops by" },
    ...["micro-batch", "stage", "nothing"].map((o) => element("option", { value: o }, o)));
  shade.addEventListener("change", () => {
    view.options.shade = shade.value;
    view.tint();
    view.redraw();
  });
  const used = [...KINDS].filter((k, i) => entries.some((e) => e.kind.includes(i)));
  tools.append(
    element("span", { class: "group" }, button("+", "Zoom in", () => view.zoom(1.6)),
      button("−", "Zoom out", () => view.zoom(1 / 1.6)), button("Fit", "Show the whole step", () => view.fit())),
    element("label", {}, "shade by ", shade),
    ...(entries.some((e) => e.memory) ? [check("memory", "memory")] : []),
    check("transfers", "transfers"), check("critical", "critical path"),
    element("span", { class: "legend" }, ...used.map((k) => element("span", {},
      element("i", { class: "swatch", style: `background:rgb(${head.colours[k]})` }), `${k} ${head.kind_names[k]}`))));
}

function showTip(tip, frame, found, at) {
  if (!found || !at) {
    tip.classList.remove("shown");
    return;
  }
  tip.replaceChildren(...describe(found).map(([name, value]) => name
    ? element("div", {}, element("b", {}, name), element("span", {}, value)) : element("strong", {}, value)));
  tip.classList.add("shown");
  const wide = tip.offsetWidth, high = tip.offsetHeight, top = frame.getBoundingClientRect().top;
  const x = at.x + 16 + wide > frame.clientWidth ? at.x - wide - 14 : at.x + 16;
  const below = top + at.y + 18 + high < window.innerHeight;
  const y = below || top + at.y - high - 12 < 0 ? at.y + 18 : at.y - high - 12;
  tip.style.transform = `translate(${Math.max(0, x)}px, ${y}px)`;
}

function selectionWords({ entry, micro, op }) {
  const now = entry.now;
  let first = Infinity, last = 0, busy = 0, ops = 0;
  for (let i = 0; i < entry.count; i++) {
    if (entry.micro[i] !== micro) continue;
    first = Math.min(first, now.start[i]);
    last = Math.max(last, now.end[i]);
    busy += now.end[i] - now.start[i];
    ops++;
  }
  const path = criticalPath(entry, now);
  const onPath = path.includes(op) ? "is on the critical path" : "is not on the critical path";
  return `Micro-batch ${micro} in ${entry.label}: ${ops} ops, ${formatMs(busy)} of work from ${formatMs(first)} to ${formatMs(last)}. `
    + `${opName(entry, op)} ${onPath} (outlined, ${path.length} steps).`;
}

function whatIfPanel(entries, view) {
  const able = entries.filter((e) => e.whatIf);
  if (!able.length) return null;
  const kinds = [...new Set(able.flatMap((e) => e.whatIf.kinds))];
  const times = { factor: 1, plus_ms: 0 }, scale = {};
  const results = element("div", { class: "results", "aria-live": "polite" });
  const sliders = [];
  const slider = (label, note, attributes, shown, apply) => {
    const input = element("input", { type: "range", ...attributes });
    const value = element("output", {});
    const update = () => {
      apply(Number(input.value));
      value.textContent = shown(Number(input.value));
      input.setAttribute("aria-valuetext", value.textContent);
    };
    input.addEventListener("input", () => { update(); run(); });
    sliders.push(() => { input.value = attributes.value; update(); });
    update();
    return element("label", { class: "slider" }, element("span", {}, label, note ? element("small", {}, note) : null), input, value);
  };
  const twice = { min: -2, max: 2, step: 0.05, value: 0 };
  const times_ = (v) => `× ${(2 ** v).toFixed(2)}`;
  let waiting = false;
  const run = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      const plain = times.factor === 1 && times.plus_ms === 0 && kinds.every((k) => (scale[k] ?? 1) === 1);
      for (const e of able) e.now = plain ? e.base : simulateEntry(e, scale, times);
      show();
      const v = view();
      if (v.to > v.horizon * 1.015 || v.from === 0) v.fit(); else v.redraw();
    });
  };
  const show = () => results.replaceChildren(...able.map((e) => {
    const change = e.now.step / e.base.step - 1;
    return element("div", { class: "result" }, element("span", {}, e.label),
      element("strong", {}, formatMs(e.now.step)),
      element("span", { class: change > 1e-9 ? "loss" : change < -1e-9 ? "gain" : "" },
        Math.abs(change) < 1e-9 ? "as planned" : `${change > 0 ? "+" : "−"}${percent(Math.abs(change))}`));
  }));
  const shortest = Math.min(...able.map((e) => e.base.makespan / Math.max(e.num_micro_batches, 1)));
  const most = Number((shortest / 4).toPrecision(1)) || 1;
  const layerName = (k) => SYMBOL_NAMES[k] ?? `layer kind ${k}`;
  const panel = section("What if", "The order of ops stays as it is; every time is simulated again in this page. The memory curve is hidden meanwhile.",
    element("div", { class: "sliders" },
      ...kinds.map((k) => slider(`${layerName(k)} time`, k, twice, times_, (v) => { scale[k] = 2 ** v; })),
      slider("link speed", "", { min: -3, max: 3, step: 0.1, value: 0 }, times_, (v) => { times.factor = 2 ** -v; }),
      slider("added to each transfer", "", { min: 0, max: most, step: most / 100, value: 0 }, formatMs, (v) => { times.plus_ms = v; })),
    results,
    element("button", { type: "button", onclick: () => { sliders.forEach((reset) => reset()); run(); } }, "Reset"));
  show();
  return panel;
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.dispatchEvent(new Event("themechange"));
}
