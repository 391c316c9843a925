"""Detects forwards that read the weights of a layer on another rank without asking for their gradient.

Knows: which calls of torch read a tensor's values, and which tensors belong to layers on other ranks. Does not know:
how layers hold them, or gradients (`ranks/leaves.py` finds weights that take one).

A target network, a teacher made of the first layers, or a head that uses `embedding.weight.detach()` may hold the
other layer in a list or a closure. In one process it sees every update of these weights. On another rank, it has a copy
of its own that no optimizer updates, and would use the first values for ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

_CUTS_OFF = frozenset(("detach", "item", "tolist", "numpy"))
"""Methods that read values without recording a gradient."""
_FORM_ONLY = frozenset(
    ("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "type", "get_device",
     "data_ptr", "untyped_storage", "is_floating_point", "is_complex", "is_contiguous", "is_pinned", "is_shared",
     "is_signed", "is_inference", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
     "retain_grad", "__hash__", "__len__", "__repr__", "result_type", "can_cast", "__get__", "__set__")
)  # fmt: skip
"""Functions and methods that return no values of a tensor. Of the attributes, `_reads` treats `data` and views
separately."""
_VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag"))
"""Attributes that are views of a tensor, from which something else then reads the values."""


class Known(NamedTuple):
    """A weak reference to a parameter of a layer, and its name."""

    ref: weakref.ref[nn.Parameter]
    name: str


class ForeignReads:
    """Records the first parameter of a layer on another rank that a forward reads. `known`: these parameters by id."""

    def __init__(self, known: Mapping[int, Known]):
        self._known = known
        self.found = ""

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        """Inspect one call of torch; `found` becomes the name of the parameter whose values it reads."""
        if self.found:
            return
        for given in (*args, *(kwargs or {}).values()):
            for tensor in given if isinstance(given, (tuple, list)) else (given,):
                known = self._known.get(id(tensor))
                if known is not None and known.ref() is tensor and _reads(func):
                    self.found = known.name


def _reads(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
    if name in _CUTS_OFF or attribute == "data":
        return True
    if torch.is_grad_enabled():  # `ranks/leaves.py` finds the weight in the graph of the output
        return False
    if attribute in _VIEWS:
        return True
    return name not in _FORM_ONLY and not name.endswith("_like") and not name.startswith("new_")
