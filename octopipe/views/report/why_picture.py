"""Where the time of a step goes, as a picture: one bar per split, its parts in colours, hidden communication beneath.

Knows: how the parts that `search/planner/why.py` records are drawn as SVG. Does not know: how they are found, or the
page around the picture (cluster.py).
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from octopipe.base.display import milliseconds

COLOURS: Mapping[str, str] = {
    "products": "#3b6fb5",
    "cores": "#6fa3dd",
    "memory": "#8f7cc0",
    "launches": "#b9a9dc",
    "recomputation": "#5f8f8b",
    "tp": "#d98b2b",
    "cp": "#e6b35a",
    "ep": "#c9543f",
    "dp": "#e58a7a",
    "bubble": "#9aa3ad",
    "optimizer": "#5c9e57",
}
OTHER = "#777777"
WIDTH, LEAST_LEFT, RIGHT = 860, 200, 92
LETTER = 6.6
"""Approximate width of a character of a label."""
LEGEND = 212
"""Width of an entry of the legend."""
BAR, HIDDEN, GAP, TOP = 26, 7, 14, 26
MOST_ROWS = 12


def why_svg(rows: Sequence[tuple[str, Mapping[str, Any]]], *, alone: bool = False) -> str:
    """Draw a bar for each (label, parts), as long as its step; `alone`: as a file with its own text colours."""
    rows = list(rows)[:MOST_ROWS]
    steps = [_time(why["step_ms"]) for _, why in rows]
    longest = max(steps, default=1.0)
    names = _names(rows)
    per_line = WIDTH // LEGEND
    left = max([LEAST_LEFT, *(math.ceil(10 + LETTER * len(label)) for label, _ in rows)])
    height = TOP + len(rows) * (BAR + HIDDEN + GAP) + 16 + 20 * math.ceil(len(names) / per_line)
    text, quiet = ("#1c2430", "#5b6672") if alone else ("var(--text)", "var(--quiet)")
    space = ' xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif"' if alone else ""
    bars = [(label, why, step) for (label, why), step in zip(rows, steps, strict=True)]
    said = "Where the time of a step goes: " + "; ".join(f"{label} {milliseconds(step)}" for label, _, step in bars)
    out = [f'<svg{space} viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(said)}">']
    if alone:
        out.append(f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>')
    out.append(_text(0, 14, "Where the time of a step goes (thin: hidden behind other work)", quiet, "start"))
    wide = WIDTH - left - RIGHT
    for i, (label, why, step) in enumerate(bars):
        top = TOP + i * (BAR + HIDDEN + GAP)
        out.append(_text(left - 10, top + BAR / 2 + 5, label, text, "end"))
        at = hidden_at = float(left)
        for name, part in _parts(why):
            ms, hidden = _time(part["ms"]), _time(part.get("hidden_ms", 0.0))
            title = f"{label}: {part.get('title', name)} {milliseconds(ms)}, {100 * ms / step:.1f} % of the step"
            if hidden > 0:
                title += f"; {milliseconds(hidden)} more is hidden"
            at = _bar(out, at, top, BAR, ms / longest * wide, name, title)
            hidden_at = _bar(
                out, hidden_at, top + BAR + 1, HIDDEN - 1, min(hidden / longest * wide, WIDTH - hidden_at), name, title
            )
        out.append(_text(at + 8, top + BAR / 2 + 5, milliseconds(step), text, "start"))
    base = TOP + len(rows) * (BAR + HIDDEN + GAP) + 8
    for k, (name, title) in enumerate(names):
        x, y = float(LEGEND * (k % per_line)), base + 20 * (k // per_line)
        out.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" rx="2" fill="{COLOURS.get(name, OTHER)}"/>')
        out.append(_text(x + 18, y + 11, title, quiet, "start"))
    return "".join(out) + "</svg>"


def _bar(out: list[str], x: float, y: float, height: float, width: float, name: str, title: str) -> float:
    """Draw one part, and return where the next one begins."""
    if width > 0.2:
        out.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{COLOURS.get(name, OTHER)}">'
            f"<title>{html.escape(title)}</title></rect>"
        )
    return x + max(width, 0.0)


def _parts(why: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(str(name), part) for name, part in why["parts"].items()]


def _names(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, str]]:
    """Return the parts that are visible or hidden in any row, with their titles."""
    seen: dict[str, str] = {}
    for _, why in rows:
        for name, part in _parts(why):
            if _time(part["ms"]) + _time(part.get("hidden_ms", 0.0)) > 1e-3 * _time(why["step_ms"]):
                seen.setdefault(name, str(part.get("title", name)))
    return list(seen.items())


def _time(value: object) -> float:
    ms = float(value)  # type: ignore[arg-type]
    if not math.isfinite(ms):
        raise ValueError(f"a part of {ms} ms")
    return max(ms, 0.0)


def _text(x: float, y: float, words: str, fill: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="{fill}" text-anchor="{anchor}">{html.escape(words)}</text>'
    )
