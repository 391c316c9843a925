"""Upper limits on sizes: every limit in one place, and the error message that states the number and the limit.

Knows: how much a file or a caller may request before memory is allocated for it. Does not know: what is being limited.

The limits are far above what is used in practice (8,192 pipeline ranks with 128 micro-batches and a split backward pass
have 3,145,728 ops) and low enough that a plan at any limit is checked and priced within a few GiB and minutes.

>>> finite(10**400), finite(True), finite("1"), finite(2)
(None, None, None, 2.0)
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from octopipe.base.errors import MAX_MICRO_BATCHES, OctoPipeError

MAX_LAYERS = 1 << 16
MAX_RANKS = 1 << 14
"""Pipeline ranks."""
MAX_STAGES = 1 << 15
MAX_OPS = 1 << 22
"""Ops in the orders of all ranks together."""
MAX_CELLS = 1 << 22
"""Stages x micro-batches: tables of ops and times have a cell for each pair."""
MAX_ROUTE_CELLS = 1 << 22
"""Routes x stages."""
MAX_HELD_LAYERS = 1 << 20
"""Layers of all stages together: a layer in two stages counts twice."""
MAX_FACTOR_CELLS = 1 << 24
"""Micro-batches x layers, for micro-batches that differ in size."""
MAX_GPUS = 1 << 20
MAX_EXPERTS = 100_000
"""Experts of one layer."""
MAX_LINKS = 1 << 20
"""Links between individual pairs of ranks: measured links, or links between nodes that differ."""
MAX_SIZE = 1 << 40
"""Any width, length or number of GPUs: products of a few of them still fit a float."""
MAX_TIME_MS = 1e15
"""Thirty thousand years: sums of so many such times are still finite."""
MAX_BYTES = 1e27
MAX_RATIO = 1e9
"""Time of the slowest rank over the fastest, or length of the longest micro-batch over the shortest."""
MAX_SEED = (1 << 31) - 1
"""The largest seed that all random generators in use accept (CP-SAT takes a signed 32-bit number)."""
MAX_VALUES = 1 << 23
"""Values in a JSON file; timelines have a larger limit of their own."""
MAX_TIMELINE_VALUES = 1 << 26
MAX_FILE_BYTES = 16 << 20
MAX_PLAN_BYTES = 1 << 28
MAX_TIMELINE_BYTES = 1 << 30

__all__ = [
    "MAX_BYTES",
    "MAX_CELLS",
    "MAX_EXPERTS",
    "MAX_FACTOR_CELLS",
    "MAX_FILE_BYTES",
    "MAX_GPUS",
    "MAX_HELD_LAYERS",
    "MAX_LAYERS",
    "MAX_LINKS",
    "MAX_MICRO_BATCHES",
    "MAX_OPS",
    "MAX_PLAN_BYTES",
    "MAX_RANKS",
    "MAX_RATIO",
    "MAX_ROUTE_CELLS",
    "MAX_SEED",
    "MAX_SIZE",
    "MAX_STAGES",
    "MAX_TIMELINE_BYTES",
    "MAX_TIMELINE_VALUES",
    "MAX_TIME_MS",
    "MAX_VALUES",
    "checked_seed",
    "finite",
    "over",
    "plan_too_large",
    "refuse_too_large",
]


def over(what: str, number: int, cap: int) -> list[str]:
    """Return the error line for a count above its cap, or an empty list.

    >>> over("ranks", 10**9, MAX_RANKS)
    ['1000000000 ranks; at most 16384 are allowed']
    """
    shown = number if abs(number) < 10**20 else "more than 10^20"
    return [f"{shown} {what}; at most {cap} are allowed"] if number > cap else []


def plan_too_large(plan: Any) -> list[str]:
    """Return one line for every cap that the plan exceeds."""
    stages, held = len(plan.stages), sum(max(0, s.num_layers) for s in plan.stages)
    return [
        *over("layers", plan.num_layers, MAX_LAYERS),
        *over("ranks", plan.num_ranks, MAX_RANKS),
        *over("micro-batches", plan.num_micro_batches, MAX_MICRO_BATCHES),
        *over("stages", stages, MAX_STAGES),
        *over("ops in orders", sum(map(len, plan.orders)), MAX_OPS),
        *over("cells of stages x micro-batches", stages * plan.num_micro_batches, MAX_CELLS),
        *over("cells of routes x stages", len(plan.routes) * stages, MAX_ROUTE_CELLS),
        *over("layers in all stages together", held, MAX_HELD_LAYERS),
    ]


def refuse_too_large(num_ranks: int, num_micro_batches: int) -> None:
    """Raise OctoPipeError if every plan of this size would exceed a cap, before one is built."""
    wrong = [
        *over("ranks", num_ranks, MAX_RANKS),
        *over("micro-batches", num_micro_batches, MAX_MICRO_BATCHES),
        *over("cells of ranks x micro-batches", num_ranks * num_micro_batches, MAX_OPS // 2),
    ]
    if wrong:
        raise OctoPipeError(wrong[0])


def finite(value: object) -> float | None:
    """Return the number as a float, or None if it is not a number, not finite, or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def checked_seed(seed: object) -> int:
    """Return the seed; raise OctoPipeError if one of the random generators would not accept it."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        shown = seed if not isinstance(seed, int) or abs(seed) < 10**20 else "a huge number"
        raise OctoPipeError(f"seed is {shown}; give a whole number from 0 to {MAX_SEED}")
    return seed
