"""The flags of `octopipe train`, group by group.

Knows: names, types, defaults and help texts. Does not know: which flags exclude each other, and what they
mean for a run (`train`).
"""

from __future__ import annotations

import argparse
from typing import Any

from octopipe.cli.verbs.common import (
    add_length_arguments,
    add_model_arguments,
    non_negative,
    seed_number,
    whole_number,
    width_factor,
)
from octopipe.cli.verbs.runnable import add_encoder_arguments, add_kernel_arguments, add_precision_arguments
from octopipe.cli.verbs.tune import seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, runs=True)
    _add_plan_arguments(parser)
    _add_size_arguments(parser.add_argument_group("size"))
    training = parser.add_argument_group("training")
    _add_optimizer_arguments(training)
    _add_machine_arguments(training)
    _add_data_arguments(parser.add_argument_group("data"))
    _add_output_arguments(parser.add_argument_group("output"))


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("the plan (default: --system 1f1b)").add_mutually_exclusive_group()
    what.add_argument("--plan", metavar="FILE", help="train with this plan")
    what.add_argument("--system", default="1f1b", help="a published system (`octopipe systems`)")
    what.add_argument(
        "--tune", type=seconds, metavar="TIME", help="measure the layers, then tune for this time, e.g. 10s"
    )
    parser.add_argument(
        "--measure", action="store_true", help="with --tune: run plans, correct the costs, keep the fastest measured"
    )


def _add_size_arguments(size: Any) -> None:
    size.add_argument("--nproc", type=whole_number, help="ranks (default: the plan's, or 2; torchrun's under torchrun)")
    size.add_argument("--dp", type=whole_number, default=1, help="data-parallel pipelines (default: 1)")
    size.add_argument("--scale", type=width_factor, help="shrink all widths by this factor, e.g. 0.05")
    size.add_argument("--layers", type=whole_number, help="keep this many layers, embedding and head included")
    size.add_argument("--own-layers", action="store_true", help="with a config.json: use octopipe's own layers")
    size.add_argument(
        "--seq",
        type=whole_number,
        help="tokens per sequence (default: as in --profile or in the profile --plan was made from, otherwise 128)",
    )
    size.add_argument(
        "--micro-batches", type=whole_number, help="micro-batches per step and pipeline (default: 2 x ranks)"
    )
    add_encoder_arguments(
        size, seq_default="default: the plan's; otherwise 1024 tokens per image, or --seq tokens per text"
    )
    size.add_argument(
        "--micro-batch-size", type=whole_number, help="sequences per micro-batch (default: as for --seq, otherwise 1)"
    )
    add_length_arguments(size)


def _add_optimizer_arguments(training: Any) -> None:
    """Add the flags for steps, learning rate and optimizer."""
    training.add_argument("--steps", type=whole_number, default=50, help="train up to this step (default: 50)")
    training.add_argument("--lr", type=non_negative, default=1e-3, help="learning rate (default: 0.001)")
    training.add_argument("--warmup", type=int, default=0, metavar="STEPS", help="warm-up steps of the learning rate")
    training.add_argument(
        "--schedule",
        choices=("constant", "linear", "cosine", "wsd"),
        default="constant",
        help="learning-rate schedule after the warm-up (default: constant)",
    )
    training.add_argument(
        "--min-lr", type=non_negative, default=0.0, help="final learning rate of the schedule (default: 0)"
    )
    training.add_argument(
        "--schedule-steps", type=whole_number, metavar="N", help="last step of the schedule (default: --steps)"
    )
    training.add_argument(
        "--decay-steps",
        type=whole_number,
        metavar="N",
        help="with --schedule wsd: length of the decay (default: a tenth of the steps)",
    )
    training.add_argument(
        "--weight-decay",
        type=non_negative,
        default=0.1,
        help="weight decay of matrices; norms, biases and vectors do not decay (default: 0.1)",
    )
    training.add_argument(
        "--betas", type=two_betas, default=(0.9, 0.95), metavar="A,B", help="betas of Adam (default: 0.9,0.95)"
    )
    training.add_argument("--eps", type=non_negative, default=1e-8, help="epsilon of Adam (default: 1e-8)")
    training.add_argument(
        "--clip", type=non_negative, default=1.0, help="maximum gradient norm; 0: no clipping (default: 1)"
    )
    training.add_argument(
        "--optimizer", choices=("adamw", "adam", "sgd"), default="adamw", help="the optimizer (default: adamw)"
    )
    training.add_argument(
        "--shard-optimizer",
        action="store_true",
        help="shard optimizer state and master weights over the pipelines of --dp (ZeRO-1)",
    )
    training.add_argument(
        "--offload-optimizer",
        type=non_negative,
        nargs="?",
        const=1.0,
        metavar="SHARE",
        help="keep this share of optimizer state and master weights in host memory and update it on the CPU; without a "
        "number all of it (default: as in the plan, else none)",
    )


def _add_machine_arguments(training: Any) -> None:
    """Add the flags for precision, device, kernels, and what is measured and checked before the run."""
    add_precision_arguments(training)
    training.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the ranks run (default: cpu)")
    add_kernel_arguments(training)
    training.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        help="replay ops from CUDA graphs (default: as in the profile)",
    )
    training.add_argument(
        "--seed", type=seed_number, default=0, help="random seed of parameters, data and tuner (default: 0)"
    )
    training.add_argument(
        "--profile", metavar="FILE", help="costs that `octopipe profile` wrote, instead of a quick measurement"
    )
    training.add_argument(
        "--adapt",
        type=whole_number,
        metavar="N",
        help="every N steps, tune with the measured times, and switch to the new plan if it is faster",
    )
    training.add_argument("--no-measure", action="store_true", help="start without measuring or predicting")
    training.add_argument("--no-memory-check", action="store_true", help="start even if memory appears to be too small")
    training.add_argument(
        "--timeout",
        type=seconds,
        default=300.0,
        metavar="TIME",
        help="maximum time of any wait for other ranks (default: 300s)",
    )


def _add_data_arguments(group: Any) -> None:
    group.add_argument(
        "--data",
        metavar="PATH",
        help="text: .jsonl, or a folder of datasets' save_to_disk; tokens: .npy, .bin, Megatron's .bin and .idx; "
        "models with a tower or an encoder: a folder of .npz samples (docs/encoders.md) (default: synthetic tokens)",
    )
    group.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, or its folder (default: MODEL's folder)")
    group.add_argument("--text-key", default="text", metavar="KEY", help="JSON key of the text (default: text)")
    group.add_argument(
        "--data-dtype",
        choices=("uint16", "int32", "uint32", "int64", "uint8", "uint64"),
        help="type of the ids in a .bin",
    )
    group.add_argument(
        "--document-mask",
        action=argparse.BooleanOptionalAction,
        help="mask documents of one sample from each other (default: if the layers support it)",
    )
    group.add_argument("--eval-data", metavar="PATH", help="held-out data: loss and perplexity at the end")
    group.add_argument("--eval-every", type=whole_number, metavar="N", help="evaluate every N steps as well")
    group.add_argument(
        "--eval-samples", type=whole_number, metavar="N", help="maximum number of samples to evaluate (default: all)"
    )
    group.add_argument(
        "--new-data", action="store_true", help="with --resume: use different --data, from its beginning"
    )


def _add_output_arguments(kept: Any) -> None:
    kept.add_argument(
        "--checkpoint", metavar="DIR", help="folder for checkpoints; one is saved at the end, others with --save-every"
    )
    kept.add_argument("--save-every", type=whole_number, metavar="N", help="save every N steps")
    kept.add_argument("--keep", type=whole_number, default=3, metavar="N", help="checkpoints to keep (default: 3)")
    kept.add_argument("--async-save", action="store_true", help="write checkpoints in the background")
    kept.add_argument("--resume", action="store_true", help="resume from DIR's newest checkpoint, under any plan")
    kept.add_argument("--resume-step", type=whole_number, metavar="N", help="with --resume: step of the checkpoint")
    kept.add_argument(
        "--elastic",
        action="store_true",
        help="resume if DIR contains a checkpoint, on as many ranks as torchrun has started",
    )
    kept.add_argument("-o", "--output", metavar="FILE", help="write the plan that was used")
    kept.add_argument("--timeline", metavar="FILE", help="write the measured timeline of the last step")
    kept.add_argument("--log", metavar="FILE", help="append one JSON object per report to this file")
    kept.add_argument("--tensorboard", metavar="DIR", help="write TensorBoard event files to DIR")
    kept.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases, offline unless WANDB_MODE is set")
    kept.add_argument(
        "--log-every", type=whole_number, metavar="N", help="steps between reports (default: 1; GPU: --steps / 100)"
    )
    kept.add_argument("--json", action="store_true", help="print one JSON object at the end")


def two_betas(text: str) -> tuple[float, float]:
    """Parse the two betas of Adam, such as `0.9,0.95` (an argparse type)."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair of numbers; write e.g. 0.9,0.95") from None
    if not (0 <= first < 1 and 0 <= second < 1):
        raise argparse.ArgumentTypeError(f"{text!r}: betas are from 0 to below 1")
    return first, second
