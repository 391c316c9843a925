"""`octopipe systems`: lists the published systems, what they tune and what they need; --check verifies them.

Knows: how the registry and the closed forms of the papers are shown. Does not know: any system.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from octopipe.cli.verbs.common import console, print_json

if TYPE_CHECKING:
    from octopipe.search.systems.closed_forms import Checked, ClosedForm

PHASES = ("partitioning", "placement", "scheduling")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="simulate the published closed forms and compare")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    return _check(args) if args.check else _list(args)


def _list(args: argparse.Namespace) -> int:
    from octopipe.search.systems.registry import systems

    known = list(systems().values())
    if args.json:
        names = ("name", "title", "paper", "year", "tunes", "constraint")
        print_json({"systems": [{name: getattr(s, name) for name in names} for s in known]})
        return 0
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("name", no_wrap=True, style="cyan")
    table.add_column("P A S", no_wrap=True)
    table.add_column("paper", overflow="fold", ratio=3)
    table.add_column("needs", style="dim", overflow="fold", ratio=2)
    for s in sorted(known, key=lambda s: s.year):
        paper = s.paper if str(s.year) in s.paper else f"{s.paper}, {s.year}"
        table.add_row(s.name, " ".join("●" if phase in s.tunes else "·" for phase in PHASES), paper, s.constraint)
    out = console()
    out.print(table)
    out.print("\n● decides this itself: Partition, plAcement, Schedule (else even, in order, 1F1B)", style="dim")
    out.print("`octopipe compare MODEL --pp N` runs them all; --check holds them to their papers.", style="dim")
    return 0


def _check(args: argparse.Namespace) -> int:
    from octopipe.search.systems.closed_forms import all_closed_forms

    results = _checked(all_closed_forms())
    wrong = [r for r in results if not r.matches]
    if args.json:
        names = ("system", "case", "quantity", "formula", "expected", "at_most")
        rows = [{n: getattr(r.form, n) for n in names} for r in results]
        for row, r in zip(rows, results):
            row |= {"simulated": r.simulated, "matches": r.matches}
        print_json({"matching": len(results) - len(wrong), "differing": len(wrong), "forms": rows})
        return 1 if wrong else 0
    from rich.table import Table

    # On a narrow screen the columns with the verdict stay whole and texts are folded.
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("system", overflow="fold", style="cyan", min_width=6)
    table.add_column("case", overflow="fold")
    table.add_column("quantity", overflow="fold")
    table.add_column("formula", style="dim", overflow="fold")
    for title in ("expected", "simulated"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for r in results:
        limit = "≤ " if r.form.at_most else ""
        mark = "[green]✓[/]" if r.matches else "[bold red]✗[/]"
        f = r.form
        table.add_row(f.system, f.case, f.quantity, f.formula, f"{limit}{f.expected:.6g}", f"{r.simulated:.6g}", mark)
    out = console()
    out.print(table)
    verdict = f"[bold red]{len(wrong)} of {len(results)} differ[/]" if wrong else f"[green]all {len(results)} agree[/]"
    out.print(f"\n{verdict}: published closed forms against the simulator")
    return 1 if wrong else 0


def _checked(forms: list[ClosedForm]) -> list[Checked]:
    """Simulate every closed form, with a progress bar on a terminal."""
    err = console(stderr=True)
    if not err.is_terminal:
        return [form.checked() for form in forms]
    from rich.progress import track

    return [form.checked() for form in track(forms, "closed forms", console=err, transient=True)]
