"""The weight-gradient split: input gradients now, weight-gradient GEMMs when asked.

Knows: which torch calls multiply by a parameter, how to run such a call so that its backward hands back the
input gradient at once and leaves the weight gradient in a `WeightQueue`, and how a queued gradient is added
to `.grad`. Does not know: stages, micro-batches or plans (`stage.py`), nor any module class: it looks at
function calls, so plain `nn.Linear`, `F.linear`, `x @ w`, `addmm`, `bmm`, `torch._grouped_mm` and
`F.embedding` inside anybody's module are all split alike.

How. `SplitMode` is a `TorchFunctionMode` that is active while a stage runs forward (and backward, because
activation checkpointing re-runs forwards there). A call whose weight is a plain trainable parameter, or a
view or a cast of one, goes through an `autograd.Function`; every other call is left alone and then its whole
backward happens with the input gradient. Left alone are: frozen weights, computed weights (weight norm),
tensor subclasses (DTensor, so TP and FSDP2 modules), parameters with gradient hooks (DDP), anything inside
`torch.compile` or a functorch transform.

    queue = WeightQueue()
    with SplitMode(module.parameters(), queue):
        loss = module(x)
        queue.defer = True
        loss.backward()          # I: everything but the weight GEMMs (outside the mode if not queue.reruns)
    queue.run()                  # W
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

# A view of a parameter: (size, stride, offset into the parameter); None means the parameter itself.
Layout = tuple[tuple[int, ...], tuple[int, ...], int] | None

_PLAIN = (Tensor, torch.nn.Parameter)
_VIEW_NODES = frozenset(
    f"{name}Backward{i}"
    for name in (
        "T", "Transpose", "Permute", "Select", "Slice", "View", "Unsqueeze", "Squeeze", "Split",
        "SplitWithSizes", "Unbind", "Alias", "ReshapeAlias", "UnsafeView",
    )
    for i in range(4)
)  # fmt: skip


class WeightQueue:
    """Weight gradients still owed. With `defer` off they are computed the moment they are added.

    `reruns` says whether backward will run forwards again (activation checkpointing was seen): then the mode
    must be active there, too, so that the second forward meets the same functions as the first.
    """

    __slots__ = ("_items", "defer", "reruns")

    def __init__(self) -> None:
        self.defer = self.reruns = False
        self._items: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def add(self, kernel: Callable[..., None], *args: Any) -> None:
        """Queue `kernel(*args)`, a function that adds one gradient into `.grad`."""
        if self.defer:
            self._items.append((kernel, args))
        else:
            kernel(*args)

    def run(self) -> None:
        """Compute everything queued, oldest first, letting go of each operand as soon as it is used."""
        if not self._items:
            return
        items, self._items = self._items, []
        items.reverse()
        with torch.no_grad():
            while items:
                kernel, args = items.pop()
                kernel(*args)
                del args

    def __len__(self) -> int:
        return len(self._items)

    def tensors(self) -> list[Tensor]:
        """The GEMM operands that are alive only because W has not run yet."""
        return [
            a
            for _, args in self._items
            for a in args
            if isinstance(a, Tensor) and not isinstance(a, torch.nn.Parameter)
        ]


class WeightSite:
    """Where one use of a weight leaves its gradient: the queue, the parameter, and the view of it."""

    __slots__ = ("layout", "param", "queue")

    def __init__(self, queue: WeightQueue, param: Tensor, layout: Layout):
        self.queue, self.param, self.layout = queue, param, layout


# --- adding into .grad -----------------------------------------------------------------------------------


def _grad_view(param: Tensor, layout: Layout) -> Tensor:
    """The part of `param.grad` (made if missing) that the view described by `layout` covers."""
    grad = param.grad
    if grad is None:
        grad = param.grad = torch.zeros_like(param)
    if layout is None:
        return grad
    if grad.stride() != param.stride():
        grad = param.grad = torch.empty_like(param).copy_(grad)
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

    The sum is fused into the GEMM where the dtypes allow: one rounding, and no pass over a temporary.
    """
    if len(layout[0] if layout else param.shape) == 2:
        a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    if param.grad is None and (layout is None or _is_transpose(param, layout)):
        product = a.mT @ b if layout is None else b.mT @ a
        param.grad = product.to(param.dtype)
        return
    view = _grad_view(param, layout)
    if view.dtype != a.dtype:
        view.add_(a.mT @ b)
    elif a.ndim == 2:
        view.addmm_(a.mT, b)
    else:
        view.baddbmm_(a.mT, b)


def _add_grouped(param: Tensor, layout: Layout, x: Tensor, g: Tensor, offs: Tensor) -> None:
    """One product per group of rows: `.grad[e] += x[rows of e].T @ g[rows of e]`."""
    flip = _is_transpose(param, layout)
    a, b = (g, x) if flip else (x, g)
    product = torch._grouped_mm(a.mT, b, offs=offs)
    if param.grad is None and (layout is None or flip):
        param.grad = product.to(param.dtype)
    else:
        _grad_view(param, layout).add_(product.mT if flip else product)


def _add_rows(param: Tensor, ids: Tensor, g: Tensor, padding_idx: int) -> None:
    """The embedding's gradient: rows of `g` added where `ids` points (deterministic on CUDA)."""
    rows = torch.ops.aten.embedding_dense_backward(g, ids, param.shape[0], padding_idx, False)
    if param.grad is None:
        param.grad = rows.to(param.dtype)
    else:
        param.grad.add_(rows)


# --- the split functions ---------------------------------------------------------------------------------
# Each takes the weight as an input, so that its output requires grad even when nothing else does, and
# returns None for it: autograd then adds nothing, the queue does. Backward runs with the mode off: only
# checkpointed forwards need it there, and every call it sees costs some microseconds of host time.
_mode_off = torch._C.DisableTorchFunction


def _saved_tensor_hooks() -> object:
    """Hooks on what autograd saves, which checkpointing works by; not None where torch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return True if top is None else top(True)


class _Linear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, site, computed):  # type: ignore[override]
        w = weight if computed is None else computed
        ctx.save_for_backward(x, w)
        ctx.site = site
        return F.linear(x, w, bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        x, w = ctx.saved_tensors
        needs, site = ctx.needs_input_grad, ctx.site
        with _mode_off():
            gx = g @ w if needs[0] else None
            gb = g.reshape(-1, g.shape[-1]).sum(0) if needs[2] else None
            # F.linear's weight is [out, in], so its gradient is g.mT @ x.
            site.queue.add(add_product, site.param, site.layout, g, x)
        return gx, None, gb, None, None


class _Batched(Function):
    """`a @ b` (+ `bias`) where one side is a weight and both are matrices or equal batches of them."""

    @staticmethod
    def forward(ctx, a, b, bias, site, left, computed):  # type: ignore[override]
        if computed is not None:
            a, b = (computed, b) if left else (a, computed)
        ctx.save_for_backward(a, b)
        ctx.site, ctx.left, ctx.bias_shape = site, left, None if bias is None else bias.shape
        if bias is None:
            return torch.matmul(a, b)
        return torch.addmm(bias, a, b) if a.ndim == 2 else torch.baddbmm(bias, a, b)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        a, b = ctx.saved_tensors
        needs, site, left = ctx.needs_input_grad, ctx.site, ctx.left
        with _mode_off():
            ga = g @ b.mT if needs[0] and not left else None
            gb = a.mT @ g if needs[1] and left else None
            gbias = g.sum_to_size(ctx.bias_shape) if needs[2] else None
            if left:
                site.queue.add(add_product, site.param, site.layout, g.mT, b.mT)
            else:
                site.queue.add(add_product, site.param, site.layout, a, g)
        return ga, gb, gbias, None, None, None


class _Grouped(Function):
    @staticmethod
    def forward(ctx, x, w, offs, site):  # type: ignore[override]
        ctx.save_for_backward(x, w, offs)
        ctx.site = site
        return torch._grouped_mm(x, w, offs=offs)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        x, w, offs = ctx.saved_tensors
        site = ctx.site
        with _mode_off():
            if not (g.is_contiguous() or g.mT.is_contiguous()):  # the kernel takes no broadcast gradient
                g = g.contiguous()
            gx = torch._grouped_mm(g, w.mT, offs=offs) if ctx.needs_input_grad[0] else None
            site.queue.add(_add_grouped, site.param, site.layout, x, g, offs)
        return gx, None, None, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx, ids, weight, padding_idx, site):  # type: ignore[override]
        ctx.save_for_backward(ids)
        ctx.site, ctx.padding_idx = site, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        with _mode_off():
            ctx.site.queue.add(_add_rows, ctx.site.param, ids, g, ctx.padding_idx)
        return None, None, None, None


# --- the interception ------------------------------------------------------------------------------------


class SplitMode(TorchFunctionMode):
    """While active, calls that multiply by one of `params` are split; their weight part goes to `queue`.

    `queue` may be set anew for every micro-batch. The mode keeps one low-precision copy per weight that
    autocast casts (`clear_casts` drops them), where autocast alone keeps one per micro-batch in flight.
    """

    def __init__(self, params: Iterable[Tensor], queue: WeightQueue):
        super().__init__()
        self.queue = queue
        # By identity: a parameter put in later (FSDP2's unsharded ones) is simply not split.
        self._params = {id(p): p for p in params if type(p) in _PLAIN and p.requires_grad}
        self._casts: dict[tuple[int, Layout], tuple[int, Tensor]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        # Dynamo traces this method: inside a compiled layer it must vanish.
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        handler = _HANDLERS.get(func)
        if handler is not None:
            if torch.is_grad_enabled():
                result = handler(self, *args, **kwargs) if kwargs else handler(self, *args)
                if result is not None:
                    return result
            else:
                self.queue.reruns = True  # perhaps the first forward of a reentrant checkpoint
        return func(*args, **kwargs) if kwargs else func(*args)

    def site(self, weight: Any) -> WeightSite | None:
        """Where the gradient of this use of `weight` goes; None if it must stay with autograd."""
        found = self._params.get(id(weight))
        layout: Layout = None
        if found is None:
            if type(weight) is not Tensor or weight.grad_fn is None:
                return None
            found, layout = self._behind(weight)
            if found is None:
                return None
        if not found.requires_grad or found._backward_hooks or found._post_accumulate_grad_hooks:
            return None
        if torch._C._are_functorch_transforms_active():
            return None
        if _saved_tensor_hooks() is not None:
            self.queue.reruns = True
        return WeightSite(self.queue, found, layout)

    def _behind(self, weight: Tensor) -> tuple[Tensor | None, Layout]:
        """The parameter that `weight` is a view or a cast (or a view of a cast) of, and which view."""
        base, node = weight, weight.grad_fn
        if weight._is_view():
            base = weight._base  # type: ignore[assignment]
            while node is not None and node.name() in _VIEW_NODES:
                node = node.next_functions[0][0]
        cast = node is not None and node.name() == "ToCopyBackward0"
        if cast:
            node = node.next_functions[0][0]  # type: ignore[union-attr]
        # Anything else on the way (a user's own Function that returns a view, say) has its own gradient rule.
        param = self._params.get(id(getattr(node, "variable", None)))
        if param is None or not (base is param or (cast and base.stride() == param.stride())):
            return None, None
        if base.shape != param.shape or weight.is_conj() or weight.is_neg():
            return None, None
        if weight is base:
            return param, None
        reach = 1
        for stride, size in sorted((st, sz) for st, sz in zip(weight.stride(), weight.shape) if sz > 1):
            if stride < reach:  # overlapping (expanded) view: two entries would share one gradient
                return None, None
            reach = stride * size
        offset = int(weight.storage_offset()) - int(base.storage_offset())
        return param, (tuple(weight.shape), tuple(weight.stride()), offset)

    def autocast(self, x: Tensor, weight: Tensor, site: WeightSite) -> tuple[Tensor, Tensor | None]:
        """`x` and the weight's values as autocast would cast them; None for the weight as it is."""
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return x, None
        dtype = torch.get_autocast_dtype(kind)
        if x.dtype not in (dtype, torch.float64):
            x = x.to(dtype)
        if weight.dtype in (dtype, torch.float64):
            return x, None
        key = (id(site.param), site.layout)
        known = self._casts.get(key)
        if known is None or known[0] != site.param._version or known[1].dtype != dtype:
            known = self._casts[key] = (site.param._version, weight.detach().to(dtype))
        return x, known[1]

    def clear_casts(self) -> None:
        """Drop the low-precision copies of the weights (call when the step is over)."""
        self._casts.clear()


def site_of(weight: Tensor) -> WeightSite | None:
    """For an `autograd.Function` of your own: where the running stage wants this weight's gradient.

    None outside a stage, and for weights that are not split: then return the gradient to autograd. Otherwise
    call `site.queue.add(kernel, site.param, site.layout, ...)` in backward and return None for the weight.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, SplitMode):
            return mode.site(weight)
    return None


# A handler returns None for a call it leaves alone.


def _linear(mode: SplitMode, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    site = mode.site(weight)
    if site is None or type(input) not in _PLAIN or input is weight or input.ndim == 0:
        return None
    input, computed = mode.autocast(input, weight, site)
    return _Linear.apply(input, weight, bias, site, computed)


def _matmul(mode: SplitMode, input: Tensor, other: Tensor, **more: Any) -> Tensor | None:
    if more or type(input) not in _PLAIN or type(other) not in _PLAIN:
        return None
    if other.ndim == 2 and input.ndim >= 1 and mode.site(other) is not None:
        # A product of two weights stays with autograd.
        return None if mode.site(input) is not None else _linear(mode, input, other.t())
    return _batched(mode, input, other, None)


def _rmatmul(mode: SplitMode, input: Tensor, other: Tensor) -> Tensor | None:
    return _matmul(mode, other, input)


def _batched(mode: SplitMode, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor | None:
    if type(a) not in _PLAIN or type(b) not in _PLAIN or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2]:
        return None
    if a.ndim not in (2, 3):
        return None
    site, other = mode.site(b), mode.site(a)
    left = site is None
    if left:
        site = other
    elif other is not None:
        return None
    if site is None:
        return None
    if left:
        b, computed = mode.autocast(b, a, site)
    else:
        a, computed = mode.autocast(a, b, site)
    if bias is not None and bias.dtype != (b if left else a).dtype:
        bias = bias.to((b if left else a).dtype)
    return _Batched.apply(a, b, bias, site, left, computed)


def _mm(mode: SplitMode, input: Tensor, mat2: Tensor, **more: Any) -> Tensor | None:
    return _matmul(mode, input, mat2, **more)


def _addmm(mode: SplitMode, input: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> Tensor | None:
    if any(more.pop(k, 1) != 1 for k in ("alpha", "beta")) or more or type(input) not in _PLAIN:
        return None
    if input.ndim == 1 and input.shape[0] == mat2.shape[-1]:
        site = mode.site(mat2)
        return None if site is None or mode.site(mat1) is not None else _linear(mode, mat1, mat2.t(), input)
    return _batched(mode, mat1, mat2, input)


def _baddbmm(mode: SplitMode, input: Tensor, batch1: Tensor, batch2: Tensor, **more: Any) -> Tensor | None:
    if any(more.pop(k, 1) != 1 for k in ("alpha", "beta")) or more or type(input) not in _PLAIN:
        return None
    return _batched(mode, batch1, batch2, input)


def _grouped(mode: SplitMode, input: Tensor, mat2: Tensor, offs: Any = None, **more: Any) -> Tensor | None:
    if any(v is not None for v in more.values()) or input.ndim != 2 or mat2.ndim != 3 or offs is None:
        return None
    site = mode.site(mat2)
    if site is None or type(input) not in _PLAIN:
        return None
    return _Grouped.apply(input, mat2, offs, site)


def _embedding(
    mode: SplitMode,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    site = mode.site(weight)
    if site is None or site.layout is not None or weight is not site.param:
        return None
    if max_norm is not None or scale_grad_by_freq or sparse or type(input) not in _PLAIN:
        return None
    if padding_idx is None:
        padding_idx = -1
    elif padding_idx < 0:
        padding_idx += weight.shape[0]
    return _Embedding.apply(input, weight, padding_idx, site)


_HANDLERS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _rmatmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.bmm: _mm,
    Tensor.bmm: _mm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
    torch._grouped_mm: _grouped,
    F.embedding: _embedding,
}
