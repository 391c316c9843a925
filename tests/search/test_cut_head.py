"""A head cut by its vocabulary: prices, bounds, the scheduler against the simulator, and the search."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Network
from octopipe.costs.table import CostTable
from octopipe.plans.file import plan_from_json, plan_to_json
from octopipe.plans.plan import Plan, Stage, parse_orders
from octopipe.search.graphs.cut_head import CutHeadSearch
from octopipe.search.graphs.layout import Layout, Prices
from octopipe.search.graphs.orders import Waits, follow
from octopipe.search.graphs.surrogate import chain_for, layout_of, with_shards
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.bounds.bounds import lower_bound
from octopipe.simulation.simulator import simulate


def costs_with_head(
    rng: random.Random, layers: int = 10, *, tied: bool = False, memory: float | None = None
) -> CostTable:
    """Random layers, the last of which takes as long as a third of all."""
    low = np.array([rng.uniform(0.5, 1.5) for _ in range(layers)])
    head = low.sum() / 2

    def column(scale: float) -> np.ndarray:
        values = low * scale
        values[-1] = head * scale
        return values

    static = column(40.0)
    static[0] = static[-1]
    return CostTable(
        model="headed",
        symbols="E" + "T" * (layers - 2) + "L",
        forward_ms=column(1.0),
        input_ms=column(1.1),
        weight_ms=column(0.8),
        activation_bytes=column(8.0),
        stash_bytes=column(4.0),
        static_bytes=static,
        boundary_bytes=np.full(layers, 2.0),
        tied_bytes=float(static[0]) if tied else 0.0,
        network=Network.constant(0.05),
        tokens_per_micro_batch=16,
        rank_memory_bytes=() if memory is None else (memory,),
    )


def by_hand(*, loss_rank: int = 1) -> Plan:
    stages = (
        Stage(first=0, stop=2, rank=0),
        Stage(first=2, stop=3, rank=0, shard=(0, 2)),
        Stage(first=2, stop=3, rank=1, shard=(1, 2)),
        Stage(first=3, stop=3, rank=loss_rank),
    )
    return Plan(
        num_layers=3,
        num_ranks=2,
        num_micro_batches=1,
        stages=stages,
        orders=parse_orders([["0F0", "1F0", "1B0", "0B0"], ["2F0", "3F0", "3B0", "2B0"]]),
        edges=(((0, 1), (0, 2), (1, 3), (2, 3)),),
    ).check()


def test_the_loss_takes_no_time_and_its_two_numbers_per_token_travel() -> None:
    costs = CostTable(
        model="hand",
        symbols="ETL",
        forward_ms=np.array([1.0, 1.0, 4.0]),
        input_ms=np.array([1.0, 1.0, 4.0]),
        weight_ms=np.array([0.0, 1.0, 2.0]),
        boundary_bytes=np.array([5.0, 5.0, 999.0]),
        network=Network.constant(0.5),
        tokens_per_micro_batch=10,
        static_bytes=np.array([8.0, 1.0, 8.0]),
        tied_bytes=8.0,
    )
    timeline = simulate(by_hand(), costs)
    at = {str(timeline.op(k)): (timeline.spans.start_ms[k], timeline.spans.end_ms[k]) for k in range(8)}
    assert at["1F0"] == (2.0, 4.0) and at["2F0"] == (2.5, 4.5)
    assert at["3F0"] == at["3B0"] == (4.5, 4.5)  # the first shard's numbers are there at 4.5, too
    assert at["2B0"] == (4.5, 7.5) and at["1B0"] == (5.0, 8.0) and at["0B0"] == (8.0, 11.0)
    made_by = [timeline.op(int(k)).stage for k in timeline.transfers.producer]
    sizes = dict(zip(made_by, timeline.transfers.nbytes.tolist(), strict=True))
    assert sizes[1] == sizes[3] == 80.0 and sizes[0] == sizes[2] == 5.0
    assert by_hand().replicas() == {} and by_hand().shards() == {2: (0, 1)}


def test_a_plan_with_a_cut_head_is_read_back_as_it_was_written() -> None:
    plan = by_hand()
    assert plan_from_json(plan_to_json(plan)) == plan
    wrong = replace(plan, stages=(*plan.stages[:3], Stage(first=2, stop=2, rank=1)))
    assert "must lie inside" in wrong.problems()[0]


@pytest.mark.parametrize("seed", range(8))
def test_schedules_take_as_long_as_the_simulator_says(seed: int) -> None:
    rng = random.Random(seed)
    ranks, micro_batches = rng.randint(2, 4), rng.randint(1, 5)
    costs = costs_with_head(rng, rng.randint(2 * ranks + 2, 12), tied=rng.random() < 0.3)
    search = CutHeadSearch(
        costs=costs, num_ranks=ranks, num_micro_batches=micro_batches, budget_s=60, seed=seed, moves=1
    )
    tried = 0
    for number in range(40):
        layout = search._proposals.drawn_layout(number)
        if layout is None:
            continue
        keys = search._proposals.drawn_keys(layout, varied=True)
        for _ in range(rng.randrange(6)):
            layout, keys = search._proposals.moved(layout, keys)
        ms = search._ms(layout, keys)
        if ms == float("inf"):
            continue
        tried += 1
        plan = search.plan(layout)
        assert simulate(plan, costs).makespan_ms == pytest.approx(ms)
        assert plan.stages == tuple(layout.stages())
        assert all(
            layout.ranks[k] == plan.stages[k + layout.fork - len(layout.ranks) + 1].rank
            for k in range(len(layout.ranks))
        )
    assert tried > 5


def test_the_search_never_hands_back_a_plan_that_does_not_fit() -> None:
    rng = random.Random(3)
    free = costs_with_head(rng, 12)
    roomy = CutHeadSearch(costs=free, num_ranks=3, num_micro_batches=4, budget_s=60, moves=600).run()
    assert roomy is not None
    tight = free.replace(rank_memory_bytes=(0.75 * float(roomy[1].peak_bytes.max()),))
    made = CutHeadSearch(costs=tight, num_ranks=3, num_micro_batches=4, budget_s=60, moves=600).run()
    assert made is None or made[1].fits
    assert (
        CutHeadSearch(
            costs=free.replace(rank_memory_bytes=(1.0,)), num_ranks=3, num_micro_batches=4, budget_s=60, moves=20
        ).run()
        is None
    )


@pytest.mark.slow
def test_the_same_seed_cuts_the_head_in_the_same_way() -> None:
    costs = costs_with_head(random.Random(1), 14)
    plans = [tune(costs, 4, 6, iterations=60, copies=False, workers=1, cut_head=True).plan for _ in range(2)]
    assert plan_to_json(plans[0]) == plan_to_json(plans[1])


def test_tune_cuts_the_head_where_that_is_faster_and_says_so() -> None:
    costs = costs_with_head(random.Random(1), 14)
    whole = tune(costs, 4, 6, iterations=60, copies=False, workers=1)
    cut = tune(costs, 4, 6, iterations=60, copies=False, workers=1, cut_head=True)
    assert cut.step_ms < 0.9 * whole.step_ms
    assert cut.step_ms == pytest.approx(simulate(cut.plan, costs).step_ms)
    assert cut.lower_bound_ms <= cut.step_ms and "may cut the head" in cut.plans.words
    assert any(" cut into " in note for note in cut.notes)
    assert len(cut.plan.shards()[costs.num_layers - 1]) >= 2


def test_a_tied_head_is_cut_together_with_the_embedding() -> None:
    costs = costs_with_head(random.Random(2), 12, tied=True)
    made = CutHeadSearch(costs=costs, num_ranks=3, num_micro_batches=4, budget_s=60, moves=400).run()
    assert made is not None
    shards = made[0].shards()
    assert shards[0] == shards[costs.num_layers - 1]
    held = simulate(made[0], costs).memory
    assert sum(curve.static_bytes for curve in held) == pytest.approx(costs.static_bytes.sum() - costs.tied_bytes)


def test_no_plan_beats_the_bound_of_its_class() -> None:
    for seed in range(6):
        costs = costs_with_head(random.Random(seed), 9)
        bound = lower_bound(costs, 3, 3, False, False, True)
        made = CutHeadSearch(costs=costs, num_ranks=3, num_micro_batches=3, budget_s=60, moves=500, seed=seed).run()
        assert made is not None and made[1].makespan_ms >= bound.ms * (1 - 1e-9)
        assert bound.ms <= lower_bound(costs, 3, 3, False).ms + 1e-9


def test_the_chain_that_stands_for_a_cut_model_has_all_its_work() -> None:
    costs = costs_with_head(random.Random(0), 10)
    chain = chain_for(costs, 4)
    assert chain.layer_ms.sum() == pytest.approx(costs.layer_ms.sum())
    assert chain.layer_ms[-1] == pytest.approx(costs.layer_ms[-1] / 4)
    assert chain.static_bytes.sum() == pytest.approx(costs.static_bytes.sum())


@pytest.mark.parametrize("system", ["dualpipev", "1f1b"])
def test_a_chain_with_fused_backwards_is_polished_with_its_head_cut(system: str) -> None:
    costs = costs_with_head(random.Random(3), 12)
    chain = chain_for(costs, 4)
    plan = build_plan(system, chain, 4, 8, split_backward=system == "dualpipev")
    assert any(op.kind == "B" for order in plan.orders for op in order)
    layout = layout_of(plan, 4)
    assert layout is not None
    cut = with_shards(plan, chain, layout)
    before = simulate(cut.check(), costs)
    search = CutHeadSearch(
        costs=costs, num_ranks=4, num_micro_batches=8, budget_s=60.0, moves=3000, starts=[plan], plans=[(layout, cut)]
    )
    search.judged = 1000
    better, after = search._polished(layout, cut, before, 1.0)
    assert after.step_ms <= before.step_ms and simulate(better.check(), costs).step_ms == after.step_ms


def test_what_knows_no_cut_head_refuses_it() -> None:
    costs = costs_with_head(random.Random(0), 10)
    with pytest.raises(OctoPipeError, match="does not support a cut head"):
        tune(costs, 2, 2, method="octopipe", cut_head=True)
    with pytest.raises(OctoPipeError, match="does not support a cut head"):
        tune(costs, 2, 2, target="megatron", cut_head=True)


def test_orders_as_they_stand_take_as_long_as_the_simulator_says() -> None:
    costs = costs_with_head(random.Random(5), 10)
    search = CutHeadSearch(costs=costs, num_ranks=3, num_micro_batches=3, budget_s=60, moves=200)
    made = search.run()
    assert made is not None
    plan = made[0]
    shards = plan.shards()[costs.num_layers - 1]
    body = [s for s in plan.stages if s.shard is None and s.first < s.stop]
    layout = Layout(
        bounds=(*(s.first for s in body), costs.num_layers - 1),
        ranks=tuple(s.rank for s in body),
        shards=shards,
        loss=plan.stages[-1].rank,
    )
    priced = Prices(costs, 3, 3).of(layout, 1.0)
    assert priced is not None
    size = priced.rank.size
    needed = np.zeros((2, size, 3), np.int64)
    needed[0] = (priced.before[0] >= 0).sum(axis=1)[:, None]
    needed[1] = 1 + (priced.after[0] >= 0).sum(axis=1)[:, None]
    seq, lengths = search._sequence(plan)
    waits = Waits(needed, np.zeros_like(needed), np.zeros(needed.shape))
    ms = follow(priced, seq, lengths, waits, float("inf"))
    assert ms == pytest.approx(made[1].makespan_ms)


def test_a_cut_plan_is_compared_with_the_bound_of_plans_that_cut() -> None:
    from octopipe.cli.verbs.numbers import bound_of

    costs = costs_with_head(random.Random(4))
    result = tune(costs, 4, 4, budget_s=1.5, seed=0, cut_head=True, copies=False)
    plan = result.plan
    assert plan.shards(), "the head is a third of all work"
    step = simulate(plan, costs).step_ms
    for known in (plan, plan.with_extra(lower_bound_ms=None, bound_of=None)):
        bound = bound_of(costs, known, step)
        assert bound.plans.cuts_head and 0 < bound.ms <= step
