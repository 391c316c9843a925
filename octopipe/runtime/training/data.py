"""Tokens to train on: made up, or mapped from a file. Sample i is the same whoever asks, on any number of ranks.

Knows: how a sample's number becomes tokens, and which samples a training step takes. Does not know: plans or
devices. A step takes `replicas x micro-batches x size` consecutive sample numbers, so what a run sees does not
depend on how they are spread, and a resumed run goes on where the old one stopped.

>>> tokens = SyntheticTokens(vocab=64, seq=8, seed=0)
>>> (tokens.sample(5) == tokens.sample(5)).all(), tokens.sample(5).shape
(True, (9,))
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import letters, shown

Tokens = NDArray[np.int64]
_ROUNDS = 4


class Source(Protocol):
    """Anything with numbered samples of seq + 1 tokens."""

    def sample(self, number: int) -> Tokens: ...


class SyntheticTokens:
    """A language with a grammar a small model can learn: most words have one likely successor.

    From word w the next one is `successor[w]` nine times out of ten, otherwise one of the 64 most frequent words.
    So the loss can fall from log(vocab) to about 0.75, and does so within tens of steps.
    """

    def __init__(self, *, vocab: int, seq: int, seed: int, noise: float = 0.1):
        if vocab < 2:
            raise OctoPipeError(f"a vocabulary of {vocab} words has nothing to predict; use a larger --scale")
        self.seq, self.seed, self.noise = seq, seed, noise
        # Few words are in use, as in any text: a large vocabulary must not make the task slow to learn.
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


class TokenFile:
    """Tokens of a text in a row: `.npy` (any integers) or `.bin` (uint16, or uint32 for large vocabularies).

    A `.bin` holds uint32 if its name ends in `.uint32.bin` or the vocabulary has more than 65,536 words. Samples
    are windows of `seq` tokens and the one behind; every pass over the file takes them in another order.
    """

    def __init__(self, path: str | os.PathLike[str], *, vocab: int, seq: int, seed: int):
        self.where, self.vocab, self.seq, self.seed = shown(path), vocab, seq, seed
        self.tokens = _open(Path(path), self.where, vocab)
        self.windows = (self.tokens.shape[0] - 1) // seq
        if self.windows < 1:
            raise OctoPipeError(
                f"{self.where} has {self.tokens.shape[0]} tokens; a sequence of {seq} needs {seq + 1}: "
                "use a smaller --seq"
            )

    def sample(self, number: int) -> Tokens:
        lap, at = divmod(number, self.windows)
        first = shuffled(at, self.windows, self.seed + lap) * self.seq
        out = self.tokens[first : first + self.seq + 1].astype(np.int64)
        if out.min() < 0 or out.max() >= self.vocab:
            bad = first + int(np.flatnonzero((out < 0) | (out >= self.vocab))[0])
            raise OctoPipeError(
                f"{self.where}: token {int(self.tokens[bad])} at position {bad} is outside the model's vocabulary of "
                f"{self.vocab}; use this model's tokenizer, or a larger --scale"
            )
        return out


def open_tokens(path: str | None, *, vocab: int, seq: int, seed: int) -> Source:
    """The file's tokens, or synthetic ones without a file."""
    if path is None:
        return SyntheticTokens(vocab=vocab, seq=seq, seed=seed)
    return TokenFile(path, vocab=vocab, seq=seq, seed=seed)


def micro_batches(source: Source, first: int, count: int, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of `count` micro-batches of `size` samples, from sample `first` on."""
    inputs, targets = [], []
    for m in range(count):
        rows = np.stack([source.sample(first + m * size + k) for k in range(size)])
        inputs.append(torch.from_numpy(rows[:, :-1].copy()))
        targets.append(torch.from_numpy(rows[:, 1:].copy()))
    return inputs, targets


IGNORED = -100
"""The target of a padded place: no loss counts it."""


def length_micro_batches(
    source: Source, first: int, numbers: Sequence[Sequence[int]], lengths: Sequence[int], dp: int
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Inputs, and (targets, weight), of micro-batches of sequences of different length.

    Sequence i of the step is sample `first + i`, cut to its length; shorter ones are padded behind, where no causal
    layer sees it. Weights make the mean over micro-batches and pipelines of the micro-batches' mean losses the mean
    over all tokens of the step.
    """
    inputs: list[Tensor] = []
    targets: list[tuple[Tensor, Tensor]] = []
    total, count = sum(lengths), dp * len(numbers)
    for group in numbers:
        longest = max(lengths[i] for i in group)
        rows = np.zeros((len(group), longest), np.int64)
        wanted = np.full((len(group), longest), IGNORED, np.int64)
        for row, i in enumerate(group):
            tokens = source.sample(first + i)[: lengths[i] + 1]
            rows[row, : lengths[i]] = tokens[:-1]
            wanted[row, : lengths[i]] = tokens[1:]
        inputs.append(torch.from_numpy(rows))
        share = count * sum(lengths[i] for i in group) / total
        targets.append((torch.from_numpy(wanted), torch.tensor(share, dtype=torch.float64)))
    return inputs, targets


def weighted(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss of one of `length_micro_batches`' targets."""

    def of(output: Any, target: tuple[Tensor, Tensor]) -> Tensor:
        value = loss(output, target[0])
        return value * target[1].to(value.dtype)

    return of


def shuffled(at: int, count: int, seed: int) -> int:
    """Where position `at` of 0 .. count-1 goes in a shuffle that needs no memory.

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


def _open(path: Path, where: str, vocab: int) -> NDArray[np.generic]:
    try:
        if not path.is_file():
            raise OctoPipeError(f"{where}: no such file; give a .bin or .npy of tokens")
        if path.suffix == ".npy":
            tokens = _mapped(path, where)
            if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
                raise OctoPipeError(f"{where} holds {tokens.dtype} of shape {tokens.shape}; give a row of integers")
            return tokens
        if path.suffix != ".bin":
            raise OctoPipeError(f"{where}: token files end in .bin (uint16 or uint32) or .npy")
        wide = path.name.endswith(".uint32.bin") or vocab > 1 << 16
        kind = np.dtype("<u4" if wide else "<u2")
        size = path.stat().st_size
        if size == 0 or size % kind.itemsize:
            raise OctoPipeError(f"{where} has {size} bytes, no whole number of {kind.name} tokens; write it again")
        return np.memmap(path, dtype=kind, mode="r")
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from None


def _mapped(path: Path, where: str) -> NDArray[np.generic]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a header is of an older Python is nothing to mend
            tokens: NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
            return tokens
    except Exception as error:  # a header is Python's text, and goes wrong in all the ways that has
        raise _unreadable(where, error) from None


def _unreadable(where: str, error: Exception) -> OctoPipeError:
    why = " ".join(str(error).split())[:120]
    return OctoPipeError(f"{where}: cannot be read as tokens ({letters(why)}); write it again")
