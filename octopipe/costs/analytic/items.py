"""What a model's encoder reads under a set-up: how many images, recordings or source tokens a micro-batch has.

Knows: which fields of a set-up concern an encoder, and which of them apply to a model. Does not know: what a layer
costs (`layer_pricing.py`), or how a table is made (`table.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.fields import TOWERS
from octopipe.costs.cluster.item_counts import check_lists, of_one_tower
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import ModelSpec, Source

NEARLY_NONE = 1e-6
"""The time of an encoder's layer for a micro-batch without items, as a share of its mean time. It stands for zero,
because factors of a cost table must be positive."""


def settled(spec: ModelSpec, setup: Setup) -> tuple[ModelSpec, Setup]:
    """Return the model reading the items that the set-up describes, and the set-up with the open fields filled in.

    These are the number and size of the items, and the numbers of the encoder's layers if the set-up freezes `towers`.
    A plain decoder is returned unchanged. Raise an error if the set-up describes items that the model cannot read, or
    that do not fit in a sequence.
    """
    if not spec.sources:
        for name in ("images", "recordings", "encoder_seq"):
            if getattr(setup, name):
                raise OctoPipeError(f"{spec.name} has no tower and no encoder; {name} has no effect; leave it out")
        if TOWERS in setup.frozen:
            raise OctoPipeError(f"{spec.name} has no tower and no encoder to freeze; name layers, as in 0-15")
        return spec, setup
    if len(spec.sources) == 1:
        setup = replace(setup, images=of_one_tower(setup.images, setup.recordings, spec.name), recordings=())
    check_lists(setup.images, setup.recordings)
    sources = tuple(_counted(spec, source, setup) for source in spec.sources)
    free = next((source for source in sources if source.free), sources[0])
    positions = setup.encoder_seq
    if positions is None and free.kind == "text" and free.free:
        positions = setup.seq  # source texts are assumed to be as long as the decoder's unless a length is given
    if positions is not None and positions != free.positions:
        if not free.free:
            raise OctoPipeError(
                f"{spec.name} reads every {free.words()} as {free.positions} positions; leave encoder_seq out"
            )
        sources = tuple(source.of_size(positions) if source is free else source for source in sources)
    if setup.seq is not None and not setup.micro_batch_lengths:
        _check_fits(sources, setup, setup.seq)
    if TOWERS in setup.frozen:
        others = [pair for pair in setup.frozen if pair != TOWERS]
        setup = replace(setup, frozen=tuple(sorted({*others, *spec.towers})))
    for source in sources:
        if not source.is_attended and not counts_of(source, sources, setup):
            told: dict[str, Any] = {_field(source, sources): (source.items,)}
            setup = replace(setup, **told)
    setup = replace(setup, encoder_seq=positions or free.positions)
    return spec if sources == spec.sources else spec.reading(*sources), setup


def _field(source: Source, sources: Sequence[Source]) -> str:
    """Return the field of a set-up that counts a source's items: `recordings` only if there are images as well."""
    return "recordings" if len(sources) > 1 and source.kind == "audio" else "images"


def counts_of(source: Source, sources: Sequence[Source], setup: Setup) -> tuple[float, ...]:
    """Return the numbers of a source's items per sequence; `sources`: those of all towers of the model."""
    counts: tuple[float, ...] = getattr(setup, _field(source, sources))
    return counts


def _counted(spec: ModelSpec, source: Source, setup: Setup) -> Source:
    counts = counts_of(source, spec.sources, setup)
    if not counts:
        return source
    if source.is_attended:
        raise OctoPipeError(
            f"{spec.name} is an encoder-decoder, which reads one {source.words()} per sequence; leave images out"
        )
    return source.per(sequence=sum(counts) / len(counts))


def _check_fits(sources: Sequence[Source], setup: Setup, seq: int) -> None:
    """Raise an error if the items of a sequence occupy more tokens than it has."""
    counts = [counts_of(source, sources, setup) or (source.items,) for source in sources]
    length = max(map(len, counts))
    rows = [row * length if len(row) == 1 else row for row in counts]
    for each in zip(*rows, strict=True):
        if sum(count * source.tokens for count, source in zip(each, sources, strict=True)) > seq:
            told = zip(each, sources, strict=True)
            what = " and ".join(f"{count:g} {source.words()}s of {source.tokens} tokens" for count, source in told)
            fewer = " or ".join(_field(source, sources) for source in sources)
            raise OctoPipeError(
                f"{what} do not fit in a sequence of {seq}; give a longer seq, fewer {fewer}, or a smaller encoder_seq"
            )


def items_of_micro_batches(sources: Sequence[Source], setup: Setup, sizes: Sequence[int]) -> list[tuple[float, ...]]:
    """Return the mean number of items per sequence for each micro-batch, one for each source. `sizes`: sequences of
    each micro-batch."""
    out = []
    for source in sources:
        counts = counts_of(source, sources, setup)
        if len(counts) < 2:  # the same for every sequence
            out.append([source.items] * len(sizes))
            continue
        if sum(sizes) != len(counts):
            raise OctoPipeError(
                f"{_field(source, sources)} of {len(counts)} sequences for {len(sizes)} micro-batches with "
                f"{sum(sizes)} sequences; give one number per sequence of a pipeline's step"
            )
        ends = itertools.accumulate(sizes)
        out.append([sum(counts[end - size : end]) / size for end, size in zip(ends, sizes, strict=True)])
    return list(zip(*out, strict=True))
