"""Products in float8: the linear layers of a model, with one scale per tensor taken from its largest element.

Knows: which linear layers compute in float8, how a tensor is rounded to it, and the forward and backward of such a
layer. Does not know: precisions by name (`precision.py`), stages, how weight gradients are added (`wgrad_ops.py`).

    F   x and the weight in e4m3 (4 bits of exponent, 3 of mantissa), sums in float32, result in bfloat16
    I   the gradient in e5m2, whose range is that of float16, and the weight in e4m3
    W   the bfloat16 operands, added to the float32 gradient as without float8

W stays in bfloat16 for three reasons. The kernels want both operands with the tokens innermost, so it would have to
round and transpose the input and the gradient once more. Its sum over all tokens is where small gradients get lost.
And its operands are held from F until W anyway, because a deferred W starts from them.

Embeddings, the head with its loss, routers, norms, experts that are multiplied as a group, and layers with fewer than
`LEAST` inputs or outputs, or a number of them that is no multiple of 16, compute in bfloat16 as before.

Weights change once per step, so their float8 copies (one per side that is multiplied, together as large as the bfloat16
weight) are made once per step, at fixed addresses that CUDA graphs can read. On a CPU, products are those of the
rounded numbers in float32: slow, and the same up to the order of sums.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.costs.mode import FLOAT8_REMEDY, refuse_on_cpu
from octopipe.runtime.stages.wgrad import add_product, site_of
from octopipe.runtime.stages.wgrad_ops import WeightSite
from octopipe.runtime.torch_private import WithoutFunctionModes, scaled_mm, unsafe_view
from octopipe.runtime.typed_function import Function, Gradients

LEAST = 64
MULTIPLE = 16
"""Both sizes of a weight must be at least the first number and multiples of the second, as the kernels require."""
NEEDS = (8, 9)
"""The compute capability from which GPUs multiply float8 (Ada, Hopper, Blackwell)."""
_ROUTERS = ("gate", "router", "classifier")
"""Last parts of the names of routers, whose rounding would send tokens to other experts."""


def require_float8(device: torch.device) -> None:
    """Raise an error if a device cannot multiply float8."""
    refuse_on_cpu("fp8", device.type)
    if torch.version.hip is not None:
        raise OctoPipeError(f"precision fp8 on ROCm, whose float8 is another one: {FLOAT8_REMEDY}")
    capability = torch.cuda.get_device_capability(device)
    if capability < NEEDS:
        name = torch.cuda.get_device_name(device)
        raise OctoPipeError(
            f"precision fp8 on {name} (compute capability {capability[0]}.{capability[1]}): {FLOAT8_REMEDY}"
        )


def compute_in_float8(layer: nn.Module) -> int:
    """Make the linear layers inside compute in float8 from now on; returns how many do.

    They remain the same modules: names, hooks and saved state do not change.
    """
    count = 0
    heads = _heads(layer)
    for name, module in layer.named_modules():
        if type(module) is nn.Linear and _fits(module) and not _is_router(name) and id(module) not in heads:
            module.__class__ = ScaledLinear
            module.scaled = ScaledWeight()  # type: ignore[assignment]
            count += 1
    return count


def _heads(layer: nn.Module) -> set[int]:
    """Return the ids of the heads of transformers models inside. Every layer cut from such a model contains the model's
    outer module, through which its head can be asked for."""
    models = [m for m in layer.modules() if hasattr(m, "get_output_embeddings")]
    return {id(m.get_output_embeddings()) for m in models}  # type: ignore[operator]


def _fits(module: nn.Linear) -> bool:
    sizes = (module.in_features, module.out_features)
    return all(n >= LEAST and n % MULTIPLE == 0 for n in sizes) and module.weight.dtype is torch.bfloat16


def _is_router(name: str) -> bool:
    parts = name.split(".")
    return parts[-1] in _ROUTERS or any("router" in part for part in parts)


def float8_copies(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the float8 copies of weights that exist now."""
    return [t for m in scaled_linears(modules) for t in m.scaled.tensors()]


def scaled_linears(modules: Iterable[nn.Module]) -> Iterator[ScaledLinear]:
    """Return the scaled linear layers inside these modules, each once."""
    seen: dict[nn.Module, None] = dict.fromkeys(m for top in modules for m in top.modules())
    return (m for m in seen if isinstance(m, ScaledLinear))


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `x` divided by a scale and rounded to float8, and the scale, a float32 scalar on the same device.

    The scale maps the largest element to the largest float8 number. An infinity or NaN in `x` gives NaN everywhere.
    """
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    scale = largest.mul_(1.0 / torch.finfo(dtype).max).clamp_(min=torch.finfo(torch.float32).tiny)
    return (x / scale).to(dtype), scale


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Return `a @ b.T` of two float8 matrices with their scales; `fast`: sums in the precision of the tensor cores."""
    if a.is_cuda:
        out: Tensor = scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)
        return out
    return ((a.float() * a_scale) @ (b.float() * b_scale).t()).to(dtype)


class ScaledWeight:
    """The float8 copies of one weight [out, in]. They keep their addresses while the weight keeps its shape."""

    octopipe_no_state = True  # derived from the weight, whichever forward updates it first (`stages/places.py`)
    __slots__ = ("_seen", "columns", "rows", "scale")

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self.rows: Tensor | None = None
        """[out, in], for F."""
        self.columns: Tensor | None = None
        """[in, out], for I."""
        self.scale: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> ScaledWeight:
        return ScaledWeight()

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.rows, self.columns, self.scale) if t is not None]

    def follow(self, weight: Tensor) -> None:
        """Round the weight again if it has changed since it was last rounded."""
        seen = (weight.data_ptr(), weight._version)
        if seen == self._seen:
            return
        with torch.no_grad(), WithoutFunctionModes():
            values, scale = rounded(weight, torch.float8_e4m3fn)
            rows, columns = self.rows, self.columns
            if rows is None or columns is None or rows.shape != values.shape or rows.device != values.device:
                self.rows, self.columns, self.scale = values, values.t().contiguous(), scale
            else:
                assert self.scale is not None
                rows.copy_(values)
                columns.copy_(values.t())
                self.scale.copy_(scale)
        self._seen = seen


class ScaledLinear(nn.Linear):
    """A linear layer whose products are in float8. `compute_in_float8` turns an `nn.Linear` into one."""

    scaled: ScaledWeight

    def follow(self) -> None:
        """Update the float8 copies. This must happen before a CUDA graph is replayed, which only reads them."""
        if _is_plain(self.weight):
            self.scaled.follow(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if not (_is_plain(weight) and type(input) in _PLAIN and input.dtype is weight.dtype and input.numel()):
            return F.linear(input, weight, self.bias)
        self.scaled.follow(weight)
        with torch.no_grad(), WithoutFunctionModes():
            values, scale = _LAST.rounded(input)
        out: Tensor = ScaledProduct.apply(input, weight, self.bias, site_of(weight), self.scaled, values, scale)
        return out


class _LastInput:
    """The input that was rounded last. Layers with the same input (queries, keys and values, or gate and up) share the
    result."""

    def __init__(self) -> None:
        self._last: tuple[Any, int, tuple[Tensor, Tensor]] | None = None
        """A weak reference to the input, its version, and the result of rounding it."""

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        last = self._last
        if last is not None and last[0]() is x and last[1] == x._version:
            return last[2]
        made = rounded(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn)
        self._last = (weakref.ref(x, self._forget), x._version, made)
        return made

    def _forget(self, _: Any) -> None:
        self._last = None


_LAST = _LastInput()
_PLAIN = (Tensor, nn.Parameter)


def _is_plain(weight: Tensor) -> bool:
    """Return whether a weight is an ordinary tensor: not a part of a distributed tensor, nor of another subclass, whose
    values are not accessible here."""
    return type(weight) in _PLAIN


class ScaledProduct(Function):
    """`x @ weight.T + bias`; the weight's gradient goes where the running stage needs it (`site`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        site: WeightSite | None,
        scaled: ScaledWeight,
        values: Tensor,
        scale: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.site, ctx.scaled, ctx.with_bias = site, scaled, bias is not None
        assert scaled.rows is not None and scaled.scale is not None  # `follow` has made them
        out = product(values, scale, scaled.rows, scaled.scale, x.dtype, fast=True)
        if bias is not None:
            out += bias
        return unsafe_view(out, (*x.shape[:-1], weight.shape[0]))  # not a view: it may be changed in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        x, _ = ctx.saved_tensors
        needs, site, scaled = ctx.needs_input_grad, ctx.site, ctx.scaled
        gx = gw = gb = None
        with WithoutFunctionModes():
            rows = g.reshape(-1, g.shape[-1])
            if needs[0]:
                values, scale = rounded(rows, torch.float8_e5m2)
                gx = product(values, scale, scaled.columns, scaled.scale, x.dtype, fast=False).view(x.shape)
            if needs[1]:
                wants = "returned" if site is None else site.wants()
                if wants == "returned":
                    gw = rows.mT @ x.reshape(-1, x.shape[-1])
                elif wants == "own":
                    site.queue.add(add_product, site.param, site.layout, g, x)
            if ctx.with_bias and needs[2]:
                gb = rows.sum(0)
        return gx, gw, gb, None, None, None, None
