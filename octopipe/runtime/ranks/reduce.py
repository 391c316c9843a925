"""Gradient reduction between ranks: replicated stages, tied parameters, data parallelism.

Knows: which parameters are shared across ranks, and how their gradients are reduced. Does not know: schedules; the
executor reports when the gradients of a layer are complete, and every reduction that can start then does, so that
reductions overlap with the rest of the cool-down. The prediction (`simulation/simulator.py`) assumes the same.

Within a pipeline, gradients are summed over the holders of a parameter (every holder processed other micro-batches, or
uses the parameter elsewhere). Across data-parallel pipelines they are averaged, because the loss is the mean over all
pipelines. A bucket contains parameters with the same holders, the same data dimensions and the same dtype. It goes
through one reduction after the other: over the holders, then along each data dimension. Every rank starts all of a
bucket's reductions before those of the next bucket, in one global order of buckets, so that no two ranks start two
reductions in opposite orders, and what a host waits for never waits for a later one.

NCCL reduces on its own stream, and what follows a reduction is queued on a stream of its own; gloo reduces in its
threads, and the next reduction of a bucket starts between two ops; ranks that share a GPU use `ring_group.py`. Only
gloo with CUDA tensors (data-parallel pipelines on one GPU) reduces after the last op, because the host would have to
wait for the device.

A parameter without a gradient on any rank keeps `.grad` None, as on one device, because an optimizer must not decay
frozen or unused parameters. Frozen parameters are in no bucket. For the others, every bucket contains one flag per
parameter, which is summed along with the gradients; a rank reads the flags (and waits for its device) only if one of
its own gradients is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.plans.plan import Plan
from octopipe.runtime.precision import gradient_dtype
from octopipe.runtime.ranks.meshes import Reach
from octopipe.runtime.ranks.ring_group import RingGroup, RingSum
from octopipe.runtime.ranks.world import Group, StreamWork, all_reduce, needs_host
from octopipe.runtime.wire.telling import PeerError
from octopipe.runtime.wire.transports.ring import proceed_all

BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One parameter of this rank that others hold too (or that data parallelism averages)."""

    key: str
    """Its first name in the model: `layer.name`; the same on every rank."""
    parameter: nn.Parameter
    layers: tuple[int, ...]
    """Layers of this rank that use it; its gradient is complete when all of them have finished."""
    holders: tuple[int, ...]
    """The ranks of the pipeline that hold it."""
    in_parts: bool = False
    """Whether several stages of a path use it: the backward pass of each computes a part of its gradient."""


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters that are reduced in one message."""

    parameters: list[nn.Parameter]
    holders: tuple[int, ...]
    reach: Reach
    layers: frozenset[int] = frozenset()
    waits_for: set[int] = field(default_factory=set)
    """Layers of this rank that are not complete yet."""
    before: list[Tensor | None] = field(default_factory=list)
    """Gradients from earlier steps, which are already reduced: set aside during the step and added at its end."""
    missing: bool = False
    """Whether this rank lacks a gradient of this step."""
    flat: Tensor | None = None
    """The gradients one after the other, followed by one flag per gradient that says whether it exists."""
    works: list[Any] = field(default_factory=list)
    """The reductions that have been started; a bucket passes through several, one after the other."""
    divided: bool = False
    """Whether the sum over holders has been divided to form the mean over data-parallel pipelines."""

    def describe(self) -> str:
        return f"the gradient reduction of layers {sorted(self.layers)} with ranks {list(self.holders)}"


class Reducer:
    """Starts the reduction of buckets as layers finish; `finish` waits for them and leaves the sums in `.grad`."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        shared: Sequence[Shared],
        groups: Mapping[tuple[int, ...], Group],
        axes: Mapping[str, Group],
        reaches: Mapping[str, Reach],
        *,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        """`groups`: by holders. `axes`: by data dimension. `reaches`: by the parameter's `key` (see `meshes`)."""
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes
        self._groups, self._axes, self._reaches = groups, axes, reaches
        self._next = 0
        ready = _readiness(plan)
        self._shared = sorted(
            (s for s in shared if len(s.holders) > 1 or self._reach(s) != Reach()),
            key=lambda s: (ready.get(int(s.key.split(".", 1)[0]), 0.0), s.key),
        )
        self._tensors = [s.parameter for s in shared if hasattr(s.parameter, "placements")]
        self._trainable: tuple[bool, ...] = ()
        self._on_rings = False
        """Whether this step uses rings, which proceed only when the host calls `proceed_all`."""
        self._side: Any = None
        """On a GPU: the stream on which a bucket passes from one reduction to the next."""
        self.buckets: list[Bucket] = []
        self._build()

    def renew(self, shared: Sequence[Shared]) -> None:
        """Take over parameters that have replaced others of the same names."""
        now = {s.key: s.parameter for s in shared}
        self._shared = [replace(s, parameter=now[s.key]) for s in self._shared]
        self._tensors = [s.parameter for s in shared if hasattr(s.parameter, "placements")]
        self._build()

    def also_used_by(self, parameter: Tensor, layers: Sequence[int]) -> None:
        """Record that layers of this rank use a parameter which another layer registers: its gradient waits for them,
        too."""
        for bucket in self.buckets:
            if any(p is parameter for p in bucket.parameters):
                bucket.layers |= set(layers)
                bucket.waits_for |= set(layers)
        for k, s in enumerate(self._shared):
            if s.parameter is parameter:
                self._shared[k] = replace(s, layers=tuple(sorted({*s.layers, *layers})))

    def _reach(self, s: Shared) -> Reach:
        return self._reaches.get(s.key, Reach(tuple(self._axes)))

    @property
    def idle(self) -> bool:
        """Whether there is never anything to reduce."""
        return not self._shared and not self._tensors

    def _build(self) -> None:
        """Form the buckets. The holders of a shared parameter must form the same buckets, so only properties of the
        parameter itself are used."""
        self._trainable = tuple(s.parameter.requires_grad for s in self._shared)
        self.buckets = []
        opened: dict[Any, tuple[Bucket, int]] = {}
        for s in self._shared:
            p = s.parameter
            if not p.requires_grad:
                continue
            where = (s.holders, self._reach(s), gradient_dtype(p), p.device)
            nbytes = p.numel() * gradient_dtype(p).itemsize
            bucket, size = opened.get(where, (None, 0))
            if bucket is None or size + nbytes > self._bucket_bytes:
                bucket, size = Bucket([], s.holders, self._reach(s)), 0
                self.buckets.append(bucket)
            bucket.parameters.append(p)
            bucket.layers |= set(s.layers)
            opened[where] = (bucket, size + nbytes)

    def begin_step(self) -> None:
        """Set the gradients of earlier steps aside, because they have been reduced already."""
        if self._trainable != tuple(s.parameter.requires_grad for s in self._shared):
            self._build()  # parameters were frozen or unfrozen, on all ranks alike
        self._next = 0
        for bucket in self.buckets:
            bucket.waits_for = set(bucket.layers)
            bucket.before = [p.grad for p in bucket.parameters]
            bucket.flat, bucket.works, bucket.divided = None, [], False
            for p in bucket.parameters:
                p.grad = None

    def give_up(self) -> None:
        """After an interrupted step, restore the gradients of earlier steps and discard those of this step."""
        for bucket in self.buckets:
            for p, before in zip(bucket.parameters, bucket.before):
                p.grad = before
            bucket.flat, bucket.works, bucket.before = None, [], []

    def layers_done(self, layers: Sequence[int]) -> None:
        """Record that these layers receive no further gradient in this step."""
        for bucket in self.buckets:
            bucket.waits_for.difference_update(layers)
        self.advance()

    @property
    def needs_turns(self) -> bool:
        """Whether `advance` should be called between ops, because the host must start later parts of a reduction."""
        paths = [self._groups_for(s.holders, self._reach(s)) for s in self._shared]
        return any(len(path) > 1 or any(isinstance(group, RingGroup) for group in path) for path in paths)

    def advance(self) -> None:
        """Start all reductions that are next in order and ready, until the host would have to wait."""
        if self._on_rings:
            proceed_all()
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.waits_for or self._through_host(bucket):
                return
            while self._unfinished(bucket):
                if bucket.works and not _over(bucket.works[-1]):
                    return
                self._begin_next(bucket)
            self._next += 1

    def _unfinished(self, bucket: Bucket) -> bool:
        """Whether this bucket has reductions that have not begun."""
        return bucket.flat is None or len(bucket.works) < len(self._path(bucket))

    def _through_host(self, bucket: Bucket) -> bool:
        return any(
            not isinstance(group, RingGroup) and needs_host(group, bucket.parameters[0]) for group in self._path(bucket)
        )

    def _path(self, bucket: Bucket) -> list[Group]:
        """The groups over which a bucket is reduced, in order."""
        return self._groups_for(bucket.holders, bucket.reach)

    def _groups_for(self, holders: tuple[int, ...], reach: Reach) -> list[Group]:
        first = [self._groups[holders]] if len(holders) > 1 else []
        return first + [self._axes[name] for name in reach.axes]

    def _begin_next(self, bucket: Bucket) -> None:
        """Gather the gradients of a bucket if that has not happened, and begin its next reduction."""
        if bucket.flat is None:
            self._gather(bucket)
        assert bucket.flat is not None
        path, step = self._path(bucket), len(bucket.works)
        with self._beside(bucket) if step else nullcontext():
            if step:
                wait_for(bucket.works[-1], self._timeout_s, bucket.describe())
            if step == _summed(bucket):
                self._divide(bucket)
            if step == len(path):
                return
            group = path[step]
            if isinstance(group, RingGroup):
                self._on_rings = True
                bucket.works.append(group.all_reduce(bucket.flat))
            else:
                bucket.works.append(all_reduce(group, bucket.flat))

    def _gather(self, bucket: Bucket) -> None:
        """Copy the gradients of a bucket into one contiguous tensor."""
        grads = [p.grad for p in bucket.parameters]
        bucket.missing = any(g is None for g in grads)
        with torch.no_grad():
            parts = [_numbers(g, p) for g, p in zip(grads, bucket.parameters)]
            flags = torch.ones(len(grads), dtype=parts[0].dtype, device=parts[0].device)
            if bucket.missing:
                flags.copy_(torch.tensor([float(g is not None) for g in grads]))
            bucket.flat = torch.cat([*parts, flags])
        for p in bucket.parameters:
            p.grad = None  # `flat` has a copy; keeping both would exceed the memory that plans account for

    def _divide(self, bucket: Bucket) -> None:
        """Turn sums into averages over the data dimensions. Gradients are summed over holders and averaged over
        everything else, so the division happens between these reductions."""
        assert bucket.flat is not None
        by = bucket.reach.divisor
        for name in bucket.reach.axes:
            by *= self._axes[name].size()
        if by > 1:
            bucket.flat.div_(by)
        bucket.divided = True

    def _beside(self, bucket: Bucket) -> AbstractContextManager[Any]:
        """A context for work that overlaps with computation: on a GPU, on a separate stream. Data that passes through
        the host is copied after the context."""
        assert bucket.flat is not None
        if not bucket.flat.is_cuda or self._through_host(bucket):
            return nullcontext()
        if self._side is None:
            self._side = torch.cuda.Stream(bucket.flat.device)
        return torch.cuda.stream(self._side)

    def finish(self) -> None:
        """Wait for all reductions and assign the sums."""
        # Layers that ran no op in this step, reductions that wait for others, and what goes through the host.
        for bucket in self.buckets[self._next :]:
            while self._unfinished(bucket):
                self._begin_next(bucket)
        self._next = len(self.buckets)
        for bucket in self.buckets:
            if bucket.works:
                wait_for(bucket.works[-1], self._timeout_s, bucket.describe())
            if not bucket.divided:
                self._divide(bucket)
            self._place(bucket)
        self._on_rings = False
        for p in self._tensors:
            _settle(p)

    def close(self) -> None:
        """Release resources that groups hold outside this process."""
        for group in self._groups.values():
            if isinstance(group, RingGroup):
                group.close()

    def _place(self, bucket: Bucket) -> None:
        assert bucket.flat is not None
        count = len(bucket.parameters)
        there = [True] * count if not bucket.missing else (bucket.flat[-count:] > 0).tolist()
        at = 0
        for p, before, found in zip(bucket.parameters, bucket.before, there):
            size = _numbers(None, p).numel()
            _put(p, bucket.flat[at : at + size], before, found)
            at += size
        bucket.flat, bucket.works, bucket.before = None, [], []


def _summed(bucket: Bucket) -> int:
    """The number of reductions after which a bucket is summed over its holders."""
    return 1 if len(bucket.holders) > 1 else 0


def _over(work: Any) -> bool:
    """Whether the host can continue after a reduction without waiting; on a GPU only the device waits."""
    if isinstance(work, RingSum):
        return work.over()
    return isinstance(work, StreamWork) or bool(work.is_completed())


def wait_for(work: Any, timeout_s: float, what: str) -> None:
    """Wait for a collective. Raises a `PeerError` that begins with `what` if it fails or times out."""
    if work is None:
        return
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        gone = f"did not finish within {timeout_s:g} s" if "imed out" in reason else "failed: a peer is gone"
        raise PeerError(f"{what} {gone}") from error


def _readiness(plan: Plan) -> dict[int, float]:
    """For every layer, how late its last weight gradient comes in its rank's order, from 0 to 1."""
    out: dict[int, float] = {}
    for order in plan.orders:
        for k, op in enumerate(order):
            if op.kind in "WB":
                stage = plan.stages[op.stage]
                for layer in range(stage.first, stage.stop):
                    out[layer] = max(out.get(layer, 0.0), (k + 1) / len(order))
    out[plan.num_layers] = out.get(plan.num_layers - 1, 0.0)  # the loss
    return out


def local(t: Tensor) -> Tensor:
    """The values of a tensor on this device: of a DTensor, the local part."""
    return t.to_local() if hasattr(t, "to_local") else t.detach()


def _numbers(grad: Tensor | None, p: Tensor) -> Tensor:
    """The values of a gradient on this device as a flat tensor of real numbers; zeros if there is no gradient."""
    if grad is None:
        values = torch.zeros_like(local(p), dtype=gradient_dtype(p))
    else:
        values = local(_like(grad, p))
    if values.is_sparse:
        values = values.to_dense()
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)


def _like(grad: Tensor, p: Tensor) -> Tensor:
    """The gradient of a DTensor, placed as the parameter is: partial sums (of sequence parallelism) are completed."""
    placements = getattr(grad, "placements", None)
    if placements is None or placements == p.placements:  # type: ignore[attr-defined]
        return grad
    return grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]


def _settle(p: nn.Parameter) -> None:
    if p.grad is not None:
        p.grad = _like(p.grad, p)


def _put(p: nn.Parameter, part: Tensor, before: Tensor | None, found: bool) -> None:
    if not found:
        p.grad = before
        return
    values = local(p)
    part = torch.view_as_complex(part.view(*values.shape, 2)) if values.is_complex() else part.view(values.shape)
    if hasattr(p, "to_local"):
        from torch.distributed.tensor import DTensor

        assert isinstance(p, DTensor)
        mesh, placements = p.device_mesh, p.placements
        part = DTensor.from_local(part, mesh, placements, run_check=False, shape=p.shape, stride=p.stride())
    p.grad = part if before is None else before.add_(part)
