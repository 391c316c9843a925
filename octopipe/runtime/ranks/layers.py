"""The layers one rank holds: built, named by layer, tied, compared with the other ranks' copies.

Knows: which parameters are one and the same, on this rank (one object) and across ranks (holders). Does not
know: what layers compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan
from octopipe.runtime.ranks.reduce import Shared
from octopipe.runtime.ranks.world import World
from octopipe.runtime.stages.rng import micro_batch_seed


class Layers:
    """See the module. Replicated and tied parameters have `holders`: all ranks of the pipeline that use them."""

    def __init__(
        self,
        layers: Sequence[nn.Module | Callable[[], nn.Module]],
        plan: Plan,
        world: World,
        device: torch.device,
        *,
        tied: Sequence[Sequence[str]],
        seed: int | None,
    ):
        self.plan, self.world, self.device = plan, world, device
        numbers = sorted({k for s in plan.stages if s.rank == world.rank for k in range(s.first, s.stop)})
        self.modules: dict[int, nn.Module] = {k: _build(layers[k], k, seed).to(device) for k in numbers}
        ties = [list(t) for t in tied] + _object_ties(layers) + _named_ties(self.modules)
        # Layers of other ranks may be tied to ours; and a rank with another plan must be found out now.
        said = world.gather((_digest(plan), ties))
        if any(digest != said[0][0] for digest, _ in said):
            other = next(r for r, (digest, _) in enumerate(said) if digest != said[0][0])
            raise OctoPipeError(f"rank {other} runs another plan than rank 0; give all ranks the same plan")
        self._canonical = _merge([t for _, theirs in said for t in theirs], plan)
        self._tie_here()
        self.named: dict[str, nn.Parameter] = {}
        self._layers_of: dict[int, set[int]] = {}
        seen: set[int] = set()
        for k, module in self.modules.items():
            for name, parameter in module.named_parameters():
                self._layers_of.setdefault(id(parameter), set()).add(k)
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.named[f"{k}.{name}"] = parameter
        ranks_of: dict[int, set[int]] = {}
        for stage in plan.stages:
            for k in range(stage.first, stage.stop):
                ranks_of.setdefault(k, set()).add(stage.rank)
        members: dict[str, set[str]] = {}
        for name, key in self._canonical.items():
            members.setdefault(key, {key}).add(name)
        self._shared: list[Shared] = []
        for name, parameter in self.named.items():
            key = self._canonical.get(name, name)
            everywhere = {int(n.split(".", 1)[0]) for n in members.get(key, {name})}
            holders = set().union(*(ranks_of[k] for k in everywhere))
            self._shared.append(
                Shared(
                    key=key,
                    parameter=parameter,
                    layers=tuple(sorted(self._layers_of[id(parameter)])),
                    holders=tuple(sorted(holders)),
                )
            )

    def _tie_here(self) -> None:
        """Make parameters that are one, one object on this rank."""
        first: dict[str, nn.Parameter] = {}
        for name, key in sorted(self._canonical.items(), key=lambda item: int(item[0].split(".", 1)[0])):
            layer, path = name.split(".", 1)
            module = self.modules.get(int(layer))
            if module is None:
                continue
            owner, _, attribute = path.rpartition(".")
            try:
                parameter = getattr(module.get_submodule(owner), attribute)
            except AttributeError:
                raise OctoPipeError(f"tied parameter {name}: layer {layer} has no parameter {path}") from None
            kept = first.setdefault(key, parameter)
            if kept is not parameter:
                if kept.shape != parameter.shape:
                    raise OctoPipeError(
                        f"tied parameters {key} and {name} have shapes {tuple(kept.shape)} and {tuple(parameter.shape)}"
                    )
                # Under every name it has there: a module may hold it twice, and use the other one.
                for owner_module in module.modules():
                    for alias, held in list(owner_module._parameters.items()):
                        if held is parameter:
                            setattr(owner_module, alias, kept)

    def shared(self) -> list[Shared]:
        """Every parameter of this rank with its holders."""
        return self._shared

    def holder_sets(self) -> list[tuple[int, ...]]:
        """Sets of more than one rank that hold a parameter of ours, in one order for all."""
        return sorted({s.holders for s in self._shared if len(s.holders) > 1})

    # -- names ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {f"{k}.{name}": v for k, m in self.modules.items() for name, v in m.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for k, module in self.modules.items():
            mine = {}
            for name in module.state_dict():
                key = f"{k}.{name}"
                if key not in state:
                    raise OctoPipeError(f"the state has no entry {key}; it is of another model or another layer split")
                mine[name] = state[key]
            try:
                module.load_state_dict(mine)
            except RuntimeError as error:
                raise OctoPipeError(f"layer {k}: {' '.join(str(error).split())[:200]}") from None


def _build(layer: nn.Module | Callable[[], nn.Module], number: int, seed: int | None) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer
    if not callable(layer):
        raise OctoPipeError(f"layer {number} is a {type(layer).__name__}; give a module or a factory of one")
    if seed is None:
        made = layer()
    else:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(micro_batch_seed(seed, 0, 0, number))
            made = layer()
    if not isinstance(made, nn.Module):
        raise OctoPipeError(f"the factory of layer {number} made a {type(made).__name__}; it must make a module")
    return made


def _object_ties(layers: Sequence[Any]) -> list[list[str]]:
    """Parameter objects that several given modules share."""
    names: dict[int, list[str]] = {}
    for k, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            for name, parameter in layer.named_parameters():
                names.setdefault(id(parameter), []).append(f"{k}.{name}")
    return [found for found in names.values() if len(found) > 1]


def _named_ties(modules: Mapping[int, nn.Module]) -> list[list[str]]:
    """What modules say themselves: `tied_to = {"weight": "embedding"}`, every name with its tie's."""
    return [
        [f"tie {key}", f"{k}.{name}"]
        for k, module in modules.items()
        for name, key in getattr(module, "tied_to", {}).items()
    ]


def _merge(ties: Sequence[Sequence[str]], plan: Plan) -> dict[str, str]:
    """Parameter name -> the first name of its tie, for every name in a tie of more than one."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for tie in ties:
        for name in tie:
            layer = name.split(".", 1)[0]
            if not name.startswith("tie ") and not (layer.isdigit() and int(layer) < plan.num_layers and "." in name):
                raise OctoPipeError(f"tied parameter {name!r}: write layer.name, such as '0.weight'")
            parent[root(name)] = root(tie[0])
    groups: dict[str, list[str]] = {}
    for name in parent:
        if not name.startswith("tie "):
            groups.setdefault(root(name), []).append(name)
    out = {}
    for names in groups.values():
        names.sort(key=lambda n: (int(n.split(".", 1)[0]), n))
        if len(names) > 1:
            out.update(dict.fromkeys(names, names[0]))
    return out


def _digest(plan: Plan) -> int:
    """Equal for equal decisions, in every process."""
    import zlib

    text = repr((plan.num_layers, plan.num_ranks, plan.stages, plan.routes, plan.route_of_micro_batch)) + plan.to_csv()
    return zlib.crc32(text.encode())
