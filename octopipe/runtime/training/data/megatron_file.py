"""Megatron's indexed datasets: `X.bin` with the ids, `X.idx` with their type, sequences and documents.

Knows: the index's layout (version 1, as Megatron-LM's `core/datasets/indexed_dataset.py` writes it) and that every
number in it must agree with the `.bin`. Does not know: how samples are cut (`corpus.py`). Imports no torch.

    9 bytes  b"MMIDIDX\\0\\0"
    u64      version, 1
    u8       code of the ids' type
    u64      sequences S
    u64      entries D of the document index (documents + 1)
    i32[S]   tokens of every sequence
    i64[S]   where every sequence begins in the .bin, in bytes
    i64[D]   the first sequence of every document, and S
    i8[S]    modes, only in multimodal datasets
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import shown
from octopipe.runtime.training.data.corpus import Corpus

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def paths_of(path: str | os.PathLike[str]) -> tuple[Path, Path] | None:
    """Return the `.bin` and `.idx` of a Megatron dataset that is named by either of them or by its path without the
    ending; otherwise None."""
    given = Path(path)
    stem = given.with_suffix("") if given.suffix in (".bin", ".idx") else given
    binary, index = Path(f"{stem}.bin"), Path(f"{stem}.idx")
    try:
        if given.suffix == ".idx":
            return binary, index
        if index.is_file() and (given.suffix == ".bin" or binary.is_file()):
            return binary, index
    except (OSError, ValueError):
        return None
    return None


def read_megatron(path: str | os.PathLike[str], *, dtype: str | None = None) -> Corpus:
    """Return the tokens of the dataset, memory-mapped, with its documents."""
    found = paths_of(path)
    if found is None:
        raise OctoPipeError(f"{shown(path)}: no .idx beside it; give both files of Megatron's dataset")
    binary, index = found
    where = shown(index)
    try:
        data = index.read_bytes()
        size = binary.stat().st_size
    except (OSError, ValueError) as error:
        raise OctoPipeError(f"{where}: {binary.name} and {index.name} are needed ({_why(error)})") from None
    if not data.startswith(MAGIC) or len(data) < len(MAGIC) + _HEADER.size:
        raise OctoPipeError(f"{where}: not the index of a Megatron dataset; remove it if the .bin is bare ids")
    version, code, sequences, entries = _HEADER.unpack_from(data, len(MAGIC))
    if version != 1:
        raise OctoPipeError(
            f"{where}: its format has version {version}, and version 1 is read; write the dataset with Megatron's "
            "preprocess_data"
        )
    kind = _DTYPES.get(code)
    if kind is None:
        raise OctoPipeError(f"{where}: type code {code} is not an integer type; write the dataset again")
    if dtype is not None and np.dtype(dtype).itemsize != np.dtype(kind).itemsize:
        raise OctoPipeError(f"{where} says that the ids are {kind}; leave --data-dtype {dtype} out")
    width, at = np.dtype(kind).itemsize, len(MAGIC) + _HEADER.size
    if at + 12 * sequences + 8 * entries > len(data):
        raise OctoPipeError(f"{where}: cut short ({len(data)} bytes for {sequences} sequences); copy it again")
    sizes = np.frombuffer(data, "<i4", sequences, at).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(data, "<i8", entries, at + 12 * sequences)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    if sizes.size == 0 or sizes.min() < 0 or not np.array_equal(pointers, edges[:-1] * width):
        raise OctoPipeError(f"{where}: its sequences do not lie one behind the other; write the dataset again")
    if edges[-1] * width != size or size == 0:
        raise OctoPipeError(
            f"{shown(binary)} has {size} bytes, {index.name} says {int(edges[-1]) * width}; copy both files again"
        )
    if documents.size == 0 or documents[0] != 0 or documents[-1] > sequences or np.any(np.diff(documents) < 0):
        raise OctoPipeError(f"{where}: its document index is out of order; write the dataset again")
    starts = np.unique(edges[documents[documents < sequences]])
    return Corpus(
        where=shown(binary),
        kind="megatron",
        tokens=np.memmap(binary, dtype=np.dtype(kind).newbyteorder("<"), mode="r"),
        starts=starts[starts < edges[-1]],
    )


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)[:120]
