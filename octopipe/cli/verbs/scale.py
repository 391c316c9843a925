"""`octopipe scale MODEL --gpus 32,64,...,8192`: predicts one split on increasing numbers of GPUs.

Knows: weak scaling (the batch grows with the GPUs) and strong scaling (it does not), and the cost of waiting for the
slowest of many pipelines. Does not know: how a step is predicted.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octopipe.cli.verbs.common import (
    add_model_arguments,
    add_setting_arguments,
    console,
    costs_from,
    non_negative,
    print_json,
    whole_number,
)

if TYPE_CHECKING:
    from octopipe.costs.cluster.setup import Setup


def sizes(text: str) -> list[int]:
    """Parse numbers of GPUs (an argparse type); `32,...,8192` is filled in by doubling."""
    out: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if part in ("...", "…"):
            out.append(0)
            continue
        out.append(whole_number(part))
    filled: list[int] = []
    for i, value in enumerate(out):
        if value:
            filled.append(value)
            continue
        if not filled or i + 1 >= len(out) or out[i + 1] <= filled[-1]:
            raise argparse.ArgumentTypeError(f"{text}: ... must be between two sizes, the larger one last")
        while filled[-1] * 2 < out[i + 1]:
            filled.append(filled[-1] * 2)
    if not filled or filled != sorted(set(filled)):
        raise argparse.ArgumentTypeError(f"{text}: give growing numbers of GPUs, like 32,64,128 or 32,...,8192")
    return filled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_setting_arguments(parser)
    for action in parser._actions:
        if action.dest == "gpus":
            action.type, action.metavar, action.help = sizes, "N,...,M", "numbers of GPUs: 32,64,128 or 32,...,8192"
        if action.dest == "global_batch":
            action.help = "sequences per step on the first number of GPUs (default: 2 x pp micro-batches each)"
    parser.add_argument("--system", default="1f1b", help="a published system (`octopipe systems`); default: 1f1b")
    parser.add_argument("--chunks", type=whole_number, help="stages per rank, for systems that interleave")
    parser.add_argument(
        "--jitter",
        type=non_negative,
        default=0.03,
        metavar="SIGMA",
        help="sigma of the random variation of op times (default: 0.03)",
    )

    group = parser.add_argument_group("the network beyond a pod (default: as --hardware says, else one flat network)")
    group.add_argument("--pod-nodes", type=whole_number, metavar="N", help="nodes under one switch per rail")
    group.add_argument(
        "--oversubscription",
        type=ratio,
        metavar="RATIO",
        help="bandwidth of the nodes of a pod over the bandwidth that leaves it (default: 1)",
    )
    group.add_argument(
        "--flows",
        type=whole_number,
        metavar="N",
        help="flows per connection that switches spread over uplinks by a hash, so that some "
        "share one (default: switches route by load)",
    )


def ratio(text: str) -> float:
    """Parse a number of at least 1 (an argparse type)."""
    value = non_negative(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is below 1; give 1 or more")
    return value


def on_network(args: argparse.Namespace, setup: Setup) -> Setup:
    """Return the set-up with the network of pods that the flags describe."""
    from octopipe.base.errors import OctoPipeError

    assert setup.gpu is not None
    if args.pod_nodes is None:
        if args.oversubscription is not None or args.flows is not None:
            raise OctoPipeError("--oversubscription and --flows are about links between pods; give --pod-nodes too")
        return setup
    pods = {"pod_gpus": args.pod_nodes * (setup.gpus_per_node or setup.gpu.gpus_per_node)}
    more = {"oversubscription": args.oversubscription or 1.0, "flows": args.flows}
    return replace(setup, gpu=replace(setup.gpu, **pods, **more))


def network_words(setup: Setup) -> str:
    """Describe the network that the costs assume."""
    kind = setup.gpu
    assert kind is not None
    if kind.pod_gpus is None:
        return "one flat network without contention; --pod-nodes, --oversubscription and --flows describe yours"
    spread = "routed by load" if kind.flows is None else f"{kind.flows} flows per connection spread by a hash"
    share = 100 / kind.between_pods
    words = f"pods of {kind.pod_gpus} GPUs, oversubscribed {kind.oversubscription:g} to 1 beyond, {spread}"
    return f"{words}: a link between pods carries {share:.0f} % of its bandwidth"


def run(args: argparse.Namespace) -> int:
    from octopipe.base.errors import OctoPipeError

    if not args.gpus:
        raise OctoPipeError("the numbers of GPUs are missing; give --gpus 32,64,128 or 32,...,8192")
    if args.dp is not None:
        raise OctoPipeError("--dp follows from the number of GPUs; leave it out")
    if args.lengths is not None:
        raise OctoPipeError(
            "scale assumes sequences of equal length; leave --lengths out, and give their typical length with --seq"
        )
    if args.recompute == "auto":
        raise OctoPipeError("scale evaluates one split; give --recompute none, selective or full")
    counts, args.gpus = args.gpus, args.gpus[0]
    if args.pp is None:
        raise OctoPipeError(
            "the number of pipeline ranks is missing; give --pp (and --tp); `octopipe plan` finds a split to scale"
        )
    costs = costs_from(args)
    setup = costs.setup
    if setup is None or setup.gpu is None:
        raise OctoPipeError(f"{args.model} contains measured times; to scale a cluster name a preset or a config.json")
    setup = on_network(args, setup)
    per_pipeline = setup.tp * setup.cp * setup.pp
    for count in counts:
        if count % per_pipeline:
            raise OctoPipeError(f"{count} GPUs are not a multiple of tp x cp x pp = {per_pipeline}; give multiples")
    rows = {kind: _rows(args, setup, counts, weak=kind == "weak") for kind in ("weak", "strong")}
    if args.json:
        about = {"jitter": args.jitter, "network": network_words(setup)}
        print_json({"model": args.model, "setup": setup.as_dict(), **about, **rows})
    else:
        _show(args, setup, rows)
    return 0


def _rows(args: argparse.Namespace, setup: Setup, counts: list[int], *, weak: bool) -> list[dict[str, Any]]:
    import numpy as np

    from octopipe.base.errors import NotApplicableError
    from octopipe.costs.resolve import costs_of_setup, resolve_spec
    from octopipe.search.systems import build_plan
    from octopipe.simulation.lowering import lower
    from octopipe.simulation.simulator import jitter_ms, simulate

    spec = resolve_spec(args.model)
    assert spec is not None and setup.global_batch is not None and setup.micro_batches is not None
    options = {} if args.chunks is None else {"chunks": args.chunks}
    out: list[dict[str, Any]] = []
    for count in counts:
        dp = count // (setup.tp * setup.cp * setup.pp)
        micro_batches = setup.micro_batches
        row: dict[str, Any] = {"gpus": count, "dp": dp}
        if not weak:
            micro_batches, left = divmod(setup.global_batch, dp * setup.micro_batch_size)
            if left or micro_batches < 1:
                out.append(row | {"reason": f"the batch of {setup.global_batch} does not divide over dp {dp}"})
                continue
        here = replace(setup, dp=dp, micro_batches=micro_batches)
        costs = costs_of_setup(spec, here)
        split = args.split_backward
        try:
            plan = build_plan(args.system, costs, setup.pp, micro_batches, split_backward=split, **options)
        except NotApplicableError as error:  # this row states the reason, and the other rows remain
            out.append(row | {"reason": str(error)})
            continue
        program = lower(plan, costs)
        timeline = simulate(program, costs)
        step = timeline.step_ms
        if args.jitter and dp > 1:
            # All pipelines wait for the slowest one: add the expected maximum of dp draws, less their mean.
            draws = np.sort(jitter_ms(program, costs, sigma=args.jitter, runs=1000))
            step += float(_mean_of_largest(draws, dp)) - float(draws.mean())
        rate = costs.throughput(plan.num_ranks, micro_batches, step)
        out.append(
            row
            | {
                "micro_batches": micro_batches,
                "global_batch": here.global_batch,
                "step_ms": step,
                "undisturbed_ms": timeline.step_ms,
                **rate,
                "tokens_per_second": (rate["tokens_per_gpu_per_second"] or 0.0) * count,
                "peak_gib": max(timeline.peak_gib),
                "fits": timeline.fits,
            }
        )
    first = next((r for r in out if "reason" not in r), None)
    for r in out:
        if first is not None and "reason" not in r:
            r["efficiency"] = r["tokens_per_gpu_per_second"] / first["tokens_per_gpu_per_second"]
    return out


def _mean_of_largest(draws: Any, number: int) -> float:
    """Return the expected maximum of n draws from an empirical distribution: sum of x_i (F(i)^n - F(i-1)^n)."""
    import numpy as np

    steps = np.arange(draws.size + 1) / draws.size
    return float(draws @ np.diff(steps**number))


def _show(args: argparse.Namespace, setup: Setup, rows: dict[str, list[dict[str, Any]]]) -> None:
    from rich.table import Table

    out = console()
    out.print(f"[bold]{args.model}[/], {args.system}, first row: {setup.words()}")
    for kind, lines in rows.items():
        grows = "the batch grows with the GPUs" if kind == "weak" else f"the batch stays {setup.global_batch}"
        out.print(f"\n[bold]{kind} scaling[/]: {grows}")
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
        for title in ("GPUs", "dp", "batch", "step ms", "tok/s/GPU", "tokens/s", "MFU", "efficiency", "GiB"):
            table.add_column(title, justify="right", no_wrap=True)
        for r in lines:
            if "reason" in r:
                continue
            table.add_row(
                str(r["gpus"]),
                str(r["dp"]),
                str(r["global_batch"]),
                f"{r['step_ms']:.1f}",
                f"{r['tokens_per_gpu_per_second']:.0f}",
                f"{r['tokens_per_second']:.3g}",
                f"{100 * r['mfu']:.1f} %",
                f"{100 * r['efficiency']:.1f} %",
                f"{r['peak_gib']:.1f}" + ("" if r["fits"] else " too much"),
            )
        out.print(table)
        for r in (r for r in lines if "reason" in r):
            out.print(f"{r['gpus']} GPUs: {r['reason']}", style="dim")
    words = f"with {100 * args.jitter:g} % jitter of every op: a step waits for the slowest of its dp pipelines"
    out.print(words, style="dim")
    out.print(network_words(setup), style="dim")
