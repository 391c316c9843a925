"""The package's face: names that hold, work in any order and carry what they were made for."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import octopipe
from octopipe.costs.cluster.asking import keyword_fields
from octopipe.costs.cluster.hardware import Link
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table_file import costs_from_record, record_of
from octopipe.views.report.notebook import SCHEMATIC

PUBLIC = [
    "Comparison", "CostTable", "DeadlockError", "DoesNotFitError", "MixedPrecisionOptimizer", "ModelSpec",
    "NotApplicableError", "OctoPipeError",
    "Op", "PathLosses", "Pipeline", "Plan", "PlanError", "Profile", "Program", "Stage", "Timeline", "TuneResult",
    "__version__",
    "build_plan", "compare", "exchange", "load_checkpoint", "load_plan", "load_profile", "load_timeline", "lower",
    "preset", "profile_layers", "resolve_costs", "save_checkpoint", "save_plan", "simulate", "switch", "tune",
]  # fmt: skip
TORCH = {"PathLosses", "Pipeline", "exchange", "load_checkpoint", "profile_layers", "save_checkpoint", "switch"}


# -- names ---------------------------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert octopipe.__all__ == PUBLIC == dir(octopipe)
    assert {"__version__", *octopipe._MODULE_OF} == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_no_module_has_it(name: str) -> None:
    assert not inspect.ismodule(getattr(octopipe, name))
    assert name == "__version__" or importlib.util.find_spec(f"octopipe.{name}") is None


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="simulat"):
        octopipe.simulat  # type: ignore[attr-defined]  # noqa: B018


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_functions_stay_functions_whatever_is_imported_before_or_after() -> None:
    _python(
        "import octopipe, octopipe.simulation.simulator, octopipe.simulation.lowering, octopipe.api\n"
        "import octopipe.search.tuner, octopipe.search.comparison\n"
        "import octopipe.cli.verbs.simulate, octopipe.cli.verbs.tune, octopipe.cli.verbs.compare\n"
        "from octopipe import simulate, tune, lower, compare, build_plan\n"
        "assert all(callable(f) for f in (simulate, tune, lower, compare, build_plan))\n"
        "assert all(callable(getattr(octopipe, n)) for n in ('simulate', 'tune', 'lower', 'compare', 'build_plan'))"
    )


def test_importing_the_package_costs_nothing_and_a_plan_needs_no_torch() -> None:
    _python(
        "import sys, octopipe\n"
        "assert not {'numpy', 'numba', 'torch', 'rich', 'msgspec'} & set(sys.modules)\n"
        "octopipe.Plan, octopipe.CostTable, octopipe.simulate\n"
        "assert 'torch' not in sys.modules"
    )


def test_a_name_that_trains_says_what_to_install_without_torch() -> None:
    out = _python(
        "import sys; sys.modules['torch'] = None\n"
        "import octopipe\n"
        "try: octopipe.Pipeline\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    assert "octopipe[torch]" in out


def test_keywords_are_those_of_the_functions_behind() -> None:
    shown = set(inspect.signature(octopipe.tune).parameters)
    assert shown > set(keyword_fields())
    from octopipe.search.tuner import tune

    behind = {n for n, p in inspect.signature(tune).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert behind <= shown


# -- models by name, by file, as costs -----------------------------------------------------------------

TIMES = {
    "pattern": "ETTTTL",
    "forward_ms": {"E": 0.1, "T": 1.0, "L": 2.0},
    "backward_ms": {"E": 0.0, "T": 1.5, "L": 2.0},
    "weight_ms": {"E": 0.1, "T": 0.5, "L": 1.0},
}


@pytest.fixture
def times(tmp_path: Path) -> Path:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(TIMES))
    return path


def test_a_model_is_a_name_a_path_or_costs(times: Path) -> None:
    costs = resolve_costs(str(times), pp=2)
    by_path = octopipe.simulate("1f1b", times, 2, 4)
    assert by_path.step_ms == octopipe.simulate("1f1b", costs, 2, 4).step_ms
    assert by_path.step_ms == octopipe.simulate(octopipe.build_plan("1f1b", costs, 2, 4), costs).step_ms
    named = octopipe.simulate("1f1b", "llama3-8b", 4, tp=2, gpu="h100")
    assert named.step_ms == octopipe.simulate("1f1b", resolve_costs("llama3-8b", pp=4, tp=2, gpu="h100"), 4, 8).step_ms


def test_systems_are_chosen_in_python_as_on_the_command_line(times: Path) -> None:
    for chosen in (["1f1b", "gpipe"], "1f1b, gpipe"):
        found = octopipe.compare(times, 2, 4, systems=chosen, processes=1)
        assert {r.system for r in found.results} == {"1f1b", "gpipe"}
    with pytest.raises(octopipe.OctoPipeError, match="former name"):
        octopipe.compare(times, 2, 4, systems=["1f1b"], names=["1f1b"])


def test_values_of_another_type_are_named(times: Path) -> None:
    with pytest.raises(octopipe.OctoPipeError, match="model is a NoneType; give a preset's name"):
        octopipe.build_plan("1f1b", None, 2, 4)  # type: ignore[arg-type]
    with pytest.raises(octopipe.OctoPipeError, match="plan is a dict; give a system's name"):
        octopipe.simulate({"a": 1})  # type: ignore[arg-type]


def test_compare_and_tune_take_names_and_their_plans_know_it(times: Path, tmp_path: Path) -> None:
    found = octopipe.compare(times, 2, 4, names=["1f1b", "gpipe"], processes=1)
    best = found.results[0]
    assert best.plan is not None and octopipe.simulate(best.plan).step_ms == best.step_ms
    result = octopipe.tune(times, 2, 4, method="octopipe", iterations=5, budget_s=60.0)
    result.plan.save(tmp_path / "plan.json")
    assert octopipe.simulate(tmp_path / "plan.json").step_ms == pytest.approx(result.step_ms)
    assert octopipe.simulate(str(tmp_path / "plan.json")).step_ms == pytest.approx(result.step_ms)
    again = octopipe.tune(times, 2, 4, method="octopipe", iterations=1, budget_s=60.0, start=tmp_path / "plan.json")
    assert again.step_ms <= result.step_ms + 1e-9


def test_plans_load_and_save(times: Path, tmp_path: Path) -> None:
    plan = octopipe.build_plan("zb-h1", times, 2, 4)
    plan.save(tmp_path / "plan.json")
    for back in (octopipe.Plan.load(tmp_path / "plan.json"), octopipe.load_plan(str(tmp_path / "plan.json"))):
        assert back.orders == plan.orders and back.stages == plan.stages


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: octopipe.build_plan("1f1b", c, 2, 4, tp=2), "tp has no effect"),
        (lambda c: octopipe.build_plan("1f1b", "llama3-8b", 2, gpuu="h100"), "did you mean gpu"),  # type: ignore
        (lambda c: octopipe.simulate("1f1b"), "needs a model"),
        (lambda c: octopipe.simulate("1f1b", c), "number of ranks"),
        (lambda c: octopipe.simulate("1f2b", c, 2), "did you mean"),
        (lambda c: octopipe.simulate("no.json", c), "no such file"),
        (lambda c: octopipe.simulate(octopipe.build_plan("1f1b", c, 2, 4), c, 3), "num_ranks 2, not 3"),
        (
            lambda c: octopipe.simulate(octopipe.build_plan("1f1b", c, 2, 4), split_backward=True),
            "already contains",
        ),
        (lambda c: octopipe.simulate(octopipe.build_plan("1f1b", c, 2, 4), tp=2), "no effect without a model"),
        (lambda c: octopipe.tune("lama3-8b", 2), "llama3-8b"),
    ],
)
def test_mistakes_are_one_line(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(octopipe.OctoPipeError, match=words) as found:
        call(octopipe.CostTable.uniform(num_layers=4))
    assert "\n" not in str(found.value)


# -- what a plan was made for --------------------------------------------------------------------------


def _uneven() -> octopipe.CostTable:
    costs = octopipe.CostTable.uniform(num_layers=6, p2p_ms=0.3, activation_bytes=1 << 20, model="mine")
    pairs = {(0, 1): Link(latency_ms=0.1, ms_per_byte=1e-9)}
    return costs.replace(
        forward_ms=np.arange(1.0, 7.0),
        rank_slowdown=(1.0, 1.5),
        rank_memory_bytes=(1e9,),
        micro_batch_factor=np.array([1.0, 0.5, 2.0, 1.0]),
        network=replace(costs.network, pairs=pairs),
    )


def test_costs_survive_as_a_record() -> None:
    for costs in (_uneven(), resolve_costs("nemotron-h-8b", pp=4, tp=2)):
        back = costs_from_record(json.loads(json.dumps(record_of(costs))))
        assert back.digest() == costs.digest()


def test_a_plan_made_with_costs_carries_them_into_its_file(tmp_path: Path) -> None:
    costs = _uneven()
    plan = octopipe.build_plan("zb-h1", costs, 2, 4)
    expected = octopipe.simulate(plan, costs).step_ms
    assert octopipe.simulate(plan).step_ms == expected
    plan.save(tmp_path / "plan.json")
    assert octopipe.simulate(tmp_path / "plan.json").step_ms == expected
    from octopipe.views.report.load import load_entry

    assert load_entry(tmp_path / "plan.json", {}).timeline.step_ms == expected


def test_a_notebook_shows_a_tuned_plan_with_the_numbers_it_was_tuned_for() -> None:
    """The same model under another TP size, and costs of one's own: never the default set-up's numbers."""
    result = octopipe.tune("nemotron-h-8b", 4, 8, tp=2, method="octopipe", iterations=3, budget_s=60.0)
    assert f"step {result.step_ms:.2f} ms" in (result.plan._repr_html_() or "")
    table = resolve_costs("nemotron-h-8b", pp=4, tp=2)
    plan = octopipe.build_plan("1f1b", table, 4, 8)
    assert f"step {octopipe.simulate(plan, table).step_ms:.2f} ms" in (plan._repr_html_() or "")


def test_a_plan_without_a_set_up_says_so_and_shows_no_times() -> None:
    from octopipe.search.systems import build_plan

    table = resolve_costs("nemotron-h-8b", pp=4, tp=2)
    bare = build_plan("1f1b", table, 4, 8)
    assert bare.model == "nemotron-h-8b"
    shown = bare._repr_html_() or ""
    assert SCHEMATIC in shown and "carries no set-up" in shown and "step " not in shown
    with pytest.raises(octopipe.OctoPipeError, match="which model and set-up"):
        octopipe.simulate(bare)


def test_a_timeline_carries_its_set_up_through_its_file(tmp_path: Path) -> None:
    timeline = octopipe.simulate("1f1b", "llama3-8b", 4, tp=2, gpu="h100")
    timeline.save(tmp_path / "t.json")
    back = octopipe.load_timeline(tmp_path / "t.json")
    assert back.setting == {"model": "llama3-8b", "tp": 2, "gpu": "h100"}
    assert "gpu h100" in (back._repr_html_() or "")


def test_costs_that_changed_since_are_told(times: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = octopipe.build_plan("1f1b", times, 2, 4)
    plan = replace(plan, extra={k: v for k, v in plan.extra.items() if k != "cost_table"})  # of an older version
    octopipe.simulate(plan)
    assert not caplog.records
    times.write_text(json.dumps({**TIMES, "forward_ms": {"E": 0.1, "T": 9.0, "L": 2.0}}))
    octopipe.simulate(plan)
    assert "has different costs now" in caplog.text


# -- one line each -------------------------------------------------------------------------------------


def test_reprs_fit_a_line(times: Path) -> None:
    costs = resolve_costs(str(times), pp=2)
    plan = octopipe.build_plan("1f1b", costs, 2, 4)
    result = octopipe.tune(costs, 2, 4, method="octopipe", iterations=2, budget_s=60.0)
    long = replace(plan, model="x" * 500)
    for what in (costs, plan, octopipe.lower(plan, costs), octopipe.simulate(plan), result, long):
        assert "\n" not in repr(what) and len(repr(what)) < 120, repr(what)
    assert repr(plan) == "<Plan: 1f1b on times, 6 layers in 2 stages on 2 ranks, 4 micro-batches>"
