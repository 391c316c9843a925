"""A corpus: concatenated tokens of documents, divided into numbered samples of seq + 1 tokens.

Knows: the positions of samples, in which order they are taken, which targets count, and that every id must be inside
the model's vocabulary. Does not know: file formats (`token_file.py` and others). Imports no torch.

Samples are windows of `seq` tokens plus the next token, so documents are divided where a window ends. Only if documents
must stay whole (a prompt with its completion) does a window contain whole documents, as many as fit, and padding.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.training.data.source import Marks, Tokens, shuffled

Row = NDArray[np.integer[Any]]
PIECE = 1 << 20
"""The number of tokens that are checked at a time."""
MOST_PIECES = 256
"""The most pieces that are checked. In larger corpora they are spread evenly; every sample is checked again when it is
read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Consecutive tokens, with what is known about them."""

    where: str
    """The file or folder, as an error line names it."""
    kind: str
    tokens: Row
    """Integers of any width, mapped from a file."""
    starts: NDArray[np.int64] | None = None
    """The first token of every document; None if documents are not known."""
    counted: NDArray[np.uint8] | None = None
    """For every token, whether its prediction counts in the loss; None: all of them do."""
    whole: bool = False
    """Whether documents are not cut over samples."""
    places: str = "position"
    """What an error line calls the number of a token."""
    notes: tuple[str, ...] = ()
    """Notes for the first lines of a run's output."""

    @property
    def num_documents(self) -> int | None:
        return None if self.starts is None else int(self.starts.size)

    def fingerprint(self) -> str:
        """Return a digest of the type, the size and pieces spread over the whole corpus: equal for a copy of the file
        with another name."""
        digest = hashlib.sha256(f"{self.tokens.dtype.str} {self.tokens.shape[0]}".encode())
        for first in spread(self.tokens.shape[0], 1 << 15, 32):
            digest.update(np.ascontiguousarray(self.tokens[first : first + (1 << 15)]).tobytes())
        for extra in (self.starts, self.counted):
            if extra is not None:
                digest.update(np.ascontiguousarray(extra).tobytes())
        return digest.hexdigest()[:16]

    def check_vocabulary(self, vocab: int) -> None:
        """Raise an error for the first id outside the vocabulary, before anything is trained."""
        for first in spread(self.tokens.shape[0], PIECE, MOST_PIECES):
            self.check(self.tokens[first : first + PIECE], first, vocab)

    def check(self, piece: Row, first: int, vocab: int) -> None:
        """Raise an error for an id outside the vocabulary in a piece that starts at token `first`."""
        if piece.size and (piece.min() < 0 or piece.max() >= vocab):
            bad = first + int(np.flatnonzero((piece < 0) | (piece >= vocab))[0])
            raise OctoPipeError(
                f"{self.where}: token {int(self.tokens[bad])} at {self.place(bad)} is outside the model's vocabulary "
                f"of {vocab}; use this model's tokenizer, or a larger --scale"
            )

    def place(self, token: int) -> str:
        """Return the position of a token in the terms of the file's format."""
        if self.starts is None or self.places == "position":
            return f"position {token}"
        document = int(np.searchsorted(self.starts, token, "right")) - 1
        return f"{self.places} {document + 1}, token {token - int(self.starts[document])}"


def spread(size: int, piece: int, most: int) -> range | list[int]:
    """Return the starts of pieces: of all of them, or of at most `most` of them, evenly spread from the first to the
    last."""
    if size <= piece * most:
        return range(0, size, piece)
    return sorted({round(k * (size - piece) / (most - 1)) for k in range(most)})


class Windows:
    """The samples of a corpus. Every pass over them has another order, which depends only on the seed and the pass.

    `apart`: documents of one sample are masked from each other, and no document's first token is a target.
    """

    def __init__(self, corpus: Corpus, *, vocab: int, seq: int, seed: int, apart: bool = False, shuffle: bool = True):
        self.corpus, self.vocab, self.seq, self.seed = corpus, vocab, seq, seed
        self.apart = apart and corpus.starts is not None
        self._shuffle = shuffle
        self._marked = self.apart or corpus.counted is not None
        self._length: NDArray[np.int64] | None
        if corpus.whole:
            self._first, self._length, self.cut = _whole_documents(corpus, seq)
        else:
            self._first, self._length, self.cut = _stream(corpus, seq), None, 0
        if self._marked:
            self._keep_what_counts()
        self.windows = int(self._first.size)

    def _keep_what_counts(self) -> None:
        """Drop samples without a target that counts, because they have no mean loss."""
        stop = self._first + (self.seq + 1 if self._length is None else self._length)
        counts = self._targets_before(stop) - self._targets_before(self._first + 1)
        self._first = self._first[counts > 0]
        self._length = None if self._length is None else self._length[counts > 0]
        if not self._first.size:
            raise OctoPipeError(
                f"{self.corpus.where}: no sample of {self.seq} tokens has a target that counts; use a longer --seq"
            )

    def _targets_before(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each of these positions, the number of tokens before it that count as targets."""
        corpus = self.corpus
        if corpus.counted is None:
            assert corpus.starts is not None
            return tokens - np.searchsorted(corpus.starts, tokens, "left")
        good = corpus.counted.astype(bool)
        if self.apart and corpus.starts is not None:
            good[corpus.starts[corpus.starts < good.size]] = False
        return np.concatenate([[0], np.cumsum(good, dtype=np.int64)])[tokens]

    def _window(self, number: int) -> tuple[int, int]:
        """Return the first token and the length of a sample."""
        lap, at = divmod(number, self.windows)
        k = shuffled(at, self.windows, self.seed + lap) if self._shuffle else at
        return int(self._first[k]), self.seq + 1 if self._length is None else int(self._length[k])

    def sample(self, number: int) -> Tokens:
        first, length = self._window(number)
        piece = self.corpus.tokens[first : first + length]
        self.corpus.check(piece, first, self.vocab)
        out = np.zeros(self.seq + 1, np.int64)
        out[:length] = piece
        return out

    def marks(self, number: int) -> Marks | None:
        if not self._marked:
            return None
        corpus = self.corpus
        first, length = self._window(number)
        counted = np.zeros(self.seq + 1, bool)
        counted[:length] = True if corpus.counted is None else corpus.counted[first : first + length] != 0
        positions = None
        if self.apart:
            assert corpus.starts is not None
            a, b = np.searchsorted(corpus.starts, (first, first + length))
            begins = corpus.starts[a:b] - first
            counted[begins] = False
            edges = np.unique(np.concatenate([[0], begins, [length] if length <= self.seq else []])).astype(np.int64)
            at = np.arange(self.seq, dtype=np.int64)
            positions = at - edges[np.searchsorted(edges, at, "right") - 1]
        return Marks(counted[1:], positions)

    def about(self) -> dict[str, object]:
        corpus = self.corpus
        return {
            "kind": corpus.kind,
            "name": corpus.where.rstrip("/").rsplit("/", 1)[-1],
            "fingerprint": corpus.fingerprint(),
            "tokens": int(corpus.tokens.shape[0]),
            "documents": corpus.num_documents,
            "documents_apart": self.apart,
            "seq": self.seq,
            "samples": self.windows,
        }


def _stream(corpus: Corpus, seq: int) -> NDArray[np.int64]:
    size = int(corpus.tokens.shape[0])
    count = (size - 1) // seq
    if count < 1:
        raise OctoPipeError(
            f"{corpus.where} has {size} tokens; a sequence of {seq} needs {seq + 1}: use a smaller --seq"
        )
    return np.arange(count, dtype=np.int64) * seq


def _whole_documents(corpus: Corpus, seq: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Put neighbouring documents into one window as long as they fit. Returns the windows' first tokens and lengths,
    and how many documents are longer than a window and are cut."""
    assert corpus.starts is not None
    edges = [*corpus.starts.tolist(), int(corpus.tokens.shape[0])]
    firsts: list[int] = []
    lengths: list[int] = []
    cut = 0
    for first, stop in itertools.pairwise(edges):
        size = min(stop - first, seq + 1)
        cut += stop - first > seq + 1
        if firsts and firsts[-1] + lengths[-1] == first and lengths[-1] + size <= seq + 1:
            lengths[-1] += size
        else:
            firsts.append(first)
            lengths.append(size)
    return np.array(firsts, np.int64), np.array(lengths, np.int64), cut
