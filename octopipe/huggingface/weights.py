"""Weights of single pieces: initialised identically under every plan, or read from safetensors by name.

Knows: the family's own initialisation, applied module by module with a seed derived from the module's name; and the
family's own conversion of checkpoint names. Does not know: forwards of pieces, pipelines.

A tied parameter is initialised like the parameter it is tied to, on any rank, so ranks need not communicate.
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, decode_json, letters, read_bytes, shown
from octopipe.base.limits import MAX_PLAN_BYTES
from octopipe.huggingface.shell import PlaceholderLayer, initialise

FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
"""Types of floating-point numbers in safetensors that hold a weight by themselves. Others (float8, integers) are
quantised: a weight is such a number times a scale that is stored under another name."""
DEQUANTISE = "load them with transformers, call dequantize() and save_pretrained in bfloat16"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = "which is pickled: reading it could run code"
OTHERS = {
    "pytorch_model*.bin*": PICKLED,
    "*.distcp": "of torch.distributed.checkpoint, whose index is pickled: reading it could run code",
    ".metadata": "of torch.distributed.checkpoint, which is pickled: reading it could run code",
    "*.pth": PICKLED,
    "*.ckpt": PICKLED,
    "adapter_model.*": "an adapter without the model it belongs to",
    "*.safetensors*": f"not {SINGLE}",
    "*.gguf": "another tool's format",
    "tf_model*.h5": "TensorFlow's format",
    "flax_model*.msgpack": "Flax's format",
}
"""Patterns of files with weights in formats other than safetensors, and why they are not read."""


def first_names(model: nn.Module) -> dict[str, str]:
    """For every parameter name, the first name of the same Parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def allocated(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Memory for a parameter or buffer, with its value if its constructor computed one. Otherwise floating-point values
    are NaN, which marks them as not initialised, and others are zero."""
    if tensor.device.type != "meta":
        value = tensor.detach().to(device, copy=True)
    elif tensor.is_floating_point():
        value = torch.full_like(tensor, float("nan"), device=device)
    else:
        value = torch.zeros_like(tensor, device=device)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


class Weights:
    """Fills the pieces of one model that was built on `meta`."""

    def __init__(self, model: nn.Module, *, seed: int, device: torch.device, store: Values | None):
        """`store`: where the values are read from; None: all of them are initialised at random."""
        self._model, self._seed, self._device, self._store = model, seed, device, store
        self._first = first_names(model)

    @property
    def absent(self) -> frozenset[str]:
        """Parameters that were initialised at random because the store does not contain them."""
        return frozenset() if self._store is None else self._store.absent

    def fill(self, piece: nn.Module, prefix: str, names: Sequence[str]) -> None:
        """Initialise or read all values of a piece. Module `x` of the piece is `prefix + x` of the model, and `names`
        are the model's parameters in it, which must be allocated already."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            for name, module in _children_first(piece):
                self._draw(f"{prefix}{name}".rstrip("."), module)
            self._draw_tied(piece, prefix, names)
        if self._store is not None:
            self._read(piece, prefix, names)
        for name, value in piece.state_dict().items():
            if value.is_floating_point() and bool(value.isnan().any()):
                raise OctoPipeError(
                    f"{prefix}{name}: the model's own code does not initialise it; load a checkpoint (give its folder)"
                )

    def _draw(self, name: str, module: nn.Module) -> None:
        torch.manual_seed((self._seed * 0x9E3779B1 + zlib.crc32(name.encode())) & (2**63 - 1))
        if hasattr(module, "reset_parameters") and any(_empty(p) for p in module.parameters(recurse=False)):
            module.reset_parameters()  # type: ignore[operator]
        elif type(module).__name__ == "Conv1D" and _empty(module.weight):  # has no reset_parameters
            nn.init.normal_(module.weight, std=0.02)  # type: ignore[arg-type]
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        initialise(_owner(self._model, name), module)

    def _draw_tied(self, piece: nn.Module, prefix: str, names: Sequence[str]) -> None:
        """Initialise parameters whose first name belongs to another module as that module does, on every rank that
        holds one. A module of this piece that shares such a parameter under a later name (a head with a bias, for
        example) has overwritten it."""
        places = Counter(id(p) for _, p in piece.named_parameters(remove_duplicate=False))
        for name in names:
            source = self._first[name]
            if places[id(_parameter(piece, prefix, name))] == 1 and (source == name or source in names):
                continue
            owner, _, attribute = source.rpartition(".")
            origin = self._model.get_submodule(owner)
            memo = {id(t): allocated(t, self._device) for t in (*origin.parameters(), *origin.buffers())}
            twin = copy.deepcopy(origin, {**memo, id(self._model.config): self._model.config})
            for inner, module in _children_first(twin):
                self._draw(f"{owner}.{inner}".rstrip("."), module)
            with torch.no_grad():
                _parameter(piece, prefix, name).copy_(getattr(twin, attribute))

    def _read(self, piece: nn.Module, prefix: str, names: Sequence[str]) -> None:
        assert self._store is not None
        buffers = [f"{prefix}{n}" for n in piece.state_dict() if f"{prefix}{n}" not in self._first]
        wanted = {self._first[n] for n in names} | set(buffers)
        found = self._store.read(wanted)
        with torch.no_grad():
            for name in (*names, *buffers):
                value = found.get(self._first.get(name, name))
                if value is None:
                    if name in self._first and self._first[name] not in self._store.absent:
                        quantised = getattr(self._model.config, "quantization_config", None)
                        why = f"its config says that they are quantised: {DEQUANTISE}" if quantised else ""
                        raise OctoPipeError(
                            f"{self._store.where}: no weights of {name}; {why or 'is the checkpoint complete?'}"
                        )
                    continue
                target = _parameter(piece, prefix, name)
                if target.shape != value.shape:
                    raise OctoPipeError(
                        f"{self._store.where}: {name} has shape {tuple(value.shape)}, the config says "
                        f"{tuple(target.shape)}; use the checkpoint's own config"
                    )
                target.copy_(value)


class Values(Protocol):
    """The interface of a source of parameters and buffers."""

    where: str
    absent: frozenset[str]
    """Parameters that the source does not contain, and which keep their random initialisation."""

    def read(self, names: set[str]) -> dict[str, Tensor]: ...


class Store:
    """A folder of safetensors that is read by the model's own parameter names."""

    absent: frozenset[str] = frozenset()

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        *,
        mapping: Any = None,
        wanted: Callable[[str], bool] = lambda key: True,
    ):
        """`mapping`: transformers' conversions of names (default: the model's own). `wanted`: which keys of the folder
        belong to the model."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self.where = shown(folder)
        self._model, self._folder = model, folder
        self._file_of = {key: file for key, file in file_of_keys(folder).items() if wanted(key)}
        self._mapping: Any = get_model_conversion_mapping(model) if mapping is None else mapping
        renamings = [m for m in self._mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in self._mapping if isinstance(m, WeightConverter)]
        state = model.state_dict()
        first = first_names(model)
        targets_of = {p: c.target_patterns for c in converters for p in c.source_patterns}
        self._sources: dict[str, list[str]] = {}
        for key in self._file_of:
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
            targets = [name]
            if pattern is not None and len(targets_of[pattern]) > 1:  # one tensor that becomes several parameters
                heads = targets_of[pattern]
                targets = [name.replace(heads[0], other) for other in heads]
            for target in targets:
                self._sources.setdefault(first.get(target, target), []).append(key)

    def holds(self, name: str) -> bool:
        """Whether the folder contains a parameter or buffer of the model."""
        return name in self._sources

    def read(self, names: set[str]) -> dict[str, Tensor]:
        """The values of those parameters and buffers that the folder contains."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        keys = {key for name in names for key in self._sources.get(name, ())}
        if not keys:
            return {}
        # transformers' loader fills the model on meta; afterwards the loaded tensors are taken out again.
        before = _state(self._model)
        with _quiet(), open_tensors({key: self._file_of[key] for key in keys}) as slices:
            self._refuse_quantised(names, before, slices)
            config = LoadStateDictConfig(device_map={"": "cpu"}, weight_mapping=copy.deepcopy(self._mapping))
            try:
                info, _ = convert_and_load_state_dict_in_model(self._model, slices, config)
                after = _state(self._model)
                found = {n: t.detach() for n, t in after.items() if t.device.type != "meta"}
            finally:
                for name, tensor in before.items():
                    owner, _, attribute = name.rpartition(".")
                    home = self._model.get_submodule(owner)
                    slots: Any = home._parameters if attribute in home._parameters else home._buffers
                    slots[attribute] = tensor
        wrong = getattr(info, "mismatched_keys", None) or getattr(info, "conversion_errors", None)
        if wrong:
            raise OctoPipeError(
                f"{self.where}: {str(next(iter(wrong)))[:160]} does not fit the config; use the checkpoint's own "
                "config.json"
            )
        first = first_names(self._model)
        return {first.get(name, name): tensor for name, tensor in found.items()}

    def _refuse_quantised(self, names: set[str], state: dict[str, Tensor], slices: Mapping[str, Any]) -> None:
        for name in sorted(names & self._sources.keys()):
            if name not in state or not state[name].is_floating_point():
                continue
            for key in self._sources[name]:
                kind = str(slices[key].get_dtype())
                if kind not in FLOATS:
                    raise OctoPipeError(
                        f"{self.where}: {key} is stored as {kind}: the weights are quantised, and training needs the "
                        f"numbers themselves; {DEQUANTISE}"
                    )


def _empty(parameter: Any) -> bool:
    return parameter.numel() > 0 and bool(parameter.flatten()[0].isnan())


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def file_of_keys(folder: Path) -> dict[str, str]:
    """For every tensor name, the file of the folder that contains the tensor."""
    from safetensors import safe_open

    index, single = folder / INDEX, folder / SINGLE
    if not index.exists():
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), str(single))
        except Exception as error:  # safetensors raises its own kinds
            raise _unreadable(single, error) from None
    found = decode_json(read_bytes(index, most_bytes=MAX_PLAN_BYTES), shown(index))
    listed = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(listed, dict):
        raise OctoPipeError(f"{shown(index)}: has no weight_map; download it again")
    for key, name in listed.items():
        # The files of an index are next to it; an index that points elsewhere is rejected.
        if not isinstance(name, str) or name != Path(name).name or "\0" in name:
            where = f"{brief(key)} is in {brief(name)}"
            raise OctoPipeError(f"{shown(index)}: {where}, which is not a file beside it; download it again")
    return {key: str(folder / name) for key, name in listed.items()}


@contextlib.contextmanager
def open_tensors(file_of: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Tensors by name, each read when it is accessed; `file_of` is the file of each."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        slices: dict[str, Any] = {}
        for key, path in file_of.items():
            try:
                if path not in files:
                    files[path] = stack.enter_context(safe_open(path, framework="pt"))
                slices[key] = files[path].get_slice(key)
            except Exception as error:  # safetensors raises its own kinds
                raise _unreadable(Path(path), error) from None
        yield slices


def _unreadable(path: Path, error: Exception) -> OctoPipeError:
    why = " ".join(str(error).split())[:120]
    return OctoPipeError(f"{shown(path)}: its tensors cannot be read ({letters(why)}); download it again")


def has_weights(folder: Path) -> bool:
    """Whether a model's folder contains weights that can be read; weights in other formats are rejected, never
    ignored."""
    if (folder / INDEX).exists() or (folder / SINGLE).exists():
        adapter = min((path.name for path in folder.glob("adapter_model.*")), default=None)
        if adapter is not None:  # transformers would add it to the model
            raise OctoPipeError(
                f"{shown(folder)}: {adapter[:80]} is an adapter beside the weights, which would be left out; merge it "
                "(merge_and_unload, save_pretrained) or move it away, or give a model that has been built with it"
            )
        return True
    for pattern, why in OTHERS.items():
        found = min((path.name for path in folder.glob(pattern)), default=None)
        if found is not None:
            raise OctoPipeError(
                f"{shown(folder)}: weights are in {found[:80]}, {why}; write them with save_pretrained as {SINGLE}, or "
                "name its config.json to train from random weights"
            )
    return False


def _parameter(piece: nn.Module, prefix: str, name: str) -> Tensor:
    owner, _, attribute = name[len(prefix) :].rpartition(".")
    return getattr(piece.get_submodule(owner), attribute)


def _children_first(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        if type(child) is not PlaceholderLayer:
            yield from _children_first(child, f"{name}.{key}" if name else key)
    yield name, module


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The innermost model that a module belongs to, whose `_init_weights` applies."""
    parts, best, at = name.split("."), model, model
    for part in parts:
        at = getattr(at, part, None)  # type: ignore[assignment]
        if at is None:
            break
        if hasattr(at, "_init_weights"):
            best = at
    return best


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the loader's progress bars: every rank would show one per layer."""
    from transformers.utils import logging

    shown_before: Any = getattr(logging, "is_progress_bar_enabled", lambda: True)()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown_before:
            logging.enable_progress_bar()
