"""The weight-gradient split: input gradients immediately, weight-gradient GEMMs later.

Knows: which torch calls multiply by a parameter, and how to run such a call as a function whose backward returns the
input gradient immediately and puts the weight gradient into a `WeightQueue`. Does not know: how that gradient is
computed and added (`wgrad_ops.py`), stages, micro-batches or plans (`stage.py`), or any module class: it intercepts
function calls, so `nn.Linear`, `F.linear`, `x @ w`, `addmm`, `bmm`, `torch._grouped_mm` and `F.embedding` inside any
module are all split.

How. `SplitMode` is a `TorchFunctionMode` that is active while a stage runs forward (and backward where
activation checkpointing re-runs forwards). A call whose weight is a plain trainable parameter, or a view or
a cast of one, is split; every other call is left alone, and its whole backward happens with the input
gradient. Left alone are: frozen weights, computed weights (weight norm), complex weights, tensor subclasses other than
DTensor (FSDP2's modules; of DTensors, anything but a linear that goes the quick way), parameters with gradient hooks
(DDP), calls made inside torch's own Python functions
(`nn.MultiheadAttention`), anything inside `torch.compile`, a functorch transform, forward-mode differentiation, or a
part of an `autograd.Function` that builds a graph of its own.

A linear layer is implemented in one of two ways. The fast one is torch's own, with a detached weight and a hook on the
node of the product (not of the output, because in-place changes of the output must not lose the hook). The other one is
our own autograd function. A forward that runs backward itself (`torch.autograd.grad`: forces, penalties) needs the
weight in its graph, so it uses the second way; this is detected when it happens, and if necessary `Restart` makes the
stage run it again.

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
from torch.overrides import TorchFunctionMode

from octopipe.runtime.stages.foreign_reads import ForeignReads
from octopipe.runtime.stages.weight_queue import WeightQueue, is_distributed
from octopipe.runtime.stages.wgrad_ops import (
    Batched,
    Embedding,
    Grouped,
    Layout,
    Linear,
    LinearHook,
    Restart,
    WeightSite,
    add_product,
    in_rows,
)
from octopipe.runtime.torch_private import (
    forward_mode_level,
    function_mode_stack,
    grouped_mm,
    is_autocast_on,
    is_functorch_active,
    pop_function_mode,
    push_function_mode,
    set_grad_enabled,
    top_saved_tensor_hooks,
)

__all__ = ["SplitMode", "WeightQueue", "WeightSite", "add_product", "site_of"]

_PLAIN = (Tensor, torch.nn.Parameter)
# Looked up once, because these functions are called for every call of torch and attribute look-ups take host time.
_is_traced = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_VIEW_NODES = frozenset(
    f"{name}Backward{i}"
    for name in (
        "T", "Transpose", "Permute", "Select", "Slice", "View", "Unsqueeze", "Squeeze", "Split",
        "SplitWithSizes", "Unbind", "Alias", "ReshapeAlias", "UnsafeView",
    )
    for i in range(4)
)  # fmt: skip


class Habits:
    """What is known about the forwards of a stage."""

    __slots__ = ("backward_inside", "quick")

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        """Whether linear layers may use the fast way."""
        self.backward_inside = False
        """Whether a forward has been seen that runs backward itself."""


class SplitMode(TorchFunctionMode):
    """While active, calls that multiply by one of `params` are split: their weight part goes to `queue`.

    `queue` may be replaced for every micro-batch. The mode keeps one low-precision copy per weight that autocast casts
    (`clear_casts` drops them), whereas autocast by itself keeps one per micro-batch in flight.
    """

    def __init__(self, params: Iterable[Tensor], queue: WeightQueue, *, quick: bool = True):
        super().__init__()
        self.queue = queue
        self.habits = Habits(quick=quick)
        self.hooked = self.in_backward = False
        """Whether a linear of this forward went the quick way; whether the stage's backward runs."""
        self.keeps_nothing = False
        """Whether this forward's graph is dropped, so that nothing may be kept for its backward."""
        self.left_alone: set[int] = set()
        """Ids of parameters whose gradients autograd itself must accumulate (there are hooks on the accumulation)."""
        self.reads: ForeignReads | None = None
        """Set while forwards are inspected: records reads of weights that belong to layers on other ranks."""
        self._off = self._own_graph = False
        # By identity: a parameter put in later (FSDP2's unsharded ones) is simply not split.
        self._params = {
            id(p): p
            for p in params
            if (type(p) in _PLAIN or is_distributed(p)) and p.requires_grad and p.is_floating_point()
        }
        self.has_weights = bool(self._params)
        """Whether there is anything to split. If not (frozen layers), the stage runs without the mode."""
        self._casts: dict[tuple[int, Layout], tuple[int, Tensor]] = {}

    def parameters(self) -> Iterable[Tensor]:
        """The parameters whose products are split."""
        return self._params.values()

    # The same as torch's own methods, without their two intermediate function calls.
    def __enter__(self) -> SplitMode:
        push_function_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        pop_function_mode()
        self._off = self._own_graph = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dynamo traces this method: inside a compiled layer it must vanish.
        if _is_traced():
            return func(*args, **(kwargs or {}))
        if self.reads is not None:
            self.reads.note(func, args, kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            if _is_grad_enabled():
                result = handler(self, *args, **kwargs) if kwargs else handler(self, *args)
                if result is not None:
                    return result
            else:
                if func in _INNER:
                    result = handler(self, *args, **(kwargs or {}))
                    return func(*args, **(kwargs or {})) if result is None else result
                self.queue.reruns = True  # perhaps the first forward of a reentrant checkpoint
        return func(*args, **kwargs) if kwargs else func(*args)

    def site(self, weight: Any) -> WeightSite | None:
        """Where the gradient of this use of `weight` goes; None if autograd must compute it."""
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
        if id(found) in self.left_alone:
            return None
        if self._own_graph or is_functorch_active() or forward_mode_level() >= 0:
            return None
        # A forward that keeps nothing runs under our own saved-tensor hooks; R will detect a checkpoint inside it.
        if not self.keeps_nothing and (top_saved_tensor_hooks is None or top_saved_tensor_hooks(True) is not None):
            self.queue.reruns = True
        return WeightSite(self.queue, found, layout)

    def _behind(self, weight: Tensor) -> tuple[Tensor | None, Layout]:
        """The parameter of which `weight` is a view, a cast or a view of a cast, and the layout of the view.

        (None, None) if there is none, or if its gradient cannot be added through that view."""
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
        if base.shape != param.shape or weight.is_neg() or not weight.is_floating_point():
            return None, None
        if weight.device != param.device:
            return None, None
        if weight is base:
            return param, None
        if not _fills_its_memory(param):  # a gradient is laid out without the gaps
            return None, None
        reach = 1
        for stride, size in sorted((st, sz) for st, sz in zip(weight.stride(), weight.shape) if sz > 1):
            if stride < reach:  # overlapping (expanded) view: two entries would share one gradient
                return None, None
            reach = stride * size
        offset = int(weight.storage_offset()) - int(base.storage_offset())
        return param, (tuple(weight.shape), tuple(weight.stride()), offset)

    def autocast(self, x: Tensor, weight: Tensor, site: WeightSite) -> tuple[Tensor, Tensor | None]:
        """`x` and the weight's values as autocast would cast them; None for the weight if it is used as it is."""
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
        """Drop the low-precision copies of the weights (called when the step is over)."""
        self._casts.clear()


def _fills_its_memory(param: Tensor) -> bool:
    """Whether a parameter's elements lie side by side, in any order: a slice of a larger tensor has gaps."""
    reach = 1
    for stride, size in sorted((st, sz) for st, sz in zip(param.stride(), param.shape) if sz > 1):
        if stride != reach:
            return False
        reach *= size
    return True


def site_of(weight: Tensor) -> WeightSite | None:
    """For an `autograd.Function` of your own: where the running stage wants this weight's gradient.

    None outside a stage, and for weights that are not split: then return the gradient to autograd. Otherwise
    call `site.queue.add(kernel, site.param, site.layout, ...)` in backward and return None for the weight;
    but return the gradient to autograd while `site.queue.shut`.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    for mode in reversed(function_mode_stack()):
        if isinstance(mode, SplitMode):
            return mode.site(weight)
    return None


# A handler returns None for a call it leaves alone.


def _linear(mode: SplitMode, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    site = mode.site(weight)
    if site is None or input is weight or input.ndim == 0 or weight.ndim != 2:
        return None
    quick, distributed = mode.habits.quick, is_distributed(weight)
    if distributed:
        if not is_distributed(input):
            return None
        quick = not mode.habits.backward_inside  # the only way for DTensors, also before habits are known
    elif type(input) not in _PLAIN:
        return None
    else:
        input = in_rows(input)
    if (
        quick
        and not mode.queue.reruns  # checkpointing must see what is saved
        and (input.requires_grad or (bias is not None and bias.requires_grad))
        and not is_autocast_on()
    ):
        # torch's own linear with a detached weight; the hook keeps what the weight gradient needs.
        output = F.linear(input, weight.detach(), bias)
        base = output._base
        # In-place changes of a view replace the view's node, never that of its base.
        if not mode.keeps_nothing:
            node = (output if base is None else base).grad_fn
            node.register_prehook(LinearHook(site, input))  # type: ignore[union-attr]
        mode.hooked = True
        return output
    if distributed:  # all of its backward comes with I
        return None
    input, computed = mode.autocast(input, weight, site)
    return Linear.apply(input, weight, bias, site, computed)


def _inner_grad(mode: SplitMode, *args: Any, **more: Any) -> Any:
    """`torch.autograd.grad` inside a forward: the caller gets all gradients and may differentiate them again."""
    queue = mode.queue
    _inner_backward(mode)
    if mode.hooked:  # outside a stage, where no one catches `Restart`
        return None
    was, queue.shut = queue.shut, True
    try:
        return torch.autograd.grad(*args, **more)
    finally:
        queue.shut = was


def _inner_backward(mode: SplitMode, *args: Any, **more: Any) -> None:
    """`backward` inside a stage's forward. Inside backward it is that of a reentrant checkpoint, and needs no special
    treatment."""
    if mode.queue.shut:
        mode.habits.backward_inside = True
        if mode.hooked or mode.keeps_nothing:
            raise Restart


def _set_grad(mode: SplitMode, enabled: bool) -> None:
    """Detect parts of a user's `autograd.Function` that build a graph of their own, which its backward uses.

    They enable gradients that torch itself, and not a call that the mode has intercepted, had disabled.
    """
    if mode.in_backward or enabled == _is_grad_enabled():
        return
    if enabled and not mode._off:
        mode._own_graph = True
    elif mode._own_graph:
        mode._own_graph = False
    else:
        mode._off = not enabled


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
    return Batched.apply(a, b, bias, site, left, computed)


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
    if site is None or type(input) not in _PLAIN or is_distributed(mat2):
        return None
    return Grouped.apply(input, mat2, offs, site)


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
    if is_distributed(weight):
        return None
    site = mode.site(weight)
    if site is None or site.layout is not None or weight is not site.param:
        return None
    if max_norm is not None or scale_grad_by_freq or sparse or type(input) not in _PLAIN:
        return None
    if padding_idx is None:
        padding_idx = -1
    elif padding_idx < 0:
        padding_idx += weight.shape[0]
    return Embedding.apply(input, weight, padding_idx, site)


_INNER: dict[Any, Callable[..., Any]] = {
    torch.autograd.grad: _inner_grad,
    torch.autograd.backward: _inner_backward,
    Tensor.backward: _inner_backward,
    set_grad_enabled: _set_grad,
}
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **_INNER,
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
    grouped_mm: _grouped,
    F.embedding: _embedding,
}
