"""Detects users' hooks on parameters, modules and backward, so that they behave as in plain PyTorch.

Knows: hooks on the nodes that accumulate into `.grad` (as in Megatron, apex, Horovod and DeepSpeed), hooks that run
after that and may step an optimizer, forward hooks, and the names of a stage's tensors for messages. Does not know: how
gradients are split (`wgrad.py` asks which parameters to leave alone).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.stages.calling import layers_text
from octopipe.runtime.stages.weight_queue import OperandChanged
from octopipe.runtime.torch_private import has_global_forward_hooks


def _references(parameter: Tensor) -> int:
    return sys.getrefcount(get_gradient_edge(parameter).node)


_NOBODY = _references(nn.Parameter(torch.zeros(1)))
"""The reference count of a node that no other Python object holds."""


class HookedParameters:
    """The parameters of one stage, and the hooks on them."""

    def __init__(self, modules: Sequence[nn.Module], first_layer: int):
        self._modules, self._first_layer = tuple(modules), first_layer
        self._named = [(f"{first_layer + k}.{n}", p) for k, m in enumerate(modules) for n, p in m.named_parameters()]
        self._after: list[tuple[str, Tensor]] = []
        """Parameters with hooks that run after their gradient has been accumulated."""
        self.forwards = False
        """Whether a forward hook may see the output of any module."""
        self.backwards = False
        """Whether a module has backward hooks."""
        self._versions: dict[str, int] = {}
        self._counts: dict[int, int] = {}
        self._held: set[int] = set()

    def _buffers(self) -> list[tuple[str, Tensor]]:
        first = self._first_layer
        return [(f"{first + k}.{n}", b) for k, m in enumerate(self._modules) for n, b in m.named_buffers()]

    def look(self, parameters: Iterable[Tensor]) -> set[int]:
        """Look for hooks again; returns the ids of parameters whose gradients autograd itself must accumulate.

        torch does not expose the hooks on an accumulation node. But whoever registers one has to keep a Python
        reference to the node, as the node and its hooks disappear otherwise. A node that some Python object refers to
        is therefore taken to have hooks. (Graphs refer to nodes, too, but not from Python.)
        """
        self._after = [(n, p) for n, p in self._named if getattr(p, "_post_accumulate_grad_hooks", None)]
        self.forwards = has_global_forward_hooks() or any(
            m._forward_hooks or m._forward_pre_hooks for top in self._modules for m in top.modules()
        )
        self.backwards = any(m._backward_hooks or m._backward_pre_hooks for top in self._modules for m in top.modules())
        self._versions = {n: p._version for n, p in (*self._named, *self._buffers())}
        held = self._held_by_python([p for p in parameters if p.requires_grad and p.is_leaf])
        self._after += [(n, p) for n, p in self._named if id(p) in held]
        return held

    def listened_to(self) -> str:
        """The name of a parameter with a hook that runs after its gradient has been accumulated; empty without one."""
        return self._after[0][0] if self._after else ""

    def _held_by_python(self, parameters: Sequence[Tensor]) -> set[int]:
        """Ids of the parameters whose accumulation nodes another Python object refers to."""
        counts = {id(p): count for p in parameters if (count := _references(p)) > _NOBODY}
        if counts != self._counts:
            # Searching all objects takes milliseconds, so it is done only if a reference count has changed.
            nodes = {id(p): get_gradient_edge(p).node for p in parameters if id(p) in counts}
            wanted = {id(node): key for key, node in nodes.items()}
            ours = {id(nodes), id(sys._getframe())}
            self._counts, self._held = counts, set()
            for holder in gc.get_referrers(*nodes.values()) if nodes else ():
                if id(holder) not in ours:
                    self._held |= {wanted[id(x)] for x in gc.get_referents(holder) if id(x) in wanted}
        return self._held

    def before_backward(self) -> list[tuple[str, Tensor, int]]:
        return [(n, p, p._version) for n, p in self._after]

    def refuse_stepping(self, before: Sequence[tuple[str, Tensor, int]]) -> None:
        """Raise if an optimizer stepped inside backward while other micro-batches still need the old weights."""
        for name, parameter, version in before:
            if parameter._version != version:
                raise OctoPipeError(
                    f"parameter {name} was changed inside backward, by a hook that runs after its gradient is added "
                    "(an optimizer that steps in backward); other micro-batches or replicas still need it: remove "
                    "the hook and call optimizer.step() after Pipeline.step()"
                )

    def changed(self) -> str:
        """A parameter or buffer that has been modified in place since the step began, if any."""
        named = (*self._named, *self._buffers())
        return next((n for n, p in named if self._versions.get(n, p._version) != p._version), "")

    def refuse_operand(self, error: OperandChanged) -> NoReturn:
        name = next((n for n, p in self._named if p is error.parameter), "a parameter")
        raise OctoPipeError(
            f"parameter {name}: the {error.what} of its product, of shape {error.shape}, was changed in place before "
            "the weight's gradient was computed; change a copy of it (`.clone()`)"
        ) from None

    def refuse_in_place(self, error: RuntimeError, first: int, last: int) -> NoReturn:
        """Explain autograd's error about a saved tensor that was modified in place."""
        changed = self.changed()
        what = f"{changed} was changed in place in this step" if changed else "something was changed in place"
        raise OctoPipeError(
            f"{layers_text(first, last)}: {what} after a forward and before its backward, which needs the old values "
            "(micro-batches overlap in a pipeline: another one's forward may have done it); change a copy and assign "
            f"it, as in `self.mean = self.mean.lerp(new, 0.1)`. torch: {' '.join(str(error).split())[:160]}"
        ) from error
