"""The search for plans with pairs: prices as the plan's own, plans that hold, and small cases against all of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from effort import some
from moe_settings import moe_setting

from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.plans.file import plan_to_json
from octopipe.plans.op import parse_orders
from octopipe.plans.pair_price import PairPrices
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.search.pairing.choose import OVERLAPPED_SYSTEMS, neighbours_paired
from octopipe.search.pairing.partners import with_partners
from octopipe.search.pairing.polish import Polisher
from octopipe.search.pairing.prices import FB, FF, FI, FW, IW, layers_of, price
from octopipe.search.pairing.search import PairSearch
from octopipe.search.pairing.slot_orders import SlotOrders
from octopipe.search.result import Found
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.search.tuner.search import Search
from octopipe.simulation.simulator import simulate


@pytest.mark.parametrize("seed", range(6))
def test_prices_of_a_structure_are_those_of_its_plan(seed: int) -> None:
    costs, ranks, micro_batches = moe_setting(random.Random(seed), 0.3)
    plan = build_plan("interleaved-overlap", costs, ranks, micro_batches, chunks=2)
    bounds = np.array([0, *(s.stop for s in plan.stages)])
    rank = np.array([s.rank for s in plan.stages])
    own, together = price(layers_of(costs, ranks), bounds, rank, len(plan.stages))
    prices = PairPrices(plan, costs)
    for s, stage in enumerate(plan.stages):
        for row, kind in enumerate("FIW"):
            assert own[row, s] == pytest.approx(prices.alone_ms(Op(s, kind, 0)))
        for t, other in enumerate(plan.stages):
            for plane, kinds in ((FI, "FI"), (FB, "FB"), (FW, "FW"), (IW, "IW"), (FF, "FF")):
                if stage.rank == other.rank:
                    expected = prices.together(Op(s, kinds[0], 1), Op(t, kinds[1], 0)).ms
                    assert together[plane, s, t] == pytest.approx(expected)


@pytest.mark.parametrize("seed", some(range(6)))
def test_the_schedule_takes_as_long_as_the_simulator_says(seed: int) -> None:
    costs, ranks, micro_batches = moe_setting(random.Random(10 + seed), 0.4)
    search = PairSearch(costs=costs, num_ranks=ranks, num_micro_batches=micro_batches, budget_s=60, moves=60, seed=seed)
    found = search.run()
    assert found is not None
    plan, timeline = found
    assert plan.problems() == [] and plan.pairs
    assert search._drawing.of_plan(plan) is not None
    # Pairs that hide nothing are taken apart, so the plan may only be faster than the schedule it came from.
    for _ in range(20):
        drawn = search._drawing.drawn(1, False, varied=True)
        for state in (drawn, search._drawing.steady(drawn, ranks)):
            ms = search._ms(state)
            if ms < np.inf:
                assert simulate(search._plan(state), costs).makespan_ms <= ms + 1e-6
    assert timeline.makespan_ms > 0


def test_counted_searches_give_the_same_plan_and_never_less_than_a_system() -> None:
    costs, ranks, micro_batches = moe_setting(random.Random(3), 0.3)
    first, again = (tune(costs, ranks, micro_batches, iterations=200, seed=5) for _ in range(2))
    assert plan_to_json(first.plan) == plan_to_json(again.plan)
    assert first.lower_bound_ms <= first.step_ms == simulate(first.plan, costs).step_ms
    for name in OVERLAPPED_SYSTEMS:
        try:
            timeline = simulate(build_plan(name, costs, ranks, micro_batches), costs)
        except Exception:
            continue
        assert first.step_ms <= timeline.step_ms + 1e-9


def test_a_memory_limit_is_held() -> None:
    costs, ranks, micro_batches = moe_setting(random.Random(8), 0.4)
    least = simulate(build_plan("1f1b", costs, ranks, micro_batches), costs).peak_bytes.max()
    tight = costs.replace(rank_memory_bytes=(float(least) * 1.05,))
    found = tune(tight, ranks, micro_batches, iterations=200)
    assert simulate(found.plan, tight).fits


def test_dense_costs_never_enter_the_search_for_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("dense costs were searched for pairs")

    monkeypatch.setattr("octopipe.search.tuner.with_pairs", refuse)
    assert not tune(CostTable.uniform(num_layers=4), 2, 4, iterations=50).plan.pairs


@pytest.mark.parametrize("cut_head", [False, True])
def test_the_parts_of_a_search_share_its_budget(monkeypatch: pytest.MonkeyPatch, cut_head: bool) -> None:
    costs, ranks, micro_batches = moe_setting(random.Random(8), 0.4)
    given: list[float] = []
    whole = Search.run

    def timed(search: Search) -> Found:
        given.append(search.budget_s)
        return whole(search)

    def paired(found: Found, *_: object, budget_s: float, **__: object) -> Found:
        given.append(budget_s)
        return found

    def cut(found: Found, *_: object, budget_s: float, **__: object) -> tuple[Found, float]:
        given.append(budget_s)
        return found, found.timeline.step_ms

    monkeypatch.setattr("octopipe.search.tuner.Search.run", timed)
    monkeypatch.setattr("octopipe.search.tuner.with_pairs", paired)
    monkeypatch.setattr("octopipe.search.graphs.choose.with_cut_head", cut)
    tune(costs, ranks, micro_batches, iterations=50, budget_s=8.0, cut_head=cut_head)
    assert len(given) == 2 + cut_head and sum(given) == pytest.approx(8.0)


@pytest.mark.parametrize("seed", range(4))
def test_polishing_only_makes_plans_faster(seed: int) -> None:
    costs, ranks, micro_batches = moe_setting(random.Random(20 + seed), 0.3)
    plan = neighbours_paired(build_plan("zb-v", costs, ranks, micro_batches), costs)
    before = simulate(plan, costs)
    better, timeline = Polisher(plan, costs, seed).run(budget_s=None, moves=300)
    assert better.problems() == [] and timeline.step_ms <= before.step_ms


@pytest.mark.parametrize("share", [1.0, 0.8, 0.5])
def test_a_steady_rhythm_holds_as_many_micro_batches_as_its_rotation_says(share: float) -> None:
    """Equal layers in a V: every pair is one of F and I, and a rank holds two micro-batches of half its layers for each
    of the rotation, one more while a pair runs."""
    ranks, micro_batches = 4, 24
    costs = equal_layers(2 * ranks)
    search = PairSearch(costs=costs, num_ranks=ranks, num_micro_batches=micro_batches, budget_s=60, moves=10)
    rotation = round(share * ranks)
    state = search._drawing.steady(search._drawing.drawn(2, True, varied=False), rotation)
    assert search._ms(state) < np.inf
    plan = search._plan(state)
    for rank in range(ranks):
        held = most = 0
        for slot in plan.slots(rank):
            held += sum(op.kind == "F" for op in slot)
            most = max(most, held)
            held -= sum(op.kind in "IB" for op in slot)
        assert held == 0 and most <= 2 * rotation + 1
    both = sum({op.kind for op in pair} == {"F", "B"} for pair in plan.pairs)
    assert both >= ranks * (2 * micro_batches - 2 * rotation - 1)


def test_memory_beyond_the_limit_is_balanced_away() -> None:
    """A first layer that holds much is given to a stage with few others."""
    costs = equal_layers(16).replace(activation_bytes=np.array([6.0] + [1.0] * 15), rank_memory_bytes=(26.0,))
    search = PairSearch(costs=costs, num_ranks=4, num_micro_batches=24, budget_s=60, moves=10)
    drawn = search._drawing.drawn(2, True, varied=False)
    steady = search._drawing.steady(drawn, 3)
    search._ms(steady)
    before = float(search._over_by.max())
    search._ms(search._balanced(steady))
    assert float(search._over_by.max()) < before
    found = search.run()
    assert found is not None and found[1].fits


def equal_layers(number: int) -> CostTable:
    row = [("compute", 1.0), ("exchange", 0.5), ("compute", 1.0), ("exchange", 0.5)]
    return CostTable(
        model="equal",
        symbols="X" * number,
        forward_ms=np.full(number, 3.0),
        input_ms=np.full(number, 3.0),
        weight_ms=np.full(number, 0.5),
        activation_bytes=np.ones(number),
        stash_bytes=np.full(number, 0.6),
        segments=Segments.from_ms([row] * number, [row[::-1]] * number),
    )


@pytest.mark.parametrize("seed", range(6))
def test_partners_hide_more_and_never_make_a_step_longer(seed: int) -> None:
    costs, ranks, micro_batches = moe_setting(random.Random(40 + seed), 0.4)
    plan = neighbours_paired(build_plan("zb-v", costs, ranks, micro_batches), costs)
    peak = float(simulate(plan, costs).peak_bytes.max())
    tight = costs.replace(rank_memory_bytes=(peak,) * ranks)
    before = simulate(plan, tight)
    (better, timeline), timed = with_partners((plan, before), tight, budget_s=None)
    assert better.problems() == [] and timed > 0
    assert timeline.fits and timeline.step_ms <= before.step_ms
    assert timeline.exchange.hidden_ms >= before.exchange.hidden_ms
    # What a row of slots says of time and exposed exchange is what the simulator says of the plan.
    orders = SlotOrders(better, tight)
    rows = [orders.row(list(better.slots(r))) for r in range(ranks)]
    assert orders.makespan_ms(rows) == pytest.approx(timeline.makespan_ms)
    exposed = timeline.exchange.total_ms - timeline.exchange.hidden_ms
    assert sum(row.exposed_ms for row in rows) == pytest.approx(exposed, abs=1e-6)


def test_a_lone_op_with_an_exchange_gets_the_weight_gradient_that_follows_it() -> None:
    order = parse_orders([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    plan = Plan(num_layers=2, num_ranks=1, num_micro_batches=2, stages=(Stage(first=0, stop=2, rank=0),), orders=order)
    costs = equal_layers(2)
    before = simulate(plan, costs)
    (found, timeline), _ = with_partners((plan, before), costs, budget_s=None)
    assert (Op(0, "I", 1), Op(0, "W", 0)) in found.pairs
    # W (1 ms) fits into the exchanges of I (2 ms). Each F computes for 4 ms beside the other's exchanges, all but the
    # last one of 0.5 ms.
    assert before.step_ms == pytest.approx(2 * 6 + 2 * 6 + 2 * 1)
    assert timeline.step_ms == pytest.approx((2 * 4 + 0.5) + 2 * 6 + 1)
