"""The losses of a step on every rank: exchanged within the pipeline and averaged over data-parallel pipelines.

Knows: which rank has which losses, and that ranks must agree on how a batch was split. Does not know: how a step runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.ranks.reduce import wait_for
from octopipe.runtime.ranks.world import World, all_reduce


def mean_losses(
    losses: Mapping[int, Tensor],
    shares: list[float] | None,
    count: int,
    world: World,
    device: torch.device,
    timeout_s: float,
    *,
    cuts_unevenly: bool,
) -> Tensor:
    """Return every micro-batch's loss, in float64 (collective over all ranks). `losses`: those that end on this rank;
    `shares`: the weight of each micro-batch; `cuts_unevenly`: this rank has split the batch into micro-batches of
    different size."""
    values = torch.zeros(count + 2, dtype=torch.float64, device=device)
    for m, loss in losses.items():
        values[m] = loss
        if shares is not None:
            values[m] *= shares[m]
    # If the batch is split unevenly, the losses must be weighted accordingly, and the other way round.
    if cuts_unevenly:
        values[count] = 1
    if losses and shares is not None:
        values[count + 1] = 1
    # Every loss comes from one rank, and adding zeros to it does not round it: the plan makes no difference.
    if world.group is not None:
        wait_for(all_reduce(world.group, values), timeout_s, "the exchange of losses")
    for group in world.axes.values():
        values /= group.size()
        wait_for(all_reduce(group, values), timeout_s, "the data-parallel exchange of losses")
    cut, weighed = values[count:].tolist() if device.type == "cpu" or shares is not None else (0, 0)
    if (cut > 0) != (weighed > 0):
        raise OctoPipeError(
            "the batch does not split into equal micro-batches, and the ranks with the loss do not know how many "
            "rows each of them has; give these ranks the target (or the batch), with as many rows as the batch"
        )
    return values[:count]
