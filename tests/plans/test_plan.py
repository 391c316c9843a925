"""Plans: the text of ops, what makes a plan wrong, and files that round-trip or fail in one line."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import from_csv, random_plan

from octopipe.base.errors import OctoPipeError, PlanError
from octopipe.costs.table import CostTable
from octopipe.plans import rules as plan_rules
from octopipe.plans.file import load_plan, plan_from_json, plan_to_json, save_plan
from octopipe.plans.plan import Op, Plan, Stage, parse_orders
from octopipe.plans.rules import MAX_PROBLEMS
from octopipe.search.systems import build_plan

seeds = st.integers(0, 2**32 - 1)


def small(**changes: object) -> Plan:
    fields: dict[str, object] = {
        "num_layers": 4,
        "num_ranks": 2,
        "num_micro_batches": 2,
        "stages": (Stage(first=0, stop=2, rank=0), Stage(first=2, stop=4, rank=1)),
        "orders": orders("0F0 0F1 0I0 0W0 0B1", "1F0 1B0 1F1 1B1"),
    }
    return Plan(**(fields | changes))  # type: ignore[arg-type]


def orders(*rows: str) -> tuple[tuple[Op, ...], ...]:
    return tuple(tuple(map(Op.parse, row.split())) for row in rows)


def test_a_good_plan_has_no_problems() -> None:
    assert small().problems() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"orders": orders("0I0 0F0 0F1 0W0 0B1", "1F0 1B0 1F1 1B1")}, "rank 0 runs 0I0 before 0F0; move 0F0 earlier"),
        ({"orders": orders("0F0 0F1 0W0 0I0 0B1", "1F0 1B0 1F1 1B1")}, "rank 0 runs 0W0 before 0I0"),
        ({"orders": orders("0F0 0I0 0W0 0B1", "1F0 1B0 1F1 1B1")}, "rank 0 never runs 0F1; add it"),
        ({"orders": orders("0F0 0F1 0I0 0W0", "1F0 1B0 1F1 1B1")}, "no backward for 0F1; add 0B1, or 0I1 and 0W1"),
        ({"orders": orders("0F0 0F1 0I0 0B1", "1F0 1B0 1F1 1B1")}, "runs 0I0 without 0W0; add 0W0 after it"),
        ({"orders": orders("0F0 0F1 0W0 0B1", "1F0 1B0 1F1 1B1")}, "runs 0W0 without 0I0"),
        ({"orders": orders("0F0 0F0 0F1 0I0 0W0 0B1", "1F0 1B0 1F1 1B1")}, "each op runs once"),
        ({"orders": orders("0F0 0F1 0I0 0W0 0B0 0B1", "1F0 1B0 1F1 1B1")}, "both 0B0 and 0I0"),
        ({"orders": orders("0F0 0F1 0I0 0W0 0B1 1F0", "1B0 1F1 1B1")}, "stage 1 is on rank 1; move it to rank 1"),
        ({"orders": orders("0F0 0F1 0I0 0W0 0B1 7F0", "1F0 1B0 1F1 1B1")}, "rank 0 runs 7F0, but stages go to 1"),
        ({"orders": orders("0F0 0F1 0R0 0I0 0W0 0B1", "1F0 1B0 1F1 1B1")}, "stage 0 does not recompute"),
        ({"orders": orders("0F0 0F1 0I0 0W0 0B1")}, "orders has 1 rows for 2 ranks"),
        ({"stages": (Stage(first=0, stop=2, rank=0), Stage(first=3, stop=4, rank=1))}, "layer 2 comes next"),
        ({"stages": (Stage(first=0, stop=2, rank=0), Stage(first=2, stop=3, rank=1))}, "ends at layer 3 of 4"),
        ({"stages": (Stage(first=0, stop=2, rank=0), Stage(first=2, stop=4, rank=5))}, "stage 1 is on rank 5"),
        ({"stages": (Stage(first=2, stop=2, rank=0), Stage(first=2, stop=4, rank=1))}, "stage 0 has layers [2, 2)"),
        ({"routes": ((0,),)}, "route 0 ends at layer 2"),
        ({"routes": ((0, 1), (0, 9)), "route_of_micro_batch": (0, 0)}, "route 1 names stage 9"),
        ({"route_of_micro_batch": (0, 3)}, "micro-batch 1 takes route 3"),
        ({"num_micro_batches": 0, "orders": ((), ())}, "num_micro_batches is 0"),
        (
            {"stages": (Stage(first=0, stop=2, rank=0, recompute=True), Stage(first=2, stop=4, rank=1))},
            "never runs 0R0; add it before 0I0",
        ),
        (
            {"stages": (Stage(first=0, stop=2, rank=0, recompute=(3,)), Stage(first=2, stop=4, rank=1))},
            "stage 0 recomputes layers [3]",
        ),
    ],
)
def test_every_mistake_is_named_with_its_place_and_remedy(changes: dict[str, object], words: str) -> None:
    assert any(words in problem for problem in small(**changes).problems()), small(**changes).problems()


def test_recompute_may_be_left_out_where_backward_follows_at_once() -> None:
    stages = (Stage(first=0, stop=2, rank=0), Stage(first=2, stop=4, rank=1, recompute=True))
    assert small(stages=stages).problems() == []


def test_ranks_that_wait_for_each_other_are_rejected_with_the_cycle() -> None:
    crossed = small(orders=orders("0F0 0I0 0W0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    (problem,) = crossed.problems()
    assert "wait for each other in a cycle" in problem
    assert "1F1 (rank 1) needs" in problem and "0F1 (rank 0)" in problem


@settings(max_examples=draws(300), deadline=None)
@given(seeds)
def test_shuffled_orders_are_rejected_exactly_when_no_execution_exists(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng)
    shuffled = []
    for order in plan.orders:
        row = list(order)
        for _ in range(rng.randint(0, 3)):
            if len(row) > 1:
                a, b = rng.sample(range(len(row)), 2)
                row[a], row[b] = row[b], row[a]
        shuffled.append(tuple(row))
    changed = replace(plan, orders=tuple(shuffled))
    head, done = [0] * plan.num_ranks, set()
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(changed.orders):
            while head[r] < len(row) and all(p in done for p in changed.predecessors(row[head[r]])):
                done.add(row[head[r]])
                head[r] += 1
                moved = True
    stuck = len(done) < sum(map(len, changed.orders))
    problems = [p for p in changed.problems() if "keeps no activations" not in p]
    assert bool(problems) == stuck


@settings(max_examples=draws(100), deadline=None)
@given(seeds)
def test_plan_files_round_trip(seed: int) -> None:
    plan = random_plan(random.Random(seed), routes=2).with_extra(system="random", notes=[1, {"a": None}])
    again = plan_from_json(plan_to_json(plan))
    assert again == plan
    assert plan_to_json(again) == plan_to_json(plan)


def test_csv_text_round_trips_and_reads_like_pytorchs() -> None:
    plan = small()
    assert plan.to_csv().splitlines()[0] == "0F0,0F1,0I0,0W0,0B1"
    assert from_csv(plan.to_csv()) == plan.orders
    assert from_csv("0F0,,0B0\n") == orders("0F0 0B0")


def test_the_design_files_example_loads(tmp_path: Path) -> None:
    costs = CostTable.uniform(num_layers=6)
    path = tmp_path / "plan.json"
    save_plan(build_plan("1f1b", costs, 3, 4), path)
    raw = json.loads(path.read_text())
    assert raw["format"] == "octopipe.plan/1" and raw["stages"][0] == {"layers": [0, 2], "rank": 0, "recompute": False}
    del raw["routes"], raw["route_of_micro_batch"]
    raw["predicted"] = {"step_ms": 1}
    path.write_text(json.dumps(raw))
    assert load_plan(path).extra["predicted"] == {"step_ms": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "42",
        '{"format": "octopipe.plan/2"}',
        '{"format": "octopipe.plan/1"}',
        "[" * 100_000,
        '{"format": "octopipe.plan/1", "num_layers": "x"}',
        json.dumps({"format": "octopipe.plan/1", "num_layers": 1, "num_ranks": 1, "num_micro_batches": 10**18,
                    "stages": [{"layers": [0, 1], "rank": 0}], "orders": [["0F0", "0B0"]]}),
        json.dumps({"format": "octopipe.plan/1", "num_layers": 10**18, "num_ranks": 10**18, "num_micro_batches": 1,
                    "stages": [{"layers": [0, 10**18], "rank": 0}], "orders": [["0F0", "0B0"]]}),
        json.dumps({"format": "octopipe.plan/1", "num_layers": 1, "num_ranks": 1, "num_micro_batches": 1,
                    "stages": [{"layers": [0, 1], "rank": 0}], "orders": [["0F0", "0Q0"]]}),
        json.dumps({"format": "octopipe.plan/1", "num_layers": 1, "num_ranks": 1, "num_micro_batches": 1,
                    "stages": [{"layers": [0, 1], "rank": 0}], "orders": [["0F99999999999999999999", "0B0"]]}),
    ],
)  # fmt: skip
def test_bad_files_give_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(OctoPipeError) as caught:
        load_plan(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_every_problem_of_a_file_is_carried_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_plan(small(orders=orders("0F0 0F1 0I0 0W0", "1F0 1B0 1F1")), path)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert len(caught.value.problems) == 2
    assert all(p.startswith(str(path)) for p in caught.value.problems)


def test_a_failed_write_says_where(tmp_path: Path) -> None:
    with pytest.raises(OctoPipeError, match="cannot be written"):
        save_plan(small(), tmp_path / "no" / "such" / "folder.json")


# -- bounds, one past and one before ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_neighbours_on_a_route_are_those_beside_it(seed: int) -> None:
    plan = random_plan(random.Random(seed), routes=1 + seed % 2)
    for m in range(plan.num_micro_batches):
        route = (None, *plan.routes[plan.route_of_micro_batch[m]], None)
        for before, stage, after in zip(route, route[1:], route[2:]):
            assert plan.stage_before(stage, m) == (() if before is None else (before,))
            assert plan.stage_after(stage, m) == (() if after is None else (after,))


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({"rank": 1}, True), ({"rank": 2}, False), ({"rank": -1}, False),
        ({"recompute": (2, 3)}, True), ({"recompute": (4,)}, False), ({"recompute": (1,)}, False),
        ({"recompute": (2, 2)}, False), ({"stop": 5}, False),
    ],
)  # fmt: skip
def test_ranks_and_layers_end_where_they_end(change: dict[str, Any], good: bool) -> None:
    stages = (Stage(first=0, stop=2, rank=0), Stage(**{"first": 2, "stop": 4, "rank": 1, **change}))
    orders = parse_orders([["0F0", "0B0"], ["1F0", "1R0", "1B0"] if change.get("recompute") else ["1F0", "1B0"]])
    plan = Plan(num_layers=4, num_ranks=2, num_micro_batches=1, stages=stages, orders=orders)
    assert (plan.problems() == []) is good, plan.problems()


@pytest.mark.parametrize("missing", [1, 19, 20, 21, 40])
def test_at_most_twenty_problems_are_listed(missing: int) -> None:
    orders = [[f"0F{m}" for m in range(50)] + [f"0B{m}" for m in range(missing, 50)]]
    plan = Plan(
        num_layers=1, num_ranks=1, num_micro_batches=50, stages=(Stage(first=0, stop=1, rank=0),),
        orders=parse_orders(orders),
    )  # fmt: skip
    assert len(plan.problems()) == min(missing, MAX_PROBLEMS) and MAX_PROBLEMS == 20


def test_a_cycle_is_told_from_its_first_op_back_to_it() -> None:
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    orders = parse_orders([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    plan = Plan(num_layers=2, num_ranks=2, num_micro_batches=2, stages=stages, orders=orders)
    (problem,) = plan.problems()
    words = problem.partition(": ")[2].partition(";")[0].split(" needs ")
    assert len(words) >= 3 and words[0] == words[-1] and len(set(words)) == len(words) - 1


@settings(max_examples=draws(200), deadline=None)
@given(seed=seeds)
def test_whole_arrays_and_single_ops_agree_on_what_is_right(seed: int) -> None:
    """One thing done to a sound plan: the quick look says "sound" exactly where the slow one finds nothing."""
    lot = random.Random(seed)
    plan = random_plan(lot)
    orders = [list(order) for order in plan.orders]
    rank = lot.choice([r for r, order in enumerate(orders) if order])
    at = lot.randrange(len(orders[rank]))
    op = orders[rank][at]
    damage = lot.randrange(7)
    if damage == 1:
        del orders[rank][at]
    elif damage == 2:
        orders[lot.randrange(len(orders))].append(op)
    elif damage == 3:
        orders[rank][at] = Op(op.stage, lot.choice("FRIWB"), op.micro_batch)
    elif damage == 4:
        orders[rank][at] = Op(lot.choice((-1, op.stage + 1, len(plan.stages), 1 << 70)), op.kind, op.micro_batch)
    elif damage == 5:
        orders[rank][at] = Op(op.stage, op.kind, lot.choice((-1, op.micro_batch + 1, plan.num_micro_batches)))
    elif damage == 6:
        orders[rank].pop(at)
        orders[lot.randrange(len(orders))].append(op)
    changed = replace(plan, orders=tuple(map(tuple, orders)))
    quick = plan_rules._ops_are_right(changed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_rules, "_ops_are_right", lambda plan: False)
        assert quick == (plan_rules._op_problems(changed) == [])
    assert quick or damage
