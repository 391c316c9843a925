"""Machine code: LLVM's optimiser and loader, and the folder where code is kept between runs.

Knows: llvmlite, and which folder can be written. Does not know: Python's syntax.

Code is kept in the folder OCTOPIPE_CACHE_DIR names, else in the user's own for caches, else in a private folder for
temporary files, else not at all: where nothing can be written kernels still run. A file's name is a digest of the text
that was compiled, the processor and LLVM's version, so what is found is always right; what nothing asked for in a month
(an older version's code) is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import hashlib
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

LOCK = threading.RLock()
PACKAGE = Path(__file__).resolve().parents[2]
HEAD = """
declare ptr @malloc(i64)
declare ptr @calloc(i64, i64)
declare void @free(ptr)
declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)
declare double @llvm.pow.f64(double, double)
""" + "".join(
    f"declare double @llvm.{name}.f64(double)\n" for name in ("log", "log2", "exp", "sqrt", "floor", "ceil", "fabs")
)
DAY_S = 24 * 3600.0
UNUSED_S = 30 * DAY_S
"""Code that nothing asked for in this time is removed."""
ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""Takes the address of a block of words; runs without Python's lock."""

free = ctypes.CDLL(None if os.name == "posix" else "msvcrt").free
free.argtypes, free.restype = [ctypes.c_void_p], None


@cache
def _target() -> tuple[Any, Callable[[], Any], str]:
    """LLVM's module, a maker of machines to compile for (their user ends them), and the words that say which."""
    import llvmlite
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    mathematics = ctypes.util.find_library("m")
    if mathematics:  # else the process has it already
        with contextlib.suppress(RuntimeError):
            llvm.load_library_permanently(mathematics)
    features = llvm.get_host_cpu_features().flatten()
    processor = llvm.get_host_cpu_name()
    target = llvm.Target.from_default_triple()
    machine = partial(target.create_target_machine, cpu=processor, features=features, opt=2, jit=True)
    return llvm, machine, " ".join((llvmlite.__version__, target.triple, processor, features))


def load(text: str, name: str) -> tuple[Any, Any, str]:
    """The function `entry` of a module's text, what must live as long as it, and the name its code is kept under."""
    with LOCK:
        llvm, machine, words = _target()
        text = HEAD + text
        digest = hashlib.sha256(f"{words}\n{text}".encode()).hexdigest()
        file = f"{name}-{digest[:32]}.o"
        code = kept(file)
        if code is None:
            code = _compiled(llvm, machine(), text)
            keep(file, code)
        return (*_linked(code), file)


def load_kept(file: str) -> tuple[Any, Any] | None:
    """The same from code that is kept, if it still is."""
    with LOCK:
        code = kept(file)
        return None if code is None else _linked(code)


def _linked(code: bytes) -> tuple[Any, Any]:
    llvm, machine, _ = _target()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return ENTRY(engine.get_function_address("entry")), engine


def known(words: str) -> str:
    """A name for what follows from these words, this package's own text and this machine."""
    return hashlib.sha256(f"{_target()[2]}\n{_package()}\n{words}".encode()).hexdigest()[:32]


@cache
def _package() -> str:
    """A digest of all modules of the package: kernels take constants from any of them."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _compiled(llvm: Any, machine: Any, text: str) -> bytes:
    module = llvm.parse_assembly(text)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


def _folders() -> Iterator[str]:
    named = os.environ.get("OCTOPIPE_CACHE_DIR", "")
    if named:
        yield named
    home = os.environ.get("XDG_CACHE_HOME", "") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(home):
        yield os.path.join(home, "octopipe")
    yield os.path.join(tempfile.gettempdir(), f"octopipe-kernels-{_user()}")


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


@cache
def folder() -> Path | None:
    """A folder that this user alone can write (what lies there is executed); None if there is none."""
    for place in _folders():
        path = Path(place)
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == _user() and not found.st_mode & 0o022
            if ours and os.access(path, os.W_OK):
                return path
    return None


def kept(file: str) -> bytes | None:
    place = folder()
    if place is not None:
        with contextlib.suppress(OSError):
            code = (place / file).read_bytes()
            # Its own digest first: a file cut short is no code.
            if hashlib.sha256(code[32:]).digest() == code[:32]:
                if time.time() - (place / file).stat().st_mtime > DAY_S:
                    with contextlib.suppress(OSError):
                        os.utime(place / file)
                return code[32:]
    return None


def keep(file: str, code: bytes) -> None:
    place = folder()
    if place is None:
        return
    try:
        with tempfile.NamedTemporaryFile(dir=place, suffix=".o", delete=False) as new:
            new.write(hashlib.sha256(code).digest() + code)
        os.replace(new.name, place / file)
    except OSError:  # a full disk is no reason not to run
        with contextlib.suppress(OSError, UnboundLocalError):
            os.unlink(new.name)
    with contextlib.suppress(OSError):
        _prune(place)


@cache
def _prune(place: Path) -> None:
    """Once a process, and only in one that has compiled something: a warm start does not read the folder."""
    for path in place.iterdir():
        if path.suffix in (".o", ".k") and time.time() - path.stat().st_mtime > UNUSED_S:
            path.unlink(missing_ok=True)
