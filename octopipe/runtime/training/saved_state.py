"""Extraction and restoration of the state of layers and optimizers, by layer and parameter, as plain values.

Knows: state dicts with extra state, optimizer state and the settings of parameter groups, and in which form each can be
saved or sent without unpickling objects. Does not know: files (`checkpoint.py`) or ranks (`adapt.py`).

Parameter groups are specific to a rank: under another plan, the same parameters are in other groups. Therefore the
settings of a group (its learning rate, and whatever a scheduler or the optimizer stores there) are saved per parameter.
When loading, a group takes the settings of its parameters if they agree; if they differ, the groups were built
differently, which is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.precision import MixedPrecisionOptimizer
from octopipe.runtime.wire.encoding import decoded, encoded

ENCODED = "octopipe.encoded"
"""The key under which a value that is not plain is stored, as the bytes in which ranks send it (see `encoding`)."""
_PLAIN = (type(None), bool, int, float, str)
_NOT_SETTINGS = ("params", "param_names")


# -- layers --------------------------------------------------------------------------------------------


def layer_state(
    layer: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    elsewhere: Mapping[nn.Parameter, Kept] | None = None,
) -> dict[str, Any]:
    """Return a layer's state dict in copies on the host. Raises an error if a part of it could not be loaded again.

    If the optimizer keeps master weights, they replace the parameters that were rounded from them; `elsewhere`: those
    that other replicas keep (`of_other_replicas`).
    """
    state = dict(module.state_dict())
    if isinstance(optimizer, MixedPrecisionOptimizer):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            other = (elsewhere or {}).get(parameter)
            master = optimizer.master(parameter) if other is None else other.master
            if master is not None and name in state:
                state[name] = master
    return {name: _saveable(value, f"{layer}.{name}") for name, value in state.items()}


def loadable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in the form in which `layer_state` received it."""
    return {name: _restored(value) for name, value in state.items()}


def make_late_buffers(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Register the tensors of a state that the module has no place for as buffers, so that they can be loaded: a
    forward had made them (a table, a first mean), and none has run in this module yet."""
    known = module.state_dict().keys()
    device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    for name, value in state.items():
        owner, _, last = name.rpartition(".")
        if name in known or not isinstance(value, Tensor):
            continue
        holder = dict(module.named_modules()).get(owner)
        if holder is not None and getattr(holder, last, None) is None:
            holder.register_buffer(last, torch.empty_like(value, device=device))


def _saveable(value: Any, name: str) -> Any:
    if _is_plain(value):
        return compact(value)
    return {ENCODED: torch.frombuffer(bytearray(_encoded(value, name)), dtype=torch.uint8)}


def check_saveable(value: Any, name: str) -> None:
    """Raise an error for a part of a state dict that could not be loaded again."""
    if not _is_plain(value):
        _encoded(value, name)


def _encoded(value: Any, name: str) -> bytes:
    try:
        data = encoded(value)
        decoded(data)
        return data
    except OctoPipeError as error:
        raise OctoPipeError(
            f"{name} holds a {type(value).__name__}, which cannot be loaded again without running its code ({error}); "
            "let get_extra_state return tensors, numbers, text, or dicts and dataclasses of them"
        ) from None


def _restored(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {ENCODED}:
        return decoded(value[ENCODED].numpy().tobytes())
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) is dict and all(type(k) in _PLAIN for k in value) and all(map(_is_plain, value.values()))


def compact(value: Any) -> Any:
    """Return copies on the host whose storage has their own size: a view would write the whole storage of its base into
    the file."""
    return _mapped(value, lambda _, t: t.detach().cpu().clone())


def _mapped(value: Any, change: Callable[[str, Tensor], Tensor], key: str = "") -> Any:
    """Return the value with its tensors changed by `change`, which also receives the nearest key."""
    if isinstance(value, Tensor):
        return change(key, value)
    if isinstance(value, Mapping):
        return {k: _mapped(v, change, str(k)) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(v, change, key) for v in value)
    return value


# -- what other replicas keep ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The state that an optimizer keeps for one parameter, in copies on the host."""

    state: dict[str, Any]
    settings: dict[str, Any]
    master: Tensor | None


def of_other_replicas(optimizer: torch.optim.Optimizer | None) -> dict[nn.Parameter, Kept]:
    """Return, on the first replica, the state that the other replicas keep if state is sharded (collective over
    replicas)."""
    if not isinstance(optimizer, MixedPrecisionOptimizer) or optimizer.owners is None:
        return {}
    settings = settings_by_parameter(optimizer)

    def of(parameter: nn.Parameter) -> tuple[Any, Any, Any]:
        master = optimizer.master(parameter)
        return (
            compact(optimizer.state.get(parameter, {})),
            settings.get(id(parameter), {}),
            None if master is None else compact(master),
        )

    found = optimizer.owners.collected(of)
    return {p: Kept(state=state, settings=own, master=master) for p, (state, own, master) in found.items()}


# -- optimizers ----------------------------------------------------------------------------------------


def settings_by_parameter(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return, for every parameter, by id, the settings of its group that are plain values. Other settings (a function,
    for example) come from the code that creates the optimizer."""
    strangers = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if strangers:
        warnings.warn(
            f"{type(optimizer).__name__} keeps state under {strangers[0]!r}, which is not a parameter: that state is "
            "not saved",
            stacklevel=3,
        )
    out: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        settings = {
            key: compact(value) for key, value in group.items() if key not in _NOT_SETTINGS and _is_plain(value)
        }
        out.update((_own_id(optimizer, p), settings) for p in group["params"])
    return out


def _own_id(optimizer: torch.optim.Optimizer, updated: Tensor) -> int:
    """Return the id of the model's parameter for a tensor that an optimizer updates, which may be its master weight."""
    return id(optimizer.parameter_of(updated) if isinstance(optimizer, MixedPrecisionOptimizer) else updated)


def put_settings(optimizer: torch.optim.Optimizer, kept: Iterable[tuple[str, Tensor, Mapping[str, Any]]]) -> None:
    """Give every group the settings of its parameters (name, parameter, settings); a parameter without settings is
    ignored.

    Nothing changes unless all groups can be set.
    """
    known = {id(p): (name, settings) for name, p, settings in kept if settings}
    found: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
    for group in optimizer.param_groups:
        own = [_own_id(optimizer, p) for p in group["params"]]
        mine = [known[i] for i in own if i in known]
        for name, settings in mine[1:]:
            first, wanted = mine[0]
            for key in wanted.keys() & settings.keys():
                if not _equal(wanted[key], settings[key]):
                    raise OctoPipeError(
                        f"{first} and {name} are in one parameter group of the optimizer, but had "
                        f"{key} {_setting_words(wanted[key])} and "
                        f"{_setting_words(settings[key])}; build the parameter groups as before"
                    )
        if mine:
            found.append((group, mine[0][1]))
    for group, settings in found:
        for key, value in settings.items():
            now = group.get(key)
            device = now.device if isinstance(now, Tensor) else torch.device("cpu")
            group[key] = _mapped(value, lambda _, t, device=device: t.to(device, copy=True))  # type: ignore[misc]


def put_state(optimizer: torch.optim.Optimizer, parameter: Tensor, kept: Mapping[str, Any]) -> None:
    """Restore the state of a parameter, or remove it if there was none. State that another replica keeps, or that
    belongs to a parameter which is frozen now, is ignored."""
    place = parameter.device
    if isinstance(optimizer, MixedPrecisionOptimizer):
        if not optimizer.updates(parameter):
            return
        place = optimizer.place_of(parameter)  # type: ignore[arg-type]

    def moved(key: str, value: Tensor) -> Tensor:
        # Optimizers keep their step count on the host unless they are capturable or fused.
        stays = key == "step" and value.ndim == 0 and not _counts_on_device(optimizer, parameter)
        return value.clone() if stays else value.to(place, copy=True)

    if kept:
        optimizer.state[parameter] = _mapped(kept, moved)
    else:
        optimizer.state.pop(parameter, None)


def _counts_on_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Return whether the kernels that update a parameter read its step count on the parameter's device."""
    flags = [bool(group.get("fused") or group.get("capturable")) for group in optimizer.param_groups]
    if len(set(flags)) < 2:
        return any(flags)
    groups = zip(flags, optimizer.param_groups, strict=True)
    return any(flag and any(_own_id(optimizer, p) == id(parameter) for p in group["params"]) for flag, group in groups)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)


def _setting_words(value: Any) -> str:
    return str(value.tolist() if isinstance(value, Tensor) else value)[:40]
