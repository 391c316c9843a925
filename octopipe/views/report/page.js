// Starts a report that stands in its own file.

async function openPage() {
  const began = performance.now();
  document.getElementById("theme").addEventListener("click", toggleTheme);
  const root = document.getElementById("report");
  try {
    const head = JSON.parse(document.getElementById("head").textContent);
    const report = await mountReport(root, head, document.getElementById("columns").textContent.trim());
    window.octopipe = { ...report, simulateEntry, criticalPath, numbersOf, memoryOf, memoryParts, partsAt, findOps, ready_ms: performance.now() - began, ready_at_ms: performance.now() };
    root.removeAttribute("aria-busy");
  } catch (error) {
    root.textContent = `This report cannot be shown: ${error.message}. A browser from 2023 or later is needed.`;
    throw error;
  }
}

openPage();
