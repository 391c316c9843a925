"""The report's panels in a real browser: what they say of a plan, under what-if too, and that it can be read."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_cases import Seen, place, scaled, until
from effort import some
from plans import random_costs, random_plan
from report_cases import costs_of

from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.search.recompute import recomputing
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import GIB
from octopipe.views.report import Entry, report_html

pytest_plugins = ("browser_fixtures",)
HOSTILE = "<img src=x onerror=alert(1)></script><b>"


def _entry(costs: CostTable, *, recompute: tuple[int, ...] = (), label: str = "", **extra: Any) -> Entry:
    """1F1B on four ranks; the ranks in `recompute` compute all their layers again."""
    plan = build_plan("1f1b", costs, 4, 8)
    if recompute:
        plan = recomputing(plan, dict.fromkeys(recompute, plan.num_layers))
    plan = plan.with_extra(**extra)
    return Entry(timeline=simulate(plan, costs), plan=plan, costs=costs, label=label)


def _written(tmp_path: Path, *entries: Entry) -> Path:
    path = tmp_path / "report.html"
    path.write_text(report_html(entries), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def priced() -> CostTable:
    return resolve_costs("nemotron-h-8b", pp=4, tp=4, gpu="h800", micro_batches=8)


def _strip(page: Any, rank: int, time_ms: float) -> tuple[int, int]:
    """A place on a rank's memory strip."""
    page.locator("canvas").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """([r, t]) => { const {view, entries} = octopipe;
        return [view.xAt(t), view.laneY(entries[0], r) + view.laneHeight + view.memoryHeight / 2 - view.scroll]; }""",
        [rank, time_ms],
    )
    box = page.locator("canvas").bounding_box()
    return round(box["x"] + x), round(box["y"] + y)


def _tip(page: Any, at: tuple[int, int]) -> str:
    page.mouse.move(*at)
    page.locator(".tip").wait_for(state="visible")
    return str(page.locator(".tip").inner_text())


# -- pointing ------------------------------------------------------------------------------------------


def test_a_memory_strip_says_what_its_rank_does_then(seen: Seen, tmp_path: Path) -> None:
    costs = costs_of(16, 4).replace(optimizer_ms=np.full(16, 2.0))
    entry = _entry(costs)
    t = entry.timeline
    page = seen.open(_written(tmp_path, entry))
    of_rank = np.flatnonzero(t.spans.rank == 1)
    op = int(of_rank[3])
    text = _tip(page, _strip(page, 1, (t.spans.start_ms[op] + t.spans.end_ms[op]) / 2))
    assert f"running {t.op(op)}" in text and "idle" not in text
    assert "activations" in text and "memory here" in text
    text = _tip(page, _strip(page, 1, t.spans.start_ms[of_rank[0]] / 2))
    assert "idle" in text and "running" not in text
    update = next(e for e in t.extras if e.rank == 3)
    assert "optimizer" in _tip(page, _strip(page, 3, (update.start_ms + update.end_ms) / 2))


@pytest.mark.parametrize("update_ms", [0.0, 2.0])
def test_the_legend_names_the_grey_tails_where_there_are_any(seen: Seen, tmp_path: Path, update_ms: float) -> None:
    page = seen.open(_written(tmp_path, _entry(costs_of(16, 4).replace(optimizer_ms=np.full(16, update_ms)))))
    legend = page.locator(".tools .legend").first.inner_text()
    assert ("gradient reduction, optimizer" in legend) == (update_ms > 0)


def test_the_memory_under_the_pointer_is_the_simulators(seen: Seen, tmp_path: Path) -> None:
    entry = _entry(costs_of(16, 4))
    curve = entry.timeline.memory[2]
    page = seen.open(_written(tmp_path, entry))
    longest = int(np.argmax(np.diff(curve.times_ms)))
    text = _tip(page, _strip(page, 2, float(curve.times_ms[longest : longest + 2].mean())))
    assert f"{curve.bytes[longest] / GIB:.2f} GiB of" in text or f"{curve.bytes[longest] / GIB:.1f} GiB of" in text


def test_a_search_finds_an_op_and_goes_to_it(seen: Seen, tmp_path: Path, priced: CostTable) -> None:
    page = seen.open(_written(tmp_path, _entry(priced, label="a"), _entry(priced, recompute=(1,), label="b")))
    box = page.get_by_label("Find an op")
    box.fill("2F5")
    assert page.locator(".found").inner_text() == "2 found"
    box.press("Enter")
    assert page.locator(".found").inner_text() == "1 of 2"
    chosen = """(() => { const {entry, op} = octopipe.view.selected;
        return [entry.label, entry.stage[op], entry.kind[op], entry.micro[op]]; })()"""
    assert page.evaluate(chosen) == ["a", 2, 0, 5]
    wide = page.evaluate(
        """(() => { const v = octopipe.view, {entry, op} = v.selected;
        return v.xAt(entry.now.end[op]) - v.xAt(entry.now.start[op]); })()"""
    )
    assert wide > 40, "wide enough to read"
    _tip(page, place(page, 0, page.evaluate("octopipe.view.selected.op")))
    box.press("Enter")
    assert not page.locator(".tip").is_visible(), "what the pointer was at is no longer there"
    assert page.evaluate(chosen)[0] == "b" and "Micro-batch 5 in b" in page.locator(".picked").inner_text()
    count = "(text) => { const found = octopipe.findOps(octopipe.entries, text); return found && found.length; }"
    for text, expected in (
        ("f5", 8),
        ("1R", 8),
        ("rank 3 B", 16),
        ("micro-batch 7 stage 2", 4),
        ("layer 0 forward", 16),
        ("9F9", 0),
        ("F99", 0),
        ("hello", None),
        (HOSTILE, None),
        ("", None),
    ):
        assert page.evaluate(count, text) == expected, text
    box.fill("hello")
    assert "not an op" in page.locator(".found").inner_text()
    box.press("Escape")
    assert page.evaluate("octopipe.view.marked") is None and box.input_value() == ""
    page.locator("canvas").focus()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.className") == "find"


# -- what if -------------------------------------------------------------------------------------------


def test_every_panel_follows_what_if(seen: Seen, tmp_path: Path, priced: CostTable) -> None:
    entry = _entry(priced, recompute=(1,), lower_bound_ms=100.0, bound_of="plans that hold each layer once")
    page = seen.open(_written(tmp_path, entry))
    before = page.locator("[data-panel=partition]").inner_html()
    assert "above the lower bound of plans that hold each layer once" in page.locator(".kpi").inner_text()
    page.get_by_label(re.compile("^Mamba time")).fill("1")
    until(page, "octopipe.entries[0].now !== octopipe.entries[0].base")
    assert entry.plan is not None
    costs = scaled(priced, {"M": 2.0}, 1.0, 0.0)
    twin = simulate(entry.plan, costs)
    rate = costs.throughput(4, 8, twin.step_ms)
    assert rate["mfu"] is not None and rate["tokens_per_gpu_per_second"] is not None
    card, table = page.locator(".kpi").inner_text(), page.get_by_role("table").inner_text()
    setup = page.locator(".setup").inner_text()
    for text in (card, table):
        assert f"{twin.step_ms:.1f} ms" in text and f"{rate['tokens_per_gpu_per_second']:,.0f}" in text
        assert f"{twin.peak_gib[0]:.1f} GiB" in text or f"{max(twin.peak_gib):.1f} GiB" in text
    assert f"{100 * twin.bubble_ratio:.1f} % bubble" in card and "lower bound" not in card and "what if" in card.lower()
    assert f"{100 * twin.bubble_ratio:.2f} %" in table and f"{100 * twin.overlap.rate:.1f} %" in table
    assert f"{twin.bubbles.boundary_ms.mean():.2f} ms" in table and "not proven for changed times" in table
    assert f"{100 * rate['mfu']:.1f} %" in setup and "what if" in setup
    bar = page.locator("[data-panel=bubbles] .bar").nth(2).get_attribute("aria-label")
    assert f"computing {twin.busy_ms[2]:.1f} ms" in bar and f"boundary {twin.bubbles.boundary_ms[2]:.1f} ms" in bar
    assert page.locator("[data-panel=partition]").inner_html() != before, "layers are as high as their time now"
    page.get_by_role("button", name="Reset").click()
    until(page, "octopipe.entries[0].now === octopipe.entries[0].base")
    assert page.locator("[data-panel=partition]").inner_html() == before
    assert f"{entry.timeline.step_ms:.1f} ms" in page.locator(".kpi").inner_text()


def test_numbers_and_memory_in_the_page_equal_ours(seen: Seen, tmp_path: Path) -> None:
    """Random plans (routes, recomputation, mixed backward, sizes, speeds) under other costs, against the simulator."""
    rng = random.Random(11)
    entries = []
    for i in range(16):
        plan = random_plan(rng, routes=1 + i % 2)
        costs = random_costs(rng, plan)
        n = plan.num_layers
        activation = np.array([rng.uniform(1e8, 4e8) for _ in range(n)])
        costs = costs.replace(
            symbols="".join(rng.choice("EM*") for _ in range(n)),
            activation_bytes=activation,
            stash_bytes=0.4 * activation,
            static_bytes=np.array([rng.uniform(1e8, 9e8) for _ in range(n)]),
            boundary_bytes=np.array([rng.uniform(1e6, 9e7) for _ in range(n)]),
            workspace_bytes=np.array([rng.uniform(0, 5e7) for _ in range(n)]),
        )
        entries.append(Entry(timeline=simulate(plan, costs), plan=plan, costs=costs, label=str(i)))
    page = seen.open(_written(tmp_path, *entries))
    assert page.evaluate("octopipe.entries.every((e) => e.memoryModel !== null)"), "every model agrees with its curve"
    for scale, factor, plus_ms in (({}, 1.0, 0.0), ({"M": 1.7, "E": 0.2}, 0.3, 0.0), ({"*": 3.0}, 2.5, 0.7)):
        found = page.evaluate(
            """([scale, transfers]) => octopipe.entries.map((e) => {
                const now = octopipe.simulateEntry(e, scale, transfers), n = octopipe.numbersOf(e, now);
                const curves = octopipe.memoryOf(e, now).curves;
                const sums = curves.map((c, r) => octopipe.partsAt(e, r, c, c.peakAt).reduce((a, b) => a + b, 0));
                return [n, sums, curves.map((c) => [[...c.time], [...c.level]])]; })""",
            [scale, {"factor": factor, "plus_ms": plus_ms}],
        )
        for entry, (numbers, sums, curves) in zip(entries, found):
            assert entry.plan is not None and entry.costs is not None
            twin = simulate(entry.plan, scaled(entry.costs, scale, factor, plus_ms))
            if (factor, plus_ms) == (1.0, 0.0):
                assert numbers["bubble_ratio"] == pytest.approx(twin.bubble_ratio, rel=1e-9, abs=1e-12)
            assert numbers["peak_bytes"] == pytest.approx(twin.peak_bytes.tolist(), rel=1e-9)
            assert sums == pytest.approx(twin.peak_bytes.tolist(), rel=1e-9), "the parts add up"
            assert numbers["overlap_rate"] == pytest.approx(twin.overlap.rate)
            for name, values in numbers["bubbles_ms"].items():
                expected = getattr(twin.bubbles, f"{name}_ms").tolist()
                assert values == pytest.approx(expected, rel=1e-9, abs=1e-8 * twin.step_ms), name
            for (times, levels), curve in zip(curves, twin.memory):
                middle = (np.array(times)[1:] + np.array(times)[:-1]) / 2
                at = np.searchsorted(curve.times_ms, middle, side="right") - 1
                apart = np.diff(times) > 1e-6 * twin.step_ms
                assert np.allclose(np.array(levels)[:-1][apart], curve.bytes[at][apart], rtol=1e-9)


def test_a_memory_curve_of_other_origin_is_not_explained(seen: Seen, tmp_path: Path) -> None:
    """A timeline whose memory the plan's costs do not give is shown as it is, in one part."""
    entry = _entry(costs_of(16, 4))
    other = costs_of(16, 4).replace(static_bytes=np.full(16, 2e9))
    page = seen.open(_written(tmp_path, Entry(timeline=entry.timeline, plan=entry.plan, costs=other)))
    assert page.evaluate("[octopipe.entries[0].memoryModel, octopipe.memoryParts(octopipe.entries[0])]") == [
        None,
        ["in use"],
    ]
    assert page.locator("[data-panel=memory]").inner_text() == ""


# -- what is shown -------------------------------------------------------------------------------------


def test_recomputing_stages_are_marked(seen: Seen, tmp_path: Path, priced: CostTable) -> None:
    entry = _entry(priced, recompute=(1, 2))
    assert entry.plan is not None
    again = sum(len(s.recomputed_layers) for s in entry.plan.stages)
    assert again > 0
    page = seen.open(_written(tmp_path, entry))
    assert page.locator(".strip .again").count() == again
    names = page.locator(".strip .on").all_text_contents()
    assert names == ["rank 0", "rank 1 ↻", "rank 2 ↻", "rank 3"]
    spoken = page.locator(".strip").get_attribute("aria-label")
    assert spoken.count("recomputes all") == 2
    assert f"↻ {again} of {entry.plan.num_layers} layers recomputed" in page.locator(".kpi").inner_text()
    feet = []
    for rank in (0, 1):
        op = int(np.flatnonzero(entry.timeline.spans.rank == rank)[0])
        feet.append(
            page.evaluate(
                """(i) => { const v = octopipe.view, e = octopipe.entries[0], k = v.ratio;
                const x = v.xAt((e.now.start[i] * 3 + e.now.end[i]) / 4), y = v.laneY(e, e.rank[i]) + v.laneHeight - 2;
                const copy = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
                copy.drawImage(v.canvas, x * k, y * k, 1, 1, 0, 0, 1, 1);
                return [...copy.getImageData(0, 0, 1, 1).data]; }""",
                op,
            )
        )
        text = _tip(page, place(page, 0, op))
        assert ("recomputes" in text) == (rank == 1)
    assert feet[0] != feet[1], "a forward whose stage recomputes has a foot"


def test_the_head_tells_the_set_up_and_what_it_achieves(seen: Seen, tmp_path: Path, priced: CostTable) -> None:
    entry = _entry(priced)
    page = seen.open(_written(tmp_path, entry))
    rate = priced.throughput(4, 8, entry.timeline.step_ms)
    assert rate["tokens_per_gpu_per_second"] is not None and rate["mfu"] is not None
    names, values = (page.locator(f".setup {tag}").all_text_contents() for tag in ("dt", "dd"))
    facts = dict(zip(names, values))
    assert facts["GPU"] == "16 × h800" and facts["TP"] == "4" and facts["PP"] == "4"
    assert facts["sequence"] == "4096 tokens" and facts["micro-batches"] == "8"
    assert facts["tokens/s"] == f"{16 * rate['tokens_per_gpu_per_second']:,.0f}"
    assert facts["tokens/s per GPU"] == f"{rate['tokens_per_gpu_per_second']:,.0f}"
    assert facts["MFU"] == f"{100 * rate['mfu']:.1f} %"


def test_a_bound_above_the_step_is_not_compared_with_it(seen: Seen, tmp_path: Path, priced: CostTable) -> None:
    page = seen.open(_written(tmp_path, _entry(priced, lower_bound_ms=1e6)))
    assert "lower bound" not in page.locator(".kpi").inner_text()
    assert "not proven for these costs" in page.get_by_role("table").inner_text()


def test_plans_of_different_set_ups_each_tell_their_own(seen: Seen, tmp_path: Path, priced: CostTable) -> None:
    other = resolve_costs("nemotron-h-8b", pp=4, tp=8, gpu="h100", micro_batches=8)
    page = seen.open(_written(tmp_path, _entry(priced, label="a"), _entry(other, label="b")))
    assert "GPU" not in page.locator(".setup dt").all_text_contents()
    cards = page.locator(".kpi").all_text_contents()
    assert "16 × h800" in cards[0] and "TP 4" in cards[0] and "32 × h100" in cards[1] and "TP 8" in cards[1]


def test_memory_is_told_by_what_it_is(seen: Seen, tmp_path: Path, priced: CostTable) -> None:
    entry = _entry(priced)
    page = seen.open(_written(tmp_path, entry))
    label = page.locator("[data-panel=memory] .bar").first.get_attribute("aria-label")
    static = entry.timeline.memory[0].static_bytes
    for name, share in (("weights", 2 / 18), ("gradients", 4 / 18), ("optimizer state", 12 / 18)):
        assert f"{name} {static * share / GIB:.2f} GiB" in label
    assert "activations" in label and "buffers between stages" in label and "workspace" in label
    page.evaluate("octopipe.view.fit()")
    strip = _tip(page, _strip(page, 0, entry.timeline.step_ms / 2))
    assert "optimizer state" in strip and "weights" in strip


@pytest.mark.parametrize("width", some([800, 1440]))
def test_every_letter_can_be_read(browser: Any, tmp_path: Path, priced: CostTable, width: int) -> None:
    log = [{"t": 0.5 * i, "phase": "schedule", "best_ms": 123456.789 - 0.013 * i} for i in range(10)]
    entry = _entry(priced, recompute=(1,), search=log, lower_bound_ms=123456.6)
    one = Seen(browser)
    one.page.set_viewport_size({"width": width, "height": 900})
    page = one.open(_written(tmp_path, entry, _entry(priced, label="a plan with a rather long name, " * 6)))
    letters = page.evaluate(
        """() => [...document.querySelectorAll('svg text')].map((t) => {
            const svg = t.ownerSVGElement, own = t.getBoundingClientRect(), box = svg.getBoundingClientRect();
            return [parseFloat(getComputedStyle(t).fontSize) * svg.getScreenCTM().a,
                Math.min(own.left - box.left, box.right - own.right), t.textContent]; })"""
    )
    assert len(letters) > 20 and min(size for size, _, _ in letters) >= 10.5
    assert [text for _, room, text in letters if room < -0.5] == [], "clipped"
    drawn = page.evaluate(
        """() => { const v = octopipe.view, c = v.context, out = [], plain = c.fillText.bind(c);
            c.fillText = (text, x, y) => {
                const wide = c.measureText(text).width;
                const left = c.textAlign === "right" ? x - wide : c.textAlign === "center" ? x - wide / 2 : x;
                out.push([parseFloat(/([\\d.]+)px/.exec(c.font)[1]), left, v.width - left - wide, text]);
                plain(text, x, y); };
            v.draw(); delete c.fillText; return out; }"""
    )
    assert len(drawn) > 20 and min(size for size, *_ in drawn) >= 11
    assert [text for _, left, right, text in drawn if min(left, right) < -0.5] == [], "clipped"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert one.complaints == []
    page.set_viewport_size({"width": 1000, "height": 900})
    until(page, "Math.abs(document.querySelector('.strip').viewBox.baseVal.width - octopipe.view.width) < 2")
    one.page.close()


def test_hostile_names_stay_text(seen: Seen, tmp_path: Path, priced: CostTable) -> None:
    log = [{"t": float(i), "phase": HOSTILE, "best_ms": 5.0 - i} for i in range(3)]
    entry = _entry(priced.replace(model=HOSTILE, symbols="<" * priced.num_layers), label=HOSTILE, search=log)
    page = seen.open(_written(tmp_path, entry))
    page.get_by_label("Find an op").fill(HOSTILE)
    page.get_by_label("Find an op").press("Enter")
    page.get_by_label(re.compile("^layer kind <")).fill("1")
    until(page, "octopipe.entries[0].now !== octopipe.entries[0].base")
    _tip(page, place(page, 0, 3))
    assert page.locator("img").count() == 0 and page.locator("main b:not(.tip b)").count() == 0
    assert HOSTILE in page.locator(".kpi").inner_text()
