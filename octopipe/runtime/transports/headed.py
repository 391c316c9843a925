"""Messages with headers: what the gloo, NCCL and CUDA-IPC transports have in common.

Knows: the protocol of forward and gradient messages: headers through mailboxes (`mail`) between ranks of one host and
over a gloo group between hosts, bodies some way. Does not know: that way; see `gloo`, `nccl` and `cuda_ipc`.

A forward message starts with a header (see `messages`), sent from host to host; small host tensors ride inside it.
They stay where they arrived: a slot's header is received into the same memory again once nobody holds them.
The receiver posts the header and, guessing that the tensors have the shapes of the training step before, their
buffers too, so that bodies travel the moment they exist. Sender and receiver make the same guess. When it is wrong
(the first step, or shapes that changed) the sender fills the guessed buffers with anything and sends the right
bodies late: the receiver makes room for them once it has read the header. Gradients have the form of the message
they answer, so they need neither header nor guess. Nor do host tensors of moderate size between ranks of one host:
they lie beside the header in shared memory (`_by_mail`), or come late where that is full.

No host waits for a device here. A receiver's host waits for headers, that is for the sender's host to have issued
its forward; headers only travel downstream, so hosts run ahead of their devices as far as without them.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.buffers import BufferPool, Lent
from octopipe.runtime.messages import FIXED_BYTES, HEAD_BYTES, Leaf, Spec, Specs, padded, text_bytes
from octopipe.runtime.slots import Slot
from octopipe.runtime.transports.base import TransferError, Transport, spread
from octopipe.runtime.transports.mail import BODIES_BYTES, Box, Mail
from octopipe.runtime.world import Group, wire


class End:
    """What the transport keeps for one slot."""

    __slots__ = (
        "bodies", "box", "expected", "fixed", "head", "kept", "length", "memory", "message", "parts", "pointer", "room",
        "seen", "spec", "tag", "works",
    )  # fmt: skip

    def __init__(self, slot: Slot, box: Box | None):
        self.box = box
        """None where the peer is on another host. For headers, and for all that `_by_mail`."""
        self.tag = 4 * slot.number
        """Bodies; one more: headers; two more: descriptions too long for a header; three more: late bodies."""
        self.works: list[Any] = []
        self.bodies: list[Tensor] = []
        self.expected: tuple[Leaf, ...] = ()
        """Tensors of the last message that came beside its header: both ends guess that they come again."""
        self.spec: Spec | None = None
        self.seen = b""
        """The fixed part of the last header, if it alone says what its message is like."""
        self.parts: list[Lent] = []
        """The tensors that came inside the last header: `head` is not used again while somebody holds one."""
        self.kept: tuple[Leaf, Lent] | None = None
        """Room for a small body like the last."""
        if slot.forward:
            self.new_head()

    def new_head(self) -> None:
        self.head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
        self.room = [self.head]
        self.message = self.room
        """The part of `head` that is sent."""
        self.length = HEAD_BYTES
        """Its bytes."""
        self.memory = memoryview(self.head.numpy())  # type: ignore[arg-type]
        self.fixed = self.memory[:FIXED_BYTES]
        self.pointer = self.head.data_ptr()


class HeadedTransport(Transport):
    """See the module. A subclass moves bodies: `_send_body` and `_post_body` return something with `wait`."""

    inline = False
    """Whether tensors may ride in the header or lie beside it: they must be the host's."""

    def __init__(self, control: Group, *, timeout_s: float):
        self.control = wire(control)
        self.timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._specs = Specs()
        self._pool = BufferPool(torch.device("cpu"))
        self._mail = Mail()

    def open(self, slots: Sequence[Slot]) -> None:
        boxes = self._mail.open(self.control, slots, HEAD_BYTES, self.timeout_s)
        for slot in slots:
            slot.state = End(slot, boxes.get(2 * slot.number + slot.sending))

    def close(self) -> None:
        self._mail.close()

    def dead(self) -> Collection[int]:
        return self._mail.dead()

    # -- moving bodies ---------------------------------------------------------------------------------

    @abstractmethod
    def _send_body(self, slot: Slot, tensor: Tensor) -> Any:
        """Start sending a tensor that the receiver expects; may raise RuntimeError."""

    @abstractmethod
    def _post_body(self, slot: Slot, leaf: Leaf) -> tuple[Tensor, Any]:
        """Room for a tensor that the sender knows to be expected, and the receive into it."""

    @abstractmethod
    def _send_filler(self, slot: Slot, leaf: Leaf) -> Any:
        """Complete a receive that was posted on a wrong guess."""

    def _ready(self, tensor: Tensor) -> Tensor:
        """The tensor as bodies want it: contiguous, on the transport's device."""
        return tensor.contiguous()

    def _send_late(self, slot: Slot, tensor: Tensor) -> tuple[Tensor, Any]:
        """Send a tensor that the receiver did not expect, over the hosts."""
        host = tensor.cpu()
        return host, self.control.send([host], slot.peer, slot.state.tag + 3)

    def _take_late(self, slot: Slot, leaf: Leaf) -> Tensor:
        host = self._pool.take(leaf.shape, leaf.dtype)
        if leaf.nbytes:
            self._wait(slot, [self.control.recv([host], slot.peer, slot.state.tag + 3)])
        return host

    # -- sending ---------------------------------------------------------------------------------------

    def spec_of(self, value: Any, needs: list[bool] | None) -> Spec:
        """The form in which a value would be sent."""
        return self._specs.of(value, needs)[0]

    def send_forward(self, slot: Slot, value: Any, needs: list[bool] | None) -> Spec:
        end: End = slot.state
        spec, tensors = self._specs.of(value, needs)
        inline = spec.inline and self.inline
        if spec is not end.spec:
            end.spec = spec
            end.memory[: len(spec.header)] = spec.header
            end.length = spec.message_bytes if inline else len(spec.header)
            end.message = [end.head[: end.length]]
        if inline:
            at = end.pointer + spec.offset
            for tensor, leaf in zip(tensors, spec.leaves):
                if not tensor.is_contiguous():
                    tensor = tensor.contiguous()
                ctypes.memmove(at, tensor.data_ptr(), leaf.nbytes)
                at += leaf.padded
        try:
            box = None if inline or spec.long else self._by_mail(end, spec.padded)
            with_header = inline
            if box is not None:
                tensors = [self._ready(tensor) for tensor in tensors]
                with_header = box.put(end.pointer, end.length, _bodies(tensors))
            elif end.box is not None:
                end.box.put(end.pointer, end.length)
            else:
                end.works.append(self.control.send(end.message, slot.peer, end.tag + 1))
            if not with_header or end.expected:
                self._send_bodies(slot, spec, () if with_header else spec.leaves, tensors, late=box is not None)
        except RuntimeError as error:
            raise TransferError(slot, reason(error)) from None
        slot.nbytes = spec.nbytes
        return spec

    def _by_mail(self, end: End, nbytes: int) -> Box | None:
        """The box beside which tensors of so many bytes, padded, lie in shared memory if there is room."""
        return end.box if self.inline and 0 < nbytes <= BODIES_BYTES else None

    def _send_bodies(
        self, slot: Slot, spec: Spec, leaves: tuple[Leaf, ...], tensors: list[Tensor], *, late: bool
    ) -> None:
        """Send these tensors as expected, or late where nobody expects them or will expect their like."""
        end: End = slot.state
        works, bodies = end.works, end.bodies
        guessed = bool(leaves) and not late and _same(end.expected, leaves)
        if not guessed:
            works.extend(self._send_filler(slot, leaf) for leaf in end.expected if leaf.nbytes)
        if spec.long:
            text = torch.frombuffer(bytearray(spec.text), dtype=torch.uint8)
            works.append(self.control.send([text], slot.peer, end.tag + 2))
            bodies.append(text)
        for leaf, tensor in zip(leaves, tensors):
            if not leaf.nbytes:
                continue
            tensor = self._ready(tensor)
            if guessed:
                works.append(self._send_body(slot, tensor))
            else:
                tensor, work = self._send_late(slot, tensor)
                works.append(work)
            bodies.append(tensor)
        end.expected = () if late else leaves

    def send_gradient(self, slot: Slot, gradients: list[Tensor | None]) -> None:
        end: End = slot.state
        try:
            some = [self._ready(g) for g in gradients if g is not None]
            slot.nbytes = sum(g.nbytes for g in some)
            box = self._by_mail(end, sum(padded(g.nbytes) for g in some))
            if box is not None:
                if len(some) == 1 and slot.nbytes <= HEAD_BYTES:
                    box.put(some[0].data_ptr(), slot.nbytes)
                    return
                if box.put(0, 0, _bodies(some)):
                    return
            for gradient in some:
                if gradient.nbytes:
                    if box is not None:
                        gradient, work = self._send_late(slot, gradient)
                    else:
                        work = self._send_body(slot, gradient)
                    end.works.append(work)
                    end.bodies.append(gradient)
        except RuntimeError as error:
            raise TransferError(slot, reason(error)) from None

    def release(self, slot: Slot) -> None:
        end: End = slot.state
        if end.works:
            self._wait(slot, end.works)
            end.works.clear()
            end.bodies.clear()

    # -- receiving -------------------------------------------------------------------------------------

    def post(self, slot: Slot) -> None:
        end: End = slot.state
        slot.posted = True
        try:
            if slot.forward:
                for part in end.parts:
                    if not part.is_free():  # somebody kept the tensor beyond its step
                        end.new_head()
                        end.seen, end.parts = b"", []
                        break
                if end.box is not None:
                    end.box.pointer = end.pointer
                    end.works.append(end.box)
                else:
                    end.works.append(self.control.recv(end.room, slot.peer, end.tag + 1))
                leaves: Sequence[Leaf] = end.expected
            else:
                leaves = slot.cell.sent.asking
                box = self._by_mail(end, sum(x.padded for x in leaves))
                if box is not None:
                    end.works.append(box)
                    if len(leaves) == 1 and leaves[0].nbytes <= HEAD_BYTES:
                        buffer = self._room(end, leaves[0])
                        box.pointer = buffer.data_ptr()
                        end.bodies.append(buffer)
                    return
            for leaf in leaves:
                if leaf.nbytes:
                    buffer, work = self._post_body(slot, leaf)
                    end.works.append(work)
                else:
                    buffer = self._empty(leaf)
                end.bodies.append(buffer)
        except RuntimeError as error:
            raise TransferError(slot, reason(error)) from None

    def _empty(self, leaf: Leaf) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype)

    def _room(self, end: End, leaf: Leaf) -> Tensor:
        """Where a small tensor may arrive: the same memory again where nobody holds what came last."""
        kept = end.kept
        if kept is None or kept[0] is not leaf or not kept[1].is_free():
            kept = end.kept = leaf, Lent(torch.empty(leaf.shape, dtype=leaf.dtype))
        return kept[1].tensor.detach()

    def take_forward(self, slot: Slot) -> tuple[Any, Spec]:
        end: End = slot.state
        works = end.works
        self._wait(slot, works if len(works) == 1 else works[:1])
        spec = end.spec
        if spec is None or end.fixed.tobytes() != end.seen:
            spec = self._read(slot, end)
        if spec.inline and self.inline:
            if end.expected:
                self._wait(slot, works[1:])
                end.bodies, end.expected = [], ()
            tensors = [part.tensor for part in end.parts]
        elif not spec.long and (box := self._by_mail(end, spec.padded)) is not None:
            if end.expected:
                self._wait(slot, works[1:])
            tensors = self._from_mail(slot, box, spec.leaves)
            end.bodies, end.expected = [], ()
        else:
            self._wait(slot, works[1:])
            if spec.leaves and _same(end.expected, spec.leaves):
                tensors = end.bodies
                if end.expected is not spec.leaves:
                    tensors = [_as(t, leaf) for t, leaf in zip(tensors, spec.leaves)]
            else:
                tensors = [self._take_late(slot, leaf) for leaf in spec.leaves]
            end.bodies, end.expected = [], spec.leaves
        works.clear()
        slot.posted = False
        return spec.value(tensors), spec

    def _from_mail(self, slot: Slot, box: Box, leaves: Sequence[Leaf]) -> list[Tensor]:
        """The tensors of a message that has come and has not been `done`."""
        if not box.bodies:
            return [self._take_late(slot, leaf) for leaf in leaves]
        tensors, at = [], box.bodies
        for leaf in leaves:
            tensor = self._pool.take(leaf.shape, leaf.dtype)
            ctypes.memmove(tensor.data_ptr(), at, leaf.nbytes)
            at += leaf.padded
            tensors.append(tensor)
        box.done()
        return tensors

    def _read(self, slot: Slot, end: End) -> Spec:
        head = end.memory.tobytes()
        text = None
        if FIXED_BYTES + text_bytes(head) > HEAD_BYTES:
            buffer = torch.empty(text_bytes(head), dtype=torch.uint8)
            self._wait(slot, [self.control.recv([buffer], slot.peer, end.tag + 2)])
            text = buffer.numpy().tobytes()
        end.spec = spec = self._specs.read(head, text)
        end.seen = b"" if spec.long else head[:FIXED_BYTES]
        end.parts = [Lent(t) for t in spec.inside(end.memory)] if spec.inline and self.inline else []
        return spec

    def take_gradient(self, slot: Slot) -> list[Tensor | None]:
        end: End = slot.state
        sent = slot.cell.sent
        self._wait(slot, end.works)
        tensors, end.bodies = end.bodies, []
        if not tensors and end.works:  # they lie in shared memory
            tensors = self._from_mail(slot, end.works[0], sent.asking)
        end.works.clear()
        slot.posted = False
        return tensors if sent.bare and tensors else spread(sent.wanted, tensors)  # type: ignore[return-value]

    def _wait(self, slot: Slot, works: list[Any]) -> None:
        self.waiting = slot
        try:
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise TransferError(slot, reason(error)) from None
        self.waiting = None

    def end_step(self) -> None:
        self._pool.end_step()


class OrderedTransport(HeadedTransport):
    """For bodies that travel in in-order queues, one per direction and peer: posts keep the program's order.

    A gradient whose form is not known yet (its forward is not sent) holds back the posts behind it; sending that
    forward lets them go. Lowering proved that what is waited for never stands behind what cannot come.
    """

    ordered = True

    def __init__(self, control: Group, device: torch.device, *, timeout_s: float):
        super().__init__(control, timeout_s=timeout_s)
        self.device = device
        self._held: dict[int, deque[Slot]] = {}

    def begin_step(self) -> None:
        self._held.clear()

    def post(self, slot: Slot) -> None:
        held = self._held.get(slot.peer)
        if held or not (slot.forward or slot.cell.sent is not None):
            self._held.setdefault(slot.peer, deque()).append(slot)
        else:
            super().post(slot)

    def send_forward(self, slot: Slot, value: Any, needs: list[bool] | None) -> Spec:
        spec = super().send_forward(slot, value, needs)
        held = self._held.get(slot.peer)
        if held:
            slot.cell.sent = spec
            while held and (held[0].forward or held[0].cell.sent is not None):
                super().post(held.popleft())
        return spec

    def _ready(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device).contiguous()

    def _empty(self, leaf: Leaf) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)

    def _take_late(self, slot: Slot, leaf: Leaf) -> Tensor:
        return super()._take_late(slot, leaf).to(self.device, copy=self.device.type == "cpu")


def _bodies(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Tensors as a box takes them: address, bytes, bytes with padding."""
    return [(t.data_ptr(), t.nbytes, padded(t.nbytes)) for t in tensors]


def _same(guess: tuple[Leaf, ...], leaves: tuple[Leaf, ...]) -> bool:
    """Whether buffers made for `guess` hold `leaves`."""
    return guess is leaves or [x.nbytes for x in guess] == [x.nbytes for x in leaves]


def _as(tensor: Tensor, leaf: Leaf) -> Tensor:
    """A buffer's bytes as another dtype and shape of the same size."""
    if tensor.dtype is leaf.dtype:
        return tensor.view(leaf.shape)
    return tensor.view(-1).view(torch.uint8).view(leaf.dtype).view(leaf.shape)


def reason(error: RuntimeError) -> str:
    """Why a transfer failed, in a few words."""
    text = " ".join(str(error).split())
    if "imed out" in text or "timeout" in text.lower():
        return "timed out"
    return "the peer is gone" if "closed" in text or "reset" in text.lower() else text[:160]
