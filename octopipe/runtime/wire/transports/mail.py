"""Mailboxes: messages between ranks of one host through shared memory.

Knows: boxes of a fixed size in files that two ranks map, an overflow area for larger messages, how to sleep
until a box is filled, and how a dead or finished peer is detected. Does not know: what messages mean (`headed`).

A message over gloo costs both ends system calls of twenty microseconds or more, as much as everything else that the
executor does for a small op. A box costs a copy and one system call to wake the receiver; for a tensor of a few hundred
kilobytes this is a tenth of the cost of a socket.

Every transfer has its own box, which is used once per step. The sender writes the message and then its number; the
receiver sleeps on the number (a futex), copies the message and records the number as taken. The next message waits for
that. A message that does not fit into a box is placed in the overflow area, whose memory the sender allocates and
frees; the box contains its position. The area grows with the messages in flight, and a message for which it has no
space is sent later, without it (see `headed`). The files have no names (see `shared`). A sender holds a lock on its
file: when it dies, the lock is released, and a receiver that has slept for a while notices this.

Data and numbers must be seen in the order in which they were stored. A fence (see `fence`) separates a message from its
number when it is sent, the number from the message when it is read, the reading from the number that confirms it, and
seeing that confirmation from writing the next message to the same place. The order therefore also holds on processors
that reorder memory accesses. The numbers themselves are aligned words, which every processor loads and stores
atomically.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from octopipe.runtime.ranks.world import Group
from octopipe.runtime.slots import Slot
from octopipe.runtime.wire.fence import fence
from octopipe.runtime.wire.telling import WireError, gather_values
from octopipe.runtime.wire.transports.shared import Address, forget, make_shared, open_shared

LINE = 64
"""Bytes of a cache line. A box begins with one, which contains its numbers."""
SENT, TAKEN, LENGTH, PLACE = range(4)
"""Words of a box: the numbers of the last message and of the last one taken, the bytes of the message, and the position
of its bodies in the file (in lines; 0: no bodies)."""
OVERFLOW_BYTES = 32 << 20
"""Maximum number of bytes of bodies in flight from one rank to another."""
BODIES_BYTES = 4 << 20
"""Maximum number of bytes that one message may place in the overflow area."""
PAGE = 4096
LOOK_EVERY_S = 0.5
"""How often a waiting receiver checks whether its peer is alive."""
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine(), 0)
"""The number of the futex system call; 0 on processors for which it is not listed here."""
_WAIT, _WAKE = 0, 1
_WORD = (1 << 32) - 1


def supported() -> bool:
    return sys.platform == "linux" and _FUTEX > 0


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_syscall: Any = ctypes.CDLL(None, use_errno=True).syscall if sys.platform == "linux" else None
if _syscall is not None:
    _syscall.argtypes = [
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int,
    ]  # fmt: skip
_slice = _Time(0, int(LOOK_EVERY_S * 1e9))
_slice_at = ctypes.addressof(_slice)


class OverflowArea:
    """Records which message is at which position in the memory behind the boxes. Only the sender keeps this record."""

    def __init__(self, file: int, start: int):
        self._file, self._start = file, start
        self._end = 0
        """Bytes of the overflow area that the file has so far."""
        self._free: list[tuple[int, int]] = []
        """Sizes and positions of free areas."""
        self._lent: list[tuple[int, int, Box, int]] = []
        """Sizes and positions of areas in use, with the box and the number of the message."""

    def find(self, nbytes: int, box: Box, number: int) -> int:
        """A position for the bodies of this message; 0 if there is no space."""
        still = []
        for lent in self._lent:
            if lent[2].taken == (lent[3] - 1) & _WORD:  # not taken yet, so the box cannot contain a later message
                still.append(lent)
            else:
                self._free.append(lent[:2])
        self._lent = still
        fence()  # the receiver read these areas before it recorded them as taken
        size = -(-nbytes // PAGE) * PAGE
        fits = [free for free in self._free if size <= free[0] <= 2 * size]
        if fits:
            chosen = min(fits)
            self._free.remove(chosen)
        else:
            if not still and self._end + size > OVERFLOW_BYTES:  # sizes have changed: start again with an empty area
                self._free, self._end = [], 0
            chosen = (size, self._start + self._end)
            try:
                if self._end + size > OVERFLOW_BYTES:
                    return 0
                os.posix_fallocate(self._file, chosen[1], size)  # an error now, not a bus error later
            except OSError:
                return 0
            self._end += size
        self._lent.append((*chosen, box, number))
        return chosen[1]


class BoxArea:
    """The boxes from one rank to another, in a mapped file. Its first line states whether the sender has closed it."""

    def __init__(self, boxes: int, room: int, *, at: Address | None = None):
        """`at`: the address of the area that the other end has created; without it, the area is created here."""
        self._stride = LINE + room
        front = -(-(LINE + boxes * self._stride) // PAGE) * PAGE
        size = front + OVERFLOW_BYTES
        if at is None:
            # Memory of the overflow area is allocated when it is used.
            self._file, self.address_elsewhere = make_shared(size, reserve=front)
        else:
            self._file, self.address_elsewhere = open_shared(at), at
        try:
            if at is None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            elif os.fstat(self._file).st_size != size:
                raise OSError(f"{at.path} has another size")
            self._map = mmap.mmap(self._file, size)
        except OSError:
            os.close(self._file)
            raise
        self._boxes = boxes
        self.overflow = OverflowArea(self._file, front)
        self.words = memoryview(self._map).cast("I")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def box(self, number: int, timeout_s: float) -> Box:
        return Box(self, LINE + number * self._stride, timeout_s)

    def gone(self) -> bool:
        """Whether the sender has closed the area or died (called by a receiver)."""
        return bool(self.words[0]) or self.died()

    def died(self) -> bool:
        """Whether the sender died without closing the area (called by a receiver)."""
        if self.words[0]:
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return not self.words[0]

    def close(self, *, sender: bool) -> None:
        if sender:
            self.words[0] = 1
            for number in range(self._boxes):
                wake(self.address + LINE + number * self._stride)
        self.words.release()
        with suppress(BufferError):  # `address` refers to the map, which is freed with the last box
            self._map.close()
        os.close(self._file)


class Box:
    """One end of one transfer. A transport calls `wait` for a receive that it has posted."""

    __slots__ = ("_area", "_at", "_timeout_s", "_words", "address", "bodies", "length", "number", "pointer")

    def __init__(self, area: BoxArea, offset: int, timeout_s: float):
        self._area, self._words, self._at, self._timeout_s = area, area.words, offset // 4, timeout_s
        self.address = area.address + offset
        self.number = 0
        """The number of the last message that this end has sent or taken."""
        self.pointer = 0
        """The address to which a received message is copied."""
        self.bodies = 0
        """The address of the received message's bodies, valid until `done`; 0 if there are none."""
        self.length = 0
        """Bytes of the received message."""

    @property
    def taken(self) -> int:
        """The number of the latest message that the receiver no longer needs."""
        return self._words[self._at + TAKEN]

    @property
    def free(self) -> bool:
        """Whether the next message can be put without waiting (called by the sender)."""
        return self.taken == self.number

    @property
    def filled(self) -> bool:
        """Whether the next message has arrived (called by the receiver)."""
        return self._words[self._at + SENT] == (self.number + 1) & _WORD

    def put(self, pointer: int, nbytes: int, bodies: Sequence[tuple[int, int, int]] = ()) -> bool:
        """Send this number of bytes from `pointer`, and bodies (address, bytes, bytes with padding); returns False if
        there was no space for the bodies."""
        words, at = self._words, self._at
        if words[at + TAKEN] != self.number:
            self._until_taken()
        fence()  # the receiver read the last message before it recorded it as taken
        self.number = number = (self.number + 1) & _WORD
        if nbytes:
            ctypes.memmove(self.address + LINE, pointer, nbytes)
        place = 0
        if bodies:
            place = self._area.overflow.find(sum(x[2] for x in bodies), self, number)
            to = self._area.address + place
            for body, size, room in bodies if place else ():
                ctypes.memmove(to, body, size)
                to += room
        words[at + LENGTH] = nbytes
        words[at + PLACE] = place // LINE
        fence()  # the message must be visible before its number
        words[at + SENT] = number
        wake(self.address)
        return place > 0

    def wait(self, timeout: object = None) -> None:
        """Sleep until the next message has arrived, and copy it to `pointer`; its bodies remain until `done`."""
        words, at = self._words, self._at
        number = (self.number + 1) & _WORD
        if words[at + SENT] != number:
            self._until_sent(number)
        fence()  # the number must be read before the message
        self.number = number
        self.length = length = words[at + LENGTH]
        if length:
            ctypes.memmove(self.pointer, self.address + LINE, length)
        if place := words[at + PLACE]:
            self.bodies = self._area.address + place * LINE
        else:
            self.bodies = 0
            fence()  # the message must be read before it is recorded as taken
            words[at + TAKEN] = number

    def done(self) -> None:
        """Record that the bodies have been copied."""
        self.bodies = 0
        fence()  # the bodies must be read before they are recorded as taken
        self._words[self._at + TAKEN] = self.number

    def _until_sent(self, number: int) -> None:
        words, at, end = self._words, self._at, time.monotonic() + self._timeout_s
        while (seen := words[at + SENT]) != number:
            slept = _syscall(_FUTEX, self.address, _WAIT, seen, _slice_at, None, 0)
            if slept and words[at + SENT] == seen:
                # Woken by the timeout: check the peer. A message sent before the peer ended still counts.
                if self._area.gone() and words[at + SENT] == seen:
                    raise WireError("connection closed by peer")
                if time.monotonic() > end:
                    raise WireError("timed out")
            elif words[0] and words[at + SENT] == seen:
                raise WireError("connection closed by peer")

    def _until_taken(self) -> None:
        """Wait until the receiver has taken the previous message. This happens only if a sender is a whole step ahead,
        as in evaluation, where it receives no gradients."""
        end = time.monotonic() + self._timeout_s
        while self._words[self._at + TAKEN] != self.number:
            if time.monotonic() > end:
                raise WireError("timed out")
            time.sleep(1e-4)


def wake(address: int) -> None:
    _syscall(_FUTEX, address, _WAKE, _WORD >> 1, None, None, 0)


class Mail:
    """All boxes of one rank of a pipeline."""

    def __init__(self) -> None:
        self._out: dict[int, BoxArea] = {}
        self._in: dict[int, BoxArea] = {}

    def open(self, control: Group, slots: Sequence[Slot], room: int, timeout_s: float) -> dict[int, Box]:
        """Boxes by slot number and end (2 * number, plus one for the sending end), for the peers on this host.

        Collective over the group's ranks. Both ends of a pair number its boxes by the numbers of the transfers.
        """
        me = control.rank()
        names: dict[int, Address] = {}
        for peer, mine in _by_peer(slots, sending=True).items():
            with suppress(OSError):
                if supported():
                    self._out[peer] = BoxArea(len(mine), room)
                    names[peer] = self._out[peer].address_elsewhere
        offered = gather_values(control, names)
        for peer, mine in _by_peer(slots, sending=False).items():
            if me in offered[peer]:
                with suppress(OSError):  # not this host's file
                    self._in[peer] = BoxArea(len(mine), room, at=offered[peer][me])
        accepted = gather_values(control, set(self._in))
        for name in names.values():
            forget(name.path)
        for peer in [p for p in self._out if me not in accepted[p]]:
            self._out.pop(peer).close(sender=True)
        boxes: dict[int, Box] = {}
        for sending, shelves in ((True, self._out), (False, self._in)):
            for peer, mine in _by_peer(slots, sending=sending).items():
                if peer in shelves:
                    for k, slot in enumerate(mine):
                        boxes[2 * slot.number + sending] = shelves[peer].box(k, timeout_s)
        return boxes

    def dead(self) -> list[int]:
        """Peers that have died, among those that send to this rank."""
        return [peer for peer, area in self._in.items() if area.died()]

    def close(self) -> None:
        for area in self._out.values():
            area.close(sender=True)
        for area in self._in.values():
            area.close(sender=False)
        self._out.clear()
        self._in.clear()


def _by_peer(slots: Sequence[Slot], *, sending: bool) -> dict[int, list[Slot]]:
    out: dict[int, list[Slot]] = {}
    for slot in sorted((s for s in slots if s.sending == sending), key=lambda s: s.number):
        out.setdefault(slot.peer, []).append(slot)
    return out
