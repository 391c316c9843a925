"""Functions that verbs share: costs from the flags of a model and a set-up, JSON output, a console for terminals and
pipes.

Knows: how flags become costs, and which of them have no effect for a MODEL. Does not know: any verb. The flags
themselves (flags.py) and text helpers (text.py) are re-exported from here.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from octopipe.cli.verbs.flags import (
    add_batch_arguments,
    add_hardware_arguments,
    add_length_arguments,
    add_model_arguments,
    add_setting_arguments,
    add_training_arguments,
    destination,
    flag_of,
    non_negative,
    number_list,
    seed_number,
    setting_from,
    whole_number,
    width_factor,
)
from octopipe.cli.verbs.text import BRACKET, counted, named

if TYPE_CHECKING:
    from rich.console import Console

    from octopipe.costs.cluster.setup import Setup
    from octopipe.costs.table import CostTable

PROFILED = ("images", "recordings", "encoder_seq", "frozen")
"""Flags of `octopipe profile` for an encoder's input and for what is trained."""
DOES_NOT_FIT = 3
"""Exit code of a verb whose answer is a plan that does not fit in memory."""


def of_a_model() -> tuple[str, ...]:
    """Return the flags that have no effect on measured layer times, which already include them."""
    from octopipe.costs.cluster.asking import flag_fields

    fields = (destination(name, how) for name, how in flag_fields().items() if how.of_a_model)
    return (*fields, "gpus", "lengths")


def model_from(args: argparse.Namespace) -> str:
    """Return the value of MODEL or --profile; raise OctoPipeError if both or neither are given."""
    from octopipe.base.errors import OctoPipeError

    if getattr(args, "profile", None):
        if args.model:
            raise OctoPipeError(f"--profile {args.profile} stands for the model; leave {args.model} out")
        args.model = args.profile
    if not args.model:
        raise OctoPipeError("no model; give a preset (`octopipe models`), a file, or --profile FILE")
    return str(args.model)


def refuse_idle_flags(args: argparse.Namespace, model: str) -> None:
    """Raise OctoPipeError for flags that cannot change the answer, such as those that measured times include."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.costs.resolve import resolve_measured
    from octopipe.costs.routing import cannot_change

    table = resolve_measured(model)
    if table is None:
        return
    idle = cannot_change(table.routing, table.segments)
    if getattr(args, "imbalance", None) is not None and idle:
        raise OctoPipeError(f"--imbalance changes nothing for {model}: {idle}; leave it out")
    for name in of_a_model():
        if name != "imbalance" and getattr(args, name, None) is not None:
            remedy = "leave it out"
            if name in PROFILED and "J" in table.symbols:
                remedy = (
                    f"measure with it (octopipe profile {flag_of(name)} ...), or give the model's config.json or preset"
                    + (f", which prices the {name} of every sequence" if name in ("images", "recordings") else "")
                )
            raise OctoPipeError(
                f"{flag_of(name)} changes nothing for {model}: its times were measured and cannot be recomputed; "
                f"{remedy}"
            )
    linked = bool(table.boundary_bytes.any()) and not table.network.pairs and args.p2p_ms is None
    reduces = bool(table.gradient_bytes.any()) and (args.dp or 1) > 1
    if args.gpu is not None and not linked and not reduces:
        raise OctoPipeError(
            f"--gpu {args.gpu} changes nothing for {model}: its times were measured, and no transfer needs the GPU's "
            "links; leave it out"
        )
    if args.seq is not None and table.tokens_per_micro_batch is not None:
        raise OctoPipeError(
            f"--seq {args.seq} changes nothing for {model}, measured with {table.tokens_per_micro_batch} tokens; "
            "leave it out"
        )
    if (args.dp or 1) > 1 and not reduces and getattr(args, "jitter", None) is None:
        raise OctoPipeError(
            f'--dp {args.dp} changes nothing for {model}: the file has no "gradient_gib" to reduce; add it, or leave '
            "--dp out"
        )
    if args.reserve_gib is not None and not table.rank_memory_bytes and not args.memory_gib:
        raise OctoPipeError(f"--reserve-gib changes nothing for {model}: no memory limit is known; give --memory-gib")


def settle_sizes(args: argparse.Namespace, model: str) -> None:
    """Fill in sizes that follow from --gpus or a cluster file, and the number of micro-batches of a global batch."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.costs.cluster.sizes import derived_sizes, micro_batches_of

    gpus = args.gpus
    if args.cluster is not None and gpus is None:
        from octopipe.costs.cluster.file import count_gpus, read_cluster

        gpus = count_gpus(read_cluster(args.cluster))
    sizes = derived_sizes(gpus=gpus, tp=args.tp, cp=args.cp, pp=args.pp, dp=args.dp)
    if gpus is not None and sizes["tp"] is None and sizes["dp"] is None:
        from octopipe.costs.resolve import resolve_costs, resolve_spec

        pp = sizes["pp"] or 1
        spec = resolve_spec(model)
        sizes["tp"] = 1 if spec is None else resolve_costs(spec, pp=pp, gpu=args.gpu, nodes=args.cluster).setup.tp  # type: ignore[union-attr]
        sizes = derived_sizes(gpus=gpus, **sizes)
    if sizes["pp"] is None:
        raise OctoPipeError("the number of ranks is missing; give --pp, or --gpus and the other sizes, or a --plan")
    args.pp = sizes["pp"]
    if gpus is not None:
        args.tp, args.dp = sizes["tp"], sizes["dp"]
    for name, values in (("speeds", args.speeds), ("memory_gib", args.memory_gib)):
        if values and len(values) != args.pp and (name == "speeds" or len(values) != 1):
            allowed = "one per rank" if name == "speeds" else f"1 or {args.pp}"
            raise OctoPipeError(f"{flag_of(name)} gives {len(values)} numbers for {args.pp} ranks; give {allowed}")
    if getattr(args, "lengths", None) is not None and args.micro_batches is not None:
        raise OctoPipeError(f"{args.lengths} and its batching make the micro-batches; leave --micro-batches out")
    args.micro_batches = micro_batches_of(
        global_batch=args.global_batch,
        micro_batch_size=args.micro_batch_size or _measured_sequences(model),
        dp=args.dp or 1,
        pp=args.pp,
        given=args.micro_batches,
    )


def _measured_sequences(model: str) -> int:
    """Return the sequences of a micro-batch in a file of times; 1 if MODEL is not one, or does not state them."""
    from octopipe.costs.resolve import resolve_measured

    table = resolve_measured(model)
    return 1 if table is None or table.setup is None else table.setup.micro_batch_size


def costs_from(args: argparse.Namespace, **changes: Any) -> CostTable:
    """Return the cost table that the model and set-up flags describe; `CostTable.setup` is the set-up."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.cli.verbs.lengths import settle_images, settle_lengths
    from octopipe.costs.resolve import resolve_costs, resolve_spec

    model = model_from(args)
    refuse_idle_flags(args, model)
    settle_images(args)
    settle_sizes(args, model)
    settle_lengths(args, model)
    given = setting_from(args)
    given.pop("model")
    if given.get("recompute") == "auto":
        given["recompute"] = "none"  # "auto" starts without recomputation
    source: Any = model
    if getattr(args, "mtp", False):
        spec = resolve_spec(model)
        if spec is None:
            raise OctoPipeError(f"{model} contains times, and says itself whether its layers fork; leave --mtp out")
        source = spec.with_prediction_paths()
    return resolve_costs(source, pp=args.pp, micro_batches=args.micro_batches, **(given | changes))


class PriceFrom:
    """A function that returns the costs that the flags describe, under any mode of recomputation."""

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def __call__(self, mode: str, layers: int | None = None, /) -> CostTable:
        return costs_from(self.args, recompute=mode, recompute_layers=layers)


def provenance(args: argparse.Namespace, costs: CostTable) -> dict[str, Any]:
    """Return what a plan file stores about its origin; used as `plan.with_extra(**provenance(args, costs))`."""
    from octopipe.plans.setting import carried

    return carried(costs, setting_from(args))


def setup_words(setup: Setup | None) -> str:
    return "" if setup is None else setup.words()


def micro_batches_from(args: argparse.Namespace) -> int:
    return args.micro_batches or 2 * args.pp


def print_json(value: Any) -> None:
    """Print one JSON object on stdout; numbers that are not finite become null."""
    import msgspec

    from octopipe.base.files import plain
    from octopipe.cli.verbs.screen import json_without_control

    text = json_without_control(msgspec.json.format(msgspec.json.encode(value, enc_hook=plain), indent=1).decode())
    if not (sys.stdout.encoding or "utf-8").lower().startswith("utf"):
        # An encoding that lacks a character gets JSON's escape for it, so that readers get the original text.
        text = _escaped(text)
    sys.stdout.write(text + "\n")


def _escaped(text: str) -> str:
    from json import dumps, loads

    return dumps(loads(text), indent=1)


def console(*, stderr: bool = False) -> Console:
    """Return a rich console that prints names literally; colour only on a terminal, never with NO_COLOR."""
    from octopipe.cli.verbs.screen import Screen

    return Screen(stderr=stderr)


__all__ = [
    "BRACKET",
    "DOES_NOT_FIT",
    "PriceFrom",
    "add_batch_arguments",
    "add_hardware_arguments",
    "add_length_arguments",
    "add_model_arguments",
    "add_setting_arguments",
    "add_training_arguments",
    "console",
    "costs_from",
    "counted",
    "flag_of",
    "micro_batches_from",
    "model_from",
    "named",
    "non_negative",
    "number_list",
    "print_json",
    "provenance",
    "refuse_idle_flags",
    "seed_number",
    "setting_from",
    "settle_sizes",
    "setup_words",
    "whole_number",
    "width_factor",
]
