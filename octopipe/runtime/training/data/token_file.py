"""Files of bare token ids: `.npy`, and `.bin` (numbers of one type in a row and nothing else).

Knows: which type a `.bin` holds, or that this cannot be known. Does not know: documents, or how samples are cut
(`corpus.py`). Imports no torch.

The type of a `.bin` is given by `--data-dtype`, or by a name that ends in, for example, `.int32.bin`. Otherwise it is
inferred: a type is possible if every id read with it is inside the vocabulary, and the file is read only if exactly one
type is possible. A file of int32 ids is also possible as uint16 (every second number would be 0), so it is rejected
rather than guessed; a vocabulary of more than 65,536 rules out uint16 if a wider type is possible.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import letters, shown
from octopipe.runtime.training.data.corpus import MOST_PIECES, PIECE, Corpus, Row, Windows, spread

BIN_DTYPES = ("uint16", "int32", "uint32", "int64", "uint8", "uint64")
"""The values of `--data-dtype`."""
_TRIED = ("uint16", "int32", "int64")
"""The types that a `.bin` without a stated type may have. Ids are never negative, so uint32 and uint64 read the
same."""


class TokenFile(Windows):
    """The samples of a `.npy` or `.bin` file."""

    def __init__(
        self, path: str | os.PathLike[str], *, vocab: int, seq: int, seed: int, dtype: str | None = None
    ) -> None:
        corpus = read_tokens(path, vocab=vocab, dtype=dtype)
        corpus.check_vocabulary(vocab)
        super().__init__(corpus, vocab=vocab, seq=seq, seed=seed)


def look(path: str | os.PathLike[str], dtype: str | None = None) -> None:
    """Raise an error for everything that is wrong with the file and can be seen quickly, without the model."""
    where = shown(path)
    if Path(path).suffix == ".npy":
        _npy(Path(path), where, dtype)
        return
    _whole(Path(path), where, stated(path, dtype))


def read_tokens(path: str | os.PathLike[str], *, vocab: int, dtype: str | None = None) -> Corpus:
    """Return the tokens of the file, memory-mapped."""
    where = shown(path)
    if Path(path).suffix == ".npy":
        return Corpus(where=where, kind="npy", tokens=_npy(Path(path), where, dtype))
    kind = stated(path, dtype)
    _whole(Path(path), where, kind)
    tokens = _mapped(Path(path), where, kind) if kind is not None else _found(Path(path), where, vocab)
    note = () if dtype is not None else (f"{where}: read as {tokens.dtype.name}",)
    return Corpus(where=where, kind="bin", tokens=tokens, notes=note)


def stated(path: str | os.PathLike[str], dtype: str | None) -> str | None:
    """Return the type that a flag or the file's name states, or None."""
    named = next((kind for kind in BIN_DTYPES if Path(path).name.endswith(f".{kind}.bin")), None)
    if dtype is not None and named is not None and np.dtype(dtype).itemsize != np.dtype(named).itemsize:
        raise OctoPipeError(f"{shown(path)}: its name says {named}, --data-dtype {dtype}; rename it or leave one out")
    return dtype or named


def _whole(path: Path, where: str, kind: str | None) -> None:
    if path.suffix != ".bin":
        raise OctoPipeError(f"{where}: token files end in .bin or .npy")
    try:
        if not path.is_file():
            raise OctoPipeError(f"{where}: no such file; give a .jsonl, .npy or .bin, or a saved dataset's folder")
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from None
    width = np.dtype(kind or "uint16").itemsize
    if size == 0 or size % width:
        raise OctoPipeError(f"{where} has {size} bytes, no whole number of {kind or 'uint16'} tokens; write it again")


def _found(path: Path, where: str, vocab: int) -> Row:
    """Return the tokens in the only type that is possible."""
    size = path.stat().st_size
    possible, first_wrong = [], ""
    for kind in _TRIED:
        if size % np.dtype(kind).itemsize:
            continue
        tokens = _mapped(path, where, kind)
        wrong = _outside(tokens, vocab)
        if wrong is None:
            possible.append(kind)
        elif not first_wrong:
            first_wrong = f"token {int(tokens[wrong])} at position {wrong}, read as {kind},"
    if "uint16" in possible and len(possible) > 1 and vocab > 1 << 16:
        possible.remove("uint16")  # it cannot hold this vocabulary
    if len(possible) == 1:
        return _mapped(path, where, possible[0])
    if not possible:
        raise OctoPipeError(
            f"{where}: {first_wrong} is outside the model's vocabulary of {vocab}, and no other type of ids fits; use "
            "this model's tokenizer, or a larger --scale"
        )
    raise OctoPipeError(
        f"{where}: every id would be inside the vocabulary of {vocab} as {' and as '.join(possible)}; say which it is: "
        f"--data-dtype {possible[-1]}"
    )


def _outside(tokens: Row, vocab: int) -> int | None:
    """Return the first position, among those checked, whose id is outside the vocabulary; None if there is none."""
    for first in spread(tokens.shape[0], PIECE, MOST_PIECES):
        piece = tokens[first : first + PIECE]
        if piece.min() < 0 or piece.max() >= vocab:
            return first + int(np.flatnonzero((piece < 0) | (piece >= vocab))[0])
    return None


def _mapped(path: Path, where: str, kind: str) -> Row:
    try:
        return np.memmap(path, dtype=np.dtype(kind).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from None


def _npy(path: Path, where: str, dtype: str | None) -> Row:
    try:
        if not path.is_file():
            raise OctoPipeError(f"{where}: no such file; give a .jsonl, .npy or .bin, or a saved dataset's folder")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a header written by an older Python is not a problem
            tokens: Row = np.load(path, mmap_mode="r", allow_pickle=False)
    except OctoPipeError:
        raise
    except Exception as error:  # a header is a Python literal, whose parsing can fail in many ways
        raise _unreadable(where, error) from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        what = f"{tokens.dtype} of shape {tokens.shape}" if isinstance(tokens, np.ndarray) else "several arrays"
        raise OctoPipeError(f"{where} holds {what}; give a row of integers")
    if dtype is not None and tokens.dtype.name != dtype:
        raise OctoPipeError(f"{where} states that it holds {tokens.dtype}; leave --data-dtype {dtype} out")
    return tokens


def _unreadable(where: str, error: Exception) -> OctoPipeError:
    why = " ".join(str(error).split())[:120]
    return OctoPipeError(f"{where}: cannot be read as tokens ({letters(why)}); write it again")
