"""Gradients that several ranks owe each other: replicated stages, tied parameters, data parallelism.

Knows: which parameters are one and the same across ranks, and how their gradients become one sum. Does not
know: schedules; the executor says when a layer's gradients are complete, and whatever can start then does, so
that reductions run behind the rest of the cool-down.

Inside a pipeline gradients are summed over the holders of a parameter (every holder saw other micro-batches, or
another use of it); across data-parallel pipelines they are averaged, as the mean over all pipelines' losses.
Buckets hold parameters of one set of holders and one dtype. Every rank starts its buckets in one global order,
so that no two ranks ever start two reductions in opposite orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.errors import OctoPipeError
from octopipe.plan import Plan
from octopipe.runtime.world import Group, all_reduce

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
    """Parameters reduced in one message."""

    parameters: list[nn.Parameter]
    holders: tuple[int, ...]
    waits_for: set[int]
    """Layers of this rank that are not complete yet."""
    layers: frozenset[int]
    before: list[Tensor | None] = field(default_factory=list)
    """Gradients from earlier steps, already reduced: set aside, added back at the end."""
    flat: Tensor | None = None
    work: Any = None

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
        dp_group: Group,
        *,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._timeout_s = timeout_s
        self._groups, self._dp_group = groups, dp_group
        self._dp = 1 if dp_group is None else dp_group.size()
        self._next = 0
        ready = _readiness(plan)
        entries = sorted(
            (s for s in shared if len(s.holders) > 1 or self._dp > 1),
            key=lambda s: (ready.get(int(s.key.split(".", 1)[0]), 0.0), s.key),
        )
        self.buckets: list[Bucket] = []
        open_buckets: dict[Any, tuple[Bucket, int]] = {}
        for s in entries:
            p = s.parameter
            # Holders of a shared parameter must cut the same buckets, so only its own facts count.
            where = (s.holders, p.dtype, p.device)
            bucket, size = open_buckets.get(where, (None, 0))
            if bucket is None or size + p.nbytes > bucket_bytes:
                bucket, size = Bucket([], s.holders, set(), frozenset()), 0
                self.buckets.append(bucket)
            bucket.parameters.append(p)
            bucket.layers |= set(s.layers)
            open_buckets[where] = (bucket, size + p.nbytes)

    def begin_step(self) -> None:
        """Set gradients of earlier steps aside (they are reduced already)."""
        self._next = 0
        for bucket in self.buckets:
            bucket.waits_for = set(bucket.layers)
            bucket.before = [p.grad for p in bucket.parameters]
            bucket.flat = bucket.work = None
            for p in bucket.parameters:
                p.grad = None

    def layers_done(self, layers: Sequence[int]) -> None:
        """These layers get no more gradient in this step."""
        for bucket in self.buckets:
            bucket.waits_for.difference_update(layers)
        while self._next < len(self.buckets) and not self.buckets[self._next].waits_for:
            self._start(self.buckets[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        with torch.no_grad():
            bucket.flat = torch.cat([_local(p.grad, p).reshape(-1) for p in bucket.parameters])
        if len(bucket.holders) > 1:
            bucket.work = all_reduce(self._groups[bucket.holders], bucket.flat)
        else:
            bucket.work = self._average(bucket.flat)

    def _average(self, flat: Tensor) -> Any:
        if self._dp == 1:
            return None
        flat.div_(self._dp)
        return all_reduce(self._dp_group, flat)

    def finish(self) -> None:
        """Wait for everything and put the sums in place."""
        while self._next < len(self.buckets):  # layers that ran no op in this step
            self._start(self.buckets[self._next])
            self._next += 1
        for bucket in self.buckets:
            if bucket.work is not None:
                wait_for(bucket.work, self._timeout_s, bucket.describe())
        second = [b for b in self.buckets if len(b.holders) > 1 and self._dp > 1]
        for bucket in second:
            assert bucket.flat is not None
            bucket.work = self._average(bucket.flat)
        for bucket in second:
            wait_for(bucket.work, self._timeout_s, bucket.describe())
        for bucket in self.buckets:
            assert bucket.flat is not None
            at = 0
            for p, before in zip(bucket.parameters, bucket.before):
                size = _numel(p)
                part = bucket.flat[at : at + size]
                at += size
                _put(p, part, before)
            bucket.flat, bucket.work, bucket.before = None, None, []


def wait_for(work: Any, timeout_s: float, what: str) -> None:
    """Wait for a collective; an error names what it was."""
    if work is None:
        return
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        gone = f"did not finish within {timeout_s:g} s" if "imed out" in reason else "failed: a peer is gone"
        raise OctoPipeError(f"{what} {gone} ({reason[:120]})") from None


def _readiness(plan: Plan) -> dict[int, float]:
    """Layer -> how late in its rank's order its last weight gradient comes, from 0 to 1."""
    out: dict[int, float] = {}
    for order in plan.orders:
        for k, op in enumerate(order):
            if op.kind in "WB":
                stage = plan.stages[op.stage]
                for layer in range(stage.first, stage.stop):
                    out[layer] = max(out.get(layer, 0.0), (k + 1) / len(order))
    return out


def _numel(p: Tensor) -> int:
    local = p.to_local() if hasattr(p, "to_local") else p
    return int(local.numel())


def _local(grad: Tensor | None, p: Tensor) -> Tensor:
    """A gradient's values on this device (of a DTensor: its shard), zeros where there is none."""
    if grad is None:
        return torch.zeros_like(p.to_local() if hasattr(p, "to_local") else p)
    return grad.to_local() if hasattr(grad, "to_local") else grad


def _put(p: nn.Parameter, part: Tensor, before: Tensor | None) -> None:
    local = p.to_local() if hasattr(p, "to_local") else p
    part = part.view(local.shape)
    if hasattr(p, "to_local"):
        from torch.distributed.tensor import DTensor

        part = DTensor.from_local(part, p.device_mesh, p.placements, run_check=False)  # type: ignore[attr-defined]
    p.grad = part if before is None else before.add_(part)
