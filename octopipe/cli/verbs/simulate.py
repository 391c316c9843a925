"""`octopipe simulate MODEL --system NAME | --plan FILE`: predicts step time, bubbles, memory and a timeline.

Knows: how a prediction is shown. Does not know: how it is computed (simulator.py).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octopipe.base.display import milliseconds
from octopipe.cli.verbs.common import (
    DOES_NOT_FIT,
    PriceFrom,
    add_model_arguments,
    add_setting_arguments,
    console,
    costs_from,
    counted,
    micro_batches_from,
    named,
    non_negative,
    print_json,
    provenance,
    setting_from,
    setup_words,
    whole_number,
)
from octopipe.cli.verbs.numbers import (
    PlanBound,
    after_words,
    bound_of,
    contended,
    contended_numbers,
    contended_words,
    evenly_routed_ms,
    exchange_words,
    model_of_plan,
    path_words,
    uneven_words,
)

if TYPE_CHECKING:
    from octopipe.costs.table import CostTable
    from octopipe.plans.plan import Plan
    from octopipe.simulation.timeline import Timeline


UNEQUAL = "stages_of_cluster"
"""Key in plans whose stages have device meshes of their own (planner/published/)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, or_profile=True)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--system", help="a published system (`octopipe systems`); default: 1f1b")
    what.add_argument("--plan", metavar="FILE", help="simulate this plan file instead of a system")
    add_setting_arguments(parser)
    parser.add_argument("--chunks", type=whole_number, help="stages per rank, for systems that interleave")
    parser.add_argument(
        "--channel",
        choices=("directed", "pair", "single", "blocking"),
        default="directed",
        help="which sends and receives share an in-order queue (default: directed)",
    )
    parser.add_argument(
        "--jitter",
        type=non_negative,
        metavar="SIGMA",
        help="also simulate step times with random variation of op times",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan")
    parser.add_argument("--timeline", metavar="FILE", help="write the timeline (for `octopipe report`)")


def run(args: argparse.Namespace) -> int:
    from octopipe.plans.file import save_plan
    from octopipe.simulation.lowering import lower
    from octopipe.simulation.simulator import jitter_ms, simulate

    plan, costs = plan_and_costs(args)
    program = lower(plan, costs, channel=args.channel)
    timeline = simulate(program, costs)
    bound = bound_of(costs, plan, timeline.step_ms)
    shared = contended(plan, costs, args.model or model_of_plan(plan), args.channel)
    numbers = {
        "model": costs.model,
        "system": plan.extra.get("system"),
        "setup": None if costs.setup is None else costs.setup.as_dict(),
        **({"stages_of_cluster": plan.extra[UNEQUAL]} if UNEQUAL in plan.extra else {}),
        "split_backward": plan.splits_backward,
        "pp": plan.num_ranks,
        "micro_batches": plan.num_micro_batches,
        "stages": len(plan.stages),
        "channel": args.channel,
        **timeline.summary(),
        **bound.numbers(),
        **contended_numbers(shared),
        **costs.throughput(plan.num_ranks, plan.num_micro_batches, timeline.step_ms),
    }
    even_ms = evenly_routed_ms(plan, costs, args.model or model_of_plan(plan))
    if even_ms is not None:
        numbers["evenly_routed_ms"] = even_ms
    if args.jitter is not None:
        runs = max(1000, costs.data_parallel)
        after = timeline.step_ms - timeline.makespan_ms
        samples = jitter_ms(program, costs, sigma=args.jitter, runs=runs) + after
        groups = samples[: runs - runs % costs.data_parallel].reshape(-1, costs.data_parallel)
        numbers["jitter"] = {
            "sigma": args.jitter,
            "mean_ms": float(samples.mean()),
            "p95_ms": float(_quantile(samples, 0.95)),
            "pipelines": costs.data_parallel,
            "slowest_pipeline_ms": float(groups.max(axis=1).mean()),
        }
    if args.output:
        save_plan(plan, args.output)
    if args.timeline:
        timeline.save(args.timeline)
    if args.json:
        print_json(numbers)
    else:
        _show(plan, costs, timeline, numbers, bound, shared)
    return 0 if timeline.fits else DOES_NOT_FIT


def plan_and_costs(args: argparse.Namespace) -> tuple[Plan, CostTable]:
    """Return the plan that the flags describe, and its costs."""
    from octopipe.search.recompute import plan_under
    from octopipe.search.systems import build_plan

    if args.plan:
        return _plan_of_file(args)
    costs = costs_from(args)
    options = {} if args.chunks is None else {"chunks": args.chunks}

    def build(table: CostTable) -> Plan:
        name, split = args.system or "1f1b", args.split_backward
        return build_plan(name, table, args.pp, micro_batches_from(args), split_backward=split, **options)

    if args.recompute == "auto":
        plan, costs = plan_under("auto", build, PriceFrom(args))
        if costs.setup is not None:
            args.recompute, args.recompute_layers = costs.setup.recompute, costs.setup.recompute_layers
    else:
        plan = build(costs)
    return plan.with_extra(**provenance(args, costs)), costs


def _plan_of_file(args: argparse.Namespace) -> tuple[Plan, CostTable]:
    """Load a plan file; its costs are those of the set-up it was made for unless flags say otherwise."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.cli.verbs.common import model_from, refuse_idle_flags
    from octopipe.plans.file import load_plan
    from octopipe.plans.setting import costs_of_plan

    plan = load_plan(args.plan)
    decided = {"--pp": plan.num_ranks, "--micro-batches": plan.num_micro_batches}
    for flag, value in decided.items():
        given = getattr(args, flag[2:].replace("-", "_"))
        if given is not None and given != value:
            raise OctoPipeError(f"{args.plan} has {flag[2:]} {value}, not {given}; leave {flag} out")
    for name in ("chunks", "split_backward", "recompute", "recompute_layers", "gpus", "global_batch", "lengths"):
        if getattr(args, name) is not None:
            raise OctoPipeError(f"--{name.replace('_', '-')} is decided by {args.plan}; leave it out")
    args.pp, args.micro_batches = plan.num_ranks, plan.num_micro_batches
    given = {}
    if args.model or args.profile:
        refuse_idle_flags(args, model_from(args))
        given["model"] = args.model
    given |= {k: v for k, v in setting_from(args).items() if k != "model"}
    return plan, costs_of_plan(plan, given, args.plan, naming=f"MODEL: octopipe simulate MODEL --plan {args.plan}")


def unequal_words(plan: Plan) -> str:
    """Describe the GPUs of stages that a published system gave unequal meshes, which no single set-up describes."""
    stages = plan.extra.get(UNEQUAL)
    if not isinstance(stages, list) or not all(isinstance(s, dict) for s in stages):
        return ""
    sizes = [f"{s.get('gpus')} (tp {s.get('tp')}, dp {s.get('dp')})" for s in stages]
    total = sum(s["gpus"] for s in stages if isinstance(s.get("gpus"), int))
    return f"{total} GPUs in {counted(len(stages), 'stage')} of {', '.join(dict.fromkeys(sizes))}"


def _quantile(samples: Any, q: float) -> float:
    import numpy as np

    return float(np.quantile(samples, q))


def _show(
    plan: Plan,
    costs: CostTable,
    timeline: Timeline,
    numbers: dict[str, Any],
    bound: PlanBound,
    shared: Timeline | None,
) -> None:
    from rich.table import Table

    from octopipe.views.export.terminal import timeline_text

    out = console()
    limited = any(c != float("inf") for c in timeline.capacity_bytes)
    fits = "" if not limited else ", [green]fits[/]" if timeline.fits else ", [bold red]does not fit[/]"
    backward = "backward split" if plan.splits_backward else "backward fused"
    out.print(
        f"[bold]{named(timeline.label or 'plan')}[/] on {named(costs.model)} ({backward}): "
        f"[bold]{milliseconds(timeline.step_ms)}[/] a step, "
        f"{100 * timeline.bubble_ratio:.1f} % bubble{fits}"
    )
    if shared is not None:
        out.print(contended_words(shared), markup=False)
    out.print(setup_words(costs.setup) or unequal_words(plan), style="cyan", markup=False)
    speed, share = numbers["tokens_per_gpu_per_second"], numbers["mfu"]
    again = sum(len(s.recomputed_layers) for s in plan.stages)
    overlap = timeline.overlap
    facts = [
        f"{counted(len(plan.stages), 'stage')} on {counted(plan.num_ranks, 'rank')}, "
        f"{counted(plan.num_micro_batches, 'micro-batch')}",
        after_words(timeline).strip(" ()"),
        bound.words(timeline.step_ms) if bound.ms > 0 else "",
        f"{speed:.0f} tokens/GPU/s" if speed else "",
        f"{100 * share:.1f} % MFU" if share else "",
        f"{again} of {plan.num_layers} layers recomputed" if again else "",
        f"{overlap.communications} communications, {100 * overlap.rate:.0f} % overlapped",
    ]
    out.print("; ".join(f for f in facts if f), style="dim")
    uneven = uneven_words(numbers.get("evenly_routed_ms"), timeline.step_ms)
    for words in (path_words(plan), exchange_words(timeline), uneven):
        if words:
            out.print(words, style="dim")
    if "jitter" in numbers:
        j = numbers["jitter"]
        out.print(
            f"with {100 * j['sigma']:g} % jitter: {j['mean_ms']:.1f} ms mean, {j['p95_ms']:.1f} ms 95th percentile, "
            f"{j['slowest_pipeline_ms']:.1f} ms the slowest of {counted(costs.data_parallel, 'pipeline')} on average",
            style="dim",
        )
    b = timeline.bubbles
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rank", no_wrap=True, min_width=4)
    table.add_column("stages", overflow="ellipsis", no_wrap=True, max_width=12)
    memory_title = "GiB of limit" if limited else "peak GiB"
    for title in ("layers", "busy ms", "idle ms", "edge", "less", "comm", "rest", memory_title):
        table.add_column(title, justify="right", no_wrap=True, min_width=5)
    for r in range(plan.num_ranks):
        mine = plan.stages_of_rank(r)
        peak = timeline.peak_gib[r]
        limit = timeline.capacity_bytes[r] / (1 << 30)
        memory = f"{peak:.1f}" + (f" of {limit:.1f}" if limited else "")
        parts = (timeline.busy_ms, b.idle_ms, b.boundary_ms, b.imbalance_ms, b.communication_ms, b.residual_ms)
        table.add_row(
            str(r),
            " ".join(map(str, mine)),
            str(sum(plan.stages[s].num_layers for s in mine)),
            *(f"{x[r]:.1f}" for x in parts),
            memory if peak <= limit else f"[red]{memory}[/]",
        )
    out.print(table)
    out.print("idle = edge (before first, after last op) + less (work than the busiest rank)", style="dim")
    out.print("       + comm (waiting for a transfer in flight) + rest", style="dim")
    out.print(timeline_text(timeline, width=out.width, color=out.is_terminal and not out.no_color))
