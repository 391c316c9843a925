"""Gradients with respect to the batch, for batches computed by a module outside the pipeline.

Knows: which parts of a batch require a gradient, and how it enters the graph that produced them. Does not know: how
stages run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.values import flatten


class Outside:
    """Collects the gradients with respect to the batch of one step until the step has ended."""

    def __init__(self) -> None:
        self._leaves: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def clear(self) -> None:
        self._leaves, self._gradients = [], []

    def keep(self, value: Any, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch, leaf by leaf."""
        leaves: list[Any] = []
        flatten(value, leaves)
        for leaf, gradient in zip(leaves, gradients):
            if gradient is not None and isinstance(leaf, Tensor) and leaf.requires_grad:
                self._leaves.append(leaf)
                self._gradients.append(gradient)

    def backward(self) -> None:
        """Run the backward of the graph that produced the batch, once for all micro-batches, because they share it."""
        if self._leaves:
            leaves, gradients = self._leaves, self._gradients
            self.clear()
            torch.autograd.backward(leaves, gradients)


def wants_gradient(value: Any) -> list[bool] | None:
    """Return, for every leaf of a batch, whether it requires a gradient; None if no leaf does."""
    if isinstance(value, Tensor):
        return [True] if value.requires_grad else None
    leaves: list[Any] = []
    flatten(value, leaves)
    wanted = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    return wanted if True in wanted else None
