"""Pairs in plans: files, rules, lowering under every channel model, and times against a plain event loop."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from effort import draws
from plans import random_costs, random_plan
from test_lower import finishes

from octopipe.base.errors import OctoPipeError, PlanError
from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.costs.table_file import costs_from_record, record_of
from octopipe.plans.file import plan_from_json, plan_to_json
from octopipe.plans.pair_price import PairPrices
from octopipe.plans.plan import Op, Plan, Stage, parse_slots
from octopipe.search.systems import build_plan
from octopipe.simulation.bounds.bounds import bounds
from octopipe.simulation.lowering import CHANNELS, lower
from octopipe.simulation.simulator import makespan_ms, simulate
from octopipe.simulation.timeline import timeline_from_json


def with_exchange(rng: random.Random, costs: CostTable, *, slowing: bool = True) -> CostTable:
    """The same times, of which most layers spend a part exchanging."""

    def row() -> tuple[tuple[str, float], ...]:
        if rng.random() < 0.3:
            return ()
        cuts = [rng.random() for _ in range(4)]
        parts = list(zip(("compute", "exchange", "compute", "exchange"), cuts))
        if rng.random() < 0.5:
            parts.reverse()
        return tuple((lane, share / sum(cuts)) for lane, share in parts)

    return costs.replace(
        segments=Segments(
            forward=tuple(row() for _ in range(costs.num_layers)),
            input=tuple(row() for _ in range(costs.num_layers)),
            slows_compute=rng.choice((0.0, 0.2)) if slowing else 0.0,
        )
    )


def with_pairs(rng: random.Random, plan: Plan, share: float = 0.7) -> Plan:
    """The plan with random neighbours paired, as many as it takes."""
    pairs: set[tuple[Op, Op]] = set()
    taken: set[Op] = set()
    for order in plan.orders:
        for first, second in itertools.pairwise(order):
            if rng.random() > share or first in taken or second in taken:
                continue
            more = replace(plan, pairs=frozenset(pairs | {(first, second)}))
            if not more.problems():
                pairs.add((first, second))
                taken |= {first, second}
    return replace(plan, pairs=frozenset(pairs))


def slots_in_time(plan: Plan, costs: CostTable) -> dict[Op, tuple[float, float]]:
    """An event loop of its own: a slot starts when the one before has ended and the inputs of all its ops are there."""
    prices = PairPrices(plan, costs)
    slots = [list(plan.slots(rank)) for rank in range(plan.num_ranks)]
    times: dict[Op, tuple[float, float]] = {}
    arrived: dict[tuple[Op, Op], float] = {}
    free: dict[tuple[int, int], float] = {}
    clock = [0.0] * plan.num_ranks
    consumers: dict[Op, list[Op]] = {}
    for order in plan.orders:
        for op in order:
            for p in plan.predecessors(op):
                consumers.setdefault(p, []).append(op)
    number = {op: k for k, op in enumerate(op for order in plan.orders for op in order)}
    left = sum(map(len, slots))
    while left:
        before = left
        for rank, queue in enumerate(slots):
            while queue:
                slot = queue[0]
                inputs = [(p, op) for op in slot for p in plan.predecessors(op)]
                if any(p not in times for p, _ in inputs):
                    break
                start = max([clock[rank], *(arrived.get((p, op), times[p][1]) for p, op in inputs)])
                took = prices.together(*slot).ms if len(slot) == 2 else prices.alone_ms(slot[0])
                clock[rank] = end = start + took
                for op in slot:
                    times[op] = (start, end)
                for op in slot:
                    for consumer in sorted(consumers.get(op, ()), key=number.__getitem__):
                        there = plan.stages[consumer.stage].rank
                        if there != rank:
                            maker = op if op.kind == "F" else consumer
                            last = plan.stages[maker.stage].stop - 1
                            size = 1.0
                            if costs.micro_batch_factor is not None:
                                size = costs.micro_batch_factor[op.micro_batch, last]
                            nbytes = costs.boundary_bytes[last]
                            if plan.stages[maker.stage].shard is not None and last == plan.num_layers - 1:
                                nbytes = 8.0 * (costs.tokens_per_micro_batch or 0)  # of a cut head: partial sums
                            home, m = plan.stages[maker.stage].rank, op.micro_batch
                            receivers = {plan.stages[s].rank for s in plan.stage_after(maker.stage, m)} - {home}
                            several = len(receivers) if plan.edges else 1  # they share the one rank's link
                            ms = costs.network.transfer_ms(rank, there, nbytes * size * several)
                            free[rank, there] = arrived[op, consumer] = max(free.get((rank, there), 0.0), end) + ms
                queue.pop(0)
                left -= 1
        assert left < before, "the slots wait for each other"
    return times


@pytest.mark.parametrize("seed", range(draws(25)))
def test_times_equal_a_plain_event_loop_and_no_channel_deadlocks(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, routes=rng.choice((1, 1, 2)))
    costs = with_exchange(rng, random_costs(rng, plan))
    plan = with_pairs(rng, plan)
    timeline = simulate(plan, costs)
    expected = slots_in_time(plan, costs)
    for k in range(timeline.spans.rank.size):
        assert (timeline.spans.start_ms[k], timeline.spans.end_ms[k]) == pytest.approx(expected[timeline.op(k)])
    assert makespan_ms(plan, costs) == pytest.approx(timeline.makespan_ms)
    for channel in CHANNELS:
        program = lower(plan, costs, channel=channel)
        assert simulate(program, costs).makespan_ms >= timeline.makespan_ms - 1e-9
        for rank in range(plan.num_ranks):
            lines = program.instructions(rank)
            ran = [(x.op,) if x.beside is None else (x.op, x.beside) for x in lines if x.kind == "compute"]
            assert tuple(ran) == plan.slots(rank)
            _receives_before_and_sends_after(lines)
        # Pairs taken apart: what the instruction lists promise about messages holds without them, too.
        if not plan.pairs:
            assert finishes(program)


def _receives_before_and_sends_after(lines: tuple[object, ...]) -> None:
    place = {}
    for k, x in enumerate(lines):
        if x.kind == "compute":
            place[x.op] = k
            if x.beside is not None:
                place[x.beside] = k
    for k, x in enumerate(lines):
        if x.kind == "send":
            assert k > place[x.op]
        if x.kind == "receive":
            assert k < place[x.consumer]


@pytest.mark.parametrize("seed", range(10))
def test_lanes_within_a_timeline_add_up(seed: int) -> None:
    rng = random.Random(100 + seed)
    plan = random_plan(rng)
    costs = with_exchange(rng, random_costs(rng, plan), slowing=False)
    plan = with_pairs(rng, plan)
    timeline = simulate(plan, costs)
    n, spans = timeline.lanes, timeline.spans
    if n is None:
        assert not plan.pairs and not costs.exchanges
        return
    assert (n.start_ms >= spans.start_ms[n.span] - 1e-9).all() and (n.end_ms <= spans.end_ms[n.span] + 1e-9).all()
    prices = PairPrices(plan, costs)
    exchanging = np.bincount(n.span[n.lane == 1], (n.end_ms - n.start_ms)[n.lane == 1], minlength=spans.rank.size)
    computing = np.bincount(n.span[n.lane == 0], (n.end_ms - n.start_ms)[n.lane == 0], minlength=spans.rank.size)
    for k in range(spans.rank.size):
        op = timeline.op(k)
        parts = prices.sequence(op)
        on = [float(ms) for i, ms in enumerate(parts.ms) if (parts.lane + i) % 2 == 1]
        assert exchanging[k] == pytest.approx(sum(on), abs=1e-9)
        assert computing[k] == pytest.approx(prices.alone_ms(op) - sum(on), abs=1e-9)
    assert 0.0 <= timeline.exchange.share <= 1.0
    assert timeline.busy_ms.max() <= timeline.makespan_ms + 1e-9
    again = timeline_from_json(timeline.to_json())
    assert again.exchange == timeline.exchange and again.summary() == timeline.summary()


def test_files_say_pairs_in_version_2_and_plain_plans_in_version_1() -> None:
    costs = CostTable.uniform(num_layers=4)
    plain = build_plan("1f1b", costs, 2, 4)
    assert b'"octopipe.plan/1"' in plan_to_json(plain)
    plan = with_pairs(random.Random(1), plain)
    text = plan_to_json(plan)
    assert plan.pairs and b'"octopipe.plan/2"' in text and b"+" in text
    again = plan_from_json(text)
    assert again == plan and plan_to_json(again) == text
    assert "OVERLAP_F_B" in plan.to_csv()
    with pytest.raises(PlanError, match="not an op"):
        plan_from_json(text.replace(b"plan/2", b"plan/1"))
    with pytest.raises(OctoPipeError, match="newer"):
        plan_from_json(text.replace(b"plan/2", b"plan/3"))


def pair_plan(orders: list[list[str]]) -> Plan:
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=0))
    ops, pairs = parse_slots(orders)
    return Plan(num_layers=2, num_ranks=1, num_micro_batches=2, stages=stages, orders=ops, pairs=pairs)


def test_wrong_pairs_are_named() -> None:
    good = pair_plan([["0F0", "1F0", "0F1+1B0", "1F1+0B0", "1B1", "0B1"]])
    assert good.problems() == []
    ops = good.orders[0]
    for pairs, words in (
        ({(ops[0], ops[1])}, "pairs 1F0 with 0F0, which it needs"),
        ({(ops[0], ops[2])}, "must be adjacent"),
        ({(ops[1], ops[2]), (ops[2], ops[3])}, "part of another pair"),
        ({(Op(0, "F", 7), ops[1])}, "no rank runs 0F7"),
        ({(ops[6], ops[7])}, "both backward"),
    ):
        problems = replace(good, pairs=frozenset(pairs)).problems()
        assert problems and words in problems[0], problems
    with pytest.raises(PlanError, match="more than two"):
        parse_slots([["0F0+0F1+1F0"]])


def test_ranks_whose_pairs_wait_for_each_other_are_told() -> None:
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    # Rank 0 pairs 0F1 with 0B0, which needs 1B0; rank 1 pairs 1F1, which needs 0F1, with 1B0.
    orders, pairs = parse_slots([["0F0", "0F1+0B0", "0B1"], ["1F0", "1F1+1B0", "1B1"]])
    plan = Plan(num_layers=2, num_ranks=2, num_micro_batches=2, stages=stages, orders=orders, pairs=pairs)
    assert "cycle" in plan.problems()[0] and "0F1+0B0" in plan.problems()[0]
    assert replace(plan, pairs=frozenset()).problems() == []


def test_costs_with_segments_are_kept_whole() -> None:
    rng = random.Random(5)
    plan = random_plan(rng)
    costs = with_exchange(rng, random_costs(rng, plan))
    assert costs_from_record(record_of(costs)).digest() == costs.digest()
    assert costs.digest() != costs.replace(segments=None).digest()


def test_a_pair_without_exchange_takes_as_long_as_its_ops() -> None:
    costs = CostTable.uniform(num_layers=2)
    plan = pair_plan([["0F0", "1F0", "0F1+1B0", "1F1+0B0", "1B1", "0B1"]])
    assert simulate(plan, costs).makespan_ms == simulate(replace(plan, pairs=frozenset()), costs).makespan_ms == 12.0


@pytest.mark.parametrize("seed", range(15))
def test_no_plan_with_pairs_beats_the_bounds_of_the_two_lanes(seed: int) -> None:
    rng = random.Random(200 + seed)
    plan = random_plan(rng)
    while plan.num_ranks > plan.num_layers:
        plan = random_plan(rng)
    costs = with_exchange(rng, random_costs(rng, plan))
    plan = with_pairs(rng, plan, share=1.0)
    step = simulate(plan, costs).step_ms
    for bound in bounds(costs, plan.num_ranks, plan.num_micro_batches):
        assert bound.ms <= step + 1e-9, bound


def test_the_work_bound_is_the_busier_lanes() -> None:
    rows = [[("compute", 1.0), ("exchange", 3.0)]] * 4, [[("compute", 1.0), ("exchange", 2.0)]] * 4
    costs = CostTable.uniform(num_layers=4, forward_ms=4.0, input_ms=3.0, weight_ms=1.0)
    costs = costs.replace(segments=Segments.from_ms(*rows))
    found = dict(bounds(costs, 2, 10))
    assert found["work"] == 4 * 10 * (3.0 + 2.0) / 2  # the exchange; compute is 3 of 8 ms
