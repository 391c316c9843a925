"""A loss that a layer adds to the graph itself, as routers of Megatron and DeepSeek do."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


class InjectedLoss(torch.autograd.Function):
    """Passes `x` on; in the backward, `loss` gets the gradient `scale`, without being part of the loss's value."""

    @staticmethod
    def forward(ctx, x, loss, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_full((), ctx.scale), None
