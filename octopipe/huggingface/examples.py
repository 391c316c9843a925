"""An example batch of a model that takes more than tokens: images, audio, or the tokens of a decoder.

Knows: which inputs models of transformers take by convention, and how many tokens an image or a recording stands for
(asked of the model itself). Does not know: how models are split, or real data.

The example serves to follow the model's forward once; its values do not matter. A model whose inputs follow no
convention that is known here needs an example from its user.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.sections import stacks
from octopipe.huggingface.shell import (
    hidden_leaf,
    leaves_of,
    shell_of_zeros,
)

ROWS, TOKENS = 5, 7
"""Sizes that no width of a model equals by chance; no layer returns a tuple of so many."""
OTHER_INPUTS = ("pixel_values", "decoder_input_ids", "input_features", "input_values")
USUAL_INPUTS = frozenset(
    [
        "self",
        "input_ids",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "inputs_embeds",
        "labels",
        "encoder_outputs",
        "mm_encoder_outputs",
        "decoder_attention_mask",
        "decoder_inputs_embeds",
        "encoder_past_key_values",
    ]
)
"""Inputs that any model takes, or that stand for others."""
OUTPUT_CHOICES = ("use_cache", "output_", "return_dict", "logits_to_keep", "kwargs", "cache_position", "interpolate_")
MOST_NAMES = 5


def takes_more_than_tokens(model: nn.Module) -> bool:
    """Whether the model's forward has other main inputs than tokens, and a part that takes them."""
    names = _inputs_of(model)
    config: Any = model.config
    if "decoder_input_ids" in names:
        return bool(getattr(config, "is_encoder_decoder", False))
    parts = {name for name in getattr(config, "sub_configs", None) or () if name != "text_config"}
    if "pixel_values" in names and not parts:
        return False  # images are embedded by one matrix, without a tower (Fuyu); batches of tokens are complete
    if parts and all(getattr(config, name, None) is None for name in parts):
        return False  # the family may have towers, and this config has none of them
    return any(name in names for name in OTHER_INPUTS)


def example_of(model: nn.Module) -> dict[str, Tensor]:
    """A batch that the model's forward takes, or one line that asks for an example."""
    try:
        if "decoder_input_ids" in _inputs_of(model):
            return _of_encoder_decoder(model)
        if "pixel_values" in _inputs_of(model):
            return _of_images(model)
        if "input_features" in _inputs_of(model):
            return _of_audio(model)
    except OctoPipeError:
        raise
    except Exception as error:  # a model whose conventions are others
        raise _unknown(model) from error
    raise _unknown(model)


def _unknown(model: nn.Module) -> OctoPipeError:
    """Inputs of no convention that is known here: their names, and what to do."""
    names = [n for n in _inputs_of(model) if n not in USUAL_INPUTS and not n.startswith(OUTPUT_CHOICES)]
    more = f" and {len(names) - MOST_NAMES} more inputs" if len(names) > MOST_NAMES else ""
    taken = f"{', '.join(names[:MOST_NAMES])}{more}" if names else "inputs of its own"
    return OctoPipeError(
        f"{type(model).__name__} takes {taken} beside tokens, in a form that octopipe does not know how to make up; "
        "give an example of a small batch: layers(model, example={...})"
    )


def _inputs_of(model: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(inspect.unwrap(type(model).forward)).parameters


def _ids(model: nn.Module, rows: int = ROWS, tokens: int = TOKENS) -> Tensor:
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    vocab, pad = int(text.vocab_size), getattr(text, "pad_token_id", None)
    ids = 3 + torch.arange(rows * tokens).view(rows, tokens) % max(vocab - 8, 1)
    return ids if pad is None else torch.where(ids == pad, ids + 1, ids)


def _of_encoder_decoder(model: nn.Module) -> dict[str, Tensor]:
    decoder = {"decoder_input_ids": _ids(model)}
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids":
        return {"input_ids": _ids(model, tokens=TOKENS + 2), **decoder}
    config: Any = model.config
    if main == "input_features":
        bins = int(getattr(config, "num_mel_bins", 0) or config.input_feat_per_channel)
        frames = 2 * int(config.max_source_positions) if hasattr(config, "num_mel_bins") else 24
        shape = (ROWS, bins, frames) if hasattr(config, "num_mel_bins") else (ROWS, frames, bins)
        return {main: torch.zeros(shape, dtype=_dtype(model)), **decoder}
    if main == "input_values":
        return {main: torch.zeros(ROWS, 4096, dtype=_dtype(model)), **decoder}
    if main == "pixel_values":
        size, channels = _image_size(config)
        return {main: torch.zeros(ROWS, channels, size, size, dtype=_dtype(model)), **decoder}
    raise _unknown(model)


def _of_images(model: nn.Module) -> dict[str, Tensor]:
    config: Any = model.config
    vision, names = config.vision_config, _inputs_of(model)
    given: dict[str, Tensor] = {}
    token = next(
        (int(v) for v in (getattr(config, k, None) for k in ("image_token_id", "image_token_index")) if v is not None),
        None,
    )
    if "image_grid_thw" in names:  # images as rows of patches, of any size
        merge, patch = int(vision.spatial_merge_size), int(vision.patch_size)
        side = 2 * merge
        channels = int(getattr(vision, "in_channels", 0) or getattr(vision, "in_chans", 3))
        width = channels * int(getattr(vision, "temporal_patch_size", 1)) * patch * patch
        given["pixel_values"] = torch.zeros(ROWS * side * side, width, dtype=_dtype(model))
        given["image_grid_thw"] = torch.tensor([[1, side, side]] * ROWS)
        each = (side // merge) ** 2
    else:
        size, channels = _image_size(vision)
        given["pixel_values"] = torch.zeros(ROWS, channels, size, size, dtype=_dtype(model))
        if token is None:  # features that take no token's place
            return {"input_ids": _ids(model), **given}
        try:
            each = _tokens_an_image(model, given)
        except Exception:  # some towers take images of any size
            if "image_sizes" not in names:
                raise
            given["image_sizes"] = torch.tensor([[size, size]] * ROWS)
            each = _tokens_an_image(model, given)
    words = _ids(model)
    if token is None:
        return {"input_ids": words, **given}
    words = torch.where(words == token, words - 1, words)
    marks = torch.full((ROWS, each), token)
    start = getattr(config, "vision_start_token_id", None)
    first = words[:, :2] if start is None else torch.cat((words[:, :1], torch.full((ROWS, 1), int(start))), 1)
    given = {"input_ids": torch.cat((first, marks, words[:, 2:]), 1), **given}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in names:
            given[name] = (given["input_ids"] == token).long()
    return given


def _of_audio(model: nn.Module) -> dict[str, Tensor]:
    config: Any = model.config
    audio = config.audio_config
    frames = 2 * int(audio.max_source_positions)
    given = {"input_features": torch.zeros(ROWS, int(audio.num_mel_bins), frames, dtype=_dtype(model))}
    if "feature_attention_mask" in _inputs_of(model):
        given["feature_attention_mask"] = torch.ones(ROWS, frames, dtype=torch.long)
    token = next(int(v) for v in (getattr(config, k, None) for k in ("audio_token_id", "audio_token_index")) if v)
    words = _ids(model)
    each = int(audio.max_source_positions) // 2
    words = torch.where(words == token, words - 1, words)
    return {"input_ids": torch.cat((words[:, :2], torch.full((ROWS, each), token), words[:, 2:]), 1), **given}


def _image_size(vision: Any) -> tuple[int, int]:
    size = vision.image_size
    size = size[0] if isinstance(size, list | tuple) else size
    return int(size), int(getattr(vision, "num_channels", 3))


def _tokens_an_image(model: nn.Module, given: Mapping[str, Tensor]) -> int:
    """How many features an image becomes, from the model's own code around placeholder layers."""
    if not any(hasattr(m, "get_image_features") for m in (model, getattr(model, "model", None))):
        raise _unknown(model)
    shell, answers = shell_of_zeros(model, stacks(model))
    core: Any = shell if hasattr(shell, "get_image_features") else shell.model
    names = inspect.signature(inspect.unwrap(type(core).get_image_features)).parameters
    problem: Exception | None = None
    for returns in range(3):

        def visit(_: int, args: Any, kwargs: Any, returns: int = returns) -> Any:
            leaves, _ = leaves_of(args, kwargs)
            hidden = leaves[hidden_leaf(leaves)]
            return (hidden, *[None] * (returns - 1)) if returns else hidden

        try:
            with torch.no_grad(), answers.given_by(visit):
                out = core.eval().get_image_features(**{k: v for k, v in given.items() if k in names})
        except Exception as error:  # a wrong guess of what layers return
            problem = problem or error
            continue
        out = out.pooler_output if hasattr(out, "pooler_output") else out
        found = out if isinstance(out, tuple | list) else [out]
        return sum(t.shape[:-1].numel() for t in found) // ROWS
    assert problem is not None
    raise problem


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
