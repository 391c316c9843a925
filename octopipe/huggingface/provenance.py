"""Which tensors a tensor was computed from, followed through a forward call by call.

Knows: names given to tensors ("sources"), and the names that reach any tensor computed from them. Does not know: models
or what the names mean.

Calls of torch's Python functions are followed; what is computed elsewhere (a custom autograd function, say) has no
names. The caller can detect this by `requires_grad`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from octopipe.runtime.torch_private import WithoutFunctionModes, pytree

NONE: frozenset[Hashable] = frozenset()
SHAPE_ALONE = frozenset(
    (
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "new_tensor",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
    )
)
"""Calls whose results do not depend on the values of their tensor arguments."""
LIKE_SECOND = frozenset(("type_as", "expand_as", "view_as", "reshape_as"))
"""Calls that use the values of only their first argument."""
READS = frozenset(("tolist", "item", "nonzero", "masked_select", "unique", "unique_consecutive", "bincount"))
READS |= frozenset(("__bool__", "__int__", "__float__", "__index__", "numpy"))
"""Calls that return Python values, or tensors whose shapes depend on the values of the arguments."""
IN_PLACE = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__"))


class Provenance(TorchFunctionMode):
    """While this mode is active, every result gets the names of the tensors that it was computed from.

    With `meta`, calls run on the meta device, so that only shapes and names are computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meta = False
        self.read: set[Hashable] = set()
        """The names of all tensors whose values have determined shapes or the control flow of the forward."""
        self._names: dict[int, frozenset[Hashable]] = {}
        self._alive: list[Tensor] = []
        """References to all named tensors, so that their ids are not reused."""

    def name(self, tensor: Tensor, *names: Hashable) -> None:
        """Add names to a tensor."""
        self._names[id(tensor)] = self.of(tensor) | frozenset(names)
        self._alive.append(tensor)

    def of(self, tensor: Tensor) -> frozenset[Hashable]:
        """The names of everything that the tensor was computed from."""
        return self._names.get(id(tensor), NONE)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with WithoutFunctionModes():
            name = getattr(func, "__name__", "")
            used = () if name in SHAPE_ALONE else args[:1] if name in LIKE_SECOND else (args, kwargs)
            given = [leaf for leaf in pytree.tree_leaves(used) if isinstance(leaf, Tensor)]
            names = NONE.union(*(self.of(tensor) for tensor in given)) if given else NONE
            self._note_reading(name, args, names)
            if self.meta:
                args, kwargs = pytree.tree_map(on_meta, (args, kwargs))
        out = func(*args, **kwargs)
        if names:
            with WithoutFunctionModes():
                changed = [args[0]] if args and _changes_first(func) and isinstance(args[0], Tensor) else []
                changed += [] if not changed or changed[0]._base is None else [changed[0]._base]
                changed += [kwargs["out"]] if isinstance(kwargs.get("out"), Tensor) else []
                for result in (*changed, *(leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor))):
                    self._names[id(result)] = self.of(result) | names
                    self._alive.append(result)
        return out

    def _note_reading(self, name: str, args: Any, names: frozenset[Hashable]) -> None:
        if name in READS:
            self.read |= names
        elif name == "__getitem__" and len(args) > 1:
            masks = [t for t in pytree.tree_leaves(args[1]) if isinstance(t, Tensor) and t.dtype == torch.bool]
            self.read |= NONE.union(*(self.of(mask) for mask in masks))


def on_meta(value: Any) -> Any:
    """A tensor without memory if the value is a tensor, and the meta device if it is a device."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return value
    return torch.empty_like(value, device="meta")


def _changes_first(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
