"""Worlds of ranks that stay alive over many tests: starting a process costs seconds, a plan milliseconds."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import multiprocessing as mp
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from known_warnings import filter_in_a_rank

PRELOAD = ["octopipe.runtime.nn", "octopipe.huggingface.warm", "pytest", "octopipe.runtime.training.warm"]
"""What ranks import, once for a whole test run: the first to start the server decides what it holds. The last one
freezes what is there by then."""

PATIENCE_S = 300.0
"""How long a test waits for what comes at once on a quiet machine. No test may fail because the machine is busy, so
whatever is not waited out on purpose gets this much time; tests/project/test_waits.py holds every test to it."""
AFTER_FAILURE_S = 60.0
"""How long `Ranks.run`, whose test fails in any case, still listens to the other ranks for what they have to say."""
SHOWN_CHARACTERS = 4000
"""Of what a rank has printed."""
OWN_PORTS = (12000, 32000)
"""Below those that Linux gives to connections (net.ipv4.ip_local_port_range)."""


SERVER_ADDRESS = "OCTOPIPE_TESTS_SERVER"
"""The environment variable by which the workers of a test run know the server that they share."""


def start_server() -> None:
    """Start the server that ranks are forked from; it imports while the first tests run."""
    if SERVER_ADDRESS in os.environ:
        _share_server(os.environ[SERVER_ADDRESS])
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.get_context("forkserver").set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def start_server_for_workers() -> None:
    """Start one server for all workers of a test run, in the process that starts them: what it imports takes ten
    seconds of a core. It ends with that process, which alone holds the pipe that keeps it alive.

    From Python 3.14 on, a server forks only for the process that started it, so every worker has its own."""
    if hasattr(forkserver._forkserver, "_forkserver_authkey"):  # type: ignore[attr-defined]
        return
    start_server()
    os.environ[SERVER_ADDRESS] = str(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]


def _share_server(address: str) -> None:
    """From here on, this process forks its ranks from the server at this address, and starts none of its own."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_address == address:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # every rank is handed a copy of it
    # Both names: multiprocessing calls the method, whoever wants a server early calls the function of the module.
    server.ensure_running = forkserver.ensure_running = resource_tracker.ensure_running


def free_port() -> int:
    """A port for a process that can only be told a number. The system gives ports of its own range to every connection,
    hundreds in a moment of a test run: one that is free now may be taken before it is used. So it is of another."""
    for port in random.SystemRandom().sample(range(*OWN_PORTS), 100):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port of {OWN_PORTS} is free")


def same_numbers() -> None:
    """From here on, every process draws what it would draw if nothing had been drawn before."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        _seed_only_what_is_there(sys.modules["torch"])
        sys.modules["torch"].manual_seed(0)


@functools.cache
def _seed_only_what_is_there(torch: Any) -> None:
    """`torch.manual_seed` keeps every seed, with a printed stack of its caller, for each kind of accelerator that could
    start later. On a machine without one, that took a twentieth of the time of all tests."""
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None


def _serve(rank: int, size: int, port: int, pipe: Any, backend: str, environment: dict[str, str], said: str) -> None:
    os.environ.update(environment)
    with open(said, "ab") as file:  # what ranks print would fill the screen on which a failure is looked for
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    filter_in_a_rank()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    from octopipe.runtime.ranks.world import World

    world = World(dist.group.WORLD)
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # whoever ran the tests has ended
            break
        if job is None:
            break
        function, args = job
        same_numbers()
        try:
            pipe.send((True, function(world, *args)))
        except BaseException as error:
            pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


def _fork_ranks(imports: Sequence[str], starts: Sequence[tuple[Any, ...]]) -> None:
    filter_in_a_rank()
    for name in imports:
        importlib.import_module(name)
    gc.freeze()
    fork = mp.get_context("fork")
    ranks = [fork.Process(target=_forked, args=(rank, starts)) for rank in range(len(starts))]
    for rank in ranks:
        rank.start()
    for start in starts:
        start[3].close()
    for rank in ranks:
        rank.join()


def _forked(rank: int, starts: Sequence[tuple[Any, ...]]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the process it was forked from, whatever it waits for
    for other, start in enumerate(starts):
        if other != rank:
            start[3].close()
    _serve(*starts[rank])


class Ranks:
    """`size` processes in one world; `run(function, *args)` calls `function(world, *args)` on all of them.

    `environment(rank)`: what a rank has in its environment besides. `imports`: what takes long to import, once for all
    of them, in a process of its own that the ranks are forked from.
    """

    def __init__(
        self,
        size: int,
        backend: str = "gloo",
        environment: Callable[[int], dict[str, str]] = lambda rank: {},
        imports: Sequence[str] = (),
    ):
        from octopipe.runtime.ranks.rendezvous import local_store

        # Forked from a server that has imported torch once: a rank starts in a fraction of a second.
        start_server()
        context = mp.get_context("forkserver")
        # The store is the test's, at a port that it holds from the beginning: nobody else can take it.
        self._store = local_store()
        self.size = size
        self.broken = False
        """A job failed: its ranks may be waiting for each other still."""
        self._pipes, self.processes = [], []
        ends = [context.Pipe() for _ in range(size)]
        self._pipes = [mine for mine, _ in ends]
        self._said = tempfile.TemporaryDirectory(prefix="octopipe-ranks-")
        starts = [
            (rank, size, self._store.port, ends[rank][1], backend, environment(rank), self._file(rank))
            for rank in range(size)
        ]
        if imports:
            self.processes = [context.Process(target=_fork_ranks, args=(imports, starts), daemon=False)]
        else:
            self.processes = [context.Process(target=_serve, args=args, daemon=True) for args in starts]
        for process in self.processes:
            process.start()
        for _, theirs in ends:
            theirs.close()

    def _file(self, rank: int) -> str:
        """Where everything goes that a rank prints."""
        return str(Path(self._said.name, f"rank-{rank}.txt"))

    def printed(self) -> str:
        """The end of what every rank has printed, for whoever reads of a failure."""
        texts = []
        for rank in range(self.size):
            with contextlib.suppress(OSError):
                if text := Path(self._file(rank)).read_text(errors="replace").strip():
                    texts.append(f"rank {rank} printed: {text[-SHOWN_CHARACTERS:]}")
        return "\n".join(texts)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        for pipe in self._pipes:
            pipe.send((function, args))

    def results(
        self,
        timeout_s: float = 2 * PATIENCE_S,
        of: Sequence[int] | None = None,
        after_failure_s: float = PATIENCE_S,
    ) -> list[tuple[bool, Any]]:
        """(worked, result or error text) of every rank, or of those in `of`; a dead rank's is (False, "dead").

        Ranks that wait for one that has failed are given `after_failure_s` to hear of it: what it said is the news.
        """
        pipes = self._pipes if of is None else [self._pipes[rank] for rank in of]
        out: dict[Any, tuple[bool, Any]] = {}
        end = time.monotonic() + timeout_s
        while len(out) < len(pipes):
            answered = wait([p for p in pipes if p not in out], max(0.0, end - time.monotonic()))
            if not answered:
                break
            for pipe in answered:
                try:
                    out[pipe] = pipe.recv()
                except (EOFError, OSError):
                    out[pipe] = (False, "dead")
                if not out[pipe][0]:
                    end = min(end, time.monotonic() + after_failure_s)
        return [out.get(pipe, (False, "no answer")) for pipe in pipes]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(function, *args)
        results = self.results(after_failure_s=AFTER_FAILURE_S)
        bad = [text for worked, text in results if not worked]
        self.broken = bool(bad)
        assert not bad, "\n".join([*bad, self.printed()])
        return [result for _, result in results]

    def kill(self) -> None:
        """End ranks that nobody waits for: some of them may hang."""
        for process in self.processes:
            process.kill()
        self.close()

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._said.cleanup()


_SHARED: dict[tuple[int, tuple[str, ...]], Ranks] = {}


def shared_ranks(size: int, imports: tuple[str, ...] = ()) -> Ranks:
    """One world per size, and per what it has imported, for all tests of a file; a broken one is replaced."""
    world = _SHARED.get((size, imports))
    if world is None or world.broken:
        if world is not None:
            world.close()
        _SHARED[size, imports] = world = Ranks(size, imports=imports)
    return world


def close_shared() -> None:
    """End the shared worlds: every group that tests made keeps a thread in every rank, which wakes up all the time."""
    while _SHARED:
        _SHARED.popitem()[1].close()
