"""Activations of a stage in host memory between its F and its backward.

Knows: which tensors autograd saves in a forward, how their memory is copied to the host and back on separate streams,
and the pinned buffers that hold them. Does not know: when to copy (`simulation/host_moves.py` decides, and the
executor's program contains it), or plans.

Memory is offloaded, not tensors: tensors that share memory are copied once and restored as the same views of it. Memory
that has other owners on the device stays there: parameters, buffers, and all inputs of the forward. On a GPU, copies
are ordered by events alone, and the host does not wait:

- down (the copy to the host) waits for the compute stream's position after F, and for the transfer of F's output if
  that uses the copy engines, too: they work in order, so the next rank would otherwise wait for the whole copy;
- release makes the compute stream wait for down and then frees the memory, so whatever the allocator reuses it for runs
  later on that stream;
- fetch allocates memory on the compute stream, and up (the copy to the device) waits for that position;
- the backward waits for up.

On a CPU the copies are made immediately, with the same effect on memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError

SMALL_BYTES = 1 << 14
"""Tensors with fewer bytes stay on the device: their memory is not worth a separate copy."""
PAGE = 1 << 21
"""Sizes of pinned buffers are multiples of this, so that a buffer can be reused for a nearly equal size."""


class Ticket(NamedTuple):
    """What the graph keeps instead of an offloaded tensor: the description of a view of some memory."""

    memory: Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Memory:
    """The memory of one or more saved tensors: on the device, on the host, or on both during a copy."""

    __slots__ = ("bytes", "host", "nbytes")

    def __init__(self, tensor: Tensor):
        storage = tensor.untyped_storage()
        self.bytes: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self.host: Pinned | None = None
        self.nbytes = storage.nbytes()


class Pinned:
    """A buffer in host memory, and the last copy out of it."""

    __slots__ = ("bytes", "read")

    def __init__(self, nbytes: int, pinned: bool):
        try:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            raise OctoPipeError(
                f"the host cannot provide {nbytes / 2**20:.0f} MiB more of pinned memory for offloaded activations "
                f"({' '.join(str(error).split())[:120]}); use a plan that offloads less, or none"
            ) from None
        self.read: Any = None


class Parcel:
    """The tensors that autograd saves in the forward of one stage and micro-batch (saved-tensor hooks)."""

    def __init__(self, small_bytes: int = SMALL_BYTES):
        self._small = small_bytes
        self._stays: set[int] = set()
        self.memories: dict[int, Memory] = {}
        self.left: Any = None
        """The event after which all copies to the host are complete."""
        self.returned: Any = None
        """The event after which all copies back to the device are complete."""

    def begin(self, stays: Iterable[Tensor]) -> None:
        """Forget everything saved: a forward starts, possibly again. The memory of `stays` is not offloaded."""
        self.memories.clear()
        self._stays = {t.untyped_storage().data_ptr() for t in stays if _is_plain(t)}

    def pack(self, tensor: Tensor) -> Any:
        if not _is_plain(tensor) or tensor.untyped_storage().nbytes() < self._small:
            return tensor.detach()
        key = tensor.untyped_storage().data_ptr()
        if key in self._stays:
            return tensor.detach()
        memory = self.memories.get(key)
        if memory is None:
            memory = self.memories[key] = Memory(tensor)
        return Ticket(memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    @staticmethod
    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, Ticket):
            return kept
        held = kept.memory.bytes
        if held is None:
            raise OctoPipeError(
                "a tensor of a stage whose activations are in host memory is differentiated outside of the pipeline; "
                "return it as an output, or plan without offload"
            )
        view = torch.empty(0, dtype=kept.dtype, device=held.device)
        return view.set_(held.untyped_storage(), kept.offset, kept.size, kept.stride)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memories.values())


class HostStore:
    """Moves the parcels of one rank between its device and host memory."""

    def __init__(self, device: torch.device, *, small_bytes: int = SMALL_BYTES):
        self._small = small_bytes
        self._free: dict[int, list[Pinned]] = {}
        self._cuda = device.type == "cuda"
        self._down = torch.cuda.Stream(device) if self._cuda else None
        self._up = torch.cuda.Stream(device) if self._cuda else None
        self.moved_bytes = 0
        """Bytes copied to the host since the store was created."""
        self.leaving: list[Parcel] = []
        """Parcels of forwards whose copies to the host have not been started yet; see `depart`."""
        self.buffer_bytes = 0
        """Bytes of all buffers allocated in host memory. Constant once every copy of a step can reuse a buffer."""

    def parcel(self) -> Parcel:
        return Parcel(self._small)

    def depart(self, sent: Iterable[Any] = ()) -> None:
        """Start the copies of all parcels in `leaving`; called after F and the transfers of its output.

        `sent`: events after which these transfers no longer occupy the copy engines."""
        if self.leaving and self._down is not None:
            for event in sent:
                self._down.wait_event(event)
        for parcel in self.leaving:
            self.down(parcel)
        self.leaving.clear()

    def down(self, parcel: Parcel) -> None:
        """Start the copies of one parcel to the host; called after F."""
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream())
        for memory in parcel.memories.values():
            memory.host = self._buffer(memory.nbytes)
            self.moved_bytes += memory.nbytes
            assert memory.bytes is not None
            target = memory.host.bytes[: memory.nbytes]
            if self._down is None:
                target.copy_(memory.bytes)
                continue
            with torch.cuda.stream(self._down):
                if memory.host.read is not None:
                    self._down.wait_event(memory.host.read)
                target.copy_(memory.bytes, non_blocking=True)
        if self._down is not None:
            parcel.left = self._down.record_event()

    def release(self, parcel: Parcel) -> None:
        """Release the memory on the device as soon as the copies to the host have ended."""
        if parcel.left is not None:
            torch.cuda.current_stream().wait_event(parcel.left)
        for memory in parcel.memories.values():
            memory.bytes = None

    def fetch(self, parcel: Parcel, device: torch.device) -> None:
        """Allocate memory on the device and start the copies back."""
        for memory in parcel.memories.values():
            memory.bytes = torch.empty(memory.nbytes, dtype=torch.uint8, device=device)
        if self._up is not None:
            self._up.wait_stream(torch.cuda.current_stream())
        for memory in parcel.memories.values():
            assert memory.host is not None and memory.bytes is not None
            source = memory.host.bytes[: memory.nbytes]
            if self._up is None:
                memory.bytes.copy_(source)
                continue
            with torch.cuda.stream(self._up):
                memory.bytes.copy_(source, non_blocking=True)
        if self._up is not None:
            parcel.returned = self._up.record_event()

    def ready(self, parcel: Parcel) -> None:
        """Wait until everything is on the device, and release the buffers in host memory; called before the
        backward."""
        if parcel.returned is not None:
            torch.cuda.current_stream().wait_event(parcel.returned)
        for memory in parcel.memories.values():
            if memory.host is not None:
                memory.host.read = parcel.returned
                self._free.setdefault(memory.host.bytes.numel(), []).append(memory.host)
                memory.host = None
        # From here on only the graph refers to the memory, so that what only I needs is freed before W.
        parcel.memories.clear()

    def give_up(self) -> None:
        """After an interrupted step: wait for copies that have been started. The parcels are dropped by their
        owners."""
        self.leaving.clear()
        for stream in (self._down, self._up):
            if stream is not None:
                stream.synchronize()

    def _buffer(self, nbytes: int) -> Pinned:
        size = -(-nbytes // PAGE) * PAGE if self._cuda else nbytes
        known = self._free.get(size)
        if known:
            return known.pop(0)
        self.buffer_bytes += size
        return Pinned(size, self._cuda)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is an ordinary strided one with elements. Sparse tensors and subclasses stay on the device."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and tensor.numel() > 0
