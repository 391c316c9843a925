"""Paths that fork and join: what an op needs, files, rules, lowering, times and memory."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from plans import random_costs, random_graph_plan
from test_pairs import slots_in_time, with_exchange, with_pairs

from octopipe.base.errors import OctoPipeError, PlanError
from octopipe.costs.cluster.hardware import Network
from octopipe.costs.table import CostTable
from octopipe.plans.file import plan_from_json, plan_to_json
from octopipe.plans.plan import Op, Plan, Stage, parse_orders
from octopipe.simulation.lowering import CHANNELS, lower
from octopipe.simulation.simulator import simulate


@pytest.mark.parametrize("seed", range(25))
def test_times_equal_a_plain_event_loop_and_no_channel_deadlocks(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_graph_plan(rng)
    costs = with_exchange(rng, random_costs(rng, plan))
    if rng.random() < 0.5:
        plan = with_pairs(rng, plan)
    timeline = simulate(plan, costs)
    expected = slots_in_time(plan, costs)
    for k in range(timeline.spans.rank.size):
        assert (timeline.spans.start_ms[k], timeline.spans.end_ms[k]) == pytest.approx(expected[timeline.op(k)])
    for channel in CHANNELS:
        assert simulate(lower(plan, costs, channel=channel), costs).makespan_ms >= timeline.makespan_ms - 1e-9
    for curve in timeline.memory:  # nothing is left when everything is done
        assert curve.bytes.size == 0 or curve.bytes[-1] == pytest.approx(curve.static_bytes, abs=1e-6)
    again = plan_from_json(plan_to_json(plan))
    assert again == plan and plan_to_json(again) == plan_to_json(plan)


def cut_head() -> Plan:
    """A body, a head in two shards on two ranks, and a loss that joins them."""
    stages = (
        Stage(first=0, stop=1, rank=0),
        Stage(first=1, stop=2, rank=0, shard=(0, 2)),
        Stage(first=1, stop=2, rank=1, shard=(1, 2)),
        Stage(first=2, stop=3, rank=1),
    )
    return Plan(
        num_layers=3,
        num_ranks=2,
        num_micro_batches=1,
        stages=stages,
        orders=parse_orders([["0F0", "1F0", "1B0", "0B0"], ["2F0", "3F0", "3B0", "2B0"]]),
        routes=((0, 1, 2, 3),),
        edges=(((0, 1), (0, 2), (1, 3), (2, 3)),),
    ).check()


def test_a_head_cut_in_two_by_hand() -> None:
    plan = cut_head()
    costs = CostTable(
        model="cut",
        symbols="THL",
        forward_ms=np.array([1.0, 4.0, 0.5]),
        input_ms=np.array([1.0, 4.0, 0.5]),
        weight_ms=np.array([1.0, 4.0, 0.0]),
        activation_bytes=np.array([10.0, 8.0, 0.0]),
        static_bytes=np.array([100.0, 40.0, 0.0]),
        boundary_bytes=np.array([6.0, 1.0, 0.0]),
        network=Network.constant(0.25),
    )
    timeline = simulate(plan, costs)
    at = {timeline.op(k): (timeline.spans.start_ms[k], timeline.spans.end_ms[k]) for k in range(8)}
    assert at[Op(1, "F", 0)] == (1.0, 3.0) and at[Op(2, "F", 0)] == (1.25, 3.25)
    assert at[Op(3, "F", 0)] == (3.25, 3.75) and at[Op(3, "B", 0)] == (3.75, 4.25)
    assert at[Op(2, "B", 0)] == (4.25, 8.25) and at[Op(1, "B", 0)] == (4.5, 8.5)
    assert at[Op(0, "B", 0)] == (8.5, 10.5)  # the gradient of the other shard is there at 8.5, too
    assert timeline.memory[0].static_bytes == 120.0 and timeline.memory[1].static_bytes == 20.0
    # The body's output is one tensor, although two shards take it: while 1F0 runs, its own 4 bytes are added.
    first = timeline.memory[0]
    while_sending = first.bytes[np.searchsorted(first.times_ms, 1.1, side="right") - 1]
    assert while_sending == 120.0 + 10.0 + 6.0 + 4.0


def test_a_chain_written_as_a_path_is_the_chain() -> None:
    stages = tuple(Stage(first=k, stop=k + 1, rank=k) for k in range(2))
    chain = Plan(
        num_layers=2,
        num_ranks=2,
        num_micro_batches=1,
        stages=stages,
        orders=parse_orders([["0F0", "0B0"], ["1F0", "1B0"]]),
    )
    record = msgspec.json.decode(plan_to_json(chain)) | {"format": "octopipe.plan/2", "paths": [{"edges": [[0, 1]]}]}
    record.pop("routes"), record.pop("route_of_micro_batch")
    assert plan_from_json(msgspec.json.encode(record)) == chain
    again = plan_to_json(plan_from_json(msgspec.json.encode(record)))
    assert again == plan_to_json(chain)


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        (((0, 1), (0, 2), (1, 3), (3, 2)), "leads back"),
        (((0, 1), (0, 2), (1, 3), (2, 3), (2, 3)), "twice"),
        (((0, 1), (0, 2), (1, 9)), "not on the path"),
        (((0, 1), (1, 3)), "is not connected"),
        (((0, 1), (1, 3), (2, 3)), "take their input from different stages, [0] and []"),
        (((0, 1), (0, 2), (1, 3)), "hand their output to different stages, [3] and []"),
        (((0, 1), (0, 2)), "stage 3 is not connected"),
        (((0, 1), (0, 2), (0, 3), (1, 3), (2, 3)), "together with outputs of other stages"),
    ],
)
def test_wrong_paths_are_named(edges: tuple[tuple[int, int], ...], words: str) -> None:
    plan = replace(cut_head(), edges=(edges,))
    assert any(words in p for p in plan.problems()), plan.problems()


def test_shards_must_be_complete_and_need_arrows() -> None:
    plan = cut_head()
    one = (plan.stages[0], plan.stages[1], replace(plan.stages[2], shard=(0, 2)), plan.stages[3])
    assert "each of the 2 must be there once" in replace(plan, stages=one).problems()[0]
    assert "is a chain" in replace(plan, edges=()).problems()[0]
    with pytest.raises(PlanError, match="cycle"):
        text = msgspec.json.decode(plan_to_json(plan))
        text["paths"] = [{"edges": [[0, 1], [1, 0]]}]
        plan_from_json(msgspec.json.encode(text))


def test_a_huge_number_of_shards_is_refused_at_once() -> None:
    plan = cut_head()
    many = (plan.stages[0], *(replace(plan.stages[k], shard=(k - 1, 10**18)) for k in (1, 2)), plan.stages[3])
    assert "must be there once" in replace(plan, stages=many).problems()[0]


def cut_last(*more: Stage, edges: tuple[tuple[int, int], ...]) -> Plan:
    """A body, a last layer in two shards, and further stages; the paths are not checked."""
    plan = cut_head()
    stages = (*plan.stages[:3], *more)
    return replace(plan, num_layers=2, stages=stages, routes=(tuple(range(len(stages))),), edges=(edges,))


def test_the_shards_of_a_head_meet_in_one_loss() -> None:
    loss = Stage(first=2, stop=2, rank=1)
    fork = ((0, 1), (0, 2))
    assert not any("loss" in p for p in cut_last(loss, edges=(*fork, (1, 3), (2, 3))).problems())
    assert "let them meet in a stage [2, 2), which computes the loss" in cut_last(edges=fork).problems()[0]
    twice = cut_last(loss, loss, edges=(*fork, (1, 3), (2, 3), (1, 4), (2, 4)))
    assert "stages [3, 4] all compute the loss of layer 1" in twice.problems()[0]


def test_edges_lead_to_higher_layers() -> None:
    stages = (Stage(first=1, stop=2, rank=0), Stage(first=0, stop=1, rank=0))
    orders = parse_orders([["0F0", "1F0", "1B0", "0B0"]])
    plan = Plan(num_layers=2, num_ranks=1, num_micro_batches=1, stages=stages, orders=orders, edges=(((0, 1),),))
    assert "edge [0, 1] leads from layer 1 to layer 0" in plan.problems()[0]


def test_a_layer_is_split_alike_on_all_paths_and_each_shard_is_on_one_rank() -> None:
    plan = cut_head()
    paths: Any = {"num_micro_batches": 2, "route_of_micro_batch": (0, 1), "num_ranks": 4, "orders": ((),) * 4}
    whole = (*plan.stages, Stage(first=1, stop=2, rank=2))
    arrows: tuple[tuple[int, int], ...] = ((0, 4), (4, 3))
    found = replace(plan, **paths, stages=whole, routes=(*plan.routes, (0, 4, 3)), edges=(*plan.edges, arrows))
    assert "layer 1 is in 2 shards in stage 1 and whole in stage 4" in found.problems()[0]
    again = (*plan.stages, *(Stage(first=1, stop=2, rank=2 + k, shard=(k, 2)) for k in range(2)))
    arrows = ((0, 4), (0, 5), (4, 3), (5, 3))
    found = replace(plan, **paths, stages=again, routes=(*plan.routes, (0, 4, 5, 3)), edges=(*plan.edges, arrows))
    assert "stages 1 and 4 are the same shard of layer 1 on ranks 0 and 2" in found.problems()[0]


def test_a_layer_that_no_stage_holds_is_named() -> None:
    assert "no stage holds layer 3 of 4" in replace(cut_head(), num_layers=4).problems()[0]


def test_what_knows_chains_only_says_so() -> None:
    from octopipe.plans.price import hop_times
    from octopipe.runtime.slots import rank_program

    plan, costs = cut_head(), CostTable.uniform(num_layers=3)
    with pytest.raises(OctoPipeError, match="fork or join"):
        hop_times(plan, costs)
    with pytest.raises(OctoPipeError, match="fork or join"):
        rank_program(lower(plan, costs), 0)


def test_a_path_is_told_by_the_ranks_that_it_passes() -> None:
    from octopipe.cli.verbs.numbers import path_words
    from octopipe.plans.plan import Plan, Stage

    stages = (
        Stage(first=0, stop=2, rank=1),
        Stage(first=2, stop=3, rank=0, shard=(0, 2)),
        Stage(first=2, stop=3, rank=1, shard=(1, 2)),
        Stage(first=3, stop=4, rank=0),
    )
    forked = Plan(
        model="m",
        num_layers=4,
        num_ranks=2,
        num_micro_batches=1,
        stages=stages,
        routes=((0, 1, 2, 3),),
        route_of_micro_batch=(0,),
        edges=(((0, 1), (0, 2), (1, 3), (2, 3)),),
        orders=((), ()),
    )
    assert path_words(forked).endswith(": 1 > (0 1) > 0")
