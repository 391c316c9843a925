"""Norms, the token embedding, the feed-forward layer and the block: the plain parts of a model.

Knows: how a `Layer` of `octopipe.models.layers` becomes an `nn.Module` that adds its result to the residual stream.
Does not know: mixers (`attention.py`, `mamba.py`, `delta.py`), experts (`moe.py`), the loss (`head.py`) or
how parameters start (`build.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octopipe.models import layers as spec
from octopipe.runtime.stages.shards import marked, rows_at, with_rows
from octopipe.runtime.torch_private import WithoutFunctionModes
from octopipe.runtime.typed_function import Function, Gradients

Made = dict[str, Any]
"""Keyword arguments (dtype and device) that every constructor passes on to its parameters."""


def norm(kind: spec.Norm, width: int, eps: float, made: Made) -> nn.Module:
    """A new norm for vectors of `width` entries."""
    return nn.RMSNorm(width, eps=eps, **made) if kind == "rms" else nn.LayerNorm(width, eps=eps, **made)


def empty(*shape: int, made: Made) -> nn.Parameter:
    """A parameter whose values are not initialised yet."""
    return nn.Parameter(torch.empty(*shape, **made))


def at_least_float32(made: Made) -> Made:
    """The same keywords with at least float32, for parameters that would not change under updates in low precision."""
    dtype = made.get("dtype")
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return {**made, "dtype": wide}


def activate(kind: spec.Activation, x: Tensor) -> Tensor:
    """The activation between up and down projection; gated ones halve the width."""
    if kind in spec.GATED:
        gate, up = x.chunk(2, dim=-1)
        return (F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")) * up
    if kind == "relu2":
        return F.relu(x).square()
    if kind == "gelu":
        return F.gelu(x, approximate="tanh")
    return F.relu(x) if kind == "relu" else F.silu(x)


class Residual(nn.Module):
    """`x + inner(norm(x))`, with a second norm after `inner` if `post_norm` (Gemma)."""

    def __init__(self, width: int, eps: float, made: Made, kind: spec.Norm = "rms", post_norm: bool = False):
        super().__init__()
        self.norm = norm(kind, width, eps, made)
        self.post_norm = norm(kind, width, eps, made) if post_norm else None

    def inner(self, x: Tensor) -> Tensor:
        """What the layer adds to the residual stream."""
        raise NotImplementedError

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.inner(self.norm(hidden))
        return hidden + (out if self.post_norm is None else self.post_norm(out))

    def special_init(self, generator: torch.Generator) -> None:
        """Initialise the parameters that are neither normal (matrices), zero (biases) nor one (norms)."""


class Embedding(nn.Module):
    """Token ids [batch, tokens] to hidden states [batch, tokens, hidden]."""

    def __init__(self, layer: spec.Embedding, made: Made, tied: bool):
        super().__init__()
        self.weight = empty(layer.vocab, layer.hidden, made=made)
        self.positions = empty(layer.positions, layer.hidden, made=made) if layer.positions else None
        self.multiplier = layer.multiplier
        self.tied_to: dict[str, str] = {"weight": "embedding"} if tied else {}

    def vocabulary_shard(self, number: int, count: int) -> nn.Module:
        """The embedding of a part of the vocabulary, zero for all other tokens; only the first shard adds positions."""
        shard, start, whole = with_rows(self, "weight", number, count)
        shard.start, shard.first = start, number == 0  # type: ignore[assignment]
        return marked(shard, start, {"weight": whole})

    start: int | None = None
    """The first token id of a shard; None for a whole embedding."""
    first = True
    """Whether this module adds the positions (of several shards, only the first one does)."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.start is None:
            hidden = F.embedding(tokens, self.weight)
        else:
            hidden = rows_at(tokens, self.weight, self.start)
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if self.positions is None or not self.first:
            return hidden
        return hidden + self.positions[: tokens.shape[-1]]


class Mlp(Residual):
    """Dense feed-forward; the gate and up matrices of gated activations are one projection."""

    def __init__(self, layer: spec.Mlp, eps: float, made: Made):
        super().__init__(layer.hidden, eps, made, layer.norm, layer.post_norm)
        wide = (layer.matrices - 1) * layer.ffn
        self.up = nn.Linear(layer.hidden, wide, bias=layer.bias, **made)
        self.down = nn.Linear(layer.ffn, layer.hidden, bias=layer.bias, **made)
        self.activation = layer.activation

    def inner(self, x: Tensor) -> Tensor:
        return self.down(activate(self.activation, self.up(x)))


class Block(nn.Module):
    """A mixer and a feed-forward layer that are partitioned as one."""

    def __init__(self, mixer: nn.Module, ffn: nn.Module):
        super().__init__()
        self.mixer, self.ffn = mixer, ffn

    def forward(self, hidden: Tensor) -> Tensor:
        return self.ffn(self.mixer(hidden))


def inverse_softplus(x: Tensor) -> Tensor:
    """`y` with `softplus(y) == x`, for positive `x`."""
    return x + torch.log(-torch.expm1(-x))


def time_step_bias(shape: torch.Size, generator: torch.Generator, device: torch.device) -> Tensor:
    """Mamba's initialisation: time steps from 0.001 to 0.1, evenly spaced on a logarithmic scale."""
    low, high = math.log(1e-3), math.log(1e-1)
    steps = torch.rand(shape, generator=generator, device=device) * (high - low) + low
    return inverse_softplus(steps.exp())


class CausalConv(Function):
    """Depthwise convolution of `x` [batch, tokens, channels] over past tokens; `weight` [channels, taps].

    Computed as a sum of shifted products, so that the layout stays token-major and nothing has to be transposed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        last = weight.shape[1] - 1
        y = x * weight[:, last] if bias is None else torch.addcmul(bias, x, weight[:, last])
        for back in range(1, min(last + 1, x.shape[1])):
            y[:, back:].addcmul_(x[:, :-back], weight[:, last - back])
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        tokens, last = x.shape[1], weight.shape[1] - 1
        gx = g * weight[:, last]
        for back in range(1, min(last + 1, tokens)):
            gx[:, :-back].addcmul_(g[:, back:], weight[:, last - back])
        gw = torch.stack([(g[:, b:] * x[:, : max(0, tokens - b)]).sum((0, 1)) for b in range(last, -1, -1)], 1)
        return gx, gw, g.sum((0, 1)) if ctx.needs_input_grad[2] else None


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`CausalConv` with its parameters in the dtype of `x`."""
    if weight.dtype != x.dtype:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return CausalConv.apply(x, weight, bias)


def without_split(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator for the part of a layer without weight matrices: it hides the part's calls of torch from `SplitMode`,
    which would check each of them in vain."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        with WithoutFunctionModes():
            return function(*args, **kwargs)

    return wrapped
