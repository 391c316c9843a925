"""The boundaries of a stage's autograd graph, and running backward through it.

Knows: how an input is detached from the graph before it, how a gradient enters at an output, and torch's autograd
engine. Does not know: stages or their layers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.stages.wgrad_ops import Restart
from octopipe.runtime.torch_private import PythonFunctionNode, engine_run_backward, run_engine
from octopipe.runtime.typed_function import Function


class Enter(Function):
    """The input of a stage as its layers see it: an ordinary tensor inside a graph, in the same memory.

    A leaf would not do: torch does not allow changing a leaf in place, `retain_grad` has no effect on it, and we use
    its gradient ourselves. The version counter is shared, so whoever saved that memory notices a change. A gradient
    that does not exist stays None.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def run_backward(roots: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> None:
    if run_engine is not None and gradients[0].is_cpu:
        run_engine(roots, gradients, False, False, (), True, True)
    elif engine_run_backward is None:
        torch.autograd.backward(roots, gradients)
    else:
        engine_run_backward(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def edge_of(tensor: Tensor) -> Any:
    """The edge at which the tensor's gradient enters the graph; keeps the graph alive, but not the tensor."""
    node = tensor.grad_fn
    # A node of a Function written in Python does not own its graph; torch's `get_gradient_edge` handles that.
    if node is None or isinstance(node, PythonFunctionNode):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def gradient_of_one(edge: Any) -> Tensor:
    """The gradient of a scalar loss whose gradient enters the graph here."""
    like = edge.node._input_metadata[edge.output_nr]
    if math.prod(like.shape) != 1:
        raise OctoPipeError(f"backward without gradients needs a scalar loss, not shape {tuple(like.shape)}")
    return torch.ones(like.shape, dtype=like.dtype, device=like.device)


class Dropped:
    """Placeholder for what autograd would save in a forward that R repeats."""

    __slots__ = ("place", "running")

    def __init__(self, place: str):
        self.place, self.running = place, True

    def pack(self, _: Tensor) -> Dropped:
        return self

    def unpack(self, _: Dropped) -> Tensor:
        if self.running:
            raise Restart  # a forward that runs backward itself
        raise OctoPipeError(
            f"a tensor that layers up to {self.place} made in their forward is differentiated outside of them (kept in "
            "a list or an attribute, say), and they are recomputed, so its graph is gone; return it as an output, or "
            "plan without recomputation there (octopipe tune --no-recompute)"
        )
