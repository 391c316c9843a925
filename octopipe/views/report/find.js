// Search for ops: by name (2F5), by parts of it (F5, 2F), or in words (rank 1 stage 2 micro-batch 5 layer 7 F).

// What a text asks for: {stage, kind, micro, rank, layer}, each absent where any will do; null where it means nothing.
function parseQuery(text) {
  const want = {};
  let rest = text.trim().toLowerCase().replace(/micro[\s-]*batch(es)?/g, "mb");
  if (!rest) return null;
  const word = /\b(rank|stage|mb|layer)\s*[:=#]?\s*(\d+)/g, names = { rank: "rank", stage: "stage", mb: "micro", layer: "layer" };
  rest = rest.replace(word, (_, name, value) => {
    want[names[name]] = Number(value);
    return " ";
  });
  for (const [kind, name] of Object.entries(KIND_NAMES)) {
    if (rest.includes(name)) {
      want.kind = KINDS.indexOf(kind);
      rest = rest.replace(name, " ");
    }
  }
  for (const part of rest.split(/[\s,]+/).filter(Boolean)) {
    const found = /^(\d*)([friwb])(\d*)$/.exec(part);
    if (!found) return null;
    want.kind = KINDS.toLowerCase().indexOf(found[2]);
    if (found[1]) want.stage = Number(found[1]);
    if (found[3]) want.micro = Number(found[3]);
  }
  return Object.keys(want).length ? want : null;
}

function matches(entry, i, want) {
  if (want.kind !== undefined && entry.kind[i] !== want.kind) return false;
  if (want.stage !== undefined && entry.stage[i] !== want.stage) return false;
  if (want.micro !== undefined && entry.micro[i] !== want.micro) return false;
  if (want.rank !== undefined && entry.rank[i] !== want.rank) return false;
  if (want.layer === undefined) return true;
  const stage = entry.stages && entry.stages[entry.stage[i]];
  return Boolean(stage) && stage[0] <= want.layer && want.layer < stage[1];
}

// All ops a text means, timeline after timeline, each by start; null where the text means nothing.
function findOps(entries, text) {
  const want = parseQuery(text);
  if (!want) return null;
  const out = [];
  for (const entry of entries) {
    const mine = [];
    for (let i = 0; i < entry.count; i++) if (matches(entry, i, want)) mine.push({ entry, op: i });
    out.push(...mine.sort((a, b) => entry.now.start[a.op] - entry.now.start[b.op]));
  }
  return out;
}

function searchBox(entries, view) {
  const said = element("span", { class: "found", role: "status" });
  const input = element("input", {
    type: "search", class: "find", placeholder: "find 2F5, rank 1, layer 7", "aria-label": "Find an op",
    title: "An op (2F5: stage 2, forward, micro-batch 5), a part of its name (F5, 2F), or words: rank 1, stage 2, micro-batch 5, "
      + "layer 7. Enter goes to the next, Shift+Enter back.",
    autocomplete: "off", spellcheck: "false", maxlength: "80",
  });
  let found = [], at = -1, asked = "";
  const look = () => {
    asked = input.value;
    at = -1;
    const list = asked.trim() ? findOps(entries, asked) : [];
    found = list ?? [];
    if (!asked.trim()) said.textContent = "";
    else if (list === null) said.textContent = "not an op; try 2F5, F5, rank 1";
    else said.textContent = found.length ? `${found.length} found` : "none";
    view.marked = new Map(entries.map((e) => [e, new Set()]));
    found.forEach(({ entry, op }) => view.marked.get(entry).add(op));
    if (!found.length) view.marked = null;
    view.redraw();
  };
  const go = (by) => {
    if (input.value !== asked) look();
    if (!found.length) return;
    at = (at + by + (by < 0 && at < 0 ? 1 : 0) + found.length) % found.length;
    said.textContent = `${at + 1} of ${found.length}`;
    view.reveal(found[at].entry, found[at].op);
  };
  input.addEventListener("input", look);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      go(event.shiftKey ? -1 : 1);
    } else if (event.key === "Escape") {
      input.value = "";
      look();
      view.select(null);
    }
  });
  return { node: element("span", { class: "group finder" }, input, said), focus: () => input.focus() };
}
