"""Kernels: machine code gives the numbers that Python gives, wherever the package is and whatever is kept of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from octopipe.base import compile as _compile
from octopipe.base.compile import machine, njit, store

TABLE = (0.25, 0.5, 1.5)
SIGN = -1


class Pair(NamedTuple):
    values: Any
    counts: Any


@njit
def _half(x):
    return x // 2


@njit
def numbers(a, b, x, y):
    """Every operator on whole numbers and on real ones."""
    out = np.zeros(24)
    out[0], out[1], out[2] = a + b, a - b, a * b
    out[3], out[4], out[5] = a // b, a % b, a / b
    out[6], out[7], out[8] = a << 3, a >> 1, (a & b) | (a ^ 5)
    out[9], out[10], out[11] = x * y, x / y, -x
    out[12], out[13] = x**2, 10.0**y
    out[14], out[15], out[16] = min(a, x), max(a, b, y), abs(b)
    out[17], out[18] = int(x), float(a)
    out[19] = np.log(max(x, 1.0)) + np.sqrt(2.0) + np.floor(x) + np.ceil(x) + np.exp(y) + np.log2(3.0)
    out[20] = 1.0 if (a < b <= 7 and not y > x) or a != b else 2.0
    out[21] = TABLE[abs(a) % 3] + SIGN
    out[22] = _half(a)
    out[23] += 3
    return out


@njit
def powers(values, exponent, out):
    """A square, an exponent that is known when the kernel is compiled, and one that is not."""
    for i in range(values.size):
        out[0, i], out[1, i], out[2, i] = values[i] ** 2, values[i] ** 0.5, values[i] ** exponent
        out[3, i], out[4, i] = 10.0 ** values[i], values[i] ** 2.0


@njit
def loops(limit):
    """Loops that break, go on, count down, run over a tuple; a variable that becomes a real number on the way."""
    total = 0
    for i in range(limit):
        if i % 3 == 0:
            continue
        if i > 20:
            break
        for j in range(i, -1, -2):
            total += j
    k = 0
    while True:
        k += 1
        if k > 5:
            break
    for one in (k, total, 3):
        total += one * 0.5
    return total, k


@njit
def arrays(pair, grid, flags, small):
    """Arrays of all kinds read and written: parts, rows, lengths, copies, fills."""
    rows, width = grid.shape
    spare = grid.copy()
    head = pair.counts[:-1].copy()
    for r in range(rows):
        row = grid[r]
        for c in range(width):
            row[c] += spare[rows - 1 - r, c] * pair.values[c]
    for i in range(head.size):
        head[i] += 1
    flags[0], small[1] = head[-1] > 2, 7
    found = np.searchsorted(pair.values[1:], 0.5, side="right")
    spare[:] = 2.5
    grid[0] = spare[1]
    pair.values[:] = grid[2]
    made = np.full((2, width), -1, np.int32)
    made[1, 0] = found
    return made, head[:1], spare.max() + pair.values.max()


def test_operators_give_what_python_gives() -> None:
    for a in (-7, 0, 9):
        for b in (-4, 3):
            for x, y in ((2.5, -1.25), (-3.75, 0.5)):
                assert np.array_equal(numbers(a, b, x, y), numbers.python(a, b, x, y)), (a, b, x, y)


def test_loops_give_what_python_gives() -> None:
    for limit in (0, 4, 50):
        assert loops(limit) == loops.python(limit)


def test_arrays_give_what_python_gives() -> None:
    def given() -> tuple[Any, ...]:
        pair = Pair(np.array([0.1, 0.2, 0.5, 0.7]), np.array([3, 1, 2], np.int64))
        return pair, np.arange(12.0).reshape(3, 4), np.zeros(2, np.bool_), np.zeros(3, np.int8)

    mine, theirs = given(), given()
    for one, other in zip(arrays(*mine), arrays.python(*theirs), strict=True):
        assert np.array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype
    for one, other in zip(mine[1:], theirs[1:], strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("item", ["float32", "int16", "int32", "uint8", "uint16", "uint32", "uint64", "bool"])
def test_arrays_of_any_width_are_read_and_written(item: str) -> None:
    @njit
    def turned(values, first):
        for i in range(values.size // 2):
            values[i], values[values.size - 1 - i] = values[values.size - 1 - i], values[i]
        return values[0] + first

    most = 1 if item == "bool" else 200 if item[0] == "u" else 100
    values = np.array([0, 1, 0, 1, most], item)
    assert turned(values, np.float32(0.5)) == most + 0.5
    assert values.tolist() == [most, 1, 0, 1, 0] and values.dtype == item


def test_what_a_kernel_writes_into_a_view_arrives() -> None:
    grid = np.arange(12.0).reshape(3, 4)

    @njit
    def double(values):
        for i in range(values.size):
            values[i] *= 2.0

    double(grid[:, 1])
    assert grid[:, 1].tolist() == [2.0, 10.0, 18.0]
    assert grid[:, 0].tolist() == [0.0, 4.0, 8.0]


def test_what_is_not_part_of_the_language_is_refused_with_its_line() -> None:
    @njit
    def kernel(x):
        return {x: 1}

    with pytest.raises(TypeError, match=r"test_compile\.py:\d+: a kernel cannot do this: Dict"):
        kernel(1)
    with pytest.raises(TypeError, match="not str"):
        loops("many")


def test_python_goes_on_while_a_kernel_runs() -> None:
    """A kernel that counts far enough does not keep another thread from counting as well."""

    @njit
    def count(steps):
        x = 1
        for _ in range(steps):
            x = (x * 48271) % 2147483647
        return x

    count(1)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (count(100_000_000), ended.set()))
    thread.start()
    turns = 0
    while not ended.is_set():
        turns += 1
    thread.join()
    assert turns > 1000


# -- what is kept -------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No folder but one for temporary files."""
    monkeypatch.delenv("OCTOPIPE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(store.tempfile, "gettempdir", lambda: str(tmp_path))
    store._refused.cache_clear()
    return tmp_path / f"octopipe-kernels-{os.getuid()}"


def _fresh() -> Any:
    @njit
    def twice(x):
        return 2 * x

    return twice


def test_code_is_kept_in_a_private_folder_where_no_other_can_be_written(elsewhere: Path) -> None:
    assert _fresh()(21) == 42
    assert [p.name.split("-")[0] for p in elsewhere.iterdir()] == ["twice"]
    assert elsewhere.stat().st_mode & 0o077 == 0, "others could plant code there"


def test_a_folder_that_others_may_write_is_not_used(elsewhere: Path) -> None:
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    assert _fresh()(21) == 42
    assert list(elsewhere.iterdir()) == []


def test_a_full_disk_does_not_stop_a_kernel(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    assert _fresh()(21) == 42
    assert list(elsewhere.iterdir()) == [], "nothing half written stays"


def test_code_that_is_damaged_is_compiled_again(elsewhere: Path) -> None:
    assert _fresh()(21) == 42
    (file,) = elsewhere.iterdir()
    good = file.read_bytes()
    for bad in (b"", good[: len(good) // 2], good[:-1] + b"\0\0"):
        file.write_bytes(bad)
        assert _fresh()(21) == 42
        assert file.read_bytes() == good


def test_code_that_nothing_asked_for_in_a_month_is_removed(elsewhere: Path) -> None:
    elsewhere.mkdir(mode=0o700)
    long_ago = time.time() - store.UNUSED_S - store.DAY_S
    for name in ("old-1.o", "new-1.o"):
        store.keep(name, b"code")
    (elsewhere / "a user's.txt").write_bytes(b"text")
    for path in elsewhere.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert store.kept("new-1.o") == b"code", "asking for it makes it young again"
    assert _fresh()(21) == 42
    assert {p.name.split("-")[0] for p in elsewhere.iterdir()} == {"new", "twice", "a user's.txt"}


def _more() -> Any:
    @njit
    def twice(x):
        return 3 * x

    return twice


def test_objects_that_were_swapped_in_the_folder_are_not_loaded(elsewhere: Path) -> None:
    """A digest of the content alone says that a file is whole, not that it is the file it is called."""
    assert (_fresh()(21), _more()(21)) == (42, 63)
    first, second = sorted(elsewhere.iterdir())
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    assert (_fresh()(21), _more()(21)) == (42, 63)
    assert {first.read_bytes(), second.read_bytes()} == {a, b}, "and both were compiled and kept again"


def test_a_link_in_the_place_of_the_temporary_folder_is_not_followed(
    elsewhere: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody may put a link into the folder for temporary files, and turn it to another place at any moment."""
    other = tmp_path / "somewhere"
    other.mkdir(mode=0o700)
    elsewhere.symlink_to(other)
    assert _fresh()(21) == 42
    assert list(other.iterdir()) == []
    assert "link" in caplog.text and "OCTOPIPE_CACHE_DIR" in caplog.text


def test_a_folder_put_in_the_place_of_the_checked_one_is_never_read(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wins the race between the check and the use wins nothing: the use is of what was checked."""
    assert (_fresh()(21), _more()(21)) == (42, 63)
    ours = [p.name for p in elsewhere.iterdir()]
    planted, opened = tmp_path / "planted", store._opened
    planted.mkdir(mode=0o700)
    for name in ours:
        os.link(elsewhere / name, planted / name)
    taken = tmp_path / "taken away"

    def raced(path: str, may_be_link: bool) -> int | None:
        found = opened(path, may_be_link)
        if found is not None and not taken.exists():
            elsewhere.rename(taken)
            planted.rename(elsewhere)
            for name in ours:
                (elsewhere / name).unlink()
                (elsewhere / name).write_bytes(b"planted")
        return found

    monkeypatch.setattr(store, "_opened", raced)
    assert store.kept(ours[0]) is not None and store.kept(ours[0]) is None
    assert (_fresh()(21), _more()(21)) == (42, 63)


@pytest.mark.parametrize("what", ["fifo", "link", "writable by others", "huge"])
def test_a_file_that_is_not_a_private_one_of_ours_is_not_loaded(what: str, elsewhere: Path, tmp_path: Path) -> None:
    assert _fresh()(21) == 42
    (file,) = elsewhere.iterdir()
    good = file.read_bytes()
    if what == "writable by others":
        file.chmod(0o666)
    else:
        file.unlink()
        if what == "fifo":
            os.mkfifo(file)
        elif what == "link":
            (tmp_path / "copy").write_bytes(good)
            file.symlink_to(tmp_path / "copy")
        else:
            with open(file, "wb") as sparse:
                sparse.truncate(1 << 40)
    assert store.kept(file.name) is None
    assert _fresh()(21) == 42


@pytest.mark.parametrize(
    "note", [b"\x80\x04.", b"[]", b'["../../twice.o", "int"]', b'["x.o", {"item": "object"}]', b"5"]
)
def test_notes_are_data_and_not_programs(note: bytes, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note says which code a kernel of the package has; reading one can run nothing and lead nowhere else."""
    kernel = _fresh()
    kernel.python.__module__ = "octopipe.test"
    key = f"octopipe.test.{kernel.python.__qualname__} {('int',)}"
    name = f"twice-{machine.known(key)}.k"
    store.keep(name, note)
    assert kernel(21) == 42
    assert store.kept(name) != note, "and the right one is kept in its place"


def test_code_of_another_processor_has_another_name() -> None:
    """Machines that share a home folder differ in what their processors can do."""
    llvm, _, key = machine._target()
    assert llvm.get_host_cpu_name() in key and llvm.get_host_cpu_features().flatten() in key


def test_the_same_name_with_another_text_is_other_code(elsewhere: Path) -> None:
    @njit
    def twice(x):
        return 2 * x + 1

    assert (_fresh()(21), twice(21)) == (42, 43)


def test_no_more_cores_are_counted_than_the_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert _compile.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= _compile.usable_cores() <= len(before)


def test_powers_are_those_of_cpython_to_the_last_bit() -> None:
    """A square is not a product: the C library rounds it once, and about one in a thousand differs."""
    values = np.random.default_rng(7766).uniform(0.0, 4.0, 20_000)
    out = np.zeros((5, values.size))
    powers(values, -1.7, out)
    wanted = [(x**2, x**0.5, x**-1.7, 10.0**x, x**2.0) for x in values.tolist()]
    assert np.array_equal(out.T, np.array(wanted))
    assert any(x * x != x**2 for x in values.tolist())
