"""Assignment of whole layers to ranks within a time limit: the arithmetic of the *loads* bound.

Knows: kinds of layers by their work, how many there are of each, and the time available on every rank. Does not know:
plans or op times. Exact: dynamic programming over how many layers of each kind are assigned, the most frequent kind
last.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octopipe.base.compile import njit

Array = NDArray[np.float64]


def dealable(
    limit: float, heads: Array, slow: list[float], kinds: Array, counts: NDArray[np.int64], main: int,
    others: NDArray[np.int64], first: int,
) -> bool:  # fmt: skip
    """Can all layers be dealt to the ranks within `limit`?

    State: layers dealt of every kind but `main`; value: the most layers of `main` dealt beside them. `first`
    is the kind of layer 0, which the rank that is reached first holds (-1: not known which that is).
    """
    shape = counts[others] + 1
    strides = np.concatenate((np.cumprod(shape[::-1])[::-1][1:], [1])).astype(np.int64) if others.size else shape
    most = np.full(int(np.prod(shape)), -1, np.int64)
    most[0] = 0
    if first >= 0:
        # Layer 0 is dealt before all others.
        if first == main:
            most[0] = 1
        else:
            most[0] = -1
            most[strides[int(np.flatnonzero(others == first)[0])]] = 0
    for number, (head, factor) in enumerate(zip(heads, slow)):
        room = (limit - head) / factor - (kinds[first] if first >= 0 and number == 0 else 0.0)
        if room < -1e-9:
            if first >= 0 and number == 0:
                return False
            continue
        most = _deal(most, room, kinds[others], shape, strides, kinds[main])
    return bool(most[-1] >= counts[main])


@njit
def deals(room, kinds, shape, limit):  # type: ignore[no-untyped-def]
    """How many mixes of layers fit into one rank's room, counted up to `limit`."""
    combo = np.zeros(kinds.size, np.int64)
    count = 0
    while count < limit:
        left = room
        for d in range(kinds.size):
            left -= combo[d] * kinds[d]
        fits = left >= -1e-9
        if fits:
            count += 1
        if not _next_mix(combo, shape, fits):
            return count
    return count


@njit
def _next_mix(combo, shape, fits):  # type: ignore[no-untyped-def]
    """Count `combo` on by one, its last digit first. A mix that does not fit ends its innermost digit: more of that
    kind would not fit either. False: it was the last mix."""
    d = combo.size - 1
    if not fits:
        while d >= 0 and combo[d] == 0:
            d -= 1
        if d < 0:
            return False
        combo[d] = 0
        d -= 1
    while d >= 0:
        combo[d] += 1
        if combo[d] < shape[d]:
            return True
        combo[d] = 0
        d -= 1
    return False


@njit
def _deal(most, room, kinds, shape, strides, main_ms):  # type: ignore[no-untyped-def]
    """States after one more rank of this room: every mix of the other kinds, filled up with the main one."""
    dims = kinds.size
    grown = np.full(most.size, -1, np.int64)
    combo = np.zeros(dims, np.int64)
    place = np.zeros(dims, np.int64)
    while True:
        left = room
        shift = 0
        for d in range(dims):
            left -= combo[d] * kinds[d]
            shift += combo[d] * strides[d]
        fits = left >= -1e-9
        if fits:
            extra = np.int64(np.floor(left / main_ms + 1e-9))
            place[:] = 0
            for state in range(most.size):
                if most[state] >= 0:
                    inside = True
                    for d in range(dims):
                        if place[d] + combo[d] >= shape[d]:
                            inside = False
                            break
                    if inside and most[state] + extra > grown[state + shift]:
                        grown[state + shift] = most[state] + extra
                for d in range(dims - 1, -1, -1):
                    place[d] += 1
                    if place[d] < shape[d]:
                        break
                    place[d] = 0
        if not _next_mix(combo, shape, fits):
            return grown
