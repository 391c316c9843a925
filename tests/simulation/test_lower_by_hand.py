"""Instruction lists against ones put together op by op, and blocking orders against plain event loops."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from plans import random_costs, random_plan
from twin import hop_ms, timing

from octopipe.base.errors import DeadlockError
from octopipe.base.graph import topological_order
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import op_durations
from octopipe.plans.plan import Op, Plan, Stage, parse_orders
from octopipe.search.systems import build_plan
from octopipe.simulation import lowering
from octopipe.simulation.blocking import CANDIDATES, cheapest_positions, meetings
from octopipe.simulation.lowering import CHANNELS, PREFETCH, Instruction, Program, lower, prove_deadlock_free
from octopipe.simulation.simulator import simulate

SEEDS = range(30)


def setting(seed: int) -> tuple[Plan, CostTable]:
    rng = random.Random(seed)
    plan = random_plan(rng, routes=1 + seed % 2, max_micro_batches=6)
    return plan, random_costs(rng, plan, zeros=seed % 3 == 0)


def crossings(plan: Plan) -> list[tuple[Op, Op]]:
    """Producer and consumer of every transfer, by the consumer's number and then by what it needs."""
    found = []
    for rank, order in enumerate(plan.orders):
        for op in order:
            needed = plan.predecessors(op)
            found += [(p, op) for p in needed if plan.stages[p.stage].rank != rank]
    return found


def number_of(plan: Plan) -> dict[Op, int]:
    return {op: k for k, op in enumerate(op for order in plan.orders for op in order)}


@pytest.mark.parametrize("seed", SEEDS)
def test_transfers_are_the_needs_across_ranks_at_their_links_price(seed: int) -> None:
    plan, costs = setting(seed)
    program = lower(plan, costs)
    ends = [(plan.op(int(a)), plan.op(int(b))) for a, b in zip(program.source, program.target)]
    assert ends == crossings(plan) and program.num_transfers == len(ends)
    assert program.transfer_ms == pytest.approx([hop_ms(plan, costs, a, b) for a, b in ends])
    number = number_of(plan)
    for (op, column), carried in np.ndenumerate(program.transfer_of):
        producer = int(plan.predecessor_table()[op, column])
        if producer < 0 or (plan.op(producer), plan.op(op)) not in ends:
            assert carried == -1
        else:
            assert ends[carried] == (plan.op(producer), plan.op(op)) and number[plan.op(op)] == op


@pytest.mark.parametrize("seed", SEEDS)
def test_naive_programs_receive_right_before_and_send_right_after(seed: int) -> None:
    plan, costs = setting(seed)
    program = lower(plan, costs, naive=True, check=False)
    pairs = crossings(plan)
    for rank, order in enumerate(plan.orders):
        want: list[str] = []
        for op in order:
            want += [f"receive {k}" for k, (_, b) in enumerate(pairs) if b == op]
            want += [str(op)]
            want += [f"send {k}" for k, (a, _) in enumerate(pairs) if a == op]
        found = [str(x) if x.kind == "compute" else f"{x.kind} {x.transfer}" for x in program.instructions(rank)]
        assert found == want


@pytest.mark.parametrize("seed", SEEDS)
def test_directed_receives_stand_before_their_data_can_be_there(seed: int) -> None:
    """After the ops the rank has finished by then less two; none of a direction before an earlier sent one."""
    plan, costs = setting(seed)
    if not costs.num_layers:
        return
    times, _, _ = timing(plan, costs)
    program, pairs, number = lower(plan, costs), crossings(plan), number_of(plan)
    assert PREFETCH == 2
    slot: dict[int, float] = {}
    sent = sorted(range(len(pairs)), key=lambda k: (number[pairs[k][0]], number[pairs[k][1]]))
    for k in reversed(sent):
        a, b = pairs[k]
        order = plan.orders[plan.stages[b.stage].rank]
        finished = sum(times[op][1] <= times[a][1] for op in order)
        slot[k] = max(min(finished, order.index(b)) - 2, 0)
        later = [
            j
            for j in sent[sent.index(k) + 1 :]
            if plan.stages[pairs[j][0].stage].rank == plan.stages[a.stage].rank
            and plan.stages[pairs[j][1].stage].rank == plan.stages[b.stage].rank
        ]
        if later:
            slot[k] = min(slot[k], slot[later[0]])
    for rank, order in enumerate(plan.orders):
        lines: list[tuple[float, float, int, str]] = []
        for position, op in enumerate(order):
            lines.append((position + 0.5, position, number[op], str(op)))
        for k, (a, b) in enumerate(pairs):
            if plan.stages[a.stage].rank == rank:
                lines.append((order.index(a) + 1.0, number[a], k, f"send {k}"))
            if plan.stages[b.stage].rank == rank:
                lines.append((slot[k], number[a], k, f"receive {k}"))
        found = [str(x) if x.kind == "compute" else f"{x.kind} {x.transfer}" for x in program.instructions(rank)]
        assert found == [text for *_, text in sorted(lines)]


@pytest.mark.parametrize("seed", SEEDS)
def test_queues_of_a_direction_are_in_the_senders_order(seed: int) -> None:
    plan, costs = setting(seed)
    t, program, number = plan.table(), lower(plan, costs), number_of(plan)
    pairs = crossings(plan)
    before = lowering._before_in_direction(t, program.source, program.target)
    mismatched = 0
    for k, (a, b) in enumerate(pairs):
        ranks = plan.stages[a.stage].rank, plan.stages[b.stage].rank
        earlier = [
            (number[x], number[y], j)
            for j, (x, y) in enumerate(pairs)
            if (plan.stages[x.stage].rank, plan.stages[y.stage].rank) == ranks
            and (number[x], number[y]) < (number[a], number[b])
        ]
        assert before[k] == (t.stage.size + max(earlier)[2] if earlier else -1)
        mismatched += bool(earlier) and max(earlier)[1] > number[b]
    assert program.mismatched == mismatched


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("channel", ["pair", "single"])
def test_queued_programs_are_as_fast_as_the_order_of_readiness_or_faster(seed: int, channel: Any) -> None:
    """Transfers by the time they are ready, ops by their end, a producer before what it made."""
    plan, costs = setting(seed)
    times, _, _ = timing(plan, costs)
    best = lower(plan, costs, channel=channel)
    pairs = crossings(plan)
    kinds, ids, sizes = [], [], [0]
    order_of = {op: k for k, op in enumerate(sorted(times, key=lambda op: times[op]))}
    for rank, order in enumerate(plan.orders):
        lines = [(times[op][1], 0, 0, number_of(plan)[op]) for op in order]
        for k, (a, b) in enumerate(pairs):
            lines += [(times[a][1], 1, 1, k)] if plan.stages[a.stage].rank == rank else []
            lines += [(times[a][1], 1, 2, k)] if plan.stages[b.stage].rank == rank else []
        lines.sort(key=lambda line: line[0])
        kinds += [line[2] for line in lines]
        ids += [line[3] for line in lines]
        sizes.append(len(kinds))
    assert order_of
    if len({end for _, end in times.values()}) == len(times):  # without ties there is one such order
        plain = lowering.with_instructions(best, *(np.array(x, np.int32) for x in (kinds, ids, sizes)))
        prove_deadlock_free(plain)
        duration = op_durations(plan, costs)
        assert lowering._makespan(best, duration) <= lowering._makespan(plain, duration) + 1e-9


def drawn_windows(seed: int) -> tuple[Any, ...]:
    """Rows of ops on three ranks, without idle time or with, and transfers with windows among them."""
    lot = np.random.default_rng(seed)
    counts = lot.integers(1, 30 if seed % 3 == 0 else 7, 3)
    rank = np.repeat(np.arange(3, dtype=np.int32), counts)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    start, end = np.zeros(rank.size), np.zeros(rank.size)
    for r in range(3):
        clock = 0.0
        for k in range(offsets[r], offsets[r + 1]):
            start[k] = clock + float(lot.choice([0.0, 0.5, 1.5]))
            end[k] = clock = start[k] + float(lot.integers(1, 5)) / 2
    source = lot.integers(0, rank.size, 12).astype(np.int32)
    target = np.array([lot.choice(np.flatnonzero(rank != rank[s])) for s in source], np.int32)
    ready = end[source]
    need = np.maximum(start[target], ready - 1) + lot.choice([0.0, 0.0, 8.0], 12)
    return rank, offsets, source, target, ready, need, lot.integers(0, 6, 12) / 4.0, start, end


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("limit", [2, CANDIDATES])
def test_a_blocking_transfer_stands_where_its_two_ranks_lose_least(seed: int, limit: int) -> None:
    rank, offsets, source, target, ready, need, took, start, end = drawn_windows(seed)
    found = cheapest_positions(rank, offsets, source, target, ready, need, took, start, end, limit)
    for i in range(source.size):
        rows = [range(offsets[rank[k]], offsets[rank[k] + 1]) for k in (source[i], target[i])]
        best, where = float("inf"), float(ready[i])
        for row in rows:
            for key in [float(end[k]) for k in row if ready[i] <= end[k] <= need[i]][:limit]:
                meet = max([0.0] + [float(end[k]) for other in rows for k in other if end[k] <= key])
                lost = 0.0
                for other in rows:
                    following = [k for k in other if end[k] > key]
                    if following:
                        lost += max(0.0, meet + float(took[i]) - float(start[following[0]]))
                if lost < best - 1e-12:
                    best, where = lost, key
        assert found[i] == where
    assert CANDIDATES == 16


def meet(plan: Plan, program: Program, duration: Any) -> list[list[tuple[int, int]]]:
    """Ranks that serve each other whenever they stand idle, as a loop over events."""
    number, pairs = number_of(plan), crossings(plan)
    rank_of = [(plan.stages[a.stage].rank, plan.stages[b.stage].rank) for a, b in pairs]
    todo = [list(order) for order in plan.orders]
    lines: list[list[tuple[int, int]]] = [[] for _ in plan.orders]
    waiting_for: list[list[int]] = [[] for _ in plan.orders]
    clock, idle, running = [0.0] * plan.num_ranks, [False] * plan.num_ranks, [None] * plan.num_ranks
    done: set[Op] = set()
    moved: set[int] = set()
    while True:
        ready = [
            r for r in range(plan.num_ranks) if not idle[r] and (running[r] is not None or todo[r] or waiting_for[r])
        ]
        if not ready:
            return lines
        r = min(ready, key=lambda k: (clock[k], k))
        if running[r] is not None:
            done.add(running[r])
            for k in reversed(range(len(pairs))):
                if pairs[k][0] == running[r]:
                    for one in rank_of[k]:
                        waiting_for[one].append(k)
            running[r] = None

        def free(peer: int, now: float = clock[r]) -> bool:
            return idle[peer] or (running[peer] is None and not todo[peer] and clock[peer] <= now)

        now = clock[r]
        served = next((k for k in waiting_for[r] if free(sum(rank_of[k]) - r)), None)
        if served is not None:
            for one, kind in zip(rank_of[served], (1, 2)):
                waiting_for[one].remove(served)
                lines[one].append((kind, served))
                clock[one], idle[one] = now + float(program.transfer_ms[served]), False
            moved.add(served)
        elif todo[r] and all(
            (
                k in moved
                if (k := next((k for k, pair in enumerate(pairs) if pair == (p, todo[r][0])), -1)) >= 0
                else p in done
            )
            for p in plan.predecessors(todo[r][0])
        ):
            op = running[r] = todo[r].pop(0)
            lines[r].append((0, number[op]))
            clock[r] = now + float(duration[number[op]])
        else:
            idle[r] = True


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_meet_when_idle_do_so_as_in_a_loop_over_events(seed: int) -> None:
    plan, costs = setting(seed)
    program = lower(plan, costs)
    t, duration = plan.table(), op_durations(plan, costs)
    kinds, ids, sizes = meetings(
        t.rank, t.offsets, plan.predecessor_table(), program.transfer_of, program.source, program.target, duration,
        program.transfer_ms, plan.num_ranks,
    )  # fmt: skip
    found = [list(zip(kinds[a:b].tolist(), ids[a:b].tolist())) for a, b in pairwise(sizes)]
    assert found == meet(plan, program, duration)


@pytest.mark.parametrize("seed", range(12))
def test_a_blocking_program_is_no_slower_than_ranks_that_meet_when_idle(seed: int) -> None:
    plan, costs = setting(seed)
    best, duration = lower(plan, costs, channel="blocking"), op_durations(plan, costs)
    rows = meet(plan, best, duration)
    flat = [line for row in rows for line in row]
    sizes = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    other = lowering.with_instructions(best, *(np.array([x[k] for x in flat], np.int32) for k in (0, 1)), sizes)
    prove_deadlock_free(other)
    assert lowering._makespan(best, duration) <= lowering._makespan(other, duration) + 1e-9


def test_lines_of_a_program_are_told_in_words() -> None:
    costs = CostTable.uniform(num_layers=2, p2p_ms=0.5)
    program = lower(build_plan("gpipe", costs, 2, 1), costs)
    assert [str(x) for x in program.instructions(0)] == ["receive[1B0 <- rank 1]", "0F0", "send[0F0 -> rank 1]", "0B0"]
    assert [str(x) for x in program.instructions(1)] == ["receive[0F0 <- rank 0]", "1F0", "1B0", "send[1B0 -> rank 0]"]
    line = program.instructions(0)[2]
    assert (line.op, line.consumer, line.peer) == (Op(0, "F", 0), Op(1, "F", 0), 1)
    assert Instruction("compute", Op(0, "F", 0)).peer == Instruction("compute", Op(0, "F", 0)).transfer == -1
    nodes = [program.describe(k) for k in range(4 + program.num_transfers)]
    assert nodes[0] == "0F0 (rank 0)" and nodes[3] == "1B0 (rank 1)"
    assert set(nodes[4:]) == {"transfer of 0F0 (rank 0 -> 1)", "transfer of 1B0 (rank 1 -> 0)"}
    assert "None" not in repr(lower(program.plan, costs)) and "gpipe" in repr(program)
    bare = Plan(
        num_layers=2, num_ranks=1, num_micro_batches=1, stages=(Stage(first=0, stop=2, rank=0),),
        orders=parse_orders([["0F0", "0B0"]]),
    )  # fmt: skip
    assert "None" not in repr(lower(bare, costs))


@pytest.mark.parametrize("length", [12, 13])
def test_a_deadlock_of_more_than_twelve_is_told_in_part(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = CostTable.uniform(num_layers=4)
    program = lower(build_plan("1f1b", costs, 4, 4), costs)
    monkeypatch.setattr(lowering, "find_cycle", lambda graph: list(range(length)))
    with pytest.raises(DeadlockError) as caught:
        prove_deadlock_free(program)
    words = str(caught.value).partition("model: ")[2].split(" waits for ")
    assert len(words) == 13 and len(caught.value.cycle) == length
    assert words[-1] == (words[0] if length == 12 else "...")


def test_the_plan_is_looked_at_and_the_program_proven_unless_told_otherwise() -> None:
    costs = CostTable.uniform(num_layers=2, p2p_ms=0.1)
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    orders = parse_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    plan = Plan(num_layers=2, num_ranks=2, num_micro_batches=2, stages=stages, orders=orders)
    with pytest.raises(DeadlockError):
        lower(plan, costs, channel="blocking", naive=True)
    assert lower(plan, costs, channel="blocking", naive=True, check=False).num_transfers == 4
    assert lower(plan, costs).preds.shape == lower(plan, costs, naive=False).preds.shape
    assert [str(x) for x in lower(plan, costs).instructions(1)][:1] == ["receive[0F0 <- rank 0]"]
    wrong = Plan(num_layers=2, num_ranks=2, num_micro_batches=2, stages=stages[:1], orders=orders)
    with pytest.raises(Exception, match="route 0 ends at layer 1"):
        lower(wrong, costs)
    for channel in CHANNELS:
        assert topological_order(lower(plan, costs, channel=channel).preds).size == 8 + 4
        assert simulate(plan, costs, channel=channel).step_ms > 0
