// Rows of the table of splits can be chosen; the first two are compared, part by part. Knows: the table that
// cluster.py draws, whose rows carry where their time goes. Does not know: the page around it.
function compare(root) {
  const table = root.querySelector(".plan-table"), out = root.querySelector(".plan-compare");
  if (!table || !out) return;
  const chosen = () => [...table.querySelectorAll("input.choose:checked")].map((box) => box.closest("tr"));
  const parts = (row) => (row.dataset.why ? JSON.parse(row.dataset.why) : null);
  const name = (row) => row.querySelector("td:nth-child(2)").textContent;
  const time = (ms) => `${ms.toFixed(1)} ms`; // one unit and one precision for the whole table
  const cell = (kind, text) => { const made = document.createElement(kind); made.textContent = text; return made; };
  function draw() {
    const rows = chosen();
    for (const box of table.querySelectorAll("input.choose")) box.disabled = rows.length >= 2 && !box.checked;
    out.replaceChildren();
    if (rows.length !== 2) {
      out.append(cell("p", "Choose two splits of the table to compare where their time goes."));
      out.firstChild.className = "note";
      return;
    }
    const [a, b] = rows.map(parts), made = document.createElement("table"), head = document.createElement("tr");
    if (!a || !b) {
      out.append(cell("p", "An estimated split has no parts: only simulated ones can be compared."));
      out.firstChild.className = "note";
      return;
    }
    made.className = "plan-table";
    head.append(cell("th", "part"), cell("th", name(rows[0])), cell("th", name(rows[1])), cell("th", "difference"));
    made.append(head);
    const line = (title, x, y) => {
      const row = document.createElement("tr");
      row.append(cell("td", title), cell("td", time(x)), cell("td", time(y)), cell("td", (y - x > 0 ? "+" : "") + time(y - x)));
      made.append(row);
    };
    for (const [key, part] of Object.entries(a.parts)) {
      const other = b.parts[key] || { ms: 0 };
      if (part.ms + other.ms > 0.001 * a.step_ms) line(part.title || key, part.ms, other.ms);
    }
    line("a step", a.step_ms, b.step_ms);
    out.append(made);
  }
  table.addEventListener("change", draw);
  draw();
}
