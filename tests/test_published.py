"""Published training runs: how close the costs come, and that all of them fit."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_published", ROOT / "benchmarks" / "bench_published.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["bench_published"] = module
    spec.loader.exec_module(module)
    if not module.CSV.exists():
        pytest.skip("the table of published runs is not here")
    return module


def test_published_runs_are_predicted_and_fit(bench: ModuleType) -> None:
    result = bench.run(bench.CSV)
    assert len(result["rows"]) == 29
    assert result["median_error"] <= 0.12 and result["worst_error"] <= 0.35
    assert result["all_fit"]


def test_flops_per_token_are_the_published_ones(bench: ModuleType) -> None:
    import csv

    from octopipe.costs.analytic.flops import model_flops
    from octopipe.models.zoo import preset

    with bench.CSV.open() as file:
        for raw in csv.DictReader(file):
            if raw["model"].startswith("gpt") or raw["source"].startswith("nemo "):
                continue  # sliding windows and full attention masks are counted in other ways there
            seq = int(raw["seq"])
            ours = model_flops(preset(raw["model"]).without_mtp().layers, seq=seq) / seq
            theirs = 1e12 * float(raw["model_tflops_per_gpu"]) / float(raw["tokens_per_s_per_gpu"])
            assert ours == pytest.approx(theirs, rel=0.04), raw["model"]


def test_one_set_of_rates_per_generation_and_precision() -> None:
    from octopipe.costs.analytic.calibration import RATES
    from octopipe.costs.cluster.hardware import GPUS

    assert set(RATES) == {(g, p) for g in ("hopper", "blackwell") for p in ("bf16", "fp8")}
    assert {g.generation for g in GPUS.values()} >= {"hopper", "blackwell"}
    for (_, _), rates in RATES.items():
        assert 0.3 < rates.gemm < 0.9 and 0.2 < rates.core < 0.8 and 0.5 < rates.link <= 1.0


def test_a_fit_never_looks_at_the_rows_it_leaves_out(bench: ModuleType) -> None:
    rows = bench.read_rows(bench.CSV)[15:19]
    wrong = [replace(row, tokens_per_s_per_gpu=7.0) if i == 3 else row for i, row in enumerate(rows)]
    found = [bench.Fit(these, neutral=True).solve([0, 1, 2], rounds=1) for these in (rows, wrong)]
    np.testing.assert_array_equal(found[0], found[1])
    fit = bench.Fit(rows, neutral=True)
    assert abs(fit.errors(found[0], [0, 1, 2])).sum() < abs(fit.errors(fit.start, [0, 1, 2])).sum()
    for rates in fit.rates_from(found[0]).values():
        assert 0.2 <= rates.gemm <= 0.9 and 50 <= rates.half <= 2000
