"""The stack `octopipe` of `octopipe/costs/measured/stacks.json`, fitted to measured ops of our own layers.

    python benchmarks/fit_own_stack.py [--read results/h200-precision-2026-11-17.jsonl] [--write]

Reads the lines that `bench_precision.py --phases layers` wrote on a GPU (of several runs of a layer, the last), fits
the rates to them, and prints every op with the error of the fit to all ops and to all others. `--write` replaces the
stack in the package. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from one_line import start

from octopipe.costs.analytic.calibration import FORMAT_OF_ALL, OWN_STACK
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.measured import STACKS_FILE
from octopipe.models.spec import ModelSpec
from octopipe.models.zoo import preset
from octopipe.search.planner.fitting import SeenLayer, fit_stack

MEASURED = Path(__file__).parent / "results" / "h200-precision-2026-11-17.jsonl"
LAYERS = {"gpt-oss-20b": 4, "gemma-3-27b": 9, "qwen3-next-80b": 6, "nemotron-h-8b": 12, "llama3-8b": 4}
"""The models of `bench_precision.py`, with the number of layers that holds every kind of them."""
OPS = {"forward": "F", "input": "I", "weight": "W"}
SHORTEST_MS = 0.1
"""Shorter ops are launches and lookups, on which no rate depends."""


def kinds(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The last row of every kind of layer of every model."""
    return {(row["model"], row["kind"]): row for row in rows if "measured_ms" in row}


def layer_of(model: str, kind: str) -> tuple[ModelSpec, int]:
    """The model, and the number of its first layer of a kind: class names of its parts, and a letter among twins."""
    spec = preset(model).scaled(1.0, num_layers=LAYERS[model])
    name, _, letter = kind.rpartition(" ") if kind[-2:-1] == " " else (kind, "", "a")
    same = [i for i, layer in enumerate(spec.layers) if " + ".join(type(p).__name__ for p in layer.parts) == name]
    distinct = list(dict.fromkeys(spec.layers[i] for i in same))
    return spec, spec.layers.index(distinct[ord(letter) - ord("a")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, default=MEASURED)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    seen, names = [], []
    for (model, kind), row in kinds([json.loads(line) for line in args.read.read_text().splitlines()]).items():
        spec, layer = layer_of(model, kind)
        setup = Setup(gpu=gpu(row["gpu"]), seq=row["tokens"], micro_batch_size=1)
        for op, letter in OPS.items():
            if row["measured_ms"][letter] >= SHORTEST_MS:
                seen.append(SeenLayer(spec, layer, op, row["measured_ms"][letter], setup))
                names.append(f"{model} {kind} {letter}")
    about = "OctoPipe's own runtime, bfloat16 with float32 gradients: its layers timed one by one on an H200"
    found = fit_stack(seen, OWN_STACK, about)
    for name, one, error, left_out in zip(names, seen, found.errors, found.left_out, strict=True):
        print(f"{name:48} {one.measured_ms:8.3f} ms {100 * error:+6.1f} % {100 * left_out:+6.1f} %")
    assert found.stack.errors is not None
    print(found.stack.errors.words())
    if args.write:
        stacks = json.loads(STACKS_FILE.read_text())["stacks"]
        own = {k: v for k, v in found.stack.as_dict().items() if k != "format"}
        kept = [entry for entry in stacks if entry["name"] != OWN_STACK]
        STACKS_FILE.write_text(json.dumps({"format": FORMAT_OF_ALL, "stacks": [*kept, own]}, indent=1) + "\n")
        print(f"written to {STACKS_FILE}")


if __name__ == "__main__":
    start(main)
