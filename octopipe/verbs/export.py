"""`octopipe export FILE --to FORMAT -o OUT`: a plan or a timeline in another tool's format.

Knows: the formats' names and which of them need costs. Does not know: the formats (export/).
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from octopipe.verbs.common import console, named, whole_number
from octopipe.verbs.plan_costs import add_cost_arguments, setting_of

if TYPE_CHECKING:
    from octopipe.report.entry import Entry

FORMATS = {
    "perfetto": "a trace for ui.perfetto.dev and chrome://tracing (gzipped when OUT ends in .gz)",
    "svg": "a picture for papers",
    "png": "the same picture in pixels (needs the extra octopipe[png])",
    "csv": "one row per op and transfer",
    "pytorch": "compute-only schedule CSV for torch.distributed.pipelining",
    "megatron": "Megatron-LM's layout arguments",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "formats:\n" + "\n".join(f"  {name:9} {words}" for name, words in FORMATS.items())
    parser.add_argument("file", metavar="FILE", help="a plan file or a timeline file")
    parser.add_argument("--to", required=True, choices=list(FORMATS), help="the format, one of those below")
    parser.add_argument("-o", "--output", metavar="OUT", help="where to (default: standard output)")
    parser.add_argument("--width", type=whole_number, default=1000, help="of a picture (default: 1000)")
    parser.add_argument("--title", default="", help="of a picture")
    add_cost_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from octopipe.errors import OctoPipeError
    from octopipe.files import write_whole

    data = _export(args)
    if args.output and args.output != "-":
        write_whole(args.output, data)
        console(stderr=True).print(f"{named(args.output)}: {args.to}, {len(data):,} bytes", soft_wrap=True)
        return 0
    if args.to == "png" and sys.stdout.isatty():
        raise OctoPipeError("a PNG is nothing for a terminal; give -o FILE")
    sys.stdout.buffer.write(data)
    return 0


def _export(args: argparse.Namespace) -> bytes:
    from octopipe.errors import OctoPipeError

    if args.to == "pytorch":
        from octopipe.export.pytorch import pytorch_csv
        from octopipe.plan_file import load_plan

        return pytorch_csv(load_plan(args.file)).encode()
    from octopipe.report.load import load_entry

    entry = load_entry(args.file, setting_of(args))
    if args.to == "megatron":
        from octopipe.export.megatron import megatron_arguments

        if entry.plan is None or entry.costs is None:
            raise OctoPipeError(f"{args.file}: a timeline has no partition; export the plan it was made from")
        return (megatron_arguments(entry.plan, entry.costs.symbols) + "\n").encode()
    return _of_timeline(args, entry)


def _of_timeline(args: argparse.Namespace, entry: Entry) -> bytes:
    match args.to:
        case "perfetto":
            from octopipe.export.perfetto import trace_bytes

            compress = bool(args.output) and args.output.endswith(".gz")
            return trace_bytes(entry.timeline, entry.plan, compress=compress)
        case "svg":
            from octopipe.export.svg import timeline_svg

            return timeline_svg(entry.timeline, width=args.width, title=args.title).encode()
        case "png":
            from octopipe.export.png import timeline_png

            return timeline_png(entry.timeline, width=args.width, title=args.title)
    from octopipe.export.table import timeline_csv

    return timeline_csv(entry.timeline, entry.plan).encode()
