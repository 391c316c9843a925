"""How many random cases a test draws: a part of them in `make test`, all of them in `make test-all`.

A test that draws random plans finds a new kind of defect with its hundredth plan about as seldom as with its fiftieth.
The quick tier therefore draws fewer of them, and the slow tier, which CI runs as well, draws all.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from typing import Any

import pytest

WHOLE = os.environ.get("OCTOPIPE_TESTS") == "all"
"""Whether this is the slow tier: `make test-all` sets it."""
QUICK_SHARE = 16


def some(values: Iterable[Any], quick: Container[Any] | int = 1) -> list[Any]:
    """Parameters of a test of which the quick tier runs some: the first so many, or those in `quick`. The slow tier
    runs all of them. A tuple that stands for several arguments is one value here."""
    out = []
    for number, value in enumerate(values):
        in_quick = number < quick if isinstance(quick, int) else value in quick
        out.append(value if in_quick else pytest.param(value, marks=pytest.mark.slow))
    return out


def draws(number: int, least: int = 4) -> int:
    """`number` in the slow tier; a sixteenth of it in the quick one, but at least `least`."""
    return number if WHOLE else min(number, max(least, number // QUICK_SHARE))
