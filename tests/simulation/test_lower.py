"""Lowering: every channel model gets a program that cannot deadlock, and naive orders are caught."""

from __future__ import annotations

import random

import pytest
from effort import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import random_costs, random_plan

from octopipe.base.errors import DeadlockError, OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.search.systems import build_plan
from octopipe.simulation.lowering import CHANNELS, Program, lower, prove_deadlock_free
from octopipe.simulation.simulator import simulate

seeds = st.integers(0, 2**32 - 1)


def finishes(program: Program) -> bool:
    """Run the instruction lists with plain queues: an independent look at whether they can finish."""
    ranks = program.plan.num_ranks
    lists = [list(program.instructions(r)) for r in range(ranks)]
    queues: list[dict[object, list[int]]] = [{} for _ in range(ranks)]
    blocking = program.channel == "blocking"

    def queue_key(rank: int, kind: str, peer: int) -> object:
        return {"directed": (kind, peer), "pair": peer}.get(program.channel, "all")

    done: set[object] = set()
    moved_at: dict[int, set[int]] = {}
    head = [0] * ranks
    while True:
        progress = False
        for r in range(ranks):
            while head[r] < len(lists[r]):
                x = lists[r][head[r]]
                if x.kind == "compute":
                    received = program.plan.predecessors(x.op)
                    if not all(
                        p in done and (p.stage == x.op.stage or _here(program, p, x.op, r, done)) for p in received
                    ):
                        break
                    done.add(x.op)
                elif blocking:
                    moved_at.setdefault(x.transfer, set()).add(r)
                    if len(moved_at[x.transfer]) < 2:
                        break
                    done.add(("moved", x.transfer))
                else:
                    queues[r].setdefault(queue_key(r, x.kind, x.peer), []).append(x.transfer)
                head[r] += 1
                progress = True
        if not blocking:
            for r in range(ranks):
                for waiting in queues[r].values():
                    while waiting and _at_both_heads(program, queues, waiting[0]) and _made(program, waiting[0], done):
                        t = waiting[0]
                        for other in queues:
                            for q in other.values():
                                if q and q[0] == t:
                                    q.pop(0)
                        done.add(("moved", t))
                        progress = True
        if all(head[r] == len(lists[r]) for r in range(ranks)) and all(
            not q for rank_queues in queues for q in rank_queues.values()
        ):
            return True
        if not progress:
            return False


def _here(program: Program, producer: Op, consumer: Op, rank: int, done: set[object]) -> bool:
    if program.plan.stages[producer.stage].rank == rank:
        return True
    t = program.plan.table()
    number = t.index["FRIWB".index(consumer.kind), consumer.stage, consumer.micro_batch]
    return any(k >= 0 and program.plan.op(int(program.source[k])) == producer and ("moved", int(k)) in done
               for k in program.transfer_of[number])  # fmt: skip


def _made(program: Program, transfer: int, done: set[object]) -> bool:
    return program.plan.op(int(program.source[transfer])) in done


def _at_both_heads(program: Program, queues: list[dict[object, list[int]]], transfer: int) -> bool:
    return sum(1 for rank_queues in queues for q in rank_queues.values() if q and q[0] == transfer) == 2


@settings(max_examples=draws(150), deadline=None)
@given(seeds)
def test_lowered_programs_finish_under_every_channel_model(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, routes=rng.randint(1, 2))
    costs = random_costs(rng, plan)
    for channel in CHANNELS:
        program = lower(plan, costs, channel=channel)
        prove_deadlock_free(program)
        assert finishes(program)


@settings(max_examples=draws(150), deadline=None)
@given(seeds)
def test_the_proof_agrees_with_running_naive_programs(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng)
    costs = random_costs(rng, plan)
    for channel in CHANNELS:
        program = lower(plan, costs, channel=channel, naive=True, check=False)
        try:
            prove_deadlock_free(program)
            safe = True
        except DeadlockError as error:
            safe = False
            assert len(error.cycle) >= 2
        assert safe == finishes(program)


def test_each_transfer_has_one_send_and_one_receive_and_compute_keeps_its_order() -> None:
    rng = random.Random(7)
    for _ in range(50):
        plan = random_plan(rng, routes=2)
        costs = random_costs(rng, plan)
        for channel in CHANNELS:
            program = lower(plan, costs, channel=channel)
            seen: dict[int, list[str]] = {}
            for r in range(plan.num_ranks):
                ops = [x.op for x in program.instructions(r) if x.kind == "compute"]
                assert tuple(ops) == plan.orders[r]
                for x in program.instructions(r):
                    if x.kind != "compute":
                        seen.setdefault(x.transfer, []).append(x.kind)
            assert all(sorted(kinds) == ["receive", "send"] for kinds in seen.values())
            assert len(seen) == program.num_transfers


def crossing_plan() -> Plan:
    """The paper's figure 4: two ranks that both want to send first."""
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    orders = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))
    return Plan(
        num_layers=2,
        num_ranks=2,
        num_micro_batches=2,
        stages=stages,
        orders=tuple(tuple(map(Op.parse, row)) for row in orders),
    )


def test_naive_blocking_order_deadlocks_and_the_cycle_is_named() -> None:
    costs = CostTable.uniform(num_layers=2, p2p_ms=0.1)
    with pytest.raises(DeadlockError, match=r"deadlock under the blocking channel model: .*transfer of") as caught:
        lower(crossing_plan(), costs, channel="blocking", naive=True)
    assert len(caught.value.cycle) >= 2
    simulate(lower(crossing_plan(), costs, channel="blocking"), costs)


def test_overlap_aware_order_is_no_slower_than_blocking() -> None:
    costs = CostTable.uniform(num_layers=8, p2p_ms=0.2)
    plan = build_plan("interleaved", costs, 4, 8, chunks=2)
    assert simulate(plan, costs).step_ms < simulate(plan, costs, channel="blocking").step_ms


def test_unknown_channel_is_a_clear_error() -> None:
    costs = CostTable.uniform(num_layers=2)
    with pytest.raises(OctoPipeError, match="unknown channel model 'tcp'"):
        lower(crossing_plan(), costs, channel="tcp")  # type: ignore[arg-type]
