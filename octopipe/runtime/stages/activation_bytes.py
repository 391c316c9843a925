"""Activation memory of one micro-batch, counted by running a stage once.

Knows: what autograd saves, and what is kept until W. Does not know: when a plan runs the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from octopipe.runtime.stages.stage import Stage
from octopipe.runtime.values import flatten
from octopipe.runtime.wire.buffers import storage_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Activation bytes of one micro-batch, without parameters. Memory shared by several tensors counts once."""

    until_input: int
    """Bytes that autograd keeps from F until I."""
    until_weight: int
    """Bytes of the operands that the queue of weight gradients keeps from I until W."""


def held_bytes(stage: Stage, inputs: Any, *, then: Callable[[Any], Any] | None = None) -> HeldBytes:
    """Run F and I once, with gradients of ones, and count the bytes kept after each. `.grad` does not change."""
    parameters = [p for m in stage.modules for p in m.parameters()]
    buffers = [b for m in stage.modules for b in m.buffers()]
    own = {t.untyped_storage().data_ptr(): 1 for t in (*parameters, *buffers)}
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        run = stage.forward(inputs, then=then)
    until_input = storage_bytes(saved, own)
    saved.clear()
    leaves: list[Any] = []
    flatten(run.outputs, leaves)
    run.backward_input([torch.ones_like(t) if n else None for t, n in zip(leaves, run.outputs_need_grad)])
    result = HeldBytes(until_input=until_input, until_weight=storage_bytes(run._queue.tensors(), own))
    for p, grad in zip(parameters, grads):
        p.grad = grad
    return result
