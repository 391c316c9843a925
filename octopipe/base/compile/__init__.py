"""How this package compiles kernels: a function of numbers and arrays is compiled to machine code on its first call.

    @njit
    def total(values):
        found = 0.0
        for i in range(values.size):
            found += values[i]
        return found

Knows: which kernels are compiled for which argument types. Does not know: any kernel.

A kernel and all functions that it calls are translated to one LLVM IR module (language.py states the supported subset
of Python), optimised together and cached between runs (machine.py). `kernel.python` is the original function: run by
Python it gives the same numbers, slowly. A call releases the GIL, so threads can run kernels in parallel. Global names
are constants: a kernel keeps the values that they had when it was compiled, which is on its first call.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from octopipe.base.compile.constants import constant_now
from octopipe.base.compile.machine import LOCK, free, known, load, load_kept
from octopipe.base.compile.store import keep, kept
from octopipe.base.compile.text import bounds_checked
from octopipe.base.compile.types import (
    BOOL,
    FLOAT,
    ITEMS,
    UINT,
    Arguments,
    Array,
    Tuple,
    Type,
    as_plain,
    from_plain,
    full_type,
    words,
)

__all__ = ["Kernel", "njit", "usable_cores"]
ERRORS = {e.__name__: e for e in (ZeroDivisionError, IndexError, ValueError, MemoryError)}
"""The exceptions that a kernel may raise, by name."""
_NUMBER = struct.Struct("=q")
_ALL_BITS = (1 << 64) - 1


class Kernel:
    """A function that is compiled once for every combination of argument types it is called with."""

    def __init__(self, python: Callable[..., Any]) -> None:
        self.python = self.kernel = python
        self.__name__, self.__doc__, self.__module__ = python.__name__, python.__doc__, python.__module__
        self.__wrapped__ = python
        self.made: dict[Any, _Made] = {}
        """The compiled versions, by the types of their arguments."""

    def __call__(self, *given: Any) -> Any:
        arguments = Arguments(given)
        made = self.made.get(arguments.types)
        if made is None:
            with LOCK:
                made = self.made.get(arguments.types)
                if made is None:
                    made = self.made[arguments.types] = _Made(self.python, arguments.types)
        return made.call(arguments)


def njit(function: Callable[..., Any]) -> Any:
    """Compile a function when it is first called."""
    return Kernel(function)


class _Made:
    """A kernel compiled for certain argument types, and the layout of the block of 64-bit words through which it is
    called: an error number, the arguments, then the results."""

    def __init__(self, python: Callable[..., Any], keys: tuple[Any, ...]) -> None:
        types, checked = tuple(full_type(key) for key in keys), bounds_checked()
        ours = python.__module__.startswith("octopipe.")
        name = f"{python.__module__}.{python.__qualname__} {keys}{' checked' if checked else ''}"
        note = f"{python.__name__}-{known(name)}.k" if ours else ""
        if not self._from_note(note):
            from octopipe.base.compile.module import translated

            made = translated(python, types, checked)
            self.returned, self.sites, self.written = made.returned, made.sites, made.written
            self.entry, self.engine, file = load(made.text, python.__name__)
            if note and made.constants is not None:
                keep(
                    note, json.dumps([file, as_plain(self.returned), self.sites, self.written, made.constants]).encode()
                )
        self.pack, self.unpack = (
            struct.Struct("=" + "".join("d" if w == "double" else "Q" if w == "ptr" else "q" for w in some))
            for some in (["i64", *(w for t in types for w in words(t))], words(self.returned))
        )
        self.block = ctypes.c_char * max(self.pack.size + self.unpack.size, 1)

    def _from_note(self, note: str) -> bool:
        """Load the code that an earlier run compiled, without translating again; return False if there is none.

        The cache stores machine code under a digest of its LLVM text; a note maps this kernel and its types to that
        file. The code contains the values that global constants had, so they are compared with those of today.
        """
        found = kept(note) if note else None
        if found is None:
            return False
        try:
            file, returned, self.sites, written, constants = json.loads(found)
            self.returned, self.written = from_plain(returned), [(int(n), str(place)) for n, place in written]
            loaded = load_kept(str(file)) if all(constant_now(*where) == value for *where, value in constants) else None
        except (ValueError, TypeError, RecursionError):  # the note was written by another version, or is corrupt
            return False
        if loaded is not None:
            self.entry, self.engine = loaded
        return loaded is not None

    def call(self, arguments: Arguments) -> Any:
        arrays, copies = arguments.arrays, arguments.copies
        for number, place in self.written:
            if (copies or not arrays[number].flags.writeable) and (why := arguments.refusal(number)):
                raise ValueError(f"{place}: {why}")
        block = self.block()
        try:
            self.pack.pack_into(block, 0, 0, *arguments.words)
        except struct.error:
            raise OverflowError("a kernel takes 64-bit integers") from None
        self.entry(ctypes.addressof(block))
        if copies:
            arguments.write_back(number for number, _ in self.written)
        failed = _NUMBER.unpack_from(block)[0]
        if failed:
            kind, file, line, words = self.sites[failed - 1]
            raise ERRORS[kind](f"{file}:{line}: {words}")
        if not self.unpack.size:
            return None
        result, _ = _python(self.returned, self.unpack.unpack_from(block, self.pack.size))
        return result


def _python(type_: Type, given: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Convert the first words to a Python value of this type; return it with the words that remain."""
    if isinstance(type_, Tuple):
        out = []
        for part in type_.parts:
            one, given = _python(part, given)
            out.append(one)
        return tuple(out), given
    if isinstance(type_, Array):
        return _array(type_, given[0], given[1 : 1 + type_.ndim]), given[1 + type_.ndim :]
    if type_ == UINT:
        return int(given[0]) & _ALL_BITS, given[1:]
    value = float(given[0]) if type_ == FLOAT else bool(given[0]) if type_ == BOOL else int(given[0])
    return value, given[1:]


def _array(type_: Array, address: int, shape: tuple[int, ...]) -> np.ndarray:
    """Copy an array that a kernel allocated into a new numpy array, and free the kernel's memory."""
    nbytes = ITEMS[type_.item][2] * math.prod(shape)
    found = np.empty(shape, type_.item)
    ctypes.memmove(found.__array_interface__["data"][0], address, nbytes)
    free(address)
    return found


def usable_cores() -> int:
    """Return the number of cores this process may use, given its CPU affinity and the quota of its cgroup."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = _quota()
    return max(1, cores if quota is None else min(cores, int(quota + 0.5) or 1))


def _quota() -> float | None:
    """Return the number of cores that the cgroup allows (version 2, else version 1), or None if it sets no limit."""
    with contextlib.suppress(OSError, ValueError):
        allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if allowed == "max" else float(allowed) / float(period)
    with contextlib.suppress(OSError, ValueError):
        directory = Path("/sys/fs/cgroup/cpu")
        allowed_us = float((directory / "cpu.cfs_quota_us").read_text())
        return allowed_us / float((directory / "cpu.cfs_period_us").read_text()) if allowed_us > 0 else None
    return None
