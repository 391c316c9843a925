"""What a micro-batch of a model with a tower or an encoder consists of: made-up images and recordings around tokens.

Knows: the inputs of a model's example (`examples.py`), how many places an image or a recording takes in a sequence, and
how sequences with different numbers of them form a micro-batch. Does not know: real data, plans or devices. A form is
made once, in the process that parses the command line, and sent to every rank.

Images and recordings of real data are what the model's own processor makes of them; `runtime/training/data/samples.py`
reads those.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.item_counts import check_lists, of_one_tower
from octopipe.huggingface.examples import FRAME_MASK, MARKS, MASK, token_of
from octopipe.huggingface.media import PATCHES, RECORDINGS, ROWS, TOKENS
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
    """The number of the layers of the encoder or of all towers, which are the first ones."""
    own_layers: tuple[int, int] | None = None
    """The first of the layers that read these items, and the one behind the last; None: all of `num_tower_layers`."""
    beside: InputForm | None = None
    """The recordings of a model that reads images and recordings; its other properties are those of the images."""

    @property
    def kinds(self) -> tuple[InputForm, ...]:
        """The form of every kind of items."""
        return (self,) if self.beside is None else (self, self.beside)

    @property
    def tower_range(self) -> tuple[int, int]:
        """The first of the layers that read these items, and the one behind the last."""
        return (0, self.num_tower_layers) if self.own_layers is None else self.own_layers

    def with_towers(self, stops: Mapping[str, int]) -> InputForm:
        """The form with the layers of each tower. `stops`: the lists of their layers, with the layer behind each."""
        ranges = dict(zip(stops, zip((0, *stops.values()), stops.values()), strict=False))
        heard = [name for name in ranges if any(word in name for word in ("audio", "speech", "sound"))]
        if self.beside is None or len(ranges) != 2 or len(heard) != 1:
            raise OctoPipeError(
                f"it is not known which of the layers {', '.join(ranges)} read images, and which recordings; train the "
                "model in a loop of your own, with octopipe.huggingface.layers"
            )
        seen = next(name for name in ranges if name not in heard)
        beside = replace(self.beside, own_layers=ranges[heard[0]])
        return replace(self, own_layers=ranges[seen], beside=beside)

    def items(self, sequences: int) -> list[int]:
        """The number of items in each of a pipeline's sequences; a fractional mean is spread evenly."""
        if self.decodes or self.one_each:
            return [1] * sequences
        if len(self.images) > 1:
            if len(self.images) != sequences:
                raise OctoPipeError(
                    f"images or recordings of {len(self.images)} sequences for a pipeline's step of {sequences}; give "
                    "one for each"
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
        if self.beside is not None:
            self._check_both_fit(self.beside, seq)
        elif most * self.places > seq:
            size = " and a smaller --encoder-seq" if self.positions else ""
            raise OctoPipeError(
                f"{most:g} images of {self.places} tokens do not fit in a sequence of {seq}; use a longer --seq, fewer "
                f"--images{size}"
            )

    def _check_both_fit(self, other: InputForm, seq: int) -> None:
        length = max(len(self.images), len(other.images), 1)
        counts = (self.images or (1.0,), other.images or (1.0,))
        rows = [each * length if len(each) == 1 else each for each in counts]
        for images, recordings in zip(*rows, strict=True):
            if images * self.places + recordings * other.places > seq:
                raise OctoPipeError(
                    f"{images:g} images of {self.places} tokens and {recordings:g} recordings of {other.places} do not "
                    f"fit in a sequence of {seq}; use a longer --seq, fewer --images or --recordings, or a smaller "
                    "--encoder-seq"
                )

    def made_up(
        self,
        tokens: Tensor,
        items: Sequence[int],
        recordings: Sequence[int] = (),
        *,
        seed: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs and next tokens of a micro-batch.

        `tokens`: [rows, seq + 1]; the items replace the first tokens of their sequence. `items`: the number in every
        row; `recordings`: those of a model that reads images and recordings. `seed`: one per row, for the values of its
        items.
        """
        if self.decodes:
            inputs = {"decoder_input_ids": tokens[:, :-1].contiguous()}
            if self.source_tokens:
                width = tokens.shape[1]
                inputs["input_ids"] = tokens.repeat(1, -(-self.source_tokens // width))[:, : self.source_tokens]
            return {**inputs, **self._values(items, seed, dtype)}, tokens[:, 1:].contiguous()
        rows = tokens.clone()
        placeholders = [form.token for form in self.kinds]
        others = (token % self.vocab for token in itertools.count(self.token + 1))
        ordinary = next(token for token in others if token not in placeholders)
        for token in placeholders:
            rows[rows == token] = ordinary  # ordinary tokens must not be placeholders
        counts = list(zip(items, recordings or [0] * len(items), strict=True))
        for row, each in enumerate(counts):
            first = [token for form, count in zip(self.kinds, each) for token in form._item * count]
            rows[row, : len(first)] = torch.tensor(first, dtype=rows.dtype)
        ids, wanted = rows[:, :-1].contiguous(), rows[:, 1:].clone()
        for row, each in enumerate(counts):
            wanted[row, : self.ignored(*each)] = IGNORED
        inputs = {"input_ids": ids, **{name: (ids == self.token).long() for name in self.marks}}
        if self.masked:
            inputs[MASK] = torch.ones_like(ids)
        for form, column in zip(self.kinds, (items, recordings)):
            inputs |= form._values(column, seed, dtype)
        return inputs, wanted

    @property
    def _item(self) -> list[int]:
        """The tokens of one item."""
        before = [] if self.before is None else [self.before]
        return before + [self.token] * (self.places - len(before))

    def ignored(self, count: int, recordings: int = 0) -> int:
        """The number of targets of a sequence with these numbers of items that the loss ignores."""
        places = count * self.places + (0 if self.beside is None else recordings * self.beside.places)
        return 0 if self.decodes else max(places - 1, 0)

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
    if (both := _by_kind(example, config)) is not None:
        given_more: dict[str, Any] = {"num_tower_layers": num_tower_layers, "vocab": vocab, "where": where}
        seen, heard = (form_of(part, config, **given_more) for part in both)
        start = heard.before is not None  # the token that begins an image
        return replace(seen, beside=replace(heard, before=None, places=heard.places - start))
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
            f"{where}: octopipe cannot make up batches of {', '.join(left) or 'its inputs'}; train it in a loop of "
            "your own, with octopipe.huggingface.layers"
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


def _by_kind(example: Mapping[str, Any], config: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The inputs of an example as one with images alone and one with recordings alone; None unless it has both."""
    ids, sound = example.get("input_ids"), token_of(config, "audio")
    if ids is None or sound is None or sound not in ids[0].tolist():
        return None
    image = next((t for t in (token_of(config, kind) for kind in ("image", "video")) if t in ids[0].tolist()), None)
    if image is None:
        return None
    heard = {name for name in example if name in (*RECORDINGS, FRAME_MASK)}
    marks = [name for name in ("input_ids", MASK, *MARKS) if name in example]

    def without(token: int, names: Collection[str]) -> dict[str, Any]:
        kept = ids[0] != token
        return {
            name: example[name][:, kept] if name in marks else example[name] for name in example if name not in names
        }

    seen = {name for name in example if name not in (*heard, "input_ids", MASK)}
    return without(sound, heard), without(image, seen)


def _tuples(value: Any) -> Any:
    """Nested lists as nested tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def with_items(
    form: InputForm,
    config: Any,
    *,
    images: tuple[float, ...],
    recordings: tuple[float, ...] = (),
    encoder_seq: int | None,
    seq: int,
    where: str,
) -> InputForm:
    """The form with another number of items, or with items of another size."""
    if form.beside is None:
        images = of_one_tower(images, recordings, where, ("--images", "--recordings"))
    else:
        check_lists(images, recordings)
        _check_whole(recordings, "--recordings", where)
        form = replace(form, beside=replace(form.beside, images=recordings))
    if images and form.decodes:
        raise OctoPipeError(f"{where} is an encoder-decoder, which reads one input per sequence; leave --images out")
    if images and form.one_each:
        why = "stand row by row, as the sequences do" if form.places else "occupy no tokens of the sequence"
        raise OctoPipeError(f"{where}: its images {why}, and each sequence has one; leave --images out")
    _check_whole(images, "--images", where)
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


def _check_whole(counts: tuple[float, ...], flag: str, where: str) -> None:
    if any(count != int(count) for count in counts) and len(counts) > 1:
        raise OctoPipeError(f"{where}: {flag} of single sequences are whole numbers; give no fractions in a list")


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
