"""The report and the local page in a real browser: Debian's Chromium, driven by Playwright.

What the panels around the chart show is in test_browser_panels.py. Times are asserted at three times
the goal, since machines that run tests are busy; benchmarks/bench_report.py measures them.
"""

from __future__ import annotations

import random
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_cases import Seen, place, scaled, until
from plans import random_costs, random_plan
from report_cases import costs_of, hundred_thousand, noisy

from octopipe.costs.cluster.hardware import Link
from octopipe.costs.table import CostTable
from octopipe.plans.file import load_plan
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.views.report import Entry, report_html
from octopipe.views.report.serve import make_server

pytest_plugins = ("browser_fixtures",)
SLACK = 3.0


def _entry(system: str, costs: CostTable, ranks: int = 4, micro_batches: int = 8) -> Entry:
    plan = build_plan(system, costs, ranks, micro_batches)
    return Entry(timeline=simulate(plan, costs), plan=plan, costs=costs)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Entry]]:
    costs = costs_of(16, 4)
    entries = [_entry("1f1b", costs), _entry("zb-h1", costs)]
    searched = entries[1].plan
    assert searched is not None
    log = [{"t": float(i), "phase": ("partition", "schedule")[i // 5], "best_ms": 200.0 - i} for i in range(10)]
    entries[1] = Entry(
        timeline=entries[1].timeline,
        plan=searched.with_extra(search=log, lower_bound_ms=150.0),
        costs=costs,
    )
    entries.append(Entry(timeline=noisy(searched, costs), plan=searched, costs=costs))
    path = tmp_path_factory.mktemp("report") / "small.html"
    path.write_text(report_html(entries), encoding="utf-8")
    return path, entries


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan, costs = hundred_thousand()
    path = tmp_path_factory.mktemp("report") / "large.html"
    path.write_text(report_html([Entry(timeline=noisy(plan, costs), plan=plan, costs=costs)]), encoding="utf-8")
    return path


# -- looking -------------------------------------------------------------------------------------------


def test_hover_says_op_layers_times_and_what_it_waited_for(seen: Seen, small: tuple[Path, list[Entry]]) -> None:
    path, entries = small
    page = seen.open(path)
    timeline = entries[0].timeline
    op = int(np.flatnonzero((timeline.spans.rank == 1) & (timeline.spans.micro_batch == 0))[0])
    page.mouse.move(*place(page, 0, op))
    tip = page.locator(".tip")
    tip.wait_for(state="visible")
    text = tip.inner_text()
    assert f"{timeline.op(op)}" in text and "forward of micro-batch 0" in text
    assert "stage 1 on rank 1" in text and "layers 4 to 7" in text
    assert f"{timeline.spans.start_ms[op]:.2f} ms" in text
    assert "0F0 and its transfer from rank 0" in text and "28.6 MiB" in text
    assert "GiB of 55.9 GiB" in text


def test_click_follows_the_micro_batch_and_the_critical_path(seen: Seen, small: tuple[Path, list[Entry]]) -> None:
    path, entries = small
    page = seen.open(path)
    op = int(np.flatnonzero(entries[0].timeline.spans.micro_batch == 3)[0])
    page.mouse.click(*place(page, 0, op))
    words = page.locator(".picked").inner_text()
    assert "Micro-batch 3 in 1f1b: 8 ops" in words and "critical path" in words
    assert page.evaluate("octopipe.view.selected.micro") == 3 and page.evaluate("octopipe.view.options.critical")
    for n, entry in enumerate(entries[:2]):
        found = page.evaluate("(n) => octopipe.criticalPath(octopipe.entries[n], octopipe.entries[n].base)", n)
        assert tuple(found) == entry.timeline.critical_path()
    page.keyboard.press("Escape")
    page.locator("canvas").focus()
    page.keyboard.press("Escape")
    assert page.evaluate("octopipe.view.selected") is None


def test_wheel_drag_and_keys_zoom_and_move(seen: Seen, small: tuple[Path, list[Entry]]) -> None:
    page = seen.open(small[0])
    window = "[octopipe.view.from, octopipe.view.to]"
    whole = page.evaluate(window)
    x, y = place(page, 0, 5)
    page.mouse.move(x, y)
    time_there = page.evaluate("octopipe.view.timeAt(octopipe.view.pointer.x)")
    page.mouse.wheel(0, -600)
    until(page, f"octopipe.view.to - octopipe.view.from < {0.7 * (whole[1] - whole[0])}")
    assert page.evaluate("octopipe.view.timeAt(octopipe.view.pointer.x)") == pytest.approx(time_there, rel=1e-6)
    before = page.evaluate(window)
    page.mouse.down()
    page.mouse.move(x - 200, y, steps=4)
    page.mouse.up()
    after = page.evaluate(window)
    assert after[0] > before[0] and after[1] - after[0] == pytest.approx(before[1] - before[0])
    page.locator("canvas").focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("octopipe.view.from") < after[0]
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert page.evaluate(window) == whole
    page.get_by_role("button", name="Zoom in").click()
    assert page.evaluate("octopipe.view.to - octopipe.view.from") < whole[1]


def test_arrows_are_there_before_zooming(seen: Seen, small: tuple[Path, list[Entry]], large: Path) -> None:
    path, entries = small
    page = seen.open(path)
    arrows = "[octopipe.view.arrows, octopipe.view.arrowsOf]"
    drawn, there = page.evaluate(arrows)
    assert there == sum(e.timeline.transfers.source.size for e in entries)
    assert drawn > 0.6 * there, "only arrows that would hide each other are left out"
    words = page.locator(".arrows").inner_text()
    assert words == ("" if drawn == there else f"{drawn} of {there} arrows drawn; zoom in for the rest")
    page.evaluate("octopipe.view.show(20, 40)")
    until(page, "octopipe.view.arrows > 0 && octopipe.view.arrows === octopipe.view.arrowsOf")
    assert page.locator(".arrows").inner_text() == ""
    page.get_by_label("transfers").uncheck()
    until(page, "octopipe.view.arrows === 0")


def test_several_timelines_share_one_axis(seen: Seen, small: tuple[Path, list[Entry]]) -> None:
    path, entries = small
    page = seen.open(path)
    assert page.evaluate("octopipe.entries.length") == 3
    assert page.locator(".kpi").count() == 3
    steps = page.evaluate("octopipe.entries.map((e) => e.now.step)")
    assert steps == pytest.approx([e.timeline.step_ms for e in entries])
    assert page.evaluate("octopipe.view.horizon") == pytest.approx(max(steps))
    tops = page.evaluate("octopipe.entries.map((e) => e.laneTop)")
    assert tops == sorted(tops) and len(set(tops)) == 3


def test_panels_tell_the_timelines_numbers(seen: Seen, small: tuple[Path, list[Entry]]) -> None:
    path, entries = small
    page = seen.open(path)
    table = page.get_by_role("table").inner_text()
    for e in entries:
        assert f"{e.timeline.step_ms:.1f} ms" in table and f"{100 * e.timeline.bubble_ratio:.2f} %" in table
    assert page.locator(".strip").count() == 3 and page.locator(".curve").count() == 1
    bars = page.locator(".bar").nth(1).get_attribute("aria-label")
    bubbles = entries[0].timeline.bubbles
    assert f"boundary {bubbles.boundary_ms[1]:.2f} ms" in bars
    assert "rank 3" in page.locator(".strip").first.text_content()


def test_shades_memory_theme_and_print(seen: Seen, small: tuple[Path, list[Entry]]) -> None:
    page = seen.open(small[0])
    tall = page.evaluate("octopipe.view.content")
    page.get_by_role("checkbox", name="memory").uncheck()
    assert page.evaluate("octopipe.view.content") < tall
    page.get_by_label("Shade ops by").select_option("stage")
    light = page.evaluate("octopipe.view.ink.page")
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate("octopipe.view.ink.page") != light
    pdf = page.pdf(format="A4", landscape=True)
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000


def test_everything_works_by_keyboard_and_is_named(seen: Seen, small: tuple[Path, list[Entry]]) -> None:
    page = seen.open(small[0])
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, select, input, canvas, [role=img]')]
        .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || (e.labels && e.labels.length)))
        .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    page.locator("canvas").focus()
    page.keyboard.press("n")
    page.keyboard.press("n")
    page.keyboard.press("ArrowDown")
    spoken = page.locator(".unseen").inner_text()
    assert "micro-batch" in spoken and "rank 1" in spoken and "waited for" in spoken
    page.keyboard.press("Enter")
    assert "Micro-batch" in page.locator(".picked").inner_text()


def test_keys_work_before_the_chart_has_the_focus(seen: Seen, small: tuple[Path, list[Entry]]) -> None:
    page = seen.open(small[0])
    wide = "octopipe.view.to - octopipe.view.from"
    before = page.evaluate(wide)
    page.keyboard.press("+")
    assert page.evaluate(wide) < before
    page.keyboard.press("n")
    assert page.evaluate("octopipe.view.focus !== null")
    page.keyboard.press("0")
    assert page.evaluate(wide) == before


def test_a_narrow_window_does_not_scroll_sideways(browser: Any, small: tuple[Path, list[Entry]]) -> None:
    one = Seen(browser)
    one.page.set_viewport_size({"width": 480, "height": 800})
    page = one.open(small[0])
    assert page.evaluate("document.documentElement.scrollWidth") <= 480
    assert one.complaints == []
    one.page.close()


# -- what if -------------------------------------------------------------------------------------------


def test_the_pages_simulator_equals_ours(seen: Seen, tmp_path: Path) -> None:
    """Random plans (routes, recomputation, mixed backward, sizes, speeds), as they are and under other costs."""
    rng = random.Random(5)
    entries = []
    for i in range(24):
        plan = random_plan(rng, routes=1 + i % 2)
        costs = random_costs(rng, plan)
        costs = costs.replace(
            symbols="".join(rng.choice("EM*") for _ in range(plan.num_layers)),
            data_parallel=1 + i % 3,
            gradient_bytes=np.full(plan.num_layers, 2.0),
            optimizer_ms=np.full(plan.num_layers, 0.3),
            reduction=Link(latency_ms=0.1, ms_per_byte=0.2),
        )
        entries.append(Entry(timeline=simulate(plan, costs), plan=plan, costs=costs, label=str(i)))
    path = tmp_path / "random.html"
    path.write_text(report_html(entries), encoding="utf-8")
    page = seen.open(path)
    cases: list[tuple[dict[str, float], float, float]] = [
        ({}, 1.0, 0.0),
        ({"M": 1.7, "E": 0.2}, 0.3, 0.0),
        ({"*": 3.0}, 2.5, 0.7),
    ]
    for scale, factor, plus_ms in cases:
        found = page.evaluate(
            """([scale, transfers]) => octopipe.entries.map((e) => {
                const r = octopipe.simulateEntry(e, scale, transfers);
                return [r.step, r.makespan, [...r.end], [...r.tEnd]]; })""",
            [scale, {"factor": factor, "plus_ms": plus_ms}],
        )
        for entry, (step, makespan, ends, arrivals) in zip(entries, found):
            assert entry.plan is not None and entry.costs is not None
            twin = simulate(entry.plan, scaled(entry.costs, scale, factor, plus_ms))
            assert makespan == pytest.approx(twin.makespan_ms, rel=1e-9)
            # The panel's link slider is about transfers; reductions between replicas keep their lengths.
            if len(entry.plan.routes) == 1 or (factor, plus_ms) == (1.0, 0.0):
                assert step == pytest.approx(twin.step_ms, rel=1e-9)
            assert ends == pytest.approx(twin.spans.end_ms.tolist(), rel=1e-9, abs=1e-9)
            assert arrivals == pytest.approx(twin.transfers.end_ms.tolist(), rel=1e-9, abs=1e-9)


def test_sliders_show_the_resimulated_step(seen: Seen, small: tuple[Path, list[Entry]]) -> None:
    path, entries = small
    page = seen.open(path)
    slider = page.get_by_label(re.compile("^Mamba time"))
    slider.fill("1")
    until(page, "octopipe.entries[0].now !== octopipe.entries[0].base")
    for n in (0, 1):
        entry = entries[n]
        assert entry.plan is not None and entry.costs is not None
        expected = simulate(entry.plan, scaled(entry.costs, {"M": 2.0}, 1.0, 0.0)).step_ms
        assert page.evaluate("(n) => octopipe.entries[n].now.step", n) == pytest.approx(expected, rel=1e-9)
        assert f"{expected:.1f} ms" in page.locator(".result").nth(n).inner_text()
    assert page.evaluate("octopipe.entries[2].now === octopipe.entries[2].base"), "a measurement stays as it is"
    page.get_by_role("button", name="Reset").click()
    until(page, "octopipe.entries[0].now === octopipe.entries[0].base")


# -- size and speed ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_100_000_ops_load_and_move_smoothly(seen: Seen, browser: Any, large: Path) -> None:
    """The best of a few tries: other work on the machine makes single ones slow, never fast."""
    loads, frames = [], []
    for k in range(4):
        one = Seen(browser) if k else seen
        page = one.open(large)
        assert page.evaluate("octopipe.entries[0].count") >= 100_000
        loads.append(page.evaluate("octopipe.ready_at_ms"))
        drawn = page.evaluate(
            """async () => {
                const view = octopipe.view, frame = () => new Promise(requestAnimationFrame);
                await frame();
                view.frames.length = 0;
                for (let i = 0; i < 24; i++) { view.zoom(1.4, 600); await frame(); }
                for (let i = 0; i < 24; i++) { view.pan(0.1); await frame(); }
                for (let i = 0; i < 24; i++) { view.zoom(1 / 1.4, 600); await frame(); }
                return view.frames;
            }"""
        )
        assert len(drawn) >= 60
        frames.append(sorted(drawn)[int(0.9 * len(drawn))])
        assert one.complaints == []
        if k:
            page.close()
        if min(loads) < 2000 * SLACK and min(frames) < 33 * SLACK:
            break
    assert min(loads) < 2000 * SLACK and min(frames) < 33 * SLACK
    seen.page.evaluate("octopipe.view.fit()")
    seen.page.mouse.click(*place(seen.page, 0, 500))
    assert "Micro-batch" in seen.page.locator(".picked").inner_text()


# -- the local page ------------------------------------------------------------------------------------


def test_serve_tunes_a_model_end_to_end(browser: Any, tmp_path: Path) -> None:
    one = Seen(browser)
    page = one.page
    with make_server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            page.goto(server.url)
            page.select_option("[name=model]", "nemotron-h-8b")
            page.fill("[name=pp]", "2")
            page.fill("[name=micro_batches]", "4")
            page.fill("[name=tp]", "8")
            page.fill("[name=budget_s]", "2")
            page.get_by_label("GPipe").check()
            page.get_by_role("button", name="Tune").click()
            page.wait_for_selector("#downloads:not([hidden])", timeout=120_000)
            until(page, "window.octopipe && octopipe.entries.length === 3 && octopipe.entries[2].search.length")
            steps = page.evaluate("octopipe.entries.map((e) => e.now.step)")
            assert steps[2] <= min(steps[:2]) + 1e-9
            with page.expect_download() as got:
                page.get_by_role("link", name="Download the plan").click()
            got.value.save_as(tmp_path / "plan.json")
            plan = load_plan(tmp_path / "plan.json")
            assert plan.num_ranks == 2 and plan.extra["setting"]["tp"] == 8
            with page.expect_download() as got:
                page.get_by_role("link", name="Download the report").click()
            got.value.save_as(tmp_path / "report.html")
            assert one.complaints == []
            page.fill("[name=pp]", "1000")
            page.get_by_role("button", name="Tune").click()
            until(page, "document.getElementById('problem').textContent !== ''")
            assert "1 to 128" in page.locator("#problem").inner_text()
            assert all(url.startswith((server.url, "data:", "blob:")) for url in one.requests), one.requests
        finally:
            page.close()
            server.shutdown()
            thread.join()
    other = Seen(browser)
    other.open(tmp_path / "report.html")
    assert other.complaints == []
    other.page.close()
