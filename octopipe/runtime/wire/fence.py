"""A memory fence: what this process wrote before it is seen by others before what it writes after it, and so for reads.

Knows: which machines keep that order by themselves. Does not know: what lies in the memory.

Two processes that share memory hand it over by a number: the writer stores the data, then the number; the reader sees
the number, then loads the data; it notes the number as taken, and the writer stores the next data. x86 lets no store
overtake a store and no load a load, and no store a load before it, so the order of the program is the order that the
other side sees. Arm, POWER and RISC-V let all of them overtake each other: there the number could arrive before the
data, and the data be loaded before the number, or overwritten while it is still being read. A fence between the two, on
either side, forbids that; Python has none, so LLVM makes one.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import Any

KEEP_ORDER = ("x86_64", "AMD64", "i686", "i386")
"""Machines that need no fence for handing memory over."""


TEXT = "define void @fence() { fence seq_cst ret void }"
"""A function that is one fence, sequentially consistent, for LLVM."""


def compiled() -> Callable[[], None]:
    """`TEXT` as a function of this machine."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(TEXT), machine)
    engine.finalize_object()
    call = ctypes.PYFUNCTYPE(None)(engine.get_function_address("fence"))  # keeps Python's lock: it is a moment

    def fence(_engine: Any = engine) -> None:
        call()

    return fence


def _nothing() -> None:
    """This machine keeps the order."""


def for_machine(machine: str) -> Callable[[], None]:
    """What stands between data and its number on such a machine."""
    return _nothing if machine in KEEP_ORDER else compiled()


fence = for_machine(platform.machine())
