"""A model run the plain way, on one device, for the executor's tests to compare with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from octopipe.runtime.pipeline import Pipeline


def call(module: nn.Module, value: Any) -> Any:
    """A tuple is unpacked for a module that takes several arguments."""
    if isinstance(value, tuple) and len(inspect.signature(module.forward).parameters) > 1:
        return module(*value)
    return module(value)


def plain_gradients(
    layers: Sequence[nn.Module],
    inputs: Sequence[Any],
    targets: Sequence[Any],
    loss_fn: Callable[..., Tensor],
    before_layer: Callable[[int, int], None] = lambda micro_batch, layer: None,
) -> tuple[dict[str, Tensor | None], list[float]]:
    """Gradients (by layer.name) and losses of the mean loss over micro-batches, with plain autograd."""
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    losses = []
    for m, (x, y) in enumerate(zip(inputs, targets)):
        value = x
        for k, layer in enumerate(layers):
            before_layer(m, k)
            value = call(layer, value)
        loss = loss_fn(value, y)
        losses.append(float(loss.detach()))
        (loss / len(inputs)).backward()
    grads = {
        f"{k}.{name}": None if p.grad is None else p.grad.clone()
        for k, layer in enumerate(layers)
        for name, p in layer.named_parameters()
    }
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return grads, losses


def worst_error(pipe: Pipeline, expected: dict[str, Tensor | None]) -> float:
    """The largest relative error over this rank's gradients; 1 where one is missing."""
    worst = 0.0
    for name, p in pipe.named_parameters():
        want = expected[name]
        if want is None or p.grad is None:
            zero = all(g is None or not g.any() for g in (want, p.grad))
            worst = max(worst, 0.0 if zero else 1.0)
            continue
        scale = max(float(want.abs().max()), 1e-30)
        worst = max(worst, float((p.grad - want).abs().max()) / scale)
    return worst
