"""Timelines as PNG, without any imaging library: boxes, lines and letters onto an array, then zlib.

Knows: pixels and the PNG format. Does not know: where the shapes stand (scene.py) or how letters look
(letters.py).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from octopipe.errors import OctoPipeError
from octopipe.export.letters import HEIGHT, glyph
from octopipe.export.scene import Label, Line, Rect, Scene, timeline_scene
from octopipe.timeline import Timeline

Image = NDArray[np.float32]
MAX_PIXELS = 64_000_000


def timeline_png(
    timelines: Timeline | Sequence[Timeline], *, width: float = 1000.0, scale: float = 2.0, title: str = ""
) -> bytes:
    """One timeline, or several on a common axis; `scale` is pixels per unit of the SVG of the same width."""
    several = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    return scene_png(timeline_scene(several, width=width, title=title), scale)


def scene_png(scene: Scene, scale: float) -> bytes:
    wide, high = round(scene.width * scale), round(scene.height * scale)
    if not 0 < wide * high <= MAX_PIXELS:
        raise OctoPipeError(f"a picture of {wide} x {high} pixels is too large; give a smaller --width")
    image = np.full((high, wide, 3), 255, np.float32)
    for s in scene.shapes:
        match s:
            case Rect():
                x, y = s.x * scale, s.y * scale
                _box(image, x, y, x + s.width * scale, y + s.height * scale, _rgb(s.fill))
            case Line():
                half = s.width * scale / 2
                x1, x2, y1, y2 = (v * scale for v in (s.x1, s.x2, s.y1, s.y2))
                # The scenes hold upright and level lines only: a thin box each.
                dx, dy = (half, 0.0) if s.x1 == s.x2 else (0.0, half)
                _box(image, x1 - dx, y1 - dy, x2 + dx, y2 + dy, _rgb(s.stroke))
            case Label():
                _text(image, s, scale)
    return _encode(np.rint(image).astype(np.uint8))


def _rgb(colour: str) -> NDArray[np.float32]:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], np.float32)


def _cover(a: float, b: float, size: int) -> tuple[int, NDArray[np.float32]]:
    """The first pixel that [a, b] touches, and how much of each pixel from there it covers."""
    a, b = max(a, 0.0), min(b, float(size))
    first, stop = int(a), int(np.ceil(b))
    at = np.arange(first, max(stop, first), dtype=np.float32)
    return first, np.clip(np.minimum(at + 1, b) - np.maximum(at, a), 0, 1).astype(np.float32)


def _box(image: Image, x0: float, y0: float, x1: float, y1: float, colour: NDArray[np.float32]) -> None:
    left, across = _cover(x0, x1, image.shape[1])
    top, down = _cover(y0, y1, image.shape[0])
    _blend(image, left, top, np.outer(down, across), colour)


def _blend(image: Image, left: int, top: int, alpha: NDArray[np.float32], colour: NDArray[np.float32]) -> None:
    part = image[top : top + alpha.shape[0], left : left + alpha.shape[1]]
    alpha = alpha[: part.shape[0], : part.shape[1], None]
    part += alpha * (colour - part)


def _text(image: Image, label: Label, scale: float) -> None:
    size = label.size * scale
    stencils = [_stencil(c, round(size, 3), label.bold) for c in label.text]
    length = sum(advance for _, _, advance in stencils)
    x = label.x * scale - {"start": 0.0, "middle": length / 2, "end": length}[label.anchor]
    baseline = round(label.y * scale)
    colour = _rgb(label.fill)
    for alpha, above, advance in stencils:
        left, top = round(x), baseline - above
        if left >= 0 and top >= 0:
            _blend(image, left, top, alpha, colour)
        x += advance


@lru_cache(maxsize=1024)
def _stencil(letter: str, size: float, bold: bool) -> tuple[NDArray[np.float32], int, float]:
    """Coverage of a letter's pixels, how many rows stand above the baseline, and how far the pen moves."""
    lines, width = glyph(letter)
    unit = size * 0.72 / HEIGHT
    half = size * (0.062 if bold else 0.045)
    margin = int(np.ceil(half)) + 1
    above, below = int(np.ceil(HEIGHT * unit)) + margin, int(np.ceil(2 * unit)) + margin
    wide = int(np.ceil(width * unit)) + 2 * margin
    ys, xs = np.mgrid[0 : above + below, 0:wide].astype(np.float32) + 0.5
    distance = np.full(xs.shape, np.inf, np.float32)
    for line in lines:
        points = [(px * unit + margin, above - py * unit) for px, py in line]
        for (ax, ay), (bx, by) in zip(points, points[1:] or points):
            along = np.clip(
                ((xs - ax) * (bx - ax) + (ys - ay) * (by - ay)) / max((bx - ax) ** 2 + (by - ay) ** 2, 1e-9), 0, 1
            )
            gap = np.hypot(xs - ax - along * (bx - ax), ys - ay - along * (by - ay))
            distance = np.minimum(distance, gap)
    return np.clip(half + 0.5 - distance, 0, 1).astype(np.float32), above, (width + 1.9) * unit


def _encode(image: NDArray[np.uint8]) -> bytes:
    high, wide, _ = image.shape
    rows = np.zeros((high, wide * 3 + 1), np.uint8)
    rows[:, 1:] = image.reshape(high, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
