// The sliders of the what-if panel; every other panel follows through `changed`.

function whatIfPanel(entries, view, changed) {
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
      for (const e of able) e.now = plain ? e.base : { ...simulateEntry(e, scale, times), scale: { ...scale } };
      show();
      changed();
      const v = view();
      v.scaleMemory();
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
  const panel = section("What if", "The order of ops stays as it is; every time and all memory is simulated again in this page, and every number on it follows.",
    element("div", { class: "sliders" },
      ...kinds.map((k) => slider(`${layerName(k)} time`, k, twice, times_, (v) => { scale[k] = 2 ** v; })),
      slider("link speed", "", { min: -3, max: 3, step: 0.1, value: 0 }, times_, (v) => { times.factor = 2 ** -v; }),
      slider("added to each transfer", "", { min: 0, max: most, step: most / 100, value: 0 }, formatMs, (v) => { times.plus_ms = v; })),
    results,
    element("button", { type: "button", onclick: () => { sliders.forEach((reset) => reset()); run(); } }, "Reset"));
  show();
  return panel;
}
