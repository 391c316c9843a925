"""Calls of libcuda that torch does not provide, or only while holding the GIL.

Knows: raw handles and addresses. Does not know: what they refer to.

The calls go through ctypes, which releases the GIL. torch's own `Event.query` holds it, and the driver blocks a query
while another thread's launch waits for space in a full queue. A watchdog that queried through torch would block while
holding the GIL, and so would every thread that could report the problem.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

NOT_READY = 600


class Driver:
    """Calls of libcuda. Those that queue something take a raw stream handle."""

    WAIT_GEQ = 0
    PORTABLE = 1

    def __init__(self) -> None:
        lib = ctypes.CDLL("libcuda.so.1")
        pointer, u32, size = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
        stream = ctypes.c_void_p
        self._write = typed(lib.cuStreamWriteValue32_v2, stream, pointer, u32, ctypes.c_uint)
        self._wait = typed(lib.cuStreamWaitValue32_v2, stream, pointer, u32, ctypes.c_uint)
        # Detects from the addresses whether memory is on the host or on a device.
        self._copy = typed(lib.cuMemcpyAsync, pointer, pointer, size, stream)
        self._pin = typed(lib.cuMemHostRegister_v2, pointer, size, ctypes.c_uint)
        self._unpin = typed(lib.cuMemHostUnregister, pointer)
        self._stream_query = typed(lib.cuStreamQuery, stream)
        self._event_query = typed(lib.cuEventQuery, ctypes.c_void_p)

    def write(self, stream: int, address: int, value: int) -> None:
        check_code(self._write(stream, address, value & 0xFFFFFFFF, 0), "cuStreamWriteValue32")

    def wait(self, stream: int, address: int, value: int) -> None:
        check_code(self._wait(stream, address, value & 0xFFFFFFFF, self.WAIT_GEQ), "cuStreamWaitValue32")

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        check_code(self._copy(target, source, nbytes, stream), "cuMemcpyAsync")

    def pin(self, memory: Tensor) -> None:
        """Let the GPU's copy engines access this host memory, until `unpin`."""
        check_code(self._pin(memory.data_ptr(), memory.nbytes, self.PORTABLE), "cuMemHostRegister")

    def unpin(self, memory: Tensor) -> None:
        check_code(self._unpin(memory.data_ptr()), "cuMemHostUnregister")

    def stream_done(self, stream: int) -> bool:
        """Whether everything queued on a stream has ended."""
        return _ready(self._stream_query(stream), "cuStreamQuery")

    def event_done(self, event: int) -> bool:
        """Whether the device has passed an event. The handle 0 is an event that was never recorded, and counts as
        passed."""
        return not event or _ready(self._event_query(event), "cuEventQuery")


def typed(function: Any, *arguments: Any) -> Any:
    """Declare the argument types of a library function, and return the function."""
    function.argtypes = arguments
    return function


def _ready(code: int, name: str) -> bool:
    if code == NOT_READY:
        return False
    check_code(code, name)
    return True


def check_code(code: int, name: str) -> None:
    """Raise an error for an error code returned by the driver."""
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")
