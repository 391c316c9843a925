"""A model without its layers: a copy with placeholder layers, whose forward reveals the arguments of every layer.

Knows: how such a shell is built with arbitrary tensors as parameters, how its forward is run up to a layer, and how
buffers get their values. Does not know: where a model can be split (`anatomy.py`) or how pieces run (`pieces.py`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.torch_private import pytree

Replacement = Callable[[str, Tensor], Tensor]


class Refused(Exception):
    """The model cannot be split in the way that was tried."""


class Beside:
    """A placeholder, during a trace, for a layer's results besides its hidden state. No later layer may take it."""


def as_layer_returns(hidden: Tensor, returns: int, beside: Beside | None = None) -> Any:
    """A hidden state in the form in which the family's layers return it."""
    return (hidden, *[beside] * (returns - 1)) if returns else hidden


class Stop(Exception):
    """Ends a forward once everything that is needed from it is known."""


class LayerAnswers:
    """Answers the calls of all placeholders of one shell: `visit(number, args, kwargs)` returns the layer's output."""

    visit: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]

    @contextmanager
    def given_by(self, visit: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
        """Answer with `visit` during one forward. The function is dropped afterwards, because it may hold hidden states
        and their autograd graphs."""
        self.visit = visit
        try:
            yield
        finally:
            del self.visit


class PlaceholderLayer(nn.Module):
    """Replaces a layer: it has the layer's plain attributes and its type, but none of its parameters."""

    def __init__(self, layer: nn.Module, number: int, answers: LayerAnswers):
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_answers", answers)

    def __getattr__(self, name: str) -> Any:
        if name in ("_layer", "_number", "_answers"):
            raise AttributeError(name)
        return getattr(self._layer, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._answers.visit(self._number, args, kwargs)

    @property
    def __class__(self) -> Any:  # forwards that ask `isinstance(layer, ...)` get the layer's answer
        return type(self.__dict__["_layer"]) if "_layer" in self.__dict__ else PlaceholderLayer

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("the class of a placeholder layer cannot be changed")


def text_config(model: nn.Module) -> Any:
    """The part of a model's config that describes the decoder."""
    config: Any = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def zeros_like_all_of(tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """A single zero, expanded to the shape of a whole parameter."""
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.zeros((), dtype=kind, device=device).expand(tensor.shape)


def shell_of(model: nn.Module, paths: str | Sequence[str], tensor: Replacement) -> tuple[nn.Module, LayerAnswers]:
    """A copy of everything except the layers; `tensor(name, old)` returns each of its parameters and buffers.

    `paths`: the list of layers, or several lists, whose layers are numbered one list after the other. If `tensor`
    returns a value for a parameter that is not a Parameter, it becomes a plain attribute: it is neither trained nor
    moved.
    """
    answers = LayerAnswers()
    memo: dict[int, Any] = {id(model.config): model.config}
    number = 0
    for path in (paths,) if isinstance(paths, str) else paths:
        layers = model.get_submodule(path)
        children = enumerate(layers.children(), number)
        placeholders = nn.ModuleList(PlaceholderLayer(layer, k, answers) for k, layer in children)
        memo[id(layers)] = placeholders
        number += len(placeholders)
    plain: list[tuple[str, Tensor]] = []
    for name, old in outside(model, paths):
        if id(old) not in memo:
            memo[id(old)] = tensor(name, old)
        if isinstance(old, nn.Parameter) and not isinstance(memo[id(old)], nn.Parameter):
            plain.append((name, memo[id(old)]))
    for module in model.modules():  # configs are shared, not copied
        config = getattr(module, "config", None)
        if config is not None and not isinstance(config, nn.Module):
            memo[id(config)] = config
    shell = copy.deepcopy(model, memo)
    for name, value in plain:
        owner, _, attribute = name.rpartition(".")
        home = shell.get_submodule(owner)
        home._parameters.pop(attribute, None)
        object.__setattr__(home, attribute, value)
    _tell_dtype(shell, [value for _, value in plain])
    _forget_recorders(shell)
    return shell, answers


def _forget_recorders(shell: nn.Module) -> None:
    """Remove the hooks that record hidden states: transformers installs them once per model, and placeholders need
    their own."""
    for module in shell.modules():
        if type(module) is PlaceholderLayer:
            continue
        if getattr(module, "_output_capturing_hooks_installed", False):
            module._output_capturing_hooks_installed = False  # type: ignore[assignment]
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "") == "output_capturing_hook":
                del module._forward_hooks[key]


class _OneParameter:
    """Replaces `module.parameters`: forwards call `next(self.parameters())` to learn dtype and device."""

    def __init__(self, like: Tensor):
        self.like = like

    def __call__(self, recurse: bool = True) -> Iterator[Tensor]:
        return iter([self.like.detach()])


def _tell_dtype(shell: nn.Module, plain: list[Tensor]) -> None:
    """Let models inside a shell whose parameters are all plain attributes still report the dtype in which they
    compute."""
    like = next((value for value in plain if value.is_floating_point()), None)
    if like is None:
        return
    for module in shell.modules():
        known = type(module) is not PlaceholderLayer and hasattr(module, "_init_weights")
        if known and next(iter(module.parameters()), None) is None:
            object.__setattr__(module, "parameters", _OneParameter(like))


def placeholders_on(shell: nn.Module, missing: Sequence[tuple[str, Tensor]], device: torch.device) -> None:
    """Give a shell zeros on this device for the parameters that it lacks, and let its models report this device."""
    for name, like in missing:
        owner, _, attribute = name.rpartition(".")
        object.__setattr__(shell.get_submodule(owner), attribute, zeros_like_all_of(like, device))
    for module in shell.modules():
        said = vars(module).get("parameters")
        if isinstance(said, _OneParameter):
            said.like = zeros_like_all_of(said.like, device)


def outside(model: nn.Module, paths: str | Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that belong to no layer; tied ones under each of their names."""
    layers = tuple(f"{path}." for path in ((paths,) if isinstance(paths, str) else paths))
    both = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for named in both:
        yield from ((name, value) for name, value in named if not name.startswith(layers))


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The arguments of a layer, flattened; an empty container counts as a leaf."""
    return pytree.tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, dict | list) and not (x or x is kwargs))


def is_container(leaf: Any) -> bool:
    """Whether an argument is a mapping or a sequence that one layer may fill and another read, of whatever class:
    transformers has some that are neither dicts nor lists."""
    return isinstance(leaf, MutableMapping | MutableSequence)


def hidden_leaf(leaves: list[Any]) -> int:
    """The position of the hidden state: the first floating-point tensor among a layer's arguments."""
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return i
    raise Refused("its layers take no hidden state")


def collect(
    shell: nn.Module, answers: LayerAnswers, stop: int, returns: int, inputs: Mapping[str, Any]
) -> list[tuple[list[Any], Any, int]]:
    """The arguments of the layers before `stop` in the shell's forward: leaves, structure, and the position of the
    hidden state among them. Layers return their input."""
    got: list[tuple[list[Any], Any, int]] = []

    def visit(k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = leaves_of(args, kwargs)
        at = hidden_leaf(leaves)
        got.append((leaves, structure, at))
        if k == stop - 1:
            raise Stop
        return as_layer_returns(leaves[at], returns)

    try:
        with answers.given_by(visit), Unpacked(inputs):
            shell(**inputs, use_cache=False)
    except Stop:
        return got
    raise OctoPipeError(
        f"{type(shell).__name__} cannot be cut into layers: its forward ended before layer {stop - 1}; give Pipeline "
        "modules of your own"
    )


class Unpacked:
    """A context for a model's forward: if no positions are given, transformers does not check whether sequences are
    packed.

    The check reads values on the device, so the host would wait in every forward, and it cannot be captured in a graph.
    """

    def __init__(self, inputs: Mapping[str, Any]):
        self._masks: Any = None if "position_ids" in inputs else sys.modules.get("transformers.masking_utils")

    def __enter__(self) -> None:
        if self._masks is not None:
            self._before = getattr(self._masks, "find_packed_sequence_indices", None)
            self._masks.find_packed_sequence_indices = _not_packed

    def __exit__(self, *_: object) -> None:
        if self._masks is not None:
            self._masks.find_packed_sequence_indices = self._before


def _not_packed(position_ids: Tensor) -> None:
    """Returns what transformers returns for positions that count up by one."""


class Spared(TorchFunctionMode):
    """Builds a model without memory for its parameters, but with the values that its constructors compute: tensors that
    they leave uninitialised, or fill with a constant over a large shape, are on `meta`; all others are real."""

    LARGE = 1 << 22

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in _DRAWN:
            filled = kwargs.get("tensor", args[0] if args else None)
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled  # there is nothing to draw, and torch takes half of the time of building to find that out
        if func in _UNFILLED or (func in _FILLED and func(*args, **{**kwargs, "device": "meta"}).numel() > self.LARGE):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


_UNFILLED = {torch.empty, torch.empty_strided}


_DRAWN = {"normal_", "uniform_", "trunc_normal_"}
"""Methods of tensors, and functions of torch and transformers, that fill a tensor with random numbers and return it."""


_FILLED = {torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


def shell_of_zeros(
    model: nn.Module, paths: str | Sequence[str], *, gradients: bool = False
) -> tuple[nn.Module, LayerAnswers]:
    """A shell for tracing a forward: its parameters are zeros that take no memory, its buffers have their real values.

    `gradients`: parameters require gradients, so that autograd shows what was computed from them.
    """

    def tensor(_: str, old: Tensor) -> Tensor:
        if not isinstance(old, nn.Parameter):
            return real_buffer(old, "cpu")
        zeros = zeros_like_all_of(old, "cpu")
        return zeros.requires_grad_(old.is_floating_point()) if gradients else zeros

    shell, answers = shell_of(model, paths, tensor)
    fill_buffers(model, shell)
    return shell, answers


def real_buffer(old: Tensor, device: torch.device | str) -> Tensor:
    """A new buffer that is still to be filled (see `fill_buffers`), or a copy of a real one."""
    if old.device.type != "meta":
        return old.to(device, copy=True)
    new = torch.zeros_like(old, device=device)
    new.unfilled = True  # type: ignore[attr-defined]
    return new


def unfilled(buffer: Tensor | None) -> bool:
    return getattr(buffer, "unfilled", False)


def fill_buffers(model: nn.Module, shell: nn.Module) -> None:
    """Compute the values of a shell's buffers if the model itself is on `meta`; parameters do not change."""
    for module in shell.modules():
        if type(module) is PlaceholderLayer or not any(unfilled(b) for b in module._buffers.values()):
            continue
        aside = dict(module._parameters)
        plain = {k: v for k, v in vars(module).items() if isinstance(v, Tensor)}
        try:
            for name, value in {**aside, **plain}.items():
                if value is not None:
                    module._parameters.pop(name, None)
                    object.__setattr__(module, name, torch.empty_like(value, device="meta"))
            initialise(shell, module)
        finally:
            for name in {**aside, **plain}:
                vars(module).pop(name, None)
            module._parameters.update(aside)
            for name, value in plain.items():
                object.__setattr__(module, name, value)


def initialise(owner: nn.Module, module: nn.Module) -> None:
    """The family's own initialisation of one module (not of its children)."""
    from transformers import initialization

    before = torch.get_default_dtype()
    try:  # tables are computed in the model's own precision, as when transformers builds it
        torch.set_default_dtype(getattr(owner, "dtype", before))
        with torch.no_grad(), initialization.guard_torch_init_functions():
            owner._init_weights(module)  # type: ignore[operator]
    finally:
        torch.set_default_dtype(before)
