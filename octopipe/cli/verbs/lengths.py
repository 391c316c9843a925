"""Micro-batches of sequences that differ in length or in their number of images.

Knows: which flags say how sequences become micro-batches, and what they exclude. Does not know: how sequences are
padded, packed or grouped (models/lengths.py, search/batching.py).
"""

from __future__ import annotations

import argparse

from octopipe.cli.verbs.flags import flag_of, setting_from


def settle_images(args: argparse.Namespace) -> None:
    """Set `args.images` and `args.recordings` to the numbers of every sequence in a step, read from their file, or to
    one number.

    Without other sizes, the sequences in a file also determine the number of micro-batches.
    """
    from octopipe.base.errors import OctoPipeError
    from octopipe.costs.cluster.item_counts import ItemCounts

    for name in ("images", "recordings"):
        if getattr(args, name, None) is None:
            continue
        counts = ItemCounts().read(f"--{name}", getattr(args, name))
        setattr(args, name, list(counts) if len(counts) > 1 else counts[0])
        if len(counts) < 2:
            continue
        if getattr(args, "lengths", None) is not None:
            if getattr(args, "batching", None) == "dynamic" or (args.dp or 1) > 1:
                raise OctoPipeError(
                    f"--{name} for every sequence needs micro-batches in the file's order; leave --dynamic and --dp "
                    "out, or give one number"
                )
            continue
        size = args.micro_batch_size or 1
        if len(counts) % size:
            raise OctoPipeError(
                f"--{name} of {len(counts)} sequences do not make micro-batches of {size}; give a multiple"
            )
        if args.micro_batches is None and args.global_batch is None:
            args.micro_batches = len(counts) // size


def settle_lengths(args: argparse.Namespace, model: str, batching: str | None = None) -> None:
    """Set `args.micro_batch_lengths` to the micro-batches that a file of lengths makes. With several pipelines, they
    are those of the pipeline with the most work. `batching` overrides the flags."""
    from octopipe.base.errors import OctoPipeError

    how = batching or getattr(args, "batching", None)
    if getattr(args, "lengths", None) is None:
        if how is not None and getattr(args, "micro_batch_lengths", None) is None:
            raise OctoPipeError(f"--{how} groups sequences of different length; give --lengths")
        return
    from octopipe.costs.resolve import resolve_spec
    from octopipe.models.lengths import Batch, distributed, packed_groups, padded_groups, read_lengths

    how = how or ("dynamic" if getattr(args, "system", None) == "dynapipe" else "pad")
    if args.global_batch is not None:
        raise OctoPipeError(f"{args.lengths} determines how many sequences a step has; leave --global-batch out")
    for flag, only in (("micro_batch_size", "pad"), ("seq", "pack")):
        if getattr(args, flag) is not None and how != only and batching is None:
            raise OctoPipeError(f"{flag_of(flag)} applies to --{only} only; leave it out with --{how}")
    lengths = read_lengths(args.lengths)
    spec = resolve_spec(model)
    if spec is None:
        raise OctoPipeError(f"{model}: lengths need a preset or a config.json; a file of times covers one length only")
    if how == "dynamic":
        from octopipe.costs.resolve import resolve_costs
        from octopipe.search.batching import dynamic_groups

        other = ("model", "speeds", "seq", "recompute", "micro_batch_size", "micro_batch_lengths", "packed")
        given = {k: v for k, v in setting_from(args).items() if k not in (*other, "tokens_per_pipeline")}
        setup = resolve_costs(spec, pp=args.pp, **given).setup
        assert setup is not None
        groups = dynamic_groups(spec, setup, lengths)
    elif how == "pack":
        groups = packed_groups(lengths, args.seq or max(lengths))
    else:
        groups = padded_groups(lengths, args.micro_batch_size or 1)
    batch = Batch(groups=groups, packed=how == "pack")
    if (args.dp or 1) > 1:
        args.tokens_per_pipeline = round(batch.tokens / args.dp)
        batch = Batch(groups=distributed(groups, args.dp, lambda g: float(batch.tokens_of(g)))[0], packed=batch.packed)
    args.micro_batch_lengths = [list(group) for group in batch.groups]
    args.packed = batch.packed or None
    args.micro_batches = len(batch.groups)
    args.seq = args.micro_batch_size = None
    args.lengths_file, args.lengths = args.lengths, None
