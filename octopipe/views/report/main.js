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
    + "Without a mouse: N and P step along a rank, ↑ and ↓ across ranks, Enter follows, / finds."));
  // Panels are made anew when what-if changes the numbers, or the page its width.
  const panels = {
    setup: () => setupStrip(entries), cards: () => cards(entries), partition: (width) => partition(entries, width),
    bubbles: () => bubbles(entries, head.bubble_colours), memory: () => memoryPanel(entries),
    search: (width) => searchCurve(entries, width), numbers: () => numbersTable(entries),
  };
  const holders = Object.fromEntries(Object.keys(panels).map((name) => [name, element("div", { "data-panel": name })]));
  let width = 0;
  const refresh = () => {
    width = panelWidth(holders.partition);
    for (const [name, make] of Object.entries(panels)) {
      const made = make(width);
      holders[name].replaceChildren(...(made ? [made] : []));
    }
  };
  const { setup, cards: top, partition: layers, bubbles: idle, memory, search, numbers } = holders;
  const whatIf = whatIfPanel(entries, () => view, () => {
    refresh();
    showTip(tip, frame, null, null);
    picked.textContent = view.selected ? selectionWords(view.selected) : "";
  });
  root.replaceChildren(...[setup, top, chart, whatIf, layers, idle, memory, search, numbers].filter(Boolean));
  refresh();

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
    find() { box.find.focus(); },
    drawn() {
      if (box.arrows) box.arrows.textContent = arrowWords(view);
    },
  });
  buildTools(tools, view, head, entries, box);
  const resize = () => {
    view.measure();
    view.draw();
    if (panelWidth(holders.partition) !== width) refresh();
  };
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

// The room a drawing has inside a card (its padding and border) that is as wide as its holder.
const panelWidth = (holder) => Math.max(holder.clientWidth - 38, 240);

function arrowWords(view) {
  if (!view.options.transfers || view.arrows === view.arrowsOf) return "";
  return `${view.arrows} of ${view.arrowsOf.toLocaleString("en")} arrows drawn; zoom in for the rest`;
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
  box.find = searchBox(entries, view);
  box.arrows = element("span", { class: "arrows" });
  const again = entries.some(recomputedCount);
  const lanes = entries.filter((e) => e.lanes).map((e) => `${(100 * e.lanes.hidden).toFixed(0)} % hidden`).join(", ");
  const parts = [...new Set(entries.filter((e) => e.memory).flatMap(memoryParts))];
  const swatch = (colour) => element("i", { class: "swatch", style: `background:${colour}` });
  const used = [...KINDS].filter((k, i) => entries.some((e) => e.kind.includes(i)));
  tools.append(
    element("span", { class: "group" }, button("+", "Zoom in", () => view.zoom(1.6)),
      button("−", "Zoom out", () => view.zoom(1 / 1.6)), button("Fit", "Show the whole step", () => view.fit())),
    element("label", {}, "shade by ", shade),
    ...(entries.some((e) => e.memory) ? [check("memory", "memory")] : []),
    check("transfers", "transfers"), check("critical", "critical path"), box.find.node, box.arrows,
    element("span", { class: "legend" }, ...used.map((k) => element("span", {}, swatch(`rgb(${head.colours[k]})`), `${k} ${head.kind_names[k]}`)),
      again ? element("span", { title: "a forward with a bar at the bottom: its stage keeps only inputs and recomputes the rest (R)" },
        element("i", { class: "swatch foot", style: `background:rgb(${head.colours.F});border-color:rgb(${head.colours.R})` }), "F, recomputed later") : null,
      entries.some((e) => e.now.extras.length) ? element("span", { title: "after a rank's last op; a thin bar where it overlaps with ops" },
        swatch("var(--line)"), "gradient reduction, optimizer") : null,
      lanes ? element("span", { title: "exchange: tokens in transfer between the ranks of an expert-parallel group" },
        `above: compute, below: exchange (${lanes})`) : null),
    ...(parts.length ? [element("span", { class: "legend" }, "memory: ", ...parts.map((name) => element("span", {}, swatch(MEMORY_COLOURS[name]), name)))] : []));
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

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.dispatchEvent(new Event("themechange"));
}
