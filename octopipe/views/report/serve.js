// The local page: sends a search off, follows it by server-sent events, shows the best plan so far.

const byId = (id) => document.getElementById(id);
const state = { job: null, points: [], drawn: 0, latest: 0, drawing: false, view: null };

function fillForm() {
  const choices = JSON.parse(byId("choices").textContent);
  const options = (names) => names.map((n) => element("option", { value: n }, n));
  byId("model").append(...options(choices.models));
  byId("model").value = choices.model;
  // One input for every field of the set-up; those that are asked for most stand before the seconds to search.
  const seconds = byId("form").elements.budget_s.parentElement;
  for (const field of choices.setup) {
    const label = element("label", {}, `${field.label} `, setupInput(field));
    if (field.first) seconds.before(label);
    else byId("more").append(label);
  }
  byId("systems").append(...choices.systems.map((s) => element("label", {},
    element("input", { type: "checkbox", name: "system", value: s.name, checked: choices.checked.includes(s.name) }), s.title)));
}

// A field's input: a list of choices, or a line of text that spells its value. Left empty, it is left out.
function setupInput({ name, choices, chosen, empty }) {
  if (!choices) return element("input", { name, id: name, "data-setup": "", placeholder: empty });
  const given = choices.map((c) => element("option", { value: c }, c));
  const input = element("select", { name, id: name, "data-setup": "" }, ...(chosen ? [] : [element("option", { value: "" }, empty)]), ...given);
  input.value = chosen || "";
  return input;
}

function setupGiven() {
  const filled = [...byId("form").querySelectorAll("[data-setup]")].filter((input) => input.value.trim() !== "");
  return Object.fromEntries(filled.map((input) => [input.name, input.value.trim()]));
}

async function ask(path, body) {
  const answer = await fetch(path, body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error || `the server answered ${answer.status}`);
  return data;
}

async function start(event) {
  event.preventDefault();
  const form = new FormData(byId("form"));
  const number = (name) => (form.get(name) === "" ? null : Number(form.get(name)));
  byId("problem").textContent = "";
  try {
    const { id } = await ask("api/jobs", {
      ...setupGiven(), model: form.get("model"), pp: number("pp"), micro_batches: number("micro_batches"),
      budget_s: number("budget_s"), systems: form.getAll("system"),
    });
    Object.assign(state, { job: id, points: [], drawn: 0, latest: 0, view: null });
    byId("downloads").hidden = true;
    byId("status").hidden = false;
    running(true);
    follow(id);
  } catch (error) {
    byId("problem").textContent = error.message;
  }
}

function running(yes) {
  byId("tune").disabled = yes;
  byId("cancel").disabled = !yes;
}

function follow(id) {
  const events = new EventSource(`api/jobs/${id}/events`);
  events.onmessage = (message) => {
    const now = JSON.parse(message.data);
    show(now);
    state.latest = now.version;
    drawBest(id);
    if (now.state === "running") return;
    events.close();
    running(false);
    if (now.state === "failed") byId("problem").textContent = now.error;
    else {
      byId("plan").href = `api/jobs/${id}/plan.json`;
      byId("page").href = `api/jobs/${id}/report.html`;
      byId("downloads").hidden = false;
      byId("curve").replaceChildren(); // the report below has the whole curve
    }
  };
  events.onerror = () => {
    if (events.readyState !== EventSource.CLOSED) return; // it reconnects by itself
    running(false);
    byId("problem").textContent = "The connection to the server is lost; is it still running?";
  };
}

function show(now) {
  byId("bar").value = now.state === "running" ? Math.min(now.seconds / now.budget_s, 1) : 1;
  byId("best").textContent = now.best_ms === null ? "…" : formatMs(now.best_ms);
  byId("gap").textContent = now.best_ms === null || !now.lower_bound_ms ? "…" : percent(now.best_ms / now.lower_bound_ms - 1);
  byId("phase").textContent = now.state === "running" ? now.phase || "starting" : now.state;
  byId("moves").textContent = now.iterations.toLocaleString("en");
  byId("time").textContent = `${now.seconds.toFixed(1)} of ${now.budget_s} s`;
  byId("notes").textContent = now.notes.join("  ");
  const last = state.points[state.points.length - 1];
  if (now.best_ms !== null && (!last || now.best_ms < last[2] || now.state !== "running")) {
    state.points.push([now.seconds, now.phase, now.best_ms]);
    byId("curve").replaceChildren(curve(state.points, now.lower_bound_ms, panelWidth(byId("report")), 160));
  }
}

// Fetch and draw the best plan so far, until the newest is drawn; keep the reader's zoom.
async function drawBest(id) {
  if (state.drawing) return;
  state.drawing = true;
  try {
    while (state.job === id && state.drawn < state.latest) {
      const version = state.latest;
      const { head, columns } = await ask(`api/jobs/${id}/data`);
      const old = state.view, zoomed = old && old.to - old.from < old.horizon * 0.98 ? [old.from, old.to] : null;
      const report = await mountReport(byId("report"), head, columns);
      state.view = report.view;
      if (zoomed) report.view.show(...zoomed);
      state.drawn = version;
      window.octopipe = { ...report, simulateEntry, criticalPath };
    }
  } catch (error) {
    byId("problem").textContent = error.message;
  } finally {
    state.drawing = false;
  }
}

fillForm();
byId("theme").addEventListener("click", toggleTheme);
byId("form").addEventListener("submit", start);
byId("cancel").addEventListener("click", () => ask(`api/jobs/${state.job}/cancel`, {}).catch((error) => {
  byId("problem").textContent = error.message;
}));
