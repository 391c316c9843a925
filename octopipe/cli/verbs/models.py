"""`octopipe models [NAME]`: lists the presets, or one model layer by layer.

Knows: how models are listed. Does not know: their sizes (zoo.py).
"""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import TYPE_CHECKING

from octopipe.base.display import parameter_count
from octopipe.cli.verbs.common import console, named, print_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from octopipe.models.layers import Layer
    from octopipe.models.spec import ModelSpec

NAMES = {"mlp": "MLP", "moe": "MoE", "mamba1": "Mamba", "mamba2": "Mamba", "mtp": "multi-token prediction"}
"""Names in the legend for layer kinds that are not shown under their own name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="show this model (a preset or config.json) in full")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    return _show(args) if args.model else _list(args)


def _list(args: argparse.Namespace) -> int:
    from octopipe.costs.measured import measured_models
    from octopipe.models.zoo import names, preset

    specs = [preset(name) for name in names()]
    measured = measured_models()
    if args.json:
        print_json(
            {
                "measured": measured,
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
                ],
            }
        )
        return 0
    from rich.table import Table

    out = console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("model", "params", "layers", "hidden"):
        table.add_column(title, justify="left" if title == "model" else "right", no_wrap=True)
    # The rest of the line shows how layers alternate; `models NAME` shows the whole pattern.
    room = out.width - 24 - 3 * 11
    table.add_column("pattern", no_wrap=True)
    for s in specs:
        start = s.pattern if len(s.pattern) <= room else s.pattern[: max(room - 3, 4)] + "..."
        table.add_row(s.name, f"{s.parameters / 1e9:.2f} B", str(s.num_layers), str(s.hidden), start)
    out.print(table)
    out.print()
    _legend(out, specs)
    out.print()
    out.print("Measured layer times, published by the authors of the paper (H800), used like a model's name:")
    out.print("  " + "  ".join(measured), style="cyan", markup=False)
    out.print()
    out.print("`octopipe models NAME` shows one layer by layer.", style="dim")
    return 0


def legend(specs: Iterable[ModelSpec]) -> dict[str, str]:
    """Return what every letter of the models' patterns stands for."""
    found: dict[str, dict[str, None]] = {}
    for layer in dict.fromkeys(layer for spec in specs for layer in spec.layers):
        found.setdefault(layer.symbol, {})[_words(layer)] = None
    return {symbol: " or ".join(words) for symbol, words in found.items()}


def _words(layer: Layer) -> str:
    mixer, ffn = getattr(layer, "mixer", None), getattr(layer, "ffn", None)
    if mixer is not None:
        return f"{_words(mixer)} {'MoE ' if getattr(ffn, 'kind', '') == 'moe' else ''}block"
    sliding = "sliding " if getattr(layer, "window", None) else ""
    return sliding + NAMES.get(layer.kind, layer.kind.replace("_", " "))


def _legend(out: Console, specs: Iterable[ModelSpec]) -> None:
    """Print the letters on as many lines as they need, without breaking an entry."""
    lines = [""]
    for symbol, words in legend(specs).items():
        entry = f"{symbol} {words}"
        if lines[-1] and len(lines[-1]) + 2 + len(entry) > out.width:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + entry
    out.print("\n".join(lines), style="dim")


def _show(args: argparse.Namespace) -> int:
    from octopipe.base.errors import OctoPipeError
    from octopipe.costs.resolve import resolve_spec

    spec = resolve_spec(args.model)
    if spec is None:
        raise OctoPipeError(
            f"{args.model} contains layer times only; `octopipe simulate {args.model} --pp N` uses them"
        )
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
    out.print(f"[bold]{named(spec.name)}[/]: {parameter_count(spec.parameters)} parameters, {spec.num_layers} layers")
    out.print(spec.pattern, style="cyan", overflow="fold", markup=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("layers", "", "kind", "parameters each"):
        table.add_column(title, justify="right" if "para" in title else "left")
    first = 0
    for layer, run_of in groupby(spec.layers):
        count = len(list(run_of))
        where = str(first) if count == 1 else f"{first}-{first + count - 1}"
        table.add_row(where, layer.symbol, _words(layer), f"{layer.parameters:,}")
        first += count
    out.print(table)
    return 0
