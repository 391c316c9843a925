"""`octopipe validate plan.json --profile profile.json`: runs a plan and compares it with its prediction.

Knows: its flags, whether the plan was made with the given profile, and how errors are shown. Does not know: how plans
run (measure/trial.py) or are compared (fidelity.py).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from octopipe.base.display import milliseconds
from octopipe.cli.verbs.common import console, named, print_json, whole_number
from octopipe.cli.verbs.numbers import predicted_numbers, without_contention_words
from octopipe.costs.mode import PRECISIONS, refuse_other_precision

if TYPE_CHECKING:
    from octopipe.costs.profile_file import Profile
    from octopipe.plans.plan import Plan
    from octopipe.simulation.fidelity import Fidelity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    parser.add_argument(
        "--profile", metavar="FILE", required=True, help="the profile that `octopipe profile` wrote for this model"
    )
    parser.add_argument(
        "--steps", type=whole_number, default=5, help="number of timed steps, of which the median is used (default: 5)"
    )
    parser.add_argument(
        "--warmup",
        "--warm-up",
        dest="warm_up",
        type=whole_number,
        default=2,
        help="number of steps before timing starts (default: 2)",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="precision of the run (default: the profile's; another one needs --fresh)",
    )
    parser.add_argument("--fresh", action="store_true", help="first measure the layers again, in the same processes")
    parser.add_argument(
        "--channel",
        choices=("directed", "pair", "single"),
        default="directed",
        help="which sends and receives share an in-order queue (default: directed)",
    )
    parser.add_argument("--timelines", metavar="PREFIX", help="write PREFIX.predicted.json and PREFIX.measured.json")
    parser.add_argument("--report", metavar="FILE", help="write an HTML page with both timelines, one above the other")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from octopipe.base.files import check_target
    from octopipe.cli.verbs.recorded import recorded_workload
    from octopipe.costs.profile_file import load_profile
    from octopipe.plans.file import load_plan
    from octopipe.plans.setting import checkpointed_by_prices
    from octopipe.simulation.contention import predict

    timelines = [f"{args.timelines}.{kind}.json" for kind in ("predicted", "measured")] if args.timelines else []
    for path in (*timelines, args.report):
        if path:
            check_target(path)
    plan, profile = load_plan(args.plan), load_profile(args.profile)
    own = is_own_profile(plan, args.plan, profile, args.profile)
    if not own:
        note = f"{args.plan} was made with costs other than those of {args.profile}; the prediction is {args.profile}'s"
        console(stderr=True).print(named(note), style="yellow", soft_wrap=True)
    work = recorded_workload(profile, args.profile, precision=args.precision)
    work = replace(work, checkpointed=checkpointed_by_prices(plan))
    if not args.fresh:
        profile = profile.checkpointing(work.checkpointed)
        measured = profile.mode or recorded_workload(profile, args.profile).mode
        refuse_other_precision(measured, work.precision, args.profile)

    from octopipe.runtime.measure.forecast import check_plan_memory
    from octopipe.runtime.measure.trial import LEAST_S, ValidateJob, on_ranks, validate_task
    from octopipe.simulation.fidelity import compare

    job = ValidateJob(
        work=work,
        plan=plan,
        profile=profile,
        steps=args.steps,
        warm_up=args.warm_up,
        channel=args.channel,
        profile_again=args.fresh,
        optimizer="adamw" if profile.about.get("optimizer") == "adamw" else "none",
    )
    expected = predict(plan, profile, channel=args.channel)
    if work.device == "cpu":
        check_plan_memory(expected.peak_bytes.tolist(), args.plan)
    limit_s = max(LEAST_S, 10e-3 * (args.steps + args.warm_up) * expected.makespan_ms)
    trial, profile = on_ranks(validate_task, plan.num_ranks, job, device=work.device, timeout_s=limit_s)[0]
    name = str(plan.extra.get("system", "")) or "plan"
    predicted = predict(plan, profile, channel=args.channel, label=f"{name}, predicted")
    found = compare(predicted, trial.timeline, measured_bytes=trial.peak_bytes, step_ms=trial.step_ms)
    if args.timelines:
        predicted.save(f"{args.timelines}.predicted.json")
        trial.timeline.save(f"{args.timelines}.measured.json")
    if args.report:
        from octopipe.base.files import write_whole
        from octopipe.views.report.entry import Entry
        from octopipe.views.report.page import report_html

        entries = [
            Entry(label=f"{name}, predicted", timeline=predicted, plan=plan),
            Entry(label=f"{name}, measured", timeline=trial.timeline, plan=plan),
        ]
        write_whole(args.report, report_html(entries, title=f"{name}: predicted and measured").encode())
    if args.json:
        ran = {"steps_ms": trial.steps_ms, "spread": trial.spread, "loss": trial.loss}
        ran |= {"own_profile": own, "precision": work.precision}
        print_json({**found.summary(), **predicted_numbers(plan, profile, predicted), **ran})
    else:
        _show(found, name, trial.spread, predicted_numbers(plan, profile, predicted))
    return 0


def is_own_profile(plan: Plan, plan_name: str, profile: Profile, profile_name: str) -> bool:
    """Whether the plan was made with this profile, as far as it states that; raises if numbers of layers differ."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.plans.setting import COSTS, SETTING, costs_of_plan

    setting, costs = plan.extra.get(SETTING), profile.costs
    if costs.num_layers != plan.num_layers:
        named = setting.get("model") if isinstance(setting, dict) else None
        remedy = f"give the one it was made with ({named})" if named else "give the one it was made with"
        raise OctoPipeError(
            f"{profile_name} has {costs.num_layers} layers, {plan_name} has {plan.num_layers}; {remedy}"
        )
    made_with = plan.extra.get(COSTS)
    if not isinstance(made_with, str) or not isinstance(setting, dict):
        return True
    return made_with == costs_of_plan(plan, {"model": profile_name}, plan_name).digest()


def signed(share: float, digits: int = 1) -> str:
    """Format a share as a percentage with its sign; a value that rounds to zero has no sign.

    >>> signed(-0.000001), signed(0.0123), signed(-0.5, 0)
    ('0.0 %', '+1.2 %', '-50 %')
    """
    value = round(100 * share, digits)
    return f"{value:+.{digits}f} %" if value else f"{0:.{digits}f} %"


def _show(found: Fidelity, name: str, spread: float, numbers: dict[str, float]) -> None:
    out = console()
    out.print(
        f"[bold]{name}[/]: pipeline measured [bold]{milliseconds(found.measured_ms)}[/] (spread {100 * spread:.1f} %), "
        f"predicted {milliseconds(found.predicted_ms)}: error [bold]{signed(found.step_error, 2)}[/]"
    )
    if note := without_contention_words(numbers):
        out.print(
            note,
            style="dim",
        )
    if found.measured_reduced_ms > found.measured_ms or found.predicted_reduced_ms > found.predicted_ms:
        error = found.predicted_reduced_ms / found.measured_reduced_ms - 1.0
        out.print(
            f"with the reduction of gradients: measured {milliseconds(found.measured_reduced_ms)}, predicted "
            f"{milliseconds(found.predicted_reduced_ms)}: error {signed(error, 2)}"
        )
    kinds = ", ".join(f"{k} {signed(v)}" for k, v in found.kind_error.items())
    out.print(f"busy time by kind: {kinds}; mean over ops {100 * found.op_error:.1f} %")
    out.print("busy time by rank: " + ", ".join(f"{r}: {signed(e)}" for r, e in enumerate(found.busy_error)))
    if found.memory_error:
        sizes = ", ".join(
            f"{r}: {m:.2f} GiB ({signed(e)})" for r, (m, e) in enumerate(zip(found.measured_gib, found.memory_error))
        )
        out.print(f"peak memory by rank: {sizes}; mean error {100 * found.mean_memory_error:.1f} %")
    seen, expected = found.measured_overlap, found.predicted_overlap
    shares = (
        f"{100 * getattr(seen, name):.0f} % ({100 * getattr(expected, name):.0f} %) {what}"
        for name, what in (("wholly", "of sends and receives wholly"), ("partly", "in part"), ("time", "of their time"))
    )
    out.print(f"communication behind computation, measured (predicted): {', '.join(shares)}")
    for w in found.worst:
        out.print(
            f"  {w.op} on rank {w.rank}: {w.measured_ms:.3f} ms, predicted {w.predicted_ms:.3f}; "
            f"started {w.start_off_ms:+.3f} ms off",
            style="dim",
        )
