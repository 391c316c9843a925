"""A Hugging Face model as `train` and `profile` see it: properties that are sent to every rank, and how to build it.

Knows: the properties needed to plan and report a run (layers and their kinds, vocabulary, parameters). Does not know:
plans or devices. It is created once, in the process that parses the command line; every rank splits the model itself.
"""

from __future__ import annotations

import os
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import read_json_object
from octopipe.costs.layer_graph import LayerGraph
from octopipe.huggingface.cut import LayerList, layers
from octopipe.huggingface.inputs import InputForm, form_of, with_items
from octopipe.huggingface.predictions import prediction_layers
from octopipe.huggingface.source import config_for, has_towers, model_class, read_config
from octopipe.huggingface.weights import has_weights
from octopipe.models.readers.hf_config import from_config


@dataclass(frozen=True, slots=True, kw_only=True)
class HfModel:
    """A transformers model with those properties of a `ModelSpec` that a run needs. It has no analytic costs."""

    source: str | dict[str, Any]
    """Path of a config.json or of a model's folder, or a preset's config."""
    name: str
    class_name: str
    """The transformers class whose code runs."""
    kinds: tuple[str, ...]
    """A description of every layer, embedding and head included."""
    pattern: str
    """One symbol per layer."""
    groups: tuple[int, ...]
    """For every layer, a number that is equal for layers which differ only in their weights."""
    hidden: int
    vocab: int
    training_parameters: int
    pretrained: bool
    """Whether the folder's weights are read."""
    shortened: bool
    attention: str | None = None
    liger: bool = False
    dtype: str | None = None
    """The dtype that the config states, by its name in torch."""
    layer_parameters: tuple[int, ...] = ()
    """The number of parameters of every layer. One that embedding and head share counts in both."""
    inputs: InputForm | None = None
    """The form of a micro-batch's inputs; None if they are only tokens."""
    predictions: float | None = None
    """The weight of the mean loss of its multi-token-prediction layers; None if they are not trained."""
    takes: tuple[tuple[int, ...], ...] = ()
    """For every layer, the layers whose outputs it takes. Empty if the layers are a chain."""
    shared: tuple[tuple[tuple[int, ...], int], ...] = ()
    """If the layers are not a chain: which of them share parameters, and how many parameters."""
    untrained_predictions: int = 0
    """The number of multi-token-prediction layers of the config that are not trained."""
    fresh_predictions: int = 0
    """The number of parameters of trained prediction layers that are initialised at random, because its folder does not
    contain them."""

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    def graph(self, static_bytes: Sequence[float] = ()) -> LayerGraph | None:
        """The connections of the layers; None if they are a chain. `static_bytes`: the bytes of every layer, from which
        those of shared parameters are derived."""
        if not self.takes:
            return None
        shared = []
        for layers_, count in self.shared if len(static_bytes) else ():
            size = min(static_bytes[k] * count / max(self.layer_parameters[k], 1) for k in layers_)
            shared.append((layers_, float(size)))
        return LayerGraph(takes=self.takes, shared=tuple(shared))

    def layers(self, *, dtype: torch.dtype, device: torch.device | str, seed: int) -> LayerList:
        return layers(
            self.source,
            dtype=dtype,
            device=device,
            seed=seed,
            num_layers=self.num_layers if self.shortened else None,
            attention=self.attention,
            pretrained=self.pretrained,
            liger=self.liger,
            predictions=self.predictions,
        )

    def settings(self) -> dict[str, Any]:
        """What the config says about the computation of the layers besides their sizes: heads, windows, experts per
        token and so on, by their keys."""
        return dict(sorted(_settings(read_config(self.source).to_dict())))

    def code_words(self) -> str:
        """A text that states which code runs and where the weights come from."""
        weights = "weights of its folder" if self.pretrained else "fresh weights"
        more = "" if self.predictions is None else f" with multi-token prediction (weight {self.predictions:g})"
        return f"transformers' {self.class_name}{more}, {weights}"


def describe(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    num_layers: int | None = None,
    attention: str | None = None,
    liger: bool = False,
    images: tuple[float, ...] = (),
    recordings: tuple[float, ...] = (),
    encoder_seq: int | None = None,
    seq: int = 0,
    name: str = "",
    predictions: float | None = None,
) -> HfModel:
    """The properties of the model at a path, or of a preset's config. A model that cannot be trained is rejected here,
    before any process starts. `images`, `recordings` and `encoder_seq` are for models with a tower or an encoder, for
    sequences of `seq` tokens."""
    given: Any = dict(source) if isinstance(source, Mapping) else Path(source)
    path = given if isinstance(given, Path) else None
    pretrained = path is not None and path.is_dir() and has_weights(path)
    _refuse_layers_of_towers(given, num_layers)
    parts = layers(given, num_layers=num_layers, attention=attention, liger=liger, predictions=predictions)
    _ = parts.loss_fn
    if path is not None:
        folder = path if path.is_dir() else path.parent if path.stem == "config" else None
        name = path.stem if folder is None else folder.resolve().name
    name = name or parts.config.model_type
    return HfModel(
        source=given if path is None else str(path.resolve()),
        name=name,
        class_name=parts.class_name,
        kinds=parts.kinds,
        pattern=_pattern(given, parts),
        groups=parts.groups,
        hidden=int(_hidden(parts.config)),
        vocab=parts.vocab,
        training_parameters=parts.parameters,
        pretrained=pretrained,
        shortened=num_layers is not None,
        attention=attention,
        liger=liger,
        dtype=_dtype(given),
        layer_parameters=parts.layer_parameters,
        inputs=_inputs(parts, name, images, recordings, encoder_seq, seq),
        predictions=predictions,
        takes=parts.takes,
        shared=parts.shared,
        untrained_predictions=prediction_layers(parts.config) if predictions is None else 0,
        fresh_predictions=len(parts.fresh),
    )


def _inputs(
    parts: LayerList,
    name: str,
    images: tuple[float, ...],
    recordings: tuple[float, ...],
    encoder_seq: int | None,
    seq: int,
) -> InputForm | None:
    if parts.example is None:
        if images or recordings or encoder_seq is not None:
            raise OctoPipeError(
                f"{name} has no tower and no encoder; --images, --recordings and --encoder-seq have no effect; leave "
                "them out"
            )
        return None
    given: dict[str, Any] = {"num_tower_layers": parts.num_tower_layers, "vocab": parts.vocab, "where": name}
    form = form_of(parts.example, parts.config, **given)
    if form.beside is not None:
        form = form.with_towers(parts.tower_stops)
    more: dict[str, Any] = {"recordings": recordings, "encoder_seq": encoder_seq, "seq": seq, "where": name}
    return with_items(form, parts.config, images=images, **more)


def _refuse_layers_of_towers(source: Any, num_layers: int | None) -> None:
    config = read_config(source)
    several = getattr(config, "is_encoder_decoder", False) or (has_towers(config) and not _names_text_model(config))
    if several and num_layers is not None:
        raise OctoPipeError(
            f"{config.model_type} has several stacks of layers, and --layers would not say which to cut; write a "
            "config.json with fewer layers"
        )


def _names_text_model(config: Any) -> bool:
    cls = model_class(config)
    return config_for(cls, config) is not config


SETTINGS = (
    "head", "window", "per_tok", "topk", "top_k", "moe_k", "_types", "pattern", "interval", "period", "chunk",
    "block_size", "hidden_act", "activation", "softcap", "soft_cap", "dropout", "pdrop", "capacity",
)  # fmt: skip
"""Parts of the keys of a config whose values change what layers compute or how long it takes, but often not the number
of their parameters."""


def _settings(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key.endswith("_config"):
                yield from _settings(value, f"{before}{key}.")
        elif any(part in str(key) for part in SETTINGS):
            items = value if isinstance(value, list | tuple) else [value]
            if all(
                isinstance(item, str | int | None) or (isinstance(item, float) and isfinite(item)) for item in items
            ):
                yield f"{before}{key}", list(items) if isinstance(value, list | tuple) else value


def _dtype(source: Any) -> str | None:
    """The dtype that the config file states: transformers overwrites it with the dtype in which the model was built."""
    file = source
    if isinstance(source, Path):
        file = read_json_object(source / "config.json" if source.is_dir() else source)
    for part in (file, file.get("text_config")):
        found = (part.get("dtype") or part.get("torch_dtype")) if isinstance(part, dict) else None
        if isinstance(found, str):
            return found.removeprefix("torch.")
    return None


def _hidden(config: Any) -> int:
    text = config.get_text_config(decoder=True)
    return next((int(v) for v in (getattr(text, k, None) for k in ("hidden_size", "n_embd", "d_model")) if v), 0)


def _pattern(source: Any, parts: LayerList) -> str:
    """The planner's symbols if it reads this config layer by layer, otherwise one letter per kind of layer."""
    behind = "PL" * parts.stacks.count("predictions.layers")
    count = len(parts) - len(behind)
    groups = parts.groups[:count]
    try:
        spec = from_config(source, known_families=True)
        known = spec.without_mtp().pattern if any(layer.symbol == "P" for layer in spec) else spec.pattern
        if len(known) >= count and count > 2:
            known = known[: count - 1] + known[-1]
        pairs = set(zip(groups, known))
        if len(known) == count and len(pairs) == len({g for g, _ in pairs}):
            return known + behind
    except OctoPipeError:  # a family that is run, but not planned
        pass
    letters = [c for c in "T" + string.ascii_uppercase + string.ascii_lowercase if c not in "ELP"]
    letters = list(dict.fromkeys(letters))
    middle = [letters[(g - 1) % len(letters)] for g in groups[1:-1]]
    return "".join(("E", *middle, "L", behind))
