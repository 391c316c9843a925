"""Assignment of whole layers to ranks within a time limit: the arithmetic of the *loads* bound.

Knows: kinds of layers by their work, how many there are of each, and the time available on every rank. Does not know:
plans or op times. Exact: dynamic programming over how many layers of each kind are assigned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octopipe.base.compile import njit

Array = NDArray[np.float64]


def steps_of(counts: NDArray[np.int64]) -> float:
    """Return the most steps that one call of `assignable` takes."""
    return float(np.prod(counts + 1.0)) * counts.size


def assignable(
    limit: float, heads: Array, slow: list[float], kinds: Array, counts: NDArray[np.int64], first: int
) -> bool:
    """Return whether all layers can be assigned to the ranks so that each stays within `limit`. `first` is the kind of
    layer 0, which must lie on the rank that is reached first; -1 if any rank may hold it."""
    rooms = (limit - heads) / np.array(slow)
    if first >= 0 and kinds[first] > rooms[0] + 1e-9:
        return False
    strides = np.concatenate((np.cumprod((counts + 1)[:0:-1])[::-1], [1])).astype(np.int64)
    return bool(_assignable(rooms, kinds, counts.astype(np.int64), strides, first))


@njit
def _assignable(rooms, kinds, counts, strides, first):  # type: ignore[no-untyped-def]
    """Fill the ranks one after another, by dynamic programming.

    A state is how many layers of every kind have been assigned. Of all ways to reach a state, only the best is kept:
    the one that has come to the earliest rank, and among these the one with the smallest load there. It can go on
    in every way in which the others can.
    """
    ranks = rooms.size
    states = 1
    for d in range(kinds.size):
        states *= counts[d] + 1
    rank = np.full(states, ranks, np.int64)
    load = np.zeros(states, np.float64)
    begin = 0
    if first >= 0:  # layer 0 is assigned before all others
        begin = strides[first]
        load[begin] = kinds[first]
    rank[begin] = 0
    assigned = np.zeros(kinds.size, np.int64)
    for state in range(states):
        if rank[state] < ranks:
            for d in range(kinds.size):
                if assigned[d] < counts[d]:
                    k = rank[state]
                    total = load[state] + kinds[d]
                    if total > rooms[k] + 1e-9:
                        total = kinds[d]
                        k += 1
                        while k < ranks and total > rooms[k] + 1e-9:
                            k += 1
                    after = state + strides[d]
                    if k < rank[after] or (k == rank[after] and total < load[after]):
                        rank[after] = k
                        load[after] = total
        for d in range(kinds.size - 1, -1, -1):
            assigned[d] += 1
            if assigned[d] <= counts[d]:
                break
            assigned[d] = 0
    return rank[states - 1] < ranks
