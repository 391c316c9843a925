"""What a model's encoder reads under a set-up: how many images, recordings or source tokens a micro-batch has.

Knows: which fields of a set-up concern an encoder, and which of them apply to a model. Does not know: what a layer
costs (`layer_pricing.py`), or how a table is made (`table.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.fields import TOWERS
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import ModelSpec

NEARLY_NONE = 1e-6
"""The time of an encoder's layer for a micro-batch without items, as a share of its mean time. It stands for zero,
because factors of a cost table must be positive."""


def settled(spec: ModelSpec, setup: Setup) -> tuple[ModelSpec, Setup]:
    """Return the model reading the items that the set-up describes, and the set-up with the open fields filled in.

    These are the number and size of the items, and the numbers of the encoder's layers if the set-up freezes `towers`.
    A plain decoder is returned unchanged. Raise an error if the set-up describes items that the model cannot read, or
    that do not fit in a sequence.
    """
    source = spec.source
    if source is None:
        for name in ("images", "encoder_seq"):
            if getattr(setup, name):
                raise OctoPipeError(f"{spec.name} has no tower and no encoder; {name} has no effect; leave it out")
        if TOWERS in setup.frozen:
            raise OctoPipeError(f"{spec.name} has no tower and no encoder to freeze; name layers, as in 0-15")
        return spec, setup
    if setup.images:
        if source.is_attended:
            raise OctoPipeError(
                f"{spec.name} is an encoder-decoder, which reads one {source.words()} per sequence; leave images out"
            )
        source = source.per(sequence=sum(setup.images) / len(setup.images))
    positions = setup.encoder_seq
    if positions is None and source.kind == "text" and source.free:
        positions = setup.seq  # source texts are assumed to be as long as the decoder's unless a length is given
    if positions is not None and positions != source.positions:
        if not source.free:
            raise OctoPipeError(
                f"{spec.name} reads every {source.words()} as {source.positions} positions; leave encoder_seq out"
            )
        source = source.of_size(positions)
    if setup.seq is not None and not setup.micro_batch_lengths:
        most = max(setup.images) if setup.images else source.items
        if most * source.tokens > setup.seq:
            raise OctoPipeError(
                f"{most:g} {source.words()}s of {source.tokens} tokens do not fit in a sequence of {setup.seq}; give a "
                "longer seq, fewer images, or a smaller encoder_seq"
            )
    if TOWERS in setup.frozen:
        others = [pair for pair in setup.frozen if pair != TOWERS]
        setup = replace(setup, frozen=tuple(sorted({*others, *spec.towers})))
    said = setup.images if setup.images or source.is_attended else (source.items,)
    setup = replace(setup, images=said, encoder_seq=source.positions)
    return spec if source == spec.source else spec.reading(source), setup


def items_of_micro_batches(setup: Setup, sizes: Sequence[int]) -> list[float]:
    """Return the mean number of items per sequence for each micro-batch. `sizes`: sequences of each micro-batch."""
    if sum(sizes) != len(setup.images):
        raise OctoPipeError(
            f"images of {len(setup.images)} sequences for {len(sizes)} micro-batches with {sum(sizes)} sequences; give "
            "one number per sequence of a pipeline's step"
        )
    ends = itertools.accumulate(sizes)
    return [sum(setup.images[end - size : end]) / size for end, size in zip(ends, sizes, strict=True)]
