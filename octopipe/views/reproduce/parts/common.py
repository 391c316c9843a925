"""Helpers that several parts of the reproduction share.

Knows: how numbers of cells become the values of a row. Does not know: any table of the paper.
"""

from __future__ import annotations

from collections.abc import Callable

from octopipe.views.reproduce.bench import Bench, Cell
from octopipe.views.reproduce.reading import Head
from octopipe.views.reproduce.row import Pair, Value, Values

Setting = tuple[str, int, int]
"""Model, ranks, micro-batches."""
HIGHER = "the paper measured, we predict: our prediction has no noise and its transfers never wait for each other"
"""Why a speed-up of ours is larger; the sensitivity part adds noise and a queue of transfers and shows the number."""
FASTEST = "fastest"
"""The group of the rows that state that OctoPipe is the fastest in some case."""
SHORT_HEAD = "the published time of the head is too short: with the fitted factor the step time is the paper's"
"""Why baselines are faster with the head's published time; the sensitivity part shows the error by factor."""


def tuned(bench: Bench, value: Callable[[Head, str], Value]) -> Values:
    """Return a number that depends on a tuner's plan, for both tuners and both readings of the head."""
    found: dict[Head, Pair] = {}
    for head in bench.heads:
        found[head] = (value(head, "algorithm1"), value(head, "search"))
    return Values(published=found["published"], fitted=found.get("fitted", (None, None)))


def plain(bench: Bench, value: Callable[[Head], Value]) -> Values:
    """Return a number that depends on no tuner, under both readings of the head."""
    fitted = value("fitted") if "fitted" in bench.heads else None
    return Values(published=(None, value("published")), fitted=(None, fitted))


def both(bench: Bench, holds: Callable[[Head], bool]) -> tuple[bool, bool | None]:
    """Return whether a claim is true under each reading of the head."""
    return holds("published"), holds("fitted") if "fitted" in bench.heads else None


def bounds(bench: Bench, cell: Callable[[Head], Cell]) -> Pair:
    """Return the proven bounds on a step time, one for each reading of the head."""
    return cell("published").bound_ms, cell("fitted").bound_ms if "fitted" in bench.heads else None


def arrow(values: list[float], *, unit: str = "×") -> str:
    """Format numbers in their order.

    >>> arrow([1.4, 1.29])
    '1.40 → 1.29 ×'
    """
    return " → ".join(f"{v:.2f}" for v in values) + f" {unit}"
