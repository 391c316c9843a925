"""The pictures of README and docs, drawn by `make pictures`.

Writes docs/compare.svg and docs/terminal.svg, and with Chromium and Playwright at hand the screenshots
docs/report.png, report-dark.png, report-what-if.png, report-large.png and serve.png.
The searched plan depends on a seed and a count of moves, not on how fast this machine is.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from octopipe.costs.resolve import resolve_costs
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate
from octopipe.views.export.svg import timeline_svg
from octopipe.views.export.terminal import timeline_text
from octopipe.views.report import Entry, report_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))  # the browser's flags and the large case live with the tests

DOCS = ROOT / "docs"
LARGE, SMALL = ("nemotron-h-56b", 8, 8), ("nemotron-h-8b", 4, 4)
"""Model, pipeline ranks, tensor-parallel size; eight micro-batches each."""
MICRO_BATCHES = 8
TERMINAL = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
 aria-label="a timeline in the terminal">
<style>.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
 font-size: {char_height}px; line-height: {line_height}px; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}"
 height="{terminal_height}"/></clipPath>{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#1a2129"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
DARK = TerminalTheme((26, 33, 41), (230, 235, 240), [(26, 33, 41)] * 8, [(230, 235, 240)] * 8)


def say(path: Path) -> None:
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def entries(model: str, ranks: int, tp: int) -> list[Entry]:
    """1F1B, ZB-H1 and the tuned plan of the same model in the same setting."""
    costs = resolve_costs(model, pp=ranks, tp=tp)
    out = []
    for name, label in (("1f1b", "1F1B"), ("zb-h1", "ZB-H1")):
        plan = build_plan(name, costs, ranks, MICRO_BATCHES)
        out.append(Entry(timeline=simulate(plan, costs, label=label), plan=plan, costs=costs, label=label))
    found = tune(costs, ranks, MICRO_BATCHES, iterations=20_000, workers=2, seed=0, budget_s=600)
    timeline = simulate(found.plan, costs, label="OctoPipe")
    return [*out, Entry(timeline=timeline, plan=found.plan, costs=costs, label="OctoPipe")]


def terminal_picture(entry: Entry) -> str:
    model, ranks, tp = LARGE
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=132, force_terminal=True, color_system="truecolor", file=nowhere)
        words = f"$ octopipe simulate {model} --system zb-h1 --tp {tp} --pp {ranks} --micro-batches {MICRO_BATCHES}"
        console.print(words, style="bold", highlight=False)
        console.print(timeline_text(entry.timeline))
        return console.export_svg(theme=DARK, code_format=TERMINAL, unique_id="t", title="")


@contextmanager
def chromium() -> Iterator[Browser | None]:
    """A browser, or None where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        yield None
        return
    from browser_fixtures import FLAGS

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def report_pictures(browser: Browser, three: list[Entry], folder: Path) -> None:
    path = folder / "report.html"
    path.write_text(report_html(three), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1440, "height": 1010})
    page.goto(path.as_uri())
    until(page, "window.octopipe")
    shot(page, "report.png")
    page.get_by_role("button", name="Light or dark").click()
    page.evaluate(
        """() => { const {view, entries} = octopipe, e = entries[2];
        const i = e.index.find(0, e.routes[0][Math.floor(e.routes[0].length / 2)], 3), t = e.now.start[i];
        view.show(t - view.horizon * 0.08, t + view.horizon * 0.16); window.target = i; }"""
    )
    page.wait_for_timeout(100)
    x, y = page.evaluate(
        """() => { const {view, entries} = octopipe, e = entries[2], i = window.target;
        return [view.xAt((e.now.start[i] + e.now.end[i]) / 2), view.laneY(e, e.rank[i]) - view.scroll + 6]; }"""
    )
    box = page.locator("canvas").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + x, box["y"] + y)
    page.mouse.move(box["x"] + x + 1, box["y"] + y)
    page.wait_for_timeout(100)
    shot(page, "report-dark.png")
    page.close()

    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(path.as_uri())
    until(page, "window.octopipe")
    page.get_by_label("head and loss time").fill("1")
    page.wait_for_timeout(200)
    page.locator("section", has=page.get_by_role("heading", name="What if")).scroll_into_view_if_needed()
    page.evaluate("window.scrollTo(0, document.querySelectorAll('section')[1].offsetTop - 16)")
    page.wait_for_timeout(100)
    shot(page, "report-what-if.png")
    page.close()


def large_picture(browser: Browser, folder: Path) -> None:
    from report_cases import hundred_thousand

    plan, costs = hundred_thousand()
    path = folder / "large.html"
    timeline = simulate(plan, costs, label="ZB-H1, 100,800 ops")
    path.write_text(report_html([Entry(timeline=timeline, plan=plan, costs=costs)]), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1440, "height": 700})
    page.goto(path.as_uri())
    until(page, "window.octopipe")
    shot(page, "report-large.png")
    page.close()


def serve_picture(browser: Browser) -> None:
    from octopipe.views.report.serve import make_server

    with make_server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            page = browser.new_page(viewport={"width": 1440, "height": 1040})
            page.goto(server.url)
            page.fill("[name=tp]", "4")
            page.fill("[name=budget_s]", "12")
            page.get_by_role("button", name="Tune").click()
            until(page, "window.octopipe && octopipe.entries.length === 2")
            page.wait_for_timeout(3000)
            shot(page, "serve.png")
            page.locator("#cancel").click()
            page.close()
        finally:
            server.shutdown()
            thread.join()


def until(page: Page, expression: str) -> None:
    """Wait for an expression to be true (the page forbids the way Playwright itself waits)."""
    for _ in range(3000):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise TimeoutError(expression)


def shot(page: Page, name: str) -> None:
    page.screenshot(path=DOCS / name)
    say(DOCS / name)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    DOCS.mkdir(exist_ok=True)
    three = entries(*LARGE)
    title = f"Nemotron-H 56B on {LARGE[1]} ranks, {MICRO_BATCHES} micro-batches"
    (DOCS / "compare.svg").write_text(timeline_svg([three[0].timeline, three[-1].timeline], width=1100, title=title))
    say(DOCS / "compare.svg")
    (DOCS / "terminal.svg").write_text(terminal_picture(three[1]))
    say(DOCS / "terminal.svg")
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        if browser is None:
            print("no Chromium or no Playwright: the screenshots stay as they are")
            return 0
        report_pictures(browser, entries(*SMALL), Path(folder))
        large_picture(browser, Path(folder))
        serve_picture(browser)
    return 0


if __name__ == "__main__":
    sys.exit(main())
