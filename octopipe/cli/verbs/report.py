"""`octopipe report FILE ... -o report.html`: writes plans and timelines into one self-contained page.

Knows: its flags. Does not know: the page (report/) or how files become entries (report/load.py).
"""

from __future__ import annotations

import argparse

from octopipe.cli.verbs.common import console, named
from octopipe.cli.verbs.plan_costs import add_cost_arguments, setting_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="plan files or timeline files, in this order")
    parser.add_argument("-o", "--output", default="report.html", help="the page to write (default: report.html)")
    parser.add_argument("--title", default="", help="title of the page")
    add_cost_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from octopipe.base.files import write_whole
    from octopipe.views.report.load import load_entries
    from octopipe.views.report.page import report_html

    entries = load_entries(args.files, setting_of(args))
    page = report_html(entries, title=args.title).encode()
    write_whole(args.output, page)
    names = ", ".join(f"{named(e.name)} {e.timeline.step_ms:.1f} ms" for e in entries)
    size = f"{len(page) / 1e6:.2f} MB"
    console(stderr=True).print(f"{named(args.output)}: {names} ({size}; open it in a browser)", soft_wrap=True)
    return 0
