"""`octopipe tune`: search for a faster plan, with a live line, and write it to a file.

Knows: flags, the progress line, how the result is told. Does not know: how the search works (octopipe/tuner/).
"""

from __future__ import annotations

import argparse
import math
import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from octopipe.verbs.common import (
    add_model_arguments,
    add_setting_arguments,
    console,
    costs_from,
    micro_batches_from,
    print_json,
    setting_from,
    whole_number,
)

if TYPE_CHECKING:
    from octopipe.tuner import Progress, TuneResult

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "ms": 1e-3}


def seconds(text: str) -> float:
    """An argparse type: 30, 30s, 2m, 1.5h.

    >>> seconds("2m")
    120.0
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s|min|m|h|)\s*", text.lower())
    value = float(match[1]) * _UNITS[match[2]] if match else math.nan
    if not 0 < value <= 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write 30s, 2m or 1h")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, or_profile=True)
    add_setting_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan here")
    parser.add_argument("--budget", type=seconds, default=30.0, metavar="TIME", help="e.g. 30s, 2m (default: 30s)")
    parser.add_argument("--seed", type=int, default=0, help="start of the random numbers (default: 0)")
    parser.add_argument(
        "--method",
        choices=("best", "octopipe", "random", "exact"),
        default="best",
        help="best; octopipe: the paper's Algorithm 1; random: its moves by lot; exact: CP-SAT, small cases",
    )
    parser.add_argument("--start", metavar="PLAN", help="warm start: a plan file for this model and setting")
    parser.add_argument("--robust", action="store_true", help="best mean over jittered layer times")
    parser.add_argument("--no-copies", action="store_true", help="never hold a layer on more than one rank")
    parser.add_argument("--no-recompute", action="store_true", help="never recompute activations to save memory")
    parser.add_argument("--workers", type=whole_number, help="threads (default: all cores)")
    parser.add_argument("--iterations", type=whole_number, help="moves per worker: reproducible on any machine")


def run(args: argparse.Namespace) -> int:
    from octopipe.errors import OctoPipeError
    from octopipe.plan_file import load_plan, save_plan
    from octopipe.tuner import tune

    if args.split_backward is False:
        raise OctoPipeError("tune always splits the backward pass; leave --no-split-backward out")
    if args.output:
        _check_writable(args.output)
    costs = costs_from(args)
    start = load_plan(args.start) if args.start else None
    screen = console(stderr=True)
    live = screen.status("compiling and looking for starts ...") if screen.is_terminal else nullcontext()
    with live as status:

        def show(p: Progress) -> None:
            if status is not None:
                status.update(progress_line(p))

        result = tune(
            costs,
            args.pp,
            micro_batches_from(args),
            budget_s=args.budget,
            seed=args.seed,
            method=args.method,
            start=start,
            robust=args.robust,
            workers=args.workers,
            iterations=args.iterations,
            recompute=not args.no_recompute,
            copies=not args.no_copies,
            progress=show,
        )
    if args.output:
        save_plan(result.plan.with_extra(setting=setting_from(args)), args.output)
    if args.json:
        print_json(summary(result))
    else:
        _tell(result, args.output)
    return 0


def progress_line(p: Progress) -> str:
    """One line: time, iteration, phase, best, gap, where the idle time is."""
    idle = " ".join(f"{name} {share:.1%}" for name, share in p.bubbles.items() if share >= 0.0005)
    return (
        f"{p.seconds:4.0f}/{p.budget_s:.0f} s  iteration {p.iterations:,}  {p.phase:9}  "
        f"best {p.best_ms:.2f} ms  gap {p.gap:.2%}  idle: {idle or 'none'}"
    )


def summary(result: TuneResult) -> dict[str, Any]:
    """The result as one JSON object, without the plan itself."""
    return {
        "step_ms": result.step_ms,
        "lower_bound_ms": result.lower_bound_ms,
        "bound": result.bound_name,
        "gap": result.gap,
        "optimal": result.optimal,
        "method": result.method,
        "seconds": result.seconds,
        "iterations": result.iterations,
        "phase_iterations": result.phase_iterations,
        "interrupted": result.interrupted,
        "mean_jittered_ms": result.mean_jittered_ms,
        "explanation": result.explanation,
        "num_stages": len(result.plan.stages),
        "partition": list(result.plan.partition),
        "placement": [s.rank for s in result.plan.stages],
        "recompute": [bool(s.recompute) for s in result.plan.stages],
        "log": [s.as_dict() for s in result.log],
    }


def _check_writable(path: str) -> None:
    """Say so before the search, not after it."""
    from pathlib import Path

    from octopipe.errors import OctoPipeError

    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise OctoPipeError(f"{path}: the folder {folder} does not exist; create it first")
    if Path(path).is_dir():
        raise OctoPipeError(f"{path} is a folder; name a file")


def _tell(result: TuneResult, output: str | None) -> None:
    out = console()
    proven = " (proven optimal)" if result.optimal else ""
    out.print(
        f"step time {result.step_ms:.2f} ms, {result.gap:.2%} above the proven bound "
        f"{result.lower_bound_ms:.2f} ms ({result.bound_name}){proven}"
    )
    if result.mean_jittered_ms is not None:
        out.print(f"mean over jittered layer times {result.mean_jittered_ms:.2f} ms")
    out.print(result.explanation)
    plan = result.plan
    kept = sum(bool(s.recompute) for s in plan.stages)
    again = f", {kept} of them recompute" if kept else ""
    if copied := len(plan.replicas()):
        again += f", {copied} layers on two ranks each"
    out.print(
        f"{len(plan.stages)} stages on {plan.num_ranks} ranks{again}; "
        f"{result.iterations:,} moves in {result.seconds:.1f} s, method {result.method}"
    )
    if result.interrupted:
        out.print("interrupted: this is the best plan so far")
    if output:
        out.print(f"plan written to {output}")
