"""Parameters that several stages share, on one rank or on several: their gradients are added up.

Knows: which parameters are tied, the ranks that hold them, and how to add their gradients after a step. Does not know:
schedules; PyTorch's runtime does not support tied parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan

TIES = "octopipe_ties"
"""The attribute in which a rank's first stage stores its ties."""


@dataclass(slots=True, kw_only=True)
class Tie:
    """One parameter under several names; `names[rank]` are its names in the layers of that rank."""

    names: dict[int, tuple[str, ...]]
    mine: list[nn.Parameter] = field(default_factory=list)

    def join(self, layers: Mapping[int, nn.Module]) -> None:
        """Replace all copies on this rank by one Parameter object, so that autograd adds up their gradients."""
        here = [n for names in self.names.values() for n in names if int(n.partition(".")[0]) in layers]
        found: nn.Parameter | None = None
        for name in here:
            layer, _, path = name.partition(".")
            owner: nn.Module = layers[int(layer)]
            *parents, last = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            parameter = getattr(owner, last)
            if found is None:
                found = parameter
            elif parameter is not found:
                setattr(owner, last, found)
        self.mine = [] if found is None else [found]

    def reduce(self, rank: int, group: Any) -> None:
        """Sum the gradient over the ranks with this parameter, in rank order, so that all get the same result."""
        ranks = sorted(self.names)
        if len(ranks) < 2 or rank not in self.names:
            return
        (parameter,) = self.mine
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        total = parameter.grad
        first = ranks[0]
        if rank != first:
            dist.send(total.contiguous(), group=group, group_dst=first)
            received = torch.empty_like(total, memory_format=torch.contiguous_format)
            dist.recv(received, group=group, group_src=first)
            total.copy_(received)
            return
        other = torch.empty_like(total, memory_format=torch.contiguous_format)
        for peer in ranks[1:]:
            dist.recv(other, group=group, group_src=peer)
            total.add_(other)
        for peer in ranks[1:]:
            dist.send(total.contiguous(), group=group, group_dst=peer)


def find_ties(plan: Plan, layers: Sequence[Any], tied: Sequence[Sequence[str]]) -> list[Tie]:
    """Return all ties of a model: Parameter objects shared between layers, and the groups of names in `tied`."""
    rank_of = {k: s.rank for s in plan.stages for k in range(s.first, s.stop)}
    groups: list[tuple[str, ...]] = [tuple(names) for names in tied]
    seen: dict[int, list[str]] = {}
    for k, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            for name, parameter in layer.named_parameters():
                seen.setdefault(id(parameter), []).append(f"{k}.{name}")
    groups += [tuple(names) for names in seen.values() if len({n.partition(".")[0] for n in names}) > 1]
    out = []
    for names in groups:
        by_rank: dict[int, list[str]] = {}
        for name in names:
            layer, dot, path = name.partition(".")
            if not layer.isdigit() or int(layer) not in rank_of or not path or not dot:
                raise OctoPipeError(f"tied parameter {name!r}; write layer.name with a layer below {plan.num_layers}")
            by_rank.setdefault(rank_of[int(layer)], []).append(name)
        out.append(Tie(names={r: tuple(n) for r, n in by_rank.items()}))
    return out


class OneSum:
    """Keeps the ties' gradients of one step apart from those of earlier steps, so that only this step's are reduced and
    gradient accumulation stays correct."""

    def __init__(self, ties: Sequence[Tie]):
        self._ties = [t for t in ties if len(t.names) > 1]
        self._before: list[Tensor | None] = []

    def begin(self) -> None:
        self._before = []
        for tie in self._ties:
            for parameter in tie.mine:
                self._before.append(parameter.grad)
                parameter.grad = None

    def end(self, rank: int, group: Any) -> None:
        before = iter(self._before)
        for tie in self._ties:
            tie.reduce(rank, group)
            for parameter in tie.mine:
                earlier = next(before)
                if earlier is not None:
                    parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
