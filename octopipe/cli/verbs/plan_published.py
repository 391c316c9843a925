"""`octopipe plan --system alpa,mist,...`: the plans of published systems for the same cluster, side by side.

Knows: how their arrangements are shown, written and compared with our own search. Does not know: how they are found
(octopipe/search/planner/published/).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octopipe.cli.verbs.common import console, named, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octopipe.costs.cluster.setup import Setup
    from octopipe.models.spec import ModelSpec
    from octopipe.search.planner.published import SystemPlan
    from octopipe.search.planner.search import Found

THEIR_SIZES = ("tp", "zero")
"""Sizes that may be fixed for published systems, which choose all others per stage."""


def refuse_idle(args: argparse.Namespace) -> None:
    """Raise OctoPipeError for flags that have no effect on published systems."""
    from octopipe.base.errors import OctoPipeError

    for name in ("cp", "ep", "etp", "pp", "dp", "vp", "hsdp", "micro_batch_size"):
        if getattr(args, name) is not None:
            flag = name.replace("_", "-")
            raise OctoPipeError(f"--{flag}: published systems choose it for each stage; leave it out")
    for name in ("lora", "lora_on", "frozen", "offload_optimizer"):
        if getattr(args, name) is not None:
            flag = name.replace("_", "-")
            raise OctoPipeError(f"--{flag}: published systems train all weights; leave it out")
    if args.mtp:
        raise OctoPipeError("--mtp: published systems plan chains of layers; leave it out")
    if args.page:
        raise OctoPipeError("--page shows our own search; leave --system out")
    if args.runtime != "any":
        raise OctoPipeError(f"--for {args.runtime}: published systems plan for their own runtimes; leave it out")


def run_published(
    args: argparse.Namespace,
    spec: ModelSpec,
    base: Setup,
    gpus: int,
    fixed: Mapping[str, int],
    names: Sequence[str],
    found: Found | None,
    unfit: str = "",
) -> int:
    """Plan with every named system, and write the fastest plan. `unfit`: why our own search found nothing."""
    from octopipe.base.errors import DoesNotFitError, OctoPipeError
    from octopipe.search.planner.published import plan_by

    if found is None and args.today and not unfit:
        raise OctoPipeError("--today is compared with our own search; add octopipe to --system")
    plans: dict[str, SystemPlan] = {}
    reasons: dict[str, str] = {"octopipe": unfit} if unfit else {}
    for name in names:
        try:
            plans[name] = plan_by(
                name,
                spec,
                base,
                gpus=gpus,
                global_batch=args.global_batch,
                recompute=args.recompute or "auto",
                fixed={k: v for k, v in fixed.items() if k in THEIR_SIZES},
                budget_s=args.budget,
            )
        except DoesNotFitError as error:
            reasons[name] = str(error).removeprefix(f"{name}: ")
        except KeyboardInterrupt:  # show what is finished; the exit code says that it is incomplete
            if not plans and found is None:
                raise
            reasons |= {left: "interrupted before its end" for left in names if left not in plans}
            break
    if not plans and found is None:
        raise DoesNotFitError("; ".join(f"{name}: {why}" for name, why in reasons.items()))
    best = min(plans.values(), key=lambda p: p.step_ms, default=None)
    ours = found is not None and (best is None or found.best.step_ms <= best.step_ms)
    if args.output:
        _write(args, found if ours else None, best)
    if args.json:
        print_json(_numbers(args, found, plans, reasons))
        return 0
    _show(args, spec, gpus, found, plans, reasons, "octopipe" if ours or best is None else best.arrangement.system)
    return 0


def _write(args: argparse.Namespace, found: Found | None, best: SystemPlan | None) -> None:
    from octopipe.cli.verbs.plan_answer import provenance_of
    from octopipe.costs.table_file import record_of
    from octopipe.plans.file import save_plan

    if found is not None and found.best.plan is not None:
        save_plan(found.best.plan.with_extra(**provenance_of(args, found.best)), args.output)
    elif best is not None:
        # No single set-up describes stages with different meshes, so the plan stores its costs.
        costs = record_of(best.costs)
        save_plan(best.plan.with_extra(cost_table=costs, step_ms=best.step_ms), args.output)


def _numbers(
    args: argparse.Namespace, found: Found | None, plans: Mapping[str, SystemPlan], reasons: Mapping[str, str]
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [plan.as_dict() for plan in plans.values()]
    rows += [{"system": name, "fits": False, "reason": why} for name, why in reasons.items()]
    out: dict[str, Any] = {"model": args.model, "global_batch": args.global_batch, "systems": rows}
    if found is not None:
        out["octopipe"] = found.best.as_dict()
        for row in rows:
            if "step_ms" in row:
                row["octopipe_speedup"] = row["step_ms"] / found.best.step_ms
    return out


def _show(
    args: argparse.Namespace,
    spec: ModelSpec,
    gpus: int,
    found: Found | None,
    plans: Mapping[str, SystemPlan],
    reasons: Mapping[str, str],
    winner: str,
) -> None:
    from rich.table import Table

    from octopipe.cli.verbs.plan_answer import changes, show_table

    out = console()
    out.print(f"[bold]{named(spec.name)}[/] on {gpus} GPUs, global batch {args.global_batch}: plans by system")
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("system", "stages", "samples", "tok/s", "MFU%", "bub%", "step ms", "GiB"):
        table.add_column(title, justify="left" if title == "system" else "right", no_wrap=True)

    def row(name: str, stages: int, samples: int, p: Any) -> None:
        table.add_row(
            name,
            str(stages),
            str(samples),
            f"{p.tokens_per_gpu_per_second:.0f}",
            "" if p.mfu is None else f"{100 * p.mfu:.1f}",
            f"{100 * p.bubble:.1f}",
            f"{p.step_ms:.1f}",
            f"{p.peak_gib:.0f}/{p.limit_gib:.0f}",
            style="bold green" if name == winner else None,
        )

    if found is not None:
        s = found.best.split
        row("octopipe", s.pp * s.vp, s.dp * s.micro_batch_size, found.best)
    for name, plan in sorted(plans.items(), key=lambda item: item[1].step_ms):
        row(name, len(plan.arrangement.stages), plan.arrangement.samples, plan)
    out.print(table)
    out.print("samples: sequences of one micro-batch over all replicas; tok/s per GPU", style="dim")
    for name, plan in plans.items():
        out.print(f"[bold]{name}[/]")
        for line in _stage_lines(plan):
            out.print(f"  {line}", markup=False)
    for name, why in reasons.items():
        out.print(f"[bold]{name}[/]: {named(why)}")
    if found is not None:
        out.print("[bold]octopipe[/]")
        show_table(args, found)
        for sentence in changes(found):
            out.print(sentence)
    if args.output:
        out.print(f"{winner}'s plan written to {args.output}; next: octopipe report {args.output}")


def _stage_lines(plan: SystemPlan) -> list[str]:
    """Return the stages in words; consecutive stages with equal meshes share one line."""
    out: list[str] = []
    alike: list[Any] = []

    def flush() -> None:
        if not alike:
            return
        first, last = alike[0], alike[-1]
        tail = first.words().split(" on ", 1)[1]
        if len(alike) == 1:
            out.append(first.words())
        else:
            out.append(f"layers {first.first}-{last.stop - 1} in {len(alike)} stages, each on {tail}")
        alike.clear()

    for stage in plan.arrangement.stages:
        if alike and (stage.mesh, stage.again, stage.offload) != (alike[0].mesh, alike[0].again, alike[0].offload):
            flush()
        alike.append(stage)
    flush()
    return out
