"""`octopipe plan MODEL --gpus N --gpu KIND --global-batch B`: how to split a model over a whole cluster.

Knows: the flags and what is written. Does not know: how splits are found (octopipe/search/planner/) or shown
(plan_answer.py).
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from octopipe.cli.verbs.common import (
    add_batch_arguments,
    add_hardware_arguments,
    add_model_arguments,
    add_training_arguments,
    console,
    gpu_asked,
    non_negative,
    print_json,
    seed_number,
    whole_number,
)
from octopipe.cli.verbs.tune import seconds

if TYPE_CHECKING:
    from octopipe.cli.verbs.plan_answer import Reasons
    from octopipe.costs.analytic.calibration import Stack
    from octopipe.costs.cluster.setup import Setup
    from octopipe.models.spec import ModelSpec
    from octopipe.search.planner.pricing import Candidate
    from octopipe.search.planner.search import Found

FIXED = ("tp", "cp", "ep", "pp", "dp", "vp", "micro_batch_size", "zero")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("the cluster and the batch")
    add_hardware_arguments(group)
    add_batch_arguments(group, micro_batches=False)
    group = parser.add_argument_group("what is fixed already (default: searched)")
    for name, words in (
        ("tp", "GPUs per layer"),
        ("cp", "GPUs per sequence"),
        ("ep", "GPUs that the experts are divided over"),
        ("pp", "pipeline ranks"),
        ("dp", "pipelines side by side"),
        ("vp", "stages per pipeline rank"),
        ("micro-batch-size", "sequences per micro-batch"),
    ):
        group.add_argument(f"--{name}", type=whole_number, help=words)
    add_training_arguments(group)
    group = parser.add_argument_group("the search")
    group.add_argument(
        "--for",
        dest="runtime",
        choices=("any", "megatron", "torchtitan", "torch", "deepspeed", "octopipe"),
        default="any",
        help="only what this runtime can run (default: any)",
    )
    group.add_argument(
        "--system",
        type=_systems,
        default=("octopipe",),
        metavar="NAMES",
        help="who plans: octopipe, alpa, dapple, metis, mist (as published), several with commas, or all "
        "(default: octopipe)",
    )
    group.add_argument("--today", metavar="SIZES", help="what you run now, e.g. tp=4,pp=8,vp=5: shown beside")
    group.add_argument("--budget", type=seconds, default=30.0, metavar="TIME", help="for all of it (default: 30s)")
    group.add_argument(
        "--margin",
        type=share,
        default=0.02,
        metavar="SHARE",
        help="splits within this share of the fastest count as equally fast, and the simplest of them with memory to "
        "spare wins (default: 0.02; 0: the fastest)",
    )
    group.add_argument("--rows", type=whole_number, default=10, help="of the table (default: 10)")
    group.add_argument("--seed", type=seed_number, default=0, help="start of the tuner's random numbers (default: 0)")
    parser.add_argument(
        "--why",
        nargs="?",
        const="",
        metavar="FILE.svg",
        help="where the time of a step goes, of the winner and of today's: as a table, and as a picture in a file",
    )
    group = parser.add_argument_group("failures, cost and energy of the winner (default: not asked)")
    group.add_argument("--mtbf", type=positive, metavar="HOURS", help="between failures of one GPU, e.g. 50000")
    group.add_argument("--checkpoint-s", type=non_negative, default=60.0, help="to write one (default: 60)")
    group.add_argument("--restart-s", type=non_negative, default=600.0, help="after a failure (default: 600)")
    group.add_argument("--price-per-gpu-hour", type=positive, metavar="PRICE", help="in any currency")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the winner's plan here")
    parser.add_argument("--page", metavar="FILE", help="write a page: tokens/s against GPUs, memory against limits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


PUBLISHED = ("alpa", "dapple", "metis", "mist")


def _systems(text: str) -> tuple[str, ...]:
    """An argparse type: who plans."""
    known = ("octopipe", *PUBLISHED)
    names = known if text == "all" else tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name[:40]!r} plans no cluster; one of {', '.join(known)}, or all")
    return names


def positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = non_negative(text)
    if value < 1e-6:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is too small; give a number > 0")
    return value


def share(text: str) -> float:
    """An argparse type: a share between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a share; give a number from 0 up to 1")
    return value


def run(args: argparse.Namespace) -> int:
    from octopipe.base.errors import DoesNotFitError, OctoPipeError
    from octopipe.base.stop import StopRequest
    from octopipe.cli.verbs.plan_answer import numbers_of, reasons_of, show
    from octopipe.cli.verbs.tune import _check_writable
    from octopipe.plans.file import save_plan
    from octopipe.search.planner.commands import command_lines
    from octopipe.search.planner.runtimes import RUNTIMES
    from octopipe.search.planner.search import search
    from octopipe.search.planner.splits import parse_split

    for path in (args.output, args.page, args.why):
        if path:
            _check_writable(path)
    spec, base, gpus = _base(args)
    if args.global_batch is None:
        raise OctoPipeError("how many sequences per step? give --global-batch")
    fixed = {name: getattr(args, name) for name in FIXED if getattr(args, name) is not None}
    published = [name for name in args.system if name in PUBLISHED]
    if published:
        from octopipe.cli.verbs.plan_published import refuse_idle, run_published

        refuse_idle(args)
        if "octopipe" not in args.system:
            return run_published(args, spec, base, gpus, fixed, published, None)
    screen = console(stderr=True)
    live: Any = screen.status("looking at splits ...") if screen.is_terminal else nullcontext()
    found: Found | None = None
    unfit = ""
    with StopRequest() as stop, live as status:
        try:
            found = search(
                spec,
                base,
                gpus=gpus,
                global_batch=args.global_batch,
                fixed=fixed,
                today=parse_split(args.today) if args.today else None,
                runtime=RUNTIMES[args.runtime],
                recompute=args.recompute or "auto",
                budget_s=args.budget,
                margin=args.margin,
                seed=args.seed,
                say=None if status is None else status.update,
                stop=lambda: stop.asked,
            )
        except DoesNotFitError as error:
            if not published:
                raise
            unfit = str(error)
    if published and not stop.asked:
        return run_published(args, spec, base, gpus, fixed, published, found, unfit)
    assert found is not None
    best = found.best
    reasons = reasons_of(found, spec)
    if args.why:
        _write_why(args.why, found, reasons)
    record: dict[str, Any] = {}
    if args.output or args.page:
        record = _record(args, spec, base, found, fixed)
    if args.output and best.plan is not None:
        save_plan(best.plan.with_extra(**provenance_of(args, best), cluster_plan=record), args.output)
    if args.page:
        from octopipe.base.files import write_whole
        from octopipe.views.report.cluster import page

        write_whole(args.page, page(record).encode())
    lines = command_lines(best, spec=spec, model=args.model, plan_file=args.output, runtime=args.runtime)
    if args.json:
        print_json(numbers_of(args, found, lines, reasons))
    else:
        show(args, spec, found, lines, reasons)
    return stop.exit_code(0)


STACKS = {"torchtitan": "torchtitan", "torch": "plain-torch"}
"""Whose rates a runtime has where nobody names a stack; the others have the default's."""


def stack_for(asked: str | None, runtime: str) -> Stack | None:
    """The stack that was asked for, or that goes with a runtime."""
    from octopipe.costs.analytic.calibration import stack_named

    name = asked or STACKS.get(runtime)
    return None if name is None else stack_named(name)


def _base(args: argparse.Namespace) -> tuple[ModelSpec, Setup, int]:
    """Model, set-up without sizes, and the number of GPUs."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.costs.cluster.file import count_gpus, read_cluster
    from octopipe.costs.cluster.hardware import gpu
    from octopipe.costs.cluster.setup import DEFAULT_SEQ, Setup
    from octopipe.costs.resolve import DEFAULT_GPU, resolve_spec

    spec = resolve_spec(args.model)
    if spec is None:
        raise OctoPipeError(
            f"{args.model} holds times of one split only; to plan a cluster name a preset or a config.json"
        )
    nodes: Any = ()
    asked = gpu_asked(args)
    kind = gpu(asked or DEFAULT_GPU) if asked is None or isinstance(asked, str) else asked
    gpus = args.gpus
    if args.cluster:
        if args.gpu or args.gpus_per_node:
            raise OctoPipeError("the cluster file says which GPUs there are; leave --gpu and --gpus-per-node out")
        nodes = read_cluster(args.cluster)
        kind = max((gpu(name) for name, _, _ in nodes), key=lambda g: g.bf16_tflops * g.clock)
        gpus = gpus or count_gpus(nodes)
    if gpus is None:
        raise OctoPipeError("how many GPUs? give --gpus N, or a --cluster file")
    base = Setup(
        gpu=kind,
        seq=args.seq or DEFAULT_SEQ,
        zero=1 if args.zero is None else args.zero,
        precision=args.precision or "bf16",
        gradients=args.gradients,
        states=args.states or "fp32",
        cp_kind=args.cp_kind or "ring",
        stack=stack_for(args.stack, args.runtime),
        sequence_parallel=True if args.sequence_parallel is None else args.sequence_parallel,
        reserve_gib=args.reserve_gib,
        gpus_per_node=args.gpus_per_node,
        nodes=nodes,
    )
    return spec, base, gpus


def _record(
    args: argparse.Namespace, spec: ModelSpec, base: Setup, found: Found, fixed: dict[str, int]
) -> dict[str, Any]:
    """What the panel of a report and the page draw."""
    from octopipe.cli.verbs.plan_answer import changes, reasons_of, why_words
    from octopipe.search.planner.record import record_of, scaled
    from octopipe.search.planner.runtimes import RUNTIMES

    # Whoever has ended the search does not wait for what it would be on other numbers of GPUs.
    more: dict[str, Any] = {"budget_s": 0.0} if found.interrupted else {}
    points = scaled(
        spec, base, found, global_batch=args.global_batch, fixed=fixed, runtime=RUNTIMES[args.runtime], **more
    )
    words = [*changes(found), *why_words(reasons_of(found, spec))]
    return record_of(found, spec, words=words, scaling=points)


def _write_why(path: str, found: Found, reasons: Reasons) -> None:
    """The picture of where the time goes."""
    from octopipe.base.files import write_whole
    from octopipe.views.report.cluster import short
    from octopipe.views.report.why_picture import why_svg

    rows = []
    for name, why in reasons.items():
        candidate = found.today if name == "today" else found.best
        if why is not None and candidate is not None:
            rows.append((f"{name}: {short(candidate.split.words())}", why.as_dict()))
    write_whole(path, why_svg(rows, alone=True).encode())


def provenance_of(args: argparse.Namespace, best: Candidate) -> dict[str, Any]:
    """The plan's set-up, and the keywords that price it again."""
    from octopipe.plans.setting import carried

    known = best.setup.as_dict()
    keys = (
        "gpu",
        "stack",
        "states",
        "tp",
        "cp",
        "ep",
        "dp",
        "seq",
        "micro_batch_size",
        "zero",
        "precision",
        "gradients",
        "recompute",
    )
    more = ("recompute_layers", "sequence_parallel", "reserve_gib", "gpus_per_node", "nodes")
    setting = {"model": args.model, **{k: known[k] for k in (*keys, *more) if known.get(k) is not None}}
    if "nodes" in setting:
        del setting["gpu"]
    known_by = {"setting": setting} if best.costs is None else carried(best.costs, setting)
    return {**known_by, "setup": known, "step_ms": best.step_ms}
