"""The processes of a pipeline: its ranks, its data-parallel replicas, and subgroups of them.

Knows: torch.distributed. Does not know: plans or tensors.

The user's groups (`World.make`) are not modified. Every pipeline runs its steps over its own gloo groups
(`World.for_steps`), so that an interrupted step can close them: every process that waits for this rank in one of them,
on this host or another one, is notified immediately, and the user's groups stay intact.

Subgroups are created by their members alone, directly from the store: `dist.new_group` must be called by every process
of the job, including those of other pipelines, and its `use_local_synchronization` names a group after the number of
groups that the process has created before, so that members with different numbers of groups would wait forever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.ranks.meshes import roles
from octopipe.runtime.torch_private import default_store
from octopipe.runtime.wire.encoding import decoded, encoded
from octopipe.runtime.wire.telling import gather_values

Group = Any
"""A ProcessGroup or a backend of our own making: both have allreduce, broadcast, allgather, send and recv."""
UNUSED_TAG = (1 << 31) - 1
"""The tag of a message that is never sent."""


class World:
    """The ranks of one pipeline (`group`) and, with data parallelism, this rank's counterparts in all pipelines
    (`dp_group`).

    `axes`: by name, the data dimensions of a mesh, which `dp_group` combines; without a mesh there is one, "dp".
    `model_axes`: the dimensions whose ranks share a batch (tensor parallelism).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        dp_group: dist.ProcessGroup | None = None,
        axes: Mapping[str, dist.ProcessGroup] | None = None,
        model_axes: Mapping[str, dist.ProcessGroup] | None = None,
    ):
        self.group, self.dp_group = group, dp_group
        self.axes: dict[str, Any] = dict(axes or ({} if dp_group is None else {"dp": dp_group}))
        self.model_axes: dict[str, Any] = dict(model_axes or {})
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.replica = 0 if dp_group is None else dp_group.rank()
        self.num_replicas = 1 if dp_group is None else dp_group.size()
        self.global_ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.members = {name: dist.get_process_group_ranks(one) for name, one in self.axes.items()}
        """The processes of every data dimension."""
        self.backend = "none" if group is None else str(dist.get_backend(group))
        self._subgroups: dict[tuple[int, ...], Group] = {}
        self._control: Group = None
        self._tags = 0
        self._given: World | None = None
        """The World of the user's groups, if this one was created by `for_steps`."""
        self._on_host = True
        self._own: list[Group] = []
        """Groups that nobody else uses."""

    def for_steps(self, *, on_host: bool) -> World:
        """The same ranks with gloo groups of their own (collective over pipelines and replicas).

        Without `on_host`, tensors are on a device, and groups of its backend remain the user's; only the device waits
        in them.
        """
        given = self._given or self
        if given.group is None:
            return self
        world = World(given.group, given.dp_group, given.axes, given.model_axes)
        world._given, world._on_host = given, on_host
        world.renew(_timeout_s(given.group))
        return world

    def break_off(self) -> None:
        """Close this World's own groups: every wait in them fails immediately on all members, as does every new one."""
        own, self._own = self._own, []
        for group in own:
            close_connections(group)

    @classmethod
    def make(
        cls,
        group: dist.ProcessGroup | World | None,
        dp_group: dist.ProcessGroup | None,
        mesh: DeviceMesh | None,
        *,
        pp_dim: str = "pp",
        dp_dims: Sequence[str] | None = None,
        model_dims: Sequence[str] | None = None,
    ) -> World:
        """A World from what the user passes: nothing (one process, or the whole job), process groups, or a
        DeviceMesh."""
        if isinstance(group, World):
            return group
        _check_groups(group, dp_group, mesh)
        if mesh is not None:
            if group is not None or dp_group is not None:
                raise OctoPipeError("a mesh and process groups were given; give one or the other")
            found = roles(mesh, pp_dim, dp_dims, model_dims)
            return cls(found.pipeline, found.everybody, found.data, found.model)
        if dp_dims is not None or model_dims is not None:
            raise OctoPipeError("dp_dims and model_dims are dimensions of a mesh; give the mesh, too")
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        return cls(group, dp_group if dp_group is not None and dp_group.size() > 1 else None)

    @property
    def control(self) -> Group:
        """A gloo group of the same ranks, for small values on the host; None if there is only one rank.

        For other backends it is created at first use, by all processes of the job together (those of all pipelines).
        """
        if self._control is None and self.group is not None:
            if "gloo" in self.backend:
                self._control = self.group
            elif self.size == dist.get_world_size():
                self._control = dist.new_group(backend="gloo")
            else:
                for ranks in sorted(set(self._pipelines())):
                    made = dist.new_group(list(ranks), backend="gloo")
                    if list(ranks) == self.global_ranks:
                        self._control = made
        return self._control

    def _pipelines(self) -> list[tuple[int, ...]]:
        """The ranks of every process's pipeline (collective over the job, on any backend)."""
        device = self.default_device()
        count = dist.get_world_size()
        mine = torch.full((count,), -1, dtype=torch.int64, device=device)
        mine[: self.size] = torch.tensor(self.global_ranks)
        table = torch.empty(count, count, dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(table, mine)
        return [tuple(r for r in row if r >= 0) for row in table.tolist()]

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """A group of some ranks of the pipeline, on the pipeline's backend (collective over them)."""
        key = tuple(ranks)
        if len(key) == self.size:
            return self.group
        if key not in self._subgroups:
            self._subgroups[key] = made = self.new_group(key, "nccl" if "nccl" in backend_name(self.group) else "gloo")
            if backend_name(made) == "gloo":
                self._own.append(made)
        return self._subgroups[key]

    def new_group(
        self, ranks: Sequence[int], backend: str, purpose: str = "group", *, timeout_s: float = 1800.0
    ) -> Group:
        """A new group of these ranks of the pipeline; only they call this, in the same order."""
        return _made([self.global_ranks[r] for r in ranks], backend, purpose, timeout_s)

    def gather(self, item: Any) -> list[Any]:
        """The items of all ranks, by rank (collective)."""
        return [item] if self.control is None else gather_values(self.control, item)

    def gather_replicas(self, item: Any, timeout_s: float) -> list[Any]:
        """The item of this rank in every data-parallel pipeline (collective over them), through the store."""
        if self.dp_group is None:
            return [item]
        members = dist.get_process_group_ranks(self.dp_group)
        name = f"octopipe/replicas/{'-'.join(map(str, members))}"
        store, me = default_store(), dist.get_rank()
        count = store.add(f"{name}/count/{me}", 1)
        store.set(f"{name}/{count}/{me}", encoded(item))
        keys = [f"{name}/{count}/{member}" for member in members]
        store.wait(keys, timedelta(seconds=timeout_s))
        return [decoded(store.get(key)) for key in keys]

    def new_tags(self, count: int) -> int:
        """The first of `count` message tags that no pipeline of this world has used before (collective).

        Messages that an interrupted step has sent and nobody received remain in the group; they must never be taken for
        messages of a later pipeline.
        """
        first = max(self.gather(self._tags))
        self._tags = first + count
        return first

    def renew(self, timeout_s: float) -> None:
        """Replace the groups by new ones of the same ranks (collective over pipelines and replicas). After an
        interrupted step, the old ones are closed or have collectives that only some of the ranks have started."""
        if self.group is None:
            return
        self._subgroups.clear()
        self._control = _made(self.global_ranks, "gloo", "pipeline", timeout_s)
        self._own = [self._control]
        if self._on_host or self.backend == "gloo":
            self.group = self._control
        given = self._given or self
        for kind, axes, theirs in (("axis", self.axes, given.axes), ("model", self.model_axes, given.model_axes)):
            for name, group in theirs.items():
                if self._on_host or backend_name(group) == "gloo":
                    axes[name] = _made(dist.get_process_group_ranks(group), "gloo", f"{kind}-{name}", timeout_s)
                    self._own.append(axes[name])

    def store(self) -> dist.Store | None:
        return None if self.group is None else default_store()

    def default_device(self) -> torch.device:
        if "nccl" in self.backend:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _made(members: Sequence[int], backend: str, purpose: str, timeout_s: float) -> Group:
    """A new group of these processes, created by them alone."""
    me = list(members).index(dist.get_rank())
    name = f"octopipe/{purpose}/{'-'.join(map(str, members))}"
    store = default_store()
    # How often this rank has created this group: the same number on all members.
    count = store.add(f"{name}/count/{me}", 1)
    prefix = dist.PrefixStore(f"{name}/{count}", store)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(prefix, me, len(members), options)
    return dist.ProcessGroupGloo(prefix, me, len(members), timedelta(seconds=timeout_s))


def _timeout_s(group: dist.ProcessGroup) -> float:
    """The timeout that the user has set for collectives of a group."""
    options = getattr(wire(group), "options", None) if "gloo" in str(dist.get_backend(group)) else None
    limit = getattr(options, "_timeout", None)
    return limit.total_seconds() if isinstance(limit, timedelta) else c10d.default_pg_timeout.total_seconds()


def close_connections(group: Group) -> None:
    """Close a gloo group's connections, so that every member that waits in it fails now.

    gloo has no call for this, but it closes them when a receive times out, because messages that arrive later could not
    be told from the one that was given up.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):  # timed out, as intended; or closed already
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))


class HostWork:
    """A collective of gloo for a CUDA tensor, performed on the host when it is waited for.

    Given a CUDA tensor, gloo takes a stream from torch's pool for every collective, allocates pinned memory (for which
    the driver may stop everything) and copies in the middle of the step, concurrently with what is computed and
    measured. Here only the computation's stream is used, and only once the whole step has been issued. The collectives
    of one group run in the order in which they are waited for.
    """

    __slots__ = ("_start", "_tensor")

    def __init__(self, tensor: Tensor, start: Callable[[Tensor], Any]):
        self._tensor, self._start = tensor, start

    def wait(self, timeout: timedelta | None = None) -> None:
        host = self._tensor.cpu()
        work = self._start(host)
        work.wait() if timeout is None else work.wait(timeout)
        self._tensor.copy_(host)


class StreamWork:
    """A Work of NCCL whose wait accepts a timeout and ignores it: NCCL's own wait would block the host if it got
    one."""

    __slots__ = ("_work",)

    def __init__(self, work: Any):
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> None:
        self._work.wait()


def all_reduce(group: Group, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    """Start a reduction in place and return its Work. On NCCL, only the device waits for it."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    if needs_host(group, tensor):
        return HostWork(tensor, lambda host: group.allreduce([host], options))
    work = group.allreduce([tensor], options)
    return StreamWork(work) if tensor.is_cuda else work


def needs_host(group: Group, tensor: Tensor) -> bool:
    """Whether a collective of this group moves the tensor through the host (see `HostWork`)."""
    return tensor.is_cuda and "nccl" not in backend_name(group)


def wire(group: Group) -> Group:
    """The gloo backend inside a ProcessGroup: its sends and receives avoid the microseconds of the dispatcher."""
    return group._get_backend(torch.device("cpu")) if isinstance(group, dist.ProcessGroup) else group


def backend_name(group: Group) -> str:
    """The name ("gloo" or "nccl") of the backend of a ProcessGroup, or of a backend itself."""
    if isinstance(group, dist.ProcessGroup):
        return str(dist.get_backend(group))
    return str(group.name())


def broadcast(group: Group, tensor: Tensor, root: int) -> Any:
    """Start sending the tensor of the group's member `root` to all; returns the Work."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    if needs_host(group, tensor):
        return HostWork(tensor, lambda host: group.broadcast([host], options))
    return group.broadcast([tensor], options)


def _check_groups(group: Any, dp_group: Any, mesh: Any) -> None:
    """Raise an error if an argument is not a process group or a device mesh."""
    for name, given in (("group", group), ("dp_group", dp_group)):
        if given is not None and not (hasattr(given, "rank") and hasattr(given, "size")):
            raise OctoPipeError(
                f"{name} is a {type(given).__name__}; give a process group (torch.distributed.new_group)"
            )
    if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
        raise OctoPipeError(f"mesh is a {type(mesh).__name__}; give a DeviceMesh (init_device_mesh)")
