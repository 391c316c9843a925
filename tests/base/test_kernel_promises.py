"""Kernels give what Python gives or refuse: constructs that gave other numbers, and arguments that nobody can take.

The language is tried as a whole by random programs (test_kernels.py); here is what an author writes once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from kernel_programs import made, same

from octopipe.base.compile import Kernel, njit, store

WHOLE = (1 << 63) - 1


class Number(int, Enum):
    THREE = 3


class Point(NamedTuple):
    x: Any
    y: Any


class Turned(NamedTuple):
    y: Any
    x: Any


@njit
def counted(g):
    g[0] += 1
    return 0


@njit
def silent(g):
    g[0] += 1


OUTSIDE = {
    "Number": Number, "Point": Point, "Turned": Turned, "counted": counted, "silent": silent, "LAST": 0,
    "ZEROS": (0.0, 1.0), "MINUS": (-0.0, 1.0),
}  # fmt: skip


def program(body: str, name: str) -> Kernel:
    """A kernel of this body; what it gives when run by Python is `.python`."""
    function = made(f"def program(a, x, f, g, k, u):\n    {body}\n", name)
    function.__globals__.update(OUTSIDE)
    return Kernel(function)


def arguments() -> tuple[Any, ...]:
    unsigned = np.array([3, 1 << 63], np.uint64)
    return 5, 0.5, np.array([1.0, 2.0, np.nan]), np.array([4, 2, 9]), np.array([True, False]), unsigned


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Run a kernel by Python, with all that it calls; returns its result and what it made of its arguments."""

    def run(kernel: Kernel) -> tuple[Any, Any]:
        given = arguments()
        with monkeypatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(Kernel, "__call__", lambda self, *more: self.python(*more))
            return kernel.python(*given), given

    return run


GIVEN = [
    "return f[1 - 2], f[LAST - 1], f[LAST - 1 - 1]",
    "return k.max(), k[1:].max()",
    "return u[1], u[1] >> np.uint64(1), u.max()",
    "s = np.uint64(1)\n    if a > 9:\n        s = 5\n    return s << np.uint64(63)",
    f"n = 0\n    for i in range({WHOLE} - a, {WHOLE}, 4):\n        n += 1\n    return n",
    f"n = 0\n    for i in range(a - {WHOLE}, -{WHOLE} - 1, -3):\n        n += 1\n    return n",
    "return a, ZEROS, (x, MINUS)",
    "return np.float64(1.0) / np.float64(ZEROS[a - 5]), np.float64(1.0) / np.float64(MINUS[a - 5])",
    "return np.searchsorted(f, np.nan), np.searchsorted(f, np.nan, side='right')",
    "return np.searchsorted(f, 2.0), np.searchsorted(f, 2.0, side='right')",
    "return a + Number.THREE",
    "m = np.zeros((2, 3))\n    m[counted(g)][1:] = 3.0\n    return m, g[0]",
    "T = a\n    return T\n    lambda: T",
    "silent(g)\n    return g[0]",
    "return silent(g)",
    "return None",
]


@pytest.mark.parametrize("body", GIVEN)
def test_a_construct_gives_what_python_gives(body: str, by_python: Callable[..., tuple[Any, Any]]) -> None:
    kernel = program(body, f"given_{GIVEN.index(body)}")
    theirs, given = by_python(kernel)
    mine = arguments()
    found = kernel(*mine)
    assert repr(np.asarray(found, object)) == repr(np.asarray(theirs, object)) or same(theirs, found), (theirs, found)
    assert same(given, mine)


REFUSED = {
    f"return a & {WHOLE} + 1": "9223372036854775808 has more than 64 bits",
    "return a & (1 << 63)": "9223372036854775808 has more than 64 bits",
    "return int(np.inf)": "cannot convert float infinity",
    "s = np.uint64(1)\n    if a > 1:\n        s = a\n    return s": "s is uint and int",
    "return 1 if a > 1 else np.uint64(2)": "`if ... else` is int and uint",
    "if a > 1:\n        return f\n    return a": "what is returned is",
    "for i in range(u[0]):\n        a += i\n    return a": "the arguments of range must be integers with a sign",
    "return 'x', a": "only numbers, arrays and tuples of them can be returned",
    "return a, silent(g)": "only numbers, arrays and tuples of them can be returned",
    "return a, Point(a, x)": "a kernel cannot return a named tuple",
    "return ()": "no empty tuple",
    "p = Point(1, 2)\n    if a:\n        p = Turned(3, 4)\n    return p.x": "has no x",
    "t = ZEROS\n    if a:\n        t = MINUS\n    return t[0]": "t is",
    "i = 0\n    while i < np.zeros(3).size:\n        i += 1\n    return i": "inside a loop",
    "u[0] = -1\n    return a": "-1 in the place of a number without a sign",
    "h = np.zeros(2, np.int8)\n    h[0] = 300\n    return h": "300 does not fit into an element of int8",
    "h = np.full(2, -1, np.uint16)\n    return h": "-1 does not fit into an element of uint16",
    "return np.searchsorted(k, a)": "int is looked for in an array of bool",
    "return np.searchsorted(u, a)": "int is looked for in an array of uint64",
    "return a\n    yield a": "yields nothing",
}


@pytest.mark.parametrize("body", REFUSED)
def test_a_construct_is_refused_with_file_and_line(body: str) -> None:
    name = f"promised_{list(REFUSED).index(body)}"
    with pytest.raises(TypeError, match=rf"{name}\.py:\d+: a kernel cannot do this: ") as caught:
        program(body, name)(*arguments())
    assert REFUSED[body] in str(caught.value)


def test_a_function_without_source_is_refused() -> None:
    with pytest.raises(TypeError, match=r"test_kernel_promises\.py:\d+: .* defines with `def`"):
        njit(lambda x: x)(1)


def test_names_of_any_script_are_translated() -> None:
    kernel = njit(made("def größe(x):\n    return x + 1\nprogram = größe\n", "script"))
    assert kernel(1) == 2


def test_unsigned_numbers_are_passed_as_they_are() -> None:
    kernel = njit(made("def program(u):\n    return u - np.uint64(5), u > 3\n", "unsigned"))
    assert kernel(np.uint64(3)) == ((1 << 64) - 2, False)
    assert kernel(np.uint64((1 << 63) + 5)) == (1 << 63, True)


@pytest.mark.parametrize("lengths", [(1 << 61, 1), (1 << 32, 1 << 32), (1 << 62, 4)])
def test_an_array_too_large_for_any_memory_is_an_error(lengths: tuple[int, int]) -> None:
    """The product of its lengths had wrapped around, and what was written lay behind a small array."""
    kernel = njit(made("def program(n, m):\n    h = np.zeros((n, m))\n    h[0, 0] = 1.0\n    return h[0, 0]\n", "vast"))
    assert kernel(2, 3) == 1.0
    with pytest.raises(MemoryError, match=r"vast\.py:2: no memory"):
        kernel(*lengths)


@pytest.mark.parametrize("array", [np.ma.array([1.0, 5.0], mask=[0, 1]), np.array(3.0)], ids=["masked", "no dimension"])
def test_arrays_that_mean_more_than_their_numbers_are_refused(array: Any) -> None:
    with pytest.raises(TypeError, match="a kernel takes"):
        njit(made("def program(f):\n    return f.max()\n", "meaning"))(array)


def test_numbers_that_do_not_fit_are_an_error_where_indices_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTOPIPE_CHECK_BOUNDS", "1")
    narrow = njit(made("def program(h, a):\n    h[0] = a\n    return h[0]\n", "narrow"))
    assert narrow(np.zeros(1, np.int8), -128) == -128 and narrow(np.zeros(1, np.uint8), 255) == 255
    for item, number in ((np.int8, 128), (np.uint8, -1), (np.int32, 1 << 31)):
        with pytest.raises(ValueError, match=r"narrow\.py:2: a number that no element of"):
            narrow(np.zeros(1, item), number)
    with pytest.raises(ValueError, match="no number with a sign can hold"):
        njit(made("def program(u):\n    return int(u)\n", "signed"))(np.uint64(1 << 63))


# -- arguments that share memory or must not change ------------------------------------------------------


@njit
def _first_written(values, other, flag):
    part = values[1:]
    if flag:
        part = other
    part[0] = 7.0
    return values[0]


@njit
def _through(pair, number):
    return _first_written(pair.x, pair.y, number > 0)


@njit
def _read(values):
    return values[0] + values[-1]


def test_a_read_only_array_is_not_written() -> None:
    """Directly, as a part, under another name or by a kernel that is called: each wrote into it in silence."""
    fixed, free = np.arange(3.0), np.arange(3.0)
    fixed.flags.writeable = False
    calls: list[tuple[Kernel, Any]] = [
        (_first_written, (fixed, free, False)),
        (_first_written, (free, fixed, True)),
        (_through, (Point(fixed, free), 0)),
    ]
    for kernel, given in calls:
        with pytest.raises(ValueError, match=r"test_kernel_promises\.py:\d+: the array .* is read-only"):
            kernel(*given)
    assert fixed.tolist() == [0.0, 1.0, 2.0] and _read(fixed) == 2.0 and _read(fixed[::2]) == 2.0


def test_arrays_that_overlap_are_passed_only_where_none_is_a_copy() -> None:
    grid = np.arange(12.0).reshape(3, 4)
    for given in ((grid[:, 1], grid[0], False), (grid[0], grid[:, 1], True), (grid[:, 1], grid[:, 1], False)):
        with pytest.raises(ValueError, match="overlaps another argument"):
            _first_written(*given)
    assert grid.tolist() == np.arange(12.0).reshape(3, 4).tolist()
    # Columns beside each other do not overlap, and what is not copied may.
    assert _first_written(grid[:, 1], grid[:, 2], True) == 1.0 and grid[0, 2] == 7.0
    assert _first_written(grid[0], grid[0, 1:], True) == 0.0 and grid[0, 1] == 7.0


# -- constants -------------------------------------------------------------------------------------------

FACTOR = 2


@njit
def _scaled(x):
    return x * FACTOR


def test_kept_code_is_that_of_the_constants_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant from the environment differs between runs, and no source does."""
    monkeypatch.setenv("OCTOPIPE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_scaled.python, "__module__", "octopipe.test")
    here = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "octopipe.test", here)

    def fresh() -> Any:
        return Kernel(_scaled.python)(21)

    assert fresh() == 42
    notes = [name for name in os.listdir(tmp_path) if name.endswith(".k")]
    kept = store.kept(notes[0])
    assert len(notes) == 1 and kept is not None and b"FACTOR" in kept
    monkeypatch.setattr(here, "FACTOR", 3)
    assert fresh() == 63
    monkeypatch.setattr(here, "FACTOR", 2)
    assert fresh() == 42
