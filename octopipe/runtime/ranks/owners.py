"""Which data-parallel replica updates which parameter, where optimizer state is sharded over replicas (ZeRO-1).

Knows: an assignment of whole parameters that is computed identically on every replica, how updated values reach the
other replicas, and how state is collected on the first one for a checkpoint. Does not know: optimizers or precision
(`precision.py`).

Gradients are all-reduced over the replicas as without sharding, so clipping and gradient checks do not change. What is
saved is the memory of optimizer state (moments and master weights), of which every replica holds only its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.runtime.ranks.world import World, backend_name, broadcast
from octopipe.runtime.wire.telling import broadcast_value, naming_lost_peers, receive_value, send_value

BUCKET_BYTES = 25 << 20


class Owners:
    """Assigns every parameter to an owner, which is one of the replicas. All replicas must pass the same parameters in
    the same order."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World):
        self._world, self.me = world, world.replica
        load = [0] * world.num_replicas
        self._owner: dict[nn.Parameter, int] = {}
        # The largest first, each to the replica that has the fewest elements so far: the parts differ little.
        for number in sorted(range(len(parameters)), key=lambda k: (-parameters[k].numel(), k)):
            owner = load.index(min(load))
            self._owner[parameters[number]] = owner
            load[owner] += parameters[number].numel()
        self._parameters = list(parameters)

    def owns(self, parameter: nn.Parameter) -> bool:
        return self._owner.get(parameter) == self.me

    @torch.no_grad()
    def spread(self) -> None:
        """Broadcast the values of every parameter from its owner (collective)."""
        running: list[tuple[Any, Tensor, list[nn.Parameter]]] = []
        with naming_lost_peers():
            for owner in range(self._world.num_replicas):
                mine = owner == self.me
                for bucket in _buckets([p for p in self._parameters if self._owner[p] == owner]):
                    flat = torch.cat([p.detach().reshape(-1) for p in bucket]) if mine else _room(bucket)
                    running.append((broadcast(self._world.dp_group, flat, owner), flat, [] if mine else bucket))
            for work, flat, bucket in running:
                work.wait()
                at = 0
                for parameter in bucket:
                    parameter.copy_(flat[at : at + parameter.numel()].view(parameter.shape))
                    at += parameter.numel()

    def collected(self, of: Callable[[nn.Parameter], Any]) -> dict[nn.Parameter, Any]:
        """On the first replica, `of(parameter)` for every parameter that another replica owns (collective)."""
        out: dict[nn.Parameter, Any] = {}
        group = self._world.dp_group
        directly = "nccl" not in backend_name(group)
        for parameter in self._parameters:
            owner = self._owner[parameter]
            mine = owner == self.me
            if owner == 0:
                continue
            if not directly:  # NCCL moves device memory only: broadcast one parameter at a time to all
                value = broadcast_value(group, of(parameter) if mine else None, owner)
                if self.me == 0:
                    out[parameter] = value
            elif mine:
                send_value(group, of(parameter), 0)
            elif self.me == 0:
                out[parameter] = receive_value(group, owner)
        return out


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters divided into messages of limited size, each for one dtype and device."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for members in kinds.values():
        bucket: list[nn.Parameter] = []
        held = 0
        for parameter in members:
            bucket.append(parameter)
            held += parameter.numel() * parameter.element_size()
            if held >= BUCKET_BYTES:
                yield bucket
                bucket, held = [], 0
        if bucket:
            yield bucket


def _room(bucket: Sequence[nn.Parameter]) -> Tensor:
    return torch.empty(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
