"""Hiding transfers: never slower, never larger, the same ops."""

from __future__ import annotations

import dataclasses

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Link
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.search.systems import build_plan
from octopipe.simulation.hide_transfers import hide_transfers
from octopipe.simulation.simulator import makespan_ms, simulate

F0, F1, I0, I1, W0, W1 = ((kind, m) for kind in "FIW" for m in (0, 1))


@pytest.mark.parametrize("system", ["1f1b", "interleaved", "zb-v"])
def test_only_the_overlap_changes_for_the_better(system: str) -> None:
    costs = CostTable.uniform(
        num_layers=16, forward_ms=2.0, activation_bytes=1e9, stash_bytes=5e8, p2p_ms=0.3
    ).with_memory_gib(20.0)
    plan = build_plan(system, costs, 4, 8, split_backward=True)
    better = hide_transfers(plan, costs, moves=800)
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
