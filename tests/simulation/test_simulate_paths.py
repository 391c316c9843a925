"""Paths that fork and join, shards, recomputation and host memory: times and memory against a plain twin."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from effort import draws
from graph_twin import GraphTwin
from plans import random_costs, random_graph_plan
from pytest import approx

from octopipe.costs.cluster.hardware import Link
from octopipe.costs.shard_times import ShardTimes
from octopipe.costs.table import CostTable
from octopipe.plans.file import plan_from_json, plan_to_json
from octopipe.plans.plan import Op, Plan, Stage, parse_orders
from octopipe.plans.price import prices_cached, stage_memory
from octopipe.simulation.host_moves import memory_times
from octopipe.simulation.lowering import Program, lower
from octopipe.simulation.simulator import makespan_ms, simulate


def redone(rng: random.Random, plan: Plan) -> Plan:
    """The plan with some stages that recompute, and some that may offload."""
    stages = []
    for stage in plan.stages:
        some = rng.randrange(stage.first, max(stage.stop, stage.first + 1))
        again = stage.first < stage.stop and rng.choice((False, False, True, (some,)))
        offload = stage.first < stage.stop and not again and rng.random() < 0.5
        stages.append(replace(stage, recompute=again, offload=offload))
    orders = [
        [new for op in order for new in ((Op(op.stage, "R", op.micro_batch), op) if op.kind in "IB" else (op,))]
        for order in plan.orders
    ]
    kept = tuple(tuple(op for op in row if op.kind != "R" or stages[op.stage].recompute) for row in orders)
    return replace(plan, stages=tuple(stages), orders=kept).check()


def drawn_costs(rng: random.Random, plan: Plan) -> CostTable:
    """Costs with a link to host memory, tokens, and measured times of some layers' shards."""

    def three(most: float) -> tuple[float, float, float]:
        return rng.uniform(0, most), rng.uniform(0, most), rng.uniform(0, most)

    times = [ShardTimes(layer=k, fixed=three(0.4), share=three(1.0)) for k in range(plan.num_layers)]
    return random_costs(rng, plan).replace(
        host_link=Link(latency_ms=rng.choice((0.0, 0.1)), ms_per_byte=rng.choice((0.0, 0.05, 0.5))),
        tokens_per_micro_batch=rng.choice((None, 3)),
        shard_times=tuple(one for one in times if rng.random() < 0.5),
    )


def away(program: Program, starts: np.ndarray, ends: np.ndarray) -> list[tuple[int, float, float, float]]:
    moves, t = program.moves, program.plan.table()
    if moves is None:
        return []
    gone, back = memory_times(moves, t.offsets, starts, ends)
    return list(zip(t.rank[moves.forward].tolist(), gone.tolist(), back.tolist(), moves.nbytes.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(draws(400)))
def test_times_and_memory_of_paths_equal_a_plain_twin(seed: int) -> None:
    rng = random.Random(seed)
    plan = redone(rng, random_graph_plan(rng))
    costs = drawn_costs(rng, plan)
    assert plan_from_json(plan_to_json(plan)) == plan
    program, twin = lower(plan, costs), GraphTwin(plan, costs)
    timeline = simulate(program, costs)
    found = {timeline.op(k): k for k in range(timeline.spans.stage.size)}
    for op, (start, end) in twin.times.items():  # what goes to host memory delays nothing
        k = found[op]
        assert (timeline.spans.start_ms[k], timeline.spans.end_ms[k]) == approx((start, end), abs=1e-9), str(op)
    assert makespan_ms(plan, costs) == approx(max(end for _, end in twin.times.values()))
    moved = away(program, timeline.spans.start_ms, timeline.spans.end_ms)
    assert timeline.peak_bytes.tolist() == approx(twin.peaks(moved), abs=1e-6)


def joined(edges: tuple[tuple[int, int], ...], last: Stage, first: tuple[Stage, ...] = ()) -> Plan:
    """Stages of one layer each on one rank, and a last one after them that recomputes or offloads."""
    stages = (*(first or (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=0))), last)
    back = [f"{s}B0" for s in reversed(range(len(stages)))]
    again = [f"{len(stages) - 1}R0"] if last.recompute else []
    return Plan(
        num_layers=last.stop,
        num_ranks=1,
        num_micro_batches=1,
        stages=stages,
        orders=parse_orders([[*(f"{s}F0" for s in range(len(stages))), *again, *back]]),
        edges=(edges,),
    ).check()


def bytes_of(layers: int) -> CostTable:
    """The output of layer k has 1, 10, 100, ... bytes."""
    costs = CostTable.uniform(num_layers=layers, activation_bytes=1e6)
    return costs.replace(boundary_bytes=10.0 ** np.arange(layers), host_link=Link(latency_ms=0.0))


@pytest.mark.parametrize("how", [{"recompute": True}, {"offload": True}])
def test_what_a_stage_keeps_is_what_its_edges_bring(how: dict[str, bool]) -> None:
    last = Stage(first=2, stop=3, rank=0, **how)
    costs = bytes_of(3)
    with prices_cached():
        both = joined(((0, 1), (0, 2), (1, 2)), last)
        assert stage_memory(both, costs).after_forward[2, 0] == 11.0
        skipped = replace(both, edges=(((0, 1), (0, 2)),))
        assert stage_memory(skipped, costs).after_forward[2, 0] == 1.0
        alone = replace(both, edges=(((0, 1),),), routes=((0, 1, 2),))
        assert stage_memory(alone, costs).after_forward[2, 0] == 0.0  # it takes the batch, which is not counted
    shards = tuple(Stage(first=0, stop=1, rank=0, shard=(k, 2)) for k in range(2))
    of_sum = joined(((0, 2), (1, 2)), replace(last, first=1, stop=2), shards)
    assert stage_memory(of_sum, costs.only((0, 1))).after_forward[2, 0] == 1.0  # one sum


@pytest.mark.parametrize("kind", ["F", "I", "W", "B"])
def test_every_layer_of_a_shard_takes_its_own_measured_share(kind: str) -> None:
    shards = tuple(Stage(first=0, stop=2, rank=0, shard=(k, 2)) for k in range(2))
    plan = joined(((0, 2), (1, 2)), Stage(first=2, stop=3, rank=0), shards)
    if kind != "B":
        texts = ["0F0", "1F0", "2F0", "2B0", "1I0", "1W0", "0I0", "0W0"]
        plan = replace(plan, orders=parse_orders([texts])).check()
    costs = CostTable.uniform(num_layers=3, forward_ms=2.0, input_ms=4.0, weight_ms=8.0)
    costs = costs.replace(shard_times=(ShardTimes(layer=1, fixed=(0.1, 0.2, 0.3), share=(0.0, 0.0, 0.0)),))
    timeline = simulate(plan, costs)
    at = {str(timeline.op(k)): k for k in range(timeline.spans.stage.size)}[f"1{kind}0"]
    expected = {"F": 1.0 + 0.2, "I": 2.0 + 0.8, "W": 4.0 + 2.4, "B": 6.0 + 3.2}[kind]
    assert timeline.spans.end_ms[at] - timeline.spans.start_ms[at] == approx(expected)
