"""What verbs share: the flags that describe a model and a set-up, JSON out, a console that respects pipes.

Knows: argparse and rich, which flags a MODEL has no use for. Does not know: any verb.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from octopipe.base.limits import MAX_TIME_MS
from octopipe.cli.verbs.hardware_flags import add_hardware_arguments, flag_of, gpu_asked, hardware_setting, whole_number

if TYPE_CHECKING:
    from rich.console import Console

    from octopipe.costs.cluster.setup import Setup
    from octopipe.costs.table import CostTable

DOES_NOT_FIT = 3
"""Exit code of a verb whose answer is a plan that does not fit in memory."""


def seed_number(text: str) -> int:
    """An argparse type: the start of random numbers."""
    from octopipe.base.limits import MAX_SEED

    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= MAX_SEED):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a seed; give a whole number from 0 to {MAX_SEED}")
    return int(text)


def non_negative(text: str) -> float:
    """An argparse type: a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value <= MAX_TIME_MS:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a finite number >= 0, at most {MAX_TIME_MS:g}")
    return value


def number_list(text: str) -> list[float]:
    """An argparse type: numbers > 0 separated by commas."""
    values = [non_negative(part) for part in text.split(",")]
    if any(v == 0 for v in values):
        raise argparse.ArgumentTypeError(f"{text}: every number must be > 0")
    return values


def add_model_arguments(parser: argparse.ArgumentParser, *, or_profile: bool = False) -> None:
    """MODEL: a preset, a layer-times file, a profile or a Hugging Face config.json."""
    what = "a preset (`octopipe models`), a layer-times or config.json file"
    if not or_profile:
        parser.add_argument("model", metavar="MODEL", help=what)
        return
    parser.add_argument("model", metavar="MODEL", nargs="?", help=what + ", or a profile")
    parser.add_argument("--profile", metavar="FILE", help="what `octopipe profile` measured, instead of MODEL")


def add_batch_arguments(parser: Any, *, micro_batches: bool = True) -> None:
    """How much is trained per step."""
    parser.add_argument("--global-batch", type=whole_number, metavar="N", help="sequences per step, all pipelines")
    if micro_batches:
        parser.add_argument("--micro-batches", type=whole_number, help="micro-batches per step (default: 2 x pp)")
        parser.add_argument("--micro-batch-size", type=whole_number, metavar="N", help="sequences each (default: 1)")
    parser.add_argument("--seq", type=whole_number, help="tokens per sequence (default: 4096, or what the file says)")


def add_length_arguments(parser: Any) -> None:
    """Sequences of different length and how micro-batches are made of them."""
    parser.add_argument("--lengths", metavar="FILE", help="one step's sequence lengths, one per line or a JSON list")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--pad",
        dest="batching",
        action="store_const",
        const="pad",
        help="with --lengths: --micro-batch-size sequences each, padded to their longest (default)",
    )
    how.add_argument(
        "--pack", dest="batching", action="store_const", const="pack", help="... one after the other, --seq tokens each"
    )
    how.add_argument(
        "--dynamic",
        dest="batching",
        action="store_const",
        const="dynamic",
        help="... grouped by DynaPipe's programme (default for the system dynapipe)",
    )


def add_training_arguments(parser: Any) -> None:
    """How state, precision and activations are kept."""
    parser.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        help="ZeRO stage, what data-parallel replicas shard: 1 optimizer state, 2 gradients too, 3 weights too (FSDP); "
        "default: 1",
    )
    parser.add_argument(
        "--precision", choices=("bf16", "fp8", "mxfp8", "nvfp4"), help="of matrix products (default: bf16)"
    )
    parser.add_argument(
        "--gradients",
        choices=("fp32", "bf16"),
        help="precision of gradients (default: fp32; bf16 with fp8)",
    )
    parser.add_argument(
        "--cp-kind",
        choices=("ring", "all-gather", "ulysses", "hierarchical"),
        help="with cp: keys and values handed round (ring, default), gathered first (all-gather), heads divided "
        "instead (ulysses), or that inside a node and a ring between nodes (hierarchical)",
    )
    parser.add_argument(
        "--states",
        choices=("fp32", "bf16-moments", "bf16"),
        help="optimizer state: fp32 weight and moments (default), bf16 moments, or moments alone, in bf16",
    )
    parser.add_argument(
        "--recompute",
        choices=("none", "selective", "full", "auto"),
        help="activations to recompute: none (default), the cheap ones (selective), all (full), or as many as it "
        "takes to fit (auto)",
    )
    parser.add_argument(
        "--recompute-layers",
        type=whole_number,
        metavar="N",
        help="with full: recompute only so many layers (default: all)",
    )
    parser.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="with tp: divide the residual stream too (default: yes)",
    )
    parser.add_argument("--reserve-gib", type=non_negative, help="kept free per GPU (default: 6 %%, at least 1.5)")


def add_setting_arguments(parser: argparse.ArgumentParser, *, split_backward: bool = True) -> None:
    """The flags that describe ranks, micro-batches, hardware and memory; --pp may follow from --gpus, so argparse does
    not ask for it. `split_backward`: whether the verb's user chooses how the backward runs; else the flag is hidden."""
    group = parser.add_argument_group("set-up")
    group.add_argument("--pp", type=whole_number, help="pipeline ranks")
    group.add_argument("--tp", type=whole_number, help="tensor-parallel size (default: the smallest that fits)")
    group.add_argument("--cp", type=whole_number, help="context-parallel size (default: 1)")
    group.add_argument("--ep", type=whole_number, help="expert-parallel size (default: 1)")
    group.add_argument("--dp", type=whole_number, help="data-parallel size: pipelines side by side (default: 1)")
    add_hardware_arguments(group)
    add_batch_arguments(group)
    add_length_arguments(group)
    add_training_arguments(group)
    group.add_argument(
        "--vocab-parallel",
        action="store_true",
        default=None,
        help="embedding and head divided over all pipeline ranks",
    )
    group.add_argument("--p2p-ms", type=non_negative, help="time of every transfer, instead of the links' own")
    group.add_argument("--memory-gib", type=number_list, help="usable per rank: one number, or one per rank")
    group.add_argument(
        "--speeds", "--rank-speed", dest="speeds", type=number_list, help="relative speed per rank, e.g. 1,1,0.5,1"
    )
    words = "run the backward as I and W (default: as the system was published)"
    parser.add_argument(
        "--split-backward",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=words if split_backward else argparse.SUPPRESS,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


SETUP_FLAGS = {
    "gpu": "gpu",
    "tp": "tp",
    "cp": "cp",
    "cp_kind": "cp_kind",
    "ep": "ep",
    "dp": "dp",
    "seq": "seq",
    "micro_batch_size": "micro_batch_size",
    "zero": "zero",
    "precision": "precision",
    "gradients": "gradients",
    "states": "states",
    "recompute": "recompute",
    "recompute_layers": "recompute_layers",
    "sequence_parallel": "sequence_parallel",
    "vocab_parallel": "vocab_parallel",
    "reserve_gib": "reserve_gib",
    "p2p_ms": "p2p_ms",
    "memory_gib": "memory_gib",
    "speeds": "speeds",
    "gpus_per_node": "gpus_per_node",
    "cluster": "nodes",
    "micro_batch_lengths": "micro_batch_lengths",
    "packed": "packed",
    "tokens_per_pipeline": "tokens_per_pipeline",
}
"""Flag -> key of a plan's "setting" (and, but for speeds, keyword of `resolve_costs`)."""
OF_A_MODEL = (
    "tp",
    "cp",
    "cp_kind",
    "ep",
    "micro_batch_size",
    "zero",
    "precision",
    "gradients",
    "states",
    "recompute",
    "recompute_layers",
    "sequence_parallel",
    "vocab_parallel",
    "gpus_per_node",
    "gpus",
    "cluster",
    "hardware",
    "stack",
    "lengths",
)
"""Flags that change nothing where layer times were measured: they are in the times already."""


def model_from(args: argparse.Namespace) -> str:
    """MODEL or --profile."""
    from octopipe.base.errors import OctoPipeError

    if getattr(args, "profile", None):
        if args.model:
            raise OctoPipeError(f"--profile {args.profile} stands for the model; leave {args.model} out")
        args.model = args.profile
    if not args.model:
        raise OctoPipeError("no model; give a preset (`octopipe models`), a file, or --profile FILE")
    return str(args.model)


def refuse_idle_flags(args: argparse.Namespace, model: str) -> None:
    """A flag either changes the answer or is refused, such as one that a file of measured times has no use for."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.costs.resolve import resolve_measured

    table = resolve_measured(model)
    if table is None:
        return
    for name in OF_A_MODEL:
        if getattr(args, name, None) is not None:
            raise OctoPipeError(
                f"{flag_of(name)} changes nothing for {model}: its times were measured as they are; leave it out"
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
    """Fill in what --gpus or a cluster file leaves open, and the micro-batches that a global batch makes."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.costs.cluster.setup import derived_sizes, micro_batches_of

    gpus = args.gpus
    if args.cluster is not None and gpus is None:
        from octopipe.costs.cluster.file import count_gpus, read_cluster

        gpus = count_gpus(read_cluster(args.cluster))
    sizes = derived_sizes(gpus=gpus, tp=args.tp, cp=args.cp, pp=args.pp, dp=args.dp)
    if gpus is not None and sizes["tp"] is None and sizes["dp"] is None:
        from octopipe.costs.resolve import resolve_costs, resolve_spec

        pp = sizes["pp"] or 1
        spec = resolve_spec(model)
        sizes["tp"] = (
            1 if spec is None else resolve_costs(spec, pp=pp, gpu=gpu_asked(args), nodes=args.cluster).setup.tp
        )  # type: ignore[union-attr]
        sizes = derived_sizes(gpus=gpus, **sizes)
    if sizes["pp"] is None:
        raise OctoPipeError("how many ranks? give --pp, or --gpus and the other sizes, or a --plan")
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
        micro_batch_size=args.micro_batch_size or 1,
        dp=args.dp or 1,
        pp=args.pp,
        given=args.micro_batches,
    )


def costs_from(args: argparse.Namespace, **changes: Any) -> CostTable:
    """The cost table that the model and set-up flags describe; `CostTable.setup` is the set-up."""
    from octopipe.cli.verbs.lengths import settle_lengths
    from octopipe.costs.resolve import resolve_costs

    model = model_from(args)
    refuse_idle_flags(args, model)
    settle_sizes(args, model)
    settle_lengths(args, model)
    given = setting_from(args)
    given.pop("model")
    given["rank_speed"] = given.pop("speeds", ())
    if given.get("recompute") == "auto":
        given["recompute"] = "none"  # the first step of it
    return resolve_costs(model, pp=args.pp, micro_batches=args.micro_batches, **(given | changes))


class PriceFrom:
    """The costs that the flags describe, under any mode of recomputation."""

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def __call__(self, mode: str, layers: int | None = None, /) -> CostTable:
        return costs_from(self.args, recompute=mode, recompute_layers=layers)


def setting_from(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as provenance for `plan.extra["setting"]`: enough to price the plan again."""
    out: dict[str, Any] = {"model": args.model}
    for flag, key in SETUP_FLAGS.items():
        value = getattr(args, flag, None)
        if value is not None:
            out[key] = value
    if isinstance(out.get("nodes"), str):
        from octopipe.costs.cluster.file import read_cluster

        groups = read_cluster(out["nodes"])
        out["nodes"] = [{"gpu": g, "count": n, "gpus_per_node": k} for g, n, k in groups]
    return out | hardware_setting(args)


def provenance(args: argparse.Namespace, costs: CostTable) -> dict[str, Any]:
    """What a plan file says about itself: `plan.with_extra(**provenance(args, costs))`."""
    from octopipe.plans.setting import carried

    out = carried(costs, setting_from(args))
    if costs.setup is not None:
        out["setup"] = costs.setup.as_dict()
    return out


def setup_words(setup: Setup | None) -> str:
    return "" if setup is None else setup.words()


def micro_batches_from(args: argparse.Namespace) -> int:
    return args.micro_batches or 2 * args.pp


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 micro-batches`."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


BRACKET = "\ue000"
"""Stands for a "[" that is a letter, wherever it may look like the start of a tag."""


def named(text: object) -> str:
    """A name or path of a user's inside a line of ours: none of its brackets is a tag of ours."""
    return str(text).replace("[", BRACKET)


def print_json(value: Any) -> None:
    """One JSON object on stdout; numbers that are not finite become null."""
    import msgspec

    from octopipe.base.files import plain
    from octopipe.cli.verbs.screen import json_without_control

    text = json_without_control(msgspec.json.format(msgspec.json.encode(value, enc_hook=plain), indent=1).decode())
    if not (sys.stdout.encoding or "utf-8").lower().startswith("utf"):
        # An output without the letter gets JSON's own escape for it, so that what is read back is what was said.
        text = _escaped(text)
    sys.stdout.write(text + "\n")


def _escaped(text: str) -> str:
    from json import dumps, loads

    return dumps(loads(text), indent=1)


def console(*, stderr: bool = False) -> Console:
    """A rich console for which names of users are text; colour only on a terminal and never with NO_COLOR."""
    from octopipe.cli.verbs.screen import Screen

    return Screen(stderr=stderr)
