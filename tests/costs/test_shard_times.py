"""Measured times of shards: prices, the search's own schedules, bounds and files all take them."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.profile import Profile
from octopipe.costs.profile_file import profile_from_object
from octopipe.costs.shard_times import ShardTimes, fitted, parts_of
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan, Stage, parse_orders
from octopipe.search.graphs.cut_head import CutHeadSearch
from octopipe.simulation.bounds.bounds import lower_bound
from octopipe.simulation.simulator import simulate

HEAD = ShardTimes(layer=2, fixed=(0.1, 0.0, 0.2), share=(1.0, 1.2, 0.8))
FILE = {"pattern": "ETL", "forward_ms": [1, 2, 3], "backward_ms": [0, 2, 3], "weight_ms": [1, 1, 2]}


def table(*times: ShardTimes, layers: int = 3) -> CostTable:
    return CostTable(
        model="headed",
        symbols="E" + "T" * (layers - 2) + "L",
        forward_ms=np.r_[np.ones(layers - 1), 4.0],
        input_ms=np.r_[np.ones(layers - 1), 5.0],
        weight_ms=np.r_[np.ones(layers - 1), 2.0],
        shard_times=times,
        tokens_per_micro_batch=4,
    )


def plan_of_two(backward: list[str]) -> Plan:
    stages = (
        Stage(first=0, stop=2, rank=0),
        Stage(first=2, stop=3, rank=0, shard=(0, 2)),
        Stage(first=2, stop=3, rank=1, shard=(1, 2)),
        Stage(first=3, stop=3, rank=1),
    )
    mine = [op.replace("S", "1") for op in backward]
    others = [op.replace("S", "2") for op in backward]
    orders = parse_orders([["0F0", "1F0", *mine, "0B0"], ["2F0", "3F0", "3B0", *others]])
    edges = (((0, 1), (0, 2), (1, 3), (2, 3)),)
    return Plan(num_layers=3, num_ranks=2, num_micro_batches=1, stages=stages, orders=orders, edges=edges).check()


@pytest.mark.parametrize("backward", [["SB0"], ["SI0", "SW0"]])
def test_a_shard_takes_what_was_measured_for_it(backward: list[str]) -> None:
    timeline = simulate(plan_of_two(backward), table(HEAD))
    took = {str(timeline.op(k)): float(timeline.spans.end_ms[k] - timeline.spans.start_ms[k]) for k in range(
        timeline.spans.stage.size)}  # fmt: skip
    assert took["1F0"] == took["2F0"] == pytest.approx(4.0 * (0.1 + 1.0 / 2))
    inward, weight = 5.0 * 1.2 / 2, 2.0 * (0.2 + 0.8 / 2)
    if backward == ["SB0"]:
        assert took["2B0"] == pytest.approx(inward + weight)
    else:
        assert took["2I0"] == pytest.approx(inward) and took["2W0"] == pytest.approx(weight)
    even = simulate(plan_of_two(backward), table())
    assert even.makespan_ms < timeline.makespan_ms


@pytest.mark.parametrize("seed", range(4))
def test_the_search_prices_shards_as_the_simulator_does(seed: int) -> None:
    rng = random.Random(seed)
    ranks, layers = rng.randint(2, 4), 9
    times = (
        ShardTimes(layer=0, fixed=(0.9, 0.0, 0.5), share=(0.1, 0.0, 0.5)),
        ShardTimes(layer=layers - 1, fixed=(0.05, 0.1, 0.0), share=(0.9, 1.1, 1.0)),
    )
    costs = table(*times, layers=layers)
    search = CutHeadSearch(costs=costs, num_ranks=ranks, num_micro_batches=3, budget_s=60, seed=seed, moves=200)
    made = search.run()
    assert made is not None
    plan, timeline = made
    assert plan.forks and simulate(plan, costs).makespan_ms == pytest.approx(timeline.makespan_ms)
    assert lower_bound(costs, ranks, 3, cuts_head=True).ms <= timeline.makespan_ms * (1 + 1e-9)


def test_bounds_hold_where_shards_are_shorter_together_than_the_whole() -> None:
    quick = ShardTimes(layer=2, fixed=(0.0, 0.0, 0.0), share=(0.5, 0.5, 0.5))
    for times in ((quick,), (HEAD,), ()):
        found = lower_bound(table(*times), 2, 1, cuts_head=True)
        assert found.ms <= simulate(plan_of_two(["SI0", "SW0"]), table(*times)).makespan_ms


def test_the_fit_goes_through_two_measurements_and_is_never_negative() -> None:
    found = fitted(7, {2: (0.6, 0.4, 0.3), 4: (0.35, 0.15, 0.3)})
    assert found.parts(2)[0] == pytest.approx(0.6) and found.parts(4)[0] == pytest.approx(0.35)
    assert found.fixed[1] == 0.0 and found.share[1] == pytest.approx(0.7)  # a straight line would start below zero
    assert min(*found.fixed, *found.share) >= 0
    assert found.parts(4)[2] == pytest.approx(0.3)
    assert parts_of((found,), 6, 4) == (0.25, 0.25, 0.25)
    assert parts_of((found,), 7, 4) == found.parts(4)


def test_a_profile_keeps_what_was_measured_of_shards() -> None:
    profile = profile_from_object({**FILE, "shards": [HEAD.record()]}, name="small")
    assert profile.costs.shard_times == (HEAD,)
    again = profile_from_object(json.loads(profile.to_json()), name="small")
    assert isinstance(again, Profile) and again.costs.shard_times == (HEAD,)
    assert again.costs.digest() != profile_from_object(FILE, name="small").costs.digest()


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        (3, "give a list of objects"),
        ([3], "give an object with layer, fixed and share"),
        ([{"layer": 3, "fixed": [0, 0, 0], "share": [1, 1, 1]}], "give one from 0 to 2"),
        ([{"layer": 2, "fixed": [0, 0], "share": [1, 1, 1]}], "give three numbers"),
        ([{"layer": 2, "fixed": [0, 0, -1], "share": [1, 1, 1]}], "give three numbers"),
        ([{"layer": 2, "fixed": [0, 0, 0], "share": [1, 1, float("inf")]}], "give three numbers"),
        ([HEAD.record(), HEAD.record()], "was given before"),
    ],
)
def test_bad_shards_are_one_line(shards: object, words: str) -> None:
    with pytest.raises(OctoPipeError, match=words) as caught:
        profile_from_object({**FILE, "shards": shards}, name="bad", where="bad.json")
    assert str(caught.value).startswith("bad.json") and "\n" not in str(caught.value)
