"""Gradient reduction between ranks: replicated stages, tied parameters, data parallelism.

Knows: which parameters are shared across ranks, and how their gradients are reduced. Does not know: schedules; the
executor reports when the gradients of a layer are complete, and every reduction that can start then does, so that
reductions overlap with the rest of the cool-down.

Within a pipeline, gradients are summed over the holders of a parameter (every holder processed other micro-batches, or
uses the parameter elsewhere). Across data-parallel pipelines they are averaged, because the loss is the mean over all
pipelines. A bucket contains parameters with the same holders, the same data dimensions and the same dtype. Every rank
starts its buckets in one global order, so that no two ranks start two reductions in opposite orders.

A parameter without a gradient on any rank keeps `.grad` None, as on one device, because an optimizer must not decay
frozen or unused parameters. Frozen parameters are in no bucket. For the others, every bucket contains one flag per
parameter, which is summed along with the gradients; a rank reads the flags (and waits for its device) only if one of
its own gradients is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.plans.plan import Plan
from octopipe.runtime.precision import gradient_dtype
from octopipe.runtime.ranks.meshes import Reach
from octopipe.runtime.ranks.world import Group, all_reduce, needs_host
from octopipe.runtime.wire.telling import PeerError

BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One parameter of this rank that others hold too (or that data parallelism averages)."""

    key: str
    """Its first name in the model: `layer.name`; the same on every rank."""
    parameter: nn.Parameter
    layers: tuple[int, ...]
    """Layers of this rank that use it: complete when all of them are."""
    holders: tuple[int, ...]
    """Ranks of the pipeline that hold it."""


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
    """Gradients from earlier steps, already reduced: set aside, added back at the end."""
    missing: bool = False
    """Whether this rank lacks a gradient of this step."""
    flat: Tensor | None = None
    """The gradients one after the other, then a flag for each that is there."""
    works: list[Any] = field(default_factory=list)
    """Reductions begun, of those that it goes through one after the other."""

    def describe(self) -> str:
        return f"the gradient reduction of layers {sorted(self.layers)} with ranks {list(self.holders)}"


class Reducer:
    """Starts buckets as layers finish; `finish` waits and leaves the sums in `.grad`."""

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
        """`groups` by holders, `axes` by data dimension, `reaches` by the parameter's key (see `meshes`)."""
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
        self.buckets: list[Bucket] = []
        self._build()

    def renew(self, shared: Sequence[Shared]) -> None:
        """Parameters were put in the place of others, under the same names."""
        now = {s.key: s.parameter for s in shared}
        self._shared = [replace(s, parameter=now[s.key]) for s in self._shared]
        self._tensors = [s.parameter for s in shared if hasattr(s.parameter, "placements")]
        self._build()

    def also_used_by(self, parameter: Tensor, layers: Sequence[int]) -> None:
        """Layers of this rank use a parameter that another layer registers: its gradient waits for them, too."""
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
        """Whether there is never anything to do."""
        return not self._shared and not self._tensors

    def _build(self) -> None:
        """Form the buckets. Holders of a shared parameter must form the same ones, so only its own properties count."""
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
        """Set gradients of earlier steps aside, which have already been reduced."""
        if self._trainable != tuple(s.parameter.requires_grad for s in self._shared):
            self._build()  # something was frozen or thawed, on all ranks alike
        self._next = 0
        for bucket in self.buckets:
            bucket.waits_for = set(bucket.layers)
            bucket.before = [p.grad for p in bucket.parameters]
            bucket.flat, bucket.works = None, []
            for p in bucket.parameters:
                p.grad = None

    def give_up(self) -> None:
        """After an interrupted step: restore the gradients of earlier steps and drop its own."""
        for bucket in self.buckets:
            for p, before in zip(bucket.parameters, bucket.before):
                p.grad = before
            bucket.flat, bucket.works, bucket.before = None, [], []

    def layers_done(self, layers: Sequence[int]) -> None:
        """These layers get no more gradient in this step."""
        for bucket in self.buckets:
            bucket.waits_for.difference_update(layers)
        while self._next < len(self.buckets) and not self.buckets[self._next].waits_for:
            if self._through_host(self.buckets[self._next]):
                return  # the host would have to wait for the device: when all of the step is issued
            self._start(self.buckets[self._next])
            self._next += 1

    def _through_host(self, bucket: Bucket) -> bool:
        return any(needs_host(group, bucket.parameters[0]) for group in self._path(bucket))

    def _path(self, bucket: Bucket) -> list[Group]:
        """The groups a bucket is reduced over, one after the other."""
        first = [self._groups[bucket.holders]] if len(bucket.holders) > 1 else []
        return first + [self._axes[name] for name in bucket.reach.axes]

    def _start(self, bucket: Bucket) -> None:
        """Gather a bucket's gradients and begin its first reduction."""
        grads = [p.grad for p in bucket.parameters]
        bucket.missing = any(g is None for g in grads)
        with torch.no_grad():
            parts = [_numbers(g, p) for g, p in zip(grads, bucket.parameters)]
            flags = torch.ones(len(grads), dtype=parts[0].dtype, device=parts[0].device)
            if bucket.missing:
                flags.copy_(torch.tensor([float(g is not None) for g in grads]))
            bucket.flat = torch.cat([*parts, flags])
        for p in bucket.parameters:
            p.grad = None  # it is in `flat`: twice would be more memory than a plan counts on
        self._advance(bucket)

    def _advance(self, bucket: Bucket) -> bool:
        """Begin a bucket's next reduction; False where there is none left."""
        assert bucket.flat is not None
        path, step = self._path(bucket), len(bucket.works)
        # Summed over holders, averaged over the rest: divided between the two.
        if step == (1 if len(bucket.holders) > 1 else 0):
            by = bucket.reach.divisor
            for name in bucket.reach.axes:
                by *= self._axes[name].size()
            if by > 1:
                bucket.flat.div_(by)
        if step >= len(path):
            return False
        bucket.works.append(all_reduce(path[step], bucket.flat))
        return True

    def finish(self) -> None:
        """Wait for all reductions and assign the sums."""
        while self._next < len(self.buckets):  # layers that ran no op in this step, and what goes through the host
            self._start(self.buckets[self._next])
            self._next += 1
        going = [b for b in self.buckets if b.works]
        while going:
            for bucket in going:
                wait_for(bucket.works[-1], self._timeout_s, bucket.describe())
            going = [bucket for bucket in going if self._advance(bucket)]
        for bucket in self.buckets:
            self._place(bucket)
        for p in self._tensors:
            _settle(p)

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


def wait_for(work: Any, timeout_s: float, what: str) -> None:
    """Wait for a collective; an error names what it was."""
    if work is None:
        return
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        gone = f"did not finish within {timeout_s:g} s" if "imed out" in reason else "failed: a peer is gone"
        raise PeerError(f"{what} {gone}") from error


def _readiness(plan: Plan) -> dict[int, float]:
    """Layer -> how late in its rank's order its last weight gradient comes, from 0 to 1."""
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
    """A tensor's values on this device: of a DTensor, its part."""
    return t.to_local() if hasattr(t, "to_local") else t.detach()


def _numbers(grad: Tensor | None, p: Tensor) -> Tensor:
    """A gradient's values on this device as a row of real numbers, zeros where there is none."""
    if grad is None:
        values = torch.zeros_like(local(p), dtype=gradient_dtype(p))
    else:
        values = local(_like(grad, p))
    if values.is_sparse:
        values = values.to_dense()
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)


def _like(grad: Tensor, p: Tensor) -> Tensor:
    """A DTensor's gradient placed as the parameter is: sums that are still open (sequence parallelism) are closed."""
    placements = getattr(grad, "placements", None)
    if placements is None or placements == p.placements:  # type: ignore[attr-defined]
        return grad
    return grad.redistribute(placements=p.placements)  # type: ignore[attr-defined, no-any-return]


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
