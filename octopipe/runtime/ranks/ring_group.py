"""Sums of gradients between ranks that share one GPU, through rings between any two of them.

Knows: one ring (`wire/transports/ring.py`) to every other member of a group, how a sum is divided among the members,
and the order in which parts are added. Does not know: what the numbers are, or when a sum is wanted (`reduce.py`).

NCCL does not support two ranks on one device, and gloo takes CUDA tensors through the host, where a reduction can last
longer than the step. Here every member adds up one slice of the numbers, in the order of the members, and sends the
result to all others, so that all of them get the same bits. Every member sends 2 (n - 1) / n times its numbers, as in
the prediction.

A sum runs concurrently with the computation. `all_reduce` only posts it. In `proceed` (between ops and in every wait
for another rank), the host queues everything that is ready: copies on the rings' lanes, additions on a stream of their
own. On a CPU the lanes are threads, and the additions happen in `proceed`. Copies use the copy engines and memory of
the host, as transfers between stages do: within a GPU the multiprocessors would copy, and a copy would wait for kernels
that occupy them (see `arenas.py`).

Why no member can wait forever: every member posts the same messages on a ring in the same order (piece by piece, first
the slices to be added, then the sum of its slice), and no host waits for a sum before it has issued all ops of its
step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.wire.telling import gather_values
from octopipe.runtime.wire.transports.arenas import Arenas
from octopipe.runtime.wire.transports.base import Transport
from octopipe.runtime.wire.transports.ring import Passage, register, unregister, wait_on_host
from octopipe.runtime.wire.transports.ring_setup import open_rings

CHUNK_BYTES, CHUNKS = 4 << 20, 4
PIECE_BYTES = 64 << 20
"""Maximum size of the piece of a sum that is processed at a time, which also bounds the memory for slices received from
other members."""


class RingGroup:
    """The members of a group, with a ring between every two of them (collective: created, used and closed in the same
    order)."""

    def __init__(
        self,
        group: Any,
        device: torch.device,
        *,
        timeout_s: float,
        lost: Callable[[], bool],
        chunk_bytes: int = CHUNK_BYTES,
        chunks: int = CHUNKS,
        piece_bytes: int = PIECE_BYTES,
    ):
        """`group`: a group of the hosts, used to create the rings. `lost`: returns whether a peer is known to be
        lost."""
        self._rank, self._size, self._timeout_s, self._lost = group.rank(), group.size(), timeout_s, lost
        self._piece_bytes = piece_bytes
        self._arenas = arenas = Arenas(device)
        others = [r for r in range(self._size) if r != self._rank]
        self._rings = open_rings(
            arenas,
            rank=self._rank,
            targets=others,
            sources=others,
            new_arena=lambda: arenas.arena((chunks, chunk_bytes)),
            gather=lambda item: gather_values(group, item),
            until=self.until,
        )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """The stream on which parts are added, concurrent with the computation."""
        self._pieces: deque[_Piece] = deque()
        """Pieces that are not yet added up; only the first of them has messages in flight."""
        self._handing: deque[_Piece] = deque()
        """Pieces that are added up; the sums of their slices are being sent to all members."""
        register(self)

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "rings"

    def all_reduce(self, tensor: Tensor) -> RingSum:
        """Start a sum in place over all members, which must start their sums in the same order. The host does not wait,
        and the tensor must not be used until the sum has been waited for."""
        made = RingSum(self, tensor)
        parts = tensor.view(-1).split(max(1, self._piece_bytes // tensor.element_size()))
        made.left = len(parts)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._pieces.extend(_Piece(made, part.tensor_split(self._size)) for part in parts)
        self.proceed()
        return made

    def proceed(self) -> None:
        """Queue the operations that no longer wait for another member."""
        while self._pieces and self._advanced(self._pieces[0]):
            self._handing.append(self._pieces.popleft())
        while self._handing and all(passage.over() for passage in self._handing[0].under_way):
            piece = self._handing.popleft()
            with self._beside():
                _wait(piece.under_way)
            piece.under_way = []
            piece.whole.left -= 1
            if piece.whole.left == 0 and self._stream is not None:
                piece.whole.done = self._stream.record_event()

    def _advanced(self, piece: _Piece) -> bool:
        """Whether this member's slice of a piece is summed and being sent; posts the messages of the piece if that has
        not happened."""
        if piece.parts is None:
            with self._beside():
                own = piece.slices[self._rank]
                piece.parts = {peer: torch.empty_like(own) for peer in self._rings.receivers if own.numel()}
                piece.under_way = self._posted(piece.parts, piece.slices)
        if not all(passage.over() for passage in piece.under_way):
            return False
        with self._beside():
            _wait(piece.under_way)
            self._add_up(piece)
            own = piece.slices[self._rank]
            others = {peer: piece.slices[peer] for peer in self._rings.receivers}
            piece.under_way = self._posted(others, [own] * self._size)
        return True

    def _posted(self, received: dict[int, Tensor], sent: Sequence[Tensor]) -> list[Passage]:
        """Messages from and to all members; empty messages are left out at both ends."""
        passages = [self._rings.receivers[peer].receive(part) for peer, part in received.items() if part.numel()]
        return passages + [ring.post(sent[peer]) for peer, ring in self._rings.senders.items() if sent[peer].numel()]

    def _add_up(self, piece: _Piece) -> None:
        own, parts = piece.slices[self._rank], piece.parts
        assert parts is not None
        if not own.numel():
            return
        rows = [parts.get(r, own) for r in range(self._size)]
        total = torch.add(rows[0], rows[1], out=own if self._size == 2 else None)
        for row in rows[2:]:
            total.add_(row)
        if total is not own:
            own.copy_(total)
        piece.parts = {}

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait on the host until a condition holds, while everything that can proceed does so."""
        wait_on_host(holds, self._timeout_s, self._lost)

    def close(self) -> None:
        """Release the shared memory."""
        unregister(self)
        self._rings.close()
        self._pieces.clear()
        self._handing.clear()
        self._arenas.close()


def summing(
    group: Any, transport: Transport, device: torch.device, timeout_s: float, failed: Callable[[], bool]
) -> Any:
    """The group over which gradients are summed: rings if the pipeline's ranks share a device (collective). `failed`:
    returns whether a rank has reported an error."""
    if transport.name != "cuda_ipc":
        return group
    return RingGroup(group, device, timeout_s=timeout_s, lost=lambda: bool(transport.dead()) or failed())


class RingSum:
    """A sum that has been started."""

    def __init__(self, group: RingGroup, tensor: Tensor):
        self._group, self._tensor = group, tensor
        self.left = 0
        """The number of pieces that are not complete."""
        self.done: Any = None
        """On a GPU: the event after which the sum is complete; set once everything is queued."""

    def over(self) -> bool:
        """Whether `wait` would return without making the host wait."""
        return self.left == 0

    def wait(self, timeout: timedelta) -> None:
        """Wait until the sum is complete on the host; on a GPU, computation that is issued afterwards waits on the
        device."""
        if self.left:
            self._group.until(self.over)
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)


class _Piece:
    """A part of a sum, divided into one slice for each member to add up."""

    __slots__ = ("parts", "slices", "under_way", "whole")

    def __init__(self, whole: RingSum, slices: Sequence[Tensor]):
        self.whole, self.slices = whole, slices
        self.parts: dict[int, Tensor] | None = None
        """For each other member, its values of this rank's slice; None before they are posted, empty once added."""
        self.under_way: list[Passage] = []


def _wait(passages: Sequence[Passage]) -> None:
    for passage in passages:
        passage.wait(timedelta(0))
