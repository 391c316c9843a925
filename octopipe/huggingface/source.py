"""The user's Hugging Face model: a config, a folder, or a model that has already been built.

Knows: how it becomes a model of the right class on the `meta` device (with its towers and its encoder, unless the
config names the class of the text model alone), and that encoders are rejected. Does not know: how models are split.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import read_json_object, shown
from octopipe.base.versions import OLDEST_TRANSFORMERS
from octopipe.huggingface.shell import Spared

WITH_HEAD = "CausalLM|LMHead|ForConditionalGeneration"
"""Names of classes that end in logits over a vocabulary."""


def transformers() -> Any:
    """The transformers package; raises a one-line error that says how to install it."""
    try:
        import transformers as package
    except ModuleNotFoundError:
        raise OctoPipeError(
            'this runs the model\'s own code from transformers, which is not installed: pip install "octopipe[hf]" '
            "(or --own-layers for octopipe's layers of the same sizes)"
        ) from None
    if tuple(int(n) for n in re.findall(r"\d+", package.__version__)[:2]) < OLDEST_TRANSFORMERS:
        wanted = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise OctoPipeError(
            f"transformers {package.__version__} is too old: some models of versions before {wanted} have other losses "
            f"in pipelines; pip install 'transformers>={wanted}'"
        )
    return package


def _with_floats(value: Any) -> Any:
    """Converts transformers' notation {"__float__": "Infinity"} (JSON has no infinity), also in lists and nested
    dicts."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def read_config(source: Any, *, num_layers: int | None = None) -> Any:
    """A transformers config from a path (file or folder), a dict or a config; with only this many layers if that is
    asked for."""
    package = transformers()
    where = "config"
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        data, where = dict(read_json_object(path)), shown(path)
    elif isinstance(source, Mapping):
        data = dict(source)
    else:
        data = source.to_dict()
        config = source
    if isinstance(source, str | os.PathLike | Mapping):
        kind = data.get("model_type")
        if not isinstance(kind, str) or kind not in package.CONFIG_MAPPING:
            raise OctoPipeError(
                f"{where}: transformers {package.__version__} does not know the model type {kind!r}; "
                "use a newer transformers, or --own-layers"
            )
        with _quiet():
            try:
                config = package.CONFIG_MAPPING[kind].from_dict({k: _with_floats(v) for k, v in data.items()})
            except Exception as error:  # validators may raise anything
                why = " ".join(str(error).split())[:200]
                raise OctoPipeError(f"{where}: transformers rejects it: {why}") from None
    _refuse_other_kinds(config, where)
    return config if num_layers is None else shortened(config, num_layers, where)


def model_class(config: Any, where: str = "config") -> Any:
    """The language model of a config: the class that it names, or the family's class with its towers and its
    encoder."""
    package = transformers()
    for name in getattr(config, "architectures", None) or ():
        named = getattr(package, str(name), None)
        if named is not None and issubclass(named, package.PreTrainedModel) and re.search(WITH_HEAD, str(name)):
            return named
    order = ["CAUSAL_LM", "MULTIMODAL_LM"]
    if getattr(config, "is_encoder_decoder", False):
        order = ["SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM"]
    elif has_towers(config):
        order = ["MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"]
    for kind in order:
        found = getattr(package, f"MODEL_FOR_{kind}_MAPPING", {}).get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    raise OctoPipeError(
        f"{where}: {config.model_type} has no language model in transformers; give the config of one that has"
    )


def config_for(cls: Any, config: Any) -> Any:
    """The part of a config that a class takes: that of the text for a text model, that of the decoder for a decoder."""
    wanted, parts = getattr(cls, "config_class", None), getattr(config, "sub_configs", None) or {}
    if wanted is not None and wanted is parts.get("text_config"):
        return config.get_text_config(decoder=True)
    return config.decoder if wanted is not None and wanted is parts.get("decoder") else config


def has_towers(config: Any) -> bool:
    """Whether a config describes more than one stack, such as a tower and the text model."""
    parts = getattr(config, "sub_configs", None) or {}
    return any(name.startswith(("vision", "audio", "visual")) and getattr(config, name, None) for name in parts)


def build_on_meta(config: Any, *, dtype: torch.dtype, attention: str | None) -> nn.Module:
    """The whole model without memory."""
    cls = model_class(config)
    config = config_for(cls, config)
    options = {} if attention is None else {"attn_implementation": attention}
    config.use_cache = False
    for key in ("output_hidden_states", "output_attentions"):
        if getattr(config, key, False):
            setattr(config, key, False)
    if dtype is torch.float64:  # grouped kernels do not support double precision
        options["experts_implementation"] = "eager"
    with _quiet():
        try:
            model = without_memory(lambda: cls._from_config(copy.deepcopy(config), dtype=dtype, **options))
        except Exception as error:  # a family's own checks, missing packages
            why = " ".join(str(error).split())[:200]
            raise OctoPipeError(f"{cls.__name__} cannot be built from this config: {why}") from None
    model.train()
    return model


def without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` returns, with parameters that take no memory."""
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(0)  # random values of constructors are the same on every rank
            with Spared():
                return build()
        except (RuntimeError, NotImplementedError):  # a constructor that computes with values of tensors on meta
            with torch.device("meta"):
                return build()


def inner_model(model: nn.Module) -> nn.Module:
    """The transformers model itself, unwrapped from PEFT, which modifies it in place."""
    base = getattr(model, "get_base_model", None)
    found: Any = base() if callable(base) else model
    if not hasattr(found, "config") or not hasattr(found, "_init_weights"):
        raise OctoPipeError(f"{type(model).__name__} is not a transformers model; give one, its config, or its folder")
    _refuse_other_kinds(found.config, type(found).__name__)
    return found


def refuse_other_models(model: nn.Module) -> None:
    """Raise an error unless the model is a single forward from tokens to logits over a vocabulary."""
    name = type(model).__name__
    if type(model).forward is nn.Module.forward:
        parts = [part for part, _ in model.named_children()]
        raise OctoPipeError(
            f"{name} has no forward of its own: its generate runs {', '.join(parts)} one after another; give the one "
            f"that is trained: layers(model.{parts[0]})"
        )
    config: Any = model.config
    if getattr(config.get_text_config(decoder=True), "vocab_size", None) is None:
        raise OctoPipeError(f"{name} predicts no tokens: its config has no vocabulary; only language models are cut")


def refuse_codes(model: nn.Module) -> None:
    """Raise an error if every position of a model's input has several codes instead of one token."""
    config: Any = model.config
    count = getattr(config.get_text_config(decoder=True), "num_codebooks", None)
    if isinstance(count, int) and count > 1:
        raise OctoPipeError(
            f"{type(model).__name__} takes codes of {count} codebooks for every position, not one token; give an "
            "example of a small batch: layers(model, example={...})"
        )


def shortened(config: Any, num_layers: int, where: str) -> Any:
    """The config with only its first layers; lists with one entry per layer are shortened accordingly."""
    text = config.get_text_config(decoder=True)
    before = int(text.num_hidden_layers)
    if not 1 <= num_layers <= before:
        raise OctoPipeError(
            f"{where}: the model has {before} blocks, and {num_layers} were asked for; give --layers 3 to "
            f"{before + 2}, which counts the embedding and the head too"
        )
    data = config.to_dict()
    part = data
    if text is not config:
        part = next((data.get(key) for key in vars(config) if getattr(config, key) is text), None)
        if not isinstance(part, dict):
            raise OctoPipeError(
                f"{where}: its config does not hold the text model's config, so --layers cannot shorten it; write a "
                "config.json with fewer layers"
            )
    for key, value in part.items():
        if isinstance(value, list) and len(value) == before:
            part[key] = value[:num_layers]
    part.pop("num_hidden_layers", None)
    part[_key_of_layers(text)] = num_layers
    with _quiet():
        return type(config).from_dict(data)


def _key_of_layers(config: Any) -> str:
    mapped = getattr(config, "attribute_map", {}).get("num_hidden_layers")
    return mapped if isinstance(mapped, str) else "num_hidden_layers"


def _refuse_other_kinds(config: Any, where: str) -> None:
    decodes = getattr(config, "is_decoder", None)
    if decodes is False and not getattr(config, "is_encoder_decoder", False) and _is_encoder(config):
        raise OctoPipeError(
            f"{where}: {config.model_type} is an encoder (is_decoder is false); only language models are cut"
        )


def _is_encoder(config: Any) -> bool:
    """Whether the family's causal model is an encoder that runs with another mask."""
    package = transformers()
    masked = getattr(package, "MODEL_FOR_MASKED_LM_MAPPING", {})
    return type(config) in masked


class _quiet:
    """Suppresses the messages that transformers logs while it creates a config or a model on `meta`."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("transformers")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
