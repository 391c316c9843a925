"""A part of the reproduction: one table or figure of the paper.

Knows: the record. Does not know: any part; each has its own file in parts/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.row import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A table or figure: its name on the command line, its labels in the paper's source, and its function."""

    name: str
    title: str
    labels: tuple[str, ...]
    run: Callable[[Bench], Result]
