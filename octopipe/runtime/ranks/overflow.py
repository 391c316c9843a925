"""Overflowed gradients: if the gradients of one rank overflow, every rank must skip the step.

Knows: how ranks exchange whether all gradients are finite, and torch's GradScaler. Does not know: optimizers.

A loss scaler checks the gradients of its own process and skips the step if one is not finite. On several ranks, one
rank would skip the step and the others would not, so their weights would belong to different steps. If the loss is
scaled, every step therefore ends with an exchange of whether all gradients are finite. A rank whose gradients are
finite sets one of them to infinity if those of another rank are not. Any scaler then detects this and skips the step,
on all ranks alike. No host synchronisation is needed.

    scaler = pipe.grad_scaler()             # or a torch.amp.GradScaler and pipe.loss_scale = scaler.get_scale()
    pipe.step(batch, target)
    scaler.unscale_(optimizer)
    pipe.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()                         # pipe.loss_scale follows

A `MixedPrecisionOptimizer` needs the pipeline's scaler: torch's own looks for gradients at the master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octopipe.runtime.precision import MixedPrecisionOptimizer
from octopipe.runtime.ranks.reduce import local, wait_for
from octopipe.runtime.ranks.world import World, all_reduce


def share_overflow(parameters: Iterable[Tensor], world: World, device: torch.device, timeout_s: float) -> None:
    """Set one of this rank's gradients to infinity if those of any rank are not finite (collective)."""
    with torch.no_grad():
        gradients = [p.grad for p in parameters if p.grad is not None]
        bad = torch.zeros(1, dtype=torch.float32, device=device)
        for gradient in gradients:
            values = local(gradient)
            values = values.coalesce().values() if values.is_sparse else values
            bad += (~torch.isfinite(values)).any()
        before = bad.clone()
        share_flag(bad, world, timeout_s)
        first = next((local(g) for g in gradients if not g.is_sparse and local(g).numel()), None)
        if first is not None:
            place = first[(0,) * first.ndim]
            # Only if this rank's own gradients are finite; overflowed ones stay as they are.
            place += torch.where((bad > 0) & (before == 0), torch.inf, 0.0).to(first.dtype).reshape(())


def share_flag(flag: Tensor, world: World, timeout_s: float) -> None:
    """Replace the flag by the largest of all ranks' flags (collective)."""
    for group in _groups(world):
        wait_for(all_reduce(group, flag, dist.ReduceOp.MAX), timeout_s, "the exchange of the overflow flag")


def _groups(world: World) -> Iterator[Any]:
    if world.group is not None and world.size > 1:
        yield world.group
    yield from world.axes.values()
    yield from world.model_axes.values()


class PipelineGradScaler(torch.amp.GradScaler):
    """torch's GradScaler for the ranks of a pipeline: either all of them skip a step or none."""

    def __init__(self, pipe: Any, **options: Any):
        """`options`: options of `torch.amp.GradScaler` (`init_scale`, `growth_interval`, ...)."""
        device: torch.device = pipe.device
        super().__init__(device.type, **options)
        self._pipe = pipe
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(device)
            pipe.loss_scale = self.get_scale()

    def _unscale_grads_(self, optimizer: Any, *args: Any, **more: Any) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(_with_gradients(optimizer), *args, **more)
        pipe = self._pipe
        flag = torch.zeros(1, dtype=torch.float32, device=pipe.device)
        for tensor in found.values():
            flag = torch.maximum(flag, tensor.to(flag.device).reshape(1))
        share_flag(flag, pipe.world, pipe.timeout_s)
        if not found:  # no gradients on this rank, but the scaler needs an entry for some device
            found[pipe.device] = torch.zeros((), dtype=torch.float32, device=pipe.device)
        for tensor in found.values():
            tensor.copy_(flag.to(tensor.device).reshape(tensor.shape))
        return found

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        self._pipe.loss_scale = self.get_scale()


class _Gradients:
    """What a scaler reads of an optimizer: groups with the parameters that hold gradients."""

    def __init__(self, parameters: Sequence[Tensor]):
        self.param_groups = [{"params": list(parameters)}]


def _with_gradients(optimizer: Any) -> Any:
    """The groups of a `MixedPrecisionOptimizer` hold master weights, which have gradients only while it steps."""
    return _Gradients(optimizer.trained()) if isinstance(optimizer, MixedPrecisionOptimizer) else optimizer


def computes_in_half(
    autocast: Callable[[], AbstractContextManager[Any]] | None, device: torch.device, parameters: Iterable[Tensor]
) -> bool:
    """Whether float16 is used, whose range a scaled loss occasionally exceeds."""
    if any(p.dtype == torch.float16 for p in parameters):
        return True
    if autocast is None:
        return False
    with autocast():
        return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16
