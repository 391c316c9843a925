"""Transport for ranks that share one GPU: tensors pass through rings in shared memory, and no host waits for a device.

Knows: which rings a program needs, and how hosts wait for each other. Does not know: the protocol of the ring (`ring`),
where its memory lies (`arenas`), or headers (`headed`).

NCCL does not support two ranks on one device; with CUDA MPS, every rank has a share of it. There is one ring per
direction of each communicating pair of ranks: an in-order queue, as in the directed channel model (and safe under the
stricter ones).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.ranks.gpu_share import check_products
from octopipe.runtime.ranks.world import World
from octopipe.runtime.slots import RankProgram, Slot
from octopipe.runtime.wire.messages import Leaf, Spec
from octopipe.runtime.wire.transports.arenas import Arenas
from octopipe.runtime.wire.transports.lanes import Lane
from octopipe.runtime.wire.transports.mail import Box
from octopipe.runtime.wire.transports.ordered import OrderedTransport
from octopipe.runtime.wire.transports.ring import proceed_all, wait_on_host
from octopipe.runtime.wire.transports.ring_setup import Rings, open_rings

CHUNK_BYTES = 4 << 20
"""A message has several chunks, so that copying one in overlaps with copying the previous one out."""
CHUNKS = 16


class IpcTransport(OrderedTransport):
    """See the module. On a CPU, the same rings are in shared files."""

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
        check_products(device)  # ranks that share a GPU may have a part of it each
        self.delivery.meanwhile = self._meanwhile
        self._world, self._shape = world, (chunks, chunk_bytes)
        self._rings = Rings({}, {})
        self._arenas = Arenas(device)

    def open(self, program: RankProgram) -> None:
        super().open(program)
        slots = program.slots
        self._rings = open_rings(
            self._arenas,
            rank=self._world.rank,
            targets=sorted({s.peer for s in slots if s.sending}),
            sources=sorted({s.peer for s in slots if not s.sending}),
            new_arena=lambda: self._arenas.arena(self._shape),
            gather=self._world.gather,
            until=self._until,
        )

    # -- bodies ----------------------------------------------------------------------------------------

    def _send_body(self, slot: Slot, tensor: Tensor) -> Any:
        self.waiting = slot
        work = self._rings.senders[slot.peer].send(tensor)
        self.waiting = None
        return work

    def _send_filler(self, slot: Slot, leaf: Leaf) -> Any:
        self.waiting = slot
        work = self._rings.senders[slot.peer].skip(leaf.nbytes)
        self.waiting = None
        return work

    def _post_body(self, slot: Slot, leaf: Leaf) -> tuple[Tensor, Any]:
        buffer = self._empty(leaf)
        return buffer, self._rings.receivers[slot.peer].receive(buffer, lambda lane: self._arriving(slot, lane))

    def _arriving(self, slot: Slot, lane: Lane) -> None:
        """Called when all copies of a body have been queued on its lane. Does nothing; subclasses may use it."""

    def sent(self) -> Sequence[Any]:
        return [event for ring in self._rings.senders.values() for event in ring.lane.events()]

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
        return any(ring.pending for ring in self._rings.receivers.values())

    def _proceed(self) -> None:
        proceed_all()

    def _until(self, holds: Callable[[], bool]) -> None:
        wait_on_host(holds, self.timeout_s, lambda: bool(self.dead()))

    def close(self) -> None:
        super().close()
        self._rings.close()
        self._arenas.close()
