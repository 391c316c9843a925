"""`octopipe tune`: searches for a faster plan, with a live progress line, and writes it to a file.

Knows: flags, signals, the progress line. Does not know: how the search works (octopipe/search/tuner/), how its result
is shown (tune_result.py).
"""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from octopipe.base.clock import seconds_of
from octopipe.base.display import milliseconds
from octopipe.base.errors import OctoPipeError
from octopipe.cli.verbs.common import (
    add_model_arguments,
    add_setting_arguments,
    console,
    costs_from,
    micro_batches_from,
    print_json,
    provenance,
    seed_number,
    whole_number,
)
from octopipe.cli.verbs.numbers import contended
from octopipe.cli.verbs.tune_result import TuneOutput, gap_words, print_result, rivals, setup_of, summary

if TYPE_CHECKING:
    from octopipe.search.tuner import Progress, TuneResult

RESTRICTED_SHARE = 0.6
"""Share of the budget for the plan of the other runtime; the rest finds out what the restriction costs."""


def seconds(text: str) -> float:
    """Parse a length of time such as 30, 30s, 2m or 1.5h (an argparse type).

    >>> seconds("2m")
    120.0
    """
    try:
        return seconds_of(text)
    except OctoPipeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def phase_list(text: str) -> tuple[str, ...]:
    """Parse phases of Algorithm 1, separated by commas (an argparse type)."""
    known = ("partition", "placement", "schedule")
    given = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in given if part not in known]
    if wrong or not given:
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {', '.join(known)}, separated by commas")
    return tuple(phase for phase in known if phase in given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, or_profile=True)
    add_setting_arguments(parser, split_backward=False, defaults={"recompute": "searched, stage by stage"})
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan here")
    parser.add_argument(
        "--budget",
        "--budget-s",
        dest="budget",
        type=seconds,
        default=30.0,
        metavar="TIME",
        help="how long to search: 30s, 2m, 1h (default: 30s)",
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--method",
        choices=("best", "octopipe", "random", "exact"),
        default="best",
        help="best: the default search; octopipe: the paper's Algorithm 1; random: its moves in random order; exact: "
        "CP-SAT, for small cases",
    )
    parser.add_argument(
        "--phases",
        type=phase_list,
        metavar="LIST",
        help="phases of Algorithm 1 (methods octopipe, random): some of partition,placement,schedule (default: all)",
    )
    parser.add_argument(
        "--for",
        dest="target",
        choices=("octopipe", "torch", "megatron"),
        default="octopipe",
        help="search only plans that this runtime can run, and report what the restriction costs (default: octopipe, "
        "which runs every plan)",
    )
    parser.add_argument("--start", metavar="PLAN", help="warm start: a plan file for this model and setting")
    parser.add_argument("--robust", action="store_true", help="choose by the mean step time over jittered layer times")
    parser.add_argument(
        "--copies",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="allow plans that hold a layer on more than one rank (default: yes if the costs include weights)",
    )
    parser.add_argument(
        "--cut-head",
        "--vocab-parallel",
        dest="cut_head",
        action="store_true",
        help="allow plans that split the head, and with it the embedding, by vocabulary over several ranks",
    )
    parser.add_argument(
        "--mtp",
        action="store_true",
        help="plan multi-token prediction as a path of its own, as `octopipe train --mtp` runs it",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="allow plans that offload activations to host memory where memory is short (docs/offload.md)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="with a profile as MODEL: run plans, correct the costs, tune again; keep the plan measured to be fastest",
    )
    parser.add_argument(
        "--measure-for",
        type=seconds,
        default=300.0,
        metavar="TIME",
        help="with --measure: time for the whole loop (default: 5m)",
    )
    parser.add_argument("--corrected", metavar="FILE", help="with --measure: write the corrected profile here")
    parser.add_argument("--no-recompute", action="store_true", help="the same as --recompute none")
    parser.add_argument("--workers", type=whole_number, help="number of threads (default: all cores)")
    parser.add_argument(
        "--iterations",
        type=whole_number,
        help="moves per thread instead of a time budget; gives the same plan on every machine",
    )


def run(args: argparse.Namespace) -> int:
    from octopipe.base.stop import StopRequest
    from octopipe.costs.resolve import resolve_spec
    from octopipe.plans.file import load_plan, save_plan
    from octopipe.search.tuner import PHASES, tune
    from octopipe.simulation.simulator import simulate

    _check_flags(args)
    for path in (args.output, args.corrected):
        if path:
            _check_writable(path)
    if args.measure:
        from octopipe.cli.verbs.tune_measured import run_measured

        return run_measured(args)
    if args.corrected:
        raise OctoPipeError("--corrected writes the profile corrected by --measure; add --measure")
    costs = costs_from(args)
    start = load_plan(args.start) if args.start else None
    screen = console(stderr=True)
    live = screen.status("compiling kernels and building initial plans ...") if screen.is_terminal else nullcontext()
    with StopRequest() as stop, live as status:

        def show(p: Progress) -> bool:
            if status is not None and math.isfinite(p.best_ms):
                status.update(progress_line(p))
            return stop.requested

        def search(target: str, budget_s: float) -> TuneResult:
            return tune(
                costs,
                args.pp,
                micro_batches_from(args),
                budget_s=budget_s,
                seed=args.seed,
                method=args.method,
                start=start if target == args.target else None,
                robust=args.robust,
                workers=args.workers,
                iterations=args.iterations,
                recompute=args.recompute in (None, "auto") and not args.no_recompute,
                copies=args.copies,
                cut_head=args.cut_head and target == "octopipe",
                offload=args.offload and target == "octopipe",
                phases=args.phases or PHASES,
                target=target,  # type: ignore[arg-type]
                progress=show,
            )

        restricted = args.target != "octopipe"
        result = search(args.target, args.budget * (RESTRICTED_SHARE if restricted else 1.0))
        if restricted and not stop.requested:
            free = search("octopipe", args.budget * (1.0 - RESTRICTED_SHARE))
            result = replace(result, notes=(*result.notes, restriction_words(args.target, result, free)))
    # Save the plan first, so that it is on disk even if showing it fails.
    plan = result.plan.with_extra(**provenance(args, costs))
    if args.output:
        save_plan(plan, args.output)
    timeline = simulate(plan, costs)
    output = TuneOutput(
        result=result,
        timeline=timeline,
        setup=setup_of(costs, args.pp, micro_batches_from(args)),
        rate=costs.throughput(plan.num_ranks, plan.num_micro_batches, timeline.step_ms),
        model=args.model if resolve_spec(args.model) is not None else None,
        rivals=rivals(costs, args.pp, micro_batches_from(args), result),
        plan_file=args.output,
        target=args.target,
        contended=contended(plan, costs, args.model),
        predicts="P" in costs.symbols and costs.graph is None,
        forks=costs.graph is not None,
    )
    if args.json:
        print_json(summary(output))
    else:
        print_result(output, console())
    return stop.exit_code(0)


def _check_flags(args: argparse.Namespace) -> None:
    """Raise OctoPipeError for flags that exclude each other, before anything is read or written."""
    if args.split_backward is False:
        raise OctoPipeError("tune always splits the backward; for a fused one use --for megatron, which needs it")
    if args.no_recompute and args.recompute == "auto":
        raise OctoPipeError("--no-recompute and --recompute auto exclude each other; give one of them")
    if args.copies and args.method != "best":
        raise OctoPipeError(
            f"method {args.method} does not support copies of layers; leave --copies out, or use --method best"
        )
    if args.cut_head and (args.method != "best" or args.target != "octopipe"):
        who = f"method {args.method}" if args.method != "best" else args.target
        raise OctoPipeError(f"{who} does not support a cut head; leave --cut-head out")


def restriction_words(target: str, result: TuneResult, free: TuneResult) -> str:
    """Return a sentence on what the restriction to another runtime costs."""
    if free.step_ms >= result.step_ms:
        return f"only plans that {target} can run were searched; the restriction costs nothing here"
    more = 100.0 * (result.step_ms / free.step_ms - 1.0)
    return (
        f"only plans that {target} can run were searched: {more:.1f} % slower than {milliseconds(free.step_ms)}, the "
        "best plan found for octopipe's own runtime"
    )


def progress_line(p: Progress) -> str:
    """Format progress as one line: time, iteration, phase, best, gap, and where the idle time is."""
    idle = " ".join(f"{name} {share:.1%}" for name, share in p.bubbles.items() if share >= 0.0005)
    return (
        f"{p.seconds:4.0f}/{p.budget_s:.0f} s  iteration {p.iterations:,}  {p.phase:9}  "
        f"best {milliseconds(p.best_ms)}  gap {gap_words(p.gap)}  idle: {idle or 'none'}"
    )


def _check_writable(path: str) -> None:
    """Raise OctoPipeError before the search, not after it, if the file cannot be written."""
    from octopipe.base.files import check_target

    check_target(path)
