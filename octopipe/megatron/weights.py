"""The weight-gradient split for Megatron-Core's layers: I skips the weight GEMMs, W computes them.

Knows: two kinds of layers. Local ones (`ColumnParallelLinear`, `RowParallelLinear`: attention, MLPs, experts, Mamba
projections, the head) get a product whose backward returns the input gradient, with Megatron's tensor- and
sequence-parallel communication, and queues the weight's. Transformer Engine's have their own queue: with
`delay_wgrad_compute` their `backward_dw()` is W. Everything else (norms, embeddings, routers, scans) is done in I.
Does not know: plans, chunks.

A gradient goes where Megatron collects it: into `main_grad` under its DDP, else into `grad`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octopipe.runtime.precision import gradient_dtype
from octopipe.runtime.stages.weight_queue import WeightQueue
from octopipe.runtime.stages.wgrad_ops import add_into, times, wide_product
from octopipe.runtime.torch_private import unsafe_view
from octopipe.runtime.typed_function import Function, Gradients

_HOLDER = "_octopipe_split"
"""Name of the attribute by which a layer refers to the split that its products use."""


class Split:
    """Directs the weight gradients of one chunk's layers into the queue of the micro-batch that runs, and defers them
    or not."""

    def __init__(self, chunk: nn.Module):
        self.queue = WeightQueue()
        self.local = list(_local_linears(chunk))
        self.take_over()
        self.engine: list[Any] = [m for m in _with_own_queue(chunk) if not any(m is x for x in self.local)]
        """Transformer Engine's modules, which defer weight gradients in queues of their own, first in, first out."""

    def take_over(self) -> None:
        """Direct the products of these layers to this split from now on. A layer belongs to one split at a time: to the
        last one that was made, unless another takes over (of a layer that is measured alone, beside the chunk it is
        part of)."""
        for linear in self.local:
            _divert(linear, self)

    def let_go(self) -> None:
        """Restore Megatron's own products in the layers, whichever split they belonged to."""
        for linear in self.local:
            known = linear.__dict__.pop(_HOLDER, None)
            if known is None:
                continue
            del linear.__dict__["_forward_impl"]
            if known.own is not None:
                linear.__dict__["_forward_impl"] = known.own

    def weight(self, queue: WeightQueue) -> None:
        """Run W of the micro-batch that owns the queue (in Transformer Engine: of the oldest one that waits)."""
        queue.run()
        for module in self.engine:
            module.backward_dw()


def _local_linears(chunk: nn.Module) -> Iterator[nn.Module]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield module


def _with_own_queue(chunk: nn.Module) -> list[nn.Module]:
    """Return the innermost modules with `backward_dw` whose config defers weight gradients."""
    out = []
    for module in chunk.modules():
        if not callable(getattr(module, "backward_dw", None)):
            continue
        config = getattr(module, "config", None)
        inner = any(callable(getattr(m, "backward_dw", None)) for m in module.modules() if m is not module)
        if not inner and getattr(config, "delay_wgrad_compute", False):
            out.append(module)
    return out


class _Holder:
    """The split that a layer's products go to, and the `_forward_impl` that the layer itself (not its class) had
    before, if any."""

    __slots__ = ("own", "split")

    def __init__(self, split: Split, own: Any):
        self.split, self.own = split, own


def _divert(linear: Any, split: Split) -> None:
    known = linear.__dict__.get(_HOLDER)
    if known is not None:
        known.split = split
        return
    usual = linear._forward_impl
    holder = _Holder(split, linear.__dict__.get("_forward_impl"))

    def product(input: Tensor, weight: Tensor, *args: Any, **more: Any) -> Tensor:
        bias = more.get("bias")
        differentiates = input.requires_grad or (bias is not None and bias.requires_grad)
        buffered = more.get("grad_output_buffer") is not None
        if args or buffered or not weight.requires_grad or not differentiates or not torch.is_grad_enabled():
            return usual(input, weight, *args, **more)
        gathers = bool(more.get("sequence_parallel", False))
        return _Product.apply(
            input,
            weight.detach(),
            bias,
            [weight],
            holder,
            bool(more.get("allreduce_dgrad")),
            gathers,
            more.get("tp_group"),
        )

    linear.__dict__[_HOLDER] = holder
    linear.__dict__["_forward_impl"] = product


class _Product(Function):
    """input @ weight.T + bias; the weight's gradient is queued, all others are returned."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Any, parameter: list[Tensor], holder: _Holder,
        reduces: bool, gathers: bool, group: Any,
    ) -> Tensor:  # fmt: skip
        # In a list, the parameter is not a differentiable input: its hooks (DDP's) must not see a gradient before W.
        ctx.save_for_backward(input, weight)
        ctx.parameter, ctx.holder, ctx.group = parameter[0], holder, group
        ctx.reduces, ctx.gathers, ctx.has_bias = reduces, gathers, bias is not None
        whole = _gathered(input, group) if gathers else input
        out = times(whole, weight.t())
        if bias is not None:
            return out + bias
        # Not a view: Megatron's cross entropy changes fp32 logits in place, which autograd forbids for a view that
        # a custom function returns.
        return unsafe_view(out, out.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        input, weight = ctx.saved_tensors
        own = None
        if ctx.needs_input_grad[0]:
            own = times(grad, weight)
            if ctx.reduces and ctx.group is not None and ctx.group.size() > 1:
                dist.all_reduce(own, group=ctx.group)
            if ctx.gathers:
                own = _scattered(own, ctx.group)
        bias = grad.sum(dim=tuple(range(grad.ndim - 1))) if ctx.has_bias else None
        ctx.holder.split.queue.add(_add, ctx.parameter, grad, input, ctx.group if ctx.gathers else None)
        return own, None, bias, None, None, None, None, None


def _add(parameter: Tensor, grad: Tensor, input: Tensor, group: Any) -> None:
    """Add grad.T @ input to the tensor in which the parameter's gradient is accumulated."""
    whole = _gathered(input, group) if group is not None else input
    a, b = grad.reshape(-1, grad.shape[-1]), whole.reshape(-1, whole.shape[-1])
    main = getattr(parameter, "main_grad", None)
    if main is not None:
        add_into(main, a.t(), b)
    elif parameter.grad is None:
        parameter.grad = wide_product(a.t(), b, gradient_dtype(parameter))
    else:
        add_into(parameter.grad, a.t(), b)


def _gathered(input: Tensor, group: Any) -> Tensor:
    if group is None or group.size() == 1:
        return input
    whole = torch.empty((input.shape[0] * group.size(), *input.shape[1:]), dtype=input.dtype, device=input.device)
    dist.all_gather_into_tensor(whole, input.contiguous(), group=group)
    return whole


def _scattered(grad: Tensor, group: Any) -> Tensor:
    if group is None or group.size() == 1:
        return grad
    part = torch.empty((grad.shape[0] // group.size(), *grad.shape[1:]), dtype=grad.dtype, device=grad.device)
    dist.reduce_scatter_tensor(part, grad.contiguous(), group=group)
    return part
