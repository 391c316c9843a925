"""Comparing systems: order, speed-ups, reasons, JSON, and what the two verbs print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verbs import run

from octopipe.base.errors import OctoPipeError
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.comparison import Comparison, Result, _rank, compare
from octopipe.search.systems import Setting, build_plan, registry, system, systems
from octopipe.simulation.bounds.bounds import lower_bound_ms
from octopipe.simulation.simulator import simulate

FEW = ("1f1b", "gpipe", "interleaved", "zb-h1", "dualpipe")


@pytest.fixture(scope="module")
def few() -> Comparison:
    return compare(resolve_costs("llama3-8b", pp=4), 4, 4, names=FEW, split_backward=True, processes=2)


def test_results_are_those_of_the_systems_alone(few: Comparison) -> None:
    costs = resolve_costs("llama3-8b", pp=4)
    base = simulate(build_plan("1f1b", costs, 4, 4, split_backward=True), costs).step_ms
    ran = {r.system: r for r in few.results if not r.reason}
    assert set(ran) == set(FEW) - {"dualpipe"}
    for name, result in ran.items():
        timeline = simulate(build_plan(name, costs, 4, 4, split_backward=True), costs)
        assert result.step_ms == timeline.step_ms
        assert result.speedup == pytest.approx(base / timeline.step_ms)
        assert result.bubble_ratio == timeline.bubble_ratio
        assert result.peak_memory_gib == pytest.approx(timeline.peak_gib)
        assert (result.communications, result.overlapped) == timeline.overlap[:2]
        assert result.fits == timeline.fits
        assert result.splits_backward
        assert result.plan is not None and result.plan.extra["system"] == name
    assert ran["1f1b"].speedup == 1.0


def test_best_first_and_reasons_last(few: Comparison) -> None:
    keys = [(bool(r.reason), not r.fits, 0.0 if r.reason else r.step_ms) for r in few.results]
    assert keys == sorted(keys)
    assert few.results[-1].system == "dualpipe"
    assert few.results[-1].reason == "4 micro-batches are fewer than 2 pp = 8"


def test_plans_that_do_not_fit_come_after_those_that_do() -> None:
    costs = resolve_costs("llama3-8b", pp=4, memory_gib=60)
    results = compare(costs, 4, 16, names=("gpipe", "1f1b"), processes=1).results
    assert [(r.system, r.fits) for r in results] == [("1f1b", True), ("gpipe", False)]
    quick = Result(system="quick", title="", step_ms=1.0, fits=False)
    slow = Result(system="slow", title="", step_ms=9.0, fits=True)
    assert [r.system for r in sorted((quick, slow), key=_rank)] == ["slow", "quick"], "however fast it would be"


def test_as_published_leaves_the_backward_fused() -> None:
    costs = CostTable.uniform(num_layers=8)
    results = compare(costs, 4, 8, names=("1f1b", "zb-h1"), split_backward=False, processes=1).results
    assert {r.system: r.splits_backward for r in results} == {"1f1b": False, "zb-h1": True}
    assert next(r for r in results if r.system == "1f1b").step_ms == (8 + 3) * 2 * 3.0


def test_one_process_and_two_agree(few: Comparison) -> None:
    alone = compare(resolve_costs("llama3-8b", pp=4), 4, 4, names=FEW, split_backward=True, processes=1)
    for a, b in zip(alone.results, few.results, strict=True):
        assert (a.system, a.reason, a.fits) == (b.system, b.reason, b.fits)
        assert a.step_ms == pytest.approx(b.step_ms, nan_ok=True)


def test_speedup_is_over_1f1b_even_where_it_is_not_listed() -> None:
    seen: list[tuple[str, int, int]] = []
    result = compare(
        CostTable.uniform(num_layers=4),
        4,
        8,
        names=("zb-h1",),
        split_backward=True,
        processes=1,
        progress=lambda *x: seen.append(x),
    )
    assert [r.system for r in result.results] == ["zb-h1"]
    assert result.results[0].speedup == pytest.approx(1.0)  # split 1F1B is ZB-H1
    assert {name for name, _, _ in seen} == {"1f1b", "zb-h1"} and seen[-1][1:] == (2, 2)


def test_an_unknown_system_is_a_mistake() -> None:
    with pytest.raises(OctoPipeError, match="did you mean"):
        compare(CostTable.uniform(num_layers=4), 2, 4, names=("gpip",))


FEW_FILES = """
import resource
from octopipe.costs.table import CostTable
from octopipe.search.comparison import compare
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
try:
    found = compare(CostTable.uniform(num_layers=8), 2, 4, names=("1f1b", "gpipe", "zb-v", "interleaved"), processes=16)
    print(*(r.system for r in found.results if not r.reason))
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize("limit", [10, 14, 16, 18, 24])
def test_a_machine_of_many_cores_and_few_files_compares_or_says_so(limit: int) -> None:
    """A pool of processes that ran out of descriptors in the middle waited for its workers forever."""
    code = FEW_FILES.format(limit=limit)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert set(done.stdout.split()) == {"1f1b", "gpipe", "zb-v", "interleaved"} or "Too many open files" in done.stdout


def test_the_order_of_systems_does_not_depend_on_what_was_imported_first() -> None:
    """Searches start from every system, and gave other plans after other imports."""
    orders = set()
    for first in ("registry", "mist", "interleaved", "zb_v"):
        code = f"import octopipe.search.systems.{first}; import octopipe.search.systems as s; print(*s.systems())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
        orders.add(done.stdout)
    assert len(orders) == 1 and orders.pop().split() == list(systems())


def test_a_policy_from_outside_the_package_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    systems()
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))

    @system(name="mine", title="Mine", paper="none", year=2026)
    def mine(setting: Setting) -> Plan:
        return build_plan("gpipe", setting.costs, setting.num_ranks, setting.num_micro_batches)

    @system(name="broken", title="Broken", paper="none", year=2026)
    def broken(setting: Setting) -> Plan:
        raise ZeroDivisionError("oops")

    result = compare(CostTable.uniform(num_layers=4), 2, 4, names=("mine", "broken"), processes=2)
    assert [r.system for r in result.results] == ["mine", "broken"]
    assert result.results[1].reason == "fails with ZeroDivisionError: oops"


def test_bpipe_shows_balanced_memory() -> None:
    costs = CostTable.uniform(num_layers=8, activation_bytes=float(1 << 30))
    results = {
        r.system: r for r in compare(costs, 8, 16, names=("1f1b", "bpipe"), split_backward=False, processes=1).results
    }
    assert (results["1f1b"].max_memory_gib, results["bpipe"].max_memory_gib) == (8.0, 5.0)
    assert results["1f1b"].step_ms == results["bpipe"].step_ms


def test_bpipe_stays_balanced_when_its_backward_is_split() -> None:
    costs = resolve_costs("nemotron-h-56b", pp=8)
    compared = compare(costs, 8, 16, names=("1f1b", "bpipe"), split_backward=True, processes=1)
    results = {r.system: r for r in compared.results}
    assert results["bpipe"].max_memory_gib < results["1f1b"].max_memory_gib


# -- the verbs --------------------------------------------------------------------------------------------------


def test_compare_prints_json_with_a_row_per_system(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compare", "llama3-8b", "--pp", "4", "--micro-batches", "4", "--systems", ",".join(FEW), "--json")
    code, out, err = run(capsys, *words)
    assert code == 0 and err == ""
    data = json.loads(out)
    costs = resolve_costs("llama3-8b", pp=4)
    assert data["model"] == "llama3-8b" and data["lower_bound_ms"] == pytest.approx(lower_bound_ms(costs, 4, 4))
    assert {row["system"] for row in data["results"]} == set(FEW)
    for row in data["results"]:
        if "reason" in row:
            assert set(row) == {"system", "reason"}
            continue
        assert {"step_ms", "speedup", "bubble_ratio", "peak_memory_gib", "fits", "span_ms"} <= set(row)
        assert {"communications", "overlapped", "overlap_rate"} <= set(row)
        assert row["step_ms"] >= data["lower_bound_ms"]


def test_compare_prints_a_table_that_fits_100_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = run(capsys, "compare", "jamba-52b", "--pp", "4", "--systems", "1f1b,gpipe,alpa,dualpipe")
    assert code == 0 and err == ""
    assert max(map(len, out.splitlines())) <= 100
    lines = out.splitlines()
    assert all(any(line.startswith(name) for line in lines) for name in ("1f1b", "gpipe", "alpa", "dualpipe"))
    assert sum("█" in line for line in lines) >= 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pp", "4", "--systems", "nosuch"), "unknown system 'nosuch'"),
        (("--pp", "4", "--systems", ","), "--systems names no system"),
        (("--pp", "400"), "pp 400 is"),
    ],
)
def test_compare_answers_mistakes_in_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, "compare", "llama3-8b", *words)
    assert code == 2 and out == ""
    assert message in err and err.count("\n") == 1


@pytest.mark.slow
def test_the_measured_56b_comparison_has_every_system(capsys: pytest.CaptureFixture[str], profiles: Path) -> None:
    words = ("compare", str(profiles / "nemotron-h-56b.json"), "--pp", "8", "--micro-batches", "8", "--p2p-ms", "0.3")
    code, out, _ = run(capsys, *words, "--time-limit", "1", "--json")
    assert code == 0
    rows = {row["system"]: row for row in json.loads(out)["results"]}
    assert set(rows) == set(systems())
    assert rows["1f1b"]["speedup"] == 1.0
    steps = [row["step_ms"] for row in rows.values() if "reason" not in row]
    assert steps == sorted(steps)


def test_systems_lists_papers_years_and_phases(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "systems", "--json")
    listed = {row["name"]: row for row in json.loads(out)["systems"]}
    assert code == 0 and set(listed) == set(systems())
    assert listed["alpa"]["tunes"] == ["partitioning"] and listed["alpa"]["year"] == 2022
    code, out, _ = run(capsys, "systems")
    assert code == 0 and all(name in out for name in systems())


def test_systems_check_exits_1_when_a_value_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from octopipe.search.systems import closed_forms

    good = closed_forms.ClosedForm(system="gpipe", case="p=4", quantity="bubble", expected=9.0, simulate=lambda: 9.0)
    bad = closed_forms.ClosedForm(system="1f1b", case="p=4", quantity="bubble", expected=9.0, simulate=lambda: 8.0)
    monkeypatch.setattr(closed_forms, "all_closed_forms", lambda: [good])
    code, out, _ = run(capsys, "systems", "--check")
    assert code == 0 and "all 1 agree" in out
    monkeypatch.setattr(closed_forms, "all_closed_forms", lambda: [good, bad])
    code, out, _ = run(capsys, "systems", "--check")
    assert code == 1 and "1 of 2 differ" in out
    code, out, _ = run(capsys, "systems", "--check", "--json")
    assert code == 1 and json.loads(out)["differing"] == 1


def test_an_interrupt_keeps_the_rows_that_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = CostTable.uniform(num_layers=8)

    def stops(task: Any, settings: Any, processes: Any) -> Any:
        yield task.run("1f1b", {})
        yield task.run("gpipe", {})
        raise KeyboardInterrupt

    monkeypatch.setattr("octopipe.search.comparison._run_all", stops)
    found = compare(costs, 2, 4, names=["1f1b", "gpipe", "zb-h1"])
    assert found.interrupted
    assert {r.system for r in found.results if not r.reason} == {"1f1b", "gpipe"}
    assert [r.reason for r in found.results if r.reason] == ["interrupted before its end"]
