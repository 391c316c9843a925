"""`octopipe train MODEL`: trains with a plan file, a published system, or a plan that is tuned first.

Knows: which run the flags describe, and what is printed at the end. Does not know: the flags themselves
(`train_arguments`), how training works (runtime/training).
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from octopipe.cli.verbs.common import print_json
from octopipe.cli.verbs.runnable import frozen_layers, model_of, needs_torch
from octopipe.cli.verbs.train_arguments import add_arguments
from octopipe.cli.verbs.train_result import Screen, print_result, summary
from octopipe.cli.verbs.train_sizes import DEFAULT_SEQ, check_model, loaded, taken_inputs

if TYPE_CHECKING:
    from octopipe.models.lengths import Groups
    from octopipe.plans.plan import Plan
    from octopipe.runtime.training.data.opening import Reading
    from octopipe.runtime.training.job import TrainJob

__all__ = ["add_arguments", "job_from", "run"]

ELASTIC_TUNE_S = 10.0
"""Search time for a new plan if the given plan is for another number of ranks."""


def run(args: argparse.Namespace) -> int:
    from octopipe.models.spec import ModelSpec
    from octopipe.runtime.ranks import launch, slurm

    slurm.adopt()
    job = job_from(args)
    if not launch.under_torchrun() and job.nproc > 1:
        launch.warm_up(*([] if isinstance(job.spec, ModelSpec) else ["octopipe.huggingface.warm"]))
    with needs_torch():
        from octopipe.runtime.training.guard import ASKED
        from octopipe.runtime.training.logs import Logs
        from octopipe.runtime.training.train import train
    screen = Screen(job, quiet=args.json)
    with Logs(args.log, tensorboard=args.tensorboard, wandb=args.wandb, about=log_header(job)) as logs, screen:

        def heard(news: Any) -> None:
            logs.show(news)
            screen.show(news)

        result = train(job, heard)
    if result is None:  # a rank started by torchrun other than the first
        return 0
    if args.output:
        from octopipe.plans.file import save_plan

        save_plan(result.plan, args.output)
    if args.timeline and result.measured is not None:
        result.measured.save(args.timeline)
    if args.json:
        print_json(summary(job, result))
    else:
        print_result(job, result, args)
    if result.stopped_by:
        saved = f"saved {result.checkpoint}: --resume continues from it" if result.checkpoint else "nothing was saved"
        after = f" after step {result.reports[-1].step}" if result.reports else ""
        print(f"octopipe: {ASKED[result.stopped_by]}{after}; {saved}", file=sys.stderr)
        return 128 + result.stopped_by
    return 0


PASSED_ON = (
    "steps",
    "system",
    "graphs",
    "dp",
    "lr",
    "warmup",
    "schedule",
    "schedule_steps",
    "min_lr",
    "decay_steps",
    "weight_decay",
    "betas",
    "eps",
    "optimizer",
    "shard_optimizer",
    "precision",
    "dtype",
    "device",
    "compile_scans",
    "data",
    "new_data",
    "eval_data",
    "eval_every",
    "eval_samples",
    "log_every",
    "seed",
    "checkpoint",
    "save_every",
    "keep",
    "async_save",
    "resume",
    "resume_step",
    "elastic",
)
"""Flags that a `TrainJob` has as fields of the same name and meaning."""


def job_from(args: argparse.Namespace) -> TrainJob:
    """Return the run that the flags describe; raises for every mistake in them before a process is started."""
    from octopipe.costs.mode import precision_of, refuse_other_precision
    from octopipe.runtime.training.job import TrainJob

    reading = reading_from(args)
    given, profile = loaded(args)
    encoder = taken_inputs(args, given, profile)
    seq = args.seq or DEFAULT_SEQ
    kernels: dict[str, Any] = {"kernels": args.kernels, "device": args.device, "seq": seq, "mtp": args.mtp, **encoder}
    spec = model_of(args.model, scale=args.scale, num_layers=args.layers, own=args.own_layers, **kernels)
    frozen = frozen_layers(spec, args.frozen)
    plan, nproc, tune_s, micro_batches = _plan_and_ranks(args, given, spec.num_layers)
    listed = max(len(encoder["images"]), len(encoder["recordings"]))
    if listed > 1 and plan is None and micro_batches is None:
        micro_batches = max(1, listed // (args.micro_batch_size or 1))
    if profile is not None:
        check_model(profile, spec, args.profile, args.device, frozen=frozen)
    lengths, groups = lengths_from(args, spec, plan, nproc // args.dp)
    precision = precision_of(args.precision, args.dtype, args.device, getattr(spec, "dtype", None))
    if profile is not None:
        refuse_other_precision(profile.mode, precision, args.profile)
    if plan is not None:
        _report_other_precision(plan, precision, args.plan)
        _report_recomputation(plan, args.plan)
    return TrainJob(
        **{name: getattr(args, name) for name in PASSED_ON},
        spec=spec,
        nproc=nproc,
        plan=plan,
        tune_s=tune_s,
        tune_measured=args.measure,
        seq=max(lengths) if lengths else seq,
        micro_batches=micro_batches,
        micro_batch_size=1 if lengths else args.micro_batch_size or 1,
        lengths=lengths,
        groups=groups,
        clip=args.clip or None,
        offload_optimizer=args.offload_optimizer or 0.0,
        kernels=() if hasattr(spec, "class_name") else args.kernels,
        reading=reading,
        memory_check=not args.no_memory_check,
        frozen=frozen,
        profile=profile,
        measure=not args.no_measure,
        timeline=bool(args.timeline),
        adapt_every=args.adapt,
        timeout_s=args.timeout,
    )


def _plan_and_ranks(
    args: argparse.Namespace, plan: Plan | None, num_layers: int
) -> tuple[Plan | None, int, float | None, int | None]:
    """Return the given plan, the number of ranks, the time to tune for, and the micro-batches per step."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.base.files import check_target
    from octopipe.runtime.ranks.launch import started_ranks
    from octopipe.search.systems.registry import get_system

    get_system(args.system)
    for path in (args.output, args.timeline, args.log):
        if path:
            check_target(path)
    nproc = started_ranks() or args.nproc or (plan.num_ranks * args.dp if plan is not None else 2)
    tune_s, micro_batches = args.tune, args.micro_batches
    if args.elastic and plan is not None and plan.num_ranks * args.dp != nproc:
        # The plan is for another number of ranks than are left: keep the batch and tune a new plan.
        micro_batches = micro_batches or plan.num_micro_batches
        tune_s, plan = None if args.no_measure and not args.profile else ELASTIC_TUNE_S, None
    if args.tune is not None and args.no_measure and not args.profile:
        raise OctoPipeError("--tune needs costs: give --profile, or leave --no-measure out")
    if nproc // args.dp > num_layers:
        raise OctoPipeError(f"{nproc // args.dp} ranks for {num_layers} layers; use fewer ranks or more --layers")
    return plan, nproc, tune_s, micro_batches


def _report_other_precision(plan: Plan, precision: str, where: str) -> None:
    """Warn if a plan was made from times in another precision, so that its prediction does not hold for this run."""
    from octopipe.cli.verbs.common import console, named
    from octopipe.costs.mode import mode_from_object

    mode = mode_from_object(plan.extra.get("mode"), where)
    if mode is not None and mode.precision != precision:
        console(stderr=True).print(
            named(
                f"{where} was made from times measured in {mode.precision}, and this run computes in {precision}: its "
                f"own prediction does not hold here; add --precision {mode.precision}, or profile and tune again"
            ),
            style="yellow",
            soft_wrap=True,
        )


def _report_recomputation(plan: Plan, where: str) -> None:
    """Print a note if the plan's costs include recomputation inside the backward, which no op of the plan shows."""
    from octopipe.cli.verbs.common import console, named
    from octopipe.plans.setting import SETTING, checkpointed_by_prices

    setting = plan.extra.get(SETTING)
    if again := checkpointed_by_prices(plan):
        text = f"{where} was made with --recompute full: {len(again)} layers are recomputed in their backward"
        style = ""
    elif isinstance(setting, dict) and setting.get("recompute") == "selective":
        text = (
            f"{where} was made with --recompute selective, which `octopipe train` cannot do: this run keeps all "
            "activations and needs more memory than the plan says; use --recompute none or full when planning for it"
        )
        style = "yellow"
    else:
        return
    console(stderr=True).print(named(text), style=style, soft_wrap=True)


def reading_from(args: argparse.Namespace) -> Reading:
    """Return how data is read; raise OctoPipeError for all errors in it that can be found without the model."""
    from pathlib import Path

    from octopipe.base.errors import OctoPipeError
    from octopipe.runtime.training.data.opening import Reading, look

    tokenizer = args.tokenizer
    if tokenizer is None and os.path.isfile(os.path.join(args.model, "tokenizer.json")):
        tokenizer = args.model
    reading = Reading(tokenizer=tokenizer, dtype=args.data_dtype, text_key=args.text_key, apart=args.document_mask)
    paths = [path for path in (args.data, args.eval_data) if path is not None]
    for path in paths:
        look(path, reading)
    if not paths:
        for flag in ("tokenizer", "data_dtype", "document_mask"):
            if getattr(args, flag) is not None:
                raise OctoPipeError(f"--{flag.replace('_', '-')} applies to data; add --data")
    if args.data_dtype and not any(Path(path).suffix in (".bin", ".npy", ".idx") for path in paths):
        raise OctoPipeError(
            f"--data-dtype is the type of ids in a .bin file and does not apply to {paths[0]}; leave it out"
        )
    return reading


def log_header(job: TrainJob) -> dict[str, Any]:
    """Return the run's settings for a log."""
    return {
        "model": job.spec.name, "nproc": job.nproc, "dp": job.dp, "seq": job.seq, "steps": job.steps,
        "micro_batches": job.num_micro_batches, "micro_batch_size": job.micro_batch_size, "system": job.system,
        "optimizer": job.optimizer, "weight_decay": job.weight_decay, "betas": list(job.betas), "clip": job.clip,
        "precision": job.mode.precision, "device": job.device, "data": job.data, "eval_data": job.eval_data,
        "seed": job.seed,
        **job.learning_rate.about(),
    }  # fmt: skip


def lengths_from(
    args: argparse.Namespace, spec: Any, plan: Plan | None, pp: int
) -> tuple[tuple[int, ...], tuple[Groups, ...]]:
    """Return a step's lengths and every pipeline's micro-batches, from --lengths or from the plan.

    Both are empty if all sequences have the same length.
    """
    from octopipe.base.errors import OctoPipeError
    from octopipe.models.lengths import Batch, distributed_evenly, padded_groups, read_lengths

    setting = plan.extra.get("setting") if plan is not None else None
    planned = setting.get("micro_batch_lengths") if isinstance(setting, dict) else None
    if args.lengths is None and planned is None:
        if args.batching is not None:
            raise OctoPipeError(f"--{args.batching} groups sequences of different length; give --lengths")
        return (), ()
    if args.batching == "pack" or (isinstance(setting, dict) and setting.get("packed")):
        raise OctoPipeError("train pads sequences: its layers cannot separate packed ones; give --pad or --dynamic")
    for name in ("seq", "micro_batches", *(["micro_batch_size"] if planned or args.batching == "dynamic" else [])):
        if getattr(args, name) is not None:
            raise OctoPipeError(f"--{name.replace('_', '-')}: it follows from --lengths; leave it out")
    if planned is not None:
        if args.lengths is not None or args.batching is not None:
            raise OctoPipeError(f"{args.plan} stores its own lengths; leave --lengths out")
        if args.dp > 1:
            raise OctoPipeError(
                f"{args.plan} stores the lengths of one pipeline; leave --dp out, or --plan and give --lengths"
            )
        batch = Batch(groups=tuple(tuple(group) for group in planned))
        return tuple(length for group in batch.groups for length in group), (batch.groups,)
    lengths = read_lengths(args.lengths)
    if args.batching == "dynamic" or (args.batching is None and args.system == "dynapipe" and plan is None):
        cut = _dynamic(spec, pp, lengths)
    else:
        cut = padded_groups(lengths, args.micro_batch_size or 1)
    tokens_of = Batch(groups=cut).tokens_of
    return lengths, tuple(distributed_evenly(cut, args.dp, lambda group: float(tokens_of(group))))


def _dynamic(spec: Any, pp: int, lengths: tuple[int, ...]) -> Groups:
    """Return DynaPipe's micro-batches, by the costs of our own layers; for transformers' layers, by tokens."""
    from octopipe.costs.cluster.hardware import gpu
    from octopipe.costs.cluster.setup import DEFAULT_GPU, Setup
    from octopipe.models.spec import ModelSpec
    from octopipe.search.batching import dynamic_groups
    from octopipe.search.systems.dynapipe import micro_batch_samples

    if isinstance(spec, ModelSpec):
        return dynamic_groups(spec, Setup(gpu=gpu(DEFAULT_GPU), pp=pp, seq=max(lengths)), lengths)
    start = 0.1 * max(lengths)
    found = micro_batch_samples(lengths, pp, lambda count, length: start + count * length)
    return tuple(tuple(lengths[i] for i in group) for group in found)
