"""The cache of tokenized documents: created once, memory-mapped by every rank, reused by the next run.

Knows: the layout on disk, that one process creates the files while others wait, and that they are created atomically.
Does not know: where documents come from (`text.py`, `hf_dataset.py`). Imports no torch.

    CACHE/data/KEY/tokens.bin   ids (uint16 or int32)
    CACHE/data/KEY/lengths.npy  tokens of every document
    CACHE/data/KEY/counted.npy  whether predicting a token counts, where that differs
    CACHE/data/KEY/about.json   the ids' type, the format's version and where the documents come from
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile.store import private_folder as cache_folder
from octopipe.base.errors import OctoPipeError
from octopipe.base.files import shown
from octopipe.runtime.training.data.corpus import Corpus

FORMAT = 1
Tell = Callable[[str], None]
DOCUMENTS_PER_REPORT = 20_000
"""The number of documents between two progress reports."""


class Document(NamedTuple):
    """The ids of one document; `counted`: which of them count as targets (None: all)."""

    ids: list[int]
    counted: list[bool] | None = None


def kept_corpus(
    identity: object,
    make: Callable[[], Iterable[Document]],
    *,
    where: str,
    kind: str,
    whole: bool,
    tell: Tell,
    notes: tuple[str, ...] = (),
) -> Corpus:
    """Return the corpus of this identity, created if it does not exist; other processes of this host wait meanwhile."""
    key = hashlib.sha256(json.dumps([FORMAT, identity], sort_keys=True).encode()).hexdigest()[:32]
    base = cache_folder()
    if base is None:
        raise OctoPipeError(
            f"tokens of {where} cannot be cached: no cache folder belongs to this user alone; set OCTOPIPE_CACHE_DIR "
            "to a folder that only you can write"
        )
    home = base / "data"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(home / f"{key}.lock"):
            if not (home / key / "about.json").is_file():
                _write(home, key, make(), where, tell)
        return _read(home / key, where, kind, whole, notes)
    except OSError as error:
        raise OctoPipeError(
            f"{shown(home)}: tokens of {where} cannot be kept ({error.strerror or error}); set OCTOPIPE_CACHE_DIR"
        ) from None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A context that only one process of this host can be in at a time."""
    try:
        import fcntl
    except ModuleNotFoundError:  # no such locks on this system: the last writer wins, with equal files
        yield
        return
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(home: Path, key: str, documents: Iterable[Document], where: str, tell: Tell) -> None:
    work = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=home))
    try:
        lengths: list[int] = []
        marked, largest = False, 0
        with open(work / "wide.bin", "wb") as ids, open(work / "marks.bin", "wb") as marks:
            for document in documents:
                row = np.asarray(document.ids, np.int64)
                if not row.size:
                    continue
                largest = max(largest, int(row.max()))
                if row.min() < 0 or largest >= 1 << 31:
                    wrong = int(row.min()) if row.min() < 0 else largest
                    raise OctoPipeError(
                        f"{where}: document {len(lengths) + 1} holds {wrong}, which is not a token id; write ids from "
                        f"0 to {(1 << 31) - 1}"
                    )
                ids.write(row.astype("<i4").tobytes())
                marked |= document.counted is not None
                marks.write(bytes(row.size * [1]) if document.counted is None else bytes(document.counted))
                lengths.append(row.size)
                if len(lengths) % DOCUMENTS_PER_REPORT == 0:
                    tell(f"{where}: {len(lengths):,} documents")
        if not lengths:
            raise OctoPipeError(f"{where}: no document with a token in it; check the file and --text-key")
        wide = np.memmap(work / "wide.bin", "<i4", "r")
        dtype = "<u2" if largest < 1 << 16 else "<i4"
        wide.astype(dtype).tofile(work / "tokens.bin")
        del wide
        np.save(work / "lengths.npy", np.array(lengths, np.int64))
        if marked:
            np.save(work / "counted.npy", np.fromfile(work / "marks.bin", np.uint8))
        for name in ("wide.bin", "marks.bin"):
            (work / name).unlink()
        (work / "about.json").write_text(json.dumps({"format": FORMAT, "dtype": dtype, "from": where}) + "\n")
        shutil.rmtree(home / key, ignore_errors=True)
        os.rename(work, home / key)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read(folder: Path, where: str, kind: str, whole: bool, notes: tuple[str, ...]) -> Corpus:
    try:
        about: dict[str, Any] = json.loads((folder / "about.json").read_text())
        tokens = np.memmap(folder / "tokens.bin", about["dtype"], "r")
        lengths = np.load(folder / "lengths.npy", allow_pickle=False)
        counted = None
        if (folder / "counted.npy").is_file():
            counted = np.load(folder / "counted.npy", mmap_mode="r", allow_pickle=False)
        good = int(lengths.sum()) == tokens.shape[0] and (counted is None or counted.shape == tokens.shape)
    except (ValueError, KeyError, TypeError) as error:
        raise OctoPipeError(f"{shown(folder)}: damaged ({error}); remove it, it will be created again") from None
    if not good:
        raise OctoPipeError(
            f"{shown(folder)}: damaged (its files are inconsistent); remove it, it will be created again"
        )
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return Corpus(
        where=where, kind=kind, tokens=tokens, starts=starts, counted=counted, whole=whole, places="document",
        notes=notes,
    )  # fmt: skip
