"""A timeline as plain shapes for the SVG writer, in the style of pipeline papers.

Knows: rows of boxes with micro-batch numbers, an axis, a legend. Does not know: file formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import KINDS
from octopipe.simulation.timeline import Timeline
from octopipe.views.export.style import COLOURS, NAMES, kinds_in, shade, short_number, ticks

INK, QUIET, IDLE, GRID = "#17212b", "#5b6875", "#f1f3f5", "#d8dee5"
AFTER = "#b9c2cc"
"""The colour of what follows the last op of a rank."""
LEFT, RIGHT, LANE, GAP, TITLE, AXIS, LEGEND = 58.0, 14.0, 22.0, 3.0, 22.0, 24.0, 28.0
_LETTER = 0.6
"""Approximate width of a character relative to the font size, close enough for every font."""


class Rect(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    fill: str


class Line(NamedTuple):
    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str
    width: float = 1.0


class Label(NamedTuple):
    x: float
    y: float
    """The y coordinate of the text's baseline."""
    text: str
    size: float = 11.0
    anchor: str = "start"
    fill: str = INK
    bold: bool = False


Shape = Rect | Line | Label


class Scene(NamedTuple):
    width: float
    height: float
    shapes: tuple[Shape, ...]


def timeline_scene(timelines: Sequence[Timeline], *, width: float = 1000.0, title: str = "", unit: str = "ms") -> Scene:
    """Draw timelines on a common time axis; `unit` labels it (a schematic's unit is not ms)."""
    if not timelines or all(t.spans.rank.size == 0 for t in timelines):
        raise OctoPipeError("there is nothing to draw; the timeline has no ops")
    if not width >= 200:
        raise OctoPipeError(f"a picture {width:g} wide has no room; give at least 200")
    horizon = max(t.step_ms for t in timelines) or 1.0
    scale = (width - LEFT - RIGHT) / horizon
    shapes: list[Shape] = []
    y = 6.0
    if title:
        shapes.append(Label(LEFT, y + 14, title, 13, bold=True))
        y += TITLE
    for timeline in timelines:
        if len(timelines) > 1 or timeline.label:
            name = timeline.label or ("measured" if timeline.measured else "plan")
            facts = (
                f"{name}: {short_number(round(timeline.step_ms, 1))} {unit}, {100 * timeline.bubble_ratio:.1f} % bubble"
            )
            shapes.append(Label(LEFT, y + 15, facts, 11))
            y += TITLE
        for rank in range(timeline.num_ranks):
            shapes += _lane(timeline, rank, y, scale, timeline.step_ms)
            y += LANE + GAP
        x = LEFT + timeline.step_ms * scale
        shapes.append(Line(x, y - timeline.num_ranks * (LANE + GAP) - 2, x, y, INK, 1.0))
        y += 4.0
    shapes += _axis(horizon, y, scale, width, unit)
    y += AXIS
    shapes += _legend(timelines, y)
    return Scene(width, y + LEGEND, tuple(shapes))


_ROWS = ((0.0, 1.0), (0.0, 0.62), (0.68, 0.32))
"""Vertical start and height of an op as shares of its rank's lane: all of it; compute above; exchange below."""


def _pieces(timeline: Timeline, rank: int) -> list[tuple[int, int, float, float]]:
    """Return span, row of `_ROWS`, start and end of everything that a rank did, in order of time."""
    s, n = timeline.spans, timeline.lanes
    if n is None:
        mine = np.flatnonzero(s.rank == rank)
        return [(i, 0, a, b) for i, a, b in zip(mine.tolist(), s.start_ms[mine].tolist(), s.end_ms[mine].tolist())]
    mine = np.flatnonzero(s.rank[n.span] == rank)
    columns = n.span[mine].tolist(), (n.lane[mine] + 1).tolist(), n.start_ms[mine].tolist(), n.end_ms[mine].tolist()
    return sorted(zip(*columns, strict=True), key=lambda piece: piece[2])


def _lane(timeline: Timeline, rank: int, y: float, scale: float, step_ms: float) -> list[Shape]:
    shapes: list[Shape] = [
        Label(LEFT - 8, y + LANE / 2 + 4, f"rank {rank}", 11, "end", QUIET),
        Rect(LEFT, y, step_ms * scale, LANE, IDLE),
    ]
    s = timeline.spans
    held: dict[int, tuple[int, Rect]] = {}
    for i, lane, start, end in _pieces(timeline, rank):
        a, b = LEFT + start * scale, LEFT + end * scale
        top, height = _ROWS[lane][0] * LANE + y, _ROWS[lane][1] * LANE
        kind, micro_batch = KINDS[s.kind[i]], int(s.micro_batch[i])
        r, g, blue = shade(COLOURS[kind], micro_batch)
        fill = f"#{r:02x}{g:02x}{blue:02x}"
        wide = b - a
        if wide < 0.4:
            # Ops too thin to see are merged with a thin op just before; otherwise a large plan makes a huge file.
            if lane in held and a - (held[lane][1].x + held[lane][1].width) < 0.4 and held[lane][1].width < 1.5:
                at, thin = held[lane]
                shapes[at] = thin._replace(width=b - thin.x)
                held[lane] = at, thin._replace(width=b - thin.x)
                continue
            held[lane] = len(shapes), Rect(a, top, wide, height, fill)
            shapes.append(held[lane][1])
            continue
        held.pop(lane, None)
        shapes.append(Rect(a, top, wide - 0.6 if wide > 3 else wide, height, fill))
        text = str(micro_batch)
        if lane < 2 and len(text) * 10 * _LETTER + 3 < wide:
            shapes.append(Label((a + b) / 2, top + height / 2 + 3.6, text, 10, "middle"))
    for extra in timeline.extras:
        if extra.rank == rank:
            a = LEFT + extra.start_ms * scale
            shapes.append(Rect(a, y + 4, (extra.end_ms - extra.start_ms) * scale, LANE - 8, AFTER))
    return shapes


def _axis(horizon: float, y: float, scale: float, width: float, unit: str) -> list[Shape]:
    shapes: list[Shape] = [Line(LEFT, y, width - RIGHT, y, GRID, 1.0)]
    for at in ticks(0.0, horizon, max(int((width - LEFT - RIGHT) / 110), 1)):
        x = LEFT + at * scale
        shapes.append(Line(x, y, x, y + 4, QUIET, 1.0))
        shapes.append(Label(x, y + 16, short_number(at), 10, "middle", QUIET))
    shapes.append(Label(LEFT - 18, y + 16, unit, 10, "end", QUIET))
    return shapes


def _legend(timelines: Sequence[Timeline], y: float) -> list[Shape]:
    shapes: list[Shape] = []
    used = kinds_in({int(k) for t in timelines for k in np.unique(t.spans.kind)})
    x = LEFT
    for kind in used:
        shapes.append(Rect(x, y + 4, 12, 12, "#{:02x}{:02x}{:02x}".format(*COLOURS[kind])))
        text = f"{kind} {NAMES[kind]}"
        shapes.append(Label(x + 18, y + 14, text, 11, fill=QUIET))
        x += 18 + len(text) * 11 * _LETTER + 14
    if any(t.extras for t in timelines):
        shapes.append(Rect(x, y + 6, 12, 8, AFTER))
        shapes.append(Label(x + 18, y + 14, "gradient reduction, optimizer", 11, fill=QUIET))
    return shapes
