"""`octopipe compare MODEL`: simulates every system on one model and lists them best first, with a bar per row.

Knows: the flags, and how a comparison is shown. Does not know: how it is computed (comparison.py).
"""

from __future__ import annotations

import argparse
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octopipe.base.display import milliseconds
from octopipe.cli.verbs.common import (
    DOES_NOT_FIT,
    PriceFrom,
    add_model_arguments,
    add_setting_arguments,
    console,
    costs_from,
    counted,
    micro_batches_from,
    named,
    non_negative,
    print_json,
    setup_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.text import Text

    from octopipe.search.comparison import Comparison, Progress, Result

SOLVERS = ("tessel",)
"""Systems whose search takes the option `time_limit_s`."""
BAR = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, or_profile=True)
    parser.add_argument(
        "--systems", metavar="A,B,C", help="compare only these systems (default: all; `octopipe systems` lists them)"
    )
    add_setting_arguments(parser)
    parser.add_argument(
        "--time-limit", type=non_negative, default=12.0, metavar="S", help="seconds for Tessel's solver (default: 12)"
    )


def run(args: argparse.Namespace) -> int:
    from octopipe.base.errors import OctoPipeError
    from octopipe.search.comparison import compare

    names = None
    if args.systems is not None:
        names = [name.strip() for name in args.systems.split(",") if name.strip()]
        if not names:
            raise OctoPipeError("--systems names no system; give some, separated by commas: 1f1b,zb-v")
    lengths, before = args.lengths, argparse.Namespace(**vars(args))
    costs = costs_from(args)
    own = {}
    if lengths is not None and args.batching in (None, "pad"):
        # DynaPipe groups sequences itself, so its row has its own micro-batches.
        before.batching = "dynamic"
        before.micro_batch_size = before.seq = None
        theirs = costs_from(before)
        own["dynapipe"] = (theirs, before.micro_batches)
    with _progress() as progress:
        result = compare(
            costs,
            args.pp,
            micro_batches_from(args),
            names=names,
            split_backward=bool(args.split_backward),
            recompute="auto" if args.recompute == "auto" else "none",
            price=PriceFrom(args) if args.recompute == "auto" else None,
            options={name: {"time_limit_s": args.time_limit} for name in SOLVERS},
            own=own,
            progress=progress,
        )
    if args.json:
        print_json(_finite(result.as_dict()))
    else:
        show(result)
    if result.interrupted:
        return INTERRUPTED  # 130, or 143 for SIGTERM: main replaces the code, since it knows which signal was received
    ran = [r for r in result.results if not r.reason]
    return DOES_NOT_FIT if ran and not any(r.fits for r in ran) else 0


INTERRUPTED = 130


def _finite(value: Any) -> Any:
    """Return the value with None in place of NaN, which JSON cannot represent."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and value != value else value


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Yield a function that updates a progress bar on stderr, or None if stderr is not a terminal."""
    err = console(stderr=True)
    if not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # No refresh thread: worker processes are forked while the bar is shown.
    with Bar(*columns, console=err, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("comparing", total=None)

        def report(system: str, finished: int, total: int) -> None:
            bar.update(task, description=system, completed=finished, total=total)
            bar.refresh()

        yield report


def show(result: Comparison) -> None:
    """Print the table, best system first."""
    from rich.table import Table

    out = console()
    ran = [r for r in result.results if not r.reason]
    mode = "every backward split" if result.split_backward else "as published"
    count = counted(result.num_micro_batches, "micro-batch")
    out.print(
        f"[bold]{named(result.model)}[/], pp {result.num_ranks}, {count}, {mode}; "
        f"lower bound {milliseconds(result.lower_bound_ms)} for {result.bound_of.words}"
    )
    if result.setup is not None:
        out.print(setup_words(result.setup), style="cyan", markup=False)
    if ran:
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("system", no_wrap=True, style="cyan", min_width=13)
        memory = any(r.max_memory_gib > 0 for r in ran)
        titles = ["step ms", "speed-up", "bubble", *(["GiB", "fits"] if memory else []), "B", "comms", "hidden"]
        for title in titles:
            justify: Any = "center" if title == "fits" else "right"
            table.add_column(title, justify=justify, no_wrap=True, min_width=max(len(title), 6))
        # The bar takes the width that the numbers leave on the line.
        room = max(8, min(BAR, out.width - 14 - sum(max(len(t), 6) + 1 for t in titles)))
        table.add_column("", no_wrap=True, min_width=room)
        longest = max(r.step_ms for r in ran)
        for r in ran:
            table.add_row(r.system, *_cells(r, memory), _bar(r, longest, room))
        out.print(table)
        key = "█ computing  ░ idle, mean over ranks; B: backward split into I and W, or fused; hidden: behind compute"
        out.print(key, style="dim")
    out_of = [r for r in result.results if r.reason]
    if out_of:
        out.print()
        reasons = Table(box=None, show_header=False, pad_edge=False)
        reasons.add_column(no_wrap=True, style="cyan", min_width=13)
        reasons.add_column(style="dim", overflow="fold")
        for r in out_of:
            reasons.add_row(r.system, r.reason)
        out.print(reasons)


def _cells(r: Result, memory: bool) -> list[str]:
    speedup = "" if r.speedup is None else f"{r.speedup:.2f}x"
    held = []
    if memory:
        held = [f"{r.max_memory_gib:.1f}", "[green]✓[/]" if r.fits else "[bold red]✗[/]"]
    return [
        f"{r.step_ms:.1f}",
        f"[bold]{speedup}[/]" if r.speedup and r.speedup > 1.0005 else speedup,
        f"{100 * r.bubble_ratio:.1f} %",
        *held,
        "split" if r.splits_backward else "fused",
        str(r.communications),
        f"{100 * r.overlap_rate:.0f} %",
    ]


def _bar(r: Result, longest: float, room: int) -> Text:
    """Return a bar as long as the step, relative to the longest; its solid part is the share of compute."""
    from rich.text import Text

    length = max(1, round(room * r.step_ms / longest)) if longest > 0 else 1
    busy = min(length, round(length * (1.0 - r.bubble_ratio)))
    colour = "red" if not r.fits else "green" if (r.speedup or 0) > 1.0005 else "yellow"
    return Text.assemble(("█" * busy, colour), ("░" * (length - busy), f"dim {colour}"))
