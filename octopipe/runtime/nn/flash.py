"""Attention on torch's own flash kernels, with windows and sinks.

Knows: how torch's flash attention is called for a window of keys and for grouped key heads, and how a sink (a logit
that joins the softmax and carries no value) enters through the softmax's normaliser. Does not know: layers, or devices
whose kernels lack any of this (`attention.attend` has a way for those).

A sink only changes the normaliser of every row. Let `lse` be a row's log-sum-exp over its keys, and `all` that over its
keys and the sink. The output is `exp(lse - all)` times the kernel's output. The kernel's backward takes the normaliser
and the output as arguments, so with `all` and the scaled output it returns the exact gradients of queries, keys and
values. The sink's gradient is the sum over rows of `-exp(sink - all)` times the dot product of the row's output and its
gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.precision import LOW
from octopipe.runtime.torch_private import flash_attention_on_device, flash_attention_on_host
from octopipe.runtime.typed_function import Function, Gradients

MAX_HEAD_DIM = 256


def fits(q: Tensor, v: Tensor, *, window: int | None) -> bool:
    """Whether torch's flash-attention kernels support these heads on this device."""
    if q.shape[-1] != v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return window is None and not torch.is_autocast_enabled("cpu")
    known = q.device.type == "cuda" and q.dtype in LOW and q.shape[-1] % 8 == 0 and q.shape[-1] <= MAX_HEAD_DIM
    return known and _works(q.device)


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether the kernels of this torch support windows and grouped heads; tried once."""
    try:
        q = torch.ones(1, 4, 32, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
        kv = torch.ones(1, 2, 32, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
        with torch.enable_grad():
            out = FlashAttention.apply(q, kv, kv, torch.zeros(4, device=device), 8, 0.25)
        out.sum().backward()
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return False
    return True


class FlashAttention(Function):
    """Causal attention of `q` [batch, heads, tokens, dim] over `k` and `v`, which may have fewer heads."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int | None, scale: float
    ) -> Tensor:
        kernel = _OnHost if q.device.type == "cpu" else _OnDevice
        call = kernel(q, k, v, window, scale)
        out, lse = call.forward()  # lse: [batch, heads, tokens]
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = (out * (lse - whole).exp()[..., None]).to(q.dtype)
            lse = whole
        ctx.call, ctx.sinks_dtype = call.light(), None if sinks is None else sinks.dtype
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        gs = None
        if sinks is not None and ctx.needs_input_grad[3]:
            rows = (g * out).sum(-1, dtype=lse.dtype)
            gs = -((sinks.to(lse.dtype)[:, None] - lse).exp() * rows).sum((0, 2)).to(ctx.sinks_dtype)
        gq, gk, gv = ctx.call.backward(g, q, k, v, out, lse)
        return gq, gk, gv, gs, None, None


class _OnHost:
    """torch's flash attention for CPUs: no windows, equal heads."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float):
        assert window is None
        self.scale, self.groups = scale, q.shape[1] // k.shape[1]
        self._given: tuple[Tensor, ...] = (q, k, v)

    def light(self) -> _OnHost:
        self._given = ()
        return self

    def _whole(self, x: Tensor) -> Tensor:
        return x if self.groups == 1 else x.repeat_interleave(self.groups, dim=1)

    def forward(self) -> tuple[Tensor, Tensor]:
        q, k, v = self._given
        found = flash_attention_on_host()[0](q, self._whole(k), self._whole(v), 0.0, True, scale=self.scale)
        return found[0], found[1]

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
        gq, gk, gv = flash_attention_on_host()[1](
            g, q, self._whole(k), self._whole(v), out, lse, 0.0, True, scale=self.scale
        )
        if self.groups > 1:
            gk, gv = (t.unflatten(1, (-1, self.groups)).sum(2) for t in (gk, gv))
        return gq, gk, gv


class _OnDevice:
    """torch's flash attention on CUDA, as packed sequences of equal length: rows of [heads, dim]."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float):
        self.batch, self.tokens, self.scale = q.shape[0], q.shape[2], scale
        self._given: tuple[Tensor, ...] = (q, k, v)
        self.ends = torch.arange(0, (self.batch + 1) * self.tokens, self.tokens, dtype=torch.int32, device=q.device)
        self.state: tuple[Tensor, ...] = ()
        # A window is causal by its right edge (0). Without a window, the kernel's causal path is faster.
        self.edges = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}

    def light(self) -> _OnDevice:
        self._given = ()
        return self

    def _rows(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.batch, self.tokens)).transpose(1, 2)

    def forward(self) -> tuple[Tensor, Tensor]:
        q, k, v = (self._rows(t) for t in self._given)
        out, lse, *self_state = flash_attention_on_device()[0](
            q, k, v, self.ends, self.ends, self.tokens, self.tokens, 0.0, not self.edges, False,
            scale=self.scale, **self.edges,
        )  # fmt: skip
        self.state = tuple(self_state[:2])
        return self._heads(out), lse.view(lse.shape[0], self.batch, self.tokens).transpose(0, 1)

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
        rows = lse.transpose(0, 1).reshape(lse.shape[1], -1)
        found = flash_attention_on_device()[1](
            self._rows(g), self._rows(q), self._rows(k), self._rows(v), self._rows(out), rows, self.ends, self.ends,
            self.tokens, self.tokens, 0.0, not self.edges, *self.state, scale=self.scale, **self.edges,
        )  # fmt: skip
        return tuple(self._heads(t) for t in found)
