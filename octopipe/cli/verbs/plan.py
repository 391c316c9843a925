"""`octopipe plan MODEL --gpus N --gpu KIND --global-batch B`: finds how to split a model over a whole cluster.

Knows: the flags and what is written. Does not know: how splits are found (octopipe/search/planner/) or shown
(plan_answer.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octopipe.cli.verbs.common import (
    add_batch_arguments,
    add_hardware_arguments,
    add_model_arguments,
    add_training_arguments,
    console,
    non_negative,
    print_json,
    seed_number,
    whole_number,
)
from octopipe.cli.verbs.flags import add_field, setting_from
from octopipe.cli.verbs.tune import seconds

if TYPE_CHECKING:
    from octopipe.cli.verbs.plan_answer import Reasons
    from octopipe.costs.analytic.calibration import Stack
    from octopipe.costs.cluster.hardware import Gpu
    from octopipe.costs.cluster.setup import Setup
    from octopipe.models.spec import ModelSpec
    from octopipe.plans.plan import Plan
    from octopipe.search.planner.search import Found

SEARCHING = 0.85
"""Share of the budget that the search gets if files are written as well."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from octopipe.costs.cluster.asking import flag_fields

    add_model_arguments(parser)
    group = parser.add_argument_group("the cluster and the batch")
    add_hardware_arguments(group)
    add_batch_arguments(group, micro_batches=False)
    group = parser.add_argument_group("sizes that are fixed (default: searched)")
    for name in (*flag_fields("size"), "micro_batch_size"):
        add_field(group, name, says_default=False)
    group.add_argument("--vp", type=whole_number, metavar="N", help="stages per pipeline rank")
    add_training_arguments(parser.add_argument_group("training"), {"zero": "searched", "recompute": "auto"})
    group = parser.add_argument_group("the search")
    group.add_argument(
        "--for",
        dest="runtime",
        choices=("any", "megatron", "torchtitan", "torch", "deepspeed", "octopipe"),
        default="any",
        help="consider only what this runtime can run (default: any)",
    )
    group.add_argument(
        "--system",
        type=_systems,
        default=("octopipe",),
        metavar="NAMES",
        help="planning system: octopipe, alpa, dapple, metis, mist (as published), a comma-separated list, or all "
        "(default: octopipe)",
    )
    group.add_argument(
        "--mtp",
        action="store_true",
        help="plan multi-token prediction as a path of its own, as `octopipe train --mtp` "
        "runs it (with --for megatron: as layers before the head)",
    )
    group.add_argument("--today", metavar="SIZES", help="the split you run now, e.g. tp=4,pp=8,vp=5, for comparison")
    group.add_argument(
        "--budget", type=seconds, default=30.0, metavar="TIME", help="time for the whole command (default: 30s)"
    )
    group.add_argument(
        "--margin",
        type=share,
        default=0.02,
        metavar="SHARE",
        help="treat splits within this share of the fastest as equally fast and select the simplest one with memory to "
        "spare (default: 0.02; 0: the fastest)",
    )
    group.add_argument("--rows", type=whole_number, default=10, help="number of rows of the table (default: 10)")
    group.add_argument("--seed", type=seed_number, default=0, help="random seed of the tuner (default: 0)")
    parser.add_argument(
        "--why",
        nargs="?",
        const="",
        metavar="FILE.svg",
        help="show where a step's time goes, for the selected split and today's: as a table, or as a picture in FILE",
    )
    group = parser.add_argument_group("failures, cost and energy of the selected split (default: omitted)")
    group.add_argument(
        "--mtbf", type=positive, metavar="HOURS", help="mean time between failures of one GPU, e.g. 50000"
    )
    group.add_argument(
        "--checkpoint-s", type=non_negative, default=60.0, help="time to write a checkpoint (default: 60)"
    )
    group.add_argument(
        "--restart-s", type=non_negative, default=600.0, help="time to restart after a failure (default: 600)"
    )
    group.add_argument(
        "--price-per-gpu-hour", type=positive, metavar="PRICE", help="price of a GPU-hour, in any currency"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE|FOLDER/",
        help="write the selected plan here; a folder (run/) gets plan.json, train.sh, a Slurm file and a README",
    )
    parser.add_argument(
        "--page", metavar="FILE", help="write an HTML page: tokens/s against GPUs, memory against limits"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


PUBLISHED = ("alpa", "dapple", "metis", "mist")


def _systems(text: str) -> tuple[str, ...]:
    """Parse the names of planning systems (an argparse type)."""
    known = ("octopipe", *PUBLISHED)
    names = known if text == "all" else tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name[:40]!r} does not plan clusters; one of {', '.join(known)}, or all")
    return names


def positive(text: str) -> float:
    """Parse a finite number above 0 (an argparse type)."""
    value = non_negative(text)
    if value < 1e-6:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is too small; give a number > 0")
    return value


def share(text: str) -> float:
    """Parse a share of at least 0 and below 1 (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a share; give a number from 0 up to 1")
    return value


def run(args: argparse.Namespace) -> int:
    from octopipe.base.clock import process_began
    from octopipe.base.errors import DoesNotFitError, OctoPipeError
    from octopipe.base.stop import StopRequest
    from octopipe.cli.verbs.plan_answer import numbers_of, provenance_of, reasons_of, show
    from octopipe.cli.verbs.tune import _check_writable
    from octopipe.search.planner.commands import command_lines
    from octopipe.search.planner.runtimes import RUNTIMES
    from octopipe.search.planner.search import search
    from octopipe.search.planner.splits import FIXABLE, parse_split

    # The budget counts from the command's start, including the start of Python.
    began = process_began() if sys.argv[1:2] == ["plan"] else time.monotonic()
    folder = _folder(args.output)
    args.output = str(folder / "plan.json") if folder is not None else args.output
    for path in (args.output, args.page, args.why):
        if path:
            _check_writable(path)
    spec, base, gpus = _base(args)
    if args.global_batch is None:
        raise OctoPipeError("the number of sequences per step is missing; give --global-batch")
    fixed = {name: getattr(args, name) for name in FIXABLE if getattr(args, name) is not None}
    published = [name for name in args.system if name in PUBLISHED]
    if published:
        from octopipe.cli.verbs.plan_published import refuse_idle, run_published

        refuse_idle(args)
        if "octopipe" not in args.system:
            return run_published(args, spec, base, gpus, fixed, published, None)
    screen = console(stderr=True)
    live: Any = screen.status("evaluating splits ...") if screen.is_terminal else nullcontext()
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
                # The prediction for other numbers of GPUs needs a share of the same time.
                budget_s=args.budget * (SEARCHING if args.output or args.page else 1.0),
                began=began,
                margin=args.margin,
                seed=args.seed,
                say=None if status is None else status.update,
                stop=lambda: stop.requested,
            )
        except DoesNotFitError as error:
            if not published:
                raise
            unfit = str(error)
    if published and not stop.requested:
        return run_published(args, spec, base, gpus, fixed, published, found, unfit)
    assert found is not None
    best = found.best
    reasons = reasons_of(found, spec)
    plan_file = args.output if folder is None else "plan.json"
    lines = command_lines(best, spec=spec, model=args.model, plan_file=plan_file, runtime=args.runtime)
    if args.why:
        _write_why(args.why, found, reasons)
    record: dict[str, Any] = {}
    if args.output or args.page:
        left = 0.0 if found.interrupted else 0.95 * args.budget - (time.monotonic() - began)
        record = _record(args, spec, base, found, fixed, left, lines)
    plan = None
    if best.plan is not None:
        plan = best.plan.with_extra(**provenance_of(args, best), cluster_plan=record)
    _write_plan(args, plan, record)
    if folder is not None:
        _write_folder(folder, spec, found, lines, reasons)
    if args.json:
        print_json(numbers_of(args, found, lines, reasons))
    else:
        show(args, spec, found, lines, reasons)
    return stop.exit_code(0)


def _write_plan(args: argparse.Namespace, plan: Plan | None, record: dict[str, Any]) -> None:
    """Write the plan file requested with -o and the page requested with --page."""
    from octopipe.base.files import write_whole
    from octopipe.plans.file import plan_to_json, save_plan

    if args.output and plan is not None:
        save_plan(plan, args.output)
    if args.page:
        from octopipe.views.report.cluster import page

        write_whole(args.page, page(record, None if plan is None else plan_to_json(plan)).encode())


def _folder(output: str | None) -> Path | None:
    """Return the folder that -o names, creating it if necessary; None if -o names a file."""
    from octopipe.base.errors import OctoPipeError

    if not output or not (output.endswith(("/", os.sep)) or os.path.isdir(output)):
        return None
    try:
        os.makedirs(output, exist_ok=True)
    except OSError as error:
        raise OctoPipeError(f"{output}: cannot make the folder ({error.strerror}); give another one to -o") from None
    return Path(output)


def _write_folder(folder: Path, spec: ModelSpec, found: Found, lines: dict[str, str], reasons: Reasons) -> None:
    """Write the launch script, the Slurm file and the README next to the plan."""
    from octopipe.base.files import write_whole
    from octopipe.cli.verbs.plan_answer import changes, why_words
    from octopipe.search.planner.launch import launch_of

    title = f"{spec.name} on {found.best.setup.num_gpus} GPUs"
    words = [*changes(found), *why_words(reasons)]
    made = launch_of(found.best, lines, title=title, words=words, skipped=found.skipped)
    for name, text in made.files.items():
        write_whole(folder / name, text.encode())
        if name.endswith((".sh", ".sbatch")):
            os.chmod(folder / name, 0o755)


STACKS = {
    "megatron": ("megatron-2026-06", "megatron-2026", "megatron-2025", "megatron-2024", "megatron-2021"),
    "torchtitan": ("torchtitan",),
    "torch": ("plain-torch",),
    "octopipe": ("octopipe",),
}
"""The stacks of each runtime if no stack is named, newest first; other runtimes use the default stack."""


def stack_for(asked: str | None, runtime: str, kind: Gpu, precision: str) -> Stack | None:
    """Return the stack that was asked for, else the runtime's newest that was fitted on this GPU generation and
    precision.

    If none was, a runtime with only one stack gets that one, and others get None.
    """
    from octopipe.costs.analytic.calibration import stack_named, stacks_on

    if asked is not None:
        return stack_named(asked)
    known = STACKS.get(runtime, ())
    fitted = [name for name in known if name in stacks_on(kind, precision)]
    name = fitted[0] if fitted else known[0] if len(known) == 1 else None
    return None if name is None else stack_named(name)


def _base(args: argparse.Namespace) -> tuple[ModelSpec, Setup, int]:
    """Return the model, the set-up without sizes, and the number of GPUs."""
    from dataclasses import replace

    from octopipe.base.errors import OctoPipeError
    from octopipe.costs.analytic.items import settled
    from octopipe.costs.cluster.fields import GpuName
    from octopipe.costs.cluster.file import count_gpus, read_cluster
    from octopipe.costs.cluster.hardware import gpu
    from octopipe.costs.cluster.setup import DEFAULT_GPU, Setup
    from octopipe.costs.resolve import default_seq, resolve_spec
    from octopipe.search.planner.splits import FIXABLE

    spec = resolve_spec(args.model)
    if spec is None:
        raise OctoPipeError(
            f"{args.model} contains times of one split only; to plan a cluster name a preset or a config.json"
        )
    if args.mtp:
        from octopipe.search.planner.predictions import planned_for

        spec = planned_for(spec, args.runtime)
    nodes: Any = ()
    kind = GpuName().read("gpu", args.gpu or DEFAULT_GPU)
    gpus = args.gpus
    if args.cluster:
        if args.gpu or args.gpus_per_node:
            raise OctoPipeError("the cluster file says which GPUs there are; leave --gpu and --gpus-per-node out")
        nodes = read_cluster(args.cluster)
        kind = max((gpu(name) for name, _, _ in nodes), key=lambda g: g.bf16_tflops * g.clock)
        gpus = gpus or count_gpus(nodes)
    if gpus is None:
        raise OctoPipeError("the number of GPUs is missing; give --gpus N, or a --cluster file")
    given = {k: v for k, v in setting_from(args).items() if k not in ("model", "recompute", *FIXABLE)}
    zero = {} if args.zero is None else {"zero": args.zero}
    stack = stack_for(args.stack, args.runtime, kind, args.precision or "bf16")
    base = Setup(**{"seq": default_seq(spec), **given, **zero, "gpu": kind, "nodes": nodes, "stack": stack})
    for name in ("images", "recordings"):
        counts = getattr(base, name)
        if len(counts) > 1:  # micro-batches are not known before the search: every sequence gets the mean
            mean: dict[str, Any] = {name: (sum(counts) / len(counts),)}
            setattr(args, name, mean[name][0])
            base = replace(base, **mean)
    return *settled(spec, base), gpus


def _record(
    args: argparse.Namespace,
    spec: ModelSpec,
    base: Setup,
    found: Found,
    fixed: dict[str, int],
    seconds: float,
    lines: dict[str, str],
) -> dict[str, Any]:
    """Return the data shown in the panel of a report and on the page."""
    from octopipe.cli.verbs.plan_answer import changes, reasons_of, why_words
    from octopipe.search.planner.record import record_of, scaled
    from octopipe.search.planner.runtimes import RUNTIMES

    points = scaled(
        spec,
        base,
        found,
        global_batch=args.global_batch,
        fixed=fixed,
        runtime=RUNTIMES[args.runtime],
        budget_s=max(seconds, 0.0),
    )
    words = [*changes(found), *why_words(reasons_of(found, spec))]
    return record_of(found, spec, words=words, scaling=points, commands=lines)


def _write_why(path: str, found: Found, reasons: Reasons) -> None:
    """Write the picture of where the time of a step goes."""
    from octopipe.base.files import write_whole
    from octopipe.views.report.cluster import short
    from octopipe.views.report.why_picture import why_svg

    rows = []
    for name, why in reasons.items():
        candidate = found.today if name == "today" else found.best
        if why is not None and candidate is not None:
            rows.append((f"{name}: {short(candidate.split.words())}", why.as_dict()))
    write_whole(path, why_svg(rows, alone=True).encode())
