"""The message protocol that the gloo, NCCL and CUDA-IPC transports share.

Knows: the contents of a header, which bodies (tensors) both ends expect, and what happens if an expectation was wrong.
Does not know: how headers and host tensors are delivered (`delivery`), or how bodies travel (`gloo`, `nccl` and
`cuda_ipc`).

A forward message starts with a header (see `messages`), sent from host to host; small host tensors are included in it.
They are not copied again: the header of a slot is received into the same memory once nobody holds them any more. The
receiver posts a receive for the header and, assuming that the tensors have the shapes of the previous training step,
for their buffers too, so that bodies are transferred as soon as they exist. Sender and receiver make the same
assumption. If it is wrong (in the first step, or when shapes change), the sender fills the expected buffers with
arbitrary data and sends the actual bodies afterwards; the receiver allocates memory for them after reading the header.
Gradients have the form of the corresponding forward message, so they need neither a header nor an assumption. The same
holds for host tensors of moderate size between ranks of one host: they are next to the header in shared memory
(`Delivery.by_mail`), or are sent afterwards if that is full.

A requested gradient may not exist: a layer that detaches its input has none, and the parameters of the sending stage
must then keep `.grad` None, as they would in one process. Every message of host tensors states which of its gradients
exist. On a device, no host may wait for the backward of another: zeros are sent for missing gradients, and which exist
is reported until the gradients of a slot have once been complete. A gradient that is missing later is an error at its
sender.

No host waits for a device here. The host of a receiver waits for headers, that is, until the host of the sender has
issued its forward. Headers travel only downstream, so hosts can run ahead of their devices as far as without headers.
"""

from __future__ import annotations

import ctypes
import time
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.ranks.world import World
from octopipe.runtime.slots import RankProgram, Slot
from octopipe.runtime.wire.buffers import Lent
from octopipe.runtime.wire.messages import FIXED_BYTES, HEAD_BYTES, Leaf, Spec, Specs, text_bytes
from octopipe.runtime.wire.transports.base import Transport, spread
from octopipe.runtime.wire.transports.delivery import Delivery, End, in_a_row
from octopipe.runtime.wire.transports.mail import Box


class HeadedTransport(Transport):
    """See the module. A subclass moves the bodies: `_send_body` and `_post_body` return an object with `wait`."""

    inline = False
    """Whether tensors may be inside the header or next to it in shared memory: only if they are host tensors."""

    def __init__(self, world: World, *, timeout_s: float):
        self.timeout_s = timeout_s
        self.delivery = Delivery(self, world, inline=self.inline, timeout_s=timeout_s)
        self._specs = Specs()

    def open(self, program: RankProgram) -> None:
        self.delivery.open(program.slots)

    def abandon(self) -> None:
        self.delivery.close()
        self.delivery.end_sends()

    def close(self) -> None:
        self.delivery.close()

    def dead(self) -> Collection[int]:
        return self.delivery.dead()

    # -- moving bodies ---------------------------------------------------------------------------------

    @abstractmethod
    def _send_body(self, slot: Slot, tensor: Tensor) -> Any:
        """Start sending a tensor that the receiver expects; may raise RuntimeError."""

    @abstractmethod
    def _post_body(self, slot: Slot, leaf: Leaf) -> tuple[Tensor, Any]:
        """Post the receive of a tensor that both ends expect; returns the buffer and the work."""

    @abstractmethod
    def _send_filler(self, slot: Slot, leaf: Leaf) -> Any:
        """Send arbitrary data to complete a receive that the peer has posted on a wrong assumption."""

    def _ready(self, tensor: Tensor) -> Tensor:
        """The tensor in the form that bodies need: contiguous, on the transport's device."""
        return tensor.contiguous()

    def _arrived_late(self, tensor: Tensor) -> Tensor:
        """A tensor that was sent from host to host, moved to where bodies arrive (the transport's device)."""
        return tensor

    # -- sending ---------------------------------------------------------------------------------------

    def spec_of(self, value: Any, needs: list[bool] | None) -> Spec:
        """The form in which a value would be sent."""
        return self._specs.of(value, needs)[0]

    def send_forward(self, slot: Slot, value: Any, needs: list[bool] | None) -> Spec:
        end: End = slot.state
        self.delivery.sent_at_s = time.monotonic()
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
            box = None if inline or spec.long else self.delivery.by_mail(end, spec.padded)
            with_header = inline
            if box is not None:
                tensors = [self._ready(tensor) for tensor in tensors]
                with_header = box.put(end.pointer, end.length, in_a_row(tensors))
            else:
                self.delivery.send_header(slot)
            if not with_header or end.expected:
                self._send_bodies(slot, spec, () if with_header else spec.leaves, tensors, late=box is not None)
        except RuntimeError as error:
            raise self.delivery.failed(slot, error) from None
        slot.nbytes = spec.nbytes
        return spec

    def _send_bodies(
        self, slot: Slot, spec: Spec, leaves: tuple[Leaf, ...], tensors: list[Tensor], *, late: bool
    ) -> None:
        """Send these tensors as bodies if the receiver expects them, otherwise afterwards, from host to host. With
        `late`, always the latter, and the receiver expects no bodies in the next step either."""
        end: End = slot.state
        works = end.works
        guessed = bool(leaves) and not late and _same(end.expected, leaves)
        if not guessed:
            works.extend(self._send_filler(slot, leaf) for leaf in end.expected if leaf.nbytes)
        if spec.long:
            self.delivery.send_text(slot, spec)
        for leaf, tensor in zip(leaves, tensors):
            if not leaf.nbytes:
                continue
            tensor = self._ready(tensor)
            if guessed:
                works.append(self._send_body(slot, tensor))
                end.bodies.append(tensor)
            else:
                self.delivery.send_late(slot, tensor)
        end.expected = () if late else leaves

    def send_gradient(self, slot: Slot, gradients: list[Tensor | None]) -> None:
        asked = slot.cell.input_message
        if asked is not None:
            gradients = [g for g, wanted in zip(gradients, asked.wanted) if wanted]
        ready = [None if g is None else self._ready(g) for g in gradients]
        self.delivery.sent_at_s = time.monotonic()
        slot.nbytes = sum(g.nbytes for g in ready if g is not None)
        try:
            box = self.delivery.gradient_box(slot.state, len(ready))
            if box is None:
                self._send_gradients(slot, ready)
            else:
                self._mail_gradients(slot, box, ready)
        except RuntimeError as error:
            raise self.delivery.failed(slot, error) from None

    def _send_gradients(self, slot: Slot, gradients: list[Tensor | None]) -> None:
        """Send gradients as the bodies that the receiver has posted, with the flags of those that exist if it expects
        flags."""
        end: End = slot.state
        there = [g is not None for g in gradients]
        if gradients and (self.inline or not end.whole):
            self.delivery.send_flags(slot, there)
            end.whole = all(there)
        elif not all(there):
            raise OctoPipeError(
                f"the {slot.describe()} lacks a gradient that it contained in the step before: the preceding layers "
                "would get zeros where torch leaves None; multiply by zero instead of detaching in such steps"
            )
        for k, gradient in enumerate(gradients):
            if gradient is None:
                assert slot.cell.input_message is not None
                gradient = self._nothing(slot.cell.input_message.asking[k])
            if gradient.nbytes:
                end.works.append(self._send_body(slot, gradient))
                end.bodies.append(gradient)

    def _mail_gradients(self, slot: Slot, box: Box, gradients: list[Tensor | None]) -> None:
        """Send gradients through shared memory, as far as they fit: the message in the box comes first and states which
        exist."""
        end: End = slot.state
        leaves = [0 if g is None else g.nbytes for g in gradients] if slot.cell.input_message is None else (
            [leaf.nbytes for leaf in slot.cell.input_message.asking]
        )  # fmt: skip
        if _rides(leaves):
            only = gradients[0]
            box.put(0, 0) if only is None else box.put(only.data_ptr(), only.nbytes)
            return
        some = [g for g in gradients if g is not None and g.nbytes]
        flags = (ctypes.c_ubyte * max(len(gradients), 1))(*(g is not None for g in gradients))
        by_mail = self.delivery.fits(leaves)
        if box.put(ctypes.addressof(flags), len(gradients), in_a_row(some) if by_mail else ()):
            return
        if by_mail:
            for one in some:
                self.delivery.send_late(slot, one)
            return
        for k, (gradient, nbytes) in enumerate(zip(gradients, leaves)):
            if gradient is not None and nbytes:
                end.works.append(self._send_body(slot, gradient))
                end.bodies.append(gradient)
            elif nbytes:  # the receiver has posted a receive for it
                assert slot.cell.input_message is not None
                end.works.append(self._send_filler(slot, slot.cell.input_message.asking[k]))

    def release(self, slot: Slot) -> None:
        end: End = slot.state
        if end.works:
            self.delivery.wait(slot, end.works)
            end.works.clear()
            end.bodies.clear()

    # -- receiving -------------------------------------------------------------------------------------

    def post(self, slot: Slot) -> None:
        end: End = slot.state
        slot.posted = True
        try:
            if slot.forward:
                for part in end.parts:
                    if not part.is_free():  # a tensor in `head` is still in use after its step
                        end.new_head()
                        end.seen, end.parts = b"", []
                        break
                self.delivery.post_header(slot)
                leaves: Sequence[Leaf] = end.expected
            else:
                leaves = slot.cell.output_message.asking
                box = self.delivery.gradient_box(end, len(leaves))
                if box is not None:
                    end.works.append(box)
                    sizes = [x.nbytes for x in leaves]
                    if _rides(sizes):
                        buffer = self.delivery.room(end, leaves[0])
                        box.pointer = buffer.data_ptr()
                        end.bodies.append(buffer)
                        return
                    box.pointer = end.flags_for(len(leaves))
                    if self.delivery.fits(sizes):
                        return
            for leaf in leaves:
                if leaf.nbytes:
                    buffer, work = self._post_body(slot, leaf)
                    end.works.append(work)
                else:
                    buffer = self._empty(leaf)
                end.bodies.append(buffer)
        except RuntimeError as error:
            raise self.delivery.failed(slot, error) from None

    def _empty(self, leaf: Leaf) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype)

    def _nothing(self, leaf: Leaf) -> Tensor:
        """The tensor that is sent in place of a gradient that does not exist."""
        return self._empty(leaf).zero_()

    def take_forward(self, slot: Slot) -> tuple[Any, Spec]:
        end: End = slot.state
        works = end.works
        self.delivery.wait(slot, works if len(works) == 1 else works[:1])
        spec = end.spec
        if spec is None or end.fixed.tobytes() != end.seen:
            spec = self._read(slot, end)
        if spec.inline and self.inline:
            if end.expected:
                self.delivery.wait(slot, works[1:])
                end.bodies, end.expected = [], ()
            tensors = [part.tensor for part in end.parts]
        elif not spec.long and (box := self.delivery.by_mail(end, spec.padded)) is not None:
            if end.expected:
                self.delivery.wait(slot, works[1:])
            tensors = self.delivery.from_mail(slot, box, spec.leaves)
            end.bodies, end.expected = [], ()
        else:
            self.delivery.wait(slot, works[1:])
            if spec.leaves and _same(end.expected, spec.leaves):
                tensors = end.bodies
                if end.expected is not spec.leaves:
                    tensors = [_as(t, leaf) for t, leaf in zip(tensors, spec.leaves)]
            else:
                tensors = [self._arrived_late(self.delivery.take_late(slot, leaf)) for leaf in spec.leaves]
            end.bodies, end.expected = [], spec.leaves
        works.clear()
        slot.posted = False
        return spec.value(tensors), spec

    def _read(self, slot: Slot, end: End) -> Spec:
        head = end.memory.tobytes()
        text = None
        if FIXED_BYTES + text_bytes(head) > HEAD_BYTES:
            text = self.delivery.take_text(slot, text_bytes(head))
        end.spec = spec = self._specs.read(head, text)
        end.seen = b"" if spec.long else head[:FIXED_BYTES]
        end.parts = [Lent(t) for t in spec.inside(end.memory)] if spec.inline and self.inline else []
        return spec

    def take_gradient(self, slot: Slot) -> list[Tensor | None]:
        end: End = slot.state
        sent = slot.cell.output_message
        box = self.delivery.gradient_box(end, len(sent.asking))
        if box is not None:
            found = self._from_mail(slot, box, sent.asking)
        else:
            found = self._from_wire(slot, len(sent.asking))
        end.bodies = []
        end.works.clear()
        slot.posted = False
        return found if sent.bare and found else spread(sent.wanted, found)

    def _from_wire(self, slot: Slot, count: int) -> list[Tensor | None]:
        end: End = slot.state
        there: list[bool] = []
        if count and (self.inline or not end.whole):
            there = self.delivery.take_flags(slot, count)
            end.whole = all(there)
        self.delivery.wait(slot, end.works)
        if all(there):
            return list(end.bodies)
        return [t if known else None for t, known in zip(end.bodies, there)]

    def _from_mail(self, slot: Slot, box: Box, leaves: Sequence[Leaf]) -> list[Tensor | None]:
        end: End = slot.state
        self.delivery.wait(slot, end.works[:1])
        sizes = [x.nbytes for x in leaves]
        if _rides(sizes):
            return [end.bodies[0] if box.length else None]
        there = end.flags[: len(leaves)]
        if self.delivery.fits(sizes):
            found = iter(self.delivery.from_mail(slot, box, [x for x, known in zip(leaves, there) if known]))
            return [next(found) if known else None for known in there]
        self.delivery.wait(slot, end.works[1:])
        return [t if known else None for t, known in zip(end.bodies, there)]

    def end_step(self) -> None:
        self.delivery.pool.end_step()


def _rides(sizes: Sequence[int]) -> bool:
    """Whether gradients of these sizes are sent as the message of a box itself, without flags: a single small one is.
    If it does not exist, the message is empty."""
    return len(sizes) == 1 and 0 < sizes[0] <= HEAD_BYTES


def _same(guess: tuple[Leaf, ...], leaves: tuple[Leaf, ...]) -> bool:
    """Whether buffers allocated for `guess` have the right sizes for `leaves`."""
    return guess is leaves or [x.nbytes for x in guess] == [x.nbytes for x in leaves]


def _as(tensor: Tensor, leaf: Leaf) -> Tensor:
    """The bytes of a buffer as another dtype and shape of the same size."""
    if tensor.dtype is leaf.dtype:
        return tensor.view(leaf.shape)
    return tensor.view(-1).view(torch.uint8).view(leaf.dtype).view(leaf.shape)
