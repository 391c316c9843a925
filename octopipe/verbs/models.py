"""`octopipe models [NAME]`: the presets, or one model layer by layer.

Knows: how models are listed. Does not know: their sizes (zoo.py).
"""

from __future__ import annotations

import argparse
from itertools import groupby

from octopipe.verbs.common import console, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="show this model (a preset or config.json) in full")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    return _show(args) if args.model else _list(args)


def _list(args: argparse.Namespace) -> int:
    from octopipe.zoo import names, preset

    specs = [preset(name) for name in names()]
    if args.json:
        print_json(
            {
                "models": [
                    {
                        "name": s.name,
                        "layers": s.num_layers,
                        "hidden": s.hidden,
                        "vocab": s.vocab,
                        "parameters": s.parameters,
                        "pattern": s.pattern,
                    }
                    for s in specs
                ]
            }
        )
        return 0
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, expand=True)
    for title, justify in (("model", "left"), ("params", "right"), ("layers", "right"), ("hidden", "right")):
        table.add_column(title, justify=justify, no_wrap=True, min_width=20 if title == "model" else 7)  # type: ignore[arg-type]
    table.add_column("pattern", overflow="ellipsis", no_wrap=True, ratio=1)
    for s in specs:
        table.add_row(s.name, f"{s.parameters / 1e9:.2f} B", str(s.num_layers), str(s.hidden), s.pattern)
    out = console()
    out.print(table)
    out.print("\nE embedding  M Mamba  - MLP  * attention  # MoE  T transformer block  L head", style="dim")
    out.print("`octopipe models NAME` shows one layer by layer.", style="dim")
    return 0


def _show(args: argparse.Namespace) -> int:
    from octopipe.errors import OctoPipeError
    from octopipe.resolve import resolve_spec

    spec = resolve_spec(args.model)
    if spec is None:
        raise OctoPipeError(f"{args.model} holds layer times only; `octopipe simulate {args.model} --pp N` uses them")
    if args.json:
        print_json(
            {
                "name": spec.name,
                "parameters": spec.parameters,
                "pattern": spec.pattern,
                "layers": [{"symbol": x.symbol, "kind": x.kind, "parameters": x.parameters} for x in spec.layers],
            }
        )
        return 0
    from rich.table import Table

    out = console()
    out.print(f"[bold]{spec.name}[/]: {spec.parameters / 1e9:.2f} B parameters, {spec.num_layers} layers")
    out.print(spec.pattern, style="cyan", overflow="fold", markup=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("layers", "", "kind", "parameters each"):
        table.add_column(title, justify="right" if "para" in title else "left")
    first = 0
    for layer, run_of in groupby(spec.layers):
        count = len(list(run_of))
        where = str(first) if count == 1 else f"{first}-{first + count - 1}"
        table.add_row(where, layer.symbol, layer.kind, f"{layer.parameters:,}")
        first += count
    out.print(table)
    return 0
