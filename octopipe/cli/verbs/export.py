"""`octopipe export FILE --to FORMAT -o OUT`: writes a plan or a timeline in another tool's format.

Knows: the formats' names and which of them need costs. Does not know: the formats (export/).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from octopipe.cli.verbs.common import console, named, whole_number
from octopipe.cli.verbs.plan_costs import add_cost_arguments, setting_of

if TYPE_CHECKING:
    from octopipe.views.report.entry import Entry

FORMATS = {
    "perfetto": "a trace for ui.perfetto.dev and chrome://tracing (gzipped when OUT ends in .gz)",
    "svg": "a picture for papers",
    "png": "the same picture as PNG (needs the extra octopipe[png])",
    "csv": "one row per op and transfer",
    "torch-csv": "schedule CSV for torch.distributed.pipelining (--with-communication: sends and receives, too)",
    "pytorch": "the same, under its former name",
    "torchtitan": "torchtitan's settings (the schedule CSV goes to OUT), or a config module OUT.py with --base",
    "megatron": "Megatron-LM's layout arguments",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "formats:\n" + "\n".join(f"  {name:10} {words}" for name, words in FORMATS.items())
    parser.add_argument("file", metavar="FILE", help="a plan file or a timeline file")
    parser.add_argument("--to", required=True, choices=list(FORMATS), help="output format (see below)")
    parser.add_argument("-o", "--output", metavar="OUT", help="output file (default: standard output)")
    parser.add_argument("--width", type=whole_number, default=1000, help="width of a picture (default: 1000)")
    parser.add_argument("--title", default="", help="title of a picture")
    parser.add_argument(
        "--with-communication",
        action="store_true",
        help="torch-csv: include sends and receives in their proven order (format compute_comms)",
    )
    parser.add_argument(
        "--torch",
        metavar="VERSION",
        help="with --with-communication: the PyTorch that will load it (default: the installed one, or the newest)",
    )
    parser.add_argument(
        "--base",
        metavar="MODULE:CONFIG",
        help="torchtitan: write a module OUT.py whose config `planned` is this config with the plan's stages and "
        "schedule, e.g. llama3:llama3_8b",
    )
    add_cost_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from octopipe.base.errors import OctoPipeError
    from octopipe.base.files import write_whole

    if args.to == "torchtitan":
        return _torchtitan(args)
    if args.base is not None:
        raise OctoPipeError(f"--base has no effect on {args.to}; use it with --to torchtitan")
    data = _export(args)
    if args.output and args.output != "-":
        write_whole(args.output, data)
        console(stderr=True).print(f"{named(args.output)}: {args.to}, {len(data):,} bytes", soft_wrap=True)
        return 0
    if args.to == "png" and sys.stdout.isatty():
        raise OctoPipeError("a PNG cannot be shown in a terminal; give -o FILE")
    sys.stdout.buffer.write(data)
    return 0


def _export(args: argparse.Namespace) -> bytes:
    from octopipe.base.errors import OctoPipeError

    if args.with_communication and args.to not in ("torch-csv", "pytorch"):
        raise OctoPipeError(f"--with-communication has no effect on {args.to}; use it with --to torch-csv")
    if args.torch is not None and not args.with_communication:
        raise OctoPipeError("--torch is for --to torch-csv --with-communication: other formats do not depend on it")
    if args.to in ("torch-csv", "pytorch"):
        return _torch_csv(args)
    from octopipe.views.report.load import load_entry

    entry = load_entry(args.file, setting_of(args))
    if args.to == "megatron":
        from octopipe.views.export.megatron import megatron_layout

        if entry.plan is None or entry.costs is None:
            raise OctoPipeError(f"{args.file}: a timeline has no partition; export the plan it was made from")
        layout = megatron_layout(entry.plan, entry.costs.symbols)
        say(layout.notes)
        return (layout.arguments + "\n").encode()
    return _of_timeline(args, entry)


def say(notes: Iterable[str]) -> None:
    """Print notes about differences between the plan and the output on stderr."""
    for note in notes:
        console(stderr=True).print(f"note: {note}", soft_wrap=True, markup=False, highlight=False)


def _torchtitan(args: argparse.Namespace) -> int:
    from octopipe.base.errors import OctoPipeError
    from octopipe.base.files import write_whole
    from octopipe.plans.file import load_plan
    from octopipe.views.export.torchtitan import titan_settings

    if not args.output or args.output == "-":
        raise OctoPipeError("torchtitan reads the schedule from a file; give -o FILE.csv")
    if args.base is not None or args.output.endswith(".py"):
        return _titan_module(args)
    found = titan_settings(load_plan(args.file))
    say(found.notes)
    write_whole(args.output, found.csv.encode())
    sys.stdout.write(found.lines(args.output))
    return 0


def _titan_module(args: argparse.Namespace) -> int:
    """Write the plan as a torchtitan config module, with its CSV next to it."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.base.files import write_whole
    from octopipe.plans.file import load_plan
    from octopipe.views.export.torchtitan import titan_module

    out = Path(args.output)
    if args.base is None or out.suffix != ".py" or not out.stem.isidentifier():
        raise OctoPipeError("a config module needs a base and a name: --base llama3:llama3_8b -o planned.py")
    csv = out.with_suffix(".csv")
    where = os.path.relpath(args.file, out.parent)
    text, settings = titan_module(load_plan(args.file), args.base, csv_name=csv.name, plan_name=where)
    if settings is not None:
        say(settings.notes)
        write_whole(csv, settings.csv.encode())
    write_whole(out, text.encode())
    console(stderr=True).print(f"{named(args.output)}: --module {out.stem} --config planned", soft_wrap=True)
    return 0


def _torch_csv(args: argparse.Namespace) -> bytes:
    from octopipe.plans.file import load_plan
    from octopipe.views.export.pytorch import pytorch_csv, pytorch_csv_with_communication, torch_order

    plan = load_plan(args.file)
    say(torch_order(plan).notes)
    if not args.with_communication:
        return pytorch_csv(plan).encode()
    setting = setting_of(args)
    costs = None
    if setting or plan.extra.get("setting") or plan.extra.get("cost_table"):
        from octopipe.plans.setting import costs_of_plan

        costs = costs_of_plan(plan, setting, args.file)
    version = args.torch or _installed_torch()
    say([f"written for PyTorch {version}; --torch VERSION writes it for another"])
    return pytorch_csv_with_communication(plan, costs, version=version).encode()


def _installed_torch() -> str:
    """Return the version of the installed PyTorch, or the newest version whose schedules are known."""
    from importlib.metadata import PackageNotFoundError, version

    from octopipe.views.export.pytorch import ACTIONS_SINCE

    try:
        return version("torch")
    except PackageNotFoundError:
        return ".".join(map(str, max(ACTIONS_SINCE)))


def _of_timeline(args: argparse.Namespace, entry: Entry) -> bytes:
    match args.to:
        case "perfetto":
            from octopipe.views.export.perfetto import trace_bytes

            compress = bool(args.output) and args.output.endswith(".gz")
            return trace_bytes(entry.timeline, entry.plan, compress=compress)
        case "svg":
            from octopipe.views.export.svg import timeline_svg

            return timeline_svg(entry.timeline, width=args.width, title=args.title).encode()
        case "png":
            from octopipe.views.export.png import timeline_png

            return timeline_png(entry.timeline, width=args.width, title=args.title)
    from octopipe.views.export.table import timeline_csv

    return timeline_csv(entry.timeline, entry.plan).encode()
