"""Transports with in-order queues: what NCCL and CUDA IPC share.

Knows: that operations must be posted in program order, even if the form of a gradient is not known yet. Does not know:
how tensors are transferred.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.ranks.world import World
from octopipe.runtime.slots import Slot
from octopipe.runtime.wire.messages import Leaf, Spec
from octopipe.runtime.wire.transports.headed import HeadedTransport


class OrderedTransport(HeadedTransport):
    """For bodies that are sent in in-order queues, one per direction and peer: posts keep the program's order.

    A gradient whose form is not known yet, because its forward has not been sent, holds back the posts behind it until
    that forward is sent. Lowering has proven that no transfer waits in a queue behind one that cannot arrive.
    """

    ordered = True

    def __init__(self, world: World, device: torch.device, *, timeout_s: float):
        super().__init__(world, timeout_s=timeout_s)
        self.device = device
        self._held: dict[int, deque[Slot]] = {}

    def begin_step(self) -> None:
        self._held.clear()

    def post(self, slot: Slot) -> None:
        held = self._held.get(slot.peer)
        if held or not (slot.forward or slot.cell.output_message is not None):
            self._held.setdefault(slot.peer, deque()).append(slot)
        else:
            super().post(slot)

    def send_forward(self, slot: Slot, value: Any, needs: list[bool] | None) -> Spec:
        spec = super().send_forward(slot, value, needs)
        held = self._held.get(slot.peer)
        if held:
            slot.cell.output_message = spec
            while held and (held[0].forward or held[0].cell.output_message is not None):
                super().post(held.popleft())
        return spec

    def _ready(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device).contiguous()

    def _empty(self, leaf: Leaf) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)

    def _arrived_late(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, copy=self.device.type == "cpu")
