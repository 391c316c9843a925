"""`octopipe train MODEL`: train with a plan file, a published system, or a plan tuned on the spot.

Knows: flags, the live line, what is said at the end. Does not know: how training works (runtime/train.py).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from octopipe.verbs.common import (
    add_model_arguments,
    console,
    named,
    non_negative,
    print_json,
    seed_number,
    whole_number,
)
from octopipe.verbs.runnable import model_of, needs_torch, told
from octopipe.verbs.tune import seconds

if TYPE_CHECKING:
    from octopipe.training.job import Phase, StepReport, TrainJob, TrainResult

GIB = float(1 << 30)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    what = parser.add_argument_group("the plan (default: --system 1f1b)").add_mutually_exclusive_group()
    what.add_argument("--plan", metavar="FILE", help="train with this plan")
    what.add_argument("--system", default="1f1b", help="a published system (`octopipe systems`)")
    what.add_argument("--tune", type=seconds, metavar="TIME", help="measure the layers, then tune for e.g. 10s")
    size = parser.add_argument_group("size")
    size.add_argument("--nproc", type=whole_number, help="ranks (default: the plan's, or 2; torchrun's under torchrun)")
    size.add_argument("--dp", type=whole_number, default=1, help="pipelines side by side (default: 1)")
    size.add_argument("--scale", type=non_negative, help="shrink all widths by this factor, e.g. 0.05")
    size.add_argument("--layers", type=whole_number, help="keep so many layers, embedding and head included")
    size.add_argument("--own-layers", action="store_true", help="for a config.json: octopipe's own layers of its sizes")
    size.add_argument("--seq", type=whole_number, default=128, help="tokens per sequence (default: 128)")
    size.add_argument("--micro-batches", type=whole_number, help="per step and pipeline (default: 2 x ranks)")
    size.add_argument("--micro-batch-size", type=whole_number, default=1, help="sequences in each (default: 1)")
    run_ = parser.add_argument_group("training")
    run_.add_argument("--steps", type=whole_number, default=50, help="train up to this step (default: 50)")
    run_.add_argument("--lr", type=non_negative, default=1e-3, help="learning rate (default: 0.001)")
    run_.add_argument("--warmup", type=int, default=0, metavar="STEPS", help="steps until the full learning rate")
    run_.add_argument("--clip", type=non_negative, default=1.0, help="largest gradient norm, 0 for any (default: 1)")
    run_.add_argument("--optimizer", choices=("adamw", "adam", "sgd"), default="adamw")
    run_.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    run_.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    run_.add_argument(
        "--compile-scans",
        action=argparse.BooleanOptionalAction,
        help="Mamba-2's scan through torch.compile (default: on cuda)",
    )
    run_.add_argument("--data", metavar="FILE", help="tokens: .npy, or .bin of uint16 (default: synthetic text)")
    run_.add_argument("--seed", type=seed_number, default=0, help="of parameters, data and tuner (default: 0)")
    run_.add_argument("--profile", metavar="FILE", help="costs from `octopipe profile` instead of a quick measurement")
    run_.add_argument(
        "--adapt", type=whole_number, metavar="N", help="every N steps: re-tune on measured times, switch if it pays"
    )
    run_.add_argument("--no-measure", action="store_true", help="no measurement: start at once, predict nothing")
    run_.add_argument("--timeout", type=seconds, default=300.0, metavar="TIME", help="for any wait (default: 300s)")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--checkpoint", metavar="DIR", help="save at the end, and see --save-every")
    kept.add_argument("--save-every", type=whole_number, metavar="N", help="save every N steps")
    kept.add_argument("--keep", type=whole_number, default=3, metavar="N", help="checkpoints to keep (default: 3)")
    kept.add_argument("--async-save", action="store_true", help="write checkpoints behind the next steps")
    kept.add_argument("--resume", action="store_true", help="go on from DIR's newest checkpoint, with any plan")
    kept.add_argument("--resume-step", type=whole_number, metavar="N", help="with --resume: from step N's checkpoint")
    kept.add_argument("-o", "--output", metavar="FILE", help="write the plan that was trained with")
    kept.add_argument("--timeline", metavar="FILE", help="write the measured timeline of the last step")
    kept.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    from octopipe.runtime import launch

    job = job_from(args)
    if not launch.under_torchrun() and job.nproc > 1:
        launch.warm_up()
    with needs_torch():
        from octopipe.training.guard import ASKED
        from octopipe.training.train import train
    screen = Screen(job, quiet=args.json)
    with screen:
        result = train(job, screen.show)
    if result is None:  # a rank of torchrun's that is not the first
        return 0
    if args.output:
        from octopipe.plan_file import save_plan

        save_plan(result.plan, args.output)
    if args.timeline and result.measured is not None:
        result.measured.save(args.timeline)
    if args.json:
        print_json(summary(job, result))
    else:
        tell(job, result, args)
    if result.stopped_by:
        saved = f"saved {result.checkpoint}: --resume goes on from it" if result.checkpoint else "nothing was saved"
        after = f" after step {result.reports[-1].step}" if result.reports else ""
        print(f"octopipe: {ASKED[result.stopped_by]}{after}; {saved}", file=sys.stderr)
        return 128 + result.stopped_by
    return 0


def job_from(args: argparse.Namespace) -> TrainJob:
    """The run that the flags describe; every mistake in them is found here, before a process starts."""
    from octopipe.errors import OctoPipeError
    from octopipe.files import check_target
    from octopipe.plan_file import load_plan
    from octopipe.profile_file import load_profile
    from octopipe.runtime.launch import under_torchrun
    from octopipe.systems.registry import get_system
    from octopipe.training.job import TrainJob

    spec = model_of(args.model, scale=args.scale, num_layers=args.layers, own=args.own_layers)
    plan = load_plan(args.plan) if args.plan else None
    get_system(args.system)
    for path in (args.output, args.timeline):
        if path:
            check_target(path)
    started = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
    nproc = started or args.nproc or (plan.num_ranks * args.dp if plan is not None else 2)
    if args.tune is not None and args.no_measure and not args.profile:
        raise OctoPipeError("--tune needs costs: give --profile, or leave --no-measure out")
    if nproc // args.dp > spec.num_layers:
        raise OctoPipeError(f"{nproc // args.dp} ranks for {spec.num_layers} layers; use fewer ranks or more --layers")
    profile = load_profile(args.profile) if args.profile else None
    if profile is not None and profile.costs.num_layers != spec.num_layers:
        raise OctoPipeError(
            f"{args.profile} has {profile.costs.num_layers} layers, {spec.name} has {spec.num_layers}; "
            "profile this model"
        )
    return TrainJob(
        spec=spec,
        nproc=nproc,
        steps=args.steps,
        plan=plan,
        system=args.system,
        tune_s=args.tune,
        dp=args.dp,
        seq=args.seq,
        micro_batches=args.micro_batches,
        micro_batch_size=args.micro_batch_size,
        lr=args.lr,
        warmup=args.warmup,
        optimizer=args.optimizer,
        clip=args.clip or None,
        dtype=args.dtype,
        device=args.device,
        compile_scans=args.compile_scans,
        data=args.data,
        seed=args.seed,
        profile=profile,
        measure=not args.no_measure,
        checkpoint=args.checkpoint,
        save_every=args.save_every,
        keep=args.keep,
        async_save=args.async_save,
        resume=args.resume,
        resume_step=args.resume_step,
        timeline=bool(args.timeline),
        adapt_every=args.adapt,
        timeout_s=args.timeout,
    )


class Screen:
    """A live line on a terminal; on a pipe, a plain line now and then."""

    def __init__(self, job: TrainJob, *, quiet: bool):
        self.job, self.quiet = job, quiet
        self._err = console(stderr=True)
        self._live: Any = self._err.status("starting ranks") if self._err.is_terminal else nullcontext()
        self._out = console()
        self._every = max(1, job.steps // 20)

    def __enter__(self) -> Screen:
        self._status = self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def show(self, news: Phase | StepReport) -> None:
        from octopipe.training.job import Phase

        text = news.text if isinstance(news, Phase) else step_line(news, self.job.steps)
        if self._status is not None:
            self._status.update(text)
        elif not self.quiet and not isinstance(news, Phase) and self._is_due(news.step):
            self._out.print(text, soft_wrap=True)

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0 or step in (1, self.job.steps)


def step_line(r: StepReport, steps: int) -> str:
    """One line: step, loss, speed, idle time, memory."""
    memory = " ".join(f"{b / GIB:.2f}" for b in r.memory_bytes)
    return (
        f"step {r.step:>{len(str(steps))}}/{steps}  loss {r.loss:.4f}  {r.step_ms:.0f} ms  "
        f"{r.tokens_per_s:,.0f} tokens/s  bubble {r.bubble_ratio:.1%}  memory {memory} GiB"
    )


def summary(job: TrainJob, result: TrainResult) -> dict[str, Any]:
    """The run as one JSON object."""
    predicted = result.predicted
    return {
        "model": result.plan.model or None,
        "layers": told(job.spec),
        "system": result.plan.extra.get("system"),
        "parameters": result.parameters,
        "num_ranks": result.plan.num_ranks,
        "num_micro_batches": result.plan.num_micro_batches,
        "first_step": result.first_step,
        "steps": len(result.reports),
        "loss": result.losses[-1] if result.reports else None,
        "losses": result.losses,
        "step_ms": _finite(result.step_ms),
        "pipeline_ms": _finite(result.pipeline_ms),
        "predicted_ms": result.predicted_ms,
        "bubble_ratio": _finite(result.bubble_ratio),
        "predicted_bubble_ratio": None if predicted is None else predicted.bubble_ratio,
        "tokens_per_s": result.reports[-1].tokens_per_s if result.reports else None,
        "memory_gib": [b / GIB for b in result.reports[-1].memory_bytes] if result.reports else [],
        "checkpoint": result.checkpoint,
        "history": [
            {
                "step": r.step,
                "loss": r.loss,
                "step_ms": r.step_ms,
                "pipeline_ms": r.pipeline_ms,
                "bubble_ratio": r.bubble_ratio,
            }
            for r in result.reports
        ],
    }


def tell(job: TrainJob, result: TrainResult, args: argparse.Namespace) -> None:
    """The end of a run, the verdict first."""
    out = console()
    if not result.reports:
        out.print(f"nothing to do: the checkpoint is at step {result.first_step - 1}, --steps is {job.steps}")
        return
    first, last = result.reports[0], result.reports[-1]
    name = str(result.plan.extra.get("system") or args.plan or "plan")
    out.print(
        f"[bold]loss {first.loss:.4f} -> {last.loss:.4f}[/] in steps {first.step} to {last.step}: "
        f"{named(name)}, {job.nproc} ranks"
    )
    out.print(f"{named(job.spec.name)}: {told(job.spec)}", soft_wrap=True)
    out.print(
        f"{result.parameters / 1e6:.1f} M parameters, {job.num_micro_batches} micro-batches of "
        f"{job.micro_batch_size} x {job.seq} tokens"
    )
    out.print(f"pipeline: measured {result.pipeline_ms:.1f} ms, bubble {result.bubble_ratio:.1%}")
    if result.predicted is not None:
        predicted_ms, idle = result.predicted.makespan_ms, result.predicted.bubble_ratio
        off = predicted_ms / result.pipeline_ms - 1
        out.print(f"         predicted {predicted_ms:.1f} ms, bubble {idle:.1%} ({off:+.1%})")
    speed = 1e3 * job.tokens_per_step / result.step_ms
    out.print(f"whole step {result.step_ms:.1f} ms, {speed:,.0f} tokens/s (medians)")
    for text, path in (
        ("checkpoint", result.checkpoint),
        ("plan", args.output),
        ("measured timeline", args.timeline),
    ):
        if path:
            out.print(f"{text}: {named(path)}", soft_wrap=True)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
