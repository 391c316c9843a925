"""Searches for other runtimes: what they return is what those can run, and better than an even cut."""

from __future__ import annotations

import itertools

import pytest
from effort import some
from test_tune_best import uneven

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.readers.megatron_text import read_megatron
from octopipe.search.foreign_plan import megatron_plan
from octopipe.search.restricted import runs_on_megatron, with_cuts
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate


@pytest.mark.parametrize("seed", some(range(3)))
def test_megatron_gets_cyclic_stages_a_fused_backward_and_a_better_partition(seed: int) -> None:
    costs = uneven(seed, 16)
    result = tune(costs, 4, 8, iterations=1500, target="megatron")
    assert runs_on_megatron(result.plan.check())
    assert simulate(result.plan, costs).step_ms == result.step_ms
    even = [build_plan("1f1b", costs, 4, 8, split_backward=False)]
    even += [build_plan("interleaved", costs, 4, 8, split_backward=False, chunks=v) for v in (2, 4)]
    assert result.step_ms < min(simulate(p, costs).step_ms for p in even)
    again = tune(costs, 4, 8, iterations=1500, target="megatron")
    assert again.plan.stages == result.plan.stages


def test_megatron_may_leave_stages_empty_where_that_is_faster() -> None:
    # Eight layers of which the second and the last take long: as many stages as layers leave nothing to move.
    costs = CostTable.uniform(num_layers=8, model="uneven").replace(
        forward_ms=[0.1, 4.0, 0.5, 0.5, 0.5, 0.5, 0.5, 4.0],
        input_ms=[0.0, 4.0, 0.5, 0.5, 0.5, 0.5, 0.5, 4.0],
        weight_ms=[0.1, 4.0, 0.5, 0.5, 0.5, 0.5, 0.5, 4.0],
    )
    plan = tune(costs, 4, 8, iterations=1500, target="megatron").plan
    full = [build_plan("interleaved", costs, 4, 8, split_backward=False, chunks=2)]
    full += [build_plan("1f1b", costs, 4, 8, split_backward=False)]
    assert simulate(plan.check(), costs).step_ms < min(simulate(p, costs).step_ms for p in full)
    assert runs_on_megatron(plan)


@pytest.mark.parametrize("sizes", [(2, 1, 0, 2, 1, 0, 1, 1), (1, 2, 3, 0, 0, 0, 0, 2), (1, 0, 1, 1, 1, 2, 1, 1)])
def test_empty_stages_are_left_out_of_a_plan_that_megatron_reads_back(sizes: tuple[int, ...]) -> None:
    schedule = build_plan("interleaved", CostTable.uniform(num_layers=8), 4, 8, split_backward=False, chunks=2)
    cuts = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    letters = "E" + "t" * 6 + "L"
    text = "|".join(letters[a:b] for a, b in itertools.pairwise(cuts))
    plan, theirs = with_cuts(schedule, cuts), megatron_plan(read_megatron(text), pp=4, num_micro_batches=8).plan
    assert plan.check().stages == theirs.stages and plan.orders == theirs.orders
    held = {stage.rank for stage in plan.stages}
    assert runs_on_megatron(plan) == (len(held) == 4)


@pytest.mark.parametrize("system", ["gpipe", "1f1b", "interleaved", "breadth-first"])
def test_only_megatrons_own_orders_run_on_it(system: str) -> None:
    costs = CostTable.uniform(num_layers=16)
    own = system in ("1f1b", "interleaved")
    assert runs_on_megatron(build_plan(system, costs, 4, 8, split_backward=False)) == own


def test_megatron_never_gets_slower_than_its_start() -> None:
    costs = uneven(1, 16)
    start = tune(costs, 4, 8, iterations=1500, target="megatron").plan
    again = tune(costs, 4, 8, iterations=5, target="megatron", start=start)
    assert again.step_ms <= simulate(start, costs).step_ms + 1e-9


def test_without_a_multiple_of_the_ranks_only_1f1b_is_left() -> None:
    plan = tune(uneven(2, 12), 4, 6, iterations=300, target="megatron").plan
    assert len(plan.stages) == 4


def test_torch_gets_every_layer_once_and_nothing_recomputed() -> None:
    costs = uneven(3, 12)
    need = float(simulate(build_plan("1f1b", costs, 4, 8), costs).peak_bytes.max())
    plan = tune(costs.replace(rank_memory_bytes=(0.9 * need,)), 4, 8, iterations=300, target="torch").plan
    assert not plan.replicas() and not any(s.recompute for s in plan.stages)


def test_an_unknown_runtime_is_named() -> None:
    with pytest.raises(OctoPipeError, match="one of octopipe, torch, megatron"):
        tune(uneven(0, 6), 2, 2, target="deepspeed")  # type: ignore[arg-type]
