"""Lanes: in-order work concurrent with computation, on a CUDA stream or, for tests and CPU runs, in a thread.

Knows: copies, 32-bit flags in shared memory, waiting for a flag without the host. Does not know: what is copied.

On a GPU, a lane is a stream. Flags are written and awaited by the driver's stream memory operations
(`cuStreamWriteValue32`, `cuStreamWaitValue32`), so that two processes on one device exchange data without involving a
host. On the host, a lane is a thread that performs the same operations one after another.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.wire.driver import Driver
from octopipe.runtime.wire.fence import fence
from octopipe.runtime.wire.telling import WireError


class Lane(ABC):
    """Work that runs in order; every method only queues."""

    @abstractmethod
    def now(self) -> Any:
        """A marker for everything that the computation has issued so far, for `after`."""

    @abstractmethod
    def after(self, mark: Any) -> None:
        """Make everything queued later wait for a marker of `now`."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes between contiguous tensors of equal size."""

    @abstractmethod
    def write(self, flag: Tensor, value: int) -> None:
        """Set a flag (an int32 tensor of one element) once everything before is visible."""

    @abstractmethod
    def wait(self, flag: Tensor, value: int) -> None:
        """Wait until the flag has reached the value. Values only grow, modulo 2^32."""

    @abstractmethod
    def done(self) -> Any:
        """A handle: its `wait(timeout)` makes the computation wait for everything queued so far, and `over()` returns
        whether it can do so without making the host wait."""

    def events(self) -> list[Any]:
        """A CUDA event after everything queued so far; none on the host."""
        return []

    @abstractmethod
    def close(self, patience_s: float) -> bool:
        """Stop the lane; returns False if something that was queued has not ended within this time."""


# -- on the host ---------------------------------------------------------------------------------------


class _Done:
    __slots__ = ("_event",)

    def __init__(self, event: threading.Event):
        self._event = event

    def over(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self._event.wait(timeout.total_seconds()):
            raise WireError("timed out")


class HostLane(Lane):
    """A lane that is a thread; processes share memory by files."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stop = False
        self._thread = threading.Thread(target=self._serve, name="octopipe-lane", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (task := self._work.get()) is not None:
            task()

    def now(self) -> Any:
        """Computation on the host has ended when its call returns, so there is nothing to mark."""

    def after(self, mark: Any) -> None:
        """See `now`."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        def act() -> None:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

        self._work.put(act)

    def write(self, flag: Tensor, value: int) -> None:
        place = ctypes.c_uint32.from_address(flag.data_ptr())

        def act(_keep: Tensor = flag) -> None:
            fence()  # copied data must be visible before the flag
            place.value = value & 0xFFFFFFFF

        self._work.put(act)

    def wait(self, flag: Tensor, value: int) -> None:
        place = ctypes.c_uint32.from_address(flag.data_ptr())

        def act(_keep: Tensor = flag) -> None:
            pause, began = 0.0, time.monotonic()
            # Like the driver: compare the difference as a signed number, so that values may wrap around.
            while ((place.value - value) & 0xFFFFFFFF) >= 1 << 31 and not self._stop:
                time.sleep(pause)
                # A long wait leaves the core to other threads; the pause delays it by one per cent at most.
                pause = max(min(pause + 1e-6, 2e-4), min((time.monotonic() - began) / 100, 1e-2))
            fence()

        self._work.put(act)

    def done(self) -> Any:
        event = threading.Event()
        self._work.put(event.set)
        return _Done(event)

    def close(self, patience_s: float) -> bool:
        self._stop = True
        self._work.put(None)
        self._thread.join(timeout=patience_s)
        return not self._thread.is_alive()


# -- on a GPU ------------------------------------------------------------------------------------------


class _Event:
    __slots__ = ("_event",)

    def __init__(self, event: Any):
        self._event = event

    def over(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> None:
        torch.cuda.current_stream().wait_event(self._event)  # the device waits, not the host


class CudaLane(Lane):
    """A separate stream with high priority, because small copies must not queue behind large kernels."""

    def __init__(self, driver: Driver, device: torch.device):
        self._driver, self._device = driver, device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._raw = self.stream.cuda_stream

    def now(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def after(self, mark: Any) -> None:
        self.stream.wait_event(mark)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._driver.copy(self._raw, target.data_ptr(), source.data_ptr(), source.nbytes)

    def write(self, flag: Tensor, value: int) -> None:
        self._driver.write(self._raw, flag.data_ptr(), value)

    def wait(self, flag: Tensor, value: int) -> None:
        self._driver.wait(self._raw, flag.data_ptr(), value)

    def done(self) -> Any:
        return _Event(self.events()[0])

    def events(self) -> list[Any]:
        event = torch.cuda.Event()
        event.record(self.stream)
        return [event]

    def close(self, patience_s: float) -> bool:
        end = time.monotonic() + patience_s
        try:
            while not self._driver.stream_done(self._raw):
                if time.monotonic() > end:
                    return False
                time.sleep(1e-3)
        except RuntimeError:  # the device has failed, which is reported elsewhere
            return False
        return True
