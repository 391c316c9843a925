"""Bars, lines and timelines for the figures of the paper.

Knows: shapes on a plane (export/scene.py). Does not know: file formats other than SVG, or what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from octopipe.views.export.scene import GRID, INK, QUIET, Label, Line, Rect, Scene, Shape
from octopipe.views.export.style import short_number, ticks
from octopipe.views.export.svg import scene_svg

COLOURS = ("#9aa5b1", "#4f8fd0", "#f7bb42", "#2cbe6a", "#de653a", "#c6aac4", "#5b6875", "#d33d61")
LEFT, RIGHT, TOP, HEIGHT, FOOT = 54.0, 16.0, 72.0, 220.0, 64.0
PAPER = "#17212b"
"""The colour of the marks for the paper's values."""
WIDE = 22.0
"""Width of a bar with room for its number."""
FEW_POINTS = 24
"""Curves with at most this many points show each of them."""


def bars(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: str,
    paper: Mapping[str, Sequence[float | None]] | None = None,
    base: float = 0.0,
) -> str:
    """Draw groups of bars from `base` up, one colour per series; a black line across a bar is the paper's value."""
    marks = paper or {}
    every = [v for values in (*series.values(), *marks.values()) for v in values if v is not None]
    top = max(every, default=1.0) * 1.08
    width = max(640.0, _title_width(title), LEFT + RIGHT + len(groups) * (len(series) * WIDE + 18.0))
    group_width = (width - LEFT - RIGHT) / max(len(groups), 1)
    bar = min(34.0, (group_width - 12.0) / max(len(series), 1))
    scale = HEIGHT / (top - base) if top > base else 1.0
    floor = TOP + HEIGHT
    shapes = _frame(title, width, base, top, scale, unit)
    shapes += _legend(list(series), bool(marks))
    for g, group in enumerate(groups):
        x = LEFT + g * group_width + (group_width - bar * len(series)) / 2
        for k, (name, values) in enumerate(series.items()):
            value = values[g]
            if value is None:
                continue
            tall = max((value - base) * scale, 0.0)
            shapes.append(Rect(x + k * bar, floor - tall, bar - 2, tall, COLOURS[k % len(COLOURS)]))
            mark = marks.get(name, [None] * len(groups))[g]
            above = None if mark is None else (mark - value) * scale
            # A number that the paper's mark would cross is written inside the bar.
            inside = above is not None and -4 < above < 14 and tall > 24
            y = floor - tall + (12 + max(-above, 0.0) if inside and above is not None else -3)
            shown = f"{value:.{2 if top < 20 else 1 if top < 100 else 0}f}"
            shapes.append(Label(x + (k + 0.5) * bar - 1, y, shown, 8, "middle", INK if inside else QUIET))
            if mark is not None:
                y = floor - (mark - base) * scale
                shapes.append(Line(x + k * bar - 1, y, x + (k + 1) * bar - 1, y, PAPER, 2.0))
        for n, word in enumerate(group.split("\n")):
            shapes.append(Label(LEFT + (g + 0.5) * group_width, floor + 15 + 12 * n, word, 10, "middle", QUIET))
    return scene_svg(Scene(width, floor + FOOT - 20, tuple(shapes)), title)


def lines(
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_name: str,
    y_name: str,
    points: Mapping[str, tuple[float, float]] | None = None,
    width: float = 720.0,
) -> str:
    """Draw curves through points, one colour each; `points` are named black marks for the paper's values."""
    marks = points or {}
    width = max(width, _title_width(title))
    every = [*(p for curve in curves.values() for p in curve), *marks.values()]
    first, last = min(p[0] for p in every), max(p[0] for p in every)
    low, high = min(p[1] for p in every), max(p[1] for p in every)
    if marks:  # a mark at the very edge would cut off its name
        first, last = first - (last - first) * 0.02, last + (last - first) * 0.02
    room = (high - low) * 0.05 or 1.0
    low, high = low - room, high + room
    across = (width - LEFT - RIGHT) / ((last - first) or 1.0)
    scale = HEIGHT / (high - low)
    floor = TOP + HEIGHT
    shapes = _frame(title, width, low, high, scale, y_name)
    shapes += _legend(list(curves), False, first=1)
    for k, curve in enumerate(curves.values()):
        for (x1, y1), (x2, y2) in pairwise(curve):
            shapes.append(
                Line(
                    LEFT + (x1 - first) * across,
                    floor - (y1 - low) * scale,
                    LEFT + (x2 - first) * across,
                    floor - (y2 - low) * scale,
                    COLOURS[(k + 1) % len(COLOURS)],
                    2.0,
                )
            )
        if len(curve) <= FEW_POINTS:
            for x, y in curve:
                at_x, at_y = LEFT + (x - first) * across, floor - (y - low) * scale
                shapes.append(Rect(at_x - 3, at_y - 3, 6, 6, COLOURS[(k + 1) % len(COLOURS)]))
    for name, (x, y) in marks.items():
        at_x, at_y = LEFT + (x - first) * across, floor - (y - low) * scale
        shapes.append(Rect(at_x - 4, at_y - 4, 8, 8, PAPER))
        side = "end" if at_x > width / 2 else "start"
        shapes.append(Label(at_x + (-9 if side == "end" else 9), at_y + 4, name, 11, side))
    for at in ticks(first, last, 6):
        shapes.append(Label(LEFT + (at - first) * across, floor + 15, short_number(at), 10, "middle", QUIET))
    shapes.append(Label(width - RIGHT, floor + 30, x_name, 10, "end", QUIET))
    return scene_svg(Scene(width, floor + FOOT - 24, tuple(shapes)), title)


def _title_width(title: str) -> float:
    """Return the width of a picture in which the title is not cut off."""
    return LEFT + RIGHT + 7.8 * len(title)


def _frame(title: str, width: float, base: float, top: float, scale: float, unit: str) -> list[Shape]:
    shapes: list[Shape] = [Label(LEFT, 20, title, 13, bold=True), Label(8, TOP - 14, unit, 10, fill=QUIET)]
    for at in ticks(base, top, 5):
        y = TOP + HEIGHT - (at - base) * scale
        shapes.append(Line(LEFT, y, width - RIGHT, y, GRID, 1.0))
        shapes.append(Label(LEFT - 6, y + 3.5, short_number(at), 10, "end", QUIET))
    shapes.append(Line(LEFT, TOP + HEIGHT, width - RIGHT, TOP + HEIGHT, INK, 1.0))
    return shapes


def _legend(names: Sequence[str], marked: bool, *, first: int = 0) -> list[Shape]:
    shapes: list[Shape] = []
    x = LEFT
    for k, name in enumerate(names):
        shapes.append(Rect(x, 32, 11, 11, COLOURS[(k + first) % len(COLOURS)]))
        shapes.append(Label(x + 16, 41, name, 11, fill=QUIET))
        x += 24 + len(name) * 6.6
    if marked:
        shapes.append(Line(x, 38, x + 14, 38, PAPER, 2.0))
        shapes.append(Label(x + 19, 41, "the paper's", 11, fill=QUIET))
    return shapes
