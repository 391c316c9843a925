"""Exchange of values between ranks over a gloo group, with readable errors when a rank does not answer.

Knows: how the bytes of a value (see `encoding`) reach all members of a group, or one. Does not know: what values mean.

gloo's own errors name sockets and source lines. Here the error of a failed wait states what the ranks were doing
(`moment`), and whether a rank was lost or did not answer in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.wire.encoding import decoded, empty_aside, encoded

_OF_PEERS = ("gloo/", "connectfullmesh", "tcpstore", "c10d")
"""Texts in lower case that mark an error of torch.distributed about other ranks. (The word "peer" alone does not: it
may occur in a user's own errors.)"""
_moment: ContextVar[str] = ContextVar("moment", default="while ranks agreed on what to run")


class WireError(RuntimeError):
    """The error of a wait for a mailbox or a ring if the peer is gone or time is up; corresponds to the errors of
    gloo."""


class PeerError(OctoPipeError):
    """Another rank did not answer; the receiver of this error should look for the rank that failed first."""


def gather_values(group: Any, item: Any) -> list[Any]:
    """The items of all ranks (collective), over a group of any backend."""
    place = _place(group)
    data = torch.frombuffer(bytearray(encoded(item)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=place) for _ in range(group.size())]
    with naming_lost_peers():
        group.allgather([sizes], [torch.tensor([data.numel()], device=place)]).wait()
        longest = max(int(n) for n in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=place)
        padded[: data.numel()] = data.to(place)
        parts = [torch.zeros(longest, dtype=torch.uint8, device=place) for _ in range(group.size())]
        group.allgather([parts], [padded]).wait()
        return [decoded(part[: int(n)].cpu().numpy().tobytes()) for part, n in zip(parts, sizes)]


def broadcast_value(group: Any, item: Any, root: int) -> Any:
    """The item of the group's member `root`, on all members, over a group of any backend."""
    place, leads = _place(group), group.rank() == root
    mine = encoded(item) if leads else b""
    size = torch.tensor([len(mine)], device=place)
    with naming_lost_peers():
        _broadcast(group, size, root)
        data = torch.empty(int(size), dtype=torch.uint8, device=place)
        if leads:
            data.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        _broadcast(group, data, root)
        return item if leads else decoded(data.cpu().numpy().tobytes())


def _broadcast(group: Any, tensor: Tensor, root: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def _place(group: Any) -> torch.device:
    """The device on which a group's tensors must be."""
    name = str(dist.get_backend(group)) if isinstance(group, dist.ProcessGroup) else str(group.name())
    return torch.device("cuda", torch.cuda.current_device()) if name == "nccl" else torch.device("cpu")


def send_value(group: Any, item: Any, to: int) -> None:
    """Send a value to a member of a gloo group; its tensors may have any size and are sent one by one."""
    tensors: list[Tensor] = []
    head = torch.frombuffer(bytearray(encoded(item, tensors)), dtype=torch.uint8)
    with naming_lost_peers():
        for one in (torch.tensor([head.numel()]), head, *(_flat(t) for t in tensors if t.numel())):
            group.send([one], to, 0).wait()


def receive_value(group: Any, source: int) -> Any:
    """Receive a value from a member of a gloo group, the counterpart of `send_value`."""
    size = torch.zeros(1, dtype=torch.int64)
    with naming_lost_peers():
        group.recv([size], source, 0).wait()
        head = torch.empty(int(size), dtype=torch.uint8)
        group.recv([head], source, 0).wait()
        data = head.numpy().tobytes()
        tensors = empty_aside(data)
        for one in tensors:
            if one.numel():
                group.recv([_flat(one)], source, 0).wait()
    return decoded(data, tensors)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def naming_lost_peers(timeout_s: float | None = None) -> Iterator[None]:
    """A context that turns gloo's errors about a peer that died or does not answer into a `PeerError`, which states
    what the ranks were doing and what to do.

    Other errors pass through unchanged, so the context may enclose a whole phase.
    """
    try:
        yield
    except RuntimeError as error:
        words = peer_words(error, timeout_s)
        if words is None:
            raise
        raise PeerError(f"{_moment.get()}, {words}") from error


def peer_words(error: BaseException, timeout_s: float | None = None) -> str | None:
    """Describe an error of torch.distributed that is due to another rank; None for other errors."""
    text = " ".join(str(error).split()).lower()
    ours = isinstance(error, dist.DistError | WireError) or any(word in text for word in _OF_PEERS)
    if not isinstance(error, RuntimeError) or not ours:
        return None
    if "timed out" in text or "timeout" in text:
        within = "in time" if timeout_s is None else f"within {timeout_s:g} s"
        return f"not every rank answered {within}; look for one that hangs, or raise the timeout"
    return "a rank was lost; look for the one that ended first"


@contextmanager
def moment(text: str) -> Iterator[None]:
    """A context in which errors of failed waits state, with these words, what the ranks were doing."""
    before = _moment.set(text)
    try:
        yield
    finally:
        _moment.reset(before)
