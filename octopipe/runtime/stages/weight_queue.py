"""The queue of weight gradients that I defers to W.

Knows: the products that are still to be computed, in order, and whether their operands have changed since the forward.
Does not know: how a product is computed or where its gradient goes (`wgrad_ops.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.torch_private import engine_task_id

Between = Callable[[int], None] | None
"""Called after each product of a W with its number of multiplications."""
_PLAIN = (Tensor, torch.nn.Parameter)


def is_distributed(t: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return type(t) not in _PLAIN and hasattr(t, "device_mesh")


class OperandChanged(RuntimeError):
    """An operand of a weight gradient has been changed since the forward."""

    def __init__(self, parameter: Tensor, what: str, shape: tuple[int, ...]):
        super().__init__(
            f"the {what} of a product with a weight, of shape {shape}, was changed in place; change a copy"
        )
        self.parameter, self.what, self.shape = parameter, what, shape


class WeightQueue:
    """Weight gradients that are still to be computed. Without `defer`, they are computed as soon as they are added.

    `reruns`: backward will run forwards again (activation checkpointing was seen). The mode must then be active in
    backward, too, so that the second forward meets the same functions as the first.

    `shut`: backward is run not by the stage but by a forward (`torch.autograd.grad` inside it: forces, penalties). The
    functions here are then ordinary ones: they return all gradients, which can be differentiated again.

    `task`: the engine's number for the stage's own backward, set by `begin`, a hook of its first nodes. Another number
    is a backward inside that one (`torch.autograd.grad` in a tensor hook: implicit layers, preconditioners), which
    `wants` recognises.
    """

    __slots__ = ("_items", "asked", "defer", "reruns", "shut", "task")

    def __init__(self) -> None:
        self.defer = self.reruns = self.shut = False
        self.asked = False
        """Whether a nested `torch.autograd.grad` has requested the gradient of a weight."""
        self.task: int | None = None
        self._items: list[tuple[Callable[..., None], tuple[Any, ...], tuple[int, ...]]] = []

    def begin(self, *_: Any) -> None:
        """Called when the stage's own backward starts."""
        if self.task is None:
            self.task = engine_task_id()

    def add(self, kernel: Callable[..., None], *args: Any) -> None:
        """Queue `kernel(*args)`, a function that adds one gradient into `.grad`. Not while `shut`."""
        if self.defer:
            self._items.append((kernel, args, tuple([a._version for a in args if isinstance(a, Tensor)])))
        else:
            kernel(*args)

    def run(self, between: Between = None) -> None:
        """Compute everything in the queue, the oldest first, and release each operand as soon as it has been used.
        `between` is called after each product with its number of multiplications."""
        if not self._items:
            return
        items, self._items = self._items, []
        items.reverse()
        with torch.no_grad():
            while items:
                kernel, args, versions = items.pop()
                tensors = [a for a in args if isinstance(a, Tensor)]
                # The first one is the parameter, which may change.
                for a, version in zip(tensors[1:], versions[1:]):
                    if a._version != version:
                        raise OperandChanged(args[0], "input or output gradient", tuple(a.shape))
                work = 0 if between is None else _multiplications(tensors)
                del tensors
                kernel(*args)
                del args
                if between is not None:
                    between(work)

    def work(self) -> int:
        """The number of multiplications of everything in the queue."""
        return sum(_multiplications([a for a in args if isinstance(a, Tensor)]) for _, args, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def tensors(self) -> list[Tensor]:
        """The operands that are alive only because W has not run yet."""
        return [
            a.to_local() if is_distributed(a) else a  # type: ignore[attr-defined]
            for _, args, _ in self._items
            for a in args
            if isinstance(a, Tensor) and not isinstance(a, torch.nn.Parameter)
        ]


def _multiplications(tensors: Sequence[Tensor]) -> int:
    """The number of multiplications of the product of two operands that gives a parameter's gradient; for other
    functions, the number of elements."""
    operands = [t for t in tensors[1:] if t.dim()]
    if len(operands) < 2:
        return sum(t.numel() for t in operands)
    return operands[0].numel() * operands[1].shape[-1]
