"""Selection of the answer among the simulated splits: the simplest of those that are about as fast as the fastest.

Knows: what makes a split simple to run. Does not know: how splits are found (`search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from octopipe.search.planner.pricing import Candidate
from octopipe.search.planner.splits import Split

MARGIN = 0.02
"""Splits within this share of the fastest cannot be ranked: the difference is smaller than the error of the cost
model."""
SPARE = 0.97
"""A rank that uses more than this share of its memory limit counts as full."""
ORDERS = {"estimated": 0.0, "1f1b": 0.0, "interleaved": 0.0, "interleaved-overlap": 0.25, "layout": 0.5}
"""Complexity of a schedule, relative to 1F1B, which every runtime has; schedules that are not listed count 1."""


def simplest(rivals: Sequence[Candidate], margin: float, today: Candidate | None = None) -> Candidate:
    """Return the least complex of the splits that are at most `margin` slower than the fastest; of equally complex ones
    the fastest. It is not slower than today's split, if that fits."""
    most = min(c.step_ms for c in rivals) * (1.0 + margin)
    if today is not None and today.fits:
        most = min(most, today.step_ms)
    return min((c for c in rivals if c.step_ms <= most), key=lambda c: (complexity(c), c.step_ms))


def complexity(candidate: Candidate) -> float:
    """Return a measure of how hard a split is to run: it grows with the sizes of the groups of GPUs, a custom schedule,
    memory close to its limit, recomputation and sharding."""
    s = candidate.split
    groups = 2 * math.log2(s.tp * s.cp) + math.log2(s.pp * s.ep * s.etp) + 0.5 * math.log2(s.vp)
    groups += 0.5 * (s.hsdp > 1)
    memory = 2.0 if candidate.peak_gib > SPARE * candidate.limit_gib else 0.0
    order = ORDERS.get(candidate.how, 1.0)
    return groups + order + memory + (candidate.recompute != "none") + 0.25 * (s.zero >= 2)


def simpler_first(candidate: Candidate) -> float:
    """A sort key: the step time with a small penalty for every doubling of a group, so that the simpler of two equally
    fast splits comes first."""
    s = candidate.split
    return candidate.step_ms * (1 + 2e-3 * math.log2(s.tp * s.cp * s.cp) + 5e-4 * math.log2(s.pp * s.ep * s.vp))


def fastest_if_tuned(candidate: Candidate) -> float:
    """The sort key of `simpler_first`, applied to the step time that tuning is estimated to reach."""
    return candidate.tuned_ms * simpler_first(candidate) / candidate.step_ms


def varied(kept: Sequence[Candidate], *, each: int) -> list[Candidate]:
    """Return the splits in the same order, but at most `each` of those that differ only in their stages per rank."""
    seen: dict[Split, int] = {}
    out = []
    for candidate in kept:
        key = candidate.split.coarse
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= each:
            out.append(candidate)
    return out
