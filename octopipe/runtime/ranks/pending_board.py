"""The pending-op board: what every rank is waiting for, readable by all when something hangs.

Knows: the store that torch.distributed ranks share. Does not know: tensors.

A rank that fails, or that has waited for a long time, writes one line under its name. A failing rank gives the others a
moment to write theirs and lists all lines in its error. Nothing is written during normal operation.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from octopipe.runtime.ranks.world import World

LOOK_EVERY_S = 0.1
"""How often the watchdog of a device checks whether the rank it waits for is still alive."""
PATIENCE_S = 2.0
"""How long a rank that gives up waits for missing lines: other waiting ranks have written long before, and ranks that
hang never will."""


FAILED = "failed"
"""Prefix of the line of a rank that failed itself."""
MOST_SEATS = 1024
"""Maximum number of processes of the job whose reports are read."""
SPEAK_AFTER_S = 20.0
"""After this long without progress of a device, report what it waits for."""


def _print(line: str) -> None:
    """Print to the standard error of the process, even if a thread that hangs holds the lock of Python's own stream."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def board_name(world: World) -> str:
    """A name for the board of one pipeline, equal on all its ranks and never used before."""
    store = world.store()
    ranks = "-".join(map(str, world.global_ranks))
    return f"{ranks}/{0 if store is None else store.add(f'octopipe/board/{ranks}/{world.rank}', 1)}"


def line_key(rank: int) -> str:
    """The key in the store of the latest line of a process of the job, whatever the name of its pipeline is."""
    return f"octopipe/line/{rank}"


class Board:
    """A board in the store with one line per rank of a pipeline."""

    def __init__(self, store: dist.Store | None, name: str, rank: int, num_ranks: int):
        self._store, self._name = store, name
        self._last = False
        self._own = ""
        self._seat = dist.get_rank() if store is not None and dist.is_initialized() else 0
        self.rank, self.num_ranks = rank, num_ranks
        if store is not None:
            with suppress(Exception):
                store.delete_key(line_key(self._seat))  # the line of an earlier pipeline that failed

    def _key(self, rank: int) -> str:
        return f"octopipe/{self._name}/{rank}"

    def write(self, line: str, *, last: bool = False) -> None:
        """Write this rank's line (never raises, because the host of the store may have died).

        After a rank has written its `last` line, nothing changes the line, because other ranks may read it later.
        """
        if self._last:
            return
        self._last, self._own = last, line
        if self._store is not None:
            try:
                self._store.set(self._key(self.rank), line)
                self._store.set(line_key(self._seat), line)
            except Exception:
                self._store = None

    def say(self, text: str) -> None:
        """Report to the launcher why this process is about to end."""
        if self._store is not None:
            with suppress(Exception):
                self._store.set(line_key(self._seat), text)

    def clear(self) -> None:
        """Remove the line."""
        self._own = self._own if self._last else ""
        if self._store is not None and not self._last:
            try:
                self._store.delete_key(self._key(self.rank))
                self._store.delete_key(line_key(self._seat))
            except Exception:
                self._store = None

    def collect(self, *, patience_s: float) -> list[str]:
        """The lines of all ranks, after waiting at most `patience_s` for missing ones."""
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

    def failed_elsewhere(self) -> str:
        """What failed in any pipeline of this job; "" if nothing has been reported."""
        if self._store is None or not dist.is_initialized():
            return ""
        with suppress(Exception):
            for seat in range(min(dist.get_world_size(), MOST_SEATS)):
                if seat != self._seat and self._store.check([line_key(seat)]):
                    line = self._store.get(line_key(seat)).decode(errors="replace")
                    if line.startswith(FAILED):
                        return f"process {seat} of the job {line}"
        return ""


class Place(NamedTuple):
    """The position of a rank in its program."""

    token: object
    """A value that changes whenever the rank makes progress."""
    line: str
    """The line for the board; empty if there is nothing to report."""
    peer: int | None = None
    """The rank whose message the device waits for."""


class _Probe:
    """Polls the position of a rank in a separate thread, because the driver may never answer."""

    def __init__(self, where: Callable[[], Place], busy: Callable[[], bool] | None, pause_s: float):
        self._where, self._busy, self._pause_s = where, busy, pause_s
        self.place, self.is_busy, self.failed = Place(None, ""), False, False
        self.answers = 0
        self.asked = time.monotonic()
        """The time at which the latest poll began, which may not have returned yet."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="octopipe-probe", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            self.asked = time.monotonic()
            try:
                self.place, self.is_busy = self._where(), self._busy is not None and self._busy()
            except RuntimeError:
                self.failed = True
                return
            self.answers += 1
            self._stop.wait(self._pause_s)

    def stuck(self, patience_s: float) -> bool:
        """Whether the driver has not responded for this many seconds."""
        return not self.failed and time.monotonic() - self.asked > patience_s + self._pause_s

    def stop(self) -> None:
        self._stop.set()


class Watchdog:
    """A thread that writes the board's line once the executor has been at one position for a while.

    On a GPU no host waits, so no host times out: with `device_busy` the thread itself ends the process, and prints the
    lines of all ranks, if a device has made no progress for `timeout_s`, or earlier if the rank that it waits for has
    died. It asks neither the main thread nor the driver for anything, because those may be what hangs. Long before it
    gives up, it reports once what it waits for.
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
        self._pause_s = self._after_s / 2 if device_busy is None else min(self._after_s / 2, LOOK_EVERY_S)
        self._probe = _Probe(where, device_busy, self._pause_s)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="octopipe-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        probe = self._probe
        # No position yet, so that the first answer counts as progress.
        place, since, written, spoken, heard = Place(None, ""), time.monotonic(), False, False, 0
        while not self._stop.wait(self._pause_s):
            if probe.failed:
                self._failed(probe.place.line)
                return
            stuck = self._device_busy is not None and probe.stuck(self._after_s)
            if probe.answers == heard and not stuck:
                continue  # nothing new is known yet
            heard = probe.answers
            now, busy = probe.place, probe.is_busy or stuck
            if stuck:
                now = now._replace(line=f"{now.line or 'is in its step'} (the device's driver does not answer)")
            waited, moved, place = time.monotonic() - since, now.token != place.token, now
            if moved or (self._device_busy is not None and not busy):
                since = time.monotonic()
            if moved:
                if written:
                    self._board.clear()
                    written = False
                spoken = False
                continue
            if place.line and not written and waited >= self._after_s:
                self._board.write(place.line)
                written = True
            if busy and not spoken and SPEAK_AFTER_S <= waited < self._timeout_s:
                spoken = True
                said = f"no progress for {waited:.0f} s: {place.line}; gives up after {self._timeout_s:g} s"
                _print(f"octopipe: rank {self._board.rank}: {said}")
            if busy and waited >= self._timeout_s:
                self._abort(place.line, f"the device made no progress for {self._timeout_s:g} s")
            if busy and place.peer in self._dead():
                self._abort(place.line, f"rank {place.peer} is gone")

    def _failed(self, line: str) -> None:
        """Report that the device no longer responds. A rank that dies may take down a device that other ranks use, so
        the error says so.

        A rank takes a moment to die. If no rank dies, the main thread will meet the error and report it.
        """
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for peer in self._dead():
                self._abort(line, f"rank {peer} is gone, and the device failed")
            time.sleep(LOOK_EVERY_S / 2)

    def _abort(self, line: str, why: str) -> None:
        """Report the reason and end the process, because the main thread may be blocked inside the driver."""
        self._board.write(line or "waits for its device", last=True)
        lines = self._board.collect(patience_s=min(self._timeout_s, PATIENCE_S))
        text = f"{why}; pending ops: {'; '.join(lines)}"
        self._board.say(text)
        _print(f"octopipe: rank {self._board.rank}: {text}")
        os._exit(1)

    def stop(self) -> None:
        self._stop.set()
        self._probe.stop()
        self._thread.join(timeout=PATIENCE_S + 1.0)
