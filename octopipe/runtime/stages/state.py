"""Places that keep state between two forwards: read, compare, exchange and restore their contents.

Knows: attributes, containers, variables in closures and namespaces as places with contents, the tensors and the random
generators in them. Does not know: where a module's places are (`places.py`), when a forward runs (`replay.py`).

A *box* is one such place: something with contents that can be exchanged in place, so that whoever else holds the box
sees the exchange. A *snapshot* holds the contents of boxes at one moment and the tensors in them, each with its
version and, where asked for, a copy of its values.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

ATOMS = frozenset(
    (
        type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout,
        torch.memory_format, type(Ellipsis), range, slice, types.ModuleType, types.BuiltinFunctionType, property,
    )
)  # fmt: skip
NOT_OPENED = frozenset(("_parameters", "_modules"))
"""Not inspected here: parameters belong to the optimizer, and submodules are visited by name."""


class Box:
    """A place whose contents can be read and replaced."""

    __slots__ = ("kind", "label", "names", "thing")

    def __init__(self, kind: str, thing: Any, label: str, names: tuple[str, ...] = ()):
        self.kind, self.thing, self.label, self.names = kind, thing, label, names

    def read(self) -> Any:
        """A shallow copy of the contents."""
        thing, kind = self.thing, self.kind
        if kind == "attributes":
            return {k: v for k, v in thing.items() if k not in NOT_OPENED}
        if kind == "dict":
            return dict(thing)
        if kind == "list":
            return list(thing)
        if kind == "set":
            return set(thing)
        if kind == "cell":
            try:
                return [thing.cell_contents]
            except ValueError:  # not set yet
                return []
        if kind == "array":
            return thing.copy()
        if kind == "variables":
            return {k: thing[k] for k in self.names if k in thing}
        return {k: getattr(thing, k) for k in self.names if hasattr(thing, k)}  # fields: of a class, or slots

    def write(self, contents: Any) -> None:
        """Replace the contents."""
        thing, kind = self.thing, self.kind
        if kind in ("attributes", "variables"):
            for key in [k for k in thing if k not in contents and (k in self.names or kind == "attributes")]:
                if key not in NOT_OPENED:
                    del thing[key]
            thing.update(contents)
        elif kind == "dict":
            thing.clear()
            thing.update(contents)
        elif kind == "list":
            thing.clear()
            thing.extend(contents)
        elif kind == "set":
            thing.clear()
            thing.update(contents)
        elif kind == "cell":
            if contents:
                thing.cell_contents = contents[0]
        elif kind == "array":
            thing[...] = contents
        else:
            for key, value in contents.items():
                if getattr(thing, key, contents) is not value:  # assign only what has changed: the object may be frozen
                    setattr(thing, key, value)

    def describe(self, key: Any) -> str:
        if self.kind == "list":
            return f"{self.label}[{key}]"
        if self.kind == "dict":
            return f"{self.label}.{key}" if isinstance(key, str) and self.label else f"{self.label}[{key!r}]"
        return self.label if self.kind in ("cell", "array", "set") else f"{self.label}.{key}".lstrip(".")


def items_of(contents: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(contents, dict):
        return contents.items()
    return enumerate(contents) if isinstance(contents, list) else ((None, v) for v in contents)


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of a place are the same: the same object, or equal constants."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b) or kind not in ATOMS:
        return kind is type(b) and kind is tuple and len(a) == len(b) and all(map(same_value, a, b))
    return bool(a == b) or (a != a and b != b)


def changed_key(box: Box, before: Any) -> Any:
    """The first key of a box whose value differs from `before`; `_SAME` if there is none."""
    now = box.read()
    if box.kind == "array":
        same = now.shape == before.shape and (now == before).all()
        return _SAME if same else None
    if isinstance(now, dict):
        for key in now:
            if key not in before or not same_value(now[key], before[key]):
                return key
        return next((key for key in before if key not in now), _SAME)
    if isinstance(now, list):
        for k, (a, b) in enumerate(zip(now, before)):
            if not same_value(a, b):
                return k
        return _SAME if len(now) == len(before) else min(len(now), len(before))
    return _SAME if now == before else None


_SAME = object()


def is_changed(box: Box, before: Any) -> bool:
    """Whether the contents of a box differ from `before`."""
    return changed_key(box, before) is not _SAME


class HeldTensor:
    """A tensor in a place, as a snapshot found it."""

    __slots__ = ("copy", "label", "slots", "tensor", "version")

    def __init__(self, tensor: Tensor, label: str):
        self.tensor, self.label, self.version = tensor, label, tensor._version
        self.copy: Tensor | None = None
        self.slots: list[tuple[Box, Any]] = []
        """The places where it can be exchanged for another tensor."""

    def copyable(self) -> bool:
        """Whether a copy can replace the tensor: it is plain memory without an autograd history."""
        t = self.tensor
        plain = type(t) is Tensor and not t.is_meta and t.layout is torch.strided
        return plain and t.grad_fn is None and not t.requires_grad

    def moved(self) -> bool:
        """Whether the values have changed since the tensor was found, as far as its version or a copy shows."""
        # Batch norm's kernel changes its statistics without increasing their version.
        if self.tensor._version != self.version:
            return True
        return self.copy is not None and not _equal(self.tensor, self.copy)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta != b.is_meta:
        return False
    if a.is_meta:  # the form of a tensor, without values (a model's shell)
        return True
    # NaN is the same as NaN here.
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


class Snapshot:
    """Boxes with their contents at one moment, and the tensors in them."""

    def __init__(self) -> None:
        self.boxes: list[tuple[Box, Any]] = []
        self.tensors: dict[int, HeldTensor] = {}
        self.sources: list[Source] = []

    def copy_tensors(self, which: Callable[[HeldTensor], bool]) -> None:
        for held in self.tensors.values():
            if held.copyable() and which(held):
                held.copy = held.tensor.detach().clone()

    def changes(self) -> Iterator[tuple[Box, Any]]:
        """Boxes whose contents have changed, each with the first key that differs."""
        for box, before in self.boxes:
            key = changed_key(box, before)
            if key is not _SAME:
                yield box, key

    def changed_names(self, known: set[int]) -> Iterator[str]:
        """The names of everything that has changed since the snapshot, including tensors whose version has changed.

        `known`: ids of objects whose changes are not of interest.
        """
        for box, key in self.changes():
            if id(box.thing) not in known:
                yield box.describe(key)
        for held in self.tensors.values():
            if held.tensor._version != held.version:
                yield held.label

    def put_back(self) -> None:
        """Restore all contents."""
        with torch.no_grad():
            for held in self.tensors.values():
                if held.copy is not None and held.moved():
                    held.tensor.copy_(held.copy)
        for box, before in self.boxes:
            if changed_key(box, before) is not _SAME:
                box.write(before)
        for source in self.sources:
            source.put_back()


class Source:
    """A random generator of a module, with its state."""

    __slots__ = ("_set", "state", "thing")

    def __init__(self, thing: Any):
        self.thing = thing
        self.state, self._set = _source_state(thing)

    def put_back(self) -> None:
        self._set(self.state)

    def comparable(self) -> Any:
        """The state as values that `==` compares."""
        return _comparable(self.state)


def _source_state(thing: Any) -> tuple[Any, Callable[[Any], Any]]:
    if isinstance(thing, torch.Generator):
        return thing.get_state(), thing.set_state
    if isinstance(thing, random.Random):
        return thing.getstate(), thing.setstate
    if hasattr(thing, "bit_generator"):  # numpy's Generator
        bits = thing.bit_generator
        return bits.state, functools.partial(setattr, bits, "state")
    return thing.get_state(), thing.set_state  # numpy's RandomState


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_comparable, state))
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    return state.tobytes() if type(state).__module__ == "numpy" else state


# --- generators that belong to the process --------------------------------------------------------------------


def host_state() -> Any:
    """The state of Python's and numpy's global random generators."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)


def set_host_state(state: Any) -> None:
    if state is None:
        return
    random.setstate(state[0])
    if state[1] is not None:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = state[1]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
