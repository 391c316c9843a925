"""R without its last matrix product: a forward that only rebuilds the graph need not compute values that nobody reads.

Knows: which linear layer of a stage comes last, and whether backward depends on its value. Does not know: why or when a
stage runs again.

Most layers end in `x + down(...)`. The backward of an addition or of a view reads no values, so the result of the last
product of R is unused; its backward needs only its operands. The first R of a stage computes everything and checks the
conditions: after the last linear layer only additions and views are called, only these use it in the graph, and nobody
holds their results when the forward has ended. From then on, that product is skipped and replaced by zeros, and every R
checks again: if the forward takes a different path, it is repeated completely, and nothing is skipped from then on. If
the zeros could be observed (forward hooks, layers with state), or if R is compared with F, everything is computed.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from octopipe.runtime.stages.weight_queue import WeightQueue
from octopipe.runtime.stages.wgrad import (
    _HANDLERS,
    _PLAIN,
    _VIEW_NODES,
    SplitMode,
    _is_grad_enabled,
    _is_traced,
    is_autocast_on,
)
from octopipe.runtime.stages.wgrad_ops import LeftOut

_READ_NOTHING = frozenset(
    (
        torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.reshape, torch.flatten, Tensor.reshape,
        Tensor.flatten, Tensor.unflatten, Tensor.view, Tensor.size, Tensor.dim,
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad")),
    )
)  # fmt: skip
"""Calls whose backward needs no values, and calls that read no values at all."""
_READ_NOTHING_NODES = _VIEW_NODES | {"AddBackward0"}


class Rerun(SplitMode):
    """Splits the forward of a stage when it runs again; `begin` is called before it, `valid` after it."""

    def __init__(self, mode: SplitMode):
        TorchFunctionMode.__init__(self)
        self._params, self._casts, self.has_weights = mode._params, mode._casts, mode.has_weights
        self.queue, self.habits, self.left_alone = mode.queue, mode.habits, mode.left_alone
        self.reads = None
        self.hooked = self.in_backward = self._off = self._own_graph = self.keeps_nothing = False
        self._whole = False
        self._leave_out: int | None = None
        """Number of the linear layer that is skipped; 0: none may be skipped; None: before the first run."""
        self._linears, self._unread = 0, False
        """Number of linear layers so far, and whether nothing has read the value of the last one."""
        self._node: Any = None
        self._left_out = False
        self._results: list[weakref.ref[Tensor]] = []
        """The result of the last linear layer, and tensors computed from it by additions and views."""

    def begin(self, queue: WeightQueue, *, whole: bool = False) -> None:
        """Called before a forward; `whole`: nothing may be skipped in this one."""
        self.queue, self._whole = queue, whole
        self._results.clear()
        self._linears, self._unread, self._node, self._left_out = 0, False, None, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_traced():
            return func(*args, **(kwargs or {}))
        if func is not F.linear:
            if func not in _READ_NOTHING:
                self._unread = False
            if func in _HANDLERS:
                return super().__torch_function__(func, types, args, kwargs)
            made = func(*args, **kwargs) if kwargs else func(*args)
            if self._unread and isinstance(made, Tensor):
                self._results.append(weakref.ref(made))
            return made
        self._linears += 1
        result = None
        if self._linears == self._leave_out:
            result = self._without_product(*args, **(kwargs or {}))
            self._left_out = result is not None
        if result is None:
            result = super().__torch_function__(func, types, args, kwargs)
        base = result._base
        self._unread, self._node = True, (result if base is None else base).grad_fn
        self._results = [weakref.ref(result)]
        return result

    def _without_product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        site = self.site(weight)
        if site is None or type(input) not in _PLAIN or input is weight or input.ndim == 0 or weight.ndim != 2:
            return None
        if self._whole or self.queue.reruns or is_autocast_on() or not _is_grad_enabled():
            return None
        if not self.habits.quick:
            return None
        return LeftOut.apply(input, weight, bias, site, None)

    def valid(self, root: Any, *, kept: bool = False) -> bool:
        """Whether the graph just built may be used. `root` is its last node, None if there are several; `kept`:
        somebody holds the output."""
        node, self._node = self._node, None
        kept = kept or any(ref() is not None for ref in self._results)
        unread = self._unread and not kept and root is not None and node is not None
        if self._leave_out is None:
            self._leave_out = self._linears if unread and _only_added(root, node, whole=True) else 0
        elif self._left_out and not (
            unread and self._linears == self._leave_out and _only_added(root, node, whole=False)
        ):
            self._leave_out = 0
            return False
        return True


def _only_added(root: Any, node: Any, *, whole: bool) -> bool:
    """Whether every path from `node` up to `root` consists of additions and views; there must be at least one.

    Without `whole`, only nodes next to additions and views are looked at.
    """
    users: dict[Any, list[Any]] = {}
    todo, seen = [root], {root}
    while todo:
        user = todo.pop()
        further = user is not node and (whole or user.name() in _READ_NOTHING_NODES)
        for other, _ in user.next_functions:
            if other is not None:
                users.setdefault(other, []).append(user)
                if further and other not in seen:
                    seen.add(other)
                    todo.append(other)
    todo, reached = [node], {node}
    while todo:
        for user in users.get(todo.pop(), []):
            if user.name() not in _READ_NOTHING_NODES:
                return False
            if user not in reached:
                reached.add(user)
                todo.append(user)
    return root in reached
