"""Timelines as SVG, for papers and READMEs.

Knows: SVG. Does not know: where the shapes are (scene.py). The same timeline always gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from octopipe.simulation.timeline import Timeline
from octopipe.views.export.scene import Label, Line, Rect, Scene, timeline_scene

_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def timeline_svg(
    timelines: Timeline | Sequence[Timeline], *, width: float = 1000.0, title: str = "", unit: str = "ms"
) -> str:
    """Return one timeline, or several on a common axis, as an SVG document."""
    several = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    words = title or "; ".join(f"{t.label or 'timeline'}, {t.step_ms:.1f} {unit}" for t in several)
    return scene_svg(timeline_scene(several, width=width, title=title, unit=unit), words)


def scene_svg(scene: Scene, words: str) -> str:
    """Return the SVG document; `words` is the text for screen readers."""
    size = f'width="{_n(scene.width)}" height="{_n(scene.height)}" viewBox="0 0 {_n(scene.width)} {_n(scene.height)}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(words)} '
        f"font-family={quoteattr(_FONT)}>",
        f'<rect width="{_n(scene.width)}" height="{_n(scene.height)}" fill="#ffffff"/>',
    ]
    for s in scene.shapes:
        match s:
            case Rect():
                lines.append(
                    f'<rect x="{_n(s.x)}" y="{_n(s.y)}" width="{_n(s.width)}" height="{_n(s.height)}" fill="{s.fill}"/>'
                )
            case Line():
                lines.append(
                    f'<line x1="{_n(s.x1)}" y1="{_n(s.y1)}" x2="{_n(s.x2)}" y2="{_n(s.y2)}" '
                    f'stroke="{s.stroke}" stroke-width="{_n(s.width)}"/>'
                )
            case Label():
                anchor = "" if s.anchor == "start" else f' text-anchor="{s.anchor}"'
                weight = ' font-weight="600"' if s.bold else ""
                lines.append(
                    f'<text x="{_n(s.x)}" y="{_n(s.y)}" font-size="{_n(s.size)}"{anchor}{weight} '
                    f'fill="{s.fill}">{escape(s.text)}</text>'
                )
    return "\n".join([*lines, "</svg>", ""])


def _n(value: float) -> str:
    """Format a number with at most two decimals; no -0, no trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
