"""The interface of a source of samples, and the order in which samples are taken.

Knows: that sample i is the same on every rank and for any number of ranks, and how to shuffle an order without storing
it. Does not know: where tokens come from, or which samples a step takes (`batches.py`). Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
IGNORED = -100
"""The target at positions that do not count in any loss."""
_ROUNDS = 4


class Marks(NamedTuple):
    """What is known about a sample besides its tokens; arrays have one value per input token."""

    counted: NDArray[np.bool_]
    """Whether the target (the next token) counts in the loss."""
    positions: NDArray[np.int64] | None
    """The position of every input token in its document, counted from 0; None: documents of a sample see each other."""


class Source(Protocol):
    """The interface of numbered samples of seq + 1 tokens."""

    def sample(self, number: int) -> Tokens: ...

    def marks(self, number: int) -> Marks | None:
        """None for every sample if all targets of the source count and its documents are not masked from each other."""

    def about(self) -> dict[str, object]:
        """The identity of this source, which a checkpoint records."""


def shuffled(at: int, count: int, seed: int) -> int:
    """Return the position of item `at` of 0 .. count-1 in a shuffle that needs no memory.

    >>> sorted(shuffled(i, 10, seed=3) for i in range(10)) == list(range(10))
    True
    """
    # A Feistel network permutes 0 .. 4^bits - 1; walking on until the image is small enough keeps it one to one.
    bits = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = at >> bits, at & mask
        for turn in range(_ROUNDS):
            mixed = (right * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + turn * 0x8CB92BA72F3D8DD7) & (2**64 - 1)
            mixed = ((mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
            left, right = right, left ^ ((mixed >> 40) & mask)
        at = left << bits | right
        if at < count:
            return at
