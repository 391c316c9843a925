"""Point to point over NCCL: one communicator per in-order queue of the channel model.

Knows: NCCL through torch's process groups. Does not know: the protocol of messages (`headed`).

NCCL runs the operations of one communicator in issue order, and both ends must agree on it; lowering ensures that they
do. Under `directed`, every direction of a pair of ranks has its own communicator (and stream); under `pair` and the
stricter models, every pair has one. Only the device waits: `wait` makes the current stream wait, and the host
continues. The pipeline's watchdog (`pending_board`) detects a peer that does not answer after `timeout_s`; NCCL's own
watchdog, which cannot name ops, is disabled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.ranks.world import Group, StreamWork, World
from octopipe.runtime.slots import RankProgram, Slot
from octopipe.runtime.wire.messages import Leaf
from octopipe.runtime.wire.transports.ordered import OrderedTransport

log = logging.getLogger("octopipe.nccl")


class NcclTransport(OrderedTransport):
    """See the module."""

    name = "nccl"

    def __init__(self, world: World, device: torch.device, *, directed: bool, timeout_s: float):
        super().__init__(world, device, timeout_s=timeout_s)
        self._world, self._directed = world, directed
        self._groups: dict[tuple[int, int], Group] = {}

    def _queue(self, slot: Slot) -> tuple[int, int]:
        me = self._world.rank
        way = (me, slot.peer) if slot.sending else (slot.peer, me)
        return way if self._directed else (min(way), max(way))

    def open(self, program: RankProgram) -> None:
        super().open(program)
        slots = program.slots
        _check_connections(len({self._queue(s) for s in slots}))
        if os.environ.get("CUDA_MODULE_LOADING") != "EAGER":
            log.warning(
                "CUDA loads a kernel when it is first used, and then waits for the whole device: while receives are "
                "pending, the first step can hang; import octopipe.Pipeline before CUDA starts, or set "
                "CUDA_MODULE_LOADING=EAGER"
            )
        # Torch warns that messages of an eagerly initialised group are serialised, which is what a queue needs.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        me, hello = self._world.rank, torch.zeros(1, device=self.device)
        for pair in sorted({self._queue(s) for s in slots}):  # all ranks in the same order: no deadlock
            # NCCL's watchdog would end the process with a long stack trace before ours can name the pending ops.
            with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
                group = self._world.new_group(pair, "nccl", f"queue-{self._directed:d}", timeout_s=self.timeout_s)
            # The communicator would be created at the first message; create it now, while no rank computes.
            group.eager_connect_single_device(self.device)
            (group.send([hello], 1, 0) if me == pair[0] else group.recv([hello], 0, 0)).wait()
            torch.cuda.synchronize(self.device)
            self._groups[pair] = group

    def _end(self, slot: Slot) -> tuple[Group, int]:
        pair = self._queue(slot)
        return self._groups[pair], pair.index(slot.peer)

    def _send_body(self, slot: Slot, tensor: Tensor) -> Any:
        group, peer = self._end(slot)
        return StreamWork(group.send([tensor], peer, 0))

    def _send_filler(self, slot: Slot, leaf: Leaf) -> Any:
        return self._send_body(slot, self._empty(leaf))

    def _post_body(self, slot: Slot, leaf: Leaf) -> tuple[Tensor, Any]:
        group, peer = self._end(slot)
        buffer = self._empty(leaf)
        return buffer, StreamWork(group.recv([buffer], peer, 0))

    def close(self) -> None:
        super().close()
        for group in self._groups.values():
            with suppress(RuntimeError):  # a peer is gone, which is reported elsewhere
                group.shutdown()
        self._groups.clear()


def _check_connections(queues: int) -> None:
    """Raise an error if there are too few hardware queues: a waiting receive that shares a queue with the computation
    would block it forever."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    given = os.environ.get(name, "")
    if given.isdigit() and int(given) <= queues:
        raise OctoPipeError(
            f"with {name}={given}, the computation and {queues} queues of messages share {given} hardware queues, "
            "where an operation can block the one that it waits for; unset it, or set it to "
            f"{min(32, 2 * queues + 2)} before CUDA starts"
        )


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A context in which the environment variable has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
