"""Two ops at once on the two lanes of a rank: the shortest way to interleave their segments.

Knows: two sequences of segments on the compute and the exchange lane, and compute that may be placed anywhere (W). Does
not know: plans, stages, layers; `pair_price` builds the sequences.

**The rule.** Adjacent segments on the same lane are merged, so the lanes of each sequence alternate. Whenever both ops
run, they are on different lanes, and the one that ends first next needs the lane that the other still occupies, so it
waits. Both ops are therefore always at segment boundaries at the same time, and every schedule that does not preempt a
segment is a walk over the grid of boundaries (i, j) in three kinds of steps: the first op alone runs its next segment;
the second op alone does; or, if their lanes differ, both do, and the step takes as long as the longer segment (slowed
by the other while both run). The shortest walk is found by dynamic programming over (n + 1) x (m + 1) entries; this is
exact. Ties are resolved in favour of the step that both take, then of the first op.

Exchange time without concurrent compute is *exposed*; W (of the pair's B, or a W that is itself part of the pair) fills
it. If a pair would take longer than its two ops one after the other, they run one after the other.

>>> import numpy as np
>>> first = sequence([("compute", 2.0), ("exchange", 1.0), ("compute", 2.0), ("exchange", 1.0)])
>>> second = sequence([("exchange", 1.0), ("compute", 2.0), ("exchange", 1.0), ("compute", 2.0)])
>>> walk = interleave(first, second)
>>> walk.ms, walk.exposed_ms, "".join("AB*"[s] for s in walk.steps)
(8.0, 0.0, '****')
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.base.compile import njit
from octopipe.costs.segments import COMPUTE, EXCHANGE, together_ms

Floats = NDArray[np.float64]
FIRST, SECOND, BOTH = range(3)


class Sequence(NamedTuple):
    """Segments of one op. Lanes alternate, so the first lane determines the others; no segment is empty."""

    lane: int
    """Lane of the first segment."""
    ms: Floats


class Walk(NamedTuple):
    """How two ops run together, without W."""

    ms: float
    exposed_ms: float
    """Exchange time during which nothing was computed."""
    steps: tuple[int, ...]
    """For each step, which op runs its next segment: 0 the first, 1 the second, 2 both."""


def sequence(parts: Iterable[tuple[str, float]]) -> Sequence:
    """Segments with adjacent ones on the same lane merged; `beside` counts as compute."""
    first, last = COMPUTE, -1
    out: list[float] = []
    for name, ms in parts:
        lane = EXCHANGE if name == "exchange" else COMPUTE
        if ms <= 0.0:
            continue
        if lane == last:
            out[-1] += ms
            continue
        if not out:
            first = lane
        out.append(float(ms))
        last = lane
    return Sequence(first, np.array(out, np.float64))


@njit
def side_by_side(compute, exchange, slows_compute, slows_exchange):  # type: ignore[no-untyped-def]
    """Return the time until a compute segment and an exchange that start together have both ended, and the part of it
    during which the exchange runs alone. Each slows the other while both run."""
    computing = compute * (1.0 + slows_compute)
    exchanging = exchange * (1.0 + slows_exchange)
    if computing <= exchanging:
        alone = exchange - computing / (1.0 + slows_exchange)
        return computing + alone, alone
    return exchanging + compute - exchanging / (1.0 + slows_compute), 0.0


@njit
def pair_table(lane_a, a, lane_b, b, slows_compute, slows_exchange):  # type: ignore[no-untyped-def]
    """Shortest time, exposed exchange and last step at every point of the grid of segment boundaries."""
    took = np.zeros((a.size + 1, b.size + 1))
    bare = np.zeros((a.size + 1, b.size + 1))
    step = np.zeros((a.size + 1, b.size + 1), np.int32)
    fill_pair_table(lane_a, a, a.size, lane_b, b, b.size, slows_compute, slows_exchange, took, bare, step)
    return took, bare, step


@njit
def fill_pair_table(  # type: ignore[no-untyped-def]
    lane_a, a, n, lane_b, b, m, slows_compute, slows_exchange, took, bare, step
):
    """Fill the three tables of `pair_table` for the first `n` and `m` segments; the tables may be larger."""
    for i in range(n + 1):
        for j in range(m + 1):
            if i == 0 and j == 0:
                took[0, 0] = bare[0, 0] = 0.0
                continue
            best = np.inf
            left = 0.0
            kind = 0
            lane_i = (lane_a + i - 1) % 2
            lane_j = (lane_b + j - 1) % 2
            if i > 0 and j > 0 and lane_i != lane_j:
                compute = a[i - 1] if lane_i == 0 else b[j - 1]
                exchange = b[j - 1] if lane_i == 0 else a[i - 1]
                both, alone = side_by_side(compute, exchange, slows_compute, slows_exchange)
                best = took[i - 1, j - 1] + both
                left = bare[i - 1, j - 1] + alone
                kind = 2
            if i > 0 and took[i - 1, j] + a[i - 1] < best:
                best = took[i - 1, j] + a[i - 1]
                left = bare[i - 1, j] + (a[i - 1] if lane_i == 1 else 0.0)
                kind = 0
            if j > 0 and took[i, j - 1] + b[j - 1] < best:
                best = took[i, j - 1] + b[j - 1]
                left = bare[i, j - 1] + (b[j - 1] if lane_j == 1 else 0.0)
                kind = 1
            took[i, j] = best
            bare[i, j] = left
            step[i, j] = kind


def interleave(first: Sequence, second: Sequence, slows_compute: float = 0.0, slows_exchange: float = 0.0) -> Walk:
    """The shortest way to run two ops together."""
    took, bare, step = pair_table(first.lane, first.ms, second.lane, second.ms, slows_compute, slows_exchange)
    i, j, steps = first.ms.size, second.ms.size, []
    while i or j:
        kind = int(step[i, j])
        steps.append(kind)
        i -= kind != SECOND
        j -= kind != FIRST
    return Walk(float(took[-1, -1]), float(bare[-1, -1]), tuple(reversed(steps)))


def with_filler(walk: Walk, filler_ms: float, slows_compute: float = 0.0, slows_exchange: float = 0.0) -> float:
    """Return the time of the walk if this much W fills its exposed exchange time, and the rest of W follows."""
    return walk.ms - walk.exposed_ms + together_ms(filler_ms, walk.exposed_ms, slows_compute, slows_exchange)


def trace(
    first: Sequence, second: Sequence, steps: Iterable[int], slows_compute: float = 0.0, slows_exchange: float = 0.0
) -> list[tuple[int, int, float, float]]:
    """Return (op, lane, start, end) of every segment of a walk that starts at time 0. If two segments run together, the
    longer one is slowed only while the other runs."""
    out = []
    at = [0, 0]
    ops = (first, second)
    now = 0.0
    for kind in steps:
        who = (FIRST, SECOND) if kind == BOTH else (kind,)
        amounts = {op: float(ops[op].ms[at[op]]) for op in who}
        lanes = {op: (ops[op].lane + at[op]) % 2 for op in who}
        if kind == BOTH:
            slow = {op: 1.0 + (slows_compute if lanes[op] == COMPUTE else slows_exchange) for op in who}
            shorter = min(amounts[op] * slow[op] for op in who)
            ends = {op: shorter + max(0.0, amounts[op] - shorter / slow[op]) for op in who}
        else:
            ends = amounts
        for op in who:
            out.append((op, lanes[op], now, now + ends[op]))
            at[op] += 1
        now += max(ends.values())
    return out
