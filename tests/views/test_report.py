"""The report without a browser: packing, files, sizes, escaping, notebooks."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_settings import moe_setting
from report_cases import costs_of, hundred_thousand, noisy

import octopipe
from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.analytic import footprint
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.plans.file import load_plan, save_plan
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import MemoryCurve, load_timeline
from octopipe.views.report import Entry, notebook_html, report_html
from octopipe.views.report.entry import entry_data, search_points, search_unit, thin_out
from octopipe.views.report.facts import facts_of, rates_of
from octopipe.views.report.load import load_entries
from octopipe.views.report.memory import WHOLE_STATE, state_shares
from octopipe.views.report.pack import Packer, unpack
from octopipe.views.report.page import SCRIPTS, asset, report_data


def _entry(system: str = "1f1b", label: str = "") -> Entry:
    costs = costs_of(16, 4)
    plan = build_plan(system, costs, 4, 8)
    return Entry(timeline=simulate(plan, costs), plan=plan, costs=costs, label=label)


# -- packing -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**30), 2**30)), st.booleans())
def test_packed_integers_come_back(values: list[int], delta: bool) -> None:
    pack = Packer()
    first = pack.integers([5])
    column = pack.integers(values, delta=delta)
    found = unpack(pack.columns, pack.text())
    assert found[first].tolist() == [5] and found[column].tolist() == values


@given(st.lists(st.floats(allow_nan=False)))
def test_packed_floats_come_back_exactly(values: list[float]) -> None:
    pack = Packer()
    pack.floats(values)
    assert unpack(pack.columns, pack.text())[0].tolist() == values


def test_the_page_gets_the_timeline_to_nine_digits() -> None:
    entry = _entry("zb-h1")
    pack = Packer()
    data = entry_data(entry, pack)
    columns = unpack(pack.columns, pack.text())
    spans = {name: columns[number] for name, number in data["spans"].items()}
    start, at = [], 0
    for count in data["ops_of_rank"]:
        clock = 0
        for i in range(at, at + count):
            start.append(clock + spans["gap"][i])
            clock = start[-1] + spans["duration"][i]
        at += count
    tick = data["tick_ms"]
    assert np.allclose(np.array(start) * tick, entry.timeline.spans.start_ms, rtol=0, atol=tick)
    back = columns[data["binding"]]
    binding = np.where(back == 0, -1, np.arange(back.size) - back)
    assert binding.tolist() == entry.timeline.binding.tolist()
    moved = {name: columns[number] for name, number in data["transfers"].items()}
    assert moved["producer"].tolist() == entry.timeline.transfers.producer.tolist()
    assert moved["sizes"][moved["size"]].tolist() == entry.timeline.transfers.nbytes.tolist()


def test_the_page_gets_both_lanes_and_the_pairs_of_a_plan_with_an_exchange() -> None:
    costs, ranks, micro_batches = moe_setting(random.Random(4), 0.4)
    plan = build_plan("interleaved-overlap", costs, ranks, micro_batches)
    entry = Entry(timeline=simulate(plan, costs), plan=plan, costs=costs)
    pack = Packer()
    data = entry_data(entry, pack)
    columns = unpack(pack.columns, pack.text())
    lanes, spans = data["lanes"], entry.timeline.lanes
    assert spans is not None and sum(lanes["pieces_of_rank"]) == spans.span.size
    tick = data["tick_ms"]
    got = sorted(
        zip(*(columns[lanes[name]].tolist() for name in ("span", "lane", "start", "duration")), strict=True),
    )
    expected = sorted(zip(*(column.tolist() for column in spans), strict=True))
    for (op, lane, start, took), (own_op, own_lane, begin, end) in zip(got, expected, strict=True):
        assert (op, lane) == (own_op, own_lane)
        assert start * tick == pytest.approx(begin, abs=tick) and took * tick == pytest.approx(
            end - begin, abs=2 * tick
        )
    seconds = {plan.op(int(k)) for k in columns[data["pairs"]]}
    assert seconds == {second for _, second in plan.pairs}
    # The page's own simulator knows single ops; it is not offered where it would say something else.
    assert "what_if" not in data
    assert entry_data(_entry(), Packer())["lanes"] is None


@pytest.mark.parametrize("limit", [64, 1000])
def test_thinned_memory_keeps_its_peak_and_never_understates(limit: int) -> None:
    rng = np.random.default_rng(0)
    times = np.sort(np.round(rng.uniform(0, 100, 5000), 1))
    curve = MemoryCurve(times, rng.uniform(10, 20, 5000), 5.0)
    thin = thin_out(curve, limit)
    assert thin.times_ms.size <= max(limit, 2 * np.unique(times).size)
    assert thin.bytes.max() == curve.bytes.max()
    assert np.all(np.diff(thin.times_ms) >= 0)


@pytest.mark.slow
def test_a_noisy_measurement_of_100_000_ops_fits_in_two_megabytes() -> None:
    plan, costs = hundred_thousand()
    entries = [
        Entry(timeline=simulate(plan, costs), plan=plan, costs=costs, label="predicted"),
        Entry(timeline=noisy(plan, costs), plan=plan, costs=costs),
    ]
    assert entries[0].timeline.spans.rank.size >= 100_000
    assert len(report_html(entries[1:]).encode()) <= 2_000_000
    assert len(report_html(entries).encode()) <= 2_000_000


# -- the page ------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else() -> None:
    page = report_html([_entry()])
    assert not re.search(r"""(?:src|href|action)\s*=\s*["']?(?!data:)[\w/]""", page)
    assert set(re.findall(r"https?://[\w./]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\bimport\s|@import|url\(|XMLHttpRequest|fetch\(", page)
    assert "default-src 'none'" in page


def test_names_cannot_break_out_of_the_page() -> None:
    nasty = "</script><script>alert(1)</script>{{style}}&amp;\u2028"
    entry = _entry(label=nasty)
    page = report_html([entry], title=nasty)
    assert "<script>alert(1)" not in page
    head = re.search(r'<script type="application/json" id="head">(.*?)</script>', page, re.S)
    assert head is not None and json.loads(head[1])["entries"][0]["label"] == nasty


def test_every_script_of_the_page_ships_with_the_package() -> None:
    for name in (*SCRIPTS, "page.js", "serve.js", "report.html", "serve.html", "report.css"):
        assert asset(name).strip()


def test_an_empty_report_is_refused() -> None:
    with pytest.raises(OctoPipeError, match="at least one"):
        report_data([])


def test_the_same_entries_give_the_same_page() -> None:
    assert report_html([_entry()]) == report_html([_entry()])


def test_search_logs_of_any_shape_are_tolerated() -> None:
    assert search_points(None) == [] == search_points("x") == search_points([1, None, {}])
    assert search_points([{"t": 1, "phase": "p", "best_ms": 2.0}]) == [[1.0, "p", 2.0]]
    counted = [{"iteration": 3, "phase": "p", "best_ms": 2.0}, {"iteration": 9, "phase": "q", "best_ms": 1.0}]
    assert search_points(counted) == [[3.0, "p", 2.0], [9.0, "q", 1.0]]
    assert (search_unit(counted), search_unit([{"seconds": 1.0}]), search_unit(None)) == ("moves", "s", "s")
    assert search_points([{"seconds": 1, "best_ms": 2, "phase": "p"}, {"seconds": 2, "best_ms": None}]) == [
        [1.0, "p", 2.0]
    ]
    long = [{"t": i, "phase": "p", "best_ms": 1.0 / (i + 1)} for i in range(50_000)]
    points = search_points(long)
    assert len(points) <= 2001 and points[0][0] == 0 and points[-1][0] == 49_999


# -- what the numbers are for, and what memory is --------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 4])
def test_static_memory_divides_as_zero_says(zero: int, dp: int) -> None:
    """Bytes of a parameter after ZeRO, counted by hand: 2 weight, 4 gradient, 12 state (of which a master of 4)."""
    costs = resolve_costs("llama3-8b", pp=4, tp=2, dp=dp, zero=zero, micro_batches=8)
    shares = state_shares(costs)
    n = dp if zero >= 1 else 1
    if zero == 3:
        expected = {"weights": 4 / n, "gradients": 4 / n, "optimizer state": 8 / n}
    else:
        expected = {"weights": 2, "gradients": 4 / (n if zero >= 2 else 1), "optimizer state": 12 / n}
    total = sum(expected.values())
    assert shares == pytest.approx({name: part / total for name, part in expected.items()})
    assert costs.setup is not None
    assert total == pytest.approx(
        footprint.static_bytes(footprint.Weights(1.0, 0.0), costs.setup, costs.setup.cluster())
    ), "the parts are all there is"


def test_static_memory_is_one_part_where_nobody_says_how_it_divides() -> None:
    assert state_shares(costs_of(16, 4)) == {WHOLE_STATE: 1.0}
    experts = resolve_costs("gpt-oss-20b", pp=4, tp=2, dp=4, ep=4, micro_batches=8)
    assert state_shares(experts) == {WHOLE_STATE: 1.0}, "experts have fewer replicas than the weights beside them"
    own = resolve_costs("llama3-8b", pp=4, tp=2, micro_batches=8)
    assert len(state_shares(own)) == 3
    assert state_shares(own.replace(static_bytes=own.static_bytes * 0.5)) == {WHOLE_STATE: 1.0}, "changed by hand"


def test_the_set_up_is_told_and_never_guessed() -> None:
    entry = _entry()
    assert facts_of(entry.timeline, entry.plan, entry.costs) == [] and entry.costs is not None
    assert rates_of(entry.timeline, entry.plan, entry.costs) is None, "neither tokens nor FLOPs are known"
    seen = replace(entry.timeline, setting={"gpu": "l40s", "tp": 2, "seq": None, "secret": "x"})
    assert facts_of(seen, None, None) == [["GPU", "l40s"], ["TP", "2"]]
    costs = resolve_costs("llama3-8b", gpu="h100", pp=4, tp=2, dp=2, seq=8192, micro_batches=8)
    plan = build_plan("1f1b", costs, 4, 8)
    timeline = simulate(plan, costs)
    facts = dict(map(tuple, facts_of(timeline, plan, costs)))
    assert facts["GPU"] == "16 × h100" and facts["TP"] == "2" and facts["DP"] == "2" and facts["global batch"] == "16"
    rates = rates_of(timeline, plan, costs)
    assert rates is not None and rates["gpus"] == 16
    assert rates["tokens_per_gpu_per_second"] == pytest.approx(8192 * 8 / 8), "tokens of a step over a pipeline's GPUs"


# -- files ---------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / f"{name}.json" for name in ("one", "two", "seen")}
    for name, system in (("one", "1f1b"), ("two", "zb-h2")):
        words = ["simulate", "nemotron-h-8b", "--system", system, "--pp", "4", "--tp", "4", "--p2p-ms", "0.4", "--json"]
        assert main([*words, "-o", str(paths[name]), "--timeline", str(paths["seen"])]) == 0
    return paths


def test_a_plan_file_is_priced_with_its_own_setting(files: dict[str, Path]) -> None:
    entry, seen = load_entries([files["two"], files["seen"]], {})
    assert entry.timeline.step_ms == pytest.approx(load_timeline(files["seen"]).step_ms)
    assert entry.costs is not None and entry.costs.model == "nemotron-h-8b"
    assert seen.plan is entry.plan, "a timeline of the same ops borrows the plan's layers"


def test_flags_overrule_the_setting(files: dict[str, Path]) -> None:
    slow = load_entries([files["one"]], {"p2p_ms": 40.0})[0]
    assert slow.timeline.step_ms > load_entries([files["one"]], {})[0].timeline.step_ms
    bounded = files["one"].with_name("bounded.json")
    save_plan(load_plan(files["one"]).with_extra(lower_bound_ms=1.0), bounded)
    kept, dropped = (load_entries([bounded], given)[0].plan for given in ({"p2p_ms": None}, {"p2p_ms": 40.0}))
    assert kept is not None and kept.extra["lower_bound_ms"] == 1.0
    assert dropped is not None and dropped.extra["lower_bound_ms"] is None, "a bound holds for its own costs alone"
    limited = load_entries([files["one"]], {"memory_gib": [1.0]})[0]
    assert not limited.timeline.fits


def test_equal_names_get_numbers(files: dict[str, Path]) -> None:
    names = [e.name for e in load_entries([files["one"], files["one"], files["two"]], {})]
    assert names == ["1f1b", "1f1b, 2", "zb-h2"]


def test_report_verb_writes_the_page(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    assert main(["report", *map(str, files.values()), "-o", str(out), "--title", "Mine"]) == 0
    assert "<title>Mine</title>" in out.read_text()


def test_report_verb_names_what_is_wrong(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = load_plan(files["one"])
    save_plan(replace(bare, extra={}, model=""), tmp_path / "bare.json")
    seen = json.loads(files["seen"].read_text())
    seen["transfers"]["producer"][0] = 10**6
    (tmp_path / "bent.json").write_text(json.dumps(seen))
    (tmp_path / "words.json").write_text("not json")
    for words, expected in (
        ([str(tmp_path / "bare.json")], "--model"),
        ([str(tmp_path / "bent.json")], "damaged"),
        ([str(tmp_path / "words.json")], "not a JSON object"),
        ([str(tmp_path / "none.json")], "no such file"),
        ([str(files["one"]), "--model", "llama3-8b"], "layers"),
        ([str(files["one"]), "-o", str(tmp_path / "no" / "r.html")], "cannot be written"),
    ):
        assert main(["report", *words]) == 2
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1


# -- notebooks -----------------------------------------------------------------------------------------


def test_plans_and_timelines_show_themselves_in_notebooks() -> None:
    entry = _entry()
    assert entry.plan is not None
    assert "<svg" in entry.timeline._repr_html_() and "step" in entry.timeline._repr_html_()
    assert "schematic" in entry.plan._repr_html_()
    known = entry.plan.with_extra(setting={"model": "nemotron-h-8b"})
    assert "schematic" in known._repr_html_(), "a setting of another model must not be used"


def test_a_plan_with_a_setting_is_predicted_in_notebooks(files: dict[str, Path]) -> None:
    assert "for nemotron-h-8b (" in (notebook_html(load_plan(files["one"])) or "")


def test_searches_and_comparisons_show_themselves_in_notebooks() -> None:
    """A tuned plan as a picture with its numbers, a comparison as a table: no raw `repr`."""
    found = octopipe.tune("llama3-8b", 2, 4, budget_s=5, iterations=2, method="octopipe")
    shown = found._repr_html_() or ""
    assert "<svg" in shown and f"step {found.step_ms:.2f} ms" in shown and "lower bound" in shown
    compared = octopipe.compare("llama3-8b", 2, 4, names=["1f1b", "zb-h1"])
    shown = compared._repr_html_() or ""
    assert shown.count("<tr>") == 3 and "<th" in shown and "zb-h1" in shown and "lower bound" in shown
    assert all(f"{result.step_ms:.1f}" in shown for result in compared.results)


def test_notebooks_get_an_image_for_many_ops() -> None:
    costs = CostTable.uniform(num_layers=4)
    assert "data:image/svg+xml" in (notebook_html(simulate(build_plan("1f1b", costs, 4, 500), costs)) or "")
