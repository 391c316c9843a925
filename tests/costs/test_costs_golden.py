"""Analytic costs stay what they are: every number of many models and set-ups, to nine digits.

`test_analytic.py` compares with closed forms and published runs, within their tolerance; here a changed formula shows
however little it changes. Where a change is meant, write the file anew and read what moved:

    python tests/costs/test_costs_golden.py && git diff --stat tests/golden/costs.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.lengths import Batch
from octopipe.models.spec import Attention, Embedding, Head, KimiDeltaAttention, LightningAttention, ModelSpec, Moe
from octopipe.models.zoo import preset

FILE = Path(__file__).resolve().parents[1] / "golden" / "costs.csv"
MODELS = (
    "llama3-8b", "nemotron-h-8b", "nemotron-3-nano-30b", "jamba-20b", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80b",
    "minimax-01", "gemma-3-27b", "gpt3-5b", "glm-4.5-air",
)  # fmt: skip
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tp, dp": {"tp": 4, "dp": 4, "pp": 2},
    "no sequence parallelism, zero 0": {"tp": 2, "dp": 2, "zero": 0, "sequence_parallel": False},
    "zero 2": {"tp": 2, "dp": 4, "zero": 2, "micro_batch_size": 2},
    "zero 3": {"dp": 16, "zero": 3, "gradients": "bf16"},
    "cp": {"cp": 4, "tp": 2, "dp": 1, "seq": 16384, "pp": 4},
    "fp8": {"precision": "fp8", "tp": 2, "dp": 2, "seq": 8192},
    "selective": {"recompute": "selective", "tp": 2, "dp": 2},
    "full": {"recompute": "full"},
    "some layers": {"recompute": "full", "recompute_layers": 5, "tp": 2},
    "vocabulary over ranks": {"vocab_parallel": True, "pp": 8, "tp": 2, "dp": 2},
    "across nodes": {"tp": 4, "dp": 8, "cp": 2, "pp": 2, "seq": 8192, "gpus_per_node": 4},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep": {"ep": 4, "dp": 8, "tp": 1, "pp": 2},
    "ep, tp, zero 2": {"ep": 8, "dp": 8, "tp": 2, "zero": 2, "gpus_per_node": 8},
}
MADE = "made of rare layers"
"""What no preset has: Kimi's delta rule, experts in a latent width, narrow heads, a window, sequences below a chunk."""
COLUMNS = (
    "forward_ms", "input_ms", "weight_ms", "activation_bytes", "stash_bytes", "boundary_bytes", "static_bytes",
    "workspace_bytes", "gradient_bytes", "optimizer_ms",
)  # fmt: skip


def spec_of(model: str) -> ModelSpec:
    if model != MADE:
        return preset(model)
    h = 256
    layers = (
        Embedding(hidden=h, vocab=1024),
        KimiDeltaAttention(hidden=h, heads=4, head_dim=32),
        Moe(hidden=h, experts=16, top_k=3, ffn=128, latent=64, shared_ffn=192, activation="relu2"),
        Attention(hidden=h, heads=8, kv_heads=2, head_dim=16, window=512),
        Moe(hidden=h, experts=8, top_k=2, ffn=64, latent=32, bias=True),
        LightningAttention(hidden=h, heads=4, head_dim=64, chunk=8192),
        Head(hidden=h, vocab=1024, tied=True),
    )
    return ModelSpec(name=MADE, layers=layers)


def row_of(model: str, keys: dict[str, Any]) -> list[float]:
    """Each column's sum, weighted so that exchanged layers show; the reduction; what a longer micro-batch costs."""
    spec = spec_of(model)
    setup = Setup(gpu=gpu("h100"), **{"seq": 4096, **keys})
    costs = setup_costs(spec, setup, micro_batch_tokens=[setup.seq or 1, 2 * (setup.seq or 1)])
    assert costs.tokens_per_micro_batch == 1.5 * (setup.seq or 1) * setup.micro_batch_size
    weights = 1.0 + np.arange(spec.num_layers) % 7 / 7
    row = [float(np.dot(weights, getattr(costs, name))) for name in COLUMNS]
    factor = costs.micro_batch_factor
    row += [costs.reduction.ms_per_byte, 0.0 if factor is None else float(np.sum(factor[1] * weights))]
    seq = setup.seq or 1
    packed = Batch(groups=((seq // 2 + 1, seq // 4), (seq // 8, seq // 2, seq // 3)), packed=True)
    factor = setup_costs(spec, setup, batch=packed).micro_batch_factor
    assert factor is not None
    return [
        *row,
        float(np.sum(factor[0] * weights)),
        float(np.sum(factor[1])),
        costs.model_flops or 0.0,
        costs.tied_bytes,
    ]


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    found = []
    for model in (*MODELS, MADE):
        spec = spec_of(model)
        found += [(model, name, keys) for name, keys in SETUPS.items()]
        experts = {part.experts for layer in spec for part in layer.parts if isinstance(part, Moe)}
        for name, keys in EXPERTS.items():
            if experts and all(count % keys["ep"] == 0 for count in experts):
                found.append((model, name, keys))
    return found


def written() -> dict[tuple[str, str], list[float]]:
    with FILE.open(newline="") as file:
        return {(row[0], row[1]): [float(x) for x in row[2:]] for row in list(csv.reader(file))[1:]}


@pytest.mark.parametrize("model", (*MODELS, MADE))
def test_every_price_is_the_one_that_was_written_down(model: str) -> None:
    expected = written()
    for name, setup, keys in cases():
        if name == model:
            assert row_of(name, keys) == pytest.approx(expected[name, setup], rel=1e-9, abs=1e-30), setup


if __name__ == "__main__":
    with FILE.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        more = (
            "reduction_ms_per_byte",
            "longer_micro_batch",
            "packed_two",
            "packed_three",
            "model_flops",
            "tied_bytes",
        )
        writer.writerow(["model", "setup", *COLUMNS, *more])
        for model, name, keys in cases():
            writer.writerow([model, name, *(f"{x:.12g}" for x in row_of(model, keys))])
    sys.exit(0)
