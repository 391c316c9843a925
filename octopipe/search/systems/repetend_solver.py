"""The solver behind Tessel: OR-tools CP-SAT finds repetends and their warm-up and cool-down.

Knows: how to state both problems to CP-SAT and to stop after some seconds with the best solution so far. Does
not know: which placement is worth trying. ortools is imported when a solve begins; it comes with the `exact`
extra.

It uses one core. A solve that ends before its limit is optimal and reproducible; the result of one that is
stopped by the limit depends on the speed of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from octopipe.base.errors import NotApplicableError
from octopipe.search.systems.repetend import Blocks, Floats, Repetend, packed_tightly

BYTES_RESOLUTION = 10_000
"""Number of units into which a rank's memory is divided; the sizes of activations are rounded up."""


def cp_model() -> Any:
    """The ortools module, or an error that names the extra."""
    try:
        from ortools.sat.python import cp_model as module
    except ImportError:
        raise NotApplicableError(
            "tessel: its solver is OR-tools, which is not installed; install octopipe[exact], or use tessel-fast"
        ) from None
    return module


def find_repetend(blocks: Blocks, period: int, room: Floats, seconds: float) -> Repetend | None:
    """Return the repetend of this period in which one micro-batch is finished soonest; None if none was found.

    A block's flat start is its place in the period plus whole periods, which grow at the cuts of the chain; on a
    rank, the places must not overlap. `room` is bytes per rank: a stage holds ceil(lifetime / period)
    micro-batches, which bounds the true peak from above.
    """
    cp = cp_model()
    model = cp.CpModel()
    hint = packed_tightly(blocks, period)
    place, spans = [], [block.span for block in blocks.blocks]
    for i in range(len(spans)):
        place.append(model.new_int_var(0, period - 1, "") if i else model.new_constant(0))
        model.add_hint(place[i], hint.flat[i] % period)
    for rank in range(blocks.num_ranks):
        # Every block twice, a period apart: it may begin in one period and end in the next.
        mine = blocks.on_rank(rank)
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(place[i] - d, spans[i], "") for i in mine for d in (0, period)]
        )
    turns: list[Any] = [0] * len(spans)  # whole periods before each block: the sum of the cuts on its way
    for a, b, transfer in blocks.edges:
        follows = blocks.blocks[b].kind != "W"
        # Except for W, a wait of a whole period is useless: all that follows could run one period earlier.
        cut = model.new_int_var(0, 2 if follows else len(spans), "")
        model.add_hint(cut, hint.flat[b] // period - hint.flat[a] // period)
        wait = place[b] + period * cut - place[a] - spans[a] - transfer
        model.add(wait >= 0)
        if follows:
            model.add(wait < period)
        turns[b] = turns[a] + cut
    flat = [place[i] + period * turns[i] for i in range(len(spans))]
    _limit_memory(model, blocks, flat, period, room)
    last = max(range(len(spans)), key=lambda i: (blocks.blocks[i].kind in "IB", i))
    model.minimize(flat[last])
    solver = _solver(cp, seconds)
    if solver.solve(model) not in (cp.OPTIMAL, cp.FEASIBLE):
        return None
    return Repetend(of=blocks, period=period, flat=tuple(int(solver.value(f)) for f in flat))


def complete(
    repetend: Repetend, num_micro_batches: int, room: Floats, seconds: float
) -> list[list[tuple[int, int]]] | None:
    """Return orders with the shortest makespan: warm-up and cool-down are free, the repetends keep their order.

    With many micro-batches, the problem is solved for a few and the repetend is repeated. None if nothing was found.
    """
    cp = cp_model()
    blocks, depth = repetend.of, repetend.depth
    few = min(num_micro_batches, repetend.micro_batches + 1)
    order = repetend.order(few)
    replayed = _replay(blocks, order)
    horizon = max(start + blocks.blocks[i].span for (i, _), start in replayed.items())
    model = cp.CpModel()
    start: dict[tuple[int, int], Any] = {}
    finish = model.new_int_var(0, horizon, "")
    for i, block in enumerate(blocks.blocks):
        for n in range(few):
            start[i, n] = model.new_int_var(0, horizon - block.span, "")
            model.add_hint(start[i, n], replayed[i, n])
            model.add(finish >= start[i, n] + block.span)
            if n:
                model.add(start[i, n] >= start[i, n - 1] + block.span)
    for a, b, transfer in blocks.edges:
        for n in range(few):
            model.add(start[b, n] >= start[a, n] + blocks.blocks[a].span + transfer)
    last_warm, first_cool = repetend.micro_batches - 1, few
    for row in order:
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(start[i, n], blocks.blocks[i].span, "") for i, n in row]
        )
        steady = [(i, n) for i, n in row if last_warm <= n + depth[i] < first_cool]
        for (i, n), after in pairwise(steady):
            model.add(start[after] >= start[i, n] + blocks.blocks[i].span)
        for i, n in row if steady else ():
            if n + depth[i] < last_warm:
                model.add(start[steady[0]] >= start[i, n] + blocks.blocks[i].span)
            elif n + depth[i] >= first_cool:
                model.add(start[i, n] >= start[steady[-1]] + blocks.blocks[steady[-1][0]].span)
    _limit_peaks(model, blocks, start, few, room)
    model.add_hint(finish, horizon)
    model.minimize(finish)
    solver = _solver(cp, 0.4 * seconds)
    status = solver.solve(model)
    if status == cp.FEASIBLE:
        # The time limit stopped the plain search; continue from its solution with large neighbourhood search.
        model.clear_hints()
        for variable in start.values():
            model.add_hint(variable, solver.value(variable))
        solver = _solver(cp, 0.6 * seconds, neighbourhoods=True)
        status = solver.solve(model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return None
    found = [sorted(row, key=lambda cell: (solver.value(start[cell]), cell)) for row in order]
    return _repeated(found, repetend, few, num_micro_batches)


def _repeated(
    order: list[list[tuple[int, int]]], repetend: Repetend, few: int, many: int
) -> list[list[tuple[int, int]]]:
    """Return the same warm-up and cool-down around more repetends."""
    depth, last_warm = repetend.depth, repetend.micro_batches - 1
    if many == few:
        return order
    rows = []
    for row in order:
        warm = [(i, n) for i, n in row if n + depth[i] < last_warm]
        once = [(i, n) for i, n in row if n + depth[i] == last_warm]
        cool = [(i, n + many - few) for i, n in row if n + depth[i] >= few]
        steady = [(i, n + turn) for turn in range(many - last_warm) for i, n in once]
        rows.append(warm + steady + cool)
    return rows


def _replay(blocks: Blocks, order: Sequence[Sequence[tuple[int, int]]]) -> dict[tuple[int, int], int]:
    """Return the earliest start of every (block, micro-batch) in these orders, in units."""
    before = blocks.waits_for()
    start: dict[tuple[int, int], int] = {}
    head, clock = [0] * len(order), [0] * len(order)
    left = sum(map(len, order))
    while left:
        for rank, row in enumerate(order):
            while head[rank] < len(row):
                i, n = row[head[rank]]
                needed = before[i]
                if any((a, n) not in start for a, _ in needed):
                    break
                arrived = [start[a, n] + blocks.blocks[a].span + transfer for a, transfer in needed]
                start[i, n] = max([clock[rank], *arrived])
                clock[rank] = start[i, n] + blocks.blocks[i].span
                head[rank] += 1
                left -= 1
    return start


def _holdings(blocks: Blocks) -> list[tuple[int, int, int, float]]:
    """Return (rank, block that allocates, block that frees, bytes) of everything that is held."""
    at = {(b.stage, b.kind): i for i, b in enumerate(blocks.blocks)}
    out = []
    for s, stage in enumerate(blocks.stages):
        if (s, "W") in at:
            held, stash = float(blocks.activation[s]), float(blocks.stash[s])
            out.append((stage.rank, at[s, "F"], at[s, "W"], min(held, stash)))
            out.append((stage.rank, at[s, "F"], at[s, "I"], held - min(held, stash)))
            # What the forward inside I restores for W, in layers that are recomputed in their backward.
            out.append((stage.rank, at[s, "I"], at[s, "W"], stash - min(held, stash)))
        else:
            out.append((stage.rank, at[s, "F"], at[s, "B"], float(blocks.activation[s])))
    return out


def _steps(nbytes: float, room: float) -> int:
    return int(np.ceil(nbytes / room * BYTES_RESOLUTION))


def _limit_memory(model: Any, blocks: Blocks, flat: Sequence[Any], period: int, room: Floats) -> None:
    used: list[list[Any]] = [[] for _ in range(blocks.num_ranks)]
    for rank, taken, freed, nbytes in _holdings(blocks):
        if np.isfinite(room[rank]) and nbytes > 0:
            copies = model.new_int_var(1, len(flat) + 1, "")
            model.add(period * copies >= flat[freed] + blocks.blocks[freed].span - flat[taken])
            used[rank].append(copies * _steps(nbytes, max(room[rank], 1.0)))
    for terms in used:
        if terms:
            model.add(sum(terms) <= BYTES_RESOLUTION)


def _limit_peaks(model: Any, blocks: Blocks, start: dict[tuple[int, int], Any], count: int, room: Floats) -> None:
    times: list[list[Any]] = [[] for _ in range(blocks.num_ranks)]
    changes: list[list[int]] = [[] for _ in range(blocks.num_ranks)]
    total = [0] * blocks.num_ranks
    for rank, taken, freed, nbytes in _holdings(blocks):
        if np.isfinite(room[rank]) and nbytes > 0:
            steps = _steps(nbytes, max(room[rank], 1.0))
            for n in range(count):
                times[rank] += [start[taken, n], start[freed, n] + blocks.blocks[freed].span]
                changes[rank] += [steps, -steps]
                total[rank] += steps
    for rank in range(blocks.num_ranks):
        if total[rank] > BYTES_RESOLUTION:
            model.add_reservoir_constraint(times[rank], changes[rank], 0, BYTES_RESOLUTION)


def _solver(cp: Any, seconds: float, *, neighbourhoods: bool = False) -> Any:
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.interleave_search = neighbourhoods
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = seconds
    return solver
