"""Transport for ranks that share one GPU: tensors pass through rings in shared memory, and no host waits for a device.

Knows: how arenas and counters are created and shared with the other process (pinned files, CUDA IPC handles; plain
files for CPU tensors, which also allow testing the protocol without a GPU). Does not know: the protocol of the ring
(`ring`), or headers (`headed`).

Counters are in device memory and arenas in pinned host memory, although both ends are on one GPU. The multiprocessors
perform copies within a GPU, so such a copy waits for kernels that occupy all of them (6 ms for 16 MiB during a large
matrix product on an H200, 0.04 ms alone), and no flag or priority changes that. Copies from and to the host use the
copy engines, like transfers between GPUs: 0.6 ms, busy or not. If host memory cannot be shared or pinned, arenas are in
device memory.

NCCL does not support two ranks on one device; with CUDA MPS, every rank has a share of it. There is one ring per
direction of each communicating pair of ranks: an in-order queue, as in the directed channel model (and safe under the
stricter ones).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.ranks.world import World
from octopipe.runtime.slots import RankProgram, Slot
from octopipe.runtime.wire.driver import Driver
from octopipe.runtime.wire.messages import Leaf, Spec
from octopipe.runtime.wire.transports.lanes import CudaLane, HostLane, Lane
from octopipe.runtime.wire.transports.mail import LOOK_EVERY_S, Box
from octopipe.runtime.wire.transports.ordered import OrderedTransport
from octopipe.runtime.wire.transports.ring import RingReceiver, RingSender
from octopipe.runtime.wire.transports.shared import Address, forget, make_shared, open_shared

CHUNK_BYTES = 4 << 20
"""Several to a message, so that the way in of one and the way out of the one before it overlap."""
CHUNKS = 16

Pair = tuple[int, int]


class IpcTransport(OrderedTransport):
    """See the module. On a CPU device the same rings lie in shared files."""

    name = "cuda_ipc"

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        timeout_s: float,
        chunk_bytes: int = CHUNK_BYTES,
        chunks: int = CHUNKS,
    ):
        super().__init__(world, device, timeout_s=timeout_s)
        self.delivery.meanwhile = self._meanwhile
        self._world, self._shape = world, (chunks, chunk_bytes)
        self._senders: dict[int, RingSender] = {}
        self._receivers: dict[int, RingReceiver] = {}
        self._lanes: list[Lane] = []
        self._pinned: list[Tensor] = []
        self._files: dict[int, tuple[int, Address]] = {}
        """Of memory that others have still to open, by where it lies."""
        self._driver: Driver | None = None
        if device.type == "cuda":
            try:
                self._driver = Driver()
            except (OSError, AttributeError) as error:
                raise OctoPipeError(f"the cuda_ipc transport needs libcuda's memory operations: {error}") from None

    def open(self, program: RankProgram) -> None:
        super().open(program)
        slots = program.slots
        me = self._world.rank
        targets = sorted({s.peer for s in slots if s.sending})
        sources = sorted({s.peer for s in slots if not s.sending})
        made: dict[tuple[str, Pair], Tensor] = {}
        for peer in sources:
            made["arena", (peer, me)] = self._make_arena()
            made["filled", (peer, me)] = self._make((1,), torch.int32)
            made["queued", (peer, me)] = self._make_file((2,), torch.int64)
        for peer in targets:
            made["freed", (me, peer)] = self._make((1,), torch.int32)
        shown = self._world.gather({key: self._show(tensor) for key, tensor in made.items()})
        for peer in targets:
            arena, filled = (self._see(shown[peer][name, (me, peer)]) for name in ("arena", "filled"))
            queued = _open_file(shown[peer]["queued", (me, peer)])
            self._senders[peer] = RingSender(
                arena, filled, made["freed", (me, peer)], queued, self._lane(), self._until
            )
        for peer in sources:
            freed = self._see(shown[peer]["freed", (peer, me)])
            arena, filled, queued = (made[name, (peer, me)] for name in ("arena", "filled", "queued"))
            self._receivers[peer] = RingReceiver(arena, filled, freed, queued, self._lane(), self._until)
        self._world.gather(None)  # everybody has seen everything
        for file, address in self._files.values():
            os.close(file)
            forget(address.path)
        self._files.clear()

    def _lane(self) -> Lane:
        lane = HostLane() if self._driver is None else CudaLane(self._driver, self.device)
        self._lanes.append(lane)
        return lane

    # -- sharing memory --------------------------------------------------------------------------------

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._driver is None:
            return self._make_file(shape, dtype)
        tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        torch.cuda.synchronize(self.device)  # zero before anybody looks
        return tensor

    def _make_arena(self) -> Tensor:
        """In host memory that the copy engines reach; on the device where there is too little of that."""
        if self._driver is not None:
            with contextlib.suppress(OSError):
                memory = self._make_file(self._shape, torch.uint8)
                try:
                    return self._pin(memory)
                except RuntimeError:
                    file, address = self._files.pop(memory.data_ptr())
                    os.close(file)
                    forget(address.path)
        return self._make(self._shape, torch.uint8)

    def _pin(self, memory: Tensor) -> Tensor:
        assert self._driver is not None
        self._driver.pin(memory)
        self._pinned.append(memory)
        return memory

    def _make_file(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in memory that other processes can open; raises OSError where there is no room for them."""
        nbytes = dtype.itemsize * math.prod(shape)
        file, address = make_shared(nbytes, reserve=nbytes)
        tensor = _mapped(file, shape, dtype)
        self._files[tensor.data_ptr()] = file, address
        return tensor

    def _show(self, tensor: Tensor) -> Any:
        """What another process needs to see this memory: numbers and bytes, nothing that it would call."""
        if tensor.device.type == "cpu":
            return self._files[tensor.data_ptr()][1], tuple(tensor.shape), tensor.dtype
        from torch.multiprocessing.reductions import reduce_tensor

        _, (_, size, stride, offset, _, *others) = reduce_tensor(tensor)
        return [tuple(size), tuple(stride), offset, others]

    def _see(self, shown: Any) -> Tensor:
        if isinstance(shown, tuple):
            memory = _open_file(shown)
            return memory if self._driver is None else self._pin(memory)
        from torch.multiprocessing.reductions import rebuild_cuda_tensor
        from torch.storage import TypedStorage

        size, stride, offset, others = shown
        return rebuild_cuda_tensor(torch.Tensor, size, stride, offset, TypedStorage, *others)

    # -- bodies ----------------------------------------------------------------------------------------

    def _send_body(self, slot: Slot, tensor: Tensor) -> Any:
        self.waiting = slot
        work = self._senders[slot.peer].send(tensor)
        self.waiting = None
        return work

    def _send_filler(self, slot: Slot, leaf: Leaf) -> Any:
        self.waiting = slot
        work = self._senders[slot.peer].skip(leaf.nbytes)
        self.waiting = None
        return work

    def _post_body(self, slot: Slot, leaf: Leaf) -> tuple[Tensor, Any]:
        buffer = self._empty(leaf)
        return buffer, self._receivers[slot.peer].receive(buffer, lambda lane: self._arriving(slot, lane))

    def _arriving(self, slot: Slot, lane: Lane) -> None:
        """Called when everything that brings a body has been queued on its lane."""

    # -- waiting on the host: receives go on meanwhile, since another host may wait for them ------------

    def send_forward(self, slot: Slot, value: Any, needs: list[bool] | None) -> Spec:
        self._proceed()
        box = slot.state.box
        if box is not None and not box.free:
            self._until(lambda: box.free)
        return super().send_forward(slot, value, needs)

    def _meanwhile(self, work: Any) -> None:
        self._proceed()
        if isinstance(work, Box) and not work.filled and self._pending:
            self._until(lambda: work.filled or not self._pending)

    @property
    def _pending(self) -> bool:
        return any(ring.pending for ring in self._receivers.values())

    def _proceed(self) -> None:
        for ring in self._receivers.values():
            ring.proceed()

    def _until(self, holds: Callable[[], bool]) -> None:
        now = time.monotonic()
        end, look = now + self.timeout_s, now + LOOK_EVERY_S
        pause = 0.0
        while True:
            self._proceed()
            if holds():
                return
            time.sleep(pause)
            pause = min(pause + 1e-6, 1e-4)
            now = time.monotonic()
            if now > look:
                look = now + LOOK_EVERY_S
                if self.dead():
                    raise RuntimeError("connection closed by peer")
            if now > end:
                raise RuntimeError("timed out")

    def close(self) -> None:
        super().close()
        # A lane that waits for a lost peer never ends: its memory stays pinned until the process does.
        idle = True
        for lane in self._lanes:
            idle = lane.close(1.0 if idle else 0.0) and idle
        self._lanes.clear()
        if self._driver is not None and idle:
            for memory in self._pinned:
                self._driver.unpin(memory)
        self._pinned.clear()


def _open_file(shown: tuple[Address, tuple[int, ...], torch.dtype]) -> Tensor:
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


def _mapped(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    memory = mmap.mmap(file, dtype.itemsize * math.prod(shape))
    return torch.frombuffer(memory, dtype=dtype).view(shape)
