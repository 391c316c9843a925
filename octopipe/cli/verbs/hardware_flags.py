"""Flags that say which GPUs there are and whose rates hold on them: --gpu, --cluster, --hardware, --stack.

Knows: the flags, and what they leave in a plan's setting. Does not know: the files behind them
(costs/cluster/hardware_file.py, costs/cluster/file.py, costs/analytic/calibration.py).
"""

from __future__ import annotations

import argparse
from typing import Any


def whole_number(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 1 <= value <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text[:40]} is out of range; give a whole number from 1 to {1 << 24}")
    return value


def flag_of(name: str) -> str:
    """A flag as its user writes it."""
    return "--" + name.replace("_", "-")


def add_hardware_arguments(parser: Any) -> None:
    """Which GPUs: a kind and a number, or a file of unequal nodes."""
    parser.add_argument("--gpu", help="GPU preset (`octopipe gpus`; default: h800)")
    parser.add_argument("--gpus", type=whole_number, metavar="N", help="GPUs in all; sizes not given follow from it")
    parser.add_argument(
        "--cluster", "--nodes", dest="cluster", metavar="FILE", help="unequal nodes: a TOML or JSON file of [[nodes]]"
    )
    parser.add_argument(
        "--gpus-per-node", type=whole_number, help="GPUs on the fast links of a node (default: preset's)"
    )
    parser.add_argument(
        "--hardware", metavar="FILE", help="GPU, links, NICs, power limit of your own: a TOML file (docs/cluster.md)"
    )
    add_stack_argument(parser)


def add_stack_argument(parser: Any) -> None:
    """Whose share of the data sheet is assumed."""
    parser.add_argument(
        "--stack",
        metavar="NAME",
        help="training stack whose rates hold: a name (`octopipe calibrate --list`) or a file of `octopipe calibrate`",
    )


def gpu_asked(args: argparse.Namespace) -> Any:
    """The GPU that --hardware describes or --gpu names; None where neither is given."""
    from octopipe.base.errors import OctoPipeError

    if getattr(args, "hardware", None) is None:
        return args.gpu
    for name in ("gpu", "gpus_per_node", "cluster"):
        if getattr(args, name, None) is not None:
            raise OctoPipeError(f"{args.hardware} says which GPUs there are; leave {flag_of(name)} out")
    from octopipe.costs.cluster.hardware_file import read_hardware

    return read_hardware(args.hardware)


def hardware_setting(args: argparse.Namespace) -> dict[str, Any]:
    """Entries of a plan's setting: a GPU and a stack of the user's own are written out, so that the plan can be priced
    where their files are not."""
    out: dict[str, Any] = {}
    if getattr(args, "hardware", None) is not None:
        from octopipe.costs.cluster.hardware import gpu_record

        out["gpu"] = gpu_record(gpu_asked(args))
    if getattr(args, "stack", None) is not None:
        from octopipe.costs.analytic.calibration import stack_named, stack_record

        out["stack"] = stack_record(stack_named(args.stack))
    return out
