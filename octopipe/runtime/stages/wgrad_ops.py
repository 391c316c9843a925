"""What the weight-gradient split runs: the functions that fill the queue of weight gradients, and its kernels.

Knows: `autograd.Function`s whose backward returns the input gradient and queues the weight gradient, and how
a queued gradient is added to `.grad` of a parameter or of a view of one. Does not know: which calls of a
module go through them (`wgrad.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from octopipe.runtime.precision import LOW, gradient_dtype
from octopipe.runtime.stages.weight_queue import OperandChanged, WeightQueue, is_distributed
from octopipe.runtime.torch_private import (
    WithoutFunctionModes,
    engine_task_id,
    grouped_mm,
    will_engine_execute,
)
from octopipe.runtime.typed_function import Function, Gradients

# A view of a parameter: (size, stride, offset into the parameter); None means the parameter itself.
Layout = tuple[tuple[int, ...], tuple[int, ...], int] | None
_PLAIN = (Tensor, torch.nn.Parameter)


class WeightSite:
    """Where one use of a weight puts its gradient: the queue, the parameter, and the view of the parameter."""

    __slots__ = ("layout", "param", "queue")

    def __init__(self, queue: WeightQueue, param: Tensor, layout: Layout):
        self.queue, self.param, self.layout = queue, param, layout

    def wants(self) -> str:
        """What the backward that is running does with this weight's gradient. The stage's own backward adds it ("own").

        A backward nested in that one adds it, too, if it is that of a reentrant checkpoint ("own"), returns it to the
        caller of `torch.autograd.grad` ("returned"), or does not need it ("none").
        """
        queue = self.queue
        if queue.shut:
            return "returned"
        if queue.task is None or engine_task_id() == queue.task:
            return "own"
        try:
            return "own" if will_engine_execute(get_gradient_edge(self.param).node) else "none"
        except RuntimeError:  # torch raises this for a leaf whose gradient autograd.grad() returns
            queue.asked = True
            return "returned"


# --- adding into .grad -----------------------------------------------------------------------------------


def _grad_view(param: Tensor, layout: Layout) -> Tensor:
    """The part of `param.grad` (created as zeros if missing) that the view `layout` covers."""
    grad = param.grad
    if grad is None:
        grad = param.grad = torch.zeros_like(param, dtype=gradient_dtype(param))
    elif grad.layout is not torch.strided:  # a sparse embedding shares the weight
        grad = param.grad = grad.to_dense()
    if layout is None:
        return grad
    if grad.stride() != param.stride():
        grad = param.grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return grad.as_strided(layout[0], layout[1], grad.storage_offset() + layout[2])


def _is_transpose(param: Tensor, layout: Layout) -> bool:
    """Whether the view is the whole parameter with its last two dimensions swapped."""
    return (
        layout is not None
        and layout[2] == 0
        and param.ndim == len(layout[0])
        and layout[1] == param.mT.stride()
        and layout[0] == tuple(param.mT.shape)
    )


def add_product(param: Tensor, layout: Layout, a: Tensor, b: Tensor) -> None:
    """`.grad` of the view += a.mT @ b, for matrices (any leading shape is flattened) or equal batches.

    The sum is fused into the GEMM where the dtypes allow: one rounding, and no pass over a temporary. A float32
    gradient of low-precision operands gets their product in float32, never rounded in between.
    """
    if len(layout[0] if layout else param.shape) == 2:
        a, b = _rows(a), _rows(b)
    if param.grad is None and (layout is None or _is_transpose(param, layout)):
        left, right = (a, b) if layout is None else (b, a)
        param.grad = wide_product(left.mT, right, gradient_dtype(param))
        return
    add_into(_grad_view(param, layout), a.mT, b)


def add_into(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """`sums += a @ b`, for matrices or equal batches; by one kernel where there is one for the dtypes."""
    if sums.dtype == a.dtype:
        sums.addmm_(a, b) if a.ndim == 2 else sums.baddbmm_(a, b)
    elif _adds_wide(sums, a):
        add = torch.addmm if a.ndim == 2 else torch.baddbmm
        add(sums, a, b, out_dtype=sums.dtype, out=sums)
    else:
        sums.add_(wide_product(a, b, sums.dtype))


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b` in `dtype`. For a float32 product of low-precision operands, sums are never rounded to low precision."""
    if dtype == a.dtype:
        return a @ b
    if dtype is torch.float32 and a.dtype in LOW:
        if a.device.type == "cuda" and _has_wide_products(a.device):
            return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=dtype)
        with torch.autocast(a.device.type, enabled=False):  # backward may be called inside a user's autocast
            return a.to(dtype) @ b.to(dtype)
    return (a @ b).to(dtype)


def _adds_wide(view: Tensor, a: Tensor) -> bool:
    """Whether one kernel can add a product of these operands into the wider `view`."""
    return view.dtype is torch.float32 and a.dtype in LOW and view.is_cuda and _has_wide_products(view.device)


@functools.cache
def _has_wide_products(device: torch.device) -> bool:
    """Whether this torch and device can multiply bfloat16 into float32, found by trying it once."""
    try:
        a, sums = torch.ones(8, 8, dtype=torch.bfloat16, device=device), torch.ones(8, 8, device=device)
        torch.addmm(sums, a, a, out_dtype=torch.float32, out=sums)
        torch.bmm(a[None], a[None], out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def add_distributed(param: Any, layout: Layout, a: Any, b: Any) -> None:
    """`add_product` of DTensors: the product of the local parts, placed as the parameter is."""
    product = _rows(a).mT @ _rows(b)
    if product.placements != param.placements:
        product = product.redistribute(placements=param.placements)
    product = product.to(gradient_dtype(param))
    param.grad = product if param.grad is None else param.grad + product


def _add_grouped(param: Tensor, layout: Layout, x: Tensor, g: Tensor, offs: Tensor) -> None:
    """One product per group of rows: `.grad[e] += x[rows of e].T @ g[rows of e]`."""
    flip = _is_transpose(param, layout)
    a, b = (g, x) if flip else (x, g)
    product = grouped_mm(a.mT, b, offs=offs)
    if param.grad is None and (layout is None or flip):
        param.grad = product.to(gradient_dtype(param))
    else:
        _grad_view(param, layout).add_(product.mT if flip else product)


def _add_rows(param: Tensor, ids: Tensor, g: Tensor, padding_idx: int) -> None:
    """The embedding's gradient: rows of `g` added where `ids` points (deterministic on CUDA)."""
    kind = gradient_dtype(param)
    rows = torch.ops.aten.embedding_dense_backward(
        g if g.dtype == kind else g.to(kind), ids, param.shape[0], padding_idx, False
    )
    if param.grad is None:
        param.grad = rows
    else:
        _grad_view(param, None).add_(rows)


# --- the split functions ---------------------------------------------------------------------------------
# Each takes the weight as an input, so that its output requires grad even when nothing else does, and
# returns None for it: autograd then adds nothing, the queue does. Backward runs with the mode off: only
# checkpointed forwards need it there, and every call it sees costs some microseconds of host time.
# Outputs are never views, because autograd forbids in-place changes of a view that a Function created.
# A gradient that does not exist (a user's own function returned None) stays None, as in torch's own products. With
# zeros instead, the weights would have a gradient, and an optimizer would apply weight decay and momentum to them.


class Restart(BaseException):
    """Raised by a backward inside a forward whose linears used `LinearHook`: the forward must run again with `Linear`
    instead.

    It is not an Exception, so that an `except` in a layer does not catch it.
    """


class LinearHook:
    """Runs before the backward of a linear whose weight takes no gradient from autograd, and queues that gradient.

    This is the fast way: in forward and backward, this call is the only code of ours between a layer and torch's
    kernels.
    """

    __slots__ = ("site", "version", "x")

    def __init__(self, site: WeightSite, x: Tensor):
        self.site, self.version = site, x._version
        self.x: Tensor | None = x.detach()

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        queue = self.site.queue
        if queue.shut:
            raise Restart
        x, g = self.x, gradients[0]
        if queue.task is not None and engine_task_id() != queue.task:
            wants = self.site.wants()
            if wants == "none":
                return
            if wants == "returned":
                raise RuntimeError(
                    "torch.autograd.grad() inside backward asks for the gradient of a weight, for the first time after "
                    "backwards that did not: do so in the first micro-batch, too"
                )
        else:
            # The graph keeps this object until backward has ended, so drop the operand now.
            self.x = None
        if x is None:
            raise RuntimeError("backward through a split linear a second time: its input is gone")
        if x._version != self.version:
            raise OperandChanged(self.site.param, "input", tuple(x.shape))
        if g is not None:
            # F.linear's weight is [out, in], so its gradient is g.mT @ x.
            kernel = add_distributed if is_distributed(self.site.param) else add_product
            self.site.queue.add(kernel, self.site.param, self.site.layout, g, x)


class Linear(Function):
    """The slower alternative to `LinearHook`, for cases in which autograd must know what is saved, or in which only the
    weight takes a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: WeightSite, computed: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, computed)
        ctx.set_materialize_grads(False)
        ctx.site, ctx.bias_shape = site, None if bias is None else bias.shape
        w = weight if computed is None else computed
        out = F.linear(x, w, bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype))
        return out.detach() if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Gradients:
        if g is None:
            return None, None, None, None, None
        x, weight, computed = ctx.saved_tensors
        needs, site = ctx.needs_input_grad, ctx.site
        with WithoutFunctionModes():
            gb = gw = None
            if needs[2]:
                gb = _rows(g).sum(0) if len(ctx.bias_shape) == 1 else g.sum_to_size(ctx.bias_shape)
            wants = site.wants()
            if wants == "returned":
                weight = weight.to(g.dtype)
                gx = times(g, weight) if needs[0] else None
                gw = _rows(g).mT @ _rows(x)
            else:
                gx = times(g, weight if computed is None else computed) if needs[0] else None
                # F.linear's weight is [out, in], so its gradient is g.mT @ x.
                if wants == "own":
                    site.queue.add(add_product, site.param, site.layout, g, x)
        return gx, gw, gb, None, None


def _rows(x: Any) -> Any:
    """The tensor as a matrix whose rows are its last dimension; it may be empty."""
    return x if x.ndim == 2 else x.flatten(0, -2) if x.ndim > 2 else x[None]


def times(x: Tensor, matrix: Tensor) -> Tensor:
    """`x @ matrix` as one product. For an x that was transposed, `matmul` computes one small product per row unless the
    matrix takes a gradient; on a GPU that takes ten times as long."""
    if x.ndim < 3:
        return x @ matrix
    return torch.mm(_rows(x), matrix).view(*x.shape[:-1], matrix.shape[1])


def in_rows(x: Tensor) -> Tensor:
    """`x` with a layout for which a linear computes one product (see `times`)."""
    if x.ndim < 3 or not x.numel():
        return x
    shape, stride = x.shape, x.stride()
    for k in range(x.ndim - 2):  # is_contiguous ignores the stride of a dimension of size one
        if stride[k] != shape[k + 1] * stride[k + 1]:
            return _rows(x).view(shape)
    return x


class LeftOut(Linear):
    """A linear whose value is not needed: it returns zeros, with the backward of the real product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: WeightSite, computed: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, None)
        ctx.set_materialize_grads(False)
        ctx.site, ctx.bias_shape = site, None if bias is None else bias.shape
        return x.new_zeros((*x.shape[:-1], weight.shape[0]))


class Batched(Function):
    """`a @ b` (+ `bias`) where one side is a weight and both are matrices or equal batches of them."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, site: WeightSite, left: bool, computed: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(a, b, computed)
        ctx.set_materialize_grads(False)
        if computed is not None:
            a, b = (computed, b) if left else (a, computed)
        ctx.site, ctx.left, ctx.bias_shape = site, left, None if bias is None else bias.shape
        if bias is None:
            return torch.matmul(a, b)
        return torch.addmm(bias, a, b) if a.ndim == 2 else torch.baddbmm(bias, a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Gradients:
        if g is None:
            return None, None, None, None, None, None
        a, b, computed = ctx.saved_tensors
        needs, site, left = ctx.needs_input_grad, ctx.site, ctx.left
        ga = gb = None
        with WithoutFunctionModes():
            gbias = g.sum_to_size(ctx.bias_shape) if needs[2] else None
            wants = site.wants()
            if wants == "returned":
                a, b = a.to(g.dtype), b.to(g.dtype)
                ga = g @ b.mT if needs[0] else None
                gb = a.mT @ g if needs[1] else None
            elif left:
                gb = (a if computed is None else computed).mT @ g if needs[1] else None
                if wants == "own":
                    site.queue.add(add_product, site.param, site.layout, g.mT, b.mT)
            else:
                ga = g @ (b if computed is None else computed).mT if needs[0] else None
                if wants == "own":
                    site.queue.add(add_product, site.param, site.layout, a, g)
        return ga, gb, gbias, None, None, None


class Grouped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor, site: WeightSite) -> Tensor:
        ctx.save_for_backward(x, w, offs)
        ctx.set_materialize_grads(False)
        ctx.site = site
        return grouped_mm(x, w, offs=offs)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Gradients:
        if g is None:
            return None, None, None, None
        x, w, offs = ctx.saved_tensors
        site, gw = ctx.site, None
        with WithoutFunctionModes():
            if not (g.is_contiguous() or g.mT.is_contiguous()):  # the kernel takes no broadcast gradient
                g = g.contiguous()
            gx = grouped_mm(g, w.mT, offs=offs) if ctx.needs_input_grad[0] else None
            wants = site.wants()
            if wants == "returned":
                gw = grouped_mm(x.mT, g, offs=offs)
            elif wants == "own":
                site.queue.add(_add_grouped, site.param, site.layout, x, g, offs)
        return gx, gw, None, None


class Embedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int, site: WeightSite) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)
        ctx.site, ctx.padding_idx, ctx.rows = site, padding_idx, weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Gradients:
        if g is None:
            return None, None, None, None
        (ids,) = ctx.saved_tensors
        gw = None
        with WithoutFunctionModes():
            wants = ctx.site.wants()
            if wants == "returned":
                gw = torch.ops.aten.embedding_dense_backward(g, ids, ctx.rows, ctx.padding_idx, False)
            elif wants == "own":
                ctx.site.queue.add(_add_rows, ctx.site.param, ids, g, ctx.padding_idx)
        return None, gw, None, None
