"""Two ops of one rank that run together: they alternate, so that one computes during the exchange of the other.

Knows: which op is running, where control changes (at exchanges), and which state must be restored then. Does not know:
what the ops are (`executor.py`), or which two were paired (the plan).

Each op runs on its own host thread, and exactly one of the threads is active. An op that starts an exchange
(`all_to_all` of torch.distributed, or a block under `with octopipe.exchange()`) issues it and yields to the other
thread. When it resumes, it waits for its exchange and continues. Control therefore changes in an order that depends
only on the ops: all members of an expert-parallel group issue their exchanges in the same order, as NCCL and gloo
require, and no two pairs can wait for each other.

Both ops compute on the rank's single compute stream. An exchange runs on the stream of its communicator, so it overlaps
with what the other op has queued in the meantime; a second compute stream would only add memory shared by two streams.

Only one op is active at any time, so the only state to separate is what ops keep in shared places while they run: the
random generators, and the state of a stage's `SplitMode` for its current forward or backward.

While single layers are measured, `watching` is called at the same exchanges, so that a profile can state which parts of
an op exchange and which compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from octopipe.runtime.stages.rng import States, rng_state, set_rng_state
from octopipe.runtime.stages.wgrad import SplitMode
from octopipe.runtime.torch_private import functional_collectives
from octopipe.runtime.wire.telling import PeerError

PER_RUN = ("queue", "hooked", "in_backward", "keeps_nothing", "_off", "_own_graph")
"""The attributes in which a `SplitMode` keeps the state of the forward or backward that is under way."""
GROUP_EXCHANGES = ("all_to_all_single", "alltoall_base", "all_to_all", "alltoall")
"""The methods of a process group that exchange tokens, under their names in all supported versions of torch. Every
exchange of torch.distributed that a user may import and call ends in one of them."""
Kept = tuple[States, list[dict[str, Any]]]


LOOK_EVERY_S = 0.2
"""How often, in seconds, an op that waits for its exchange on the host checks whether another rank has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The timeout of exchanges within a pair on the host, and the function that reports failures of other ranks."""

    timeout_s: float
    failed: Callable[[], str]
    """The failure that a rank of the job has reported; "" if there is none."""


class OtherFailed(Exception):
    """Ends an op whose partner has failed; users never see it."""


Fill = Callable[[], None] | None
"""Work of an op that can be computed at any time; the op computes it while its exchange is under way."""


class _Pair:
    """A pair while it is running."""

    def __init__(
        self,
        modes: Sequence[SplitMode],
        *,
        apart: bool,
        begins: int = 0,
        patience: Patience | None = None,
        fills: tuple[Fill, Fill] = (None, None),
    ):
        self.modes, self.apart, self.patience, self._fills = modes, apart, patience, fills
        self.turn = begins
        self.done = [False, False]
        self.errors: list[BaseException | None] = [None, None]
        self._changed = threading.Condition()
        self._kept: list[Kept | None] = [None, None]
        self.handed = [0, 0]
        """How often each op has handed the turn over."""

    def run(self, side: int, op: Callable[[], None]) -> None:
        """Run one of the two ops, from its first turn to its end."""
        with self._changed:
            self._changed.wait_for(lambda: self.turn == side)
        if self.errors[1 - side] is None:
            try:
                op()
            except BaseException as error:
                self.errors[side] = error
        with self._changed:
            self.done[side] = True
            if not self.done[1 - side]:
                self._to(1 - side)

    def hand_over(self) -> None:
        """Let the other op run until its next exchange or its end, then compute what may fill the rest of the
        exchange."""
        side = self.turn
        self._other_runs(side)
        fill = self._fills[side]
        if fill is not None:
            fill()

    def _other_runs(self, side: int) -> None:
        self.handed[side] += 1
        if self.done[1 - side]:
            return
        with self._changed:
            self._kept[side] = self._take()
            self._to(1 - side)
            self._changed.wait_for(lambda: self.turn == side)
        if self.errors[1 - side] is not None:
            raise OtherFailed

    def _to(self, side: int) -> None:
        kept = self._kept[side]
        if kept is not None:
            self._put(kept)
        self.turn = side
        self._changed.notify_all()

    def _take(self) -> Kept:
        return rng_state(), [
            {name: getattr(mode, name) for name in PER_RUN if hasattr(mode, name)} for mode in self.modes
        ]

    def _put(self, kept: Kept) -> None:
        states, modes = kept
        set_rng_state(states)
        for mode, values in zip(self.modes, modes, strict=True):
            for name, value in values.items():
                setattr(mode, name, value)


_running: _Pair | None = None
"""The pair that this process runs now. A rank is one process, and runs one pair at a time."""
_on_exchange: Callable[[], None] | None = None
"""Called when an exchange begins and when it has ended, while layers are measured."""


class Pending(Protocol):
    """An exchange that has been issued."""

    def wait(self) -> Any:
        """Make the following work on the compute stream wait for the exchange."""


_started = 0
_widest = 0


def exchange_ranks() -> int:
    """Return the largest group in which this process has exchanged tokens while layers were watched; 0: none is
    known."""
    return _widest


def _among(ranks: int) -> None:
    global _widest
    if _on_exchange is not None:
        _widest = max(_widest, ranks)


def exchanges_started() -> int:
    """Return how many exchanges this process has started that torch.distributed does not count."""
    return _started


def run_exchange(issue: Callable[[], Pending], ranks: int = 0) -> Any:
    """Issue an exchange among this number of ranks, let the other op of a pair run meanwhile, and wait; returns the
    result of the wait."""
    global _started
    _started += 1
    _among(ranks)
    on_exchange = _on_exchange
    if on_exchange is not None:
        on_exchange()
    pending = issue()
    if _running is not None and not _running.apart:
        _running.hand_over()
    result = pending.wait()
    if on_exchange is not None:
        on_exchange()
    return result


@contextmanager
def exchange() -> Iterator[None]:
    """Mark an exchange that torch.distributed does not see (DeepEP, HybridEP, custom kernels).

    Issue it inside the block; wait for it, or use its results, after the block. If the op is one of a pair, the other
    op runs in between. Otherwise nothing happens, except that a profile counts the block as an exchange.
    """
    global _started
    _started += 1
    on_exchange = _on_exchange
    if on_exchange is not None:
        on_exchange()
    yield
    if on_exchange is not None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the stream on which the exchange runs is not known here
        on_exchange()
    if _running is not None and not _running.apart:
        _running.hand_over()


def give_turn() -> None:
    """Within a pair, let the other op run until its next exchange, although nothing is exchanged here."""
    if _running is not None and not _running.apart:
        _running.hand_over()


def failed_elsewhere() -> str:
    """Return, within a pair, what has failed in the job, so that no rank waits for it; otherwise ""."""
    patience = None if _running is None else _running.patience
    return "" if patience is None else patience.failed()


class _Waited:
    """A `Work` on the host whose wait ends if another rank has failed; everything else is unchanged."""

    def __init__(self, work: Any, patience: Patience):
        self._work, self._patience = work, patience

    def wait(self, *arguments: Any) -> Any:
        _wait_patiently(self._work, self._patience)
        return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _wait_patiently(work: Any, patience: Patience) -> None:
    """Wait until an exchange on the host has ended. The group belongs to the user and is not closed when another rank
    fails, so the wait has to check for that itself."""
    began = looked = time.monotonic()
    pause = 0.0
    while not work.is_completed():
        time.sleep(pause)
        now = time.monotonic()
        # A long wait leaves the core to other threads, and is extended by one per cent at most.
        pause = max(min(pause + 2e-6, 1e-3), min((now - began) / 100, 1e-2))
        if now - looked > LOOK_EVERY_S:
            looked = now
            why = patience.failed()
            if why:
                raise PeerError(f"an exchange of tokens cannot complete: {why}")
        if now - began > patience.timeout_s:
            raise PeerError(f"an exchange of tokens did not end within {patience.timeout_s:g} s")


def _issued(issue: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a group that starts an exchange: the other op of a pair runs before anything can wait for
    it."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        on_exchange, pair = _on_exchange, _running
        _among(args[0].size())  # a method: the group comes first
        if on_exchange is not None:
            on_exchange()
        work = issue(*args, **kwargs)
        if pair is not None:
            pair.hand_over()
        if on_exchange is not None:
            if work is not None:
                work.wait()
            on_exchange()
        patient = pair is not None and pair.patience is not None and work is not None
        if patient and _of_host(*args, *kwargs.values()):
            assert pair is not None and pair.patience is not None
            return _Waited(work, pair.patience)
        return work

    return collective


def _of_host(*arguments: Any) -> bool:
    """Return whether there are tensors among these and all of them are in host memory."""
    flat = [t for x in arguments for t in (x if isinstance(x, (list, tuple)) else (x,)) if isinstance(t, torch.Tensor)]
    return bool(flat) and all(t.device.type == "cpu" for t in flat)


def _lazy(issue: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a functional collective, whose result is waited for when it is used."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        on_exchange = _on_exchange
        if on_exchange is not None:
            on_exchange()
        out = issue(*args, **kwargs)
        if _running is not None:
            _running.hand_over()
        if on_exchange is not None:
            out = functional_collectives().wait_tensor(out)
            on_exchange()
        return out

    return collective


@contextmanager
def watching(on_exchange: Callable[[], None]) -> Iterator[None]:
    """A context in which `on_exchange` is called when an exchange begins and when it has ended, on the thread that runs
    it."""
    global _on_exchange
    assert _on_exchange is None and _running is None
    _on_exchange = on_exchange
    try:
        with _exchanges_found():
            yield
    finally:
        _on_exchange = None


@contextmanager
def _exchanges_found() -> Iterator[None]:
    """A context in which exchanges of torch.distributed pass the turn to the other op."""
    places: list[tuple[Any, str, Any]] = [(dist.ProcessGroup, name, _issued) for name in GROUP_EXCHANGES]
    places += [(functional_collectives(), name, _lazy) for name in ("all_to_all_single", "all_to_all_single_autograd")]
    found = [(owner, name, wrap) for owner, name, wrap in places if name in vars(owner)]
    # As they stand in the namespace: a method taken off its class would come back without its `self`.
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in found]
    try:
        for owner, name, wrap in found:
            setattr(owner, name, wrap(getattr(owner, name)))
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


class Turns:
    """Runs pairs; keeps the second thread for the next pair."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._asked = threading.Semaphore(0)
        self._ended = threading.Semaphore(0)
        self._job: Callable[[], None] | None = None
        self.handed = (0, 0)
        """How often each op of the last pair handed its turn over."""

    def together(
        self,
        first: Callable[[], None],
        second: Callable[[], None],
        modes: Sequence[SplitMode],
        *,
        apart: bool = False,
        begins: int = 0,
        patience: Patience | None = None,
        fills: tuple[Fill, Fill] = (None, None),
    ) -> int | None:
        """Run both ops. Returns None, or which of them failed (0 or 1); `error` then contains the reason.

        `apart`: one after the other, with no turn in between. `begins`: which of them has the first turn.
        `patience`: how exchanges are waited for (default: as long as their group says). `fills`: what each op computes
        at its exchanges, after the other op's turn.
        """
        global _running
        assert _running is None, "a pair inside a pair"
        pair = _Pair(modes, apart=apart, begins=begins, patience=patience, fills=fills)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        stream = None if device is None else torch.cuda.current_stream()

        def beside() -> None:
            if device is None:
                pair.run(1, second)
                return
            with torch.cuda.device(device), torch.cuda.stream(stream):
                pair.run(1, second)

        _running = pair
        try:
            with nullcontext() if apart else _exchanges_found():
                self._start(beside)
                pair.run(0, first)
                self._ended.acquire()
        finally:
            _running = None
        self.handed = (pair.handed[0], pair.handed[1])
        for side, error in enumerate(pair.errors):
            if error is not None and not isinstance(error, OtherFailed):
                self.error: BaseException = error
                return side
        return None

    def _start(self, job: Callable[[], None]) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="octopipe-pairs", daemon=True)
            self._thread.start()
        self._job = job
        self._asked.release()

    def _serve(self) -> None:
        while True:
            self._asked.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            try:
                job()
            finally:
                self._ended.release()

    def close(self) -> None:
        """Stop the second thread."""
        if self._thread is not None and self._thread.is_alive():
            self._job = None
            self._asked.release()
            self._thread.join(timeout=5)
        self._thread = None
