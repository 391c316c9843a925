"""The pending-op board: what every rank is waiting for, readable by all when something hangs.

Knows: the store that torch.distributed ranks share. Does not know: tensors.

A rank that fails, or that has waited long, writes one line under its name; a failing rank gives the others a
moment to write theirs and lists all lines in its error. Nothing is written while all goes well.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch.distributed as dist

from octopipe.runtime.world import World

LOOK_EVERY_S = 0.1
"""How often a thread that watches a device looks whether the rank it waits for still lives."""
PATIENCE_S = 2.0
"""For lines still missing when a rank gives up: who waits like it has written long before, who hangs never will."""


def board_name(world: World) -> str:
    """A name for one pipeline's board: the same on all its ranks, never used before."""
    store = world.store()
    ranks = "-".join(map(str, world.global_ranks))
    return f"{ranks}/{0 if store is None else store.add(f'octopipe/board/{ranks}/{world.rank}', 1)}"


class Board:
    """One line per rank of a pipeline, in the store."""

    def __init__(self, store: dist.Store | None, name: str, rank: int, num_ranks: int):
        self._store, self._name = store, name
        self._last = False
        self._own = ""
        self.rank, self.num_ranks = rank, num_ranks

    def _key(self, rank: int) -> str:
        return f"octopipe/{self._name}/{rank}"

    def write(self, line: str, *, last: bool = False) -> None:
        """Put up this rank's line (never raises: the store's host may be the rank that died).

        After a rank's `last` words nothing changes its line: the others may come to read it later.
        """
        if self._last:
            return
        self._last, self._own = last, line
        if self._store is not None:
            try:
                self._store.set(self._key(self.rank), line)
            except Exception:
                self._store = None

    def clear(self) -> None:
        """Take the line down."""
        self._own = self._own if self._last else ""
        if self._store is not None and not self._last:
            try:
                self._store.delete_key(self._key(self.rank))
            except Exception:
                self._store = None

    def collect(self, *, patience_s: float) -> list[str]:
        """Everybody's lines, after waiting at most `patience_s` for those that are missing."""
        lines = {self.rank: self._own} if self._own else {}
        end = time.monotonic() + patience_s
        while True:
            for rank in range(self.num_ranks):
                if rank not in lines and self._store is not None:
                    try:
                        if self._store.check([self._key(rank)]):
                            lines[rank] = self._store.get(self._key(rank)).decode(errors="replace")
                    except Exception:
                        self._store = None
            if len(lines) == self.num_ranks or self._store is None or time.monotonic() > end:
                break
            time.sleep(0.05)
        return [f"rank {r}: {lines.get(r, 'no answer')}" for r in range(self.num_ranks)]


class Place(NamedTuple):
    """Where a rank is."""

    token: object
    """Changes with progress."""
    line: str
    """For the board; empty where there is nothing to say."""
    peer: int | None = None
    """The rank whose message the device waits for."""


class Watchdog:
    """A thread that writes the board's line once the executor has been in one place for a while.

    On a GPU nobody waits on the host, so nobody times out there: with `device_busy` the thread itself ends the
    process, with everybody's line, when a device has made no progress for `timeout_s`, or sooner where the rank that
    it waits for has died.
    """

    def __init__(
        self,
        board: Board,
        where: Callable[[], Place],
        *,
        timeout_s: float,
        device_busy: Callable[[], bool] | None = None,
        dead: Callable[[], Collection[int]] = tuple,
    ):
        self._board, self._where = board, where
        self._after_s = min(max(timeout_s / 2, 0.2), 10.0)
        self._timeout_s, self._device_busy, self._dead = timeout_s, device_busy, dead
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="octopipe-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        place, since, written = self._where(), time.monotonic(), False
        pause = self._after_s / 2 if self._device_busy is None else min(self._after_s / 2, LOOK_EVERY_S)
        while not self._stop.wait(pause):
            try:
                now, busy = self._where(), self._device_busy is not None and self._device_busy()
            except RuntimeError:
                self._failed(place.line)
                return
            waited, moved, place = time.monotonic() - since, now.token != place.token, now
            if moved or (self._device_busy is not None and not busy):
                since = time.monotonic()
            if moved:
                if written:
                    self._board.clear()
                    written = False
                continue
            if place.line and not written and waited >= self._after_s:
                self._board.write(place.line)
                written = True
            if busy and waited >= self._timeout_s:
                self._abort(place.line, f"the device made no progress for {self._timeout_s:g} s")
            if busy and place.peer in self._dead():
                self._abort(place.line, f"rank {place.peer} is gone")

    def _failed(self, line: str) -> None:
        """The device can be asked no more. A rank that dies may take a device with it that others use: say so.

        A rank takes a moment to die. If nobody does, the main thread will meet the error and tell it.
        """
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for peer in self._dead():
                self._abort(line, f"rank {peer} is gone, and the device failed")
            time.sleep(LOOK_EVERY_S / 2)

    def _abort(self, line: str, why: str) -> None:
        """The main thread may be stuck inside the driver: say why and end the process."""
        self._board.write(line or "waits for its device", last=True)
        lines = self._board.collect(patience_s=min(self._timeout_s, PATIENCE_S))
        sys.stderr.write(f"octopipe: rank {self._board.rank}: {why}; pending ops: {'; '.join(lines)}\n")
        sys.stderr.flush()
        os._exit(1)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=PATIENCE_S + 1.0)
