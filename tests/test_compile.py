"""Kernels run wherever the package is: their code is kept where it can be, and not where it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from numba.core import config

from octopipe import _compile


class Kernel:
    """What numba compiles, as far as keeping its code goes."""

    def __init__(self, writable: tuple[str, ...]) -> None:
        self.writable, self.kept_in = writable, None
        self._cache = type("Cache", (), {"save_overload": lambda *_: None})()

    def enable_caching(self) -> None:
        if config.CACHE_DIR not in self.writable:
            raise RuntimeError("cannot cache function: no locator available")
        self.kept_in = config.CACHE_DIR


def test_code_is_kept_in_a_private_folder_where_no_other_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compile.tempfile, "gettempdir", lambda: str(tmp_path))
    _compile._private_folder.cache_clear()
    before = config.CACHE_DIR
    folder = tmp_path / f"octopipe-kernels-{os.getuid()}"
    kernel = Kernel((str(folder),))
    _compile._keep(kernel, ())
    assert kernel.kept_in == str(folder) and before == config.CACHE_DIR
    assert folder.stat().st_mode & 0o077 == 0, "others could plant code there"
    _compile._private_folder.cache_clear()


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compile.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"octopipe-kernels-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    _compile._private_folder.cache_clear()
    kernel = Kernel((str(folder),))
    _compile._keep(kernel, ())
    assert kernel.kept_in is None
    _compile._private_folder.cache_clear()


def test_a_kernel_runs_without_any_place_to_keep_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    def nowhere(self: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(numba.core.dispatcher.Dispatcher, "enable_caching", nowhere)

    @_compile.njit()
    def twice(x: int) -> int:
        return 2 * x

    assert twice(21) == 42


def test_a_full_disk_does_not_stop_a_kernel() -> None:
    @_compile.njit()
    def thrice(x: int) -> int:
        return 3 * x

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    thrice._cache._save_overload = full
    assert thrice(14) == 42


def test_a_kernel_is_compiled_anew_when_a_file_it_calls_changes(tmp_path: Path) -> None:
    source = tmp_path / "part.py"
    source.write_text("one")
    before = _compile._digest((tmp_path,))
    source.write_text("two")
    _compile._digest.cache_clear()
    assert _compile._digest((tmp_path,)) != before


def test_no_more_cores_are_counted_than_the_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert _compile.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= _compile.usable_cores() <= len(before)
