"""The costs behind a plan: it carries them to any machine, and everything that runs the plan is ordered by them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import octopipe
from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.costs.table_file import costs_from_record, record_of
from octopipe.megatron.driver import PlanDriver
from octopipe.megatron.placing import for_megatron
from octopipe.plans.plan import Plan
from octopipe.plans.setting import costs_of_plan, lowering_costs
from octopipe.simulation.lowering import Program, lower
from octopipe.views.export.pytorch import pytorch_csv_with_communication

TIMES = {
    "pattern": "E" + "MT-" * 10 + "L",
    "forward_ms": {"E": 0.1, "M": 1.5, "T": 1.0, "-": 0.6, "L": 2.0},
    "backward_ms": {"E": 0.0, "M": 2.5, "T": 1.3, "-": 0.6, "L": 2.0},
    "weight_ms": {"E": 0.2, "M": 1.0, "T": 0.9, "-": 0.6, "L": 2.0},
}


@pytest.fixture
def times(tmp_path: Path) -> Path:
    path = tmp_path / "here" / "times.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TIMES))
    return path


def instructions(program: Program) -> list[list[str]]:
    return [[f"{s.kind} {s.op} {s.consumer}" for s in program.instructions(r)] for r in range(program.plan.num_ranks)]


def differing(a: Program, b: Program) -> int:
    pairs = (pair for x, y in zip(instructions(a), instructions(b), strict=True) for pair in zip(x, y, strict=True))
    return sum(x != y for x, y in pairs)


def test_a_pipeline_runs_the_program_that_was_simulated() -> None:
    plan = octopipe.build_plan("zb-v", "nemotron-h-8b", 8, 16, tp=4)
    simulated = lower(plan, costs_of_plan(plan))
    equal = lower(plan, CostTable.uniform(num_layers=plan.num_layers, p2p_ms=0.05))
    assert differing(simulated, equal) > 0  # or the test could not fail
    assert differing(simulated, lower(plan, lowering_costs(plan))) == 0


def test_every_engine_is_ordered_by_the_plans_own_costs() -> None:
    plan = octopipe.build_plan("zb-v", "nemotron-h-8b", 8, 16, tp=4)
    costs = costs_of_plan(plan)
    driver = PlanDriver(for_megatron(plan), costs=None, channel="directed", transport=None, timeout_s=1.0)
    assert differing(driver.program, lower(for_megatron(plan), costs)) == 0
    assert pytorch_csv_with_communication(plan) == pytorch_csv_with_communication(plan, costs)
    bare = replace(plan, extra={})
    assert pytorch_csv_with_communication(bare) != pytorch_csv_with_communication(plan)


def test_the_pipeline_itself_lowers_with_them() -> None:
    costs = CostTable.uniform(num_layers=3).replace(forward_ms=np.array([1.0, 5.0, 2.0]))
    plan = octopipe.build_plan("1f1b", costs, 1, 2)
    with octopipe.Pipeline([nn.Linear(2, 2) for _ in range(3)], plan, lambda x: x.sum()) as pipe:
        assert differing(pipe.program, lower(plan, costs)) == 0


@pytest.mark.parametrize("how", ["api", "tune", "simulate"])
def test_a_plan_made_from_a_file_is_whole_on_another_machine(
    how: str, times: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    costs = resolve_costs(str(times), pp=4, micro_batches=8, p2p_ms=0.2)
    if how == "api":
        octopipe.save_plan(octopipe.build_plan("zb-h1", times, 4, 8, p2p_ms=0.2), out)
    else:
        more = ["--budget", "1s"] if how == "tune" else ["--system", "zb-h1"]
        line = [how, str(times), "--pp", "4", "--micro-batches", "8", "--p2p-ms", "0.2", *more, "-o", str(out)]
        assert main(line) == 0
    times.unlink()
    times.parent.rmdir()
    plan = octopipe.load_plan(out)
    assert costs_of_plan(plan).digest() == costs.digest() == lowering_costs(plan).digest()
    capsys.readouterr()
    assert main(["simulate", "--plan", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_ms"] > 0
    assert main(["export", str(out), "--to", "svg", "-o", str(tmp_path / "plan.svg")]) == 0


def test_flags_that_need_the_file_again_say_what_else_there_is(times: Path) -> None:
    plan = octopipe.build_plan("1f1b", times, 2, 4)
    times.unlink()
    with pytest.raises(OctoPipeError, match="stores its costs: leave p2p_ms out"):
        costs_of_plan(plan, {"p2p_ms": 1.0})


def test_presets_travel_by_name() -> None:
    plan = octopipe.build_plan("1f1b", "llama3-8b", 4, 8)
    assert "cost_table" not in plan.extra


def test_an_older_plan_of_a_file_is_ordered_alike_wherever_it_runs(
    times: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = octopipe.build_plan("zb-h1", times, 4, 8)
    older = replace(plan, extra={k: v for k, v in plan.extra.items() if k != "cost_table"})
    with caplog.at_level(logging.WARNING):
        there = lowering_costs(older)
        times.unlink()
        assert lowering_costs(older).digest() == there.digest()
    assert "times.json" in caplog.text and "give costs=" in caplog.text


def test_a_plan_that_carries_nothing_has_equal_layers_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    plan: Plan = replace(octopipe.build_plan("1f1b", "llama3-8b", 4, 8), extra={})
    assert lowering_costs(plan).digest() == CostTable.uniform(num_layers=plan.num_layers, p2p_ms=0.05).digest()
    assert not caplog.records


def test_factors_of_micro_batches_take_one_column_where_layers_agree() -> None:
    costs = CostTable.uniform(num_layers=50).replace(micro_batch_factor=np.linspace(0.5, 1.5, 20))
    record = record_of(costs)
    assert len(record["micro_batch_factor"]) == 20 and isinstance(record["micro_batch_factor"][0], float)
    assert costs_from_record(record).digest() == costs.digest()
    odd = costs.replace(micro_batch_factor=np.random.default_rng(0).uniform(0.5, 1.5, (20, 50)))
    assert costs_from_record(record_of(odd)).digest() == odd.digest()
