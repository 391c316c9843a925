"""`octopipe plan MODEL --gpus N --gpu KIND --global-batch B`: how to split a model over a whole cluster.

Knows: the flags, the table, the winner in words beside what runs today. Does not know: how splits are found
(octopipe/search/planner/).
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
    print_json,
    seed_number,
    whole_number,
)
from octopipe.cli.verbs.tune import seconds

if TYPE_CHECKING:
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
    from octopipe.cli.verbs.tune import _check_writable
    from octopipe.plans.file import save_plan
    from octopipe.search.planner.commands import command_lines
    from octopipe.search.planner.runtimes import RUNTIMES
    from octopipe.search.planner.search import search
    from octopipe.search.planner.splits import parse_split

    for path in (args.output, args.page):
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
        print_json(numbers_of(args, found, lines))
    else:
        _show(args, spec, found, lines)
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
    from octopipe.search.planner.record import record_of, scaled
    from octopipe.search.planner.runtimes import RUNTIMES

    # Whoever has ended the search does not wait for what it would be on other numbers of GPUs.
    more: dict[str, Any] = {"budget_s": 0.0} if found.interrupted else {}
    points = scaled(
        spec, base, found, global_batch=args.global_batch, fixed=fixed, runtime=RUNTIMES[args.runtime], **more
    )
    return record_of(found, model=spec.name, words=changes(found), scaling=points)


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


def numbers_of(args: argparse.Namespace, found: Found, lines: dict[str, str]) -> dict[str, Any]:
    return {
        "model": args.model,
        "gpus": found.best.setup.num_gpus,
        "global_batch": args.global_batch,
        "best": found.best.as_dict(),
        "setup": found.best.setup.as_dict(),
        "tokens_per_gpu_per_second": found.best.tokens_per_gpu_per_second,
        "mfu": found.best.mfu,
        "fits": found.best.fits,
        "today": None if found.today is None else found.today.as_dict(),
        "speedup_over_today": None if found.today is None else found.today.step_ms / found.best.step_ms,
        "changes": changes(found),
        "commands": lines,
        "candidates": [c.as_dict() for c in found.ranked[: args.rows]],
        "splits": found.splits,
        "judged": found.judged,
        "cut_short": found.cut_short,
        "skipped": list(found.skipped),
        "margin": found.margin,
        "fastest": None if found.fastest is None else found.fastest.as_dict(),
        "seconds": found.seconds,
        "interrupted": found.interrupted,
    }


def _show(args: argparse.Namespace, spec: ModelSpec, found: Found, lines: dict[str, str]) -> None:
    out, best = console(), found.best
    out.print(f"[bold]{spec.name}[/] on {best.setup.words()}")
    show_table(args, found)
    for sentence in changes(found):
        out.print(sentence)
    if found.interrupted:
        out.print("interrupted: this is the best split so far")
    for name, line in lines.items():
        out.print(f"[bold]{name}[/]:", end=" ")
        out.print(line, markup=False, soft_wrap=True)
    if args.page:
        out.print(f"page written to {args.page}")
    if args.output:
        out.print(f"plan written to {args.output}; next: octopipe report {args.output}")


def show_table(args: argparse.Namespace, found: Found) -> None:
    """The splits, best first, and how much of the space was looked at."""
    from rich.table import Table

    out, best = console(), found.best
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    titles = ("tp", "cp", "ep", "pp", "vp", "dp", "mb", "Z", "recompute", "tok/s", "MFU%", "bub%", "GiB", "fits", "by")
    for title in titles:
        left = title in ("recompute", "by")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    rows = [*([found.today] if found.today else []), *found.ranked[: args.rows]]
    for c in rows:
        s = c.split
        style = "bold green" if c is best else "yellow" if c is found.today else None
        table.add_row(
            *map(str, (s.tp, s.cp, s.ep, s.pp, s.vp, s.dp, s.micro_batch_size, s.zero)),
            c.recompute,
            f"{c.tokens_per_gpu_per_second:.0f}",
            "" if c.mfu is None else f"{100 * c.mfu:.1f}",
            f"{100 * c.bubble:.1f}",
            f"{c.peak_gib:.0f}/{c.limit_gib:.0f}",
            "yes" if c.fits else "no",
            "today" if c is found.today else {"estimated": "est.", "interleaved": "inter"}.get(c.how, c.how),
            style=style,
        )
    out.print(table)
    out.print("mb micro-batch, Z ZeRO, tok/s per GPU; by: how the row was found (est.: not simulated)", style="dim")
    rest = "no time for the others: give a longer --budget" if found.cut_short else "the others' bounds are worse"
    seen = f"{found.splits} splits, {found.judged} judged, {rest}; {found.seconds:.1f} s"
    out.print(seen, style="dim")
    for sentence in found.skipped:
        out.print(sentence, style="dim")


def rates_words(setup: Setup) -> str:
    """Which stack's rates the numbers assume, and how far they were from runs."""
    from octopipe.costs.analytic.calibration import is_calibrated, stack_named, stacks_on

    stack = stack_named(setup.stack)
    assert setup.gpu is not None
    if is_calibrated(setup.gpu, setup.precision, setup.stack):
        errors = "" if stack.errors is None else f" ({stack.errors.words()})"
        return f"Rates of {stack.name}{errors}; --stack names another."
    others = stacks_on(setup.gpu, setup.precision)
    instead = f" Stacks fitted on it: {', '.join(others)} (--stack)." if others else ""
    return (
        f"Rates of {stack.name}, which no run calibrates on {setup.gpu.name} in {setup.precision}: shares of the peak "
        "are taken over from other GPUs, precisions or single kernels, so absolute numbers may be far off; the order "
        f"of splits is more certain.{instead}"
    )


def changes(found: Found) -> list[str]:
    """The winner in words, beside what runs today."""
    best, today = found.best, found.today
    speed = f"{best.tokens_per_gpu_per_second:.0f} tokens/GPU/s"
    share = "" if best.mfu is None else f" ({100 * best.mfu:.1f} % MFU)"
    step = f"{best.step_ms / 1e3:.2f} s a step, {100 * best.bubble:.1f} % bubble"
    out = [f"best: {best.split.words()}: {speed}{share}, {step}."]
    out.append(rates_words(best.setup))
    if found.fastest is not None:
        gain = 100 * (best.step_ms / found.fastest.step_ms - 1.0)
        out.append(
            f"{found.fastest.split.words()} ({found.fastest.how}) is {gain:.1f} % faster by this model, less than its "
            "error; the simpler split with memory to spare is chosen (--margin 0 takes the fastest)."
        )
    if today is None:
        return out
    fits = "" if today.fits else f", and needs {today.peak_gib:.0f} of {today.limit_gib:.0f} GiB: it does not fit"
    gain = today.step_ms / best.step_ms - 1.0
    verdict = f"{100 * gain:.1f} % faster than today's" if gain > 0.0005 else "no faster than today's"
    out.append(f"{verdict} {today.split.words()} ({today.tokens_per_gpu_per_second:.0f} tokens/GPU/s{fits}).")
    names = {"tp": "tensor parallelism", "cp": "context parallelism", "ep": "expert parallelism"}
    names |= {"pp": "pipeline ranks", "vp": "stages per rank", "dp": "data parallelism"}
    names |= {"micro_batch_size": "micro-batch size", "zero": "ZeRO"}
    moved = [
        f"{words} {getattr(today.split, name)} -> {getattr(best.split, name)}"
        for name, words in names.items()
        if getattr(today.split, name) != getattr(best.split, name)
    ]
    if today.recompute != best.recompute:
        moved.append(f"recomputation {today.recompute} -> {best.recompute}")
    if best.how == "tuned":
        moved.append("partition, placement and order tuned")
    out.append("what changed: " + (", ".join(moved) if moved else "nothing") + ".")
    return out
