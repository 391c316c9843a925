"""`octopipe profile MODEL --device cuda|cpu --nproc N -o profile.json`: measures a model's layers on this machine.

Knows: its flags, what is needed to repeat a profile (`recipe`), and how its progress is shown. Does not know: how
layers are measured (runtime/measure/profiler.py), or what that takes (runtime/measure/forecast.py).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octopipe.base.display import duration
from octopipe.cli.verbs.common import add_model_arguments, console, named, print_json, whole_number, width_factor
from octopipe.cli.verbs.runnable import (
    add_encoder_arguments,
    add_kernel_arguments,
    add_precision_arguments,
    code_words,
    frozen_layers,
    is_hf_config,
    model_of,
    needs_torch,
    settings_of,
)
from octopipe.cli.verbs.screen import LINE_EVERY_S
from octopipe.cli.verbs.text import counted
from octopipe.costs.mode import precision_of

if TYPE_CHECKING:
    from octopipe.costs.profile_file import Profile
    from octopipe.models.spec import ModelSpec
    from octopipe.runtime.measure.trial import Workload


LONG_S = 60.0
"""Seconds above which a line with the expected duration, and faster alternatives, is printed first."""
WARM_UP = 3
LEAST_NAME = 6
"""Characters of a layer's name in the narrowest table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, runs=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the ranks run (default: cpu)")
    parser.add_argument(
        "--nproc", type=whole_number, default=1, help="number of ranks that run at the same time (default: 1)"
    )
    parser.add_argument("--seq", type=whole_number, default=4096, help="tokens per sequence (default: 4096)")
    parser.add_argument(
        "--micro-batch-size", type=whole_number, default=1, help="sequences per micro-batch (default: 1)"
    )
    parser.add_argument("--scale", type=width_factor, default=1.0, help="shrink the model's widths by this factor")
    parser.add_argument(
        "--layers", dest="num_layers", type=whole_number, help="keep this many layers, embedding and head included"
    )
    add_encoder_arguments(parser, seq_default="default: 1024 tokens per image, or --seq tokens per text")
    add_precision_arguments(parser)
    add_kernel_arguments(parser)
    parser.add_argument("--own-layers", action="store_true", help="with a config.json: use octopipe's own layers")
    parser.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        help="replay ops from CUDA graphs, as in train --graphs (default: no)",
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "none"),
        default="adamw",
        help="optimizer whose state is counted in memory (default: adamw)",
    )
    parser.add_argument("--repeats", type=whole_number, default=10, help="timed runs per layer (default: 10)")
    parser.add_argument("--to-seq", type=whole_number, help="extrapolate to this sequence length by analytic ratios")
    parser.add_argument(
        "--to-tp", type=whole_number, help="extrapolate to this tensor-parallel size by analytic ratios"
    )
    parser.add_argument(
        "--against-analytic",
        nargs="?",
        const="",
        metavar="GPU",
        help="print measured times next to analytic costs, by layer kind (default GPU: the one in this machine)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="profile.json", help="the profile to write (default: profile.json)"
    )
    parser.add_argument("--no-memory-check", action="store_true", help="start even if memory appears to be too small")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from octopipe.base.files import check_target

    check_target(args.output)
    with needs_torch():
        from octopipe.runtime.measure.forecast import check_host_memory, expected_seconds
        from octopipe.runtime.measure.layer_sizes import layer_parameters
        from octopipe.runtime.measure.trial import LEAST_S, STATE_FACTOR, ProfileJob, on_ranks, profile_task

    recipe = {
        "model": absolute(args.model),
        "scale": args.scale,
        "num_layers": args.num_layers,
        "tokens": args.seq,
        "micro_batch_size": args.micro_batch_size,
        "device": args.device,
        "precision": args.precision,
        "dtype": args.dtype,
        "compile_scans": args.compile_scans,
        "kernels": list(args.kernels),
        "own_layers": args.own_layers,
        "graphs": bool(args.graphs),
        **encoder_recipe(args),
    }
    work = workload_of(recipe)
    recipe |= {"precision": work.precision, "dtype": None}
    job = ProfileJob(
        work=work,
        repeats=args.repeats,
        warm_up=WARM_UP,
        state_factor=STATE_FACTOR[args.optimizer],
        memory_check=not args.no_memory_check,
        about={
            "recipe": recipe,
            "optimizer": args.optimizer,
            "model_code": code_words(work.spec),
            "parameters": layer_parameters(work.spec),
            "settings": settings_of(work.spec),
        },
    )
    if job.memory_check:
        check_host_memory(work, args.nproc)
    expected_s = expected_seconds(work, args.nproc, repeats=args.repeats, warm_up=WARM_UP) or 0.0
    if expected_s > LONG_S:
        console(stderr=True).print(long_line(work, args, expected_s), style="yellow", soft_wrap=True)
    limit_s = max(LEAST_S, 10 * expected_s)
    with progress(f"{named(work.spec.name)} on {counted(args.nproc, 'rank')}") as listen:
        profile: Profile = on_ranks(
            profile_task, args.nproc, job, device=args.device, timeout_s=limit_s, listen=listen
        )[0]
    if args.to_seq or args.to_tp:
        profile = extrapolated(profile, _planned(work, args.model), args.seq, args.to_seq or args.seq, args.to_tp or 1)
    profile.save(args.output)
    rows, gpu = [], ""
    if args.against_analytic is not None:
        from octopipe.cli.verbs.against_analytic import against_analytic, gpu_of

        gpu = gpu_of(args.against_analytic, str(profile.about.get("device", "")))
        size = {"seq": args.to_seq or args.seq, "micro_batch_size": args.micro_batch_size}
        rows = against_analytic(profile, _planned(work, args.model), gpu=gpu, **size)
    if args.json:
        mode = None if profile.mode is None else profile.mode.record()
        more = {"against_analytic": {"gpu": gpu, "rows": [row.record() for row in rows]}} if rows else {}
        if profile.costs.routing is not None:
            more["routing"] = profile.costs.routing.record()
        print_json({"output": args.output, "model": profile.costs.model, "mode": mode, **profile.about, **more})
    else:
        _show(profile, args.output)
        if rows:
            from octopipe.cli.verbs.against_analytic import show

            show(rows, gpu)
    return 0


def long_line(work: Workload, args: argparse.Namespace, expected_s: float) -> str:
    """Return a line that announces a long profile and suggests faster alternatives."""
    from octopipe.models.spec import ModelSpec

    spec = work.spec
    quicker = [f"--repeats {max(1, args.repeats // 5)}"] if args.repeats > 1 else []
    quicker += [f"--seq {args.seq // 4}"] if args.seq > 256 else []
    quicker += ["--layers" + " or --scale" * isinstance(spec, ModelSpec) + " for a smaller model"]
    return (
        f"{named(spec.name)}: measuring {spec.num_layers} layers ({counted(len(set(work.groups)), 'kind')}) at "
        f"{args.seq} tokens takes {duration(expected_s)} or more on this CPU. Quicker: {', '.join(quicker)}, or no "
        f"profile at all: `octopipe tune {named(args.model)}` uses analytic costs"
    )


@contextmanager
def progress(title: str) -> Iterator[Callable[[Any], None]]:
    """Yield a function that shows progress on stderr: a bar on a terminal, else a line every `LINE_EVERY_S` seconds."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        told = [time.monotonic()]

        def line(word: Any) -> None:
            doing, share = word
            now = time.monotonic()
            if now - told[0] >= LINE_EVERY_S:
                told[0] = now
                screen.print(f"{title}: {doing} ({share:.0%})", style="dim", soft_wrap=True)

        yield line
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    # No refresh thread: ranks may be forked while the bar is shown.
    with Progress(*columns, console=screen, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(title, total=1.0)

        def listen(word: Any) -> None:
            doing, share = word
            bar.update(task, completed=share, description=f"{title}: {doing}")
            bar.refresh()

        bar.refresh()
        yield listen


def encoder_recipe(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags on encoder input, frozen layers and multi-token prediction; images and recordings as their
    means."""
    from octopipe.costs.cluster.item_counts import ItemCounts

    out: dict[str, Any] = {}
    if args.mtp is not None:
        out["mtp"] = args.mtp
    for name in ("images", "recordings"):
        if getattr(args, name) is not None:
            counts = ItemCounts().read(f"--{name}", getattr(args, name))
            out[name] = sum(counts) / len(counts)
    for name in ("encoder_seq", "frozen"):
        if getattr(args, name) is not None:
            out[name] = getattr(args, name)
    return out


def absolute(name: str) -> str:
    """Return an absolute path for a name that exists as a path; other names (presets) stay unchanged."""
    return os.path.abspath(name) if os.path.exists(name) else name


def workload_of(recipe: dict[str, Any]) -> Workload:
    """Return the model that a recipe names, scaled as it says, with the size of its micro-batches."""
    own = bool(recipe.get("own_layers", "own_layers" not in recipe))  # older recipes always used our own layers
    name = str(recipe.get("model", ""))
    scale = recipe.get("scale")
    asked, device = tuple(recipe.get("kernels") or ()), str(recipe.get("device", "cpu"))
    spec = model_of(
        name,
        scale=1.0 if scale is None else float(scale),
        num_layers=recipe.get("num_layers"),
        own=own and is_hf_config(name),
        kernels=asked,
        device=device,
        images=() if recipe.get("images") is None else (float(recipe["images"]),),
        recordings=() if recipe.get("recordings") is None else (float(recipe["recordings"]),),
        encoder_seq=recipe.get("encoder_seq"),
        seq=int(recipe["tokens"]),
        mtp=None if recipe.get("mtp") is None else float(recipe["mtp"]),
    )
    with needs_torch():
        from octopipe.runtime.measure.trial import Workload
    precision, dtype = recipe.get("precision"), recipe.get("dtype")
    if "precision" not in recipe and dtype == "bfloat16":
        precision, dtype = "bf16", None  # older profiles in bfloat16 had no main gradients
    return Workload(
        spec=spec,
        tokens=int(recipe["tokens"]),
        micro_batch_size=int(recipe.get("micro_batch_size", 1)),
        device=device,
        precision=precision_of(precision, dtype, device, getattr(spec, "dtype", None)),
        compile_scans=recipe.get("compile_scans"),
        asked_kernels=() if hasattr(spec, "class_name") else asked,
        graphs=bool(recipe.get("graphs", False)),
        frozen=frozen_layers(spec, recipe.get("frozen")),
    )


def _planned(work: Workload, name: str) -> ModelSpec:
    """Return the layers in the form that the analytic cost model takes; raise OctoPipeError if there is none."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.costs.resolve import resolve_spec
    from octopipe.models.spec import ModelSpec

    if isinstance(work.spec, ModelSpec):
        return work.spec
    spec = resolve_spec(name)
    if spec is None or spec.num_layers != work.spec.num_layers:
        raise OctoPipeError(
            f"{name}: its layers have no separate analytic costs, so times cannot be extrapolated; measure there"
        )
    return spec


def extrapolated(profile: Profile, spec: ModelSpec, seq: int, to_seq: int, to_tp: int) -> Profile:
    """Return the profile with every layer's costs scaled by the analytic ratio between the two lengths and TP sizes."""
    import numpy as np

    from octopipe.costs.resolve import resolve_costs

    here = resolve_costs(spec, pp=1, tp=1, seq=seq)
    there = resolve_costs(spec, pp=1, tp=to_tp, seq=to_seq)

    def scale(costs: Any) -> Any:
        changed = {}
        for name in (
            "forward_ms", "input_ms", "weight_ms", "activation_bytes", "stash_bytes", "static_bytes",
            "gradient_bytes", "boundary_bytes", "workspace_bytes",
        ):  # fmt: skip
            a, b = getattr(here, name), getattr(there, name)
            ratio = np.divide(b, a, out=np.ones_like(a), where=a > 0)
            changed[name] = getattr(costs, name) * ratio
        changed["activation_bytes"] = np.maximum(changed["activation_bytes"], changed["stash_bytes"])
        tokens = costs.tokens_per_micro_batch
        changed["tokens_per_micro_batch"] = None if tokens is None else tokens * to_seq // seq
        return costs.replace(gpus_per_rank=to_tp, **changed)

    from dataclasses import replace

    note = {"extrapolated": {"from_seq": seq, "to_seq": to_seq, "tp": to_tp}}
    return replace(
        profile,
        costs=scale(profile.costs),
        partial={level: scale(table) for level, table in profile.partial.items()},
        about={**profile.about, **note},
    )


def _show(profile: Profile, output: str) -> None:
    from rich.table import Table

    out, costs = console(), profile.costs
    about = profile.about
    names = about.get("layers") or costs.symbols
    out.print(
        f"[bold]{named(costs.model)}[/]: {len(set(names))} kinds of {costs.num_layers} layers on "
        f"{about.get('ranks')} rank(s) of {about.get('device')} in {about.get('total_seconds')} s"
    )
    used = ", ".join(f"{part} {name}" for part, name in about.get("kernels", {}).items())
    how = "" if profile.mode is None else f"; precision: {profile.mode}"
    out.print(f"{about.get('model_code')}; kernels: {used}{how}", style="dim", soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    titles = ("F ms", "I ms", "W ms", "alone", "spread", "act.", "stash", "work", "static")
    rows: list[tuple[str, ...]] = []
    spread = about.get("spread", {})
    mib = float(1 << 20)
    for name in dict.fromkeys(names):
        i = list(names).index(name)
        symbol = costs.symbols[i] if name == costs.symbols[i] else f"{costs.symbols[i]} {name}"
        alone = ""
        if 1 in profile.partial:
            alone = f"{profile.partial[1].layer_ms[i] / max(costs.layer_ms[i], 1e-9):.2f}"
        widest = max((spread[k][i] for k in spread), default=0.0)
        row = (
            symbol,
            *(f"{x[i]:.3f}" for x in (costs.forward_ms, costs.input_ms, costs.weight_ms)),
            alone,
            f"{100 * widest:.0f} %",
            *(f"{x[i] / mib:.1f}" for x in (costs.activation_bytes, costs.stash_bytes, costs.workspace_bytes)),
            f"{costs.static_bytes[i] / mib:.1f}",
        )
        rows.append(row)
    # On a narrow line names are shortened, but never numbers: a truncated number is a wrong number.
    widths = [max(len(title), *(len(row[k]) for row in rows)) for k, title in enumerate(titles, 1)]
    room = max(LEAST_NAME, out.width - sum(width + 1 for width in widths) - 1)
    table.add_column("layer", no_wrap=True, max_width=room, overflow="ellipsis")
    for title, width in zip(titles, widths, strict=True):
        table.add_column(title, justify="right", no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(*row)
    out.print(table)
    out.print(
        "F, I, W: times with all ranks busy; alone: relative time when one rank runs alone; spread: of repeated "
        "measurements\nMiB: act. held from F to I, stash of it until W, work while an op runs, static: weights, "
        "gradients and optimizer state",
        style="dim",
    )
    for (a, b), link in sorted(costs.network.pairs.items()):
        if a < b:
            speed = f"{1e-6 / link.ms_per_byte:.1f} GB/s" if link.ms_per_byte > 0 else "no limit seen"
            out.print(f"link {a}-{b}: {1e3 * link.latency_ms:.0f} us, {speed}", style="dim")
    for line in () if costs.routing is None else costs.routing.words():
        out.print(line, style="dim", soft_wrap=True)
    if "overlap_slowdown" in about:
        out.print(f"computation during a transfer: {about['overlap_slowdown']:.2f} times its time", style="dim")
    out.print(f"{output}: use it as MODEL of simulate, tune and compare, or in validate --profile", style="dim")
