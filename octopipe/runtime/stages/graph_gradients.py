"""Gradients of captured stages: permanent memory into which their graphs accumulate.

Knows: which parameters get a gradient, and the buffer that is assigned to each one's `.grad` before a step. Does not
know: graphs or ops (`cuda_graphs.py`).

A graph accumulates into fixed addresses. A parameter that no backward reaches has no buffer and keeps `.grad` None, as
without graphs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from octopipe.runtime.torch_private import foreach_zero_


class GradientBuffers:
    """The buffers of one rank's captured stages."""

    def __init__(self) -> None:
        self._buffers: list[tuple[nn.Parameter, Tensor]] = []
        self._bound: set[int] = set()
        """Ids of the parameters that have a buffer."""
        self._reached: dict[nn.Parameter, torch.dtype] = {}
        """Parameters that got a gradient in the observed step, with its dtype."""
        self._late: dict[nn.Parameter, None] = {}
        """Parameters without a buffer that got a gradient while ops were captured."""

    def observe(self, modules: Iterable[nn.Module]) -> None:
        """Record, after a backward of the observed step, which parameters have a gradient (before any reduction)."""
        for parameter in _own_parameters(modules):
            if parameter.grad is not None:
                self._reached[parameter] = parameter.grad.dtype

    def check(self, modules: Iterable[nn.Module]) -> None:
        """Record, after a captured backward, the parameters that have a gradient but no buffer."""
        for parameter in _own_parameters(modules):
            if parameter.grad is not None and id(parameter) not in self._bound:
                self._late[parameter] = None

    def make(self, modules: Iterable[nn.Module]) -> None:
        """Allocate buffers for those parameters of these modules that got a gradient in the observed step."""
        owned = dict.fromkeys(p for p in _own_parameters(modules) if p in self._reached)
        self._buffers = [(p, torch.zeros_like(p, dtype=self._reached[p], requires_grad=False)) for p in owned]
        self._bound = {id(p) for p in owned}
        self._reached.clear()

    def bind(self) -> None:
        """Make every buffer its parameter's `.grad`, with the value that `.grad` had before (zeros if None)."""
        fresh = []
        with torch.no_grad():
            for parameter, buffer in self._buffers:
                grad = parameter.grad
                if grad is buffer:
                    continue
                if grad is None:
                    fresh.append(buffer)
                else:
                    buffer.copy_(grad)
                parameter.grad = buffer
            if fresh:
                foreach_zero_(fresh)

    def rescue(self) -> bool:
        """Copy gradients without a buffer out of the pool, so that it can be dropped. Returns whether any exist."""
        late, self._late = self._late, {}
        for parameter in late:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        return bool(late)

    def release(self) -> None:
        """Drop the buffers. A buffer that is still a parameter's `.grad` stays alive through it."""
        self._buffers, self._bound = [], set()


def _own_parameters(modules: Iterable[nn.Module]) -> Iterable[nn.Parameter]:
    return (p for module in modules for p in module.parameters(recurse=False))
