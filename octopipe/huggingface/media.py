"""The images and recordings that a model may take, made up from what its config and its forward's signature say.

Knows: the shapes that models of transformers give to an image (pixels, tiles, rows of patches) or a recording (mel
bins, samples), the config fields with their sizes, and the inputs that go with them (masks, sizes, grids). Does not
know: tokens, or which of the shapes a model takes: `trials.py` asks its forward.

Every row of a batch has one image or one recording. The values are a constant that is not zero, because some models
take an image of zeros for padding.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 5
"""The number of rows of a batch. No usual width of a model equals it, and no layer returns a tuple of this length."""
TOKENS = 7
"""The number of tokens of a row, which no usual width of a model equals."""
VALUE = 0.5
PIXELS = ("pixel_values", "image_pixel_values", "pixel_values_images", "image_patches")
RECORDINGS = ("input_features", "audio_input_features", "input_values")
PATCHES = "flattened_patches"
OTHER_TEXTS = ("protein_input_ids",)
MEDIA = (*PIXELS, *RECORDINGS, PATCHES, *OTHER_TEXTS)
"""Main inputs of models that take more than tokens."""
SIDES = ("image_size", "crop_size", "resolution")
"""Config fields with the side of an image in pixels."""
CHANNELS = ("num_channels", "in_channels", "in_chans", "n_channels")
STEPS = "channel_multiplier"
"""Config field of towers that halve an image step by step instead of taking patches."""
MERGES = ("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size", "downsample_factor")
"""Config fields with the number of patches in each direction that become one token."""
BINS = ("num_mel_bins", "n_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "input_size", "mel_bins")
FRAMES = ("max_source_positions", "max_position_embeddings", "n_ctx")
MOST_FRAMES = 3000
"""The most frames of a recording: those of Whisper's half a minute. Longer bounds of a config are not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """The inputs of one image or recording per row."""

    kind: str
    """`image`, `video`, `audio` or `text`, by which the config names the placeholder token."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    most: int | None = None
    """The most tokens that it can occupy (a frame of a recording is one token at most); None: no bound."""


def inputs_of(model: nn.Module) -> Mapping[str, Any]:
    """The parameters of a model's forward."""
    return inspect.signature(inspect.unwrap(type(model).forward)).parameters


def parts_of(config: Any) -> Iterator[Any]:
    """A config and all configs inside it; that of the text model comes last."""
    yield config
    names = sorted(getattr(config, "sub_configs", None) or (), key=lambda name: "text" in name)
    for name in names:
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            yield from parts_of(part)


def media_of(model: nn.Module) -> Iterator[Media]:
    """Every form in which the model may take an image or a recording, the likely ones first."""
    names, dtype = inputs_of(model), dtype_of(model)
    config: Any = model.config
    pixels = next((name for name in PIXELS if name in names), None)
    if pixels is not None:
        for kind, part in _described(config, ("vision", "image", "visual", "video"), (*SIDES, "patch_size", STEPS)):
            for shape, more in _shapes(part, config, names):
                values = torch.full(shape, VALUE, dtype=dtype)
                for given in _companions(names, shape, part, config, dtype):
                    yield Media(kind=kind, inputs={pixels: values, **more, **given})
    if PATCHES in names:
        yield from _flattened(config, dtype)
    for name in OTHER_TEXTS:
        if name in names:  # sequences of another vocabulary, which an encoder reads
            ids = torch.arange(5, 5 + 8).repeat(ROWS, 1)
            mask = name.replace("input_ids", "attention_mask")
            yield Media(kind="text", inputs={name: ids, **({mask: torch.ones_like(ids)} if mask in names else {})})
    yield from recordings_of(model)


def recordings_of(model: nn.Module) -> Iterator[Media]:
    """Every form in which the model may take a recording, the likely ones first."""
    names, dtype = inputs_of(model), dtype_of(model)
    for sound in (name for name in RECORDINGS if name in names):
        yield from _recordings(sound, names, model.config, dtype)


def dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def number(part: Any, names: Sequence[str]) -> int | None:
    """The first of these config fields that is a whole number or a list of them."""
    for name in names:
        value = getattr(part, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _described(config: Any, words: Sequence[str], fields: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The parts of a config that have one of these fields; those whose type contains one of the words come first."""
    found = [part for part in parts_of(config) if any(number(part, (name,)) for name in fields)]
    named = [part for part in found if any(word in str(getattr(part, "model_type", "")) for word in words)]
    kind = "video" if getattr(config, "image_token_index", None) is None and _takes_videos(config) else "image"
    for part in list(dict.fromkeys(map(id, (*named, *found)))):
        yield kind, next(p for p in found if id(p) == part)


def _takes_videos(config: Any) -> bool:
    known = any(getattr(config, name, None) is not None for name in ("image_token_id", "image_token_index"))
    return not known and getattr(config, "video_token_index", None) is not None


def _shapes(part: Any, config: Any, names: Mapping[str, Any]) -> Iterator[tuple[tuple[int, ...], dict[str, Tensor]]]:
    """Shapes of the pixels, with the inputs that state how the patches are arranged."""
    channels = number(part, CHANNELS) or 3
    patch = number(part, ("patch_size",)) or 1
    deep = number(part, ("temporal_patch_size", "patch_temporal")) or 1
    merges = dict.fromkeys(m for m in (number(part, MERGES), number(config, MERGES), 2, 1) if m)
    grids = {"image_grid_thw": [1], "image_grid_hw": []}
    for name, time in ((name, time) for name, time in grids.items() if name in names):
        for merge in merges:
            side = 2 * merge
            rows = ROWS * side * side
            more = {name: torch.tensor([[*time, side, side]] * ROWS)}
            if "image_merge_sizes" in names:
                more["image_merge_sizes"] = torch.tensor([merge] * ROWS)
            yield (rows, channels * deep * patch * patch), more
            yield (rows, channels, patch, patch), more
            yield (1, rows, channels, patch, patch), more
            yield (rows // merge**2, merge * patch, merge * patch, channels), more
            # Some models count the grid in squares of merged patches.
            merged = {**more, name: torch.tensor([[*time, 2, 2]] * ROWS)}
            yield (ROWS * 4, merge * patch, merge * patch, channels), merged
        return
    if "image_token_pooling" in names:
        yield from _pooled(part, channels * patch * patch)
    for merge in merges:
        side = 2 * merge
        places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1).view(-1, 2)
        if "spatial_shapes" in names:
            more = {"spatial_shapes": torch.tensor([[side, side]] * ROWS)}
            yield (ROWS, side * side, channels * patch * patch), more
        if "image_position_ids" in names:
            more = {"image_position_ids": places.repeat(ROWS, 1, 1)}
            for width in (patch, number(part, ("model_patch_size",)) or patch):
                yield (ROWS, side * side, channels * width * width), more
    size = number(part, SIDES)
    tiles = number(part, ("max_num_tiles",))
    if size is not None:
        if tiles is not None:
            yield (ROWS, 1, tiles, channels, size, size), {}
        yield (ROWS, channels, size, size), {}
        for count in (1, 2, 3, 5):
            yield (ROWS, count, channels, size, size), {}
    else:
        for side in (2, 4, 8, 16):
            yield (ROWS, channels, side * patch, side * patch), {}
    yield (ROWS, deep, patch, patch, channels), {}
    yield (ROWS, deep, channels, patch, patch), {}


def _pooled(part: Any, width: int) -> Iterator[tuple[tuple[int, ...], dict[str, Tensor]]]:
    """Images of one crop as rows of patches, with the list of the patches that each token of the image pools."""
    size, patch = number(part, ("image_size",)) or 0, number(part, ("patch_size",)) or 1
    side = size // patch
    if side < 2:
        return
    first = side * torch.arange(0, side - 1, 2)[:, None] + torch.arange(0, side - 1, 2)
    square = torch.stack([first + row * side + column for row in (0, 1) for column in (0, 1)], -1).view(-1, 4)
    tokens = torch.cat([square + image * side * side for image in range(ROWS)])
    more = {
        "image_token_pooling": tokens,
        "image_grids": torch.tensor([[side // 2, side // 2, 0, 0]] * ROWS),
        "image_num_crops": torch.ones(ROWS, dtype=torch.long),
    }
    yield (ROWS, side * side, width), more


def _companions(
    names: Mapping[str, Any], shape: tuple[int, ...], part: Any, config: Any, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """The inputs that accompany pixels of a shape, in decreasing number."""
    given: dict[str, Tensor] = {}
    size = number(part, SIDES)
    if "image_sizes" in names:
        given["image_sizes"] = torch.tensor([[size, size] if size is not None else list(shape[-2:])] * ROWS)
    if "high_res_pixel_values" in names:
        other = config.high_res_vision_config
        high, channels = number(other, ("image_size",)) or 1, number(other, ("num_channels",)) or 3
        given["high_res_pixel_values"] = torch.full((ROWS, channels, high, high), VALUE, dtype=dtype)
    if "aspect_ratio_ids" in names:
        given["aspect_ratio_ids"] = torch.ones(shape[:2], dtype=torch.long)
        given["aspect_ratio_mask"] = torch.ones(shape[:3], dtype=torch.long)
    if "qformer_input_ids" in names:
        given["qformer_input_ids"] = torch.ones(ROWS, 3, dtype=torch.long)
    masks = [name for name in ("pixel_attention_mask", "image_attention_mask", "pixel_mask") if name in names]
    for dims in _mask_shapes(shape, part) if masks else ():
        yield {**given, **{name: torch.ones(dims, dtype=torch.bool) for name in masks}}
    yield given
    if "image_sizes" in given and len(given) == 1:
        yield {}


def _mask_shapes(shape: tuple[int, ...], part: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of masks over images, over the patches of a row, over pixels, or over the patches of an image."""
    if len(shape) >= 4:
        yield (*shape[:-3], *shape[-2:])
    if len(shape) in (3, 5):
        yield shape[:2]
    if len(shape) == 5:
        yield ROWS, TOKENS, shape[1]  # which tokens see which images
    patch = number(part, ("patch_size",)) or 1
    if len(shape) == 5 and not shape[-1] % patch:
        yield (*shape[:2], shape[-1] // patch, shape[-1] // patch)


def _flattened(config: Any, dtype: torch.dtype) -> Iterator[Media]:
    """Patches that begin with the numbers of their row and column (Pix2Struct)."""
    for part in parts_of(config):
        width = number(part, ("patch_embed_hidden_size",))
        if width is not None:
            values = torch.full((ROWS, 6, 2 + width), VALUE, dtype=dtype)
            values[..., 0] = torch.tensor([1, 1, 1, 2, 2, 2])
            values[..., 1] = torch.tensor([1, 2, 3, 1, 2, 3])
            yield Media(kind="image", inputs={PATCHES: values})


def _samples(name: str, padded: bool, dtype: torch.dtype) -> Iterator[Media]:
    """Recordings as samples, of several lengths, one of which is a whole number of frames."""
    for samples in (4096, 16384, 16000):
        for shape in ((ROWS, samples), (ROWS, 1, samples)):
            inputs = {name: torch.full(shape, VALUE, dtype=dtype)}
            yield Media(kind="audio", inputs=inputs)
            if padded:
                yield Media(
                    kind="audio", inputs={**inputs, "padding_mask": torch.ones(ROWS, samples, dtype=torch.bool)}
                )


def _recordings(name: str, names: Mapping[str, Any], config: Any, dtype: torch.dtype) -> Iterator[Media]:
    masks = [
        other
        for other in (f"{name}_mask", "feature_attention_mask", "audio_attention_mask", "attention_mask")
        if other in names and not (other == "attention_mask" and "input_ids" in names)
    ]
    if name == "input_values":
        yield from _samples(name, "padding_mask" in names, dtype)
        return
    words = ("audio", "speech", "encoder", "sound")
    for _, part in _described(config, words, BINS):
        # Some models stack the bins of several frames and give the width of a stack in another field.
        widths = dict.fromkeys(bins for name in BINS if (bins := number(part, (name,))))
        bound = number(part, FRAMES)
        lengths = dict.fromkeys((2 * bound if bound and 2 * bound <= MOST_FRAMES else 200, 200, 24))
        for bins, frames in itertools.product(widths, lengths):
            for shape in ((ROWS, bins, frames), (ROWS, frames, bins)):
                values = torch.full(shape, VALUE, dtype=dtype)
                cover = torch.ones(ROWS, frames, dtype=torch.long)
                for kind in (torch.long, torch.bool) if masks else ():
                    yield Media(kind="audio", inputs={name: values, masks[0]: cover.to(kind)}, most=frames)
                yield Media(kind="audio", inputs={name: values}, most=frames)
