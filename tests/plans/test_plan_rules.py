"""The rules of a plan at their edges: one before, one past, and the tables against dictionaries."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plans import random_plan
from twin import inputs_of

from octopipe.base.errors import PlanError
from octopipe.plans.plan import KINDS, Op, Plan, Stage, parse_orders, route_neighbours, with_rank_order


def plan_of(*rows: str, stages: Any = None, layers: int = 2, ranks: int | None = None, **more: Any) -> Plan:
    orders = parse_orders([row.split() for row in rows])
    found = {op.micro_batch for order in orders for op in order}
    return Plan(
        num_layers=layers,
        num_ranks=len(rows) if ranks is None else ranks,
        num_micro_batches=more.pop("micro_batches", len(found)),
        stages=stages or (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1)),
        orders=orders,
        **more,
    )


GOOD = ("0F0 0B0", "1F0 1B0")


@pytest.mark.parametrize("seed", range(25))
def test_tables_say_what_the_orders_say(seed: int) -> None:
    plan = random_plan(random.Random(seed), routes=1 + seed % 3)
    t, preds = plan.table(), plan.predecessor_table()
    ops = [op for order in plan.orders for op in order]
    ranks = [rank for rank, order in enumerate(plan.orders) for _ in order]
    assert [plan.op(k) for k in range(len(ops))] == ops and t.rank.tolist() == ranks
    assert t.offsets.tolist() == [sum(map(len, plan.orders[:r])) for r in range(plan.num_ranks + 1)]
    number = {op: k for k, op in enumerate(ops)}
    assert t.index.shape == (5, len(plan.stages), plan.num_micro_batches)
    for (code, s, m), found in np.ndenumerate(t.index):
        assert found == number.get(Op(s, KINDS[code], m), -1)
    assert preds.shape == (len(ops), 3) and preds.min() >= -1
    graph = with_rank_order(t, preds)
    for k, op in enumerate(ops):
        needed = inputs_of(plan, op, set(ops))
        assert set(plan.predecessors(op)) == set(needed)
        assert sorted(p for p in preds[k].tolist() if p >= 0) == sorted(number[p] for p in needed)
        assert graph[k, :3].tolist() == preds[k].tolist()
        assert graph[k, 3] == (k - 1 if k and ranks[k - 1] == ranks[k] else -1)
    # By what they mean: own forward, or the forward before; R; the gradient of the stage after.
    for k, op in enumerate(ops):
        if op.kind in "IB":
            assert preds[k, 0] == number[Op(op.stage, "F", op.micro_batch)]
            assert preds[k, 1] == number.get(Op(op.stage, "R", op.micro_batch), -1)
        else:
            assert preds[k, 1:].tolist() == [-1, -1]


def test_ranks_without_ops_begin_and_end_where_they_stand() -> None:
    stages = (Stage(first=0, stop=1, rank=1), Stage(first=1, stop=2, rank=3))
    plan = plan_of("", "0F0 0B0", "", "1F0 1B0", "", stages=stages)
    assert plan.problems() == []
    assert with_rank_order(plan.table(), plan.predecessor_table())[:, 3].tolist() == [-1, 0, -1, 2]


def test_neighbours_of_a_stage_that_a_route_leaves_out_are_none() -> None:
    stages = tuple(Stage(first=f, stop=e, rank=0) for f, e in ((0, 1), (1, 2), (0, 2)))
    plan = plan_of("0F0 1F0 1B0 0B0 2F1 2B1", stages=stages, routes=((0, 1), (2,)), route_of_micro_batch=(0, 1))
    assert plan.problems() == []
    before, after = route_neighbours(plan)
    assert before.tolist() == [[-1, 0, -1], [-1, -1, -1]] and after.tolist() == [[1, -1, -1], [-1, -1, -1]]


def test_a_plan_with_other_orders_has_tables_of_its_own() -> None:
    plan = plan_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    plan.table(), plan.predecessor_table()
    other = replace(plan, orders=parse_orders([["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]]))
    assert other.op(2) == Op(0, "B", 1) and other.predecessors(Op(1, "B", 1)) == (Op(1, "F", 1),)
    same = replace(other, orders=plan.orders)
    assert same == plan and same != other  # though only one of them has made its tables
    same.table(), same.predecessor_table()
    assert same == plan


def test_a_plan_says_what_it_is_and_was_made_by() -> None:
    plan = plan_of(*GOOD)
    assert "None" not in repr(plan) and "2 layers in 2 stages on 2 ranks" in repr(plan)
    assert "1f1b on tiny" in repr(replace(plan, model="tiny", extra={"system": "1f1b"}))


@pytest.mark.parametrize(("micro_batches", "ops", "made"), [(1, 0, True), (2, 0, False), (2, 2, True), (3, 2, False)])
def test_more_micro_batches_than_ops_are_refused_at_once(micro_batches: int, ops: int, made: bool) -> None:
    row = " ".join(["0F0", "0B0"][:ops])
    stages = (Stage(first=0, stop=2, rank=0),)
    if made:
        plan = plan_of(row, stages=stages, micro_batches=micro_batches)
        assert plan.route_of_micro_batch == (0,) * micro_batches and plan.problems()
    else:
        with pytest.raises(PlanError, match=f"{micro_batches} micro-batches but {ops} ops"):
            plan_of(row, stages=stages, micro_batches=micro_batches)


@pytest.mark.parametrize(("recompute", "layers"), [(False, ()), (True, (3, 4, 5)), ((4,), (4,)), ((), ())])
def test_a_stage_names_the_layers_it_recomputes(recompute: Any, layers: tuple[int, ...]) -> None:
    stage = Stage(first=3, stop=6, rank=0, recompute=recompute)
    assert stage.recomputed_layers == layers and stage.num_layers == 3
    assert Stage(first=0, stop=1, rank=0).recompute is False


def test_views_of_a_plan() -> None:
    stages = tuple(Stage(first=f, stop=e, rank=r) for f, e, r in ((0, 1, 1), (1, 3, 0), (0, 3, 1)))
    plan = plan_of(
        "1F0 1I0 1W0", "0F0 0B0 2F1 2B1", stages=stages, layers=3, routes=((0, 1), (2,)), route_of_micro_batch=(0, 1)
    )
    assert plan.problems() == []
    assert plan.stages_of_rank(0) == (1,) and plan.stages_of_rank(1) == (0, 2)
    assert plan.partition == (1, 2, 3) and plan.splits_backward
    assert plan.replicas() == {1: (0, 1), 2: (0, 1)}  # rank 1 alone holds layer 0, twice
    assert not plan_of(*GOOD).splits_backward and plan_of(*GOOD).replicas() == {}
    assert plan.to_csv() == "1F0,1I0,1W0\n0F0,0B0,2F1,2B1\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"stages": ()}, "no stages"),
        ({"stages": (Stage(first=-1, stop=1, rank=0), Stage(first=1, stop=2, rank=1))}, "stage 0 has layers [-1, 1)"),
        ({"stages": (Stage(first=0, stop=1, rank=-1), Stage(first=1, stop=2, rank=1))}, "stage 0 is on rank -1"),
        ({"stages": (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=2))}, "stage 1 is on rank 2"),
        ({"routes": ((0, 1), (0, 2)), "route_of_micro_batch": (0,)}, "route 1 names stage 2; stages go from 0 to 1"),
        ({"routes": ((0, 1), (-1, 1)), "route_of_micro_batch": (0,)}, "route 1 names stage -1"),
        ({"routes": ((0, 1), ()), "route_of_micro_batch": (0,)}, "route 1 is empty"),
        ({"routes": ((0, 1), (1,)), "route_of_micro_batch": (0,)}, "starts at layer 1 but layer 0 comes next"),
        ({"route_of_micro_batch": (1,)}, "micro-batch 0 takes route 1; routes go from 0 to 0"),
        ({"route_of_micro_batch": (-1,)}, "micro-batch 0 takes route -1"),
        ({"route_of_micro_batch": (0, 0)}, "has 2 entries for 1 micro-batches"),
        ({"orders": ((Op(0, "F", 0), Op(0, "B", 0), Op(-1, "F", 0)), (Op(1, "F", 0), Op(1, "B", 0)))}, "runs -1F0"),
        ({"orders": ((Op(0, "F", 0), Op(0, "B", 0), Op(0, "F", -1)), (Op(1, "F", 0), Op(1, "B", 0)))}, "runs 0F-1"),
        ({"orders": ((Op(0, "F", 0), Op(0, "B", 0), Op(0, "F", 1)), (Op(1, "F", 0), Op(1, "B", 0)))}, "runs 0F1, but"),
        ({"orders": ((Op(0, "F", 0), Op(0, "B", 0), Op(2, "F", 0)), (Op(1, "F", 0), Op(1, "B", 0)))}, "runs 2F0, but"),
    ],
)  # fmt: skip
def test_what_lies_one_past_either_end_is_named_alone(change: dict[str, Any], words: str) -> None:
    problems = replace(plan_of(*GOOD), **change).problems()
    assert any(words in problem for problem in problems), problems
    assert plan_of(*GOOD).problems() == []


def test_ops_of_a_stage_that_its_micro_batch_does_not_pass_are_named() -> None:
    stages = tuple(Stage(first=f, stop=e, rank=0) for f, e in ((0, 1), (1, 2), (0, 2)))
    rows = "0F0 1F0 1B0 0B0 2F0 2F1 2B1"
    plan = plan_of(rows, stages=stages, routes=((0, 1), (2,)), route_of_micro_batch=(0, 1))
    assert plan.problems() == ["rank 0 runs 2F0, but micro-batch 0 does not pass that stage"]
    lonely = plan_of("0F0 1F0 1B0 0B0", stages=stages)
    assert replace(lonely, routes=((0, 1),)).problems() == ["stage 2 is on no route; add it to a route or remove it"]


@pytest.mark.parametrize(("rows", "problem"), [
    (("0F0 0B0 0W0", "1F0 1B0"), "rank 0 runs both 0B0 and 0W0; B is I and W in one: keep one form"),
    (("0F0 0I0 0B0", "1F0 1B0"), "rank 0 runs both 0B0 and 0I0; B is I and W in one: keep one form"),
    (("0F0 0I0", "1F0 1B0"), "rank 0 runs 0I0 without 0W0; add 0W0 after it"),
    (("0F0 0W0", "1F0 1B0"), "rank 0 runs 0W0 without 0I0; add 0I0 before it"),
    (("0F0", "1F0 1B0"), "rank 0 has no backward for 0F0; add 0B0, or 0I0 and 0W0"),
    (("0B0", "1F0 1B0"), "rank 0 never runs 0F0; add it"),
    (("0F0 0R0 0B0", "1F0 1B0"), "rank 0 runs 0R0, but stage 0 does not recompute; set its recompute or remove it"),
    (("0F0 0B0", "1F0 1B0 0B0"), "rank 1 runs 0B0 and rank 0 does too; each op runs once: remove one"),
    (("0B0 0F0", "1F0 1B0"), "rank 0 runs 0B0 before 0F0; move 0F0 earlier"),
])  # fmt: skip
def test_one_mistake_is_one_line(rows: tuple[str, ...], problem: str) -> None:
    assert plan_of(*rows).problems() == [problem]


@pytest.mark.parametrize(
    ("row", "problems"),
    [
        ("0F0 0B0 0F1 0B1", []),
        ("0F0 0R0 0B0 0F1 0I1 0W1", []),
        ("0R0 0F0 0B0 0F1 0B1", ["rank 0 runs 0R0 before 0F0; move 0F0 earlier"]),
        ("0R0 0F0 0F1 0B1 0B0", ["rank 0 runs 0R0 before 0F0; move 0F0 earlier"]),
        (
            "0F0 0F1 0B1 0B0",
            ["rank 0 keeps no activations of 0F0 (stage 0 recomputes) but never runs 0R0; add it before 0B0"],
        ),
        (
            "0F0 0B0 0F1 0R1 0I1 0W1".replace("0B0 0F1", "0F1 0B0"),
            ["rank 0 keeps no activations of 0F0 (stage 0 recomputes) but never runs 0R0; add it before 0B0"],
        ),
    ],
)
def test_what_is_not_kept_is_computed_again_unless_its_gradient_follows_at_once(row: str, problems: list[str]) -> None:
    assert plan_of(row, stages=(Stage(first=0, stop=2, rank=0, recompute=True),)).problems() == problems


def test_a_recomputing_stage_asks_nothing_of_micro_batches_that_pass_it_by() -> None:
    stages = (Stage(first=0, stop=2, rank=0, recompute=True), Stage(first=0, stop=2, rank=0))
    plan = plan_of("1F0 1B0 0F1 0B1", stages=stages, routes=((0,), (1,)), route_of_micro_batch=(1, 0))
    assert plan.problems() == []


@pytest.mark.parametrize("wrong", [19, 20, 25])
def test_at_most_twenty_ops_that_cannot_be_are_listed(wrong: int) -> None:
    row = " ".join(["0F0", "0B0", *(f"7F{m}" for m in range(wrong))])
    plan = plan_of(row, stages=(Stage(first=0, stop=2, rank=0),), micro_batches=1)
    assert len(plan.problems()) == min(wrong, 20)


@pytest.mark.parametrize(("there", "back"), [(6, 6), (6, 7)])
def test_a_cycle_of_more_than_twelve_ops_is_told_in_part(there: int, back: int) -> None:
    """Two routes meet on the first rank and on the last; there the one waits for the other, and here the other way."""
    layers, ranks = back, there + back - 2
    stages = [Stage(first=k, stop=k + 1 if k < there - 1 else layers, rank=k) for k in range(there)]
    inner = [0, *range(there, ranks), there - 1]
    stages += [Stage(first=k, stop=k + 1, rank=inner[k]) for k in range(back)]
    rows = [f"{r}F0 {r}B0" for r in range(there)] + [f"{there + k}F1 {there + k}B1" for k in range(1, back - 1)]
    last, other = there - 1, there + back - 1
    rows[0] = f"0F0 0B0 {there}F1 {there}B1"
    rows[last] = f"{last}F0 {other}F1 {last}B0 {other}B1"
    plan = plan_of(
        *rows, stages=tuple(stages), layers=layers,
        routes=(tuple(range(there)), tuple(range(there, there + back))), route_of_micro_batch=(0, 1),
    )  # fmt: skip
    (problem,) = plan.problems()
    words = problem.partition("cycle: ")[2].partition(";")[0].split(" needs ")
    assert len(words) == 13 and len(set(words)) == (12 if there + back == 12 else 13)
    assert (words[-1] == "...") is (there + back > 12) and (words[0] == words[-1]) is (there + back == 12)
    assert problem.endswith("; reorder one of these ranks")
