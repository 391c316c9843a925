"""Vision-language models of transformers as layers of a pipeline: the tower, the projector, and the language model.

Knows: models built like LLaVA (a vision tower of encoder layers, one feature layer, a projector, image features put in
the place of image tokens). Does not know: how a language model is cut (`cut`), plans.

    parts = octopipe.huggingface.vision_language(model)     # LlavaForConditionalGeneration
    pipe = octopipe.Pipeline(parts.layers, plan, parts.loss_fn, side_inputs=parts.side_inputs)
    pipe.step(pixel_values, labels, side={"input_ids": input_ids})     # lists: one entry per micro-batch

A micro-batch may have any number of images: `pixel_values` contains those of its rows one after the other, and has no
rows if there are none. On a path without the tower, the merging layer takes the batch and uses only the tokens. A
frozen tower computes no gradients. Sequences must not be padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.cut import LayerList, layers
from octopipe.huggingface.source import transformers


class VisionStart(nn.Module):
    """Converts images to the input of the tower's first layer."""

    def __init__(self, tower: nn.Module):
        super().__init__()
        self.embeddings: Any = tower.embeddings
        self.norm: Any = getattr(tower, "pre_layrnorm", None)

    def forward(self, pixel_values: Tensor) -> Tensor:
        if not pixel_values.shape[0]:  # no images: attention does not support empty batches
            return pixel_values.new_zeros(0, 1, 1)
        hidden = self.embeddings(pixel_values.to(next(self.parameters()).dtype))
        return hidden if self.norm is None else self.norm(hidden)


class VisionLayer(nn.Module):
    """One layer of the tower."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        if not hidden.shape[0]:
            return hidden
        out = self.layer(hidden, None)
        return out if isinstance(out, Tensor) else out[0]


class Projector(nn.Module):
    """Converts the tower's features to inputs of the language model."""

    def __init__(self, projector: nn.Module, drop_first: bool):
        super().__init__()
        self.projector = projector
        self._drop_first = drop_first

    def forward(self, hidden: Tensor) -> Tensor:
        if not hidden.shape[0]:
            return hidden
        return self.projector(hidden[:, 1:] if self._drop_first else hidden)


class Merge(nn.Module):
    """The tokens' embeddings, with the images' features in the positions of the image tokens."""

    def __init__(self, embed: nn.Module, image_token: int):
        super().__init__()
        self.embed = embed
        self._image_token = image_token

    def forward(self, features: Tensor, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        if features.ndim != 3 or not features.numel():  # no image, or the batch itself: this path has no tower
            features = hidden.new_zeros(0, 1, hidden.shape[-1])
        mask = input_ids == self._image_token
        found, wanted = features.shape[0] * features.shape[1], int(mask.sum())
        if found != wanted:
            raise OctoPipeError(f"{wanted} image tokens for {found} image features; give each image its tokens")
        if not wanted:
            return hidden
        return hidden.masked_scatter(mask.unsqueeze(-1), features.to(hidden.dtype))


class VisionLanguage:
    """The layers of a vision-language model, with the other arguments that a pipeline needs for it."""

    side_inputs = ("input_ids",)

    def __init__(self, model: nn.Module):
        core = getattr(model, "model", None)
        tower, projector = getattr(core, "vision_tower", None), getattr(core, "multi_modal_projector", None)
        encoder = getattr(getattr(tower, "encoder", None), "layers", None)
        config: Any = model.config
        chosen = getattr(config, "vision_feature_layer", None)
        if tower is None or projector is None or encoder is None or not hasattr(tower, "embeddings"):
            raise OctoPipeError(
                f"{type(model).__name__} is not built like LLaVA (a vision tower of encoder layers and a projector); "
                "give Pipeline modules of your own"
            )
        if not isinstance(chosen, int):
            raise OctoPipeError(
                f"{type(model).__name__} takes the outputs of several layers of its tower, and vision_language "
                "supports one; use octopipe.huggingface.layers"
            )
        used = chosen if chosen >= 0 else len(encoder) + 1 + chosen
        self._text: LayerList = layers(_language_model(model))
        drop = getattr(config, "vision_feature_select_strategy", "full") == "default"
        embed = self._text[0]
        assert isinstance(embed, nn.Module)
        vision = [VisionStart(tower), *(VisionLayer(layer) for layer in encoder[:used]), Projector(projector, drop)]
        self.num_vision_layers = len(vision)
        """Layers of the tower, the projector included; the merging layer follows."""
        self.layers: list[Any] = [*vision, Merge(embed, int(config.image_token_id)), *self._text[1:]]
        self.loss_fn = self._text.loss_fn


def _language_model(model: nn.Module) -> nn.Module:
    """The causal language model inside, built from the same modules."""
    core: Any = model.model
    text: Any = core.language_model
    with torch.device("meta"):
        causal = transformers().AutoModelForCausalLM.from_config(text.config)
    if type(causal.model) is not type(text):
        raise OctoPipeError(
            f"transformers has no causal language model around {type(text).__name__}; use octopipe.huggingface.layers"
        )
    causal.model, causal.lm_head = text, model.lm_head
    return causal


def vision_language(model: nn.Module) -> VisionLanguage:
    """The layers of a vision-language model that is built like LLaVA."""
    return VisionLanguage(model)
