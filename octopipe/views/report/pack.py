"""Arrays as compressed text, which keeps a report of 100,000 ops far below two megabytes.

Knows: integers as differences in byte planes, floats unchanged, deflate, base64. Does not know: timelines. The page's
decode.js decodes the same columns.

>>> pack = Packer(); column = pack.integers([3, 4, 5, 5], delta=True)
>>> unpack(pack.columns, pack.text())[column].tolist()
[3, 4, 5, 5]
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Packer:
    """Collects columns; `text()` returns all of them, compressed with deflate, in base64."""

    def __init__(self) -> None:
        self.columns: list[list[Any]] = []
        """For every column: type ("i" or "f"), number of values, bytes per value, whether it stores differences."""
        self._parts: list[bytes] = []

    def integers(self, values: ArrayLike, *, delta: bool = False) -> int:
        """Add a column of integers, below 2**31 in size; return its number."""
        array = np.asarray(values, np.int64)
        steps = np.diff(array, prepend=0) if delta else array
        folded = np.where(steps < 0, -2 * steps - 1, 2 * steps).astype(np.uint64)  # the sign becomes the lowest bit
        width = 1
        while width < 4 and folded.size and int(folded.max()) >= 1 << (8 * width):
            width += 1
        if folded.size and int(folded.max()) >= 1 << 32:
            raise ValueError("a packed integer needs more than 32 bits")
        planes = [((folded >> np.uint64(8 * b)) & np.uint64(255)).astype(np.uint8) for b in range(width)]
        return self._add("i", array.size, width, delta, b"".join(p.tobytes() for p in planes))

    def floats(self, values: ArrayLike) -> int:
        """Add a column of float64; return its number."""
        array = np.ascontiguousarray(values, np.float64).ravel()
        return self._add("f", array.size, 8, False, array.astype("<f8").tobytes())

    def _add(self, kind: str, size: int, width: int, delta: bool, data: bytes) -> int:
        self.columns.append([kind, size, width, int(delta)])
        self._parts.append(data)
        return len(self.columns) - 1

    def text(self) -> str:
        return base64.b64encode(zlib.compress(b"".join(self._parts), 9)).decode()


def unpack(columns: Sequence[Sequence[Any]], text: str) -> list[NDArray[Any]]:
    """Return the columns of a packed text (the counterpart of decode.js, for tests)."""
    data = zlib.decompress(base64.b64decode(text))
    out: list[NDArray[Any]] = []
    at = 0
    for kind, size, width, delta in columns:
        part = np.frombuffer(data, np.uint8, size * width, at)
        at += size * width
        if kind == "f":
            out.append(part.view("<f8"))
            continue
        folded = np.zeros(size, np.int64)
        for b in range(width):
            folded |= part[b * size : (b + 1) * size].astype(np.int64) << (8 * b)
        steps = np.where(folded & 1, -(folded + 1) // 2, folded // 2)
        out.append(np.cumsum(steps) if delta else steps)
    return out
