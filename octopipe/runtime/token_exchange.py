"""Exchange of token rows between the ranks of an expert group that share one GPU, as an autograd function.

Knows: one ring (`wire/transports/ring.py`) to every other member, and that all members call in the same order. Does not
know: which rows go where, or what is done with them.

NCCL does not support two ranks on one device, and gloo copies CUDA tensors through the host. Here the GPU's copy
engines move rows through arenas in pinned host memory on separate streams: computation continues concurrently, and no
host waits for a device. Within a pair of ops, the other op runs in the meantime (`turns.py`). On a CPU, the same rings
are in shared files, for ranks of one host.

    moved = TokenExchange(ep_group, device)
    theirs = moved(rows)                                     # as many rows to every member
    theirs = moved(rows, send=[3, 5], receive=[4, 4])        # rows to and from each member
    ...
    moved.close()
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.ranks.world import World
from octopipe.runtime.turns import failed_elsewhere, run_exchange
from octopipe.runtime.typed_function import Function, Gradients
from octopipe.runtime.wire.telling import PeerError
from octopipe.runtime.wire.transports.arenas import Arenas
from octopipe.runtime.wire.transports.cuda_ipc import CHUNK_BYTES, CHUNKS
from octopipe.runtime.wire.transports.ring import wait_on_host
from octopipe.runtime.wire.transports.ring_setup import open_rings

Splits = Sequence[int] | None


class TokenExchange:
    """An all-to-all between the members of a group. Collective: all members create, call and close it in the same
    order."""

    octopipe_no_state = True  # the rings' counters are not the state of a layer that has one (`stages/places.py`)

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str,
        *,
        timeout_s: float = 300.0,
        chunk_bytes: int = CHUNK_BYTES,
        chunks: int = CHUNKS,
    ):
        self._world = world = World(group)
        self.device, self.timeout_s = torch.device(device), timeout_s
        self._arenas = arenas = Arenas(self.device)
        self.rank, self.size = world.rank, world.size
        others = [r for r in range(self.size) if r != self.rank]
        self._rings = open_rings(
            arenas,
            rank=self.rank,
            targets=others,
            sources=others,
            new_arena=lambda: arenas.arena((chunks, chunk_bytes)),
            gather=world.gather,
            until=self._until,
        )

    def __call__(self, rows: Tensor, *, send: Splits = None, receive: Splits = None) -> Tensor:
        """Return the rows that all members send to this one, in the order of the members; differentiable.

        `send` and `receive` are the numbers of rows that go to and come from every member; by default all are equal.
        """
        send = self._splits(send, rows.shape[0], "send")
        receive = self._splits(receive, rows.shape[0], "receive")
        return _Exchanged.apply(rows, self, send, receive)

    def _splits(self, splits: Splits, rows: int, name: str) -> tuple[int, ...]:
        if splits is None:
            if rows % self.size:
                raise OctoPipeError(f"{rows} rows for {self.size} ranks; say how many each gets ({name}=[...])")
            return (rows // self.size,) * self.size
        if len(splits) != self.size or (name == "send" and sum(splits) != rows):
            raise OctoPipeError(
                f"{name}={list(splits)} for {rows} rows and {self.size} ranks; give one number per rank"
            )
        return tuple(int(n) for n in splits)

    def start(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Moving:
        """Start an exchange; `rows` must not change until it was waited for."""
        rows = rows.contiguous()
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        given, taken = rows.split(list(send)), out.split(list(receive))
        taken[self.rank].copy_(given[self.rank])
        # Receives first: a send whose arena is full waits on the host, while receives continue.
        receivers, senders = self._rings.receivers.items(), self._rings.senders.items()
        works: list[Any] = [ring.receive(taken[peer]) for peer, ring in receivers if taken[peer].numel()]
        works += [ring.send(given[peer]) for peer, ring in senders if given[peer].numel()]
        return Moving(out, rows, works, self.timeout_s)

    def _until(self, holds: Any) -> None:
        wait_on_host(holds, self.timeout_s, self._lost)

    def _lost(self) -> bool:
        why = failed_elsewhere()
        if why:
            raise PeerError(f"an exchange of tokens cannot complete: {why}")
        return False

    def close(self) -> None:
        """Release the shared memory."""
        self._rings.close()
        self._arenas.close()


class Moving(NamedTuple):
    """An exchange that has been started."""

    out: Tensor
    rows: Tensor
    works: list[Any]
    timeout_s: float

    def wait(self) -> Tensor:
        """Return the received rows; work that is issued from now on can use them."""
        for work in self.works:
            work.wait(timedelta(seconds=self.timeout_s))
        return self.out


class _Exchanged(Function):
    """Exchanges rows; its backward sends every gradient row back to where its row came from."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, moved: TokenExchange, send: tuple[int, ...], receive: tuple[int, ...]
    ) -> Tensor:
        ctx.moved, ctx.splits = moved, (send, receive)
        return run_exchange(lambda: moved.start(rows, send, receive), moved.size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        send, receive = ctx.splits
        moved = ctx.moved
        return run_exchange(lambda: moved.start(gradient, receive, send), moved.size), None, None, None
