"""Point to point over a gloo process group: CPU tensors, one message per tensor, no copies of large ones.

Knows: gloo. Does not know: plans.

A forward message starts with a header (see `messages`); small tensors ride inside it. The receiver posts the
header and, guessing that the tensors have the shapes of the training step before, their buffers too. Sender and
receiver make the same guess; when it is wrong the sender completes the guessed buffers with a message of one
byte (gloo lets a message be shorter than its buffer) and the receiver posts the right ones after reading the
header. Gradients have the form of the message they answer, so they need neither header nor guess.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octopipe.runtime.buffers import BufferPool
from octopipe.runtime.messages import HEAD_BYTES, Leaf, Spec, Specs, text_bytes
from octopipe.runtime.slots import Slot
from octopipe.runtime.transports.base import TransferError, Transport, spread


class _End:
    """What the transport keeps for one slot."""

    __slots__ = (
        "bodies", "expected", "head", "head_tag", "head_view", "memory", "pointer", "seen", "spec", "tag", "works",
    )  # fmt: skip

    def __init__(self, slot: Slot):
        self.tag = 3 * slot.number
        self.head_tag = self.tag + 1
        self.head: Tensor = torch.empty(0)
        self.works: list[Any] = []
        self.bodies: list[Tensor] = []
        self.expected: tuple[Leaf, ...] = ()
        """Tensors of the last message that came beside its header: both ends guess that they come again."""
        self.spec: Spec | None = None
        self.seen = b""
        if slot.forward:
            self.head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
            self.head_view = self.head
            self.memory = memoryview(self.head.numpy())  # type: ignore[arg-type]
            self.pointer = self.head.data_ptr()


class GlooTransport(Transport):
    """See the module."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float):
        self.group = group
        self.timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._specs = Specs()
        self._pool = BufferPool(torch.device("cpu"))
        self._byte = torch.zeros(1, dtype=torch.uint8)

    def open(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.state = _End(slot)

    # -- sending ---------------------------------------------------------------------------------------

    def send_forward(self, slot: Slot, value: Any, needs: list[bool] | None) -> Spec:
        end: _End = slot.state
        spec, tensors = self._specs.of(value, needs)
        works = end.works
        send, peer = self._send, slot.peer
        if spec is not end.spec:
            end.spec = spec
            end.memory[: len(spec.header)] = spec.header
            end.head_view = end.head[: min(_head_bytes(spec), HEAD_BYTES)]
        if spec.inline:
            at = end.pointer + spec.offset
            for tensor in tensors:
                tensor = tensor.contiguous()
                size = tensor.nbytes
                ctypes.memmove(at, tensor.data_ptr(), size)
                at += -(-size // 16) * 16
        works.append(send(slot, end.head_view, peer, end.head_tag))
        beside = () if spec.inline else spec.leaves
        if end.expected is not beside and _sizes(end.expected) != _sizes(beside):
            works.extend(send(slot, self._byte, peer, end.tag) for leaf in end.expected if leaf.nbytes)
        if not spec.inline:
            if len(spec.header) < 32 + len(spec.text):
                text = torch.frombuffer(bytearray(spec.text), dtype=torch.uint8)
                works.append(send(slot, text, peer, end.tag + 2))
                end.bodies.append(text)
            for tensor in tensors:
                if tensor.nbytes:
                    tensor = tensor.contiguous()
                    works.append(send(slot, tensor, peer, end.tag))
                    end.bodies.append(tensor)
        end.expected = beside
        slot.nbytes = spec.nbytes
        return spec

    def send_gradient(self, slot: Slot, gradients: list[Tensor | None]) -> None:
        end: _End = slot.state
        slot.nbytes = 0
        for gradient in gradients:
            if gradient is not None and gradient.nbytes:
                gradient = gradient.contiguous()
                slot.nbytes += gradient.nbytes
                end.works.append(self._send(slot, gradient, slot.peer, end.tag))
                end.bodies.append(gradient)

    def _send(self, slot: Slot, tensor: Tensor, peer: int, tag: int) -> Any:
        try:
            return self.group.send([tensor], peer, tag)
        except RuntimeError as error:
            raise TransferError(slot, _reason(error)) from None

    def release(self, slot: Slot) -> None:
        end: _End = slot.state
        if end.works:
            self._wait(slot, end.works)
            end.works.clear()
            end.bodies.clear()

    # -- receiving -------------------------------------------------------------------------------------

    def post(self, slot: Slot) -> None:
        end: _End = slot.state
        slot.posted = True
        try:
            if slot.forward:
                end.works.append(self.group.recv([end.head], slot.peer, end.head_tag))
                self._post_bodies(slot, end.expected)
            else:
                self._post_bodies(slot, slot.cell.sent.asking)
        except RuntimeError as error:
            raise TransferError(slot, _reason(error)) from None

    def _post_bodies(self, slot: Slot, leaves: Sequence[Leaf]) -> None:
        end: _End = slot.state
        for leaf in leaves:
            buffer = self._pool.take(leaf.shape, leaf.dtype)
            end.bodies.append(buffer)
            if leaf.nbytes:
                end.works.append(self.group.recv([buffer], slot.peer, end.tag))

    def take_forward(self, slot: Slot) -> tuple[Any, Spec]:
        end: _End = slot.state
        works = end.works
        self._wait(slot, works[:1])
        fixed = end.memory[:32].tobytes()
        if fixed == end.seen:
            spec = end.spec
            assert spec is not None
        else:
            spec = self._read(slot, end)
            end.spec, end.seen = spec, fixed
        beside = () if spec.inline else spec.leaves
        if end.expected or beside:
            guessed = end.expected
            end.expected = beside
            self._wait(slot, works[1:])
            if guessed is not beside and _sizes(guessed) != _sizes(beside):
                works.clear()
                end.bodies.clear()
                self._post_bodies(slot, beside)
                self._wait(slot, works)
            tensors = end.bodies
            if guessed is not beside:
                tensors = [
                    t if t.dtype is leaf.dtype and t.shape == leaf.shape else _as(t, leaf)
                    for t, leaf in zip(tensors, beside)
                ]
            end.bodies = []
        else:
            tensors = []
        works.clear()
        slot.posted = False
        if spec.inline:
            at = end.pointer + spec.offset
            for leaf in spec.leaves:
                tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
                ctypes.memmove(tensor.data_ptr(), at, leaf.nbytes)
                tensors.append(tensor)
                at += -(-leaf.nbytes // 16) * 16
        return spec.value(tensors), spec

    def _read(self, slot: Slot, end: _End) -> Spec:
        head = end.memory.tobytes()
        spec = self._specs.read(head)
        if spec is None or (32 + text_bytes(head) > HEAD_BYTES):
            text = torch.empty(text_bytes(head), dtype=torch.uint8)
            self._wait(slot, [self.group.recv([text], slot.peer, end.tag + 2)])
            spec = self._specs.read(head, text.numpy().tobytes())
            assert spec is not None
        return spec

    def take_gradient(self, slot: Slot) -> list[Tensor | None]:
        end: _End = slot.state
        self._wait(slot, end.works)
        end.works.clear()
        tensors, end.bodies = end.bodies, []
        slot.posted = False
        return spread(slot.cell.sent.wanted, tensors)

    def _wait(self, slot: Slot, works: list[Any]) -> None:
        self.waiting = slot
        try:
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise TransferError(slot, _reason(error)) from None
        self.waiting = None

    def end_step(self) -> None:
        self._pool.end_step()


def _head_bytes(spec: Spec) -> int:
    if not spec.inline:
        return len(spec.header)
    return spec.offset + sum(-(-leaf.nbytes // 16) * 16 for leaf in spec.leaves)


def _sizes(leaves: Sequence[Leaf]) -> list[int]:
    return [leaf.nbytes for leaf in leaves]


def _as(tensor: Tensor, leaf: Leaf) -> Tensor:
    return tensor.view(-1).view(torch.uint8).view(leaf.dtype).view(leaf.shape)


def _reason(error: RuntimeError) -> str:
    text = " ".join(str(error).split())
    if "Timed out" in text or "timeout" in text.lower():
        return "timed out"
    return "the peer is gone" if "closed" in text or "reset" in text.lower() else text[:160]
