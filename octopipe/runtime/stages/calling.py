"""How layers are called: which arguments a module's forward takes, and the loss after the last one.

Knows: signatures. Does not know: graphs, micro-batches or plans.

A layer whose `forward` takes one positional argument gets the whole value (tensor, tuple or dict); one that takes more
gets a tuple unpacked as `layer(*value)` and a dict as `layer(**value)`. Side inputs are the arguments of these names,
passed by keyword; they do not count as positional.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.stages.rng import rng_kept


def arguments(module: nn.Module, side: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """Whether the module's forward takes exactly one positional argument, and which side inputs it names."""
    module = getattr(module, "_orig_mod", module)  # behind torch.compile
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return True, ()
    named = tuple(p.name for p in parameters if p.name in side and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False, named
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.name not in named for p in positional) == 1, named


def layers_text(first: int, last: int) -> str:
    """The layers of a stage, as messages name them."""
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def has_no_default(module: nn.Module, name: str) -> bool:
    parameter = inspect.signature(getattr(module, "_orig_mod", module).forward).parameters[name]
    return parameter.default is parameter.empty


def called(module: nn.Module, value: Any, one: bool, names: Sequence[str], side: Mapping[str, Any] | None) -> Any:
    """Calls a module with the output of the preceding layer and returns its result."""
    more = {name: side[name] for name in names if name in side} if names and side else {}
    if one or isinstance(value, Tensor):
        return module(value, **more) if more else module(value)
    if isinstance(value, tuple):
        return module(*value, **more)
    if isinstance(value, Mapping):
        return module(**value, **more)
    return module(value, **more)


class Loss:
    """A loss function with its target, called after the last layer."""

    __slots__ = ("function", "target")

    def __init__(self, function: Callable[..., Any], target: Any):
        self.function, self.target = function, target

    def __call__(self, output: Any) -> Any:
        return self.function(output, self.target)


class SplitLoss(Loss):
    """A loss function with a target that the pipeline split by rows.

    Where a micro-batch has one row of the target (or of the output) and several of the other, a loss's arithmetic would
    repeat that row. The whole target has other rows than the whole output then, and repeating is an error without
    micro-batches. A loss that brings the rows together itself works with any number of micro-batches in one.
    """

    __slots__ = ()

    def __call__(self, output: Any) -> Any:
        target = self.target
        if isinstance(output, Tensor) and isinstance(target, Tensor) and output.shape != target.shape:
            _check_rows(self.function, output, target)
        return self.function(output, target)


_BRING_ROWS_TOGETHER: weakref.WeakSet[Any] = weakref.WeakSet()
"""Losses that were seen to."""


def _check_rows(function: Callable[..., Any], output: Tensor, target: Tensor) -> None:
    alike = output.ndim == target.ndim > 0 and output.shape[1:] == target.shape[1:]
    rows, wanted = (output.shape[0], target.shape[0]) if alike else (1, 1)
    if rows == wanted or min(rows, wanted) != 1 or _brings_together(function, output, target):
        return
    one = f"{rows} rows of output and one of" if wanted == 1 else f"one row of output and {wanted} of"
    raise OctoPipeError(
        f"a micro-batch has {one} the target, which the loss would repeat; give a target with as many rows as the "
        "batch, or lists of micro-batches"
    )


def _brings_together(function: Callable[..., Any], output: Tensor, target: Tensor) -> bool:
    """Whether the loss also takes two of these micro-batches in one, whose rows cannot be repeated."""
    if isinstance(function, Hashable) and function in _BRING_ROWS_TOGETHER:
        return True
    alone = copy.deepcopy(function) if isinstance(function, nn.Module) else function  # a loss may count its calls
    try:
        with rng_kept(), torch.no_grad():
            alone(torch.cat((output, output)), torch.cat((target, target)))
    except Exception:
        return False
    with contextlib.suppress(TypeError):  # something that has no weak references is tried again
        _BRING_ROWS_TOGETHER.add(function)
    return True
