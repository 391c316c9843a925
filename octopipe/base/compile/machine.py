"""Machine code: LLVM's optimiser and loader.

Knows: llvmlite, and which strings identify a processor. Does not know: Python's syntax, or where code is kept
(`store.py`).

Code is kept under a name that contains a digest of the LLVM text, of LLVM's version and of the processor with its
features, so code for another machine that shares the folder is never loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import hashlib
import os
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from octopipe.base.compile.store import keep, kept

LOCK = threading.RLock()
PACKAGE = Path(__file__).resolve().parents[2]
HEAD = """
declare ptr @malloc(i64)
declare ptr @calloc(i64, i64)
declare void @free(ptr)
declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)
declare double @pow(double, double)
declare { i64, i1 } @llvm.smul.with.overflow.i64(i64, i64)
declare i64 @llvm.fptosi.sat.i64.f64(double)
declare i64 @llvm.fptoui.sat.i64.f64(double)
""" + "".join(
    f"declare double @llvm.{name}.f64(double)\n" for name in ("log", "log2", "exp", "sqrt", "floor", "ceil", "fabs")
)
ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""The C signature of a compiled kernel. Its argument is the address of a block; calls release the GIL."""

free = ctypes.CDLL(None if os.name == "posix" else "msvcrt").free
free.argtypes, free.restype = [ctypes.c_void_p], None


@cache
def _target() -> tuple[Any, Callable[[], Any], str]:
    """Return llvmlite's binding, a factory of target machines (which the caller owns), and a text that identifies the
    version of LLVM and the processor."""
    import llvmlite
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    mathematics = ctypes.util.find_library("m")
    if mathematics:  # if not found, its symbols are already in the process
        with contextlib.suppress(RuntimeError):
            llvm.load_library_permanently(mathematics)
    features = llvm.get_host_cpu_features().flatten()
    processor = llvm.get_host_cpu_name()
    target = llvm.Target.from_default_triple()
    machine = partial(target.create_target_machine, cpu=processor, features=features, opt=2, jit=True)
    return llvm, machine, " ".join((llvmlite.__version__, target.triple, processor, features))


def load(text: str, name: str) -> tuple[Any, Any, str]:
    """Compile the text of a module, or take its code from the cache. Returns the function `entry`, the engine that must
    live as long as it, and the file name under which the code is kept."""
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
    """Return the same function and engine from code in the cache, or None if it is no longer there."""
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
    """Return a digest of `words`, of this package's source and of this machine, for use in the name of a note."""
    return hashlib.sha256(f"{_target()[2]}\n{_package()}\n{words}".encode()).hexdigest()[:32]


@cache
def _package() -> str:
    """Return a digest of all modules of the package, since kernels may use constants from any of them."""
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
