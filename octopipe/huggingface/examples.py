"""An example batch of a model that takes more than tokens: images, audio, or the tokens of a decoder.

Knows: which of the inputs that a model may take (`media.py`) its own forward accepts (`trials.py`), and how tokens
stand around them. Does not know: how models are split, or real data.

The example serves to follow the model's forward once; its values do not matter. A model whose inputs follow no
convention that is known here needs an example from its user.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.media import (
    CHANNELS,
    MEDIA,
    PIXELS,
    ROWS,
    SIDES,
    TOKENS,
    VALUE,
    Media,
    dtype_of,
    inputs_of,
    media_of,
    number,
    parts_of,
    recordings_of,
)
from octopipe.huggingface.sections import stacks
from octopipe.huggingface.trials import Trials

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
"""Inputs that any model takes, or that replace other inputs."""
OUTPUT_CHOICES = ("use_cache", "output_", "return_dict", "logits_to_keep", "kwargs", "cache_position", "interpolate_")
MARKS = ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")
"""Inputs that mark the tokens which are placeholders of an image."""
MASK = "attention_mask"
FRAME_MASK = "feature_attention_mask"
"""The mask of a recording's frames in models that take images and recordings."""
MOST_NAMES = 5


def takes_more_than_tokens(model: nn.Module) -> bool:
    """Whether the model's forward has main inputs besides tokens, and the model has a part that takes them."""
    names = inputs_of(model)
    config: Any = model.config
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        return True
    parts = {name for name in getattr(config, "sub_configs", None) or () if name != "text_config"}
    if not parts:
        return False  # images are embedded by one matrix, without a tower (Fuyu); batches of tokens are complete
    if all(getattr(config, name, None) is None for name in parts):
        return False  # the family may have towers, and this config has none of them
    return any(name in names for name in MEDIA)


def example_of(model: nn.Module) -> dict[str, Tensor]:
    """A batch that the model's forward accepts; raises a one-line error that asks for an example if none is found."""
    config: Any = model.config
    decodes = "decoder_input_ids" in inputs_of(model) and bool(getattr(config, "is_encoder_decoder", False))
    if decodes and getattr(model, "main_input_name", "input_ids") == "input_ids":
        return {**_page(model, _ids(model, tokens=TOKENS + 2)), "decoder_input_ids": _decoder_ids(model)}
    lists, problem = stacks(model), ""
    while lists:
        trials, furthest, last = Trials(model, lists), -1, ""
        for media in media_of(model):
            try:
                if decodes:
                    return _decoded(model, media, trials)
                return _with_recordings(model, _placed(model, media, trials), media, trials)
            except OctoPipeError:
                raise
            except Exception as error:  # the model takes another form
                if trials.visits > furthest:
                    furthest, last = trials.visits, trials.last
                    said = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        if furthest < 0:
            break
        problem = problem or said
        # Layers that change the shape of the hidden state have no placeholders: they are run.
        lists = [path for path in lists if path != last] if last else []
    raise _unknown(model, problem)


def _unknown(model: nn.Module, problem: str) -> OctoPipeError:
    """An error for inputs that follow no known convention: their names, and what to do."""
    names = [n for n in inputs_of(model) if n not in USUAL_INPUTS and not n.startswith(OUTPUT_CHOICES)]
    more = f" and {len(names) - MOST_NAMES} more inputs" if len(names) > MOST_NAMES else ""
    taken = f"{', '.join(names[:MOST_NAMES])}{more}" if names else "inputs of its own"
    said = f" (its forward on the likeliest: {problem})" if problem else ""
    return OctoPipeError(
        f"{type(model).__name__} takes {taken} beside tokens, in a form that octopipe cannot make up"
        f"{said}; give an example of a small batch: layers(model, example={{...}})"
    )


def _ids(model: nn.Module, rows: int = ROWS, tokens: int = TOKENS) -> Tensor:
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    vocab, pad = int(text.vocab_size), getattr(text, "pad_token_id", None)
    ids = 3 + torch.arange(rows * tokens).view(rows, tokens) % max(vocab - 8, 1)
    return ids if pad is None else torch.where(ids == pad, ids + 1, ids)


def _decoder_ids(model: nn.Module) -> Tensor:
    """Tokens of a decoder; a decoder that generates several channels at a time takes the channels side by side."""
    config: Any = model.config
    channels = number(getattr(config, "decoder_config", None), ("num_channels",))
    return _ids(model) if channels is None else _ids(model)[..., None].repeat(1, 1, channels)


def _page(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Tokens with their positions on a page, and the page's image if the model takes both."""
    config, names = model.config, inputs_of(model)
    if "bbox" not in names:
        return {"input_ids": ids}
    left = torch.linspace(0.1, 0.8, ids.shape[1], dtype=torch.float64).expand(ids.shape)
    out = {"input_ids": ids, "bbox": torch.stack((left, left, left + 0.1, left + 0.1), -1)}
    side = number(config, SIDES)
    if PIXELS[0] in names and side is not None:
        channels = number(config, CHANNELS) or 3
        out[PIXELS[0]] = torch.full((len(ids), channels, side, side), VALUE, dtype=dtype_of(model))
    return out


def _decoded(model: nn.Module, media: Media, trials: Trials) -> dict[str, Tensor]:
    """The batch of an encoder-decoder whose encoder takes features."""
    batch = {**media.inputs, "decoder_input_ids": _ids(model)}
    trials.check(batch)
    return batch


def _placed(model: nn.Module, media: Media, trials: Trials) -> dict[str, Tensor]:
    """The batch of a model that replaces placeholder tokens by features, or takes features beside the tokens."""
    try:
        return _placed_as(model, media, trials)
    except Exception as error:
        if trials.visits == 0:
            raise
        # Some models use an attention mask and do not create one if it is not given.
        masked = replace(media, inputs={**media.inputs, MASK: torch.ones(ROWS, 1, dtype=torch.long)})
        try:
            return _placed_as(model, masked, trials)
        except Exception:
            raise error from None


def _with_recordings(model: nn.Module, batch: dict[str, Tensor], media: Media, trials: Trials) -> dict[str, Tensor]:
    """The batch with a recording beside the image of every row, if the model has a tower for each; otherwise the batch
    as it is.

    A tower for recordings shows in layers that a batch of images does not run. Only recordings of frames with
    `FRAME_MASK` are tried, because the search takes minutes for some families that take others.
    """
    token, idle = token_of(model.config, "audio"), trials.idle
    if media.kind == "audio" or token is None or not idle or FRAME_MASK not in inputs_of(model):
        return batch
    for sound in recordings_of(model):
        try:
            alone = _placed(model, sound, trials)
            if idle <= trials.idle:
                continue
            both = _joined(batch, alone, token)
            trials.check(both)
        except Exception:  # the model takes recordings in another form
            continue
        if not idle <= trials.idle:
            return both
    return batch


def _joined(batch: dict[str, Tensor], sound: dict[str, Tensor], token: int) -> dict[str, Tensor]:
    """The inputs of both batches; the placeholders of the second stand before the last token of the first."""
    places = int((sound["input_ids"][0] == token).sum())
    if not places:
        raise ValueError("recordings occupy no positions in the sequence")
    ids = torch.where(batch["input_ids"] == token, batch["input_ids"] - 1, batch["input_ids"])
    out = {**sound, **batch}
    out["input_ids"] = torch.cat((ids[:, :-1], torch.full((ROWS, places), token), ids[:, -1:]), 1)
    for name in MARKS:
        if name in out:  # they mark images, which the placeholders of recordings are not
            out[name] = torch.cat((batch[name][:, :-1], batch[name].new_zeros(ROWS, places), batch[name][:, -1:]), 1)
    return _with_mask(out)


def _placed_as(model: nn.Module, media: Media, trials: Trials) -> dict[str, Tensor]:
    token = token_of(model.config, media.kind)
    places = trials.places(_around(model, media, token, 1))
    if places % ROWS or (media.most is not None and places > ROWS * media.most):
        raise ValueError(f"{ROWS} items become {places} features")
    batches = [_around(model, media, token, places // ROWS)]
    if token is None and places:  # features that are added to the embeddings, one per token
        batches.append(_with_mask({"input_ids": _ids(model, tokens=places // ROWS), **media.inputs}))
    problem: Exception | None = None
    for batch in batches:
        try:
            trials.check(batch)
            return batch
        except Exception as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _around(model: nn.Module, media: Media, token: int | None, places: int) -> dict[str, Tensor]:
    """In every row, tokens around this number of placeholder tokens of an item."""
    names, words = inputs_of(model), _ids(model)
    marks = [name for name in MARKS if name in names]
    if token is None and not (marks and places):
        return _with_mask({"input_ids": words, **media.inputs})
    if token is not None:
        words = torch.where(words == token, words - 1, words)
    start = getattr(model.config, "vision_start_token_id", None) if media.kind == "image" else None
    first = words[:, :2] if start is None else torch.cat((words[:, :1], torch.full((ROWS, 1), int(start))), 1)
    stands = torch.full((ROWS, places), int(words[0, 0]) if token is None else token)
    ids = torch.cat((first, stands, words[:, 2:]), 1)
    inside = torch.zeros_like(ids)
    inside[:, first.shape[1] : first.shape[1] + places] = 1
    return _with_mask({"input_ids": ids, **media.inputs, **dict.fromkeys(marks, inside)})


def _with_mask(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch, with an attention mask as long as its tokens if it has a mask."""
    return {**batch, MASK: torch.ones_like(batch["input_ids"])} if MASK in batch else batch


def token_of(config: Any, kind: str) -> int | None:
    """The placeholder token for a kind of features, as the config or one of its parts names it."""
    for part in parts_of(config):
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            if getattr(part, name, None) is not None:
                return int(getattr(part, name))
    return None
