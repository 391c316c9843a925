"""Hiding transfers: never slower, never larger, the same ops."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from effort import draws
from random_plans import random_plan

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Link
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.search.systems import build_plan
from octopipe.simulation.hide_transfers import hide_transfers, with_op_moved
from octopipe.simulation.simulator import makespan_ms, ops_and_transfers, simulate, with_memory

F0, F1, I0, I1, W0, W1 = ((kind, m) for kind in "FIW" for m in (0, 1))


@pytest.mark.parametrize("system", ["1f1b", "interleaved", "zb-v"])
def test_only_the_overlap_changes_for_the_better(system: str) -> None:
    costs = CostTable.uniform(
        num_layers=16, forward_ms=2.0, activation_bytes=1e9, stash_bytes=5e8, p2p_ms=0.3
    ).with_memory_gib(20.0)
    plan = build_plan(system, costs, 4, 8, split_backward=True)
    better = hide_transfers(plan, costs, moves=400)
    before, after = simulate(plan, costs), simulate(better, costs)
    assert after.makespan_ms <= before.makespan_ms
    assert after.overlap.rate >= before.overlap.rate and after.fits
    assert better.stages == plan.stages
    assert [sorted(map(str, order)) for order in better.orders] == [sorted(map(str, order)) for order in plan.orders]


def test_idle_work_is_put_behind_a_transfer() -> None:
    # Rank 0 waits for 1B0 to come back while its W could be at work: with W last, all of rank 0's ends lie bare.
    costs = CostTable.uniform(num_layers=2, p2p_ms=1.0)
    first, second = (F0, F1, I0, I1, W0, W1), (F0, I0, F1, I1, W0, W1)
    orders = tuple(tuple(Op(r, k, m) for k, m in order) for r, order in enumerate((first, second)))
    plan = Plan(
        num_layers=2,
        num_ranks=2,
        num_micro_batches=2,
        stages=(Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1)),
        orders=orders,
    ).check()
    better = hide_transfers(plan, costs, moves=400)
    assert simulate(better, costs).overlap.overlapped > simulate(plan, costs).overlap.overlapped


def test_one_limit_is_needed() -> None:
    costs = CostTable.uniform(num_layers=2)
    with pytest.raises(OctoPipeError, match="give one of the two"):
        hide_transfers(build_plan("1f1b", costs, 2, 2), costs)


def test_slack_bounds_what_hiding_may_cost() -> None:
    costs = CostTable.uniform(num_layers=8, p2p_ms=0.5)
    plan = build_plan("zb-v", costs, 4, 8)
    before = simulate(plan, costs)
    better = simulate(hide_transfers(plan, costs, moves=600, slack=0.05), costs)
    assert better.makespan_ms <= 1.05 * before.makespan_ms
    assert better.overlap.rate >= before.overlap.rate


def test_prices_are_kept_only_while_a_walk_lasts() -> None:
    """A link that was set anew after a search is the one the next simulation takes."""
    costs = CostTable.uniform(num_layers=4, p2p_ms=0.1)
    pairs: dict[tuple[int, int], Link] = {}
    costs = costs.replace(network=dataclasses.replace(costs.network, pairs=pairs))
    plan = build_plan("1f1b", costs, 2, 4)
    hide_transfers(plan, costs, moves=5)
    before = makespan_ms(plan, costs)
    pairs[0, 1] = Link(latency_ms=5.0)
    assert makespan_ms(plan, costs) > before + 4.0
    assert makespan_ms(plan, costs) == pytest.approx(simulate(plan, costs).makespan_ms)


def _random_case(seed: int) -> tuple[Plan, CostTable]:
    """Irregular plans; times of whole numbers, where much happens at the same moment, and times of any kind."""
    rng, draw = random.Random(seed), np.random.RandomState(seed)
    layers, micro_batches = rng.randint(4, 10), rng.randint(2, 6)
    plan = random_plan(rng, num_ranks=rng.randint(2, 4), num_layers=layers, num_micro_batches=micro_batches)
    uniform = CostTable.uniform(
        num_layers=layers, p2p_ms=rng.choice((0.0, 0.3, 2.0)), activation_bytes=1e9, stash_bytes=3e8
    )
    times = draw.randint(0, 4, (3, layers)).astype(float) if seed % 2 else draw.uniform(0.0, 3.0, (3, layers))
    forward, input_ms, weight = times
    return plan, uniform.replace(
        forward_ms=forward, input_ms=input_ms, weight_ms=weight, boundary_bytes=draw.uniform(0.0, 1e8, layers)
    ).with_memory_gib(10.0)


@pytest.mark.parametrize("seed", range(draws(100)))
def test_orders_timed_alone_have_the_times_transfers_and_memory_of_the_simulator(seed: int) -> None:
    plan, costs = _random_case(seed)
    whole = simulate(plan, costs)
    found = ops_and_transfers(plan, costs)
    assert found is not None
    alone = with_memory(found, plan, costs)
    assert alone.spans.start_ms.tolist() == whole.spans.start_ms.tolist()
    assert alone.spans.end_ms.tolist() == whole.spans.end_ms.tolist()
    rows = [sorted(zip(*(column.tolist() for column in t.transfers), strict=True)) for t in (alone, whole)]
    assert rows[0] == rows[1]
    assert alone.overlap.rate == whole.overlap.rate and alone.fits == whole.fits
    for mine, theirs in zip(alone.memory, whole.memory, strict=True):
        assert mine.times_ms.tolist() == theirs.times_ms.tolist() and mine.bytes.tolist() == theirs.bytes.tolist()


@pytest.mark.parametrize("seed", range(draws(40)))
def test_a_moved_op_is_where_a_plan_written_anew_has_it(seed: int) -> None:
    plan, costs = _random_case(seed)
    plan.table()
    dice = random.Random(seed)
    for _ in range(20):
        moved = with_op_moved(plan, dice)
        if moved is None:
            continue
        anew = dataclasses.replace(moved)
        for mine, theirs in zip(moved.table(), anew.table(), strict=True):
            assert mine is theirs is None or mine.tolist() == theirs.tolist()
        runs = ops_and_transfers(moved, costs) is not None
        # What timing does not see is activations that nobody recomputes.
        assert runs or anew.problems()
        if runs and not any(stage.recompute for stage in plan.stages):
            assert not anew.problems()
