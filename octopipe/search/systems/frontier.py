"""Exact partitioning by dynamic programming over Pareto frontiers.

Knows: how to walk over stages and layer boundaries, keeping every label that no other label dominates. Does not
know: what a label means; a partitioner defines how a stage extends a label and the value of a finished one.

A label is a row of numbers that summarises the stages placed so far. If both functions are monotone (a larger
entry never leads to a smaller result), then a label that is nowhere smaller than another can be dropped, and
the best finished label is the true optimum over all partitions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.base.compile import njit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Extend = Callable[[Floats, int, Ints, Ints], Floats]
"""(labels [n, k], stage, first [n], stop [n]) -> labels [n, k] with that stage added."""
Value = Callable[[Floats], Floats]
"""Finished labels [n, k] -> objective [n]."""
Bound = Callable[[Floats, int, int], Floats]
"""(labels [n, k], stages placed, layers placed) -> lower bounds [n] on the finished objective."""


class Best(NamedTuple):
    """The layers per stage of the best partition, and its objective."""

    sizes: tuple[int, ...]
    value: float


def best_partition(
    allowed: NDArray[np.bool_],
    start: Floats,
    extend: Extend,
    value: Value,
    *,
    bound: Bound | None = None,
    incumbent: float = np.inf,
    from_last: bool = False,
) -> Best | None:
    """Return the partition with the smallest value; None if there is none, or if bounds prove all above the incumbent.

    `allowed` [stage, first, stop] says which ranges may be a stage; `start` is the empty label. Labels whose bound
    exceeds `incumbent`, the value of a partition that is already known, are dropped. `from_last` places the last stage
    first; `extend` still receives the stage's own number and range.
    """
    stages, layers = allowed.shape[0], allowed.shape[1] - 1
    width = start.size
    frontier: dict[int, Floats] = {0: start.reshape(1, width)}
    # parents[j][x]: (layers placed before, label number before) of each label after j+1 stages and x layers
    parents: list[dict[int, tuple[Ints, Ints]]] = []
    slack = 1e-9 * abs(incumbent) if np.isfinite(incumbent) else 0.0
    for placed in range(stages):
        stage = stages - 1 - placed if from_last else placed
        following: dict[int, Floats] = {}
        came: dict[int, tuple[Ints, Ints]] = {}
        left = stages - 1 - placed
        reached = [layers] if left == 0 else range(placed + 1, layers - left + 1)
        for x in reached:
            before = [y for y in frontier if y < x and allowed[(stage, *_range(y, x, layers, from_last))]]
            if not before:
                continue
            counts = [frontier[y].shape[0] for y in before]
            origin = np.repeat(np.array(before, np.int64), counts)
            number = np.concatenate([np.arange(n) for n in counts])
            labels = np.concatenate([frontier[y] for y in before])
            first, stop = (layers - x, layers - origin) if from_last else (origin, np.int64(x))
            first, stop = np.broadcast_arrays(first, stop)
            grown = extend(labels, stage, first, stop)
            keep = np.arange(grown.shape[0])
            if bound is not None and np.isfinite(incumbent):
                keep = keep[bound(grown, placed + 1, x) <= incumbent + slack]
            if left == 0:
                keep = keep[np.argsort(value(grown[keep]), kind="stable")[:1]]
            else:
                order = keep[np.lexsort(grown[keep].T[::-1])]
                keep = order[_undominated(grown[order])]
            if keep.size:
                following[x] = np.ascontiguousarray(grown[keep])
                came[x] = (origin[keep], number[keep])
        frontier = following
        parents.append(came)
        if not frontier:
            return None
    best = float(value(frontier[layers])[0])
    sizes, at, label = [], layers, 0
    for came in reversed(parents):
        origins, labels_before = came[at]
        sizes.append(at - int(origins[label]))
        at, label = int(origins[label]), int(labels_before[label])
    return Best(tuple(sizes) if from_last else tuple(reversed(sizes)), best)


def _range(before: int, after: int, layers: int, from_last: bool) -> tuple[int, int]:
    return (layers - after, layers - before) if from_last else (before, after)


@njit
def _undominated(labels):  # type: ignore[no-untyped-def]
    """Return which rows are not dominated by an earlier row, i.e. one that is smaller or equal in every column. The
    rows must be sorted lexicographically."""
    rows, width = labels.shape
    keep = np.zeros(rows, np.bool_)
    kept = np.empty(rows, np.int64)
    count = 0
    for i in range(rows):
        dominated = False
        for j in range(count - 1, -1, -1):
            worse = True
            for k in range(width):
                # A tolerance, so that labels that differ only by rounding are dropped.
                if labels[kept[j], k] > labels[i, k] * (1.0 + 1e-12):
                    worse = False
                    break
            if worse:
                dominated = True
                break
        if not dominated:
            keep[i] = True
            kept[count] = i
            count += 1
    return keep
