"""`octopipe reproduce [all | NAME...] -o out/`: computes the paper's tables and figures with our code, beside the
published values.

Knows: flags, progress, what is printed and where the page goes. Does not know: any table (octopipe/views/reproduce/).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from octopipe.cli.verbs.common import console, print_json, seed_number, whole_number

if TYPE_CHECKING:
    from octopipe.views.reproduce.runner import Finished, Progress

NAMES = (
    "all",
    "bubbles",
    "two-stages",
    "deadlock",
    "taxonomy",
    "models",
    "end-to-end",
    "pp-sizes",
    "communication",
    "traces",
    "ablation",
    "fidelity",
    "search",
    "scaling",
    "large-scale",
    "recomputation",
    "illustrations",
    "sensitivity",
    "beyond",
)
"""The names of all parts, listed here so that help and completion need no imports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", metavar="NAME", nargs="*", choices=NAMES, help=f"which parts: {', '.join(NAMES)} (default: all)"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FOLDER",
        default="out/reproduction",
        help="tables, pictures and finished searches (default: out/reproduction)",
    )
    parser.add_argument(
        "--profiles",
        metavar="DIR",
        help="the authors' layer times, or none (default: $OCTOPIPE_PROFILES, or those in the package)",
    )
    parser.add_argument(
        "--measured", metavar="FILE", help="measured runs for the fidelity part (default: benchmarks/results)"
    )
    parser.add_argument(
        "--iterations", type=whole_number, default=6000, help="moves per lane of our search (default: 6000)"
    )
    parser.add_argument("--rounds", type=whole_number, default=100, help="iterations of Algorithm 1 (default: 100)")
    parser.add_argument("--seed", type=seed_number, default=0, help="random seed (default: 0)")
    parser.add_argument("--fresh", action="store_true", help="run everything again; reuse neither parts nor searches")
    parser.add_argument(
        "--page",
        metavar="FILE",
        help="write the whole reproduction as one Markdown page, with its pictures in files next to it",
    )
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="check that this page is what the code generates today from the plans that are stored next to it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from octopipe.views.reproduce.bench import Options, find_measured, find_profiles
    from octopipe.views.reproduce.parts import parts
    from octopipe.views.reproduce.runner import chosen, run_parts

    wanted = chosen(args.names, parts())
    options = Options(
        profiles=find_profiles(args.profiles),
        measured=find_measured(args.measured),
        iterations=args.iterations,
        rounds=args.rounds,
        seed=args.seed,
    )
    if args.check:
        from octopipe.views.reproduce.page import stale

        changed = stale(Path(args.check), options, parts(), search_again=True)
        console().print(
            f"{args.check}: " + (f"stale: {', '.join(changed)}; run make reproduce" if changed else "as written")
        )
        return 1 if changed else 0
    with _progress(args.json) as progress:
        finished = run_parts(wanted, options, Path(args.output), progress=progress, fresh=args.fresh)
    if args.page:
        from octopipe.views.reproduce.page import write_page
        from octopipe.views.reproduce.store import ResultStore

        store = ResultStore(folder=Path(args.output) / "plans")
        write_page(Path(args.page), finished, options, store, complete=len(wanted) == len(parts()))
    if args.json:
        print_json({f.part.name: f.result.as_dict() for f in finished})
    else:
        _show(finished, args)
    return 0


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """Yield a function that shows progress: a bar on a terminal, else one line per part."""
    err = console(stderr=True)
    if not err.is_terminal:
        seen: set[str] = set()

        def line(words: str, done: int, total: int) -> None:
            name = words.split(":")[0]
            if name not in seen and not quiet and name != "done":
                seen.add(name)
                err.print(f"{done + 1}/{total} {name}", markup=False)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(words: str, done: int, total: int) -> None:
            bar.update(task, description=words, completed=done, total=total)

        yield report


def _show(finished: list[Finished], args: argparse.Namespace) -> None:
    from rich.table import Table

    from octopipe.views.reproduce.row import COUNTED, VERDICTS
    from octopipe.views.reproduce.runner import counted

    out = console()
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("part", no_wrap=True, style="cyan")
    for verdict in VERDICTS:
        table.add_column(verdict, justify="right")
    table.add_column("")
    for f in finished:
        counts = counted([f])
        table.add_row(f.part.name, *(str(counts.get(v, 0)) for v in VERDICTS), "kept" if f.reused else "")
    out.print(table)
    for f in finished:
        for row in f.result.rows:
            if row.verdict.startswith("differs"):
                tried = f" ({row.test} {row.outcome})" if row.outcome else ""
                out.print(f"{f.part.name}: {row.claim}: {row.verdict}: {row.why}{tried}", markup=False, style="yellow")
    counts = counted(finished)
    told = sum(n for v, n in counts.items() if v in COUNTED)
    fits = counts.get("agrees", 0) + counts.get("trend agrees", 0)
    where = f"; page {args.page}" if args.page else ""
    out.print(
        f"{fits} of {told} claims agree in number or trend; tables and pictures in {args.output}{where}", markup=False
    )
