"""Memory and lanes shared by processes on one device: created by one process and opened by the others.

Knows: pinned files, CUDA IPC handles, and plain files for CPU tensors (which also allow testing without a GPU). Does
not know: what the memory contains (`ring` has the protocol).

Counters are in device memory and arenas in pinned host memory, although both ends are on one GPU. The multiprocessors
perform copies within a GPU, so such a copy waits for kernels that occupy all of them (6 ms for 16 MiB during a large
matrix product on an H200, 0.04 ms alone), and no flag or priority changes that. Copies from and to the host use the
copy engines, like transfers between GPUs: 0.6 ms, busy or not. If host memory cannot be shared or pinned, arenas are in
device memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.wire.driver import Driver
from octopipe.runtime.wire.transports.lanes import CudaLane, HostLane, Lane
from octopipe.runtime.wire.transports.shared import Address, forget, make_shared, open_shared


class Arenas:
    """The shared memory that one process has created and opened, until `close`."""

    def __init__(self, device: torch.device):
        self.device = device
        self._lanes: list[Lane] = []
        self._pinned: list[Tensor] = []
        self._files: dict[int, tuple[int, Address]] = {}
        """File and address of memory that other processes have not opened yet, by the pointer to it."""
        self._driver: Driver | None = None
        if device.type == "cuda":
            try:
                self._driver = Driver()
            except (OSError, AttributeError) as error:
                raise OctoPipeError(f"the cuda_ipc transport needs libcuda's memory operations: {error}") from None

    def lane(self) -> Lane:
        """A lane of this device: a stream, or on a CPU a thread."""
        lane = HostLane() if self._driver is None else CudaLane(self._driver, self.device)
        self._lanes.append(lane)
        return lane

    def counter(self) -> Tensor:
        """A 32-bit zero that lanes can write and wait for."""
        if self._driver is None:
            return self.host_zeros((1,), torch.int32)
        return self._device_zeros((1,), torch.int32)

    def arena(self, shape: tuple[int, int]) -> Tensor:
        """Chunks of bytes in host memory that the copy engines can access; on the device if there is too little host
        memory."""
        if self._driver is not None:
            with contextlib.suppress(OSError):
                memory = self.host_zeros(shape, torch.uint8)
                try:
                    return self._pin(memory)
                except RuntimeError:
                    file, address = self._files.pop(memory.data_ptr())
                    os.close(file)
                    forget(address.path)
            return self._device_zeros(shape, torch.uint8)
        return self.host_zeros(shape, torch.uint8)

    def host_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in memory that other processes can open; raises OSError if there is not enough memory."""
        nbytes = dtype.itemsize * math.prod(shape)
        file, address = make_shared(nbytes, reserve=nbytes)
        tensor = _mapped(file, shape, dtype)
        self._files[tensor.data_ptr()] = file, address
        return tensor

    def _device_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        torch.cuda.synchronize(self.device)  # another process must not read it before it is zero
        return tensor

    def _pin(self, memory: Tensor) -> Tensor:
        assert self._driver is not None
        self._driver.pin(memory)
        self._pinned.append(memory)
        return memory

    def show(self, tensor: Tensor) -> Any:
        """A description by which another process can open this memory (`see`); it contains only plain values."""
        if tensor.device.type == "cpu":
            return self._files[tensor.data_ptr()][1], tuple(tensor.shape), tensor.dtype
        from torch.multiprocessing.reductions import reduce_tensor

        _, (_, size, stride, offset, _, *others) = reduce_tensor(tensor)
        return [tuple(size), tuple(stride), offset, others]

    def see(self, shown: Any) -> Tensor:
        """Open the arena or counter that another process has described with `show`."""
        if isinstance(shown, tuple):
            memory = self.see_host(shown)
            return memory if self._driver is None else self._pin(memory)
        from torch.multiprocessing.reductions import rebuild_cuda_tensor
        from torch.storage import TypedStorage

        size, stride, offset, others = shown
        return rebuild_cuda_tensor(torch.Tensor, size, stride, offset, TypedStorage, *others)

    def see_host(self, shown: tuple[Address, tuple[int, ...], torch.dtype]) -> Tensor:
        """Open memory of another process that only hosts access."""
        address, shape, dtype = shown
        try:
            file = open_shared(address)
        except OSError as error:
            raise OctoPipeError(
                f"ranks that share a GPU must share memory ({error.strerror or error}); start them in one container"
            ) from None
        try:
            return _mapped(file, shape, dtype)
        finally:
            os.close(file)

    def all_seen(self) -> None:
        """Close the files and remove their names, once all processes have opened what was described to them."""
        for file, address in self._files.values():
            os.close(file)
            forget(address.path)
        self._files.clear()

    def close(self) -> None:
        # A lane that waits for a lost peer never ends: its memory stays pinned until the process does.
        idle = True
        for lane in self._lanes:
            idle = lane.close(1.0 if idle else 0.0) and idle
        self._lanes.clear()
        if self._driver is not None and idle:
            for memory in self._pinned:
                self._driver.unpin(memory)
        self._pinned.clear()


def _mapped(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    memory = mmap.mmap(file, dtype.itemsize * math.prod(shape))
    return torch.frombuffer(memory, dtype=dtype).view(shape)
