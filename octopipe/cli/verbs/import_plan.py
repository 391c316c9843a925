"""`octopipe import FILE|STRING -o plan.json`: converts a schedule of PyTorch, torchtitan or Megatron to a plan.

Knows: how to tell apart a schedule CSV, a Megatron text, and a recording of layer times, which becomes a profile. Does
not know: any of these formats (readers/, foreign_plan.py, foreign_times.py).
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from octopipe.cli.verbs.common import console, counted, print_json, whole_number
from octopipe.cli.verbs.plan_costs import add_cost_arguments, setting_of

if TYPE_CHECKING:
    from octopipe.costs.profile_file import Profile
    from octopipe.costs.table import CostTable
    from octopipe.search.foreign_plan import ForeignPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "SOURCE is one of\n"
        "  a schedule CSV of torch.distributed.pipelining or torchtitan (compute_only or compute_comms)\n"
        "  a --pipeline-model-parallel-layout of Megatron-LM:  'Et*3|(tt|)*29,m|L'   (with --pp)\n"
        "  a --hybrid-layer-pattern of Megatron-LM:            'M-M*-|M-M--'         (with --pp)\n"
        "  a file that holds such a text\n"
        "or times of layers, which become a profile (--model: the model that was measured):\n"
        "  a trace of torch.profiler (.json, .json.gz)\n"
        "  an export of Nsight Systems (.sqlite), or a CSV of its nsys stats about NVTX ranges\n"
        "  a CSV with a line of layer names and a line of times (or lines that begin with F, B, I, W)"
    )
    parser.add_argument("source", metavar="SOURCE", help="a file or a string, see below")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the plan or profile to write (default: standard output)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object about it (with -o)")
    group = parser.add_argument_group("Megatron")
    group.add_argument("--pp", type=whole_number, help="--pipeline-model-parallel-size")
    group.add_argument(
        "--vp", type=whole_number, help="stages per rank (derived from the string; a given value is checked)"
    )
    group.add_argument("--micro-batches", type=whole_number, help="micro-batches per step (default: 2 x pp)")
    group.add_argument(
        "--schedule", choices=("1f1b", "interleaved"), help="derived from the string; a given value is checked"
    )
    group.add_argument(
        "--group-size", type=whole_number, help="--microbatch-group-size-per-virtual-pipeline-stage (default: pp)"
    )
    group = parser.add_argument_group("PyTorch and torchtitan")
    group.add_argument("--partition", metavar="N,N,...", help="layers per stage, embedding and head included")
    add_cost_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import sys

    from octopipe.base.errors import OctoPipeError
    from octopipe.cli.verbs.export import say
    from octopipe.plans.file import plan_to_json, save_plan

    if args.json and not args.output:
        raise OctoPipeError("--json and the plan would both go to standard output; give -o FILE")
    profile = _recorded(args)
    if profile is not None:
        return _keep(profile, args)
    found = _read(args)
    plan = found.plan
    setting = setting_of(args)
    if setting:
        plan = plan.with_extra(setting=setting)
    say(found.notes)
    if not args.output:
        sys.stdout.buffer.write(plan_to_json(plan))
        return 0
    save_plan(plan, args.output)
    if args.json:
        print_json(
            {
                "plan": args.output,
                "system": plan.extra.get("system"),
                "model": plan.model or None,
                "layers": plan.num_layers,
                "pp": plan.num_ranks,
                "micro_batches": plan.num_micro_batches,
                "partition": plan.partition,
                "notes": found.notes,
            }
        )
    else:
        words = (
            f"{args.output}: {plan.extra['system']}, {counted(len(plan.stages), 'stage')} on "
            f"{counted(plan.num_ranks, 'rank')}, {counted(plan.num_micro_batches, 'micro-batch')}"
        )
        console(stderr=True).print(words, soft_wrap=True, markup=False)
    return 0


def _recorded(args: argparse.Namespace) -> Profile | None:
    """Return a profile if SOURCE is a recording of layer times, else None."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.costs.foreign_times import KINDS, kind_of_file, load_foreign_profile
    from octopipe.costs.resolve import resolve_costs

    kind = kind_of_file(args.source)
    if kind is None:
        return None
    for flag in ("pp", "vp", "micro_batches", "schedule", "group_size", "partition"):
        if getattr(args, flag) is not None:
            raise OctoPipeError(
                f"--{flag.replace('_', '-')} is for plans; {args.source} is {KINDS[kind]}: leave it out"
            )
    setting = setting_of(args)
    if setting and not args.model:
        raise OctoPipeError(f"--{next(iter(setting)).replace('_', '-')} prices a model; give --model, too")
    for name in ("speeds", "p2p_ms", "nodes"):
        if name in setting:
            raise OctoPipeError(f"--{name.replace('_', '-')} is not part of a profile; give it to simulate or tune")
    setting.pop("model", None)
    return load_foreign_profile(args.source, resolve_costs(args.model, pp=1, **setting) if args.model else None)


def _keep(profile: Profile, args: argparse.Namespace) -> int:
    import sys

    from octopipe.cli.verbs.export import say

    say(tuple(profile.about["notes"]))
    if not args.output:
        sys.stdout.buffer.write(profile.to_json() + b"\n")
        return 0
    profile.save(args.output)
    if args.json:
        print_json(
            {
                "profile": args.output,
                "source": profile.about["source"],
                "model": profile.costs.model,
                "layers": profile.about["layers"],
                "notes": profile.about["notes"],
            }
        )
    else:
        costs = profile.costs
        words = (
            f"{args.output}: {counted(costs.num_layers, 'layer')}, F {costs.forward_ms.sum():.3f} ms, "
            f"I {costs.input_ms.sum():.3f} ms, W {costs.weight_ms.sum():.3f} ms; use it as MODEL of simulate and tune"
        )
        console(stderr=True).print(words, soft_wrap=True, markup=False)
    return 0


def _read(args: argparse.Namespace) -> ForeignPlan:
    from octopipe.base.errors import OctoPipeError
    from octopipe.base.files import decode_text, read_bytes, shown
    from octopipe.plans.readers.megatron_text import HYBRID_LETTERS

    text, where = args.source, "the text"
    letters = set("EtmL,()0123456789|/'\"") | set(HYBRID_LETTERS)
    # A text may be longer than any file's name, at which `Path.is_file` raises an error.
    if os.path.isfile(args.source) or not set(args.source) <= letters:
        where = shown(args.source)
        text = decode_text(read_bytes(args.source), where).strip()
    if not text.strip():
        raise OctoPipeError(f"{where} is empty; give a schedule CSV, a Megatron text or a recording")
    if set(text) <= letters and "\n" not in text and not text[:1].isdigit():
        return _megatron(args, text)
    return _torch(args, text, where)


def _megatron(args: argparse.Namespace, text: str) -> ForeignPlan:
    from octopipe.base.errors import OctoPipeError
    from octopipe.plans.readers.megatron_text import read_megatron
    from octopipe.search.foreign_plan import megatron_plan

    if args.partition:
        raise OctoPipeError("--partition is for schedule CSVs; a Megatron text says its stages itself: leave it out")
    parsed = read_megatron(text)
    if args.pp is None:
        raise OctoPipeError(
            "the number of ranks is missing; a Megatron text needs --pp, its --pipeline-model-parallel-size"
        )
    return megatron_plan(
        parsed,
        pp=args.pp,
        num_micro_batches=args.micro_batches or 2 * args.pp,
        vp=args.vp,
        schedule=args.schedule,
        group_size=args.group_size,
        costs=_costs(args, args.pp),
    )


def _torch(args: argparse.Namespace, text: str, where: str) -> ForeignPlan:
    from octopipe.base.errors import OctoPipeError
    from octopipe.plans.readers.torch_csv import read_torch_csv
    from octopipe.search.foreign_plan import torch_plan

    schedule = read_torch_csv(text, where)
    for flag in ("vp", "schedule", "group_size"):
        if getattr(args, flag) is not None:
            raise OctoPipeError(f"--{flag.replace('_', '-')} is for Megatron texts; a CSV says it itself: leave it out")
    if args.pp is not None and args.pp != len(schedule.rows):
        raise OctoPipeError(f"{where} has {len(schedule.rows)} ranks, not {args.pp}; leave --pp out")
    sizes: list[int] = []
    if args.partition:
        try:
            sizes = [int(part) for part in args.partition.split(",")]
        except ValueError:
            sizes = [0]
        if min(sizes) < 1:
            raise OctoPipeError(f"--partition {args.partition}: give whole numbers from 1 on, separated by commas")
    found = torch_plan(schedule, partition=sizes, costs=_costs(args, len(schedule.rows)), where=where)
    if args.micro_batches is not None and args.micro_batches != found.plan.num_micro_batches:
        raise OctoPipeError(f"{where} has {found.plan.num_micro_batches} micro-batches, not {args.micro_batches}")
    return found


def _costs(args: argparse.Namespace, pp: int) -> CostTable | None:
    """Return the costs of the model, if one was named; other cost flags are stored in the plan for later."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.costs.resolve import resolve_costs

    setting = setting_of(args)
    if not args.model:
        if setting:
            raise OctoPipeError(f"--{next(iter(setting)).replace('_', '-')} prices a model; give --model, too")
        return None
    return resolve_costs(args.model, pp=pp)  # only its layers are needed here
