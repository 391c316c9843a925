"""What verbs share: the flags that describe a model and a setting, JSON out, a console that respects pipes.

Knows: argparse and rich. Does not know: any verb.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from octopipe.cost import CostTable


def whole_number(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 1 <= value <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text[:40]} is out of range; give a whole number from 1 to {1 << 24}")
    return value


def non_negative(text: str) -> float:
    """An argparse type: a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number >= 0")
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


def add_setting_arguments(parser: argparse.ArgumentParser, *, pp_required: bool = True) -> None:
    """The flags that describe ranks, micro-batches, hardware and memory."""
    parser.add_argument("--pp", type=whole_number, required=pp_required, help="pipeline ranks")
    parser.add_argument("--micro-batches", type=whole_number, help="micro-batches per step (default: 2 x pp)")
    parser.add_argument("--gpu", default="h800", help="GPU preset for analytic costs (default: h800)")
    parser.add_argument("--tp", type=whole_number, help="GPUs per rank (default: the smallest that fits)")
    parser.add_argument("--dp", type=whole_number, default=1, help="pipelines side by side (default: 1)")
    parser.add_argument("--seq", type=whole_number, help="tokens per sequence (default: 4096, or what the file says)")
    parser.add_argument("--p2p-ms", type=non_negative, help="time of every transfer, instead of the links' own")
    parser.add_argument("--memory-gib", type=number_list, help="capacity per rank: one number, or one per rank")
    parser.add_argument("--speeds", type=number_list, help="relative speed per rank, e.g. 1,1,0.5,1")
    parser.add_argument(
        "--split-backward",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run backward as I and W (default: as the system was published)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def costs_from(args: argparse.Namespace) -> CostTable:
    """The cost table that the model and setting flags describe."""
    from octopipe.errors import OctoPipeError
    from octopipe.resolve import resolve_costs

    if getattr(args, "profile", None):
        if args.model:
            raise OctoPipeError(f"--profile {args.profile} stands for the model; leave {args.model} out")
        args.model = args.profile
    if not args.model:
        raise OctoPipeError("no model; give a preset (`octopipe models`), a file, or --profile FILE")
    if args.speeds and len(args.speeds) != args.pp:
        raise OctoPipeError(f"--speeds gives {len(args.speeds)} numbers for {args.pp} ranks; give one per rank")
    if args.memory_gib and len(args.memory_gib) not in (1, args.pp):
        raise OctoPipeError(f"--memory-gib gives {len(args.memory_gib)} sizes for {args.pp} ranks; give 1 or {args.pp}")
    return resolve_costs(
        args.model,
        pp=args.pp,
        gpu=args.gpu,
        tp=args.tp,
        dp=args.dp,
        seq=args.seq,
        p2p_ms=args.p2p_ms,
        memory_gib=args.memory_gib,
        rank_speed=args.speeds or (),
    )


def setting_from(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as provenance for `plan.extra["setting"]`: enough to price the plan again."""
    names = ("model", "gpu", "tp", "dp", "seq", "p2p_ms", "memory_gib", "speeds")
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def micro_batches_from(args: argparse.Namespace) -> int:
    return args.micro_batches or 2 * args.pp


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 micro-batches`."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def print_json(value: Any) -> None:
    """One JSON object on stdout; numbers that are not finite become null."""
    import msgspec

    from octopipe.files import plain

    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=plain), indent=1).decode()
    if not (sys.stdout.encoding or "utf-8").lower().startswith("utf"):
        # An output without the letter gets JSON's own escape for it, so that what is read back is what was said.
        text = _escaped(text)
    sys.stdout.write(text + "\n")


def _escaped(text: str) -> str:
    import json

    return json.dumps(json.loads(text), indent=1)


def console(*, stderr: bool = False) -> Console:
    """A rich console for which names of users are text; colour only on a terminal and never with NO_COLOR."""
    from octopipe.verbs.screen import Screen

    return Screen(stderr=stderr)
