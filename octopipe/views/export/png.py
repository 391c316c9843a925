"""Timelines as PNG: the SVG of the same timeline, drawn by resvg (the extra `octopipe[png]`).

Knows: what resvg needs, and that without fonts on the machine the picture would lack all text. Does not know: where the
shapes are (scene.py) or how they are written (svg.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.simulation.timeline import Timeline
from octopipe.views.export.scene import timeline_scene
from octopipe.views.export.svg import timeline_svg

MAX_PIXELS = 64_000_000


def timeline_png(
    timelines: Timeline | Sequence[Timeline], *, width: float = 1000.0, scale: float = 2.0, title: str = ""
) -> bytes:
    """Draw one timeline, or several on a common axis; `scale` is pixels per unit of the SVG of the same width."""
    several = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    scene = timeline_scene(several, width=width, title=title)
    wide, high = round(scene.width * scale), round(scene.height * scale)
    if not 0 < wide * high <= MAX_PIXELS:
        raise OctoPipeError(f"a picture of {wide} x {high} pixels is too large; give a smaller --width")
    resvg = _resvg()
    if not _has_letters(resvg):
        raise OctoPipeError("this machine has no fonts, a PNG would lack its letters; install some, or export --to svg")
    picture = timeline_svg(several, width=width, title=title)
    return bytes(resvg.svg_to_bytes(svg_string=picture, width=wide, height=high))


def _resvg() -> Any:
    try:
        import resvg_py
    except ImportError:
        raise OctoPipeError(
            'PNG needs resvg; install it: pip install "octopipe[png]", or export --to svg, which needs nothing'
        ) from None
    return resvg_py


def _has_letters(resvg: Any) -> bool:
    """Whether text is drawn at all: resvg omits it silently if it finds no font."""
    page = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    letter = '<text x="2" y="16" font-size="16" font-family="sans-serif">M</text>'
    blank, written = (bytes(resvg.svg_to_bytes(svg_string=page.format(t))) for t in ("", letter))
    return blank != written
