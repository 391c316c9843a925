"""How large and how quick the report is: bytes, time to load, time of a frame, in Debian's Chromium.

    python benchmarks/bench_report.py

Goals for 100,000 ops: at most 2 MB, loaded in < 2 s, a zoom or pan frame in < 33 ms. Two frame times are given:
what the page's own drawing takes, and the time from one frame to the next while the wheel turns.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from browser_cases import until
from browser_fixtures import FLAGS
from one_line import start
from report_cases import hundred_thousand, noisy

from octopipe.base.errors import OctoPipeError
from octopipe.simulation.simulator import simulate
from octopipe.views.report import Entry, report_html

FRAMES = """async () => {
    const view = octopipe.view, frame = () => new Promise(requestAnimationFrame), between = [];
    await frame();
    view.frames.length = 0;
    let last = performance.now();
    const turn = async (act) => { act(); const now = await frame(); between.push(now - last); last = now; };
    for (let round = 0; round < 3; round++) {
        for (let i = 0; i < 30; i++) await turn(() => view.zoom(1.3, 600));
        for (let i = 0; i < 30; i++) await turn(() => view.pan(0.1));
        for (let i = 0; i < 30; i++) await turn(() => view.zoom(1 / 1.3, 600));
    }
    return [view.frames.slice(), between.slice(1)];
}"""


def quantiles(values: list[float]) -> str:
    ordered = sorted(values)
    pick = {
        name: ordered[min(int(q * len(ordered)), len(ordered) - 1)] for name, q in (("median", 0.5), ("95 %", 0.95))
    }
    return ", ".join(f"{name} {v:.1f} ms" for name, v in pick.items()) + f", worst {ordered[-1]:.1f} ms"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise OctoPipeError('Playwright is not installed: pip install -e ".[dev]"') from None
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise OctoPipeError("Chromium is not on this machine: apt-get install chromium")
    plan, costs = hundred_thousand()
    predicted = Entry(timeline=simulate(plan, costs), plan=plan, costs=costs, label="predicted")
    measured = Entry(timeline=noisy(plan, costs), plan=plan, costs=costs)
    cases = {"predicted": [predicted], "measured": [measured], "predicted above measured": [predicted, measured]}
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, entries in cases.items():
            began = time.perf_counter()
            page_text = report_html(entries)
            built_s = time.perf_counter() - began
            path = Path(folder) / "report.html"
            path.write_text(page_text, encoding="utf-8")
            ops = sum(e.timeline.spans.rank.size for e in entries)
            print(f"{name}: {ops:,} ops, {len(page_text.encode()) / 1e6:.2f} MB, written in {built_s:.2f} s")
            loads = []
            for _ in range(3):
                page = browser.new_page(viewport={"width": 1440, "height": 900})
                page.goto(path.as_uri())
                until(page, "window.octopipe")
                loads.append(page.evaluate("octopipe.ready_at_ms"))
                drawn, between = page.evaluate(FRAMES)
                page.close()
            print(f"  loaded after {', '.join(f'{t:.0f}' for t in loads)} ms (from the start of navigation)")
            print(f"  drawing a frame: {quantiles(drawn)}")
            print(f"  frame to frame:  {quantiles(between)}")
        browser.close()


if __name__ == "__main__":
    start(main)
