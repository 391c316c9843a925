"""The user's Hugging Face model: a config, a folder, or a model that has already been built.

Knows: how it becomes a model of the right class on the `meta` device, and what is rejected because part of it would be
lost (vision and audio towers, encoders, encoder-decoders). Does not know: how models are split.
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
from octopipe.huggingface.shell import Spared
from octopipe.models.readers.hf_config import refuse_towers


def transformers() -> Any:
    """The package, or one line that says how to get it."""
    try:
        import transformers as package
    except ModuleNotFoundError:
        raise OctoPipeError(
            'this runs the model\'s own code from transformers, which is not installed: pip install "octopipe[hf]" '
            "(or --own-layers for octopipe's layers of the same sizes)"
        ) from None
    if int(package.__version__.split(".")[0]) < 5:
        raise OctoPipeError(f"transformers {package.__version__} is too old; pip install 'transformers>=5'")
    return package


def read_config(source: Any, *, num_layers: int | None = None) -> Any:
    """A transformers config of a path (file or folder), a dict or a config; with only so many layers where asked."""
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
    refuse_towers(data, where)
    if isinstance(source, str | os.PathLike | Mapping):
        kind = data.get("model_type")
        if not isinstance(kind, str) or kind not in package.CONFIG_MAPPING:
            raise OctoPipeError(
                f"{where}: transformers {package.__version__} does not know the model type {kind!r}; "
                "use a newer transformers, or --own-layers"
            )
        with _quiet():
            try:
                config = package.CONFIG_MAPPING[kind].from_dict(data)
            except Exception as error:  # validators of many kinds
                why = " ".join(str(error).split())[:200]
                raise OctoPipeError(f"{where}: transformers does not take it: {why}") from None
    _refuse_other_kinds(config, where)
    return config if num_layers is None else shortened(config, num_layers, where)


def model_class(config: Any, where: str = "config") -> Any:
    """The causal language model of a config: the class it names, or the family's."""
    package = transformers()
    for name in getattr(config, "architectures", None) or ():
        named = getattr(package, str(name), None)
        if named is not None and issubclass(named, package.PreTrainedModel) and re.search("CausalLM|LMHead", str(name)):
            return named
    try:
        return package.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise OctoPipeError(
            f"{where}: {config.model_type} has no causal language model in transformers; give a decoder's config"
        ) from None


def build_on_meta(config: Any, *, dtype: torch.dtype, attention: str | None) -> nn.Module:
    """The whole model without memory."""
    cls = model_class(config)
    options = {} if attention is None else {"attn_implementation": attention}
    config.use_cache = False
    for key in ("output_hidden_states", "output_attentions"):
        if getattr(config, key, False):
            setattr(config, key, False)
    if dtype is torch.float64:  # grouped kernels know no double precision
        options["experts_implementation"] = "eager"
    with _quiet():
        try:
            model = _without_memory(lambda: cls._from_config(copy.deepcopy(config), dtype=dtype, **options))
        except Exception as error:  # a family's own checks, missing packages
            why = " ".join(str(error).split())[:200]
            raise OctoPipeError(f"{cls.__name__} cannot be built from this config: {why}") from None
    model.train()
    return model  # type: ignore[no-any-return]


def _without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(0)  # what constructors draw themselves is the same on every rank
            with Spared():
                return build()
        except (RuntimeError, NotImplementedError):  # a constructor that computes with what is not there
            with torch.device("meta"):
                return build()


def inner_model(model: nn.Module) -> nn.Module:
    """The transformers model itself: behind PEFT, which has changed it in place."""
    base = getattr(model, "get_base_model", None)
    found: Any = base() if callable(base) else model
    if not hasattr(found, "config") or not hasattr(found, "_init_weights"):
        raise OctoPipeError(f"{type(model).__name__} is not a transformers model; give one, its config, or its folder")
    data = found.config.to_dict()
    refuse_towers(data, type(found).__name__)
    _refuse_other_kinds(found.config, type(found).__name__)
    return found  # type: ignore[no-any-return]


def shortened(config: Any, num_layers: int, where: str) -> Any:
    """The config with only its first layers; what it lists per layer is cut to match."""
    text = config.get_text_config(decoder=True)
    before = int(text.num_hidden_layers)
    if not 1 <= num_layers <= before:
        raise OctoPipeError(f"{where}: {num_layers} of its {before} layers; give 3 to {before + 2}, ends included")
    data = config.to_dict()
    for key, value in data.items():
        if isinstance(value, list) and len(value) == before:
            data[key] = value[:num_layers]
    names = {v: k for k, v in getattr(config, "attribute_map", {}).items()}
    data.pop("num_hidden_layers", None)
    data[_key_of_layers(config, names)] = num_layers
    with _quiet():
        return type(config).from_dict(data)


def _key_of_layers(config: Any, names: Mapping[str, str]) -> str:
    mapped = getattr(config, "attribute_map", {}).get("num_hidden_layers")
    return mapped if isinstance(mapped, str) else "num_hidden_layers"


def _refuse_other_kinds(config: Any, where: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise OctoPipeError(f"{where}: {config.model_type} is an encoder-decoder; only causal language models are cut")
    decodes = getattr(config, "is_decoder", None)
    if decodes is False and _is_encoder(config):
        raise OctoPipeError(
            f"{where}: {config.model_type} is an encoder (is_decoder is false); only causal language models are cut"
        )


def _is_encoder(config: Any) -> bool:
    """Families whose causal model is an encoder run with another mask."""
    package = transformers()
    masked = getattr(package, "MODEL_FOR_MASKED_LM_MAPPING", {})
    return type(config) in masked


class _quiet:
    """Without the notes transformers logs while a config or a model on meta is made."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("transformers")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
