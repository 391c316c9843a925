"""The process of one rank: how it starts, what it reports to the launcher, how it ends.

Knows: the pipe to the launcher, the rendezvous, that it ends when its parent ends, and one-line errors. Does not know:
other ranks' processes (`launch`, `watch`), or what the work is.

Messages in the pipe are encoded without pickle (see `wire/encoding.py`).
"""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from octopipe.base.errors import OctoPipeError

CLEAN_UP_S = 5.0
"""Maximum time for clean-up functions of libraries when a rank ends."""


def no_report(_: Any) -> None:
    """Ignores every report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The position of a rank in its run."""

    rank: int
    size: int
    local_rank: int
    """Index among the ranks of this machine, which selects the GPU."""
    tell: Callable[[Any], None] = field(default=no_report)
    """Send a message of plain values to the process that started the run. Only messages of the first rank are passed
    on."""


class RankError(OctoPipeError):
    """A run that failed; `rank` is the one that failed first."""

    def __init__(self, rank: int, message: str):
        self.rank = rank
        super().__init__(message)


Work = Callable[[Seat, Any], Any]


@dataclass(frozen=True, slots=True)
class Start:
    """The parameters with which a rank process starts."""

    work: Work
    size: int
    payload: Any
    backend: str
    port: int
    threads: int
    group_timeout_s: float


HARMLESS_WARNINGS = (
    ".*no current CUDA context.*",  # autograd's threads call cuBLAS first, which then finds the context
    "resource_tracker: There appear to be.*leaked",  # ranks end without clean-up, and the system frees their resources
)
"""Warnings that are suppressed because a user cannot act on them."""


def _quiet() -> None:
    import logging
    import warnings

    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # torch's compiler warns about few multiprocessors, which a share of a GPU has.
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)


def begin(start: Start, rank: int, pipe: Connection) -> None:
    """The main function of a rank process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it, too, and ends the ranks
    _quiet()
    threading.Thread(target=_follow_parent, daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(start.size))
    stay_local()
    # Output of libraries must not mix with the JSON that the parent prints: send it to standard error.
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(kind: str, word: Any) -> None:
        from octopipe.runtime.wire.encoding import encoded

        with lock:
            pipe.send_bytes(encoded((kind, word)))

    good = False
    if start.backend == "nccl":
        load_kernels_early()
    try:
        import torch
        import torch.distributed as dist

        from octopipe.runtime.wire.telling import moment, naming_lost_peers

        torch.set_num_threads(start.threads)
        patience = timedelta(seconds=start.group_timeout_s)
        with moment("during the rendezvous"), naming_lost_peers(start.group_timeout_s):
            store = dist.TCPStore("127.0.0.1", start.port, is_master=False, timeout=patience)
            dist.init_process_group(start.backend, store=store, rank=rank, world_size=start.size, timeout=patience)
            all_here(store, start.size)
        send("ready", None)
        tell = partial(send, "told") if rank == 0 else no_report
        seat = Seat(rank=rank, size=start.size, local_rank=rank, tell=tell)
        send("done", start.work(seat, start.payload))
        dist.destroy_process_group()
        good = True
    except BaseException as error:
        with contextlib.suppress(OSError):  # the parent has closed the pipe
            send("failed", (described(error), _is_consequence(error)))
    finally:
        sys.stderr.flush()
        clear_shared_memory(os.getpid())
        give_back_semaphores()
        pipe.close()  # the last of all: the parent ends ranks as soon as all pipes are closed
        # Threads of a broken process group would keep a failed rank from ending.
        os._exit(0 if good else 1)


def all_here(store: Any, size: int) -> None:
    """Return once every rank has reached this call.

    A rank has joined a group as soon as its own connections exist. A rank with little work could end, and close them,
    while another is still joining; that rank would then report a lost peer.
    """
    if store.add("octopipe/here", 1) == size:
        store.set("octopipe/all here", "1")
    store.wait(["octopipe/all here"])


def load_kernels_early() -> None:
    """Make CUDA load all kernels when it starts instead of each at its first use.

    Loading a kernel waits for the whole device. If the device waits to receive from a rank whose host is also loading a
    kernel, both would wait forever. torch selects lazy loading unless the variable is set.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def stay_local() -> None:
    """Make ranks that are all on this host listen on the loopback interface only, unless the user has chosen another
    one."""
    loopback = next((name for name in ("lo", "lo0") if os.path.exists(f"/sys/class/net/{name}")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def clear_shared_memory(pid: int) -> None:
    """Remove the files in which torch counts references to shared GPU memory; a process that ends at once leaves them
    behind."""
    for path in glob.glob(f"/dev/shm/torch_{pid}_*"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def give_back_semaphores() -> None:
    """Release the locks that libraries created, as an ordinary end of the process would (a progress bar of `datasets`
    creates two). A process that ends at once leaves them to Python's resource tracker, which warns about each. Some of
    the functions that run here wait for processes that a library started; they get `CLEAN_UP_S`, so that no rank
    hangs."""
    finalize = getattr(multiprocessing.util, "_run_finalizers", None)
    if finalize is not None:
        cleaning = threading.Thread(target=_suppressed, args=(finalize,), daemon=True)
        cleaning.start()
        cleaning.join(CLEAN_UP_S)


def _suppressed(finalize: Callable[[int], None]) -> None:
    with contextlib.suppress(BaseException):
        finalize(0)


def described(error: BaseException) -> str:
    """An error as one line. An unexpected error also states where it was raised; OCTOPIPE_TRACEBACK=1
    (or its former name OCTOPIPE_TRACE) prints the traceback."""
    from octopipe.runtime.wire.telling import peer_words

    if any(os.environ.get(name, "") not in ("", "0") for name in ("OCTOPIPE_TRACEBACK", "OCTOPIPE_TRACE")):
        traceback.print_exception(error)
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, OctoPipeError):
        return f"{error}{notes}"
    if words := peer_words(error):
        return f"{words}{notes}"
    place = next(iter(traceback.extract_tb(error.__traceback__)[-1:]), None)
    where = "" if place is None else f" ({os.path.basename(place.filename)}:{place.lineno})"
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{where}{notes}"


def _is_consequence(error: BaseException) -> bool:
    """Whether a rank failed because another one did."""
    from octopipe.runtime.wire.telling import PeerError, peer_words

    return isinstance(error, PeerError) or peer_words(error) is not None


def attributed(rank: int, text: str) -> str:
    return text if text.startswith(f"rank {rank} ") else f"rank {rank}: {text}"


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        clear_shared_memory(os.getpid())
        os._exit(1)
