"""Layers that are already wrapped in DDP or FSDP.

Knows: torch's DistributedDataParallel and FullyShardedDataParallel, and their effect on the gradients of several
micro-batches. Does not know: how the pipeline reduces gradients (`reduce`).

DDP reduces gradients in the backward of the first micro-batch and silently adds those of the others unreduced. If it
averages over the pipeline's own data-parallel ranks, its reduction is disabled and the pipeline's is used instead;
otherwise it is rejected, and so is the older FSDP, whose flat parameters do not belong to single layers. `fully_shard`
is supported (`meshes`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.ranks.world import World


def take_over(modules: Mapping[int, nn.Module], world: World) -> None:
    """Disable DDP's reduction, so that the pipeline reduces the gradients; raise an error for unsupported wrappers."""
    for k, module in modules.items():
        for inner in module.modules():
            if isinstance(inner, DistributedDataParallel):
                _take_over_ddp(k, inner, world)
            elif _is_old_fsdp(inner):
                raise OctoPipeError(
                    f"layer {k} is wrapped in FullyShardedDataParallel; shard it with fully_shard "
                    "(torch.distributed.fsdp), which pipelines know, and give the mesh"
                )


def _take_over_ddp(layer: int, module: DistributedDataParallel, world: World) -> None:
    members = set(dist.get_process_group_ranks(module.process_group))
    ours = set() if world.dp_group is None else set(dist.get_process_group_ranks(world.dp_group))
    if len(members) > 1 and members != ours:
        raise OctoPipeError(
            f"layer {layer} is wrapped in DistributedDataParallel over ranks {sorted(members)}, which reduces the "
            "first micro-batch's gradients only; give the bare module, and these ranks as dp_group= or in mesh="
        )
    module.require_backward_grad_sync = False
    module.require_forward_param_sync = False


def _is_old_fsdp(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "FullyShardedDataParallel" and kind.__module__.startswith("torch.")
