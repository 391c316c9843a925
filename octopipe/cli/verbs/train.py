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

from octopipe.cli.verbs.common import (
    add_length_arguments,
    add_model_arguments,
    console,
    named,
    non_negative,
    print_json,
    seed_number,
    whole_number,
)
from octopipe.cli.verbs.runnable import kernel_words, model_of, needs_torch, told
from octopipe.cli.verbs.tune import seconds

if TYPE_CHECKING:
    from octopipe.models.lengths import Groups
    from octopipe.plans.plan import Plan
    from octopipe.runtime.training.job import Phase, StepReport, TrainJob, TrainResult

GIB = float(1 << 30)


ELASTIC_TUNE_S = 10.0
"""For a new plan where the one that was given is for another number of ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    what = parser.add_argument_group("the plan (default: --system 1f1b)").add_mutually_exclusive_group()
    what.add_argument("--plan", metavar="FILE", help="train with this plan")
    what.add_argument("--system", default="1f1b", help="a published system (`octopipe systems`)")
    what.add_argument("--tune", type=seconds, metavar="TIME", help="measure the layers, then tune for e.g. 10s")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="with --tune: run its plans, correct the costs, keep the fastest measured",
    )
    size = parser.add_argument_group("size")
    size.add_argument("--nproc", type=whole_number, help="ranks (default: the plan's, or 2; torchrun's under torchrun)")
    size.add_argument("--dp", type=whole_number, default=1, help="pipelines side by side (default: 1)")
    size.add_argument("--scale", type=non_negative, help="shrink all widths by this factor, e.g. 0.05")
    size.add_argument("--layers", type=whole_number, help="keep so many layers, embedding and head included")
    size.add_argument("--own-layers", action="store_true", help="for a config.json: octopipe's own layers of its sizes")
    size.add_argument("--seq", type=whole_number, help="tokens per sequence (default: 128)")
    size.add_argument("--micro-batches", type=whole_number, help="per step and pipeline (default: 2 x ranks)")
    size.add_argument("--micro-batch-size", type=whole_number, help="sequences in each (default: 1)")
    add_length_arguments(size)
    run_ = parser.add_argument_group("training")
    run_.add_argument("--steps", type=whole_number, default=50, help="train up to this step (default: 50)")
    run_.add_argument("--lr", type=non_negative, default=1e-3, help="learning rate (default: 0.001)")
    run_.add_argument("--warmup", type=int, default=0, metavar="STEPS", help="steps until the full learning rate")
    run_.add_argument("--clip", type=non_negative, default=1.0, help="largest gradient norm, 0 for any (default: 1)")
    run_.add_argument("--optimizer", choices=("adamw", "adam", "sgd"), default="adamw")
    run_.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    run_.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    run_.add_argument(
        "--kernels",
        type=kernel_words,
        default=(),
        metavar="LIST",
        help="by name instead of the fastest installed: mamba_ssm, fla, flash_attn, liger, compiled, sdpa, eager",
    )
    run_.add_argument(
        "--compile-scans",
        action=argparse.BooleanOptionalAction,
        help="Mamba-2's scan through torch.compile (default: on cuda)",
    )
    run_.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, help="ops replayed from CUDA graphs (default: on cuda)"
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
    kept.add_argument(
        "--elastic", action="store_true", help="go on where DIR has a checkpoint, with the ranks torchrun has left"
    )
    kept.add_argument("-o", "--output", metavar="FILE", help="write the plan that was trained with")
    kept.add_argument("--timeline", metavar="FILE", help="write the measured timeline of the last step")
    kept.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    from octopipe.models.spec import ModelSpec
    from octopipe.runtime.ranks import launch, slurm

    slurm.adopt()
    job = job_from(args)
    if not launch.under_torchrun() and job.nproc > 1:
        launch.warm_up(*([] if isinstance(job.spec, ModelSpec) else ["octopipe.huggingface.warm"]))
    with needs_torch():
        from octopipe.runtime.training.guard import ASKED
        from octopipe.runtime.training.train import train
    screen = Screen(job, quiet=args.json)
    with screen:
        result = train(job, screen.show)
    if result is None:  # a rank of torchrun's that is not the first
        return 0
    if args.output:
        from octopipe.plans.file import save_plan

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
    from octopipe.base.errors import OctoPipeError
    from octopipe.base.files import check_target
    from octopipe.costs.profile_file import load_profile
    from octopipe.plans.file import load_plan
    from octopipe.runtime.ranks.launch import under_torchrun
    from octopipe.runtime.training.job import TrainJob
    from octopipe.search.systems.registry import get_system

    kernels: dict[str, Any] = {"kernels": args.kernels, "device": args.device}
    spec = model_of(args.model, scale=args.scale, num_layers=args.layers, own=args.own_layers, **kernels)
    plan = load_plan(args.plan) if args.plan else None
    get_system(args.system)
    for path in (args.output, args.timeline):
        if path:
            check_target(path)
    started = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
    nproc = started or args.nproc or (plan.num_ranks * args.dp if plan is not None else 2)
    tune_s, micro_batches = args.tune, args.micro_batches
    if args.elastic and plan is not None and plan.num_ranks * args.dp != nproc:
        # Other ranks than it was made for are left: the same batch, and a plan made anew.
        micro_batches = micro_batches or plan.num_micro_batches
        tune_s, plan = None if args.no_measure and not args.profile else ELASTIC_TUNE_S, None
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
    lengths, groups = lengths_from(args, spec, plan, nproc // args.dp)
    return TrainJob(
        spec=spec,
        nproc=nproc,
        steps=args.steps,
        plan=plan,
        system=args.system,
        tune_s=tune_s,
        tune_measured=args.measure,
        graphs=args.graphs,
        dp=args.dp,
        seq=max(lengths) if lengths else args.seq or 128,
        micro_batches=micro_batches,
        micro_batch_size=1 if lengths else args.micro_batch_size or 1,
        lengths=lengths,
        groups=groups,
        lr=args.lr,
        warmup=args.warmup,
        optimizer=args.optimizer,
        clip=args.clip or None,
        dtype=args.dtype,
        device=args.device,
        compile_scans=args.compile_scans,
        kernels=() if hasattr(spec, "class_name") else args.kernels,
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
        elastic=args.elastic,
        timeline=bool(args.timeline),
        adapt_every=args.adapt,
        timeout_s=args.timeout,
    )


def lengths_from(
    args: argparse.Namespace, spec: Any, plan: Plan | None, pp: int
) -> tuple[tuple[int, ...], tuple[Groups, ...]]:
    """A step's lengths and every pipeline's micro-batches: from --lengths, or as the plan was made for; empty: all
    sequences are equally long."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.models.lengths import Batch, dealt_evenly, padded_groups, read_lengths

    setting = plan.extra.get("setting") if plan is not None else None
    planned = setting.get("micro_batch_lengths") if isinstance(setting, dict) else None
    if args.lengths is None and planned is None:
        if args.batching is not None:
            raise OctoPipeError(f"--{args.batching} says what is made of sequences of different length; give --lengths")
        return (), ()
    if args.batching == "pack" or (isinstance(setting, dict) and setting.get("packed")):
        raise OctoPipeError("train pads: its layers know no borders between packed sequences; give --pad or --dynamic")
    for name in ("seq", "micro_batches", *(["micro_batch_size"] if planned or args.batching == "dynamic" else [])):
        if getattr(args, name) is not None:
            raise OctoPipeError(f"--{name.replace('_', '-')}: the lengths say it; leave it out")
    if planned is not None:
        if args.lengths is not None or args.batching is not None:
            raise OctoPipeError(f"{args.plan} was made for lengths of its own; leave --lengths out")
        if args.dp > 1:
            raise OctoPipeError(f"{args.plan} has one pipeline's lengths; leave --dp out, or --plan and give --lengths")
        batch = Batch(groups=tuple(tuple(group) for group in planned))
        return tuple(length for group in batch.groups for length in group), (batch.groups,)
    lengths = read_lengths(args.lengths)
    if args.batching == "dynamic" or (args.batching is None and args.system == "dynapipe" and plan is None):
        cut = _dynamic(spec, pp, lengths)
    else:
        cut = padded_groups(lengths, args.micro_batch_size or 1)
    tokens_of = Batch(groups=cut).tokens_of
    return lengths, tuple(dealt_evenly(cut, args.dp, lambda group: float(tokens_of(group))))


def _dynamic(spec: Any, pp: int, lengths: tuple[int, ...]) -> Groups:
    """DynaPipe's micro-batches, by the prices of our own layers; of other people's, by tokens."""
    from octopipe.costs.cluster.hardware import gpu
    from octopipe.costs.cluster.setup import Setup
    from octopipe.costs.resolve import DEFAULT_GPU
    from octopipe.models.spec import ModelSpec
    from octopipe.search.batching import dynamic_groups
    from octopipe.search.systems.dynapipe import micro_batch_samples

    if isinstance(spec, ModelSpec):
        return dynamic_groups(spec, Setup(gpu=gpu(DEFAULT_GPU), pp=pp, seq=max(lengths)), lengths)
    start = 0.1 * max(lengths)
    found = micro_batch_samples(lengths, pp, lambda count, length: start + count * length)
    return tuple(tuple(lengths[i] for i in group) for group in found)


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
        from octopipe.runtime.training.job import Phase

        text = news.text if isinstance(news, Phase) else step_line(news, self.job.steps)
        if isinstance(news, Phase) and news.notice:
            self._err.print(f"note: {text}", soft_wrap=True, markup=False, highlight=False)
        elif self._status is not None:
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
        "notices": list(result.notices),
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
    batch = f"{job.num_micro_batches} micro-batches of {job.micro_batch_size} x {job.seq} tokens"
    if job.lengths:
        batch = f"{job.num_micro_batches} micro-batches a pipeline of {len(job.lengths)} sequences in all, "
        batch += f"{min(job.lengths)} to {max(job.lengths)} tokens"
    out.print(f"{result.parameters / 1e6:.1f} M parameters, {batch}")
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
