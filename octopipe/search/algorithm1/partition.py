"""Partition tuning: migrate layers from the most to the least loaded rank.

Paper, section VI, "Partitioning Tuning". Knows: which migrations are worth a simulation. Does not know: phases.

Layers move between ranks that need not be adjacent in the chain: all stage boundaries between a stage of one rank and a
stage of the other shift by the same number of layers, so the stages in between keep their sizes. Layers differ, so two
shifts at once can balance ranks where one cannot. The load of a rank is its work in a step plus the time until its
first micro-batch can arrive. Placement and orders are not changed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from octopipe.search.algorithm1.candidate import Evaluator, State
from octopipe.search.algorithm1.prices import Floats
from octopipe.search.algorithm1.structure import recomputed, stages_of


def migrations(evaluator: Evaluator, st: State, lot: random.Random) -> Iterator[tuple[str, State]]:
    """Yield migrations of layers with their names: coarse ones first, then those that balance the ranks best."""
    n, settings = len(st.stages), evaluator.settings
    slides = Slides(evaluator, st)
    if n < 2 or slides.change.shape[0] == 0:
        return
    load = evaluator.loads(st.stages) + arrivals(evaluator, st)
    single = _unevenness(load + slides.change, settings.spread)
    # Slides of equal value are sorted at random, so that the seed matters.
    leaders = np.lexsort((np.array([lot.random() for _ in single]), single))[: settings.paired]
    pair = _unevenness(load + slides.change[leaders][:, None, :] + slides.change[None, :, :], settings.spread)
    pair[slides.touching(leaders)] = np.inf
    found: list[tuple[float, tuple[int, ...]]] = [(float(single[k]), (int(k),)) for k in leaders]
    for flat in np.argsort(pair, axis=None, kind="stable")[: settings.migrations]:
        a, b = divmod(int(flat), pair.shape[1])
        if pair[a, b] < np.inf and (int(leaders[a]) < b or b not in leaders):
            found.append((float(pair[a, b]), (int(leaders[a]), b)))
    coarse = _coarse(evaluator, st, load)
    yield from coarse
    for _, chosen in sorted(found)[: settings.migrations - len(coarse)]:
        yield slides.describe(chosen), slides.apply(chosen)


def arrivals(evaluator: Evaluator, st: State) -> Floats:
    """Return the time at which the first micro-batch can reach every rank (0 for ranks without stages)."""
    at, reached = 0.0, np.full(evaluator.num_ranks, np.inf)
    for s, stage in enumerate(st.stages):
        reached[stage.rank] = min(reached[stage.rank], at)
        at += float(st.prices.ms[0, s].min() + st.prices.forward_ms[s].min())
    return np.where(np.isfinite(reached), reached, 0.0)


def _unevenness(load: Floats, spread: float) -> Floats:
    """Return the largest load plus `spread` times the standard deviation of all loads."""
    return np.asarray(load.max(axis=-1) + spread * load.std(axis=-1))


def _coarse(evaluator: Evaluator, st: State, load: Floats) -> list[tuple[str, State]]:
    """Return migrations of several layers at once, which move half of the difference in load from the busiest rank to
    the least busy one, between the nearest of their stages."""
    rank = st.prices.rank
    busiest, least = int(np.argmax(load)), int(np.argmin(load))
    count = round(float(load[busiest] - load[least]) / 2 / max(float(evaluator.layer_ms.mean()), 1e-12))
    if count < 2:
        return []
    sources, targets = np.flatnonzero(rank == busiest).tolist(), np.flatnonzero(rank == least).tolist()
    out = []
    for _, i, j in sorted((abs(i - j), i, j) for i in sources for j in targets)[: evaluator.settings.migrations // 4]:
        moved = slide(evaluator, st, i, j, count)
        if moved is not None:
            out.append((f"migrate {count} layers from rank {busiest} to {least}", moved))
    return out


def slide(evaluator: Evaluator, st: State, source: int, target: int, count: int) -> State | None:
    """Return the state in which stage `source` has lost `count` layers and stage `target` has gained as many; None if
    the source would become empty."""
    if st.stages[source].num_layers <= count:
        return None
    bounds = np.array(st.bounds)
    if source < target:
        bounds[source + 1 : target + 1] -= count
    else:
        bounds[target + 1 : source + 1] += count
    return rebounded(evaluator, st, bounds)


def rebounded(evaluator: Evaluator, st: State, bounds: np.ndarray) -> State:
    """The state with other stage boundaries and the same placement and orders."""
    return evaluator.restaged(st, stages_of(bounds.tolist(), st.prices.rank.tolist(), recomputed(st.stages)))


class Slides:
    """All runs of neighbouring stage boundaries that can be shifted by one layer, and how that changes the ranks'
    loads."""

    def __init__(self, evaluator: Evaluator, st: State) -> None:
        n = len(st.stages)
        self.evaluator, self.state, self.bounds = evaluator, st, np.array(st.bounds)
        bounds, rank, work, slow = self.bounds, st.prices.rank, evaluator.layer_ms, evaluator.slow
        runs: list[tuple[int, int, int]] = []
        changes = []
        for by in (-1, 1):
            # Boundary k moves one layer between stages k-1 and k; a run of boundaries adds up.
            one = np.zeros((n, evaluator.num_ranks))
            for k in range(1, n):
                ms = work[bounds[k] - 1] if by < 0 else work[bounds[k]]
                one[k, rank[k - 1]] += by * ms * slow[rank[k - 1]]
                one[k, rank[k]] -= by * ms * slow[rank[k]]
            sums = np.concatenate((np.zeros((1, evaluator.num_ranks)), np.cumsum(one, axis=0)))
            for a in range(1, n):
                for e in range(a, min(a + evaluator.settings.reach, n)):
                    source = a - 1 if by < 0 else e
                    if bounds[source + 1] - bounds[source] > 1:
                        runs.append((a, e, by))
                        changes.append(sums[e + 1] - sums[a])
        self.runs = np.array(runs, np.int64).reshape(-1, 3)
        self.change = np.array(changes).reshape(-1, evaluator.num_ranks)

    def touching(self, some: np.ndarray) -> np.ndarray:
        """Return a boolean matrix [some, all]: whether two slides change a common stage."""
        a, e = self.runs[:, 0], self.runs[:, 1]
        return np.asarray((a[some][:, None] <= e[None, :] + 1) & (a[None, :] <= e[some][:, None] + 1))

    def apply(self, chosen: tuple[int, ...]) -> State:
        bounds = self.bounds.copy()
        for a, e, by in self.runs[list(chosen)]:
            bounds[a : e + 1] += by
        return rebounded(self.evaluator, self.state, bounds)

    def describe(self, chosen: tuple[int, ...]) -> str:
        rank = self.state.prices.rank
        ways = []
        for a, e, by in self.runs[list(chosen)].tolist():
            source, target = (a - 1, e) if by < 0 else (e, a - 1)
            ways.append(f"from rank {int(rank[source])} to {int(rank[target])}")
        return f"migrate a layer {' and one '.join(ways)}"
