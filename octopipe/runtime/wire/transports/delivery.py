"""Delivery of headers and host tensors between ranks: mailboxes on one host, gloo between hosts.

Knows: the mailboxes (`mail`), the gloo group, message tags, buffers, waiting. Does not know: the contents of headers or
which tensors are expected (`headed`), or how tensors travel between devices (`gloo`, `nccl`, `cuda_ipc`).

Tags are unique to this pipeline (`World.new_tags`), so messages left over from an interrupted step are never taken for
messages of a later pipeline.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.ranks.world import World, wire
from octopipe.runtime.slots import Slot
from octopipe.runtime.wire.buffers import BufferPool, Lent
from octopipe.runtime.wire.messages import FIXED_BYTES, HEAD_BYTES, Leaf, Spec, padded
from octopipe.runtime.wire.telling import peer_words
from octopipe.runtime.wire.transports.base import TransferError, Transport
from octopipe.runtime.wire.transports.mail import BODIES_BYTES, Box, Mail

SENDS_END_S = 5.0
"""How long a rank that interrupts a step waits for messages that are on their way."""


class End:
    """The data that the transport keeps for one end of one transfer."""

    __slots__ = (
        "bodies", "box", "expected", "fixed", "flags", "head", "kept", "length", "memory", "message", "parts",
        "pointer", "room", "seen", "spec", "tag", "whole", "works",
    )  # fmt: skip

    def __init__(self, slot: Slot, box: Box | None, first_tag: int):
        self.box = box
        """The mailbox for headers and for everything sent `Delivery.by_mail`; None if the peer is on another host."""
        self.tag = first_tag + 4 * slot.number
        """The tag of bodies. Headers have `tag` + 1, late bodies `tag` + 3; `tag` + 2 is for descriptions that are too
        long for a header and for flags of gradients."""
        self.works: list[Any] = []
        self.bodies: list[Tensor] = []
        self.expected: tuple[Leaf, ...] = ()
        """The bodies of the last message. Both ends assume that the next message has the same ones."""
        self.spec: Spec | None = None
        self.seen = b""
        """The fixed part of the last header if it determines the form of the message; else empty."""
        self.parts: list[Lent] = []
        """The tensors inside the last header. `head` is not reused while one of them is in use."""
        self.kept: tuple[Leaf, Lent] | None = None
        """A buffer for a small body of the same form as the last one."""
        self.whole = False
        """Whether the last message of gradients contained all that were requested, which both ends then know."""
        self.flags: Any = None
        """A buffer for the flags that state which gradients the message in the box contains."""
        if slot.forward:
            self.new_head()

    def flags_for(self, count: int) -> int:
        """A buffer for the flags of this number of gradients."""
        if self.flags is None or len(self.flags) < count:
            self.flags = (ctypes.c_ubyte * max(count, 1))()
        return ctypes.addressof(self.flags)

    def new_head(self) -> None:
        self.head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
        self.room = [self.head]
        self.message = self.room
        """The part of `head` that is sent."""
        self.length = HEAD_BYTES
        """The number of bytes of `message`."""
        self.memory = memoryview(self.head.numpy())  # type: ignore[arg-type]
        self.fixed = self.memory[:FIXED_BYTES]
        self.pointer = self.head.data_ptr()


class Delivery:
    """The connections of one transport between hosts. `owner.waiting` is the slot that it currently waits for.

    `inline`: tensors may be stored beside headers, because they are in host memory.
    """

    def __init__(self, owner: Transport, world: World, *, inline: bool, timeout_s: float):
        self._owner, self._world, self._inline = owner, world, inline
        self._timeout_s, self._timeout = timeout_s, timedelta(seconds=timeout_s)
        self.control = wire(world.control)
        self.pool = BufferPool(torch.device("cpu"))
        self._mail = Mail()
        self._sending: list[Slot] = []
        self._lost: int | None = None
        """The peer of the transfer that failed, if one did."""
        self.sent_at_s = 0.0
        """The time of the last send (`time.monotonic`)."""
        self.meanwhile: Callable[[Any], None] | None = None
        """Called with a work before it is waited for. It may return before the work is complete."""

    def open(self, slots: Sequence[Slot]) -> None:
        """Create both ends of every transfer (collective)."""
        boxes = self._mail.open(self.control, slots, HEAD_BYTES, self._timeout_s)
        most = max((slot.number for slot in slots), default=-1) + 1
        first_tag = self._world.new_tags(4 * max(self._world.gather(most)))
        for slot in slots:
            slot.state = End(slot, boxes.get(2 * slot.number + slot.sending), first_tag)
        self._sending = [slot for slot in slots if slot.sending]

    def close(self) -> None:
        self._mail.close()

    def end_sends(self) -> None:
        """Wait a moment for messages that are on their way, before the connections of an interrupted step are closed.

        If a connection is closed in the middle of a message, gloo tells every receiver that waits for a message, but
        not the one that has begun to read this one: it would wait until its timeout. A message that nobody receives is
        given up, which closes the connections.

        A rank that has lost another one counts this moment from its own last send, which was before it began to wait:
        thus an error that passes from rank to rank is delayed once, not by every rank. It does not wait for messages to
        the lost rank.
        """
        end = SENDS_END_S + (time.monotonic() if self._lost is None else self.sent_at_s)
        for slot in self._sending if self._inline else ():
            state: End = slot.state
            for work in () if slot.peer == self._lost else state.works:
                left = end - time.monotonic()
                if left <= 0:
                    return
                with suppress(RuntimeError):
                    work.wait(timedelta(seconds=max(left, 1e-3)))

    def dead(self) -> Collection[int]:
        return self._mail.dead()

    def failed(self, slot: Slot, error: RuntimeError) -> TransferError:
        """The error to raise for a transfer that failed."""
        self._lost = slot.peer
        return TransferError(slot, reason(error))

    def wait(self, slot: Slot, works: list[Any]) -> None:
        self._owner.waiting = slot
        try:
            for work in works:
                if self.meanwhile is not None:
                    self.meanwhile(work)
                work.wait(self._timeout)
        except RuntimeError as error:
            raise self.failed(slot, error) from None
        self._owner.waiting = None

    def receive(self, slot: Slot, buffer: Tensor, tag: int) -> None:
        """Wait for a message that was not posted before. If the peer is already gone, posting fails by itself."""
        try:
            work = self.control.recv([buffer], slot.peer, tag)
        except RuntimeError as error:
            raise self.failed(slot, error) from None
        self.wait(slot, [work])

    # -- headers ---------------------------------------------------------------------------------------

    def send_header(self, slot: Slot) -> None:
        """Send only the header that is in the end's `head`."""
        end: End = slot.state
        if end.box is not None:
            end.box.put(end.pointer, end.length)
        else:
            end.works.append(self.control.send(end.message, slot.peer, end.tag + 1))

    def post_header(self, slot: Slot) -> None:
        end: End = slot.state
        if end.box is not None:
            end.box.pointer = end.pointer
            end.works.append(end.box)
        else:
            end.works.append(self.control.recv(end.room, slot.peer, end.tag + 1))

    def send_text(self, slot: Slot, spec: Spec) -> None:
        """Send a description that is too long for a header."""
        end: End = slot.state
        text = torch.frombuffer(bytearray(spec.text), dtype=torch.uint8)
        end.works.append(self.control.send([text], slot.peer, end.tag + 2))
        end.bodies.append(text)

    def take_text(self, slot: Slot, nbytes: int) -> bytes:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.receive(slot, buffer, slot.state.tag + 2)
        return bytes(buffer.numpy().tobytes())

    # -- which gradients there are -----------------------------------------------------------------------

    def send_flags(self, slot: Slot, flags: Sequence[bool]) -> None:
        """Send which of the requested gradients exist."""
        end: End = slot.state
        text = torch.tensor(flags, dtype=torch.uint8)
        if self._by_box(end, len(flags)):
            end.box.put(text.data_ptr(), text.nbytes)  # type: ignore[union-attr]
        else:
            end.works.append(self.control.send([text], slot.peer, end.tag + 2))
            end.bodies.append(text)

    def take_flags(self, slot: Slot, count: int) -> list[bool]:
        end: End = slot.state
        text = torch.empty(count, dtype=torch.uint8)
        if self._by_box(end, count):
            end.box.pointer = text.data_ptr()  # type: ignore[union-attr]
            self.wait(slot, [end.box])
        else:
            self.receive(slot, text, end.tag + 2)
        return [bool(flag) for flag in text.tolist()]

    def _by_box(self, end: End, nbytes: int) -> bool:
        """Whether flags of gradients are sent through the box. With `inline`, it carries the gradients instead."""
        return end.box is not None and not self._inline and nbytes <= HEAD_BYTES

    # -- host tensors ----------------------------------------------------------------------------------

    def by_mail(self, end: End, nbytes: int) -> Box | None:
        """The box for tensors of `nbytes` in total (padded), which go to shared memory if there is space; None if they
        are sent in another way."""
        return end.box if self._inline and 0 < nbytes <= BODIES_BYTES else None

    def gradient_box(self, end: End, count: int) -> Box | None:
        """The box for the gradients of a slot, if both ends are on one host and the gradients are in host memory."""
        return end.box if self._inline and count <= HEAD_BYTES else None

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether tensors of these sizes are small enough to be stored in shared memory (if there is space)."""
        return sum(padded(nbytes) for nbytes in sizes) <= BODIES_BYTES

    def from_mail(self, slot: Slot, box: Box, leaves: Sequence[Leaf]) -> list[Tensor]:
        """Copy a message's tensors out of shared memory, or receive them late if they did not fit into it."""
        if not box.bodies:
            return [self.take_late(slot, leaf) for leaf in leaves]
        tensors, at = [], box.bodies
        for leaf in leaves:
            tensor = self.pool.take(leaf.shape, leaf.dtype)
            ctypes.memmove(tensor.data_ptr(), at, leaf.nbytes)
            at += leaf.padded
            tensors.append(tensor)
        box.done()
        return tensors

    def send_late(self, slot: Slot, tensor: Tensor) -> None:
        """Send a tensor that the receiver did not expect, from host to host."""
        end: End = slot.state
        host = tensor.cpu()
        end.works.append(self.control.send([host], slot.peer, end.tag + 3))
        end.bodies.append(host)

    def take_late(self, slot: Slot, leaf: Leaf) -> Tensor:
        host = self.pool.take(leaf.shape, leaf.dtype)
        if leaf.nbytes:
            self.receive(slot, host, slot.state.tag + 3)
        return host

    def room(self, end: End, leaf: Leaf) -> Tensor:
        """A buffer for a small tensor: the previous one again, unless the tensor received in it is still in use."""
        kept = end.kept
        if kept is None or kept[0] is not leaf or not kept[1].is_free():
            kept = end.kept = leaf, Lent(torch.empty(leaf.shape, dtype=leaf.dtype))
        return kept[1].tensor.detach()


def in_a_row(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """The arguments of `Box.put` for these tensors: address, bytes and padded bytes of each."""
    return [(t.data_ptr(), t.nbytes, padded(t.nbytes)) for t in tensors]


def reason(error: RuntimeError) -> str:
    """The reason why a transfer failed, in a few words."""
    text = " ".join(str(error).split())
    small = text.lower()
    if "timed out" in small or "timeout" in small:
        return "timed out"
    # gloo reports a lost peer with different words: connection closed, reset, broken pipe.
    gone = peer_words(error) is not None or "closed" in small or "reset" in small
    return "the peer is gone" if gone else text[:160]
