"""Monitors all ranks of a run until they are done, and reports in one line which rank failed first and why.

Knows: pipes, exit codes, stopped processes, the boards that ranks write to. Does not know: what ranks do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from octopipe.base.errors import Terminated
from octopipe.runtime.ranks.rank_process import RankError, attributed

LOOK_EVERY_S = 1.0
"""Seconds between two checks for stopped processes."""
EXIT_S = 10.0
"""How long a process that has closed its pipe may take to end, before its exit code is given up."""


class Watch:
    """Listens to all ranks until all are done, or until one has failed and the others have reported what they observed.

    `processes` and `pipes` may still grow until `run` is called.
    """

    def __init__(
        self,
        processes: Sequence[Any],
        pipes: Sequence[Connection],
        listen: Callable[[Any], None],
        store: Any,
        *,
        grace_s: float,
        timeout_s: float | None = None,
        start_s: float | None = None,
        hang_s: float | None = None,
    ):
        self._processes, self._pipes, self._listen, self._store = processes, pipes, listen, store
        self._grace_s, self._timeout_s, self._start_s, self._hang_s = grace_s, timeout_s, start_s, hang_s
        self._open: dict[Connection, int] = {}
        self.begun = False
        """Whether all ranks were started."""
        self._ready: set[int] = set()
        self._results: dict[int, Any] = {}
        self._failures: dict[int, str] = {}
        """The error of every failed rank, in the order of arrival."""
        self._consequences: set[int] = set()
        """Ranks that failed because another one did."""
        self._died: dict[int, str] = {}
        self._stopped_since: dict[int, float] = {}

    def run(self, timeout_s: float | None = None) -> list[Any]:
        """Wait until all ranks are done; may be called again after an interruption, with the time that is left then."""
        if not self.begun:
            self.begun, self._open = True, {pipe: rank for rank, pipe in enumerate(self._pipes)}
        self._timeout_s = self._timeout_s if timeout_s is None else timeout_s
        now = time.monotonic()
        end = None if self._timeout_s is None else now + self._timeout_s
        start_end = None if self._start_s is None else now + self._start_s
        deadline = end
        told = False
        while self._open and (deadline is None or time.monotonic() < deadline):
            left = LOOK_EVERY_S if deadline is None else max(0.0, min(LOOK_EVERY_S, deadline - time.monotonic()))
            for pipe in wait(list(self._open), timeout=left):
                self._hear(pipe)  # type: ignore[arg-type]
            if self._knows_the_cause() and not told:
                # Ranks that wait for the failed one have nothing to add.
                told, deadline = True, time.monotonic() + min(1.0, self._grace_s)
            elif (self._failures or self._died) and deadline is end:
                deadline = time.monotonic() + self._grace_s
            elif not self._failures and not self._died:
                self._look_at_stopped()
                if start_end is not None and time.monotonic() > start_end and len(self._ready) < len(self._processes):
                    raise self._late(sorted(set(self._open.values()) - self._ready), "start", self._start_s or 0.0)
        if self._failures or self._died:
            raise self._verdict()
        if self._open:
            raise self._late(sorted(self._open.values()), "finish", self._timeout_s or 0.0)
        return [self._results[rank] for rank in range(len(self._processes))]

    def _knows_the_cause(self) -> bool:
        """Whether a rank has reported an error of its own, or one has died or is stopped and another has reported what
        it waited for.

        A rank that failed because of another is often heard first, because the other has to clean up or to finish a
        file.
        """
        if len(self._failures) > len(self._consequences):
            return True
        return bool(self._failures) and (bool(self._died) or any(map(self._stopped, self._open.values())))

    def _late(self, late: list[int], what: str, waited_s: float) -> RankError:
        lines = [f"rank {rank}: {self._stopped(rank) or self._line(rank) or 'no answer'}" for rank in late]
        text = f"ranks {late} did not {what} within {waited_s:g} s"
        return RankError(late[0], f"{text}; give them more time; pending ops: {'; '.join(lines)}")

    def _look_at_stopped(self) -> None:
        """Raise an error for a rank that has been stopped (SIGSTOP) too long, because it cannot time out by itself.

        Ranks that wait for it get `grace_s` more, so that they can report what they wait for.
        """
        if self._hang_s is None:
            return
        now = time.monotonic()
        for rank in self._open.values():
            if not self._stopped(rank):
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) > self._hang_s + self._grace_s:
                raise RankError(
                    rank, f"rank {rank} {self._stopped(rank)} for {self._hang_s + self._grace_s:g} s: {CONTINUE}"
                )

    def _stopped(self, rank: int) -> str:
        """The words "is stopped (SIGSTOP)" if the process is stopped."""
        try:
            with open(f"/proc/{self._processes[rank].pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""
        return "is stopped (SIGSTOP)" if state in "Tt" else ""

    def _hear(self, pipe: Connection) -> None:
        from octopipe.runtime.wire.encoding import decoded

        rank = self._open[pipe]
        try:
            kind, word = decoded(pipe.recv_bytes())
        except (EOFError, OSError):
            del self._open[pipe]
            if rank not in self._results and rank not in self._failures:
                self._died[rank] = self._how(rank)
            return
        if kind == "told":
            self._listen(word)
        elif kind == "ready":
            self._ready.add(rank)
        elif kind == "done":
            self._results[rank] = word
        else:
            self._failures[rank], consequence = word
            if consequence:
                self._consequences.add(rank)

    def _how(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(timeout=EXIT_S)
        code = process.exitcode
        if code is not None and code < 0:
            when = "" if rank in self._ready else " while it started"
            return f"rank {rank} was killed by {signal.Signals(-code).name}{when}"
        line = self._line(rank)
        return f"rank {rank} ended with exit code {code} {f'({line})' if line else 'without a message'}"

    def _line(self, rank: int) -> str:
        """The line that a rank's watchdog last wrote on its board; the rank itself is not asked."""
        from octopipe.runtime.ranks.pending_board import line_key

        try:
            if self._store.check([line_key(rank)]):
                return str(self._store.get(line_key(rank)).decode(errors="replace"))
        except Exception:
            return ""
        return ""

    def _verdict(self) -> RankError:
        causes = [rank for rank in self._failures if rank not in self._consequences]
        said = [attributed(rank, self._failures[rank]) for rank in (*causes, *self._consequences)]
        if self._died:
            # Only this process knows that a rank was killed; its peers' reports state where it was.
            first = next(iter(self._died))
            return RankError(first, "; ".join([self._died[first], *said[:1]]))
        if not causes:
            for rank in self._open.values():
                if stopped := self._stopped(rank):
                    return RankError(rank, "; ".join([f"rank {rank} {stopped}: {CONTINUE}", *said[:1]]))
        return RankError((causes or list(self._failures))[0], said[0])


CONTINUE = "resume it with SIGCONT, or end the run and start it again"


def interruptible(run: Callable[[], list[Any]], watch: Watch, processes: Sequence[Any], gentle_s: float) -> list[Any]:
    """On the first Ctrl-C or SIGTERM, ask the ranks to end and wait for their last reports."""

    asked = [int(signal.SIGINT)]

    def interrupt(number: int, _: Any) -> None:
        asked[0] = number
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, interrupt))
        try:
            return run()
        except KeyboardInterrupt as first:
            # Ranks ignore SIGINT, which Ctrl-C sends to them, too; SIGUSR1 takes its place.
            passed_on = signal.SIGTERM if asked[0] == signal.SIGTERM else signal.SIGUSR1
            if not watch.begun:  # not all ranks have started, so none has anything to save
                raise
            for process in processes:
                if process.is_alive():
                    with contextlib.suppress(OSError):
                        os.kill(process.pid, passed_on)
            try:
                return watch.run(gentle_s)
            except RankError as error:
                if f"was killed by {passed_on.name}" in str(error):  # it had no handler yet: nothing to report
                    raise first from None
                raise
