"""What a micro-batch of a model with a tower or an encoder consists of: made-up images and recordings around tokens.

Knows: the inputs of a model's example (`examples.py`), how many places an image or a recording takes in a sequence, and
how sequences with different numbers of them form a micro-batch. Does not know: real data, plans or devices. A form is
made once, in the process that parses the command line, and sent to every rank.

Images and recordings of real data are what the model's own processor makes of them; `runtime/training/data/samples.py`
reads those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.examples import MARKS, MASK, token_of
from octopipe.huggingface.media import PATCHES, ROWS, TOKENS
from octopipe.models.readers.hf_towers import ANY_SIZE_TOKENS

IGNORED = -100
GRID = "image_grid_thw"
MOST_DIMS = 4
"""Features of an item with more dimensions have one row per sequence (its images, or the tiles of its image)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputForm:
    """The inputs of a model that takes more than tokens, per item and per sequence."""

    features: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Floating-point inputs: the shape for one item. Items are concatenated along the first dimension."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Integer inputs with one row per item: the row, as a number or (nested) tuples of numbers."""
    masks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Masks of an item's valid pixels or frames (all are valid): the shape for one item."""
    one_each: bool = False
    """Whether every sequence has exactly one item, so that features have one row per sequence."""
    marks: tuple[str, ...] = ()
    masked: bool = False
    """Whether the model requires an attention mask."""
    source_tokens: int = 0
    """Tokens of an encoder's source text; 0: the encoder reads features."""
    decodes: bool = False
    """Whether this is an encoder-decoder, which reads one item per sequence and predicts `decoder_input_ids`."""
    start: int = 0
    """The decoder's first token."""
    places: int = 0
    """The number of tokens that an item occupies in a sequence, including the token before it; 0: none."""
    token: int = 0
    """The placeholder token of an item's features."""
    before: int | None = None
    """The token that precedes an item's placeholders, if the model needs one."""
    vocab: int = 2
    images: tuple[float, ...] = ()
    """Items per sequence: one (mean) number for all, or one for every sequence of a pipeline's step; empty: 1."""
    positions: int = 0
    """The encoder's sequence length for one item, if items may have any size; 0 if the model fixes it."""
    num_tower_layers: int = 0
    """The number of the encoder's layers, which are the first ones."""

    def items(self, sequences: int) -> list[int]:
        """The number of items in each of a pipeline's sequences; a fractional mean is spread evenly."""
        if self.decodes or self.one_each:
            return [1] * sequences
        if len(self.images) > 1:
            if len(self.images) != sequences:
                raise OctoPipeError(
                    f"images of {len(self.images)} sequences for a pipeline's step of {sequences}; give one for each"
                )
            return [int(count) for count in self.images]
        mean = self.images[0] if self.images else 1.0
        return [math.floor((k + 1) * mean + 1e-9) - math.floor(k * mean + 1e-9) for k in range(sequences)]

    def typical(self, sequences: int) -> list[int]:
        """The number of items in each sequence of a micro-batch that is measured: the mean, and at least one in total
        unless the mean is 0."""
        if self.decodes or self.one_each:
            return [1] * sequences
        mean = sum(self.images) / len(self.images) if self.images else 1.0
        total = max(1, round(mean * sequences)) if mean else 0
        return [total // sequences + (k < total % sequences) for k in range(sequences)]

    def check_fits(self, seq: int) -> None:
        """Raise an error if a sequence is too short for its items."""
        most = max(self.images, default=1.0)
        if most * self.places > seq:
            size = " and a smaller --encoder-seq" if self.positions else ""
            raise OctoPipeError(
                f"{most:g} images of {self.places} tokens do not fit in a sequence of {seq}; use a longer --seq, fewer "
                f"--images{size}"
            )

    def made_up(
        self, tokens: Tensor, items: Sequence[int], *, seed: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs and next tokens of a micro-batch.

        `tokens`: [rows, seq + 1]; the items replace the first tokens of their sequence. `seed`: one per row, for the
        values of its items.
        """
        if self.decodes:
            inputs = {"decoder_input_ids": tokens[:, :-1].contiguous()}
            if self.source_tokens:
                width = tokens.shape[1]
                inputs["input_ids"] = tokens.repeat(1, -(-self.source_tokens // width))[:, : self.source_tokens]
            return {**inputs, **self._values(items, seed, dtype)}, tokens[:, 1:].contiguous()
        rows = tokens.clone()
        item = [] if self.before is None else [self.before]
        item += [self.token] * (self.places - len(item))
        rows[rows == self.token] = (self.token + 1) % self.vocab  # ordinary tokens must not be placeholders
        for row, count in enumerate(items):
            rows[row, : count * self.places] = torch.tensor(item * count)
        ids, wanted = rows[:, :-1].contiguous(), rows[:, 1:].clone()
        for row, count in enumerate(items):
            if self.places:
                wanted[row, : max(count * self.places - 1, 0)] = IGNORED
        inputs = {"input_ids": ids, **{name: (ids == self.token).long() for name in self.marks}}
        if self.masked:
            inputs[MASK] = torch.ones_like(ids)
        return {**inputs, **self._values(items, seed, dtype)}, wanted

    def ignored(self, count: int) -> int:
        """The number of targets of a sequence with this number of items that the loss ignores."""
        return 0 if self.decodes else max(count * self.places - 1, 0)

    def _values(self, items: Sequence[int], seed: Sequence[int], dtype: torch.dtype) -> dict[str, Tensor]:
        """The features of all items; empty if the micro-batch has no items."""
        total = sum(items)
        if not total:
            return {}
        out: dict[str, Tensor] = {}
        for name, shape in self.features.items():
            parts = []
            for count, number in zip(items, seed, strict=True):
                generator = torch.Generator().manual_seed(number & (2**63 - 1))
                if count:
                    parts.append(torch.randn(count * shape[0], *shape[1:], generator=generator))
            out[name] = torch.cat(parts).to(dtype)
        if PATCHES in out:  # patches begin with the numbers of their row and column
            out[PATCHES][..., :2] = torch.arange(1, out[PATCHES].shape[1] + 1)[:, None].to(dtype)
        out |= {name: torch.ones(total, *shape, dtype=torch.bool) for name, shape in self.masks.items()}
        out |= {name: torch.tensor([row] * total) for name, row in self.numbers.items()}
        return out


def form_of(
    example: Mapping[str, Any], config: Any, *, num_tower_layers: int, vocab: int, where: str = "the model"
) -> InputForm:
    """The form of an example's inputs (`examples.example_of`)."""
    given = {name: value for name, value in example.items() if isinstance(value, Tensor)}
    decodes = "decoder_input_ids" in given
    ids = given.pop("input_ids", None)
    targets = given.pop("decoder_input_ids", None)
    masked = given.pop(MASK, None) is not None
    by_item = {name: value for name, value in given.items() if value.shape[0] % ROWS == 0}
    features = {
        name: (value.shape[0] // ROWS, *value.shape[1:]) for name, value in by_item.items() if value.is_floating_point()
    }
    marks = tuple(name for name in MARKS if name in given)
    rows = {name: value for name, value in by_item.items() if name not in (*marks, *features) and len(value) == ROWS}
    masks = {name: tuple(value.shape[1:]) for name, value in rows.items() if value.dtype == torch.bool}
    numbers = {name: _tuples(value[0].tolist()) for name, value in rows.items() if name not in masks}
    left = sorted(given.keys() - features.keys() - numbers.keys() - masks.keys() - set(marks))
    left += ["decoder_input_ids of several channels"] if targets is not None and targets.ndim > 2 else []
    if left or (decodes and features and ids is not None):
        raise OctoPipeError(
            f"{where}: it is not known how batches of {', '.join(left) or 'its inputs'} are made up; train it in a "
            "loop of your own, with octopipe.huggingface.layers"
        )
    if decodes:
        tokens = 0 if ids is None else int(ids.shape[1])
        return InputForm(
            features=features, source_tokens=tokens, decodes=True, vocab=vocab, num_tower_layers=num_tower_layers,
            positions=tokens, start=int(getattr(config, "decoder_start_token_id", None) or 0),
        )  # fmt: skip
    assert ids is not None
    tokens_of = [token_of(config, kind) for kind in ("image", "video", "audio")]
    token = next((t for t in tokens_of if t is not None and t in ids[0].tolist()), None)
    marked = 0 if token is None else int((ids[0] == token).sum())
    if not marked and (ids.shape[1] != TOKENS or marks):
        raise OctoPipeError(f"{where}: its config names no token that stands for {', '.join(features)}; give one")
    before = getattr(config, "vision_start_token_id", None) if marked else None
    before = None if before is None or int(before) not in ids[0].tolist() else int(before)
    form = InputForm(
        features=features, numbers=numbers, masks=masks, masked=masked, marks=marks,
        places=marked + (before is not None), token=token or 0, before=before,
        vocab=vocab, num_tower_layers=num_tower_layers,
        one_each=not marked or any(len(shape) > MOST_DIMS for shape in features.values()),
    )  # fmt: skip
    return _of_any_size(form, ANY_SIZE_TOKENS * _merged(form)) if GRID in numbers else form


def _tuples(value: Any) -> Any:
    """Nested lists as nested tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def with_items(
    form: InputForm, config: Any, *, images: tuple[float, ...], encoder_seq: int | None, seq: int, where: str
) -> InputForm:
    """The form with another number of items, or with items of another size."""
    if images and form.decodes:
        raise OctoPipeError(f"{where} is an encoder-decoder, which reads one input per sequence; leave --images out")
    if images and form.one_each:
        why = "stand row by row, as the sequences do" if form.places else "occupy no tokens of the sequence"
        raise OctoPipeError(f"{where}: its images {why}, and each sequence has one; leave --images out")
    if any(count != int(count) for count in images) and len(images) > 1:
        raise OctoPipeError(f"{where}: --images of single sequences are whole numbers; give no fractions in a list")
    form = replace(form, images=images)
    if form.decodes and form.source_tokens:
        tokens = encoder_seq or seq
        form = replace(form, source_tokens=tokens, positions=tokens)
    elif encoder_seq is not None:
        if GRID not in form.numbers:
            raise OctoPipeError(f"{where}: the model fixes the size of what its encoder reads; leave --encoder-seq out")
        form = _of_any_size(form, encoder_seq)
    form.check_fits(seq)
    return form


def _merged(form: InputForm) -> int:
    """The number of patches of an image that become one token."""
    _, high, wide = form.numbers[GRID]
    return int(high * wide // (form.places - (form.before is not None)))


def _of_any_size(form: InputForm, patches: int) -> InputForm:
    """Images of this number of patches, as square as the number allows."""
    each = _merged(form)
    merge, cells = math.isqrt(each), patches // each
    high = next((h for h in range(math.isqrt(max(cells, 1)), 0, -1) if cells and cells % h == 0), 0)
    if not high or cells * each != patches:
        raise OctoPipeError(f"--encoder-seq {patches} is not a multiple of {each} patches, which become one token")
    (name, shape), *_ = [(n, s) for n, s in form.features.items() if n == "pixel_values"]
    return replace(
        form,
        features={**form.features, name: (patches, *shape[1:])},
        numbers={**form.numbers, GRID: (1, high * merge, cells // high * merge)},
        places=cells + (form.before is not None),
        positions=patches,
    )
