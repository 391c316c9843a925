"""Modules and parameters that a loss function contains, and tensors that factories share.

Knows: how a callable can hold tensors (a module, a bound method, a closure, a partial). Does not know: plans or ranks.

A loss with parameters is trained like a layer: it counts as the layer after the last one, on every rank that holds the
last one. A frozen network inside a loss (a teacher, a perceptual loss) is not changed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def loss_module(loss_fn: Callable[..., Any], layers: Sequence[Any]) -> nn.Module | None:
    """The loss as a module, or None if it has no parameters to train and no buffers to synchronise.

    `layers`: the layers as the pipeline is given them. Parts of these layers that a plain function refers to do not
    belong to the loss.
    """
    if isinstance(loss_fn, nn.Module):
        found: nn.Module | None = loss_fn
    elif isinstance(getattr(loss_fn, "__self__", None), nn.Module):
        found = _without_layers({"": loss_fn.__self__}, layers).get("")  # type: ignore[attr-defined]
    else:
        found = _gathered(_without_layers(dict(_named_parts(loss_fn)), layers))
    if found is None:
        return None
    parameters = list(found.parameters())
    if any(p.requires_grad for p in parameters):
        return found
    return found if not parameters and next(found.buffers(), None) is not None else None


def _named_parts(function: Any, depth: int = 0) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Modules and parameters that a function holds, by the names under which it holds them."""
    for name, value in _held_by(function):
        if isinstance(value, nn.Module | nn.Parameter):
            yield name, value
        elif isinstance(value, list | tuple):
            for k, part in enumerate(value):
                if isinstance(part, nn.Module | nn.Parameter):
                    yield f"{name}_{k}", part
        elif isinstance(value, types.FunctionType | functools.partial | types.MethodType) and depth < 8:
            yield from _named_parts(value, depth + 1)


def _held_by(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield "function", function.func
        yield from ((f"argument_{k}", value) for k, value in enumerate(function.args))
        yield from function.keywords.items()
    elif isinstance(function, types.MethodType):
        yield "owner", function.__self__
        yield "function", function.__func__
    elif isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from ((f"default_{k}", value) for k, value in enumerate(function.__defaults__ or ()))
        yield from (function.__kwdefaults__ or {}).items()


def _without_layers(parts: Mapping[str, Any], layers: Sequence[Any]) -> dict[str, Any]:
    """The parts that have a parameter or a buffer which belongs to none of the layers."""
    theirs = {id(t) for layer in layers if isinstance(layer, nn.Module) for t in _tensors_of(layer)}
    return {
        name: part
        for name, part in parts.items()
        if any(id(t) not in theirs for t in ([part] if isinstance(part, Tensor) else _tensors_of(part)))
    }


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _gathered(parts: Mapping[str, Any]) -> nn.Module | None:
    if not parts:
        return None
    out = nn.Module()
    for name, part in parts.items():
        if isinstance(part, nn.Parameter):
            out.register_parameter(name, part)
        else:
            out.add_module(name, part)
    return out


def held_tensors(made_by: Any) -> list[Tensor]:
    """The tensors that a factory holds, in an order that is equal in all processes that created the factory in the same
    way."""
    out: list[Tensor] = []
    seen: set[int] = set()

    def walk(value: Any, depth: int) -> None:
        if id(value) in seen or depth > 8:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            out.append(value)
        elif isinstance(value, nn.Module):
            for tensor in _tensors_of(value):
                walk(tensor, depth + 1)
        elif isinstance(value, list | tuple):
            for part in value:
                walk(part, depth + 1)
        elif isinstance(value, dict):
            for part in value.values():
                walk(part, depth + 1)
        else:
            for _, part in _held_by(value):
                walk(part, depth + 1)

    walk(made_by, 0)
    return out
