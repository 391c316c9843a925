"""Nested values: flattens containers into leaves (tensors and constants) and rebuilds them.

Knows: tuples, lists, dicts and their subclasses, whatever `torch.utils._pytree` has registered (Hugging Face's
`ModelOutput`, torch's own return types), dataclasses registered or not, mappings such as `BatchEncoding`. Does not
know: what leaves are for, or how they travel.

A leaf is a tensor or a constant. An object that contains tensors but cannot be flattened would bypass autograd and the
split into micro-batches, so `check_leaves` rejects it.

>>> leaves = []
>>> form = flatten({"a": 1, "b": (2, [3])}, leaves)
>>> leaves, build(form, iter("xyz"))
([1, 2, 3], {'a': 'x', 'b': ('y', ['z'])})
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.torch_private import pytree

ATOMS = frozenset(
    (
        type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout,
        torch.memory_format, type, types.FunctionType, types.BuiltinFunctionType, range, slice, type(Ellipsis),
    )
)  # fmt: skip
"""Types that hold no tensors."""

Form = Any
"""How a value is nested: True for a tensor, False for a constant, otherwise a tuple of how to build it and the forms of
its parts."""


def flatten(value: Any, leaves: list[Any]) -> Form:
    """Append the leaves of `value` to `leaves`; returns its form."""
    if isinstance(value, Tensor):  # most values are one tensor: ask that first
        leaves.append(value)
        return True
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[flatten(item, leaves) for item in value])
    if kind is dict:
        return (Keys(dict, tuple(value)), *[flatten(item, leaves) for item in value.values()])
    if kind in ATOMS:
        leaves.append(value)
        return False
    opened = _open(value, kind)
    if opened is None:
        leaves.append(value)
        return False
    way, parts = opened
    return (way, *[flatten(item, leaves) for item in parts])


def build(form: Form, leaves: Iterator[Any]) -> Any:
    """Build the value of this form from these leaves, in order."""
    if form is True or form is False:
        return next(leaves)
    way = form[0]
    parts = [build(form[k], leaves) for k in range(1, len(form))]
    return parts if way is list else tuple(parts) if way is tuple else way.build(parts)


def rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    """`value` with its leaves replaced, in order, by those of `leaves`.

    >>> rebuild({"a": 1, "b": (2, [3])}, iter("xyz"))
    {'a': 'x', 'b': ('y', ['z'])}
    """
    return build(flatten(value, []), leaves)


def own_containers(value: Any) -> Any:
    """`value` with copies of its tuples, lists, dicts and sets, nested ones too; other things are the same objects.

    >>> given = {"a": [1], "b": 2}
    >>> copied = own_containers(given)
    >>> copied["a"].append(copied.pop("b"))
    >>> given, copied
    ({'a': [1], 'b': 2}, {'a': [1, 2]})
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([own_containers(item) for item in value])
    if kind is dict:
        return {key: own_containers(item) for key, item in value.items()}
    return set(value) if kind is set else value


def tensor_flags(form: Form, flags: list[bool]) -> list[bool]:
    """Append to `flags`, for every leaf, whether it is a tensor, and return `flags`."""
    if form is True or form is False:
        flags.append(form)
    else:
        for part in form[1:]:
            tensor_flags(part, flags)
    return flags


# --- containers that are not plain tuples, lists and dicts -------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """A dict, or a mapping that can be built from one."""

    kind: type
    keys: tuple[Any, ...]

    def build(self, parts: list[Any]) -> Any:
        made = dict(zip(self.keys, parts))
        return made if self.kind is dict else self.kind(made)


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """A subclass of tuple or list: built with one argument per item if it has fields (a named tuple), otherwise from
    one sequence."""

    kind: type

    def build(self, parts: list[Any]) -> Any:
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """A dataclass, built without its `__init__`, which might recompute its fields."""

    kind: type
    names: tuple[str, ...]

    def build(self, parts: list[Any]) -> Any:
        made: Any = object.__new__(self.kind)
        for name, part in zip(self.names, parts):
            object.__setattr__(made, name, part)
        return made


@dataclasses.dataclass(frozen=True, slots=True)
class Registered:
    """A type that is registered with torch's pytree."""

    kind: type
    context: Any

    def build(self, parts: list[Any]) -> Any:
        return pytree.SUPPORTED_NODES[self.kind].unflatten_fn(parts, self.context)

    def __hash__(self) -> int:
        return hash((self.kind, _hashable(self.context)))


def _open(value: Any, kind: type) -> tuple[Any, Any] | None:
    """Return how to build a value of this kind, and its parts; None if it is not a container."""
    known = pytree.SUPPORTED_NODES.get(kind)
    if known is not None and kind is not torch.Size:
        parts, context = known.flatten_fn(value)
        if not _hides_tensor(context, set(), 0):
            return Registered(kind, context), parts
        return None
    if isinstance(value, (tuple, list)) and kind is not torch.Size:
        return Items(kind), value
    if isinstance(value, Mapping):
        if isinstance(value, types.MappingProxyType):
            return Keys(dict, tuple(value)), value.values()
        return Keys(kind, tuple(value)), [value[key] for key in value]
    if dataclasses.is_dataclass(kind):
        names = [f.name for f in dataclasses.fields(kind) if hasattr(value, f.name)]
        names += [name for name in getattr(value, "__dict__", ()) if name not in names]
        return Fields(kind, tuple(names)), [getattr(value, name) for name in names]
    return None


def _hashable(context: Any) -> Any:
    if isinstance(context, (list, tuple)):
        return tuple(map(_hashable, context))
    try:
        hash(context)
    except TypeError:
        return repr(context)
    return context


# --- what cannot be taken apart ------------------------------------------------------------------------------


def check_leaves(leaves: list[Any], place: Callable[[], str]) -> None:
    """Reject a constant that contains tensors. `place()` returns the beginning of the message: where the value comes
    from."""
    for leaf in leaves:
        if type(leaf) in ATOMS or isinstance(leaf, Tensor):
            continue
        if _hides_tensor(leaf, set(), 0):
            raise OctoPipeError(
                f"{place()} a {type(leaf).__name__}, which cannot be taken apart into tensors; use a tuple, dict or "
                "dataclass, or register the type with torch.utils._pytree.register_pytree_node"
            )


def _hides_tensor(thing: Any, seen: set[int], depth: int) -> bool:
    """Return whether a tensor can be reached from the value; True if that cannot be determined."""
    kind = type(thing)
    if kind in ATOMS or isinstance(thing, (enum.Enum, type)):
        return False
    if isinstance(thing, (Tensor, nn.Module, Iterator)) or depth > 8 or len(seen) > 4096:
        return True
    if id(thing) in seen or kind.__module__.partition(".")[0] == "numpy":
        return False
    seen.add(id(thing))
    if isinstance(thing, (tuple, list, set, frozenset)):
        parts = list(thing)
    elif isinstance(thing, Mapping):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, types.MethodType):
        parts = [thing.__self__]
    else:
        parts = []
    parts += getattr(thing, "__dict__", {}).values()
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        parts += [getattr(thing, n, None) for n in ((names,) if isinstance(names, str) else names)]
    return any(_hides_tensor(part, seen, depth + 1) for part in parts)
