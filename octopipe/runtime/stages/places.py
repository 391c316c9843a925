"""Finds the places where modules, losses and hooks keep state between two forwards.

Knows: how to find the places (`state.py`): attributes of modules and of other objects, buffers, lists, dicts, sets,
queues, numpy arrays, closure variables, default arguments, attributes of user-defined classes, and global variables
that a user's function refers to, directly or through other functions and modules of the user. Does not know: what
forwards do with them.

Not found: iterators and generators in progress, state inside libraries and installed packages, files, functions that
are only referred to by name in a string, and everything beyond `MOST_PLACES` places. A forward that depends on such
state is detected only by its outputs.
"""

from __future__ import annotations

import functools
import random
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.runtime.stages.state import ATOMS, Box, HeldTensor, Snapshot, Source, items_of

MOST_PLACES = 20_000
"""Maximum number of places inspected per stage, so that a data set in a list is not walked through."""
MOST_ITEMS = 4096
"""Containers with more items than this are not inspected."""
_LIBRARIES = frozenset(
    ("torch", "builtins", "numpy", "transformers", "octopipe", "typing", "abc", "collections", "functools", "logging",
     "threading", "multiprocessing", "concurrent", "asyncio", "weakref", "warnings", "enum", "contextlib", "pathlib")
)  # fmt: skip
"""Packages whose classes and functions keep no state of a user's model in their own namespaces."""
NO_STATE = "octopipe_no_state"
"""Objects of a class in which this attribute is true are not inspected, because they keep no state of a forward. For
example communicators, whose counters and buffers advance from call to call and must never be restored."""
_PYTHONS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
"""Where Python's own modules and installed packages are."""


def snapshot_of_modules(
    modules: Sequence[tuple[str, nn.Module]], also: Sequence[tuple[str, Any]] = (), *, ours: bool = True
) -> Snapshot:
    """A snapshot of all state of modules (given with their names) and other objects (a loss, hooks). `ours`: with the
    state of octopipe's own objects that are no modules."""
    walk = _Walk(ours=ours)
    for label, top in modules:
        walk.module(top, label)
    for label, thing in also:
        walk.value(thing, label)
    return walk.found


def snapshot_of_boxes(boxes: Iterable[Box]) -> Snapshot:
    """A snapshot of these boxes and their contents, without walking through modules in them.

    Changed state inside a module has its own box, so a list or cache that contains a whole model stays cheap.
    """
    walk = _Walk(into_modules=False)
    for box in boxes:
        walk.box(box)
    return walk.found


class _Walk:
    def __init__(self, *, into_modules: bool = True, ours: bool = True) -> None:
        self.found = Snapshot()
        self._into_modules, self._ours = into_modules, ours
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        """References to the objects in `_seen`, so that their ids are not reused."""
        self._classes: set[type] = set()
        self._modules: set[tuple[int, tuple[str, ...]]] = set()

    def box(self, box: Box) -> None:
        if id(box.thing) in self._seen and box.kind not in ("variables", "fields"):
            return
        self._note(box.thing)
        contents = box.read()
        self.found.boxes.append((box, contents))
        if box.kind in ("array", "set"):
            return
        for key, value in list(items_of(contents)):
            if type(value) in ATOMS:
                continue
            label = box.label if key == "_buffers" and box.kind == "attributes" else box.describe(key)
            self.value(value, label, box, key)

    def module(self, module: nn.Module, label: str) -> None:
        if id(vars(module)) in self._seen:
            return
        self._class(type(module), label)
        self.box(Box("attributes", vars(module), label))
        for name, child in module._modules.items():
            if child is not None:
                self.module(child, f"{label}.{name}")

    def value(self, value: Any, label: str, box: Box | None = None, key: Any = None) -> None:
        kind = type(value)
        if isinstance(value, Tensor):
            held = self.found.tensors.get(id(value))
            if held is None:
                held = self.found.tensors[id(value)] = HeldTensor(value, label)
            if box is not None:
                held.slots.append((box, key))
            return
        if kind in ATOMS or id(value) in self._seen or len(self.found.boxes) > MOST_PLACES:
            return
        if isinstance(value, nn.Module):
            if self._into_modules:
                self.module(value, label)
        elif isinstance(value, (list, deque)):
            if len(value) <= MOST_ITEMS:
                self.box(Box("list", value, label))
        elif isinstance(value, dict):
            if len(value) <= MOST_ITEMS:
                self.box(Box("dict", value, label))
        elif isinstance(value, set):
            if len(value) <= MOST_ITEMS:
                self.box(Box("set", value, label))
        elif isinstance(value, (tuple, frozenset)):
            self._note(value)
            for k, part in enumerate(value):
                self.value(part, f"{label}[{k}]")
        elif isinstance(value, types.FunctionType):
            self._function(value, label)
        elif isinstance(value, types.MethodType):
            self.value(value.__self__, label)
            if isinstance(value.__func__, types.FunctionType):
                self._function(value.__func__, label)
        elif isinstance(value, functools.partial):
            self._note(value)
            self.value((value.func, *value.args), label)
            self.value(value.keywords, label)
        elif _is_source(value):
            self._note(value)
            self.found.sources.append(Source(value))
        elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            if value.nbytes <= 1 << 24 and value.dtype != object and value.flags.writeable:
                self.box(Box("array", value, label))
        elif not isinstance(value, (type, Iterator, Mapping)):
            self._object(value, label)

    def _object(self, value: Any, label: str) -> None:
        kind = type(value)
        package = kind.__module__.partition(".")[0]
        if package in _LIBRARIES and not (self._ours and package == "octopipe"):
            return
        if getattr(kind, NO_STATE, False):
            return
        self._note(value)
        self._class(kind, label)
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self.box(Box("attributes", own, label))
        slots = [n for base in kind.__mro__ for n in _names(base.__dict__.get("__slots__", ())) if n[:2] != "__"]
        if slots:
            self.box(Box("fields", value, label, tuple(slots)))

    def _function(self, function: types.FunctionType, label: str) -> None:
        if id(function) in self._seen:
            return
        self._note(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if id(cell) not in self._seen:
                self.box(Box("cell", cell, f"{name} of {label}"))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.value(default, f"a default of {function.__qualname__}")
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            return
        named = tuple(dict.fromkeys(_named(function.__code__)))
        self._namespace(function.__globals__, named, function.__module__)

    def _namespace(self, own: dict[str, Any], named: tuple[str, ...], module: str | None) -> None:
        """Visit what code with the global names `named` reaches in a namespace: variables, functions, user modules."""
        here = [n for n in named if n in own]
        names = tuple(n for n in here if _may_be_state(own[n]))
        if names:
            self.box(Box("variables", own, f"global of {module}", names))
        for value in [own[n] for n in here]:
            if len(self.found.boxes) > MOST_PLACES:
                return
            if isinstance(value, types.FunctionType):
                self._function(value, value.__qualname__)
            elif isinstance(value, types.ModuleType) and _is_users(value):
                key = (id(value), named)
                if key not in self._modules:
                    self._modules.add(key)
                    self._namespace(vars(value), named, value.__name__)

    def _class(self, kind: type, label: str) -> None:
        """Visit the class attributes of a user's class (and its bases) that may be state, and its functions."""
        for base in kind.__mro__:
            if base in self._classes or base.__module__.partition(".")[0] in _LIBRARIES:
                continue
            self._classes.add(base)
            names = []
            for name, value in list(vars(base).items()):
                inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                if isinstance(inner, types.FunctionType):
                    self._function(inner, label)
                elif name[:2] != "__" and _may_be_state(value):
                    names.append(name)
            if names:
                self.box(Box("fields", base, f"class {base.__name__}", tuple(names)))

    def _note(self, thing: Any) -> None:
        self._seen.add(id(thing))
        self._alive.append(thing)


def _names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _named(code: types.CodeType) -> Iterator[str]:
    """Global names of a function, and of those defined inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant)


def _may_be_state(value: Any) -> bool:
    """Whether a global variable or class attribute may be state that forwards change."""
    if isinstance(value, (list, dict, set, deque)):
        return len(value) <= MOST_ITEMS
    return isinstance(value, (bool, int, float, Tensor)) or value is None or _is_source(value) or _is_array(value)


def _is_users(module: types.ModuleType) -> bool:
    """Whether a module is neither a library's nor Python's own."""
    file = getattr(module, "__file__", None) or ""
    return module.__name__.partition(".")[0] not in _LIBRARIES and bool(file) and not file.startswith(_PYTHONS)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _is_source(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    kind = type(value)
    return kind.__module__.partition(".")[0] == "numpy" and kind.__name__ in ("Generator", "RandomState")
