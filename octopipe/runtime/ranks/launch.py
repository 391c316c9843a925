"""Rank processes: started and ended together here, or joined if torchrun has already started them.

Knows: processes, signals, rendezvous, and which rank failed first. Does not know: what the ranks do.

`run_ranks(work, size, payload)` calls `work(seat, payload)` on every rank with torch.distributed initialised. The
starting process hosts the store, so that error reports survive the death of any rank. Ranks end when their parent ends.
The error of a failed run is one line: that of the first failing rank, with what another rank was waiting for.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.streams import open_standard_streams
from octopipe.runtime.ranks.rank_process import (
    RankError,
    Seat,
    Start,
    Work,
    attributed,
    begin,
    clear_shared_memory,
    described,
    load_kernels_early,
    no_report,
)
from octopipe.runtime.ranks.rendezvous import local_store, place_from, rendezvous
from octopipe.runtime.ranks.watch import Watch, interruptible

__all__ = ["RankError", "Seat", "Work", "by_rank", "join_ranks", "load_kernels_early", "run_ranks", "stop", "warm_up"]

GROUP_TIMEOUT_S = 1800.0
"""Default timeout of collectives: how long ranks wait for one that tunes or loads. Dead ranks are detected earlier."""


LEAST_DESCRIPTORS = 64
"""Open files of the process that starts ranks, in addition to eight for each rank."""


Listener = Callable[[Any], None]


def under_torchrun() -> bool:
    """Whether something else (such as torchrun) has already started the ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def allow_descriptors(count: int) -> None:
    """Raise this process's limit of open files as needed, or report that it cannot be raised, before ranks start."""
    try:
        import resource
    except ImportError:  # not where the system knows no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise OctoPipeError(
            f"ranks need about {count} open files, and {hard} are allowed; raise the limit: ulimit -n 1024"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def started_ranks() -> int | None:
    """The number of ranks that something else has started, or None."""
    return place_from(os.environ).size if under_torchrun() else None


def warm_up(*also: str) -> Any:
    """Start the server that ranks are forked from. Once it has loaded torch, a rank starts in a fraction of a second.

    Optional: called early, the server starts while this process does something else. `also`: modules that the server
    loads once, instead of every rank for itself; without effect if the server is already running.
    """
    _refuse_while_importing()
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    allow_descriptors(LEAST_DESCRIPTORS)
    _quiet_tracker()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*also, "octopipe.runtime.training.warm"])  # last: it freezes existing objects
    forkserver.ensure_running()
    atexit.unregister(_end_server)
    atexit.register(_end_server)
    return context


def _quiet_tracker() -> None:
    """Suppress the warnings of Python's resource tracker about ranks that were killed. The tracker reads this variable
    when it starts, which is with the first rank or with the server that ranks are forked from."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")


def _refuse_while_importing() -> None:
    """Raise an error if a rank that is importing the user's script would start ranks. Every new rank imports the
    script, so this would never end."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise OctoPipeError(
            "this script starts ranks while it is imported, and every rank imports it; put the calls that start them "
            'under `if __name__ == "__main__":`'
        )


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
    start_s: float | None = None,
    hang_s: float | None = None,
    gentle_s: float | None = None,
    listen: Listener | None = None,
) -> list[Any]:
    """The results of all ranks, by rank. One rank runs in this process, without torch.distributed.

    `environment`: variables for the ranks, which are then fresh processes that read them at their start (even a single
    rank). `threads`: CPU threads per rank (default: the cores, divided equally). `grace_s`: time for the other ranks to
    report what they waited for once one has died. `timeout_s`: limit for the whole run. `group_timeout_s`: limit of
    collectives without a timeout of their own. `start_s`: limit until all ranks have met. `hang_s`: how long a rank may
    be stopped (SIGSTOP) before the run is given up. `gentle_s`: time for ranks to end by themselves after Ctrl-C or
    SIGTERM (the work must handle the signal to end early); a second signal ends them at once. `listen` receives the
    messages of the first rank (`Seat.tell`).
    """
    import torch

    _quiet_tracker()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads or max(1, cores // size)
    listen = listen or no_report
    if size == 1 and not environment:
        torch.set_num_threads(threads)
        return [work(Seat(rank=0, size=1, local_rank=0, tell=listen), payload)]
    _refuse_while_importing()
    open_standard_streams()
    allow_descriptors(LEAST_DESCRIPTORS + 8 * size)
    store = local_store()
    # A fork of the server would inherit allocator and library settings, made before `environment` was set.
    context = multiprocessing.get_context("spawn") if environment else warm_up()
    start = Start(work, size, payload, backend, store.port, threads, group_timeout_s)
    processes: list[Any] = []
    pipes: list[Connection] = []
    watch = Watch(processes, pipes, listen, store, grace_s=grace_s, timeout_s=timeout_s, start_s=start_s, hang_s=hang_s)

    def run() -> list[Any]:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            pipes.append(ours)
            process = context.Process(target=begin, args=(start, rank, theirs), name=f"octopipe rank {rank}")
            with _surroundings(environment or {}):
                process.start()
            theirs.close()
            processes.append(process)
        return watch.run()

    try:
        return run() if gentle_s is None else interruptible(run, watch, processes, gentle_s)
    finally:
        stop(processes)
        for pipe in pipes:
            pipe.close()


def by_rank(task: Callable[[int, int, Any], Any]) -> Work:
    """Turn a function of rank, number of ranks and payload into a function of `Seat` and payload."""
    return partial(_call_by_rank, task)


def _call_by_rank(task: Callable[[int, int, Any], Any], seat: Seat, payload: Any) -> Any:
    return task(seat.rank, seat.size, payload)


@contextlib.contextmanager
def _surroundings(environment: Mapping[str, str]) -> Iterator[None]:
    """Sets the environment of processes that are started within this context."""
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

    place = place_from(os.environ)
    rank, size, local_rank = place
    tell = listen if rank == 0 and listen is not None else no_report
    if backend == "nccl":
        load_kernels_early()
    if size > 1:
        rendezvous(place, backend, group_timeout_s)
    try:
        result = work(Seat(rank=rank, size=size, local_rank=local_rank, tell=tell), payload)
    except Exception as error:
        if size == 1 or _is_first_to_fail():
            raise RankError(rank, attributed(rank, described(error))) from None
        # Threads of a broken process group would keep this rank from ending.
        sys.stderr.flush()
        os._exit(1)
    if size > 1:
        dist.destroy_process_group()
    return result


def _is_first_to_fail() -> bool:
    """Whether this rank failed first; ranks that fail because of another one do not report."""
    from octopipe.runtime.torch_private import default_store

    try:
        return bool(default_store().add("octopipe/failures", 1) == 1)
    except Exception:  # the rank that served the store has ended: report twice rather than never
        return True


def _end_server() -> None:
    """End the fork server before this process ends, as it would otherwise outlive it briefly and look like an orphan.
    All ranks have ended by now. SIGTERM ends a server that is still loading libraries, too, so there is no wait."""
    server = getattr(forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    end = getattr(server, "_stop", None)
    if end is not None:
        end()


def stop(processes: Sequence[Any]) -> None:
    """End all running processes, first with SIGTERM, then with SIGKILL."""
    for process in processes:
        if process.is_alive():
            process.terminate()
            if hasattr(signal, "SIGCONT"):  # a stopped process does not handle SIGTERM
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGCONT)
    end = time.monotonic() + 2.0
    for process in processes:
        process.join(timeout=max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        clear_shared_memory(process.pid)
