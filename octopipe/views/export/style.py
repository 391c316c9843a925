"""What all pictures share: the colours of op kinds, their shades, and the positions of an axis's ticks.

Knows: colours (distinguishable with every common colour-vision deficiency; tests/views/test_export.py checks it) and
round numbers. Does not know: any output format.

>>> ticks(0, 100, 5), hex_colour("F")
((0.0, 20.0, 40.0, 60.0, 80.0, 100.0), '#4f8fd0')
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from octopipe.plans.plan import KINDS

Rgb = tuple[int, int, int]

COLOURS: Mapping[str, Rgb] = MappingProxyType(
    {
        "F": (79, 143, 208),
        "R": (198, 170, 196),
        "I": (247, 187, 66),
        "W": (44, 190, 106),
        "B": (222, 101, 58),
    }
)
"""Blue forward, amber input gradient, green weight gradient, vermilion fused backward, mauve recompute."""
NAMES: Mapping[str, str] = MappingProxyType(
    {"F": "forward", "R": "recompute", "I": "input gradient", "W": "weight gradient", "B": "fused backward"}
)
BUBBLES: Mapping[str, Rgb] = MappingProxyType(
    {
        "boundary": (150, 160, 172),
        "communication": (211, 61, 97),
        "imbalance": (99, 178, 235),
        "residual": (226, 205, 120),
    }
)
SHADES = 4
"""Number of lightness steps that distinguish neighbouring stages or micro-batches of one kind."""


def shade(colour: Rgb, step: int, steps: int = SHADES) -> Rgb:
    """Return the colour, lightened a little more with every step."""
    amount = 0.42 * (step % steps) / max(steps - 1, 1)
    r, g, b = (round(c + (255 - c) * amount) for c in colour)
    return r, g, b


def hex_colour(kind: str, step: int = 0, steps: int = SHADES) -> str:
    return "#{:02x}{:02x}{:02x}".format(*shade(COLOURS[kind], step, steps))


def kinds_in(codes: set[int]) -> str:
    """Return the kinds that occur, in the order of a legend."""
    return "".join(kind for code, kind in enumerate(KINDS) if code in codes)


def ticks(first: float, last: float, count: int) -> tuple[float, ...]:
    """Return about `count` round numbers (1, 2 or 5 times a power of ten apart) from first to last."""
    span = last - first
    if not math.isfinite(span) or span <= 0 or count < 1:
        return (first,)
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    low, high = math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9)
    return tuple(round(k * step, 12) + 0.0 for k in range(low, high + 1))


def short_number(value: float) -> str:
    """Format a number without needless digits: 1200, 12.5, 0.004."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
