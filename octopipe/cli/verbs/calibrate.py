"""`octopipe calibrate RUNS.csv -o my-stack.json`: fits the rates of your own stack to your own runs or profiles.

Knows: the flags, which files hold what, the table of predicted beside measured values, and how well the fit predicts
runs it was not fitted to. Does not know: how rates are fitted (search/planner/fitting.py) or files are read
(costs/runs.py).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octopipe.cli.verbs.common import console, named, print_json

if TYPE_CHECKING:
    from octopipe.costs.analytic.calibration import Stack
    from octopipe.search.planner.fitting import Fitted, SeenLayer, SeenRun

OPS = ("forward", "input", "weight")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="tables of runs (.csv: system, model, gpus, gbs, tokens_per_s_per_gpu and the split; docs/cluster.md), or "
        "profiles of one GPU that `octopipe profile` wrote (.json)",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the stacks that are included in the package, and exit"
    )
    parser.add_argument(
        "--name", default=None, help="name of the stack in the output (default: the output file's name)"
    )
    parser.add_argument("--gpu", help="with profiles: the GPU they were measured on, if they do not name a preset")
    parser.add_argument("--hardware", metavar="FILE", help="the GPU of the runs or profiles, from a hardware file")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="stack.json", help="the stack file to write (default: stack.json)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from octopipe.base.errors import OctoPipeError
    from octopipe.base.files import check_target, stem_of, write_whole
    from octopipe.costs.analytic.calibration import stack_names
    from octopipe.search.planner.fitting import fit_stack

    if args.list:
        return _list(args)
    if not args.files:
        raise OctoPipeError("no runs to calibrate with; give a table of runs (.csv) or profiles (.json), or --list")
    name = args.name or stem_of(args.output)
    if name in stack_names():
        raise OctoPipeError(f"{name} is a stack of the package; choose another --name")
    check_target(args.output)
    runs = [one for file in args.files if not file.endswith(".json") for one in _runs(args, file)]
    layers = [one for file in args.files if file.endswith(".json") for one in _layers(args, file)]
    seen: list[Any] = [*runs, *layers]
    about = f"fitted by octopipe calibrate to {_counted(runs, layers)}"
    found = fit_stack(seen, name, about)
    import msgspec

    write_whole(args.output, msgspec.json.format(msgspec.json.encode(found.stack.as_dict()), indent=1))
    rows = _rows(seen, found)
    if args.json:
        print_json({"output": args.output, "stack": found.stack.as_dict(), "rows": rows})
    else:
        _show(args, found, rows, runs)
    return 0


def _counted(runs: list[SeenRun], layers: list[SeenLayer]) -> str:
    told = [f"{len(runs)} run{'s' * (len(runs) != 1)}"] * bool(runs)
    return " and ".join([*told, *[f"{len(layers)} timed ops of layers"] * bool(layers)])


def _runs(args: argparse.Namespace, file: str) -> list[SeenRun]:
    from octopipe.costs.cluster.hardware_file import read_hardware
    from octopipe.costs.resolve import resolve_spec
    from octopipe.costs.runs import read_runs
    from octopipe.search.planner.fitting import SeenRun

    gpus = {}
    if args.hardware is not None:
        own = read_hardware(args.hardware)
        gpus = {own.name: own}
    return [SeenRun(one) for one in read_runs(file, model=resolve_spec, gpus=gpus)]


def _layers(args: argparse.Namespace, file: str) -> list[SeenLayer]:
    """Return one timed op per op and kind of layer in a profile of one GPU."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.base.files import shown
    from octopipe.cli.verbs.against_analytic import gpu_of
    from octopipe.costs.cluster.hardware import gpu
    from octopipe.costs.cluster.hardware_file import read_hardware
    from octopipe.costs.cluster.setup import Setup
    from octopipe.costs.profile_file import load_profile
    from octopipe.costs.resolve import resolve_spec
    from octopipe.search.planner.fitting import SeenLayer

    profile, where = load_profile(file), shown(file)
    recipe = profile.about.get("recipe")
    if not isinstance(recipe, dict) or not isinstance(recipe.get("model"), str) or "extrapolated" in profile.about:
        raise OctoPipeError(
            f"{where}: does not say which model was measured; give a file that `octopipe profile` wrote"
        )
    if profile.mode is not None and not profile.mode.precision.startswith("bf16"):
        raise OctoPipeError(
            f"{where}: was measured in {profile.mode}; rates are of bf16: profile with --precision bf16"
        )
    spec = resolve_spec(recipe["model"])
    scale, count = recipe.get("scale") or 1.0, recipe.get("num_layers")
    if spec is not None and (scale != 1.0 or count):
        spec = spec.scaled(float(scale), num_layers=count)
    measured = profile.partial.get(1, profile.costs)
    if spec is None or spec.num_layers != measured.num_layers:
        raise OctoPipeError(
            f"{where}: the layers of {recipe['model']} have no separate analytic costs; profile a preset"
        )
    kind = (
        read_hardware(args.hardware) if args.hardware else gpu(gpu_of(args.gpu or "", str(profile.about.get("device"))))
    )
    setup = Setup(gpu=kind, seq=int(recipe["tokens"]), micro_batch_size=int(recipe.get("micro_batch_size") or 1))
    out = []
    for layer in dict.fromkeys(spec.layers):
        i = spec.layers.index(layer)
        for op in OPS:
            took = float(getattr(measured, f"{op}_ms")[i])
            if took > 1e-4 and not (op == "input" and i == 0):
                out.append(SeenLayer(spec, i, op, took, setup))
    return out


def _rows(seen: list[Any], found: Fitted) -> list[dict[str, Any]]:
    rows = []
    for i, one in enumerate(seen):
        run = getattr(one, "run", None)
        left_out = found.left_out[i] if found.left_out else None
        words = {"what": run.name, "measured": run.tokens_per_s_per_gpu} if run is not None else _layer_words(one)
        rows.append({**words, "error": found.errors[i], "error_left_out": left_out})
        if run is not None:
            rows[-1] |= {"setup": run.setup.words(), "fits": one.fits}
    return rows


def _layer_words(one: SeenLayer) -> dict[str, Any]:
    return {"what": f"layer {one.layer} ({one.spec.layers[one.layer].symbol}) {one.op}", "measured": one.measured_ms}


def _show(args: argparse.Namespace, found: Fitted, rows: list[dict[str, Any]], runs: list[SeenRun]) -> None:
    from rich.table import Table

    out = console()
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run" if runs else "op", overflow="ellipsis")
    for title in ("measured", "error %", "left out %"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        left_out = row["error_left_out"]
        table.add_row(
            named(row["what"]),
            f"{row['measured']:.4g}",
            f"{100 * row['error']:+.1f}",
            "" if left_out is None else f"{100 * left_out:+.1f}",
        )
    out.print(table)
    unit = "tokens per GPU and second" if runs else "ms"
    out.print(
        f"measured in {unit}; error: predicted over measured, fitted to all runs, and to all other runs", style="dim"
    )
    for row in rows:
        if row.get("fits") is False:
            out.print(
                f"{named(row['what'])} does not fit in memory according to the model: {row['setup']}", style="yellow"
            )
    if found.stack.errors is None:
        out.print("Too few runs for leave-one-out errors: the accuracy on unseen runs is not known. Give four or more.")
    else:
        out.print(f"{named(found.stack.name)}: {found.stack.errors.words()}")
    if not runs:
        out.print("Layers of one GPU say nothing about links: the rates of collectives are the defaults.")
    out.print(f"written to {args.output}; next: octopipe plan MODEL --stack {args.output} ...", soft_wrap=True)


def _list(args: argparse.Namespace) -> int:
    from octopipe.costs.analytic.calibration import DEFAULT_STACK, stack_named, stack_names

    stacks = [stack_named(name) for name in stack_names()]
    if args.json:
        print_json({"stacks": [stack.as_dict() for stack in stacks], "default": DEFAULT_STACK})
        return 0
    out = console()
    for stack in stacks:
        default = " (default)" if stack.name == DEFAULT_STACK else ""
        out.print(f"[bold]{stack.name}[/]{default}: {stack.about}", soft_wrap=True)
        out.print(f"  {_fitted_on(stack)}", style="dim", soft_wrap=True)
    return 0


def _fitted_on(stack: Stack) -> str:
    pairs = ", ".join(f"{g} {p}" for g, p, _ in stack.rates)
    return f"{pairs}; " + ("leave-one-out errors are not known" if stack.errors is None else stack.errors.words())
