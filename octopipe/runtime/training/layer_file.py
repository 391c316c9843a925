"""The file of one layer in a checkpoint from an untrusted source: checked before it is read, and read within limits.

Knows: what torch.save writes (a zip archive of uncompressed records and one pickle) and what a layer file may contain.
Does not know: checkpoints as a whole (`checkpoint_folder.py`), or what a run does with the tensors.

A folder may come from someone else. The following are rejected: a pipe or a device in place of a file, before any byte
is read; a file larger than the free memory, and an archive with compressed records, before anything is unpacked; an
index that names more bytes than its records have, before torch sees it; a tensor with more elements than its storage,
before it is used. Reading therefore needs at most twice the file's size in memory, and at most the time of reading the
file twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import pickle
import stat
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from octopipe.base.files import brief
from octopipe.base.memory import free_memory_bytes

MAX_INDEX_BYTES = 16 << 20
"""The largest pickle in a layer's file, which contains names and shapes but no values."""
MAX_RECORDS = 1 << 20
_ITEM_BYTES = {
    "ComplexDouble": 16, "ComplexFloat": 8, "Double": 8, "Long": 8, "Float": 4, "Int": 4, "QInt32": 4, "BFloat16": 2,
    "Half": 2, "Short": 2,
}  # fmt: skip
"""Bytes per element of torch's typed storages; the sizes of other storages are in bytes."""
_PIECE = 1 << 20
_GIB = 1 << 30


class WrongFile(Exception):
    """Raised with a description of what is wrong with a file, in words that follow its name."""


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], most_bytes: float = math.inf) -> Iterator[tuple[BinaryIO, int]]:
    """A context with a regular file and its size; anything else is rejected without waiting for it."""
    try:
        # Opened before it is examined, so that it is the same file; O_NONBLOCK: opening a pipe does not wait.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise WrongFile("no such file") from None
    except (OSError, ValueError) as error:
        raise WrongFile(f"cannot be read ({getattr(error, 'strerror', None) or error})") from None
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode):
        os.close(handle)
        raise WrongFile("is not a regular file")
    with open(handle, "rb") as file:
        if info.st_size > most_bytes:
            size, most = (f"{n / _GIB:,.1f} GiB" for n in (info.st_size, most_bytes))
            raise WrongFile(f"has {size}, and {most} of memory are free")
        yield file, info.st_size


def check_sum(path: str | os.PathLike[str], expected: Mapping[str, Any], most_bytes: float = math.inf) -> None:
    """Raise WrongFile unless this is the file that was written; without a checksum, unless it is a regular file.
    `most_bytes`: a larger file is not read at all."""
    with opened(path, most_bytes) as (file, size):
        if "sha256" not in expected:
            return
        listed = expected.get("bytes")
        if isinstance(listed, int) and listed != size:
            raise WrongFile(f"is not what was written (it has {size} bytes, not {brief(listed)})")
        _check_archive(file, size)
        digest = hashlib.sha256()
        file.seek(0)
        try:
            while piece := file.read(_PIECE):
                digest.update(piece)
        except OSError as error:
            raise WrongFile(f"cannot be read ({error.strerror})") from None
        if digest.hexdigest() != expected["sha256"]:
            raise WrongFile("is not what was written (its checksum differs)")


def read_content(path: str | os.PathLike[str]) -> Any:
    """Return the values that torch.save wrote to the file, read without unpickling objects; raises WrongFile for
    anything else."""
    with opened(path, free_memory_bytes()) as (file, size):
        _check_archive(file, size)
        file.seek(0)
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises a dozen kinds of errors on damaged files
            raise WrongFile(f"cannot be loaded ({' '.join(str(error).split())[:120]})") from None
    _check_tensors(content, size)
    return content


# -- the archive ---------------------------------------------------------------------------------------


def _check_archive(file: BinaryIO, size: int) -> None:
    """Raise WrongFile unless records are as torch writes them, none of them is compressed, and the index names no more
    than they contain."""
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_RECORDS:
                raise WrongFile(f"has {len(entries)} records; at most {MAX_RECORDS} are allowed")
            for entry in entries:
                if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                    raise WrongFile(f"has a packed record ({brief(entry.filename)}), which torch never writes")
            if sum(entry.file_size for entry in entries) > size or len({e.filename for e in entries}) < len(entries):
                raise WrongFile("has records that overlap or share a name, which torch never writes")
            index = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
            if len(index) != 1:
                raise WrongFile("is not a file of torch.save")
            if index[0].file_size > MAX_INDEX_BYTES:
                raise WrongFile(f"has an index of {index[0].file_size} bytes; at most {MAX_INDEX_BYTES} are allowed")
            home = index[0].filename.removesuffix("data.pkl")
            sizes = {e.filename.removeprefix(f"{home}data/"): e.file_size for e in entries}
            _Index(archive.read(index[0]), sizes).load()
    except WrongFile:
        raise
    except Exception as error:  # zipfile and pickle raise a dozen kinds of errors on damaged files
        raise WrongFile(f"is not a whole file of torch.save ({' '.join(str(error).split())[:120]})") from None


class _Nothing(dict):  # type: ignore[type-arg]
    """Replaces every object that a pickle names: it accepts everything and does nothing."""

    def __new__(cls, *_: object, **__: object) -> _Nothing:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __call__(self, *_: object, **__: object) -> _Nothing:
        return self

    def __setitem__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass

    __hash__ = object.__hash__  # type: ignore[assignment]

    def append(self, _: object) -> None:
        pass

    extend = append


class _Index(pickle.Unpickler):
    """Reads a pickle without executing anything that it names, and compares the storages it names with the records."""

    def __init__(self, data: bytes, sizes: Mapping[str, int]) -> None:
        super().__init__(io.BytesIO(data))
        self._sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return type(name, (_Nothing,), {"itemsize": _ITEM_BYTES.get(name.removesuffix("Storage"), 1)})
        return _Nothing

    def persistent_load(self, pid: Any) -> Any:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[4], int)):
            raise WrongFile("names a storage in a way that torch does not")
        nbytes, held = pid[4] * getattr(pid[1], "itemsize", 1), self._sizes.get(str(pid[2]), -1)
        if not 0 <= nbytes <= held:
            raise WrongFile(f"names a storage of {brief(nbytes)} bytes whose record has {max(held, 0)}")
        return _Nothing()


# -- tensors -------------------------------------------------------------------------------------------


def _check_tensors(content: Any, size: int) -> None:
    """Raise WrongFile unless each tensor lies within its own storage, and all together are no larger than the file."""
    total, todo, seen = 0, [content], 0
    while todo:
        value = todo.pop()
        seen += 1
        if seen > MAX_RECORDS:
            raise WrongFile(f"holds more than {MAX_RECORDS} values")
        if isinstance(value, Tensor):
            total += _bytes_of(value)
            if total > size:
                raise WrongFile(f"holds tensors of {total} bytes in a file of {size}: some share their elements")
        elif isinstance(value, Mapping):
            todo.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            todo.extend(value)


def _bytes_of(tensor: Tensor) -> int:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise WrongFile(f"holds a tensor of layout {tensor.layout} on {tensor.device}; only plain ones are allowed")
    nbytes = math.prod(tensor.shape) * tensor.element_size()
    if nbytes > tensor.untyped_storage().nbytes():
        raise WrongFile(f"holds a tensor of {nbytes} bytes in a storage of {tensor.untyped_storage().nbytes()}")
    return nbytes
