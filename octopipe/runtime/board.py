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
from collections.abc import Callable

import torch.distributed as dist

from octopipe.runtime.world import World

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
        self.rank, self.num_ranks = rank, num_ranks

    def _key(self, rank: int) -> str:
        return f"octopipe/{self._name}/{rank}"

    def write(self, line: str, *, last: bool = False) -> None:
        """Put up this rank's line (never raises: the store's host may be the rank that died).

        After a rank's `last` words nothing changes its line: the others may come to read it later.
        """
        if self._store is not None and not self._last:
            self._last = last
            try:
                self._store.set(self._key(self.rank), line)
            except Exception:
                self._store = None

    def clear(self) -> None:
        """Take the line down."""
        if self._store is not None and not self._last:
            try:
                self._store.delete_key(self._key(self.rank))
            except Exception:
                self._store = None

    def collect(self, *, patience_s: float) -> list[str]:
        """Everybody's lines, after waiting at most `patience_s` for those that are missing."""
        lines: dict[int, str] = {}
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


class Watchdog:
    """A thread that writes the board's line once the executor has been in one place for a while.

    On a GPU nobody waits on the host, so nobody times out there: with `device_busy` the thread itself ends the
    process, with everybody's line, when a device has made no progress for `timeout_s`.
    """

    def __init__(
        self,
        board: Board,
        where: Callable[[], tuple[object, str]],
        *,
        timeout_s: float,
        device_busy: Callable[[], bool] | None = None,
    ):
        self._board, self._where = board, where
        self._after_s = min(max(timeout_s / 2, 0.2), 10.0)
        self._timeout_s, self._device_busy = timeout_s, device_busy
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="octopipe-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        place, since, written = self._where()[0], time.monotonic(), False
        while not self._stop.wait(self._after_s / 2):
            now, line = self._where()
            if now != place:
                place, since = now, time.monotonic()
                if written:
                    self._board.clear()
                    written = False
            elif line and not written and time.monotonic() - since >= self._after_s:
                self._board.write(line)
                written = True
            if self._device_busy is not None:
                if not self._device_busy():
                    since = time.monotonic()
                elif time.monotonic() - since >= self._timeout_s:
                    self._abort(line)

    def _abort(self, line: str) -> None:
        """The main thread may be stuck inside the driver: say why and end the process."""
        self._board.write(line or "waits for its device", last=True)
        lines = self._board.collect(patience_s=min(self._timeout_s, PATIENCE_S))
        sys.stderr.write(
            f"octopipe: rank {self._board.rank}: the device made no progress for {self._timeout_s:g} s; "
            f"pending ops: {'; '.join(lines)}\n"
        )
        sys.stderr.flush()
        os._exit(1)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)
