"""A rank's program made ready to run, against what the plan says op by op."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
from plans import random_plan  # noqa: E402
from twin import inputs_of  # noqa: E402

from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import CODES, KINDS, Op, Plan, Stage, parse_orders  # noqa: E402
from octopipe.runtime.slots import RECEIVE, SEND, RankProgram, queue_of, rank_program  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402
from octopipe.simulation.lowering import lower  # noqa: E402


def recomputing() -> Plan:
    """Only the first micro-batch of stage 0 recomputes; stage 1 keeps everything."""
    orders = [["0F0", "0F1", "0R0", "0B0", "0R1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    stages = (Stage(first=0, stop=2, rank=0, recompute=True), Stage(first=2, stop=4, rank=1))
    return Plan(num_layers=4, num_ranks=2, num_micro_batches=2, stages=stages, orders=parse_orders(orders)).check()


def plans() -> list[Plan]:
    costs = CostTable.uniform(num_layers=8)
    named = [build_plan(name, costs, 2, 4) for name in ("1f1b", "zb-h1", "interleaved", "chimera")]
    drawn = [random_plan(random.Random(seed)) for seed in range(12)]
    return [*named, build_plan("zb-v", costs, 4, 4), recomputing(), *drawn]


def programs() -> list[RankProgram]:
    return [
        rank_program(lower(plan, CostTable.uniform(num_layers=plan.num_layers)), rank)
        for plan in plans()
        for rank in range(plan.num_ranks)
    ]


PROGRAMS = programs()


def route(plan: Plan, micro_batch: int) -> tuple[int, ...]:
    return plan.routes[plan.route_of_micro_batch[micro_batch]]


def all_ops(plan: Plan) -> set[Op]:
    return {op for order in plan.orders for op in order}


@pytest.mark.parametrize("made", PROGRAMS)
def test_cells_know_their_place_on_the_route_and_their_neighbours_on_the_rank(made: RankProgram) -> None:
    plan, cells = made.plan, {(c.stage, c.micro_batch): c for c in made.cells}
    expected = {
        (s, m) for m in range(plan.num_micro_batches) for s in route(plan, m) if plan.stages[s].rank == made.rank
    }
    assert set(cells) == expected
    for (s, m), cell in cells.items():
        way = route(plan, m)
        at = way.index(s)
        assert cell.takes_batch == (s == way[0]) and cell.computes_loss == (s == way[-1])
        assert cell.recomputes == (Op(s, "R", m) in all_ops(plan))
        assert cell.before is (cells.get((way[at - 1], m)) if at else None)
        assert cell.after is (cells.get((way[at + 1], m)) if at + 1 < len(way) else None)
    assert made.needs_batch == any(s == route(plan, m)[0] for s, m in expected)
    assert made.needs_target == any(s == route(plan, m)[-1] for s, m in expected)


@pytest.mark.parametrize("made", PROGRAMS)
def test_slots_are_the_hops_between_ranks_and_ops_wait_for_theirs(made: RankProgram) -> None:
    plan, rank = made.plan, made.rank
    ops = all_ops(plan)
    hops = set()
    for consumer in ops:
        for producer in inputs_of(plan, consumer, ops):
            here, there = plan.stages[producer.stage].rank, plan.stages[consumer.stage].rank
            if here != there and rank in (here, there):
                sending = here == rank
                hops.add((producer, consumer, sending, there if sending else here, producer.kind == "F"))
    assert {(s.op, s.consumer, s.sending, s.peer, s.forward) for s in made.slots} == hops
    assert len(made.slots) == len(hops)
    assert [(s.op, s.sending) for s in made.slots] == [
        (step.op, step.code == SEND) for step in made.steps if step.code >= SEND
    ]
    computes = [step for step in made.steps if step.code < SEND]
    assert [(step.op, step.number) for step in computes] == [(op, k) for k, op in enumerate(plan.orders[rank])]
    for step in computes:
        assert KINDS[step.code] == step.op.kind and CODES[step.op.kind] == step.code
        assert (step.cell.stage, step.cell.micro_batch) == (step.op.stage, step.op.micro_batch)
        waits = [s for s in made.slots if not s.sending and s.consumer == step.op]
        assert [step.slot] == (waits or [None])
    for slot in made.slots:
        mine = slot.op if slot.sending else slot.consumer
        assert (slot.cell.stage, slot.cell.micro_batch) == (mine.stage, mine.micro_batch)
    answers = {id(s.cell): s for s in made.slots if not s.sending and not s.forward}
    for cell in made.cells:
        assert cell.gradient_slot is answers.get(id(cell))
    assert {step.code for step in made.steps if step.code > SEND} <= {RECEIVE}


@pytest.mark.parametrize("made", PROGRAMS)
def test_layers_are_done_with_their_last_weight_gradient(made: RankProgram) -> None:
    plan = made.plan
    order = plan.orders[made.rank]

    def layers(op: Op) -> set[int]:
        return set(range(plan.stages[op.stage].first, plan.stages[op.stage].stop)) if op.kind in "WB" else set()

    for step in made.steps:
        if step.code < SEND:
            later = set().union(*(layers(op) for op in order[step.number + 1 :]))
            assert set(step.layers_done) == layers(order[step.number]) - later


@pytest.mark.parametrize("made", PROGRAMS)
def test_a_send_is_released_by_the_first_op_that_proves_it_was_received(made: RankProgram) -> None:
    plan = made.plan
    ops = all_ops(plan)
    position = {op: (rank, k) for rank, order in enumerate(plan.orders) for k, op in enumerate(order)}
    behind: dict[Op, set[Op]] = {}

    def ancestors(op: Op) -> set[Op]:
        """Everything that has certainly ended when the op starts."""
        if op not in behind:
            rank, k = position[op]
            near = [*inputs_of(plan, op, ops), *([plan.orders[rank][k - 1]] if k else [])]
            behind[op] = set(near).union(*(ancestors(x) for x in near))
        return behind[op]

    released = {(s.op, s.consumer): step.number for step in made.steps for s in step.release}
    at_end = {(s.op, s.consumer) for s in made.last_releases}
    order = plan.orders[made.rank]
    for slot in made.slots:
        if slot.sending:
            after = position[slot.op][1]
            proof = [k for k, op in enumerate(order) if k > after and slot.consumer in ancestors(op)]
            assert released.get((slot.op, slot.consumer)) == (proof[0] if proof else None)
            assert ((slot.op, slot.consumer) in at_end) == (not proof)


def test_queues_are_named_alike_at_both_ends() -> None:
    assert queue_of("directed", 0, 1, True) == queue_of("directed", 1, 0, False) == (0, 1)
    assert queue_of("directed", 0, 1, False) == queue_of("directed", 1, 0, True) == (1, 0)
    for a, b in ((2, 5), (5, 2)):
        assert queue_of("pair", a, b, True) == queue_of("pair", a, b, False) == (2, 5)
    assert queue_of("single", 0, 1, True) == queue_of("blocking", 3, 1, False) == ()


@pytest.mark.parametrize("made", PROGRAMS)
def test_before_the_first_step_nothing_has_moved(made: RankProgram) -> None:
    for slot in made.slots:
        assert not slot.posted and not slot.deferred
        assert (slot.started, slot.ended, slot.nbytes) == (0.0, 0.0, 0)
