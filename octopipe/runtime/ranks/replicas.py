"""Copies of parameters and buffers on several ranks: they start equal, stay equal, and count once in a norm.

Knows: parameters and buffers by name, and which ranks hold copies of them within a pipeline and along the data
dimensions of a mesh. Does not know: when gradients are ready (`reduce`), or the names of mesh dimensions (`meshes`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan
from octopipe.runtime.precision import LOW
from octopipe.runtime.ranks.layers import Layers
from octopipe.runtime.ranks.meshes import Reach, reaches
from octopipe.runtime.ranks.reduce import Shared, local, wait_for
from octopipe.runtime.ranks.shared_buffers import SharedBuffers
from octopipe.runtime.ranks.world import World, all_reduce, broadcast

Sharded = Mapping[str, Sequence[str]]


class Replicas:
    """The copies of one rank's layers on other ranks. Created once, by all ranks together."""

    def __init__(self, layers: Layers, plan: Plan, world: World, *, sharded: Sharded, timeout_s: float):
        self._layers, self._world, self._timeout_s = layers, world, timeout_s
        parameters = {s.key: s.parameter for s in layers.shared()}
        self._buffers = {f"{k}.{name}": b for k, m in layers.modules.items() for name, b in m.named_buffers()}
        self.reaches = reaches(layers.modules, {**self._buffers, **parameters}, world.members, sharded)
        """By the parameter's key or the buffer's name."""
        self._holders = {k: tuple(sorted(ranks)) for k, ranks in layers.ranks_of.items()}
        self._agree(plan, sharded)

    def shared_buffers(self) -> SharedBuffers:
        """The object that keeps the buffers of copies synchronised."""
        axes = {name: self.reaches[name].axes for name in self._buffers}
        layers = self._layers
        elsewhere = layers.buffers_elsewhere if layers.buffers_are_one else None
        return SharedBuffers(
            layers.modules, self._holders, axes, elsewhere, self._world, timeout_s=self._timeout_s
        )  # fmt: skip

    def _agree(self, plan: Plan, sharded: Sharded) -> None:
        """Check that all pipelines have the same placement and the same frozen parameters, and that every sharded
        dimension is used."""
        world = self._world
        frozen = {s.key: not s.parameter.requires_grad for s in self._layers.shared()}
        used = {axis for axis in world.axes if any(axis not in r.axes for r in self.reaches.values())}
        said = world.gather((frozen, used))
        for rank, (theirs, _) in enumerate(said):
            for key in sorted(frozen.keys() & theirs.keys()):
                if frozen[key] != theirs[key]:
                    one, other = (world.rank, rank) if frozen[key] else (rank, world.rank)
                    raise OctoPipeError(
                        f"parameter {key} is frozen on rank {one} and trained on rank {other}; freeze it on all ranks "
                        "or on none"
                    )
        for axis in {"ep"} & world.axes.keys() | set(sharded):
            if not any(axis in theirs for _, theirs in said):
                raise OctoPipeError(
                    f"no parameter is sharded over the mesh dimension {axis!r}: name those that are, such as "
                    f"sharded={{{axis!r}: ['*.experts.*']}}, or call the dimension 'dp' if none is"
                )
        mine = (plan.num_layers, plan.num_micro_batches, sorted(self._holders.items()), sorted(frozen.items()))
        digest = hashlib.blake2b(repr(mine).encode(), digest_size=12).hexdigest()
        if len(set(world.gather_replicas(digest, self._timeout_s))) > 1:
            raise OctoPipeError(
                f"rank {world.rank} holds other layers, or has other ones frozen, in one data-parallel pipeline than "
                "in another; give all of them the same plan and model"
            )

    def make_equal(self) -> None:
        """Set every copy to the value of its first holder in the first pipeline."""
        world = self._world
        for s in sorted(self._layers.shared(), key=lambda s: s.key):
            self._spread(s.key, s.parameter, s.holders)
        for name in sorted(self._buffers):
            self._spread(name, self._buffers[name], self._holders[int(name.split(".", 1)[0])])
        if world.group is not None and self._layers.device.type == "cuda":
            torch.cuda.synchronize(self._layers.device)

    def make_equal_again(self, replaced: Sequence[Shared]) -> None:
        """`make_equal` for parameters that have replaced others, on all holders."""
        for s in sorted(replaced, key=lambda s: s.key):
            self._spread(s.key, s.parameter, s.holders)

    def _spread(self, name: str, tensor: Tensor, holders: tuple[int, ...]) -> None:
        groups = [self._world.subgroup(holders)] if len(holders) > 1 else []
        groups += [self._world.axes[axis] for axis in self.reaches[name].axes]
        values = local(tensor)
        if not groups or not values.numel():
            return
        with torch.no_grad():
            # As bytes, because not every backend supports every dtype.
            data = values.contiguous().reshape(-1).view(torch.uint8)
            for group in groups:
                wait_for(broadcast(group, data, 0), self._timeout_s, f"the first exchange of {name}")
            if data.data_ptr() != values.data_ptr():
                values.copy_(data.view(values.dtype).view(values.shape))

    def norm(self, norm_type: float) -> Tensor:
        """The norm of all gradients of the model (collective). The sum is computed in layer order, so it is equal under
        every plan."""
        world, layers, norm_type = self._world, self._layers, float(norm_type)
        if not norm_type > 0:
            raise OctoPipeError(f"norm_type is {norm_type:g}; give a number > 0, or inf")
        largest = norm_type == float("inf")
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        by_axes: dict[tuple[str, ...], Tensor] = {}
        for s in layers.shared():
            grad = s.parameter.grad
            if s.holders[0] != world.rank:
                continue
            # Also without a gradient: all ranks of an axis must sum, and the others may have one.
            scattered = self.reaches.get(s.key, Reach()).scattered
            if scattered not in by_axes:
                by_axes[scattered] = torch.zeros(layers.plan.num_layers + 1, dtype=torch.float64, device=layers.device)
            if grad is None:
                continue
            grad = grad.coalesce().values() if grad.is_sparse else grad
            if not grad.numel():  # nothing has no largest element
                continue
            wide = torch.float32 if grad.dtype in LOW else None
            value = torch.linalg.vector_norm(grad, norm_type, dtype=wide)
            value = (value.full_tensor() if hasattr(value, "full_tensor") else value).double()
            norms, layer = by_axes[scattered], int(s.key.split(".", 1)[0])
            norms[layer] = torch.maximum(norms[layer], value) if largest else norms[layer] + value**norm_type
        total = torch.zeros(layers.plan.num_layers + 1, dtype=torch.float64, device=layers.device)
        for scattered, norms in sorted(by_axes.items()):
            for axis in scattered:
                wait_for(all_reduce(world.axes[axis], norms, op), self._timeout_s, "the gradient norm")
            total = torch.maximum(total, norms) if largest else total + norms
        if world.group is not None:
            wait_for(all_reduce(world.group, total, op), self._timeout_s, "the gradient norm")
        return total.max() if largest else total.sum() ** (1.0 / norm_type)
