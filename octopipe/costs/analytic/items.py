"""What a model's encoder reads under a set-up: how many images, recordings or source tokens a micro-batch has.

Knows: which fields of a set-up concern an encoder, and which of them a model has a use for. Does not know: what a layer
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
"""Of the mean work of an encoder's layer, for a micro-batch without an item: it passes without work."""


def settled(spec: ModelSpec, setup: Setup) -> tuple[ModelSpec, Setup]:
    """The model on the items that the set-up describes, and the set-up with what it left open about them: their number
    and size, and which layers are the encoder's where it says that they are frozen. A plain decoder has no use for any
    of it."""
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
        positions = setup.seq  # source texts count as long as the others unless somebody says how long they are
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
    """Items per sequence of every micro-batch, on its own average. `sizes`: sequences per micro-batch."""
    if sum(sizes) != len(setup.images):
        raise OctoPipeError(
            f"images of {len(setup.images)} sequences for {len(sizes)} micro-batches with {sum(sizes)} sequences; give "
            "one number per sequence of a pipeline's step"
        )
    ends = itertools.accumulate(sizes)
    return [sum(setup.images[end - size : end]) / size for end, size in zip(ends, sizes, strict=True)]
