"""Ranks that share one GPU: bodies pass through rings in shared device memory, without the host.

Knows: how arenas and counters are made and shown to the other process (CUDA IPC handles; plain files for CPU
tensors, which is also how the protocol is tested without a GPU). Does not know: the ring's protocol (`ring`), or
headers (`headed`).

NCCL refuses two ranks on one device; with CUDA MPS every rank has a share of it. One ring per direction and pair of
ranks that talk: an in-order queue, as the directed channel model says (and safe under the stricter ones).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octopipe.errors import OctoPipeError
from octopipe.runtime.messages import Leaf
from octopipe.runtime.slots import Slot
from octopipe.runtime.transports.headed import OrderedTransport
from octopipe.runtime.transports.lanes import CudaLane, Driver, HostLane, Lane
from octopipe.runtime.transports.ring import RingReceiver, RingSender
from octopipe.runtime.world import World

CHUNK_BYTES = 16 << 20
CHUNKS = 4

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
        super().__init__(world.control, device, timeout_s=timeout_s)
        self._world, self._shape = world, (chunks, chunk_bytes)
        self._senders: dict[int, RingSender] = {}
        self._receivers: dict[int, RingReceiver] = {}
        self._lanes: list[Lane] = []
        self._driver: Driver | None = None
        if device.type == "cuda":
            try:
                self._driver = Driver()
            except (OSError, AttributeError) as error:
                raise OctoPipeError(f"the cuda_ipc transport needs libcuda's memory operations: {error}") from None

    def open(self, slots: Sequence[Slot]) -> None:
        super().open(slots)
        me = self._world.rank
        targets = sorted({s.peer for s in slots if s.sending})
        sources = sorted({s.peer for s in slots if not s.sending})
        made: dict[tuple[str, Pair], Tensor] = {}
        for peer in sources:
            made["arena", (peer, me)] = self._make(self._shape, torch.uint8)
            made["filled", (peer, me)] = self._make((1,), torch.int32)
        for peer in targets:
            made["freed", (me, peer)] = self._make((1,), torch.int32)
        shown = self._world.gather({key: self._show(tensor) for key, tensor in made.items()})
        for peer in targets:
            arena, filled = (self._see(shown[peer][name, (me, peer)]) for name in ("arena", "filled"))
            self._senders[peer] = RingSender(arena, filled, made["freed", (me, peer)], self._lane())
        for peer in sources:
            freed = self._see(shown[peer]["freed", (peer, me)])
            self._receivers[peer] = RingReceiver(
                made["arena", (peer, me)], made["filled", (peer, me)], freed, self._lane()
            )
        self._world.gather(None)  # everybody has seen everything: names may go
        for path in (shown[me][key] for key in made):
            if isinstance(path, tuple):
                with contextlib.suppress(OSError):
                    os.unlink(path[0])

    def _lane(self) -> Lane:
        lane = HostLane() if self._driver is None else CudaLane(self._driver, self.device)
        self._lanes.append(lane)
        return lane

    # -- sharing memory --------------------------------------------------------------------------------

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._driver is not None:
            tensor = torch.zeros(shape, dtype=dtype, device=self.device)
            torch.cuda.synchronize(self.device)  # zero before anybody looks
            return tensor
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        handle, path = tempfile.mkstemp(prefix="octopipe-ring-", dir=folder)
        nbytes = dtype.itemsize * int(torch.Size(shape).numel())
        os.ftruncate(handle, nbytes)
        os.close(handle)
        tensor = _open_file(path, shape, dtype)
        tensor._octopipe_path = path  # type: ignore[attr-defined]
        return tensor

    def _show(self, tensor: Tensor) -> Any:
        """What another process needs to see this memory."""
        if self._driver is None:
            return tensor._octopipe_path, tuple(tensor.shape), tensor.dtype  # type: ignore[attr-defined]
        from torch.multiprocessing.reductions import reduce_tensor

        return pickle.dumps(reduce_tensor(tensor))

    def _see(self, shown: Any) -> Tensor:
        if isinstance(shown, tuple):
            return _open_file(*shown)
        rebuild, arguments = pickle.loads(shown)
        return rebuild(*arguments)

    # -- bodies ----------------------------------------------------------------------------------------

    def _send_body(self, slot: Slot, tensor: Tensor) -> Any:
        return self._senders[slot.peer].send(tensor)

    def _send_filler(self, slot: Slot, leaf: Leaf) -> Any:
        return self._senders[slot.peer].skip(leaf.nbytes)

    def _post_body(self, slot: Slot, leaf: Leaf) -> tuple[Tensor, Any]:
        buffer = self._empty(leaf)
        return buffer, self._receivers[slot.peer].receive(buffer)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()


def _open_file(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = int(torch.Size(shape).numel())
    return torch.from_file(path, shared=True, size=count, dtype=dtype).view(shape)
