// Starts a report that stands in its own file.

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.dispatchEvent(new Event("themechange"));
}

async function openPage() {
  const began = performance.now();
  document.getElementById("theme").addEventListener("click", toggleTheme);
  const root = document.getElementById("report");
  try {
    const head = JSON.parse(document.getElementById("head").textContent);
    window.octopipeSymbols = head.symbol_names;
    const report = await mountReport(root, head, document.getElementById("columns").textContent.trim());
    window.octopipe = { ...report, simulateEntry, criticalPath, ready_ms: performance.now() - began };
    root.removeAttribute("aria-busy");
  } catch (error) {
    root.textContent = `This report cannot be shown: ${error.message}. A browser from 2023 or later is needed.`;
    throw error;
  }
}

openPage();
