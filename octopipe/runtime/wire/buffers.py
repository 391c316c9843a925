"""Buffers that are reused as soon as nobody holds them.

Knows: which of its buffers are free, from the number of tensors that share the memory. Does not know: who uses them; a
received activation is returned to the pool when its last reference is dropped, whether that is held by autograd, a
deferred weight gradient or a user's module.

>>> pool = BufferPool(torch.device("cpu"), small_bytes=0)
>>> first = pool.take((4,), torch.float32).data_ptr()
>>> pool.take((2, 2), torch.float32).data_ptr() == first
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octopipe.runtime.torch_private import storage_use_count

SMALL_BYTES = 4096
"""Smaller tensors are allocated anew, which is cheaper than searching for a free buffer."""
_ALONE = 2
"""References to the memory of a free buffer: the pool's tensor and the pool's storage object."""


class Lent:
    """A tensor whose memory is used again and again; `is_free` once all tensors that share the memory are dropped.

    A borrower creates a tensor of its own on the memory (`detach`): users are counted by memory, not by tensor.
    """

    __slots__ = ("_alone", "_handle", "_storage", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self._storage = tensor.untyped_storage()
        self._handle = self._storage._cdata
        self._alone = storage_use_count(self._handle)

    def is_free(self) -> bool:
        return storage_use_count(self._handle) == self._alone


class _Buffer(NamedTuple):
    tensor: Tensor
    storage: torch.UntypedStorage
    handle: int


class BufferPool:
    """Memory for tensors received on the host. On CUDA, the caching allocator serves this purpose."""

    def __init__(self, device: torch.device, *, small_bytes: int = SMALL_BYTES):
        self.device = device
        self._small_bytes = small_bytes
        self._buffers: dict[tuple[int, torch.dtype], list[_Buffer]] = {}
        self._used: set[tuple[int, torch.dtype]] = set()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        count = math.prod(shape)
        if count * dtype.itemsize < self._small_bytes:
            return torch.empty(shape, dtype=dtype, device=self.device)
        key = (count, dtype)
        self._used.add(key)
        buffers = self._buffers.setdefault(key, [])
        for buffer in buffers:
            if storage_use_count(buffer.handle) == _ALONE:
                return buffer.tensor.view(shape)
        tensor = torch.empty(count, dtype=dtype, device=self.device)
        storage = tensor.untyped_storage()
        buffers.append(_Buffer(tensor, storage, storage._cdata))
        return tensor.view(shape)

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return sum(b.tensor.nbytes for buffers in self._buffers.values() for b in buffers)

    def end_step(self) -> None:
        """Release buffers of sizes that the step did not use, because shapes have changed."""
        for key in [k for k in self._buffers if k not in self._used]:
            del self._buffers[key]
        self._used.clear()


def storage_bytes(tensors: Sequence[Tensor], skip: dict[int, int]) -> int:
    """The bytes of the tensors' memory; shared memory counts once, and memory in `skip` does not count."""
    seen = dict(skip)
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = 1
            total += storage.nbytes()
    return total
