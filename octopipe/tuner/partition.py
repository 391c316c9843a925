"""Partition tuning: migrate layers from the most to the least loaded rank.

Paper, section VI, "Partitioning Tuning". Knows: which migrations are worth a simulation. Does not know: phases.

Layers move between ranks that need not be neighbours in the chain: all stage boundaries between a stage of the
one and a stage of the other slide by as many layers, so the stages between keep their sizes. Layers differ, so two
slides at once can even out ranks where one cannot. A rank's load is its work in a step and the time until its first
micro-batch can arrive: what it must do, from when it can.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from octopipe.tuner.anneal import State
from octopipe.tuner.candidate import Desk, Floats

MOST = 16
"""Migrations judged in a round, the most even first."""
REACH = 6
"""Boundaries that slide together."""
FIRST = 24
"""Single slides that are tried together with every other."""


def migrations(desk: Desk, st: State, lot: random.Random) -> Iterator[tuple[str, State]]:
    """Those first that even out the ranks best."""
    n = int(st.size[0])
    load = desk.loads(st) + desk.heads(st)
    slides = _Slides(desk, st)
    if n < 2 or slides.change.shape[0] == 0:
        return
    single = _unevenness(load + slides.change)
    # Equal slides in another order for another seed.
    leaders = np.lexsort((np.array([lot.random() for _ in single]), single))[:FIRST]
    pair = _unevenness(load + slides.change[leaders][:, None, :] + slides.change[None, :, :])
    pair[slides.touching(leaders)] = np.inf
    found: list[tuple[float, tuple[int, ...]]] = [(float(single[k]), (int(k),)) for k in leaders[:MOST]]
    for flat in np.argsort(pair, axis=None, kind="stable")[:MOST]:
        a, b = divmod(int(flat), pair.shape[1])
        if pair[a, b] < np.inf and (int(leaders[a]) < b or b not in leaders):
            found.append((float(pair[a, b]), (int(leaders[a]), b)))
    coarse = _coarse(desk, st, load)
    judged = sorted(found)[: MOST - len(coarse)]
    yield from coarse
    for _, chosen in judged:
        yield slides.describe(chosen), slides.apply(chosen)


def _unevenness(load: Floats) -> Floats:
    """The busiest rank, and a little for the spread of the others."""
    return np.asarray(load.max(axis=-1) + 0.05 * load.std(axis=-1))


def _coarse(desk: Desk, st: State, load: Floats) -> list[tuple[str, State]]:
    """Half of what the busiest rank has too much, to the least busy one, between the nearest of their stages."""
    rank = st.rank[: int(st.size[0])]
    busiest, least = int(np.argmax(load)), int(np.argmin(load))
    layer_ms = desk.problem.total[-1] / desk.problem.num_layers
    count = round(float(load[busiest] - load[least]) / 2 / max(layer_ms, 1e-12))
    if count < 2:
        return []
    givers, takers = np.flatnonzero(rank == busiest).tolist(), np.flatnonzero(rank == least).tolist()
    pairs = [(abs(i - j), i, j) for i in givers for j in takers]
    out = []
    for _, i, j in sorted(pairs)[: MOST // 4]:
        moved = slide(st, i, j, count)
        if moved is not None:
            out.append((f"migrate {count} layers from rank {busiest} to {least}", moved))
    return out


def slide(st: State, giver: int, taker: int, count: int) -> State | None:
    """`count` layers leave stage `giver` and as many enter stage `taker`; None where the giver would be empty."""
    if st.bounds[giver + 1] - st.bounds[giver] <= count:
        return None
    moved = _own_bounds(st)
    if giver < taker:
        moved.bounds[giver + 1 : taker + 1] -= count
    else:
        moved.bounds[taker + 1 : giver + 1] += count
    return moved


def _own_bounds(st: State) -> State:
    return st._replace(bounds=np.copy(st.bounds))


class _Slides:
    """Every run of neighbouring boundaries that can slide by a layer, and what that changes for the ranks."""

    def __init__(self, desk: Desk, st: State) -> None:
        p, n = desk.problem, int(st.size[0])
        self.state = st
        bounds, rank = st.bounds[: n + 1], st.rank[:n]
        work = np.diff(p.total)
        runs: list[tuple[int, int, int]] = []
        changes = []
        for by in (-1, 1):
            # Boundary k moves one layer between stages k-1 and k; a run of boundaries adds up.
            one = np.zeros((n, p.num_ranks))
            for k in range(1, n):
                ms = work[bounds[k] - 1] if by < 0 else work[bounds[k]]
                one[k, rank[k - 1]] += by * ms * p.slow[rank[k - 1]]
                one[k, rank[k]] -= by * ms * p.slow[rank[k]]
            sums = np.concatenate((np.zeros((1, p.num_ranks)), np.cumsum(one, axis=0)))
            for a in range(1, n):
                for e in range(a, min(a + REACH, n)):
                    giver = a - 1 if by < 0 else e
                    if bounds[giver + 1] - bounds[giver] > 1:
                        runs.append((a, e, by))
                        changes.append(sums[e + 1] - sums[a])
        self.runs = np.array(runs, np.int64).reshape(-1, 3)
        self.change = np.array(changes).reshape(-1, p.num_ranks)

    def touching(self, some: np.ndarray) -> np.ndarray:
        """[some, all]: the two slides share a stage."""
        a, e = self.runs[:, 0], self.runs[:, 1]
        return np.asarray((a[some][:, None] <= e[None, :] + 1) & (a[None, :] <= e[some][:, None] + 1))

    def apply(self, chosen: tuple[int, ...]) -> State:
        moved = _own_bounds(self.state)
        for a, e, by in self.runs[list(chosen)]:
            moved.bounds[a : e + 1] += by
        return moved

    def describe(self, chosen: tuple[int, ...]) -> str:
        rank = self.state.rank
        ways = []
        for a, e, by in self.runs[list(chosen)].tolist():
            giver, taker = (a - 1, e) if by < 0 else (e, a - 1)
            ways.append(f"from rank {int(rank[giver])} to {int(rank[taker])}")
        return f"migrate a layer {' and one '.join(ways)}"
