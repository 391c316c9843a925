"""Detects parameters that forwards change behind autograd's back, through `.data` or numpy.

Knows: a few numbers by which two states of a parameter are told apart, and how far rounding may move them. Does not
know: when ops run (`run.py`).

A change in place that torch knows of is an error where a backward needs the old values. A change through `.data` is
not, and in one process it does no harm: each micro-batch's backward runs before the next one's forward. In a pipeline
micro-batches overlap, and the backward of the first would go through weights that the forward of the second has
changed. Changes that come to the same in every forward (clipping, a largest norm) are no error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.precision import LOW
from octopipe.runtime.torch_private import WithoutFunctionModes

ROUNDINGS = 16.0
"""Tolerance for a parameter's norm, in units of its dtype's precision: normalising a weight twice is no change."""


class Prints(NamedTuple):
    """Version, norm and sum of every parameter of a stage at one moment."""

    versions: list[int]
    norms: Tensor
    sums: Tensor


class SilentChanges:
    """The parameters of one stage."""

    def __init__(self, modules: Sequence[nn.Module], first_layer: int):
        self._modules, self._first_layer = tuple(modules), first_layer

    def look(self) -> Prints | None:
        """Measure the parameters' current values; None if there are no parameters, or during a CUDA graph capture."""
        named = self._named()
        if not named or (named[0][1].is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        norms, sums = [], []
        with torch.no_grad(), WithoutFunctionModes():
            for _, p in named:
                values = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
                wide = torch.float32 if values.dtype in LOW else values.dtype
                norms.append(torch.linalg.vector_norm(values, dtype=wide).double())
                sums.append(values.sum(dtype=wide).double())
            return Prints([p._version for _, p in named], torch.stack(norms), torch.stack(sums))

    def check(self, before: Prints) -> None:
        """Raise if a parameter has changed since then without a change of its version."""
        now, named = self.look(), self._named()
        if now is None or len(now.versions) != len(before.versions):
            return
        most = torch.tensor([ROUNDINGS * torch.finfo(p.dtype).eps for _, p in named], dtype=torch.float64)
        width = torch.tensor([math.sqrt(p.numel()) for _, p in named], dtype=torch.float64)
        norms, sums = before.norms.cpu(), before.sums.cpu()
        apart = ((now.norms.cpu() - norms).abs() > most * norms) | (
            (now.sums.cpu() - sums).abs() > most * norms * width
        )
        for (name, _), moved, old, new in zip(named, apart.tolist(), before.versions, now.versions, strict=True):
            if moved and old == new:
                raise OctoPipeError(
                    f"parameter {name} was changed through `.data` (or numpy), of which torch knows nothing, between a "
                    "forward and its backward: another micro-batch's forward did it, and the gradients would be of "
                    "other weights; change it between steps, or let a parametrization compute the weight "
                    "(torch.nn.utils.parametrize)"
                )

    def _named(self) -> list[tuple[str, Tensor]]:
        plain = (Tensor, nn.Parameter)
        return [
            (f"{self._first_layer + k}.{name}", p)
            for k, module in enumerate(self._modules)
            for name, p in module.named_parameters()
            if type(p) in plain and p.layout is torch.strided and not p.is_meta and p.numel() and _has_norm(p)
        ]


def _has_norm(p: Tensor) -> bool:
    return (p.is_floating_point() and p.dtype.itemsize > 1) or p.is_complex()
