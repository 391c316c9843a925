"""Rendezvous of the ranks: on this host over the loopback interface, or as torchrun, Slurm or a user's script specify.

Knows: the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, sockets, timeouts. Does not know: processes.

torch's own rendezvous waits in C++, where signals are not handled, and reports errors with forty stack frames.
Therefore everything that can be checked in advance is checked here, and the remaining wait runs in a separate thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from octopipe.base.errors import OctoPipeError

LOOPBACK_S = 5.0
"""Timeout of the connection of this host to itself."""
TRY_EVERY_S = 0.2
MOST_RANKS = 1 << 20


class Place(NamedTuple):
    """The position of this process according to its launcher."""

    rank: int
    size: int
    local_rank: int


def place_from(known: Mapping[str, str]) -> Place:
    """The position according to the environment; raises if its variables contradict each other.

    >>> place_from({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"})
    Place(rank=1, size=2, local_rank=1)
    """
    size = _number(known, "WORLD_SIZE", 1, MOST_RANKS)
    rank = _number(known, "RANK", 0, MOST_RANKS)
    if rank >= size:
        raise OctoPipeError(f"RANK is {rank} and WORLD_SIZE {size}; ranks are counted from 0 to {size - 1}")
    if size > 1:
        if not known.get("MASTER_ADDR"):
            raise OctoPipeError("MASTER_ADDR is not set; set it to the first rank's host, or start ranks with torchrun")
        _number(known, "MASTER_PORT", 1, 65535)
    return Place(rank, size, _number(known, "LOCAL_RANK", 0, MOST_RANKS) if "LOCAL_RANK" in known else rank)


def _number(known: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = known.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) <= most):
        what = "is not set" if not text else f"is {text[:40]!r}"
        raise OctoPipeError(f"{name} {what}; give a whole number from {least} to {most}, or start ranks with torchrun")
    return int(text)


def local_store() -> Any:
    """A store that is reachable only from this host; torch's own would listen on every interface."""
    import torch.distributed as dist

    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        listening.settimeout(LOOPBACK_S)
        # Torch would wait for minutes if the connection is blocked.
        with socket.create_connection(listening.getsockname(), timeout=LOOPBACK_S):
            listening.accept()[0].close()
        listening.settimeout(None)
    except OSError as error:
        listening.close()
        raise OctoPipeError(
            f"the rendezvous failed: this host does not answer itself on 127.0.0.1 ({error.strerror or error}); bring "
            "its loopback interface up (ip link set lo up), and free a port"
        ) from None
    port, handle = listening.getsockname()[1], listening.detach()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=handle)


def rendezvous(place: Place, backend: str, timeout_s: float) -> None:
    """Join the ranks that something else has started, within this time; signals are handled while waiting."""
    import torch.distributed as dist

    from octopipe.runtime.wire.telling import PeerError, peer_words

    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    end = time.monotonic() + timeout_s
    if not _serves_the_store(place):
        _wait_for_port(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), where, timeout_s)
    left = timedelta(seconds=max(end - time.monotonic(), 1.0))
    try:
        # `timeout` applies to the group's collectives, too; the rendezvous itself has only the time that is left.
        aside(lambda: dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s)), left.total_seconds())
    except TimeoutError:
        raise PeerError(_nobody(where, place, timeout_s)) from None
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        # Checked before `peer_words`, because the store's error for a port in use names c10d, too.
        if "in use" in text or "EADDRINUSE" in text:
            raise OctoPipeError(
                f"the rendezvous failed at {where}: the port is in use; set another MASTER_PORT"
            ) from None
        if peer_words(error, timeout_s) is not None:
            raise PeerError(_nobody(where, place, timeout_s)) from None
        raise OctoPipeError(
            f"the rendezvous failed at {where}: {text[:160]}; check MASTER_ADDR and MASTER_PORT"
        ) from None


def _nobody(where: str, place: Place, timeout_s: float) -> str:
    return (
        f"during the rendezvous at {where}, not every rank answered within {timeout_s:g} s (this is rank {place.rank} "
        f"of {place.size}); look for one that hangs or was never started, check RANK and WORLD_SIZE, or raise the "
        "timeout"
    )


def _serves_the_store(place: Place) -> bool:
    """Whether this process serves the store of the rendezvous: the first rank does, unless torchrun's agent does."""
    return place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _wait_for_port(host: str, port: int, where: str, timeout_s: float) -> None:
    """Wait until the port accepts connections; raises a one-line error otherwise."""
    from octopipe.runtime.wire.telling import PeerError

    end = time.monotonic() + timeout_s
    why = "nobody listens there"
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(5.0, end - time.monotonic()))):
                return
        except socket.gaierror:
            raise OctoPipeError(f"MASTER_ADDR {host[:80]!r} cannot be resolved to a host; check the name") from None
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() >= end:
            raise PeerError(
                f"the rendezvous failed at {where}: rank 0 did not answer within {timeout_s:g} s ({why}); start it, "
                "check RANK, MASTER_ADDR and MASTER_PORT, or raise the timeout"
            )
        time.sleep(TRY_EVERY_S)


def aside(call: Callable[[], Any], seconds: float) -> None:
    """Run a call that waits in C++ in a separate thread, so that this thread can handle signals; may raise
    TimeoutError."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="octopipe rendezvous", daemon=True)
    thread.start()
    end = time.monotonic() + seconds + 2.0  # later than the call's own timeout, whose error says more
    while thread.is_alive():
        thread.join(TRY_EVERY_S)
        if time.monotonic() > end:
            raise TimeoutError
    for error in raised:
        with contextlib.suppress(AttributeError):
            error.__traceback__ = None
        raise error
