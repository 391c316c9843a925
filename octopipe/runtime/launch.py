"""Ranks as processes: started here and ended together, or joined where torchrun has started them already.

Knows: processes, signals, rendezvous, who failed first. Does not know: what the ranks do.

`run_ranks(work, size, payload)` calls `work(seat, payload)` on every rank with torch.distributed ready. The starting
process serves the store, so that no rank's death takes the others' last words with it. Ranks follow their parent
into death, and the error of a failed run is one line: the first failing rank's, with what a rank that waited for it
was waiting for.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from octopipe.errors import OctoPipeError

GROUP_TIMEOUT_S = 1800.0
"""Of collectives that name no other: ranks wait that long for one that tunes or loads. A death is noticed at once."""


def _unheard(_: Any) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank sits."""

    rank: int
    size: int
    local_rank: int
    """Among the ranks of this machine: picks the GPU."""
    tell: Callable[[Any], None] = field(default=_unheard)
    """Send a picklable word to whoever started the run; only the first rank's are heard."""


class RankError(OctoPipeError):
    """A run that failed; `rank` is the one that failed first."""

    def __init__(self, rank: int, message: str):
        self.rank = rank
        super().__init__(message)


Work = Callable[[Seat, Any], Any]
Listener = Callable[[Any], None]


def load_kernels_early() -> None:
    """Before CUDA starts: no kernel is loaded at its first use.

    Loading one waits for the whole device; a receive that waits there for a rank whose host loads one too would never
    end. torch asks for late loading unless somebody has said otherwise.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def under_torchrun() -> bool:
    """Has something else started the ranks already?"""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def warm_up() -> Any:
    """Start the server that ranks are forked from, in a fraction of a second each, once it has loaded torch.

    Optional: calling it early lets that happen while this process does something else.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["octopipe.training.warm"])
    forkserver.ensure_running()
    atexit.unregister(_end_server)
    atexit.register(_end_server)
    return context


def run_ranks(
    work: Work,
    size: int,
    payload: Any = None,
    *,
    backend: str = "gloo",
    environment: Mapping[str, str] | None = None,
    threads: int | None = None,
    grace_s: float = 10.0,
    timeout_s: float | None = None,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    gentle_s: float | None = None,
    listen: Listener | None = None,
) -> list[Any]:
    """The results of all ranks, by rank. One rank runs in this process, without torch.distributed.

    `environment`: for fresh processes that read it as they start (one rank, too). `threads`: of the CPU per rank
    (default: the cores, shared equally). `grace_s`: how long the other ranks may take to say what they waited for
    once one has died. `timeout_s`: for everything; `group_timeout_s`: for collectives that name no time of their own.
    `gentle_s`: how long ranks may take to end by themselves after Ctrl-C or SIGTERM (work that ends before its time
    must note SIGTERM itself); a second signal ends them at once. `listen` gets what the first rank tells.
    """
    import torch
    import torch.distributed as dist

    # The process that cleans up after ranks reads it as it starts.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads or max(1, cores // size)
    listen = listen or _unheard
    if size == 1 and not environment:
        torch.set_num_threads(threads)
        return [work(Seat(rank=0, size=1, local_rank=0, tell=listen), payload)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A fork of the server would share its memory allocator's settings and its libraries' first look around.
    context = multiprocessing.get_context("spawn") if environment else warm_up()
    start = _Start(work, size, payload, backend, store.port, threads, group_timeout_s)
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(start, rank, theirs), name=f"octopipe rank {rank}")
            with _surroundings(environment or {}):
                process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        watch = _Watch(processes, pipes, listen, grace_s, timeout_s, store)
        if gentle_s is None:
            return watch.run()
        return _run_gently(watch, processes, gentle_s)
    finally:
        stop(processes)
        for pipe in pipes:
            pipe.close()


def by_rank(task: Callable[[int, int, Any], Any]) -> Work:
    """A function of rank, number of ranks and payload as work of a seat."""
    return partial(_call_by_rank, task)


def _call_by_rank(task: Callable[[int, int, Any], Any], seat: Seat, payload: Any) -> Any:
    return task(seat.rank, seat.size, payload)


@contextlib.contextmanager
def _surroundings(environment: Mapping[str, str]) -> Iterator[None]:
    """The environment of processes that start meanwhile."""
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _run_gently(watch: _Watch, processes: Sequence[Any], gentle_s: float) -> list[Any]:
    """On the first Ctrl-C or SIGTERM ask the ranks to end, and wait for what they have to say."""

    asked = [int(signal.SIGINT)]

    def interrupt(number: int, _: Any) -> None:
        asked[0] = number
        raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, interrupt))
        try:
            return watch.run()
        except KeyboardInterrupt:
            # Ranks do not listen to Ctrl-C, which reaches them too: they get another signal for it.
            passed_on = signal.SIGTERM if asked[0] == signal.SIGTERM else signal.SIGUSR1
            for process in processes:
                if process.is_alive():
                    with contextlib.suppress(OSError):
                        os.kill(process.pid, passed_on)
            try:
                return watch.run(gentle_s)
            except RankError as error:
                if f"was killed by {passed_on.name}" in str(error):  # before it could listen: nothing to be said
                    raise KeyboardInterrupt from None
                raise


def join_ranks(
    work: Work,
    payload: Any = None,
    *,
    backend: str = "gloo",
    listen: Listener | None = None,
    group_timeout_s: float = GROUP_TIMEOUT_S,
) -> Any:
    """This rank's result, under torchrun. A failing run raises on the first failing rank and ends the others with
    exit code 1."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    tell = listen if rank == 0 and listen is not None else _unheard
    if backend == "nccl":
        load_kernels_early()
    if size > 1:
        dist.init_process_group(backend, timeout=timedelta(seconds=group_timeout_s))
    try:
        result = work(Seat(rank=rank, size=size, local_rank=local_rank, tell=tell), payload)
    except Exception as error:
        if size == 1 or _is_first_to_fail():
            raise RankError(rank, _attributed(rank, _described(error))) from None
        # Threads of a broken process group would keep this rank from ending.
        sys.stderr.flush()
        os._exit(1)
    if size > 1:
        dist.destroy_process_group()
    return result


def _is_first_to_fail() -> bool:
    """Ranks that fail because another one did keep quiet."""
    from torch.distributed import distributed_c10d as c10d

    try:
        return bool(c10d._get_default_store().add("octopipe/failures", 1) == 1)
    except Exception:  # the store has gone with the rank that served it: better said twice than never
        return True


# -- one rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Start:
    """What a rank needs to begin."""

    work: Work
    size: int
    payload: Any
    backend: str
    port: int
    threads: int
    group_timeout_s: float


CHATTER = (
    ".*no current CUDA context.*",  # autograd's threads meet cuBLAS first; it finds the context by itself
    "resource_tracker: There appear to be.*leaked",  # ranks end at once, and the system takes back what they held
)
"""Warnings that tell a user nothing he could mend."""


def _quiet() -> None:
    import logging
    import warnings

    for message in CHATTER:
        warnings.filterwarnings("ignore", message=message)
    # A share of a GPU has fewer multiprocessors than torch's compiler likes to see.
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)


def _child(start: _Start, rank: int, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    _quiet()
    threading.Thread(target=_follow_parent, daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(start.size))
    # Libraries' chatter must not end up in what the parent prints as JSON.
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(kind: str, word: Any) -> None:
        # Bytes: as an object, a tensor would be sent as shared memory that ends with this process.
        with lock:
            pipe.send_bytes(pickle.dumps((kind, word)))

    good = False
    if start.backend == "nccl":
        load_kernels_early()
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(start.threads)
        store = dist.TCPStore("127.0.0.1", start.port, is_master=False)
        dist.init_process_group(
            start.backend,
            store=store,
            rank=rank,
            world_size=start.size,
            timeout=timedelta(seconds=start.group_timeout_s),
        )
        tell = partial(send, "told") if rank == 0 else _unheard
        seat = Seat(rank=rank, size=start.size, local_rank=rank, tell=tell)
        send("done", start.work(seat, start.payload))
        dist.destroy_process_group()
        good = True
    except BaseException as error:
        send("failed", _described(error))
    finally:
        pipe.close()
        sys.stderr.flush()
        # Threads of a broken process group would keep a failed rank from ending.
        os._exit(0 if good else 1)


def _described(error: BaseException) -> str:
    """One line; a mistake of ours, not of the user's, says where it is (and all of it with OCTOPIPE_TRACE=1)."""
    if os.environ.get("OCTOPIPE_TRACE"):
        traceback.print_exception(error)
    if isinstance(error, OctoPipeError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} ({os.path.basename(place.filename)}:{place.lineno})"


def _attributed(rank: int, text: str) -> str:
    return text if text.startswith(f"rank {rank} ") else f"rank {rank}: {text}"


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


# -- the parent ----------------------------------------------------------------------------------------


class _Watch:
    """Listens to all ranks until all are done, or one has failed and the others have said what they saw."""

    def __init__(
        self,
        processes: Sequence[Any],
        pipes: Sequence[Connection],
        listen: Listener,
        grace_s: float,
        timeout_s: float | None,
        store: Any,
    ):
        self._processes, self._listen, self._grace_s, self._timeout_s = processes, listen, grace_s, timeout_s
        self._store = store
        self._open = {pipe: rank for rank, pipe in enumerate(pipes)}
        self._results: dict[int, Any] = {}
        self._failures: dict[int, str] = {}
        """By rank, in the order of arrival."""
        self._died: dict[int, str] = {}

    def run(self, timeout_s: float | None = None) -> list[Any]:
        """Until the end; may be called again after an interruption, with the time that is left then."""
        self._timeout_s = self._timeout_s if timeout_s is None else timeout_s
        end = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        deadline = end
        told = False
        while self._open and (deadline is None or time.monotonic() < deadline):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for pipe in wait(list(self._open), timeout=left):
                self._hear(pipe)  # type: ignore[arg-type]
            if self._failures and not told:
                # Those who wait for the failed rank have nothing to add.
                told, deadline = True, time.monotonic() + min(1.0, self._grace_s)
            elif self._died and deadline is end:
                deadline = time.monotonic() + self._grace_s
        if self._failures or self._died:
            raise self._verdict()
        if self._open:
            late = sorted(self._open.values())
            lines = [f"rank {rank}: {self._line(rank) or 'no answer'}" for rank in late]
            waited = f"ranks {late} did not finish within {self._timeout_s:g} s"
            raise RankError(late[0], f"{waited}; give them more time; pending ops: {'; '.join(lines)}")
        return [self._results[rank] for rank in range(len(self._processes))]

    def _hear(self, pipe: Connection) -> None:
        rank = self._open[pipe]
        try:
            kind, word = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            del self._open[pipe]
            if rank not in self._results and rank not in self._failures:
                self._died[rank] = self._how(rank)
            return
        if kind == "told":
            self._listen(word)
        elif kind == "done":
            self._results[rank] = word
        else:
            self._failures[rank] = word

    def _how(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(timeout=2.0)
        code = process.exitcode
        if code is not None and code < 0:
            return f"rank {rank} was killed by {signal.Signals(-code).name}"
        line = self._line(rank)
        return f"rank {rank} ended with exit code {code} {f'({line})' if line else 'and without a word'}"

    def _line(self, rank: int) -> str:
        """What a rank's watchdog last wrote on its board; nothing is asked of the rank itself."""
        from octopipe.runtime.board import line_key

        try:
            if self._store.check([line_key(rank)]):
                return str(self._store.get(line_key(rank)).decode(errors="replace"))
        except Exception:
            return ""
        return ""

    def _verdict(self) -> RankError:
        said = [_attributed(rank, text) for rank, text in self._failures.items()]
        if self._died:
            # Nobody but this process knows that a rank was killed; what its peers waited for says where.
            first = next(iter(self._died))
            return RankError(first, "; ".join([self._died[first], *said[:1]]))
        return RankError(next(iter(self._failures)), said[0])


def _end_server() -> None:
    """Let the fork server end before we do: it would take a moment longer, and look like an orphan."""
    end = getattr(getattr(forkserver, "_forkserver", None), "_stop", None)
    if end is not None:
        end()


def stop(processes: Sequence[Any]) -> None:
    """End what still runs: politely, then not."""
    for process in processes:
        if process.is_alive():
            process.terminate()
            if hasattr(signal, "SIGCONT"):  # one that was stopped would not hear it
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGCONT)
    end = time.monotonic() + 2.0
    for process in processes:
        process.join(timeout=max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
