"""A transport that blocks in issue order: reproduces the behaviour of in-order communicators on a CPU.

Knows: the channel model. A transfer happens only when it is at the head of its queue on both ranks, as with NCCL, where
the two ends of a communicator must agree on the order. Does not know: how bytes are transferred (gloo does).

gloo delivers messages in any order and thereby hides every ordering deadlock. This transport exposes them: naive
programs time out, and the error names the blocked queues. All ranks must be on one host, because the heads of queues
are published in a small shared file. It is for tests; nothing is transferred while a rank computes.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from octopipe.runtime.ranks.world import World
from octopipe.runtime.slots import RankProgram, Slot
from octopipe.runtime.wire.transports.base import TransferError, Transport
from octopipe.runtime.wire.transports.gloo import GlooTransport
from octopipe.runtime.wire.transports.shared import forget, make_shared, open_shared
from octopipe.simulation.lowering import Program

_SENDER, _RECEIVER, _SENT = range(3)


class StrictTransport(Transport):
    """Keeps queues of issued transfers; `_progress` moves every transfer that is at the head of its queue on both
    sides."""

    name = "strict"
    ordered = True

    def __init__(self, world: World, program: Program, *, timeout_s: float):
        self._inner = GlooTransport(world, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._blocking = program.channel == "blocking"
        self._flags = _shared_flags(world, program.num_transfers)
        self._queues: dict[tuple[int, ...], deque[tuple[Slot, Callable[[], Any] | None]]] = {}
        self._arrived: dict[int, Any] = {}
        self._step = 0

    def open(self, program: RankProgram) -> None:
        self._inner.open(program)
        self._queues = {slot.queue: deque() for slot in program.slots}

    def begin_step(self) -> None:
        self._step += 1
        self._arrived.clear()
        for queue in self._queues.values():
            queue.clear()

    # -- the queues ------------------------------------------------------------------------------------

    def _issue(self, slot: Slot, send: Callable[[], Any] | None) -> None:
        self._queues[slot.queue].append((slot, send))
        self._progress()
        if self._blocking:
            self._until(slot, lambda: all(not q for q in self._queues.values()))

    def _progress(self) -> None:
        flags, step = self._flags, self._step
        moved = True
        while moved:
            moved = False
            for queue in self._queues.values():
                if not queue:
                    continue
                slot, send = queue[0]
                number = slot.number
                if send is not None:
                    flags[_SENDER, number] = step
                    if flags[_RECEIVER, number] != step:
                        continue
                    send()
                    flags[_SENT, number] = step
                else:
                    flags[_RECEIVER, number] = step
                    if flags[_SENT, number] != step:
                        continue
                    self._inner.post(slot)
                    take = self._inner.take_forward if slot.forward else self._inner.take_gradient
                    self._arrived[number] = take(slot)
                queue.popleft()
                moved = True

    def _until(self, slot: Slot, done: Callable[[], bool]) -> None:
        end = time.monotonic() + self._timeout_s
        pause = 0.0
        queue = self._queues[slot.queue]
        while not done():
            # The transfer at the head of the queue is the one that blocks.
            self.waiting = queue[0][0] if queue else slot
            if time.monotonic() > end:
                raise TransferError(self.waiting, "timed out")
            time.sleep(pause)
            pause = min(pause + 1e-6, 2e-4)
            self._progress()
        self.waiting = None

    # -- the contract ----------------------------------------------------------------------------------

    def post(self, slot: Slot) -> None:
        slot.posted = True
        self._issue(slot, None)

    def send_forward(self, slot: Slot, value: Any, needs: list[bool] | None) -> Any:
        # The form is set immediately, because the gradient slot may be ahead of this send in a queue.
        spec = self._inner.spec_of(value, needs)
        slot.cell.output_message = spec
        self._issue(slot, lambda: self._inner.send_forward(slot, value, needs))
        return spec

    def send_gradient(self, slot: Slot, gradients: list[Tensor | None]) -> None:
        self._issue(slot, lambda: self._inner.send_gradient(slot, gradients))

    def take_forward(self, slot: Slot) -> tuple[Any, Any]:
        return self._take(slot)

    def take_gradient(self, slot: Slot) -> list[Tensor | None]:
        return self._take(slot)

    def _take(self, slot: Slot) -> Any:
        if slot.number not in self._arrived:
            self._until(slot, lambda: slot.number in self._arrived)
        slot.posted = False
        return self._arrived.pop(slot.number)

    def release(self, slot: Slot) -> None:
        self._until(slot, lambda: all(entry[0] is not slot for entry in self._queues[slot.queue]))
        self._inner.release(slot)

    def end_step(self) -> None:
        self._inner.end_step()

    def abandon(self) -> None:
        self._inner.abandon()

    def close(self) -> None:
        self._inner.close()


def _shared_flags(world: World, count: int) -> Any:
    """A table of step numbers that all ranks can see (collective)."""
    shape = (3, max(count, 1))
    nbytes = 4 * shape[0] * shape[1]
    made = make_shared(nbytes, reserve=nbytes) if world.rank == 0 else None
    address = world.gather(None if made is None else made[1])[0]
    file = open_shared(address)
    flags = np.frombuffer(mmap.mmap(file, nbytes), np.uint32).reshape(shape)
    os.close(file)
    world.gather(None)  # all ranks have opened it
    if made is not None:
        os.close(made[0])
        forget(address.path)
    return flags
