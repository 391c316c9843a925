"""`octopipe tune PROFILE --measure`: runs plans while tuning, and keeps the plan with the shortest measured time.

Knows: what the flags mean for it, how the outcome is shown. Does not know: the loop (search/measured_tuning.py) or how
plans run (runtime/measure/tuned_run.py).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octopipe.base.errors import OctoPipeError
from octopipe.cli.verbs.common import console, costs_from, micro_batches_from, named, print_json, provenance
from octopipe.cli.verbs.validate import signed

if TYPE_CHECKING:
    from octopipe.search.measured_tuning import Outcome


def run_measured(args: argparse.Namespace) -> int:
    """Run `tune --measure`."""
    from octopipe.cli.verbs.recorded import recorded_workload
    from octopipe.cli.verbs.runnable import needs_torch
    from octopipe.costs.profile_file import load_profile
    from octopipe.plans.file import save_plan

    for flag, given in (
        ("--for", args.target != "octopipe"),
        ("--method", args.method != "best"),
        ("--start", args.start),
        ("--offload", args.offload),
    ):
        if given:
            raise OctoPipeError(f"--measure works with the default search only; leave {flag} out")
    profile = _profile_of(args, load_profile)
    ranks = profile.about.get("ranks", args.pp)
    if ranks != args.pp:
        raise OctoPipeError(
            f"{args.model} was measured on {ranks} ranks, and --pp is {args.pp}; give --pp {ranks}, or profile again "
            f"with --nproc {args.pp}"
        )
    with needs_torch():
        from octopipe.runtime.measure.trial import on_ranks
        from octopipe.runtime.measure.tuned_run import MeasuredTuneJob, measured_tune_task
    costs = costs_from(args)
    work = recorded_workload(profile, args.model, remedy=_remedy(args))
    if args.cut_head and work.graphs:
        raise OctoPipeError(
            f"{args.model} was measured with CUDA graphs, which plans with a cut head do not run with; profile without "
            "--graphs, or leave --cut-head out"
        )
    copies = (False, True) if args.copies is None and costs.static_bytes.any() else (bool(args.copies),)
    job = MeasuredTuneJob(
        work=work,
        profile=profile.with_costs(costs),
        num_micro_batches=micro_batches_from(args),
        tune_s=args.budget,
        budget_s=args.measure_for,
        copies=copies,
        cut_head=args.cut_head,
        recompute=args.recompute in (None, "auto") and not args.no_recompute,
        seed=args.seed,
        workers=args.workers,
        iterations=args.iterations,
        optimizer="adamw" if profile.about.get("optimizer") == "adamw" else "none",
    )
    screen = console(stderr=True)

    def listen(line: Any) -> None:
        screen.print(named(str(line)), style="dim", soft_wrap=True)

    patience_s = args.measure_for + 4 * args.budget + 600.0
    outcome: Outcome = on_ranks(
        measured_tune_task, args.pp, job, device=work.device, timeout_s=patience_s, listen=listen
    )[0]
    plan = outcome.best.plan.with_extra(**provenance(args, costs), measured=outcome.as_dict())
    if args.output:
        save_plan(plan, args.output)
    if args.corrected:
        outcome.profile.save(args.corrected)
    if args.json:
        print_json({**outcome.as_dict(), "output": args.output, "corrected": args.corrected})
    else:
        _tell(outcome, args)
    return 0


def _profile_of(args: argparse.Namespace, load_profile: Any) -> Any:
    """Load the profile that MODEL names; raise OctoPipeError if its layers cannot be run here as they were measured."""
    import os

    if not os.path.isfile(args.model):
        raise OctoPipeError(f"{args.model}: --measure needs a profile, whose layers it runs; {_remedy(args)}")
    profile = load_profile(args.model)
    if str(profile.about.get("model_code", "")).startswith("Megatron"):
        raise OctoPipeError(
            f"{args.model}: measured on Megatron-Core's chunks, which only a Megatron script can build; call "
            "octopipe.megatron.tune_measured there"
        )
    return profile


def _remedy(args: argparse.Namespace) -> str:
    return f"octopipe profile {args.model} --nproc {args.pp} -o profile.json, then tune profile.json --measure"


def _tell(outcome: Outcome, args: argparse.Namespace) -> None:
    from rich.table import Table

    out = console()
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("plan", "predicted ms", "measured ms", "error"):
        table.add_column(title, justify="left" if title == "plan" else "right", no_wrap=True)
    for row in outcome.rows:
        style = "bold" if row is outcome.best else ""
        table.add_row(
            named(row.name), f"{row.predicted_ms:.2f}", f"{row.ran.step_ms:.2f}", signed(row.error), style=style
        )
    out.print(table)
    for line in outcome.skipped:
        out.print(f"not run: {named(line)}", style="dim", soft_wrap=True)
    kinds = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("corrected by", "layers", "F", "I", "W"):
        kinds.add_column(title, justify="left" if title == "corrected by" else "right", no_wrap=True)
    for c in outcome.corrections:
        kinds.add_row(named(c.kind), str(c.layers), *(f"{x:.3f}" for x in (c.forward, c.input, c.weight)))
    out.print(kinds)
    best, published = outcome.best, outcome.best_published
    over = ""
    if published is not None:
        over = f", {published.ran.step_ms / best.ran.step_ms:.3f} times as fast as {published.name}"
    agreed = "prediction and run agree" if outcome.agreed else "the budget ended before prediction and run agreed"
    out.print(
        f"[bold]{named(best.name)}[/]: measured [bold]{best.ran.step_ms:.2f} ms[/] a step{over}; {agreed} "
        f"({outcome.predicted_ms:.2f} ms by the corrected costs)",
        soft_wrap=True,
    )
    for path, what in ((args.output, "the plan"), (args.corrected, "the corrected profile")):
        if path:
            out.print(f"{named(path)}: {what}", style="dim", soft_wrap=True)
