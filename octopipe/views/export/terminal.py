"""A timeline as coloured text that fits the terminal.

Knows: cells of characters. Does not know: what it is printed to; without colour (a pipe, NO_COLOR) the same picture is
plain ASCII: an op starts with its kind in upper case and continues in lower case, idle time is a dot.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from octopipe.plans.plan import KINDS
from octopipe.simulation.timeline import Timeline
from octopipe.views.export.style import COLOURS, NAMES, SHADES, kinds_in, shade, short_number, ticks

MIN_CELLS = 20
_INK = "rgb(16,24,32)"


class TimelineText:
    """A rich renderable; width and colour default to those of the console that prints it."""

    def __init__(self, timeline: Timeline, width: int | None = None, color: bool | None = None):
        self.timeline, self.width, self.color = timeline, width, color

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        color = self.color if self.color is not None else console.color_system is not None
        shades = 1 if console.color_system in ("standard", "windows") else SHADES  # 16 colours have no shades
        yield from timeline_lines(self.timeline, self.width or options.max_width, color, shades)


def timeline_text(timeline: Timeline, width: int | None = None, color: bool | None = None) -> TimelineText:
    """Return the timeline for `console.print`: one line per rank, an axis and a legend."""
    return TimelineText(timeline, width, color)


def timeline_lines(timeline: Timeline, width: int, color: bool, shades: int = SHADES) -> Iterator[Text]:
    """Yield the picture line by line, at most `width` wide (but with at least MIN_CELLS cells)."""
    if timeline.spans.rank.size == 0:
        yield Text("(an empty timeline)")
        return
    quiet = "dim" if color else ""
    names = [f"rank {r} " for r in range(timeline.num_ranks)]
    left = max(map(len, names))
    right = len(" 100.0% busy")
    cells = max(width - left - right, MIN_CELLS)
    horizon = timeline.makespan_ms
    # Relative to the whole step, like the bubble: over all ranks the two add up to 100 %.
    busy = timeline.busy_ms / timeline.step_ms if timeline.step_ms > 0 else np.zeros(timeline.num_ranks)
    for rank, name in enumerate(names):
        line = Text(no_wrap=True, overflow="crop")
        line.append(name.rjust(left), style=quiet)
        line.append_text(_lane(timeline, rank, cells, horizon, color, shades))
        line.append(f" {busy[rank]:6.1%} busy", style=quiet)
        yield line
    yield Text(" " * left + _axis(horizon, cells), style=quiet, no_wrap=True, overflow="crop")
    yield _legend(timeline, left, color)


def _owners(timeline: Timeline, rank: int, cells: int, horizon: float) -> np.ndarray:
    """Return, for every cell, the span that fills most of it, or -1 if idle time does."""
    mine = np.flatnonzero(timeline.spans.rank == rank)
    scale = cells / horizon if horizon > 0 else 0.0
    owner = np.full(cells, -1, np.int64)
    cover, idle = np.zeros(cells), np.ones(cells)
    starts, ends = timeline.spans.start_ms[mine] * scale, timeline.spans.end_ms[mine] * scale
    for span, a, b in zip(mine.tolist(), starts.tolist(), ends.tolist()):
        first, last = int(a), min(int(np.ceil(b)), cells)
        if last - first > 2:  # cells fully inside a long op need no arithmetic
            inside = slice(first + 1, last - 1)
            owner[inside], cover[inside], idle[inside] = span, 1.0, 0.0
        for cell in {first, last - 1}:
            if 0 <= cell < cells:
                part = min(b, cell + 1) - max(a, cell)
                idle[cell] -= part
                if part > cover[cell]:
                    cover[cell], owner[cell] = part, span
    return np.where(idle > np.maximum(cover, 1e-9), -1, owner)


def _lane(timeline: Timeline, rank: int, cells: int, horizon: float, color: bool, shades: int) -> Text:
    owner = _owners(timeline, rank, cells, horizon)
    edges = np.flatnonzero(np.diff(owner, prepend=-2, append=-2))
    line = Text()
    for a, b in zip(edges.tolist(), edges[1:].tolist()):
        span, room = int(owner[a]), b - a
        if span < 0:
            line.append("." * room if not color else " " * room)
            continue
        kind, micro_batch = KINDS[timeline.spans.kind[span]], int(timeline.spans.micro_batch[span])
        label = f"{kind}{micro_batch}"
        if color:
            text = (label if len(label) <= room else kind).ljust(room)
            tint = shade(COLOURS[kind], 2 * (micro_batch % 2) if shades > 1 else 0)
            line.append(text, style=f"{_INK} on rgb({tint[0]},{tint[1]},{tint[2]})")
        else:
            text = label if len(label) <= room else kind
            line.append(text + kind.lower() * (room - len(text)))
    return line


def _axis(horizon: float, cells: int) -> str:
    """Return the ticks under the cells: 0 ms, then round numbers."""
    out = [" "] * cells
    for at in ticks(0.0, horizon, max(cells // 16, 1)):
        text = "|" + short_number(at) + (" ms" if at == 0 else "")
        cell = min(int(at / horizon * cells), cells - 1) if horizon > 0 else 0
        if cell + len(text) <= cells and all(c == " " for c in out[cell : cell + len(text)]):
            out[cell : cell + len(text)] = text
    return "".join(out)


def _legend(timeline: Timeline, left: int, color: bool) -> Text:
    line = Text(" " * left, no_wrap=True, overflow="ellipsis")
    for kind in kinds_in(set(timeline.spans.kind.tolist())):
        tint = COLOURS[kind]
        line.append(f" {kind} ", style=f"{_INK} on rgb({tint[0]},{tint[1]},{tint[2]})" if color else "")
        line.append(f" {NAMES[kind]}  " if color else f"{NAMES[kind]} ", style="dim" if color else "")
    line.append("then the micro-batch", style="dim" if color else "")
    return line
