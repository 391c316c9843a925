"""Ranks as processes of this machine: started, joined, and ended together.

Knows: processes, their environment, rendezvous on this host. Does not know: what the ranks do.

`run_ranks(task, nproc, payload)` calls `task(rank, nproc, payload)` in `nproc` fresh processes with torch.distributed
ready (gloo), and returns their results in rank order. When one fails the others are ended, and the error names it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from octopipe.errors import OctoPipeError

Task = Callable[[int, int, Any], Any]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(
    task: Task,
    nproc: int,
    payload: Any = None,
    *,
    environment: Mapping[str, str] | None = None,
    threads: int | None = None,
    timeout_s: float = 600.0,
) -> list[Any]:
    """Results of `task` on every rank. `threads`: CPU threads of a rank (default: the cores, shared equally)."""
    context = multiprocessing.get_context("spawn")
    threads = threads or max(1, (os.cpu_count() or 1) // nproc)
    extra = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(threads),
        **(environment or {}),
    }
    processes, pipes = [], []
    # A child reads its environment when it starts; ours goes back to what it was.
    before = {key: os.environ.get(key) for key in extra}
    os.environ.update(extra)
    try:
        for rank in range(nproc):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_main, args=(task, rank, nproc, payload, theirs, threads, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
    try:
        return _collect(pipes, timeout_s)
    finally:
        for process in processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.terminate()
                process.join(timeout=5.0)
            if process.is_alive():
                process.kill()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        open_pipes = [p for r, p in enumerate(pipes) if r not in results]
        for pipe in wait(open_pipes, timeout=max(0.0, end - time.monotonic())):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                good, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                raise OctoPipeError(f"rank {rank} died without a word; see its output above") from None
            if not good:
                raise OctoPipeError(f"rank {rank}: {value}")
            results[rank] = value
        if time.monotonic() > end and len(results) < len(pipes):
            late = [r for r in range(len(pipes)) if r not in results]
            raise OctoPipeError(f"ranks {late} did not finish within {timeout_s:g} s; raise the limit or look at them")
    return [results[r] for r in range(len(pipes))]


def _main(
    task: Task, rank: int, nproc: int, payload: Any, pipe: Connection, threads: int, timeout_s: float
) -> None:
    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(threads)
        dist.init_process_group("gloo", rank=rank, world_size=nproc, timeout=timedelta(seconds=timeout_s))
        answer = (True, task(rank, nproc, payload))
    except OctoPipeError as error:
        answer = (False, str(error))
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        if os.environ.get("OCTOPIPE_TRACE"):
            traceback.print_exc()
        answer = (False, f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})")
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
