"""The layers of one rank: construction, parameter names, ties, and comparison with other ranks. A loss with parameters
counts as a layer.

Knows: which parameters are shared, on this rank (one object) and across ranks (holders). Does not know: what layers
compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan
from octopipe.runtime.arguments import check_built, check_factory
from octopipe.runtime.ranks.loss_parts import held_tensors, loss_module
from octopipe.runtime.ranks.reduce import Shared
from octopipe.runtime.ranks.same_memory import refuse_shared_memory
from octopipe.runtime.ranks.world import World
from octopipe.runtime.ranks.wrappers import take_over
from octopipe.runtime.stages.rng import micro_batch_seed
from octopipe.runtime.stages.shards import cut_module


class Layers:
    """This rank's layers (see the module). Parameters that are replicated or tied have `holders`: all ranks of the
    pipeline that use them.

    A loss with parameters of its own counts as the layer after the last one (`loss_layer`).
    """

    def __init__(
        self,
        layers: Sequence[nn.Module | Callable[[], nn.Module]],
        plan: Plan,
        world: World,
        device: torch.device,
        *,
        tied: Sequence[Sequence[str]],
        seed: int | None,
        loss_fn: Callable[..., Any] | None = None,
    ):
        self.plan, self.world, self.device = plan, world, device
        self.loss_layer = last = plan.num_layers
        self.ranks_of: dict[int, set[int]] = {}
        """For each layer, the ranks that hold it."""
        for stage in plan.stages:
            for k in range(stage.first, stage.stop):
                self.ranks_of.setdefault(k, set()).add(stage.rank)
        numbers = [k for k in sorted(self.ranks_of) if world.rank in self.ranks_of[k]]
        self.modules: dict[int, nn.Module] = {}
        loss = None if loss_fn is None else loss_module(loss_fn, layers)
        shared = _SharedObjects(layers, self.ranks_of)
        self.buffers_are_one = shared.across_ranks
        """Whether layers on different ranks have a tensor object in common: the same on every rank."""
        self.buffers_elsewhere: dict[str, str] = {}
        """Buffers of this rank that are the same object as one of a layer on other ranks, with the name of that one."""
        for k in numbers:
            module = _build(layers[k], k, seed)
            if (part := self._part(k)) is not None:
                module = cut_module(module, *part, k)
            check_built(module, k, device)
            self.buffers_elsewhere |= shared.elsewhere(k, module)
            self.modules[k] = shared.moved(module, device)
        if loss is not None and last - 1 in plan.shards():
            raise OctoPipeError("the loss has parameters of its own, and the plan cuts the head; use a whole head")
        if loss is not None and last - 1 in self.modules:
            self.modules[last] = shared.moved(loss, device)
        take_over(self.modules, world)
        ties = [[_with_loss(name, last) for name in tie] for tie in tied]
        ties += _object_ties([*layers, *([] if loss is None else [loss])]) + _named_ties(self.modules)
        ties += _held_ties(layers, self.modules)
        # Layers of other ranks may be tied to ours, and a rank with another plan must be detected here.
        cut = [f"{k}.{name}" for k, module in self.modules.items() for name in getattr(module, "cut_parameters", ())]
        said = world.gather((_digest(plan), ties, last in self.modules, cut))
        if any(digest != said[0][0] for digest, *_ in said):
            other = next(r for r, (digest, *_) in enumerate(said) if digest != said[0][0])
            raise OctoPipeError(f"rank {other} runs another plan than rank 0; give all ranks the same plan")
        trained = {said[rank][2] for rank in self.ranks_of[last - 1]}
        if len(trained) > 1:
            raise OctoPipeError(
                "the loss has parameters on one rank and none on another; give all ranks the same loss_fn"
            )
        self.has_loss = True in trained
        """Whether the loss has parameters or buffers."""
        if self.has_loss:
            self.ranks_of[last] = self.ranks_of[last - 1]
        self._canonical = _merge([t for _, theirs, *_ in said for t in theirs], last + self.has_loss)
        refuse_shared_memory(layers, self.ranks_of, self._canonical)
        members = self._members({name for *_, theirs in said for name in theirs})
        self._refuse_half_frozen()
        self._tie_here()
        self._places = self._registered()
        everything = (inner for module in self.modules.values() for inner in module.modules())
        self._resharded = any(isinstance(inner, FSDPModule) for inner in everything)
        """Whether FSDP2 temporarily replaces its shards by whole parameters."""
        self.named: dict[str, nn.Parameter] = self._named_now()
        self._layers_of: dict[int, set[int]] = {}
        self._shared: list[Shared] = []
        self._find_holders(members)
        if self._canonical or any(len(ranks) > 1 for ranks in self.ranks_of.values()):
            _check_forms([t for theirs in world.gather(self._shared_forms()) for t in theirs])

    def _shared_forms(self) -> list[tuple[str, str, str]]:
        """For every parameter that other ranks hold, too: its first name, its name on this rank, and its form."""
        names = {id(p): f"{name} (rank {self.world.rank})" for name, p in self.named.items()}
        shared = (s for s in self._shared if len(s.holders) > 1 and not self.is_cut(s.key))
        return [(s.key, names[id(s.parameter)], _form(s.parameter)) for s in shared]

    def _find_holders(self, members: Mapping[str, set[str]]) -> None:
        """Record, for every parameter of this rank, its layers on this rank and the ranks that hold it or a parameter
        tied to it."""
        for k, module in self.modules.items():
            for parameter in module.parameters():
                # The loss's gradients are complete with the last layer's.
                self._layers_of.setdefault(id(parameter), set()).add(min(k, self.loss_layer - 1))
        for name, parameter in self.named.items():
            key = self._canonical.get(name, name)
            everywhere = {min(int(n.split(".", 1)[0]), self.loss_layer - 1) for n in members.get(key, {name})}
            # No other rank holds this part of a split layer.
            holders = {self.world.rank} if self.is_cut(name) else set().union(*(self.ranks_of[k] for k in everywhere))
            self._shared.append(
                Shared(
                    key=key,
                    parameter=parameter,
                    layers=tuple(sorted(self._layers_of[id(parameter)])),
                    holders=tuple(sorted(holders)),
                    in_parts=not any(everywhere <= set(range(s.first, s.stop)) for s in self.plan.stages),
                )
            )

    def _part(self, layer: int) -> tuple[int, int] | None:
        """Which shard of a layer this rank holds; None if it holds the whole layer."""
        held = {s.shard for s in self.plan.stages if s.rank == self.world.rank and s.first <= layer < s.stop}
        if len(held) > 1:
            raise OctoPipeError(
                f"rank {self.world.rank} holds several parts of layer {layer}; put its shards on different ranks"
            )
        return next(iter(held))

    def is_cut(self, name: str) -> bool:
        """Whether this rank holds only a part of the parameter `layer.name`."""
        layer, _, path = name.partition(".")
        return path in getattr(self.modules.get(int(layer)), "cut_parameters", ())

    def _members(self, cut: set[str]) -> dict[str, set[str]]:
        """The names of every tie, by its first name; raises an error if the plan splits only some of their layers.

        `cut`: parameters of which some rank has a part; everything else that a split layer holds is complete on every
        rank.
        """
        members: dict[str, set[str]] = {}
        for name, key in self._canonical.items():
            members.setdefault(key, {key}).add(name)
        for names in members.values():
            numbers = [int(name.split(".", 1)[0]) for name in names]
            held = {
                frozenset((s.rank, s.shard) for s in self.plan.stages if s.first <= number < s.stop)
                for number in numbers
            }
            if len(held) > 1 and not cut.isdisjoint(names):
                raise OctoPipeError(
                    f"{' and '.join(sorted(names))} are one parameter, but the plan cuts only one of them; cut both on "
                    "the same ranks, or none (octopipe tune --cut-head does, where it knows that they are tied)"
                )
        return members

    def _named_now(self) -> dict[str, nn.Parameter]:
        """The parameters that the modules register at this moment, each listed once."""
        out: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for k, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    out[f"{k}.{name}"] = parameter
        return out

    def refresh(self) -> list[Shared]:
        """Take over parameters that have been replaced since the last call; returns them.

        Different names would need other ties and optimizer groups on every rank, which is an error.
        """
        if self._resharded:
            return []
        now = self._named_now()
        if len(now) == len(self.named) and all(now.get(name) is p for name, p in self.named.items()):
            return []
        if now.keys() != self.named.keys():
            name = sorted(now.keys() ^ self.named.keys())[0]
            what = "is new" if name in now else "is gone"
            raise OctoPipeError(
                f"parameter {name} {what} since the Pipeline was made; change layers (or tie parameters) before that"
            )
        names = {id(p): name for name, p in self.named.items()}
        shared = [dataclasses.replace(s, parameter=now[names[id(s.parameter)]]) for s in self._shared]
        replaced = [new for new, old in zip(shared, self._shared) if new.parameter is not old.parameter]
        self.named, self._shared = now, shared
        self._places = self._registered()
        return replaced

    def untouched(self) -> bool:
        """Whether every parameter is still the same object: a quick check for every step."""
        return self._resharded or all(name in held and held[name] is p for held, name, p in self._places)

    def _registered(self) -> list[tuple[Any, str, nn.Parameter | None]]:
        return [
            (inner._parameters, name, p)
            for module in self.modules.values()
            for inner in module.modules()
            for name, p in inner._parameters.items()
        ]

    def _refuse_half_frozen(self) -> None:
        """Raise if a parameter is frozen and another one that is tied to it is trained. On one rank, both would become
        what the first is."""
        if not self._canonical:  # the same on every rank
            return
        held = {f"{k}.{n}": p for k, m in self.modules.items() for n, p in m.named_parameters(remove_duplicate=False)}
        mine = [(key, name, held[name].requires_grad) for name, key in self._canonical.items() if name in held]
        flags = {(key, name): trained for said in self.world.gather(mine) for key, name, trained in said}
        for key in sorted(set(self._canonical.values())):
            frozen, trained = (
                sorted(n for (k, n), flag in flags.items() if k == key and flag is wanted) for wanted in (False, True)
            )
            if frozen and trained:
                one, other = frozen[0], trained[0]
                raise OctoPipeError(
                    f"{self._layer_words(one)} is tied to {self._layer_words(other)} ({one} is frozen, {other} is "
                    "trained): freeze both, or neither"
                )

    def _layer_words(self, name: str) -> str:
        number = int(name.split(".", 1)[0])
        return "the loss" if number == self.loss_layer else f"layer {number}"

    def _tie_here(self) -> None:
        """Make tied parameters one object on this rank."""
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
                _check_forms([(key, key, _form(kept)), (key, name, _form(parameter))])
                # Under every name: a module may register it twice and use either.
                for owner_module in module.modules():
                    for alias, held in list(owner_module._parameters.items()):
                        if held is parameter:
                            setattr(owner_module, alias, kept)

    def shared(self) -> list[Shared]:
        """Every parameter of this rank with its holders."""
        return self._shared

    def holder_sets(self) -> list[tuple[int, ...]]:
        """The sets of several ranks that share a parameter of this rank, in an order that is the same everywhere."""
        return sorted({s.holders for s in self._shared if len(s.holders) > 1})

    # -- names ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {f"{k}.{name}": v for k, m in self.modules.items() for name, v in m.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for k, module in self.modules.items():
            mine, expected = {}, module.state_dict()
            strange = next(
                (key for key in state if key.startswith(f"{k}.") and key[len(f"{k}.") :] not in expected), ""
            )
            if strange:
                raise OctoPipeError(
                    f"the state has an entry {strange}, which layer {k} does not; leave it out, or use the same model"
                )
            for name in expected:
                key = f"{k}.{name}"
                if key not in state:
                    raise OctoPipeError(
                        f"the state has no entry {key}; it belongs to another model or another split into layers"
                    )
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
    check_factory(layer, number)
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


class _SharedObjects:
    """Buffers that several layers share, recorded before any of them is moved to its device."""

    def __init__(self, layers: Sequence[Any], ranks_of: Mapping[int, set[int]]):
        self._ranks_of = ranks_of
        self._found: dict[int, list[tuple[int, str]]] = {}
        for k, layer in enumerate(layers):
            if isinstance(layer, nn.Module):
                for name, buffer in layer.named_buffers():
                    self._found.setdefault(id(buffer), []).append((k, f"{k}.{name}"))
            else:
                for tensor in held_tensors(layer):
                    self._found.setdefault(id(tensor), []).append((k, f"one that the factory of layer {k} holds"))
        self.across_ranks = any(
            len({frozenset(ranks_of[k]) for k, _ in places}) > 1 for places in self._found.values()
        )  # fmt: skip
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id of a buffer: the buffer, kept so that its id is not reused, and the tensor it was moved to."""

    def elsewhere(self, k: int, module: nn.Module) -> dict[str, str]:
        out = {}
        for name, buffer in module.named_buffers():
            others = (text for j, text in self._found.get(id(buffer), ()) if self._ranks_of[j] != self._ranks_of[k])
            other = next(others, None)
            if other is not None:
                out[f"{k}.{name}"] = other
        return out

    def moved(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Move the module to its device; shared buffers remain one object."""
        before = [(inner, key, b) for inner in module.modules() for key, b in inner._buffers.items() if b is not None]
        module = module.to(device)
        for inner, key, buffer in before:
            now = inner._buffers[key]
            assert now is not None
            inner._buffers[key] = self._moved.setdefault(id(buffer), (buffer, now))[1]
        return module


def _with_loss(name: str, number: int) -> str:
    """The name `loss.weight` as the name of a parameter of the layer after the last one."""
    return f"{number}.{name[5:]}" if name.startswith("loss.") else name


def _held_ties(layers: Sequence[Any], modules: Mapping[int, nn.Module]) -> list[list[str]]:
    """Ties by parameters that factories hold and give to several layers, as pairs of the object's name and a parameter.

    Ranks do not see each other's objects. Each rank sees the same factories, and names the objects they hold by their
    positions there.
    """
    names: dict[int, str] = {}
    for k, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            for place, tensor in enumerate(held_tensors(layer)):
                names.setdefault(id(tensor), f"tie {k}/{place} {tuple(tensor.shape)} {tensor.dtype}")
    return [
        [names[id(p)], f"{k}.{name}"]
        for k, module in modules.items()
        for name, p in module.named_parameters()
        if id(p) in names
    ]


def _object_ties(layers: Sequence[Any]) -> list[list[str]]:
    """Parameter objects that several given modules share."""
    names: dict[int, list[str]] = {}
    for k, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            for name, parameter in layer.named_parameters():
                names.setdefault(id(parameter), []).append(f"{k}.{name}")
    return [found for found in names.values() if len(found) > 1]


def _named_ties(modules: Mapping[int, nn.Module]) -> list[list[str]]:
    """Ties that modules declare: `tied_to = {"weight": "embedding"}`, as pairs of name and tie name."""
    return [
        [f"tie {key}", f"{k}.{name}"]
        for k, module in modules.items()
        for name, key in getattr(module, "tied_to", {}).items()
    ]


def _form(parameter: nn.Parameter) -> str:
    return f"{list(parameter.shape)} {str(parameter.dtype)[6:]}"


def _check_forms(tied: Sequence[tuple[str, str, str]]) -> None:
    """Raise if parameters that are tied or copies of each other (first name, own name, form) cannot be one."""
    first: dict[str, tuple[str, str]] = {}
    for key, name, form in tied:
        other, wanted = first.setdefault(key, (name, form))
        if form != wanted:
            raise OctoPipeError(f"{other} and {name} are one parameter, but are {wanted} and {form}; make them alike")


def _merge(ties: Sequence[Sequence[str]], num_layers: int) -> dict[str, str]:
    """For every name in a tie of more than one parameter, the first name of the tie."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for tie in ties:
        for name in tie:
            layer = name.split(".", 1)[0]
            if not name.startswith("tie ") and not (layer.isdigit() and int(layer) < num_layers and "." in name):
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
    """A digest of a plan's decisions, the same in every process."""
    import zlib

    text = repr((plan.num_layers, plan.num_ranks, plan.stages, plan.routes, plan.route_of_micro_batch)) + plan.to_csv()
    return zlib.crc32(text.encode())
