"""`octopipe gpus`: lists the GPU presets, their performance, and whether published runs calibrate them.

Knows: how GPUs are listed. Does not know: where the figures come from (costs/cluster/hardware.py).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from octopipe.cli.verbs.common import console, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from octopipe.costs.analytic.calibration import is_calibrated, stacks_on
    from octopipe.costs.cluster.hardware import GPUS
    from octopipe.costs.cluster.setup import default_reserve_gib

    rows = [
        asdict(g)
        | {"calibrated": is_calibrated(g), "stacks": stacks_on(g), "reserve_gib": default_reserve_gib(g.memory_gib)}
        for g in GPUS.values()
    ]
    if args.json:
        print_json({"gpus": rows})
        return 0
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("gpu", no_wrap=True, style="cyan")
    for title in ("bf16", "fp8", "fp4", "GiB", "reserve", "TB/s", "node", "in GB/s", "out GB/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("calibrated", no_wrap=True)
    for r in rows:
        table.add_row(
            r["name"],
            f"{r['bf16_tflops']:g}",
            "-" if r["fp8_tflops"] is None else f"{r['fp8_tflops']:g}",
            "-" if r["fp4_tflops"] is None else f"{r['fp4_tflops']:g}",
            f"{r['memory_gib']:g}",
            f"{r['reserve_gib']:.1f}",
            f"{r['hbm_tb_per_s']:g}",
            str(r["gpus_per_node"]),
            f"{r['intra_gb_per_s']:g}",
            f"{r['inter_gb_per_s']:g}",
            "yes" if r["calibrated"] else "with --stack" if r["stacks"] else "no",
        )
    out = console()
    out.print(table)
    out.print(
        "\nbf16, fp8, fp4: dense peak in TFLOP/s; reserve: GiB kept free by default (--reserve-gib);", style="dim"
    )
    out.print("node: GPUs on the fast links; in, out: links inside and between nodes, per direction;", style="dim")
    out.print("calibrated: by training runs of the default stack, of others (--stack), or not at all.", style="dim")
    return 0
