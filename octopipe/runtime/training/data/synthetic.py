"""Synthetic tokens: a language with a grammar that a small model learns within tens of steps.

Knows: how a sample's number becomes tokens. Does not know: files. Imports no torch.

>>> tokens = SyntheticTokens(vocab=64, seq=8, seed=0)
>>> (tokens.sample(5) == tokens.sample(5)).all(), tokens.sample(5).shape
(True, (9,))
"""

from __future__ import annotations

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.training.data.source import Marks, Tokens


class SyntheticTokens:
    """Synthetic text in which most tokens have one likely successor.

    After token w comes `successor[w]` nine times out of ten, otherwise one of the 64 most frequent tokens. The loss can
    therefore fall from log(vocab) to about 0.75, and does so within tens of steps.
    """

    def __init__(self, *, vocab: int, seq: int, seed: int, noise: float = 0.1):
        if vocab < 2:
            raise OctoPipeError(f"a vocabulary of {vocab} words has nothing to predict; use a larger --scale")
        self.seq, self.seed, self.noise = seq, seed, noise
        # Only a few words are used: a large vocabulary must not make the task slow to learn.
        self.words = min(vocab, 64)
        self.successor = np.random.default_rng(seed).permutation(self.words)

    def sample(self, number: int) -> Tokens:
        rng = np.random.Generator(np.random.Philox(key=[self.seed & (2**64 - 1), number]))
        jumps = rng.random(self.seq + 1) < self.noise
        fresh = rng.integers(self.words, size=self.seq + 1)
        out = np.empty(self.seq + 1, np.int64)
        word = int(fresh[0])
        for t in range(self.seq + 1):
            out[t] = word
            word = int(fresh[t]) if jumps[t] else int(self.successor[word])
        return out

    def marks(self, number: int) -> Marks | None:
        return None

    def about(self) -> dict[str, object]:
        return {"kind": "synthetic", "words": self.words, "seq": self.seq}
