"""Ctrl-C and SIGTERM as a request to stop: a search that has a result ends in an orderly way and returns it.

Knows: signals, and how long the program may take to respond. Does not know: what is being searched.

    with StopRequest() as stop:
        result = tune(..., progress=lambda seen: stop.requested)
    return stop.exit_code(0)

The first signal is recorded; the search checks `asked` and ends with the best result so far. If the block has not been
left `GRACE_S` seconds later, an exception is raised in the main thread; a second signal raises it immediately. Every
signal therefore takes effect within seconds, whatever the program is doing.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from octopipe.base.errors import StoppedError, Terminated

GRACE_S = 2.0
"""How long a search may take to return its result after the first signal."""


class StopRequest:
    """Records SIGINT and SIGTERM while its block runs; outside the main thread it records nothing."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        """`grace_s`: seconds the block may take to end after the first signal; with 0 it is interrupted at once."""
        self.number = 0
        """The number of the signal received, or 0."""
        self._grace_s = grace_s
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.number != 0

    def raise_if_requested(self) -> None:
        """Raise if a signal was received; for commands whose result is useless unless it is complete."""
        if self.requested:
            raise self._error()

    def exit_code(self, otherwise: int) -> int:
        """Return the exit code of the command: 130 after Ctrl-C, 143 after SIGTERM, else `otherwise`."""
        return 128 + self.number if self.number else otherwise

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
            if hasattr(signal, "SIGALRM"):
                self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._too_late)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(signal, "setitimer") and self._before:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if isinstance(error, StoppedError) and self.requested:
            # There is no result to return; the command ends as if the signals had not been handled here.
            raise self._error() from None

    def _note(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked worker ends as if no handler had been installed
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        again, self.number = self.requested, number
        if again or self._grace_s <= 0:
            raise self._error()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _too_late(self, *_: object) -> None:
        raise self._error()

    def _error(self) -> KeyboardInterrupt:
        return Terminated() if self.number == signal.SIGTERM else KeyboardInterrupt()
