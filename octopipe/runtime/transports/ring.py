"""A one-way ring between two processes that share memory: chunks, two counters, no messages.

Knows: the protocol. Does not know: whether the memory and the lanes are a GPU's or the host's.

The receiver owns the arena (some chunks of equal size) and the counter `filled`; the sender owns the counter
`freed`. Both only grow. Chunk number n lies at place n mod chunks. The sender waits until the chunk that was there
before has been freed, copies, and sets `filled` to n; the receiver waits for that, copies out into a buffer of its
own, and sets `freed` to n. Everything is queued on the two ends' lanes: the hosts do not take part. A tensor of any
size passes in as many chunks as it takes, and the arena's size bounds the memory, however many messages are in
flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.transports.lanes import Lane


class _RingEnd:
    def __init__(self, arena: Tensor, filled: Tensor, freed: Tensor, lane: Lane):
        self.arena, self.filled, self.freed, self.lane = arena, filled, freed, lane
        self.chunks, self.chunk_bytes = arena.shape
        self.number = 0

    def _parts(self, nbytes: int) -> Iterator[tuple[int, int]]:
        for start in range(0, nbytes, self.chunk_bytes):
            yield start, min(start + self.chunk_bytes, nbytes)


class RingSender(_RingEnd):
    """The end that fills chunks in the other process's arena."""

    def send(self, tensor: Tensor) -> Any:
        """Queue a contiguous tensor; keep it until the returned handle was waited for."""
        data = as_bytes(tensor)
        self.lane.after_current()
        for start, stop in self._parts(tensor.nbytes):
            self._next()
            self.lane.copy(self.arena[self.number % self.chunks, : stop - start], data[start:stop])
            self.lane.write(self.filled, self.number)
        return self.lane.done()

    def skip(self, nbytes: int) -> Any:
        """Complete a receive of this size with whatever lies in the chunks."""
        for _ in self._parts(nbytes):
            self._next()
            self.lane.write(self.filled, self.number)
        return self.lane.done()

    def _next(self) -> None:
        self.number += 1
        if self.number > self.chunks:
            self.lane.wait(self.freed, self.number - self.chunks)


class RingReceiver(_RingEnd):
    """The end that owns the arena."""

    def receive(self, buffer: Tensor) -> Any:
        """Queue a receive into a contiguous buffer; its handle says when it is there."""
        data = as_bytes(buffer)
        self.lane.after_current()  # the buffer's memory may still be in use by what was computed before
        for start, stop in self._parts(buffer.nbytes):
            self.number += 1
            self.lane.wait(self.filled, self.number)
            self.lane.copy(data[start:stop], self.arena[self.number % self.chunks, : stop - start])
            self.lane.write(self.freed, self.number)
        return self.lane.done()


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as bytes."""
    return tensor.reshape(-1).view(torch.uint8)
