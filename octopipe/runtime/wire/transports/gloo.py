"""Point to point over a gloo process group: CPU tensors, one message per tensor, no copies of large ones.

Knows: gloo. Does not know: plans or the protocol of messages (`headed`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.ranks.world import World
from octopipe.runtime.slots import Slot
from octopipe.runtime.wire.buffers import SMALL_BYTES
from octopipe.runtime.wire.messages import Leaf
from octopipe.runtime.wire.transports.headed import HeadedTransport


class GlooTransport(HeadedTransport):
    """Bodies use the same group as headers, directly from and into the tensors' memory."""

    name = "gloo"
    inline = True

    def __init__(self, world: World, *, timeout_s: float):
        super().__init__(world, timeout_s=timeout_s)
        self._byte = torch.zeros(1, dtype=torch.uint8)

    def _send_body(self, slot: Slot, tensor: Tensor) -> Any:
        return self.delivery.control.send([tensor], slot.peer, slot.state.tag)

    def _post_body(self, slot: Slot, leaf: Leaf) -> tuple[Tensor, Any]:
        end = slot.state
        if leaf.nbytes >= SMALL_BYTES:
            buffer = self.delivery.pool.take(leaf.shape, leaf.dtype)
        else:
            buffer = self.delivery.room(end, leaf)
        return buffer, self.delivery.control.recv([buffer], slot.peer, end.tag)

    def _send_filler(self, slot: Slot, leaf: Leaf) -> Any:
        # gloo lets a message be shorter than its buffer.
        return self.delivery.control.send([self._byte], slot.peer, slot.state.tag)
