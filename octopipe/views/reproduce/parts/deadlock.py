"""Figure 4: naive coordination of sends and receives deadlocks; reordered it runs, and overlap removes bubbles. Section
VII: the cost of the reordering, counted in steps and positions instead of seconds.

Naive coordination: a receive immediately before the op that needs it, a send immediately after the op that produced the
tensor, both blocking until the other end is ready.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from octopipe.base.graph import find_cycle
from octopipe.simulation.lowering import Program, lower, prove_deadlock_free
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Spans
from octopipe.views.export.svg import timeline_svg
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import Result, Row, Values

MODEL, RANKS, MICRO_BATCHES = "nemotron-h-8b", 4, 8
SECTION = "Fig. 4, §III-C"
GROWTH = (8, 16, 32)
"""Numbers of micro-batches for which the work of coordination is counted."""


def run(bench: Bench) -> Result:
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    plan = bench.plan("algorithm1", costs, RANKS, MICRO_BATCHES)
    program = lower(plan, costs)
    stuck = naive_deadlocks(program)
    prove_deadlock_free(program)
    blocking = lower(plan, costs, channel="blocking")
    prove_deadlock_free(blocking)
    waits = simulate(blocking, costs, label="(c) without overlap")
    overlapped = simulate(program, costs, label="(d) with overlap")
    rows = [
        Row.order(
            "deadlock.naive",
            "naive coordination of an irregular plan deadlocks",
            "deadlock",
            Values(published=("deadlock" if stuck else "runs", None)),
            (stuck, None),
            source=f"{SECTION} (b)",
            why="the order of this plan is regular",
            tested="sensitivity.sent",
        ),
        Row.constructed(
            "deadlock.free", "reordered it cannot deadlock", "runs", "runs, by proof", True, source=f"{SECTION} (d)"
        ),
        Row.order(
            "deadlock.overlap",
            "without overlap transfers become bubbles",
            "slower",
            Values(published=(f"{waits.step_ms:.0f} against {overlapped.step_ms:.0f} ms", None)),
            (waits.step_ms > overlapped.step_ms, None),
            source=f"{SECTION} (c)",
            why="the transfers of this plan cost nothing",
            tested="sensitivity.sent",
        ),
        *coordination(bench),
    ]
    title = f"Fig. 4 (c) and (d): the same plan of Nemotron-H 8B without and with overlap, PP {RANKS}"
    picture = timeline_svg([waits, overlapped], title=title)
    return Result(rows=tuple(rows), costs=bench.costs_in_words, pictures={"deadlock.svg": picture})


def coordination(bench: Bench) -> list[Row]:
    """Return rows on whether the work per communication stays constant, and whether windows are small."""
    steps, shares, counts = [], [], []
    for micro_batches in GROWTH:
        costs = bench.costs(MODEL, RANKS, micro_batches)
        program = lower(bench.plan("algorithm1", costs, RANKS, micro_batches), costs)
        communications = program.source.size
        # Finding cycles visits every node and every edge of the rendezvous graph once.
        steps.append((len(program.preds) + int(np.count_nonzero(program.preds >= 0))) / communications)
        candidates, positions = positions_in_windows(program, simulate(program, costs).spans)
        shares.append(candidates / positions)
        counts.append(candidates)
    growth = " → ".join(map(str, GROWTH))
    said = " → ".join(f"{step:.1f}" for step in steps)
    small = " → ".join(f"{share:.1%}".removesuffix("%") for share in shares)
    total = ", ".join(map(str, counts))
    return [
        Row.order(
            "deadlock.linear",
            f"steps of the search for circles per communication, {growth} micro-batches",
            "constant, O(Vc)",
            Values(published=(said, None)),
            (bool(max(steps) < 1.1 * min(steps)), None),
            source="§VII",
        ),
        Row.order(
            "deadlock.window",
            f"positions inside the windows, Σk, of all positions on the two ranks, {growth} micro-batches",
            "a small region",
            Values(published=(f"{small} % (Σk {total})", None)),
            (max(shares) < 0.1, None),
            source="§VII",
        ),
    ]


def positions_in_windows(program: Program, spans: Spans) -> tuple[int, int]:
    """Count the ops of its two ranks after which each communication could be placed; return the total inside the
    windows, and without windows.

    The window of a communication is from the end of the op that produces the tensor to the start of the op that needs
    it.
    """
    t = program.plan.table()
    inside = everywhere = 0
    for r in range(program.plan.num_ranks):
        ends = spans.end_ms[t.offsets[r] : t.offsets[r + 1]]
        taking_part = (t.rank[program.source] == r) | (t.rank[program.target] == r)
        first = np.searchsorted(ends, spans.end_ms[program.source[taking_part]], side="left")
        stop = np.searchsorted(ends, spans.start_ms[program.target[taking_part]], side="right")
        inside += int(np.maximum(stop - first, 0).sum())
        everywhere += int(taking_part.sum()) * ends.size
    return inside, everywhere


def naive_deadlocks(program: Program) -> bool:
    """Whether ranks would deadlock if they received right before each op and sent right after it."""
    t = program.plan.table()
    ops = t.stage.size
    needs: list[list[int]] = [[] for _ in range(ops)]
    makes: list[list[int]] = [[] for _ in range(ops)]
    for transfer, (source, target) in enumerate(zip(program.source.tolist(), program.target.tolist(), strict=True)):
        makes[source].append(transfer)
        needs[target].append(transfer)
    edges: list[tuple[int, int]] = []
    for rank in range(program.plan.num_ranks):
        sequence: list[int] = []
        for op in range(int(t.offsets[rank]), int(t.offsets[rank + 1])):
            sequence += [*(ops + k for k in needs[op]), op, *(ops + k for k in makes[op])]
        edges += list(pairwise(sequence))
    before: list[list[int]] = [[] for _ in range(ops + program.source.size)]
    for first, then in edges:
        before[then].append(first)
    widest = max(map(len, before), default=1)
    preds = np.full((len(before), widest), -1, np.int32)
    for node, given in enumerate(before):
        preds[node, : len(given)] = given
    return bool(find_cycle(preds))


PART = Part(name="deadlock", title="Deadlock and overlap", labels=("fig:3_deadlock_bubble",), run=run)
