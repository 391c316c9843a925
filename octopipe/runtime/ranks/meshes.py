"""What the dimensions of a device mesh mean to a pipeline.

Knows: which dimension is the pipeline's, along which ranks take different batches (gradients and losses are averaged
there), along which they share one, and, for each parameter, where its gradient has already been averaged. Does not
know: how gradients are reduced (`reduce`).

A dimension is never ignored silently: its name determines its role (`DATA`, `MODEL`), or the caller does, or it is an
error. Along a data dimension, a parameter is one of the following:

- *replicated*: every rank has a copy, and gradients are averaged here;
- *sharded by FSDP2*: `fully_shard` has already reduced and averaged gradients over its own mesh;
- *sharded* (experts over ep): values differ on every rank, and the module's own communication has summed the gradients
  of all ranks' tokens; the sum only has to be divided by the number of ranks, like the mean of the losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from octopipe.base.errors import OctoPipeError

DATA = (
    "dp", "ddp", "data", "data_parallel", "replicate", "dp_replicate", "shard", "dp_shard", "fsdp", "hsdp", "dp_cp",
    "dp_shard_cp", "cp", "ep",
)  # fmt: skip
"""Default names of dimensions whose ranks take different batches (or parts of a sequence)."""
MODEL = ("tp", "tp_sp", "tensor", "tensor_parallel", "model", "etp", "sp")
"""Names of dimensions whose ranks share a batch. Modules keep their parameters consistent there (as DTensor does)."""

Axes = dict[str, dist.ProcessGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles of the dimensions of a mesh."""

    pipeline: dist.ProcessGroup
    data: Axes
    """For each data dimension of more than one rank, this process's group."""
    everybody: dist.ProcessGroup | None
    """All data dimensions as one group; None if there are none."""
    model: Axes
    """For each dimension whose ranks share a batch, this process's group."""


def roles(mesh: DeviceMesh, pp_dim: str, dp_dims: Sequence[str] | None, model_dims: Sequence[str] | None) -> Roles:
    """The role of each dimension; raises an error if a name is neither known nor assigned by the caller."""
    names = mesh.mesh_dim_names or ()
    if pp_dim not in names:
        raise OctoPipeError(
            f"the device mesh has dimensions {names}; name one of them 'pp', or say which is the pipeline's: pp_dim=..."
        )
    for argument, given in (("dp_dims", dp_dims), ("model_dims", model_dims)):
        for name in given or ():
            if name not in names or name == pp_dim:
                others = [other for other in names if other != pp_dim]
                raise OctoPipeError(f"{argument} names {name!r}; the mesh's other dimensions are {others}")
    both = set(dp_dims or ()) & set(model_dims or ())
    if both:
        raise OctoPipeError(f"mesh dimension {both.pop()!r} is in dp_dims and in model_dims; it can be only one")
    data: list[str] = []
    for k, name in enumerate(names):
        if name == pp_dim or (model_dims is not None and name in model_dims) or mesh.size(k) == 1:
            continue
        if name in (DATA if dp_dims is None else dp_dims):
            data.append(name)
        elif model_dims is not None or name not in MODEL:
            raise OctoPipeError(
                f"mesh dimension {name!r} of {mesh.size(k)} ranks is left over: put it into dp_dims if its ranks take "
                "different batches (gradients are averaged), into model_dims if they share one (tensor parallelism)"
            )
    everybody = None
    if data:
        everybody = mesh.get_group(data[0]) if len(data) == 1 else mesh[tuple(data)]._flatten().get_group()
    shared = [name for k, name in enumerate(names) if name != pp_dim and name not in data and mesh.size(k) > 1]
    return Roles(
        pipeline=mesh.get_group(pp_dim),
        data={name: mesh.get_group(name) for name in data},
        everybody=everybody,
        model={name: mesh.get_group(name) for name in shared},
    )


@dataclass(frozen=True, slots=True)
class Reach:
    """How the gradients of one parameter are reduced to those of the mean loss."""

    axes: tuple[str, ...] = ()
    """Data dimensions over which they are averaged here."""
    divisor: int = 1
    """An additional divisor: the number of ranks along dimensions over which the parameter is sharded."""
    scattered: tuple[str, ...] = ()
    """Those of the latter dimensions that only the caller's `sharded` names (no DTensor or FSDP2 placement does)."""


def reaches(
    modules: Mapping[int, nn.Module],
    named: Mapping[str, Tensor],
    axes: Mapping[str, Sequence[int]],
    sharded: Mapping[str, Sequence[str]],
) -> dict[str, Reach]:
    """The reductions of parameters and buffers, by name (`layer.name`).

    `axes`: the processes of every data dimension. `sharded`: by dimension, patterns of names whose values differ along
    it; DTensors state this themselves.
    """
    for name in sharded:
        if name not in axes:
            raise OctoPipeError(f"sharded names the mesh dimension {name!r}; data dimensions are {list(axes)}")
    members = {name: frozenset(ranks) for name, ranks in axes.items()}
    fsdp = _fsdp_meshes(modules.values())
    out = {}
    for name, tensor in named.items():
        averaged, scattered, divisor = [], [], 1
        done = fsdp.get(id(tensor), frozenset())
        split = _split_over(tensor)
        for axis, ranks in members.items():
            if ranks <= done:
                continue
            if len(ranks & done) > 1:
                raise OctoPipeError(
                    f"parameter {name}: fully_shard's mesh covers a part of dimension {axis!r}; shard over all of it"
                )
            if any(ranks <= dimension for dimension in split):
                divisor *= len(ranks)
            elif _matches(name, sharded.get(axis, ())):
                divisor *= len(ranks)
                scattered.append(axis)
            else:
                averaged.append(axis)
        out[name] = Reach(tuple(averaged), divisor, tuple(scattered))
    return out


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _split_over(tensor: Tensor) -> list[frozenset[int]]:
    """The ranks along each mesh dimension over which a DTensor's values are divided."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    if mesh is None:
        return []
    return [
        frozenset(dist.get_process_group_ranks(mesh.get_group(k)))
        for k, placement in enumerate(placements)
        if placement.is_shard()
    ]


def _fsdp_meshes(modules: Iterable[nn.Module]) -> dict[int, frozenset[int]]:
    """For every parameter that FSDP2 manages, by id, the ranks over which it averages."""
    from torch.distributed.fsdp import FSDPModule

    out: dict[int, frozenset[int]] = {}
    for module in modules:
        for inner in module.modules():
            if not isinstance(inner, FSDPModule):
                continue
            state: Any = inner._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.13 had one at most
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is None:
                    continue
                ranks = frozenset(int(r) for r in group.mesh_info.mesh.mesh.flatten())
                out.update((id(p.sharded_param), ranks) for p in group.fsdp_params)
    return out
