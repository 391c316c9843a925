"""A one-way ring between two processes that share memory: chunks, two counters, no messages.

Knows: the protocol. Does not know: whether the memory and the lanes are a GPU's or the host's.

The receiver owns the arena (some chunks of equal size) and the counter `filled`; the sender owns the counter
`freed`. Both only grow. Chunk number n is at position n mod chunks. The sender waits until the previous chunk at this
position has been freed, copies, and sets `filled` to n; the receiver waits for that, copies the chunk out into a buffer
of its own, and sets `freed` to n. Everything is queued on the two ends' lanes: no host copies or waits for a copy. A
tensor of any size is sent in as many chunks as it needs, and the arena's size bounds the memory, however many messages
are in flight.

Why no lane can hang: *a wait is queued only after the other host has queued what it waits for.* Two more counters, in
host memory, state how far each host has come (`queued`). The times at which work was queued, over all processes, are
therefore a topological order of everything that device work waits for. Streams that share a hardware queue with a
waiting one add only edges from earlier to later work. So does a host that waits for its whole device inside a call of
the driver (to allocate memory, load a kernel or enlarge local memory): everything it waits for ends without any host.
If a host has to wait for another host's counter, the proof of the program's order applies, in which a send and its
receive are one rendezvous.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from octopipe.runtime.wire.telling import WireError
from octopipe.runtime.wire.transports.lanes import Lane
from octopipe.runtime.wire.transports.mail import LOOK_EVERY_S

FILLED, FREED = range(2)
"""Indices into `queued`: the number of chunks whose filling the sender's host has queued, and of those whose freeing
the receiver's host has queued."""

Until = Callable[[Callable[[], bool]], None]
"""A function that waits on the host until a condition holds, while receives proceed."""


class Proceeds(Protocol):
    """The interface of objects with work that can be queued once another host has proceeded far enough."""

    def proceed(self) -> None: ...


_proceeding: weakref.WeakSet[Proceeds] = weakref.WeakSet()
"""All such objects of this process. Whatever its host waits for, it queues the copies that other hosts wait for in the
meantime. Otherwise the rings of a pipeline and those of an expert group could wait for each other."""


def register(one: Proceeds) -> None:
    """Include the object in `proceed_all`, until `unregister` or until nothing else refers to it."""
    _proceeding.add(one)


def unregister(one: Proceeds) -> None:
    _proceeding.discard(one)


def proceed_all() -> None:
    """Queue everything that no longer has to wait for another host, on all rings of this process."""
    for one in tuple(_proceeding):
        one.proceed()


def wait_on_host(holds: Callable[[], bool], timeout_s: float, lost: Callable[[], bool]) -> None:
    """Wait until a condition holds, while all receives proceed; raises an error if a peer is lost or time is up."""
    began = now = time.monotonic()
    end, look = now + timeout_s, now + LOOK_EVERY_S
    pause = 0.0
    while True:
        proceed_all()
        if holds():
            return
        time.sleep(pause)
        now = time.monotonic()
        # A long wait leaves the core to others; the pause adds 0.1 % at most, because others wait for this host.
        pause = max(min(pause + 1e-6, 1e-4), min((now - began) / 1000, 1e-3))
        if now > look:
            look = now + LOOK_EVERY_S
            if lost():
                raise WireError("connection closed by peer")
        if now > end:
            raise WireError("timed out")


class _RingEnd:
    def __init__(self, arena: Tensor, filled: Tensor, freed: Tensor, queued: Tensor, lane: Lane, until: Until):
        self.arena, self.filled, self.freed, self.lane, self._until = arena, filled, freed, lane, until
        self.chunks, self.chunk_bytes = arena.shape
        self.number = 0
        self._memory = queued
        self._queued = (ctypes.c_int64 * 2).from_address(queued.data_ptr())

    def _parts(self, nbytes: int) -> Iterator[tuple[int, int]]:
        for start in range(0, nbytes, self.chunk_bytes):
            yield start, min(start + self.chunk_bytes, nbytes)


class RingSender(_RingEnd):
    """The end that fills chunks in the arena of the other process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pending: deque[Callable[[], None]] = deque()
        """Copies of posted tensors that are not queued yet, in the order of their chunks."""

    def post(self, tensor: Tensor) -> Passage:
        """Like `send`, but the host never waits: chunks for which the arena has no space are queued by `proceed`.

        A ring is used either with `post` or with `send` and `skip`. The tensor must not change until the returned
        passage is over.
        """
        if not self._pending:
            register(self)
        data, passage, mark = as_bytes(tensor), Passage(self._until), self.lane.now()
        for start, stop in self._parts(tensor.nbytes):

            def copy(start: int = start, stop: int = stop) -> None:
                if start == 0:
                    self.lane.after(mark)
                self._next()
                self.lane.copy(self.arena[self.number % self.chunks, : stop - start], data[start:stop])
                self._fill()
                if stop == data.numel():
                    passage.work = self.lane.done()

            self._pending.append(copy)
        self.proceed()
        return passage

    def proceed(self) -> None:
        """Queue the copies of all posted chunks for which the arena has space."""
        while self._pending and (self.number < self.chunks or self._queued[FREED] >= self.number + 1 - self.chunks):
            self._pending.popleft()()

    def close(self) -> None:
        """Stop queueing."""
        unregister(self)
        self._pending.clear()

    def send(self, tensor: Tensor) -> Any:
        """Queue a contiguous tensor, which must be kept until the returned handle has been waited for."""
        data = as_bytes(tensor)
        self.lane.after(self.lane.now())
        for start, stop in self._parts(tensor.nbytes):
            self._next()
            self.lane.copy(self.arena[self.number % self.chunks, : stop - start], data[start:stop])
            self._fill()
        return self.lane.done()

    def skip(self, nbytes: int) -> Any:
        """Complete a receive of this size without copying: the receiver gets whatever the chunks contain."""
        for _ in self._parts(nbytes):
            self._next()
            self._fill()
        return self.lane.done()

    def after_receipt(self) -> Any:
        """A handle for the time at which everything sent so far has been copied out."""
        self._wait_freed(self.number)
        return self.lane.done()

    def _next(self) -> None:
        self.number += 1
        if self.number > self.chunks:
            self._wait_freed(self.number - self.chunks)

    def _wait_freed(self, number: int) -> None:
        if self._queued[FREED] < number:
            self._until(lambda: self._queued[FREED] >= number)
        self.lane.wait(self.freed, number)

    def _fill(self) -> None:
        self.lane.write(self.filled, self.number)
        self._queued[FILLED] = self.number


class Passage:
    """A receive, or a send that was posted: queued chunk by chunk as the host of the other end proceeds."""

    __slots__ = ("_until", "work")

    def __init__(self, until: Until):
        self._until = until
        self.work: Any = None
        """The handle to wait for; None until everything is queued."""

    def over(self) -> bool:
        """Whether `wait` would return without making the host wait."""
        return self.work is not None and self.work.over()

    def wait(self, timeout: timedelta) -> None:
        if self.work is None:
            self._until(lambda: self.work is not None)
        self.work.wait(timeout)


class RingReceiver(_RingEnd):
    """The end that owns the arena."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pending: deque[Callable[[], None]] = deque()
        """Copies out that are not queued yet, in the order of their chunks."""
        self._first = 1
        """The chunk number of the first of them."""
        register(self)

    def close(self) -> None:
        """Stop queueing."""
        unregister(self)

    def receive(self, buffer: Tensor, arrived: Callable[[Lane], None] | None = None) -> Passage:
        """A receive into a contiguous buffer; `arrived` is called when its last copy has been queued."""
        data, passage = as_bytes(buffer), Passage(self._until)
        before = self.lane.now()  # earlier computation may still use the buffer's memory
        parts = list(self._parts(buffer.nbytes))
        for start, stop in parts:
            self.number += 1

            def copy(number: int = self.number, start: int = start, stop: int = stop) -> None:
                if start == 0:
                    self.lane.after(before)
                self.lane.wait(self.filled, number)
                self.lane.copy(data[start:stop], self.arena[number % self.chunks, : stop - start])
                self.lane.write(self.freed, number)
                self._queued[FREED] = number
                if stop == data.numel():
                    if arrived is not None:
                        arrived(self.lane)
                    passage.work = self.lane.done()

            self._pending.append(copy)
        self.proceed()
        return passage

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def proceed(self) -> None:
        """Queue the copies of all chunks whose filling the sender has queued."""
        while self._pending and self._first <= self._queued[FILLED]:
            self._first += 1
            self._pending.popleft()()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)
