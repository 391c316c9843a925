"""The simulator on fixed draws: times and memory of the plain twin, and what follows the pipeline by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from plans import random_costs, random_plan
from twin import run

from octopipe.base.errors import DeadlockError, OctoPipeError
from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan, Stage, parse_orders
from octopipe.search.systems import build_plan
from octopipe.simulation.after_pipeline import after_pipeline
from octopipe.simulation.lowering import lower
from octopipe.simulation.simulator import jitter_ms, makespan_ms, simulate


def setting(seed: int) -> tuple[Plan, CostTable]:
    rng = random.Random(seed)
    plan = random_plan(rng, routes=1 + seed % 2)
    costs = random_costs(rng, plan, zeros=seed % 2 == 0)
    lot = np.random.default_rng(seed)
    return plan, costs.replace(
        gradient_bytes=lot.choice([0.0, 1.0, 3.0], plan.num_layers),
        optimizer_ms=lot.choice([0.0, 0.5, 2.0], plan.num_layers),
        data_parallel=1 + seed % 3,
        reduction=Link(latency_ms=0.25, ms_per_byte=0.5),
    )


@pytest.mark.parametrize("seed", range(40))
def test_times_and_peaks_are_those_of_the_plain_twin(seed: int) -> None:
    plan, costs = setting(seed)
    times, peaks = run(plan, costs)
    t = simulate(plan, costs)
    for k in range(t.spans.rank.size):
        assert (t.spans.start_ms[k], t.spans.end_ms[k]) == pytest.approx(times[t.op(k)])
    assert t.spans.rank.size == len(times)
    assert t.peak_bytes == pytest.approx([peaks[r] for r in range(plan.num_ranks)])
    assert makespan_ms(plan, costs) == pytest.approx(t.makespan_ms)
    for r, curve in enumerate(t.memory):
        held = {k for s in plan.stages if s.rank == r for k in range(s.first, s.stop)}
        static = sum(float(costs.static_bytes[k]) for k in held)
        assert curve.static_bytes == pytest.approx(static) and np.all(curve.bytes >= static - 1e-9)
        assert np.all(np.diff(curve.times_ms) > 0)  # one level an instant
        if curve.bytes.size:
            assert curve.bytes[-1] == pytest.approx(static)  # everything is let go in the end


@pytest.mark.parametrize("seed", range(40))
def test_reductions_and_updates_follow_as_soon_as_they_can(seed: int) -> None:
    plan, costs = setting(seed)
    t = simulate(plan, costs)
    done = [
        max(
            (float(e) for s, k, e in zip(t.spans.stage, t.spans.kind, t.spans.end_ms) if s == n and k in (3, 4)),
            default=0.0,
        )
        for n in range(len(plan.stages))
    ]
    holders = {
        k: sorted({s.rank for s in plan.stages if s.first <= k < s.stop}) for k in range(plan.num_layers)
    }  # fmt: skip
    shared = len(plan.routes) > 1
    want: list[tuple[str, int, float, float]] = []
    for rank in range(plan.num_ranks):
        mine = []
        for n, stage in enumerate(plan.stages):
            if stage.rank == rank:
                others = [k for k, o in enumerate(plan.stages) if o.first < stage.stop and stage.first < o.stop]
                mine.append((max(done[k] for k in others) if shared else done[n], stage.first, n))
        clock, held = 0.0, set[int]()  # a rank has a layer once, however many of its stages run it
        counted: dict[int, list[int]] = {}
        for n in sorted(n for _, _, n in mine):
            counted[n] = [k for k in range(plan.stages[n].first, plan.stages[n].stop) if k not in held]
            held |= set(counted[n])
        for ready, _, n in sorted(mine):
            new = counted[n]
            nbytes = sum(float(costs.gradient_bytes[k]) for k in new)
            took = 0.0
            for ranks in {tuple(holders[k]) for k in new if len(holders[k]) > 1}:
                part = sum(float(costs.gradient_bytes[k]) for k in new if tuple(holders[k]) == ranks)
                link = costs.network.link(rank, next(r for r in ranks if r != rank))
                levels = {2: 1, 3: 2, 4: 2}[len(ranks)]
                if part > 0:
                    took += 2 * levels * link.latency_ms + 2 * (1 - 1 / len(ranks)) * part * link.ms_per_byte
            if costs.data_parallel > 1 and nbytes > 0:
                levels = {2: 1, 3: 2}[costs.data_parallel]
                took += 2 * levels * 0.25 + 2 * (1 - 1 / costs.data_parallel) * nbytes * 0.5
            if took > 0:
                begin = max(clock, ready)
                clock = begin + took
                want.append((f"reduce stage {n}", rank, begin, clock))
        update = sum(float(costs.optimizer_ms[k]) for k in held)
        if update > 0:
            begin = max([clock, *(done[n] for _, _, n in mine)])
            want.append(("optimizer", rank, begin, begin + update * costs.slowdown(rank)))
    found = after_pipeline(plan, costs, t.spans)
    assert [(e.name, e.rank) for e in found] == [x[:2] for x in want] and found == t.extras
    assert [x for e in found for x in (e.start_ms, e.end_ms)] == pytest.approx([y for x in want for y in x[2:]])


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({"sigma": 0.0}, True), ({"sigma": -0.1}, False), ({"sigma": 9.9, "runs": 1}, True), ({"sigma": 10.0}, False),
        ({"runs": 1}, True), ({"runs": 0}, False), ({"sigma": 10.5}, False),
    ],
)  # fmt: skip
def test_jitter_has_a_width_and_at_least_one_run(change: dict[str, Any], good: bool) -> None:
    costs = CostTable.uniform(num_layers=2)
    program = lower(build_plan("1f1b", costs, 2, 2), costs)
    if good:
        assert jitter_ms(program, costs, **{"runs": 2, **change}).size == change.get("runs", 2)
    else:
        with pytest.raises(OctoPipeError, match="jitter sigma"):
            jitter_ms(program, costs, **change)


def test_jitter_is_a_thousand_runs_of_five_percent_from_seed_zero() -> None:
    costs = CostTable.uniform(num_layers=2)
    program = lower(build_plan("1f1b", costs, 2, 2), costs)
    assert np.array_equal(jitter_ms(program, costs), jitter_ms(program, costs, sigma=0.05, runs=1000, seed=0))


def crossing() -> tuple[Plan, CostTable]:
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    orders = parse_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    plan = Plan(num_layers=2, num_ranks=2, num_micro_batches=2, stages=stages, orders=orders)
    return plan, CostTable.uniform(num_layers=2, p2p_ms=0.1)


def test_a_program_of_others_is_proven_before_it_is_timed() -> None:
    plan, costs = crossing()
    naive = lower(plan, costs, channel="blocking", naive=True, check=False)
    with pytest.raises(DeadlockError):
        simulate(naive, costs)
    good = lower(plan, costs)
    assert simulate(good, costs).step_ms == simulate(good, costs, check=False).step_ms == simulate(plan, costs).step_ms


def test_a_timeline_is_called_by_its_system_or_as_told() -> None:
    plan, costs = crossing()
    assert simulate(plan, costs).label == ""
    assert simulate(plan.with_extra(system="ours"), costs).label == "ours"
    assert simulate(plan.with_extra(system="ours"), costs, label="theirs").label == "theirs"


def test_orders_that_wait_for_each_other_have_no_makespan() -> None:
    plan, costs = crossing()
    stuck = Plan(
        num_layers=2, num_ranks=2, num_micro_batches=2, stages=plan.stages,
        orders=parse_orders([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]),
    )  # fmt: skip
    with pytest.raises(OctoPipeError, match="cycle"):
        makespan_ms(stuck, costs)
    nothing = CostTable.uniform(num_layers=2).replace(
        forward_ms=np.zeros(2), input_ms=np.zeros(2), weight_ms=np.zeros(2)
    )
    assert makespan_ms(plan, nothing) == 0.0


def test_copies_are_reduced_between_their_holders_link() -> None:
    """Three ranks hold everything; the link to rank 2 is slow and not the first other's."""
    stages = tuple(Stage(first=0, stop=1, rank=r) for r in range(3))
    plan = Plan(
        num_layers=1, num_ranks=3, num_micro_batches=3, stages=stages, routes=((0,), (1,), (2,)),
        route_of_micro_batch=(0, 1, 2), orders=parse_orders([["0F0", "0B0"], ["1F1", "1B1"], ["2F2", "2B2"]]),
    ).check()  # fmt: skip
    pairs = {(0, 1): Link(latency_ms=1.0), (1, 0): Link(latency_ms=2.0), (2, 0): Link(latency_ms=3.0)}
    network = Network(intra=Link(latency_ms=50.0), inter=Link(latency_ms=50.0), pairs=pairs)
    costs = CostTable.uniform(num_layers=1).replace(gradient_bytes=np.ones(1), network=network)
    extras = simulate(plan, costs).extras
    assert [(e.rank, e.start_ms, e.end_ms) for e in extras] == [(0, 3.0, 7.0), (1, 3.0, 11.0), (2, 3.0, 15.0)]
