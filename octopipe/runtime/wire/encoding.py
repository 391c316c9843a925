"""Encoding of values as bytes without pickle: messages between ranks can name types and functions but never call them.

Knows: numbers, text, containers, tensors and arrays, enums, dataclasses and whatever `values` can flatten. Does not
know: how bytes are transferred.

A pickle is a program: anyone who can write to a rank's socket could run code there. Here a message is msgpack with a
tag before everything that is not a number or text. Types and functions are sent by name, and only those that the
receiver has already loaded are resolved: a message never causes an import. A type is only used as what it is: a
mapping, a sequence, a dataclass (created without its `__init__`), an enum, or a type registered with torch's pytree.

>>> decoded(encoded({"a": (1, 2.5, None), 3: [b"x", 1 << 80]}))
{'a': (1, 2.5, None), 3: [b'x', 1208925819614629174706176]}
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.torch_private import pytree
from octopipe.runtime.values import Fields, Items, Keys, Registered, _open

_NATIVE = frozenset((type(None), bool, float, bytes))
_TORCH_NAMES = (torch.dtype, torch.layout, torch.memory_format)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def encoded(value: Any, aside: list[Tensor] | None = None) -> bytes:
    """The value as bytes. With `aside`, its tensors are appended to that list, to be sent separately."""
    try:
        return msgspec.msgpack.encode(_packed(value, aside))
    except RecursionError:
        raise OctoPipeError("a value that contains itself cannot be sent to another rank; remove the cycle") from None
    except (ValueError, OverflowError) as error:  # msgpack has limits on sizes
        raise OctoPipeError(f"a value cannot be sent to another rank: {error}") from None


def decoded(data: bytes | memoryview, aside: list[Tensor] | None = None) -> Any:
    """The value that was encoded; raises OctoPipeError for bytes that `encoded` did not produce."""
    try:
        return _unpacked(msgspec.msgpack.decode(data), aside)
    except OctoPipeError:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise OctoPipeError(f"a message from another rank cannot be read ({why}); run one version everywhere") from None


# -- to bytes ------------------------------------------------------------------------------------------


def _packed(value: Any, aside: list[Tensor] | None) -> Any:
    kind = type(value)
    if kind in _NATIVE:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else ["int", hex(value)]
    if kind is str:
        return value if value.isascii() else ["text", value.encode("utf-8", "surrogatepass")]
    if kind is tuple or kind is list or kind is set or kind is frozenset:
        return [kind.__name__, *[_packed(x, aside) for x in value]]
    if kind is dict:
        return ["dict", *[_packed(x, aside) for pair in value.items() for x in pair]]
    if isinstance(value, Tensor):
        return _packed_tensor(value, aside)
    if isinstance(value, np.ndarray | np.generic):
        return _packed_array(value)
    if isinstance(value, enum.Enum):
        return ["enum", *_name(kind), value.name]
    if isinstance(value, type):
        return ["type", *_name(value)]
    if isinstance(value, _FUNCTIONS):
        return ["function", *_name(value)]
    if isinstance(value, _TORCH_NAMES):
        return ["torch", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["device", str(value)]
    if kind is torch.Size:
        return ["size", *value]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is range or kind is slice:
        return [kind.__name__, *[_packed(x, aside) for x in (value.start, value.stop, value.step)]]
    if isinstance(value, PurePath):
        return ["path", _packed(str(value), aside)]
    if value is ...:
        return ["ellipsis"]
    opened = _open(value, kind)
    if opened is None:
        raise OctoPipeError(
            f"a {kind.__name__} cannot be sent to another rank; send tensors, numbers, text, enums, and tuples, dicts "
            "or dataclasses of them"
        )
    way, parts = opened
    return [type(way).__name__, _packed_way(way, aside), *[_packed(x, aside) for x in parts]]


def _packed_way(way: Any, aside: list[Tensor] | None) -> list[Any]:
    more = [_packed(getattr(way, f.name), aside) for f in dataclasses.fields(way)[1:]]
    return [*_name(way.kind), *more]


def _packed_tensor(value: Tensor, aside: list[Tensor] | None) -> list[Any]:
    if value.layout is not torch.strided or value.is_quantized:
        raise OctoPipeError("a sparse or quantised tensor cannot be sent to another rank; make it dense")
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    described = ["tensor", str(plain.dtype).removeprefix("torch."), list(plain.shape)]
    if aside is not None:
        aside.append(plain)
        return [*described, len(aside) - 1]
    return [*described, plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""]


def _packed_array(value: Any) -> list[Any]:
    if value.dtype.hasobject:
        raise OctoPipeError("an array of objects cannot be sent to another rank; send numbers")
    kind = "array" if isinstance(value, np.ndarray) else "scalar"
    dtype = value.dtype.str if value.dtype.fields is None else _packed(value.dtype.descr, None)
    return [kind, dtype, list(value.shape), np.ascontiguousarray(value).tobytes()]


def _name(thing: Any) -> tuple[str, str]:
    """The module and qualified name of an object; raises an error if they do not lead back to it."""
    module, name = getattr(thing, "__module__", None) or "builtins", thing.__qualname__
    try:
        found = _found(module, name)
    except LookupError:
        found = None
    if found is not thing:
        raise OctoPipeError(
            f"{module}.{name} cannot be sent to another rank: it is not found under its name; define it at the top of "
            "a module"
        )
    return module, name


# -- from bytes ----------------------------------------------------------------------------------------


def _unpacked(packed: Any, aside: list[Tensor] | None) -> Any:
    if not isinstance(packed, list):
        if isinstance(packed, dict):  # `encoded` writes no maps
            raise ValueError("a bare map")
        return packed
    tag, *rest = packed
    make = _MAKERS.get(tag)
    if make is not None:
        return make([_unpacked(x, aside) for x in rest])
    if tag == "tensor":
        return _tensor(rest, aside)
    if tag in ("array", "scalar"):
        return _array(tag, *rest)
    way = _way(tag, rest[0], aside)
    return way.build([_unpacked(x, aside) for x in rest[1:]])


def _way(tag: str, packed: list[Any], aside: list[Tensor] | None) -> Any:
    """The flattening rule (see `values`) that builds an object, after checking that the named type is of its kind."""
    kind = _loaded_type(packed[:2])
    way = _WAYS[tag](kind, *[_unpacked(x, aside) for x in packed[2:]])
    check_way(way)
    return way


def check_way(way: Any) -> None:
    """Raise an error unless a message uses a type as what it is: sequence, mapping, dataclass or pytree node."""
    kind = getattr(way, "kind", None)
    good = isinstance(kind, type) and (
        (isinstance(way, Items) and issubclass(kind, tuple | list))
        or (isinstance(way, Keys) and issubclass(kind, Mapping))
        or (isinstance(way, Fields) and dataclasses.is_dataclass(kind) and not any(n[:2] == "__" for n in way.names))
        or (isinstance(way, Registered) and kind in pytree.SUPPORTED_NODES)
    )
    if not good:
        raise ValueError(f"{kind!r} is not a {type(way).__name__}")


def _tensor(rest: list[Any], aside: list[Tensor] | None) -> Tensor:
    name, shape, data = rest
    dtype = torch_name(name, torch.dtype)
    if type(data) is int:
        assert aside is not None
        tensor = aside[data]
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            raise ValueError("a tensor of another form")
        return tensor
    if not _is_shape(shape) or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor whose bytes do not fit its shape")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def empty_aside(data: bytes) -> list[Tensor]:
    """Empty tensors to receive the tensors that are sent separately from this message, in order."""
    found: dict[int, Tensor] = {}

    def walk(packed: Any) -> None:
        if isinstance(packed, list):
            if len(packed) == 4 and packed[0] == "tensor" and type(packed[3]) is int:
                if not _is_shape(packed[2]):
                    raise OctoPipeError("a message from another rank cannot be read (a negative size)")
                found[packed[3]] = torch.empty(packed[2], dtype=torch_name(packed[1], torch.dtype))
            for x in packed:
                walk(x)

    walk(msgspec.msgpack.decode(data))
    return [found[k] for k in range(len(found))]


def _array(tag: str, dtype: Any, shape: list[int], data: bytes) -> Any:
    kind = np.dtype(dtype if isinstance(dtype, str) else _unpacked(dtype, None))
    if kind.hasobject:
        raise ValueError("an array of objects")
    made = np.frombuffer(data, kind).reshape(shape)
    return made.copy() if tag == "array" else made[()]


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)


def torch_name(name: str, kind: type | tuple[type, ...]) -> Any:
    """A dtype (or layout, or memory format) by its name in torch."""
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise ValueError(f"torch has no dtype, layout or memory format {name!r}")
    return found


def _found(module: str, name: str) -> Any:
    """An object of a module that is already loaded; nothing is imported."""
    if module not in sys.modules:
        raise LookupError(f"{module}.{name} is not loaded here: import {module} on every rank")
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise LookupError(f"there is no {name} in {module}")
    return found


def _loaded_type(parts: list[Any]) -> type:
    found = _found(*parts)
    if not isinstance(found, type):
        raise ValueError(f"{parts} is not a type")
    return found


def _loaded_function(parts: list[Any]) -> Any:
    found = _found(*parts)
    if not isinstance(found, _FUNCTIONS):
        raise ValueError(f"{parts} is not a function")
    return found


def _member(parts: list[Any]) -> enum.Enum:
    kind = _loaded_type(parts[:2])
    if not issubclass(kind, enum.Enum):
        raise ValueError(f"{kind!r} is not an enum")
    return kind[parts[2]]


def _pairs(parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


_WAYS: dict[str, Any] = {way.__name__: way for way in (Items, Keys, Fields, Registered)}
_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "int": lambda parts: int(parts[0], 0),
    "text": lambda parts: parts[0].decode("utf-8", "surrogatepass"),
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
    "dict": _pairs,
    "enum": _member,
    "type": _loaded_type,
    "function": _loaded_function,
    "torch": lambda parts: torch_name(parts[0], _TORCH_NAMES),
    "device": lambda parts: torch.device(parts[0]),
    "size": torch.Size,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
    "path": lambda parts: Path(parts[0]),
    "ellipsis": lambda parts: ...,
}
