"""How this package compiles: one decorator for every kernel, and where their machine code is kept between runs.

Knows: numba, and which folder can be written. Does not know: any kernel.

`njit` is numba's with a cache that never stands in the way. The code is kept beside the module, else where numba keeps
it for a user, else in a private folder for temporary files, else not at all: a package installed by somebody else under
a home that cannot be written still runs. A kernel that calls kernels of other files names those files (`sources`), so
that it is compiled anew when one of them changes; `part` is for kernels that are only ever called by others, which hold
their code: they need no cache of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache as remember
from pathlib import Path
from typing import Any

import numba

config: Any = numba.config


def njit(*, cache: bool = True, nogil: bool = True, sources: tuple[Path, ...] = ()) -> Callable[[Any], Any]:
    """Compile a function when it is first called; keep its code unless told otherwise."""

    def decorate(function: Any) -> Any:
        compiled = numba.njit(nogil=nogil)(function)
        if cache:
            _keep(compiled, sources)
        return compiled

    return decorate


def part(function: Any) -> Any:
    """Compile a function into the kernels that call it; Python cannot call it, which saves most of what it costs."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**options)(function)


def usable_cores() -> int:
    """Cores this process may use: those it is bound to, and no more than its control group pays for."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = _quota()
    return max(1, cores if quota is None else min(cores, int(quota + 0.5) or 1))


def _quota() -> float | None:
    """Cores that the control group (version 2, then 1) allows, where it says so."""
    with contextlib.suppress(OSError, ValueError):
        allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if allowed == "max" else float(allowed) / float(period)
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        allowed_us = float((folder / "cpu.cfs_quota_us").read_text())
        return allowed_us / float((folder / "cpu.cfs_period_us").read_text()) if allowed_us > 0 else None
    return None


def _keep(compiled: Any, sources: tuple[Path, ...]) -> None:
    """Give a kernel a cache that can be written; none if there is no such place."""
    try:
        compiled.enable_caching()
    except RuntimeError:  # "no locator available": neither the module's folder nor the user's can be written
        folder = _private_folder()
        before, config.CACHE_DIR = config.CACHE_DIR, folder
        try:
            if not folder:
                return
            compiled.enable_caching()
        except (RuntimeError, OSError):
            return
        finally:
            config.CACHE_DIR = before
    kept = compiled._cache
    if sources and hasattr(kept, "_cache_file"):
        kept._cache_file._source_stamp = _digest(sources)
    save = kept.save_overload

    def save_if_possible(*given: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason not to run
            save(*given)

    kept.save_overload = save_if_possible


@remember
def _digest(sources: tuple[Path, ...]) -> bytes:
    """Of the text of these files, and of all modules in those that are folders."""
    found = hashlib.sha256()
    for source in sources:
        for path in sorted(source.glob("*.py")) if source.is_dir() else [source]:
            found.update(path.name.encode() + path.read_bytes())
    return found.digest()


@remember
def _private_folder() -> str:
    """A folder for temporary files that is ours alone (what lies there is executed); "" if there is none."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    path = Path(tempfile.gettempdir()) / f"octopipe-kernels-{user}"
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
            return str(path)
    return ""
