"""The processes a pipeline runs on: its ranks, its data-parallel twins, and groups of some of them.

Knows: torch.distributed. Does not know: plans or tensors. Several pipelines (one after another) may share one
World, and with it its groups.

Subgroups are made by their members alone, straight from the store: `dist.new_group` wants every process of the
job, also those of other pipelines, and its `use_local_synchronization` names a group after how many groups the
process has made before, so that members that made different numbers of groups wait for each other forever.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from octopipe.errors import OctoPipeError

Group = Any
"""A ProcessGroup or a backend of our own making: both have allreduce, broadcast, allgather, send and recv."""


class World:
    """One pipeline's ranks (`group`) and, with data parallelism, the same rank of all pipelines (`dp_group`)."""

    def __init__(self, group: dist.ProcessGroup | None, dp_group: dist.ProcessGroup | None = None):
        self.group, self.dp_group = group, dp_group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.replica = 0 if dp_group is None else dp_group.rank()
        self.num_replicas = 1 if dp_group is None else dp_group.size()
        self.global_ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.backend = "none" if group is None else str(dist.get_backend(group))
        self._subgroups: dict[tuple[int, ...], Group] = {}
        self._control: dist.ProcessGroup | None = None

    @classmethod
    def make(
        cls, group: dist.ProcessGroup | World | None, dp_group: dist.ProcessGroup | None, mesh: DeviceMesh | None
    ) -> World:
        """From what a user has: nothing (one process, or the whole job), process groups, or a DeviceMesh."""
        if isinstance(group, World):
            return group
        if mesh is not None:
            names = mesh.mesh_dim_names or ()
            if "pp" not in names:
                raise OctoPipeError(f"the device mesh has dimensions {names}; name one of them 'pp'")
            return cls(mesh.get_group("pp"), mesh.get_group("dp") if "dp" in names else None)
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        return cls(group, dp_group if dp_group is not None and dp_group.size() > 1 else None)

    @property
    def control(self) -> dist.ProcessGroup | None:
        """A gloo group of the same ranks, for small things of the host; None where there is one rank only.

        On other backends it is made at first use, by all processes of the job together (all their pipelines').
        """
        if self._control is None and self.group is not None:
            if "gloo" in self.backend:
                self._control = self.group
            elif self.size == dist.get_world_size():
                self._control = dist.new_group(backend="gloo")
            else:
                pipelines: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(pipelines, self.global_ranks)
                for ranks in sorted({tuple(p) for p in pipelines}):
                    made = dist.new_group(list(ranks), backend="gloo")
                    if list(ranks) == self.global_ranks:
                        self._control = made
        return self._control

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """A group of some ranks of the pipeline, on the pipeline's backend (collective over them)."""
        key = tuple(ranks)
        if len(key) == self.size:
            return self.group
        if key not in self._subgroups:
            self._subgroups[key] = self.new_group(key, "nccl" if "nccl" in self.backend else "gloo")
        return self._subgroups[key]

    def new_group(
        self, ranks: Sequence[int], backend: str, purpose: str = "group", *, timeout_s: float = 1800.0
    ) -> Group:
        """A fresh group of these ranks of the pipeline; only they call this, in one order."""
        members = [self.global_ranks[r] for r in ranks]
        me = members.index(self.global_ranks[self.rank])
        name = f"octopipe/{purpose}/{'-'.join(map(str, members))}"
        store = c10d._get_default_store()
        # How often this rank made this group: the same number at all members, whatever else they made.
        count = store.add(f"{name}/count/{me}", 1)
        prefix = dist.PrefixStore(f"{name}/{count}", store)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_s)
            return dist.ProcessGroupNCCL(prefix, me, len(members), options)
        return dist.ProcessGroupGloo(prefix, me, len(members), timedelta(seconds=timeout_s))

    def gather(self, item: Any) -> list[Any]:
        """Everybody's item, by rank (collective)."""
        return [item] if self.control is None else gather_objects(self.control, item)

    def store(self) -> dist.Store | None:
        return None if self.group is None else c10d._get_default_store()

    def default_device(self) -> torch.device:
        if "nccl" in self.backend:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


class StreamWork:
    """A Work of NCCL whose wait takes a timeout and ignores it: with one, NCCL's own would block the host."""

    __slots__ = ("_work",)

    def __init__(self, work: Any):
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> None:
        self._work.wait()


def all_reduce(group: Group, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    """Start a reduction in place; returns its Work. On NCCL, waiting for it is the device's."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    work = group.allreduce([tensor], options)
    return StreamWork(work) if tensor.is_cuda and "nccl" in backend_name(group) else work


def wire(group: Group) -> Group:
    """The gloo backend inside a ProcessGroup: the same sends and receives without the dispatcher's microseconds."""
    return group._get_backend(torch.device("cpu")) if isinstance(group, dist.ProcessGroup) else group


def backend_name(group: Group) -> str:
    """"gloo" or "nccl", of a ProcessGroup or of a backend."""
    if isinstance(group, dist.ProcessGroup):
        return str(dist.get_backend(group))
    return str(group.name())


def broadcast(group: Group, tensor: Tensor, root: int) -> Any:
    """Start sending the tensor of the group's member `root` to all; returns the Work."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    return group.broadcast([tensor], options)


def gather_objects(group: Group, item: Any) -> list[Any]:
    """Everybody's item over a gloo group."""
    data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([data.numel()])]).wait()
    longest = max(int(n) for n in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(group.size())]
    group.allgather([parts], [padded]).wait()
    return [pickle.loads(part[: int(n)].numpy().tobytes()) for part, n in zip(parts, sizes)]
