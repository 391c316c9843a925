"""A memory fence: other processes see writes before it before writes after it; the same holds for reads.

Knows: which processors guarantee this order without a fence. Does not know: what the memory contains.

Two processes synchronise on shared memory by a number. The writer stores the data, then the number; the reader sees the
number, then loads the data, then records that it has taken it; the writer stores the next data. On x86, stores are not
reordered with stores, loads not with loads, and a store not with an earlier load, so the other side sees the program
order. Arm, POWER and RISC-V may reorder all of these: the number could become visible before the data, or the data
could be loaded before the number or overwritten while it is being read. A fence between the two accesses, on both
sides, prevents this. Python has no fence, so one is generated with LLVM.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import Any

KEEP_ORDER = ("x86_64", "AMD64", "i686", "i386")
"""Processors on which no fence is needed between data and its number."""


TEXT = "define void @fence() { fence seq_cst ret void }"
"""LLVM code of a function that consists of one sequentially consistent fence."""


def compiled() -> Callable[[], None]:
    """`TEXT` compiled to a function for this machine."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(TEXT), machine)
    engine.finalize_object()
    call = ctypes.PYFUNCTYPE(None)(engine.get_function_address("fence"))  # keeps the GIL: the call is short

    def fence(_engine: Any = engine) -> None:
        call()

    return fence


def _nothing() -> None:
    """The fence of a processor that preserves the order by itself."""


def for_machine(machine: str) -> Callable[[], None]:
    """The fence between data and its number for this kind of processor."""
    return _nothing if machine in KEEP_ORDER else compiled()


fence = for_machine(platform.machine())
