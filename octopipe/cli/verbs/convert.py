"""`octopipe convert CHECKPOINT --to huggingface|dcp -o FOLDER`: converts a checkpoint for other tools.

Knows: flags. Does not know: how either format is written (training/convert.py).
"""

from __future__ import annotations

import argparse

from octopipe.cli.verbs.common import console, counted, print_json, whole_number
from octopipe.cli.verbs.runnable import needs_torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="the folder of one step, or the folder given to `train --checkpoint`"
    )
    parser.add_argument(
        "--to",
        choices=("huggingface", "dcp"),
        required=True,
        help="huggingface: safetensors for from_pretrained; dcp: torch.distributed.checkpoint, optimizer included",
    )
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="a new or empty folder")
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        help="the config.json or folder of the trained model, which provides parameter names",
    )
    parser.add_argument("--step", type=whole_number, help="step of the checkpoint (default: the newest valid one)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the written safetensors (default: unchanged)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from octopipe.base.errors import OctoPipeError

    if args.to == "huggingface" and not args.model:
        raise OctoPipeError("--to huggingface needs --model, the config.json or folder the run was trained from")
    if args.to == "dcp" and args.dtype:
        raise OctoPipeError("--dtype is for --to huggingface; a DCP folder keeps the dtypes that were saved")
    with needs_torch():
        from octopipe.runtime.training.checkpoint_folder import resolve
        from octopipe.runtime.training.convert import to_dcp, to_huggingface
    path = resolve(args.checkpoint, args.step)
    if args.to == "huggingface":
        count = to_huggingface(path, args.output, source=args.model, dtype=args.dtype)
    else:
        count = to_dcp(path, args.output, source=args.model)
    if args.json:
        print_json({"checkpoint": str(path), "output": args.output, "to": args.to, "tensors": count})
    else:
        words = f"{args.output}: {counted(count, 'tensor')} of {path}"
        console().print(words, soft_wrap=True, markup=False, highlight=False)
    return 0
