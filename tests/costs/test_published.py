"""Published training runs: what the table holds, how close the stacks come to it, and that a fit cheats nowhere."""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from octopipe.costs.analytic.calibration import DEFAULT_STACK, rates_of, stack_named, stack_names
from octopipe.costs.analytic.flops import model_flops
from octopipe.costs.cluster.hardware import GPUS, gpu
from octopipe.costs.measured import PUBLISHED_RUNS
from octopipe.costs.runs import Run, published_runs
from octopipe.search.planner.fitting import Fit, SeenRun, errors_of, fit_stack


def of_stack(name: str) -> list[Run]:
    return [run for run in published_runs() if run.stack == name]


@pytest.fixture(scope="module")
def seen() -> list[SeenRun]:
    return [SeenRun(run) for run in published_runs()]


def fitted_ratio(one: SeenRun) -> float:
    """Logarithm of predicted over measured tokens per second under the shipped rates of the run's stack."""
    stack = stack_named(one.run.stack)
    return one.log_ratio({p: stack.rates_of(one.generation, p) for p in {"bf16", one.precision}})


def test_there_are_many_runs_of_many_stacks_each_with_its_source() -> None:
    with PUBLISHED_RUNS.open() as file:
        rows = list(csv.DictReader(file))
    stacks = Counter(row["stack"] for row in rows)
    assert len(rows) >= 80 and len(stacks) >= 5 and min(sorted(stacks.values())[-5:]) >= 10
    for row in rows:
        assert row["source"].startswith("https://") and row["release"] and len(row["date"]) == 7, row
    setups = Counter(
        tuple(row[k] for k in row if k not in ("source", "release", "date", "note", "tokens_per_s_per_gpu"))
        for row in rows
    )
    assert max(setups.values()) == 1, "a twin would make leave-one-out errors look better than they are"


def test_no_run_is_faster_than_its_gpu() -> None:
    for run in published_runs():
        assert run.setup.gpu is not None and run.setup.seq is not None
        flops = model_flops(run.spec.layers, seq=run.setup.seq) / run.setup.seq
        share = flops * run.tokens_per_s_per_gpu / (1e3 * run.setup.gpu.peak_flops_per_ms(run.setup.precision))
        assert 0.04 < share < 0.65, (run.name, share)


def test_flops_per_token_are_the_published_ones() -> None:
    checked = 0
    for run in published_runs():
        other_counts = run.spec.name.startswith(("gpt-oss", "nemotron-3"))  # windows and scans, counted in other ways
        if "Megatron-Bridge" not in run.source or other_counts:
            continue
        assert run.setup.seq is not None and run.model_tflops_per_gpu is not None
        ours = model_flops(run.spec.layers, seq=run.setup.seq) / run.setup.seq
        theirs = 1e12 * run.model_tflops_per_gpu / run.tokens_per_s_per_gpu
        assert ours == pytest.approx(theirs, rel=0.04), run.name
        checked += 1
    assert checked > 60


def test_every_published_set_up_fits_in_memory(seen: list[SeenRun]) -> None:
    assert [one.run.name for one in seen if not one.fits] == []


def test_shipped_rates_predict_the_runs_they_were_fitted_to(seen: list[SeenRun]) -> None:
    errors = errors_of([fitted_ratio(one) for one in seen])
    assert errors.median <= 0.08 and errors.p90 <= 0.22


def test_shipped_leave_one_out_errors_are_within_what_is_promised() -> None:
    known = [stack_named(name).errors for name in stack_names() if name != DEFAULT_STACK]
    runs = sum(e.runs for e in known if e is not None)
    assert runs >= 80
    assert sum(e.runs * e.median for e in known if e is not None) / runs <= 0.10


def test_leaving_a_run_out_is_the_fit_without_it() -> None:
    """The quick way (straight lines on the way) against whole fits that never saw the run."""
    every = [SeenRun(run) for run in of_stack("megatron-2021")[::2]]
    fit = Fit(every)
    quick = fit.left_out(fit.solve())
    for i in range(len(every)):
        kept = [k for k in range(len(every)) if k != i]
        whole = fit.residual(i, fit.rates_at(fit.solve(kept)))
        assert quick[i] == pytest.approx(whole, abs=0.015), every[i].run.name


def test_a_fit_never_looks_at_the_runs_it_leaves_out() -> None:
    runs = of_stack("megatron-2024")[9:13]
    wrong = [replace(run, tokens_per_s_per_gpu=7.0) if i == 3 else run for i, run in enumerate(runs)]
    found = [Fit([SeenRun(run) for run in these]).solve([0, 1, 2], rounds=2) for these in (runs, wrong)]
    np.testing.assert_array_equal(found[0], found[1])
    fit = Fit([SeenRun(run) for run in runs])
    before, after = (abs(fit.residuals(x, [0, 1, 2])).sum() for x in (np.zeros(len(fit.rates)), found[0]))
    assert after < before


def test_one_odd_run_does_not_bend_the_others() -> None:
    runs = of_stack("megatron-2024")[9:16]
    odd = [
        replace(run, tokens_per_s_per_gpu=run.tokens_per_s_per_gpu / 3) if i == 2 else run for i, run in enumerate(runs)
    ]
    found = fit_stack([SeenRun(run) for run in odd], "odd")
    rest = [abs(e) for i, e in enumerate(found.errors) if i != 2]
    assert np.median(rest) < 0.12 and found.errors[2] > 1.0


def test_rates_are_recovered_from_runs_made_with_them() -> None:
    """Runs whose speed a known stack produced: the fit predicts others of that stack."""
    truth = stack_named("torchtitan")
    made = []
    for run in of_stack("torchtitan"):
        one = SeenRun(run)
        rates = {p: truth.rates_of(one.generation, p) for p in {"bf16", one.precision}}
        speed = run.tokens_per_s_per_gpu * math.exp(one.log_ratio(rates))
        made.append(SeenRun(replace(run, tokens_per_s_per_gpu=speed)))
    fit = Fit(made)
    x = fit.solve(range(0, len(made), 2))
    unseen = errors_of(fit.residuals(x, range(1, len(made), 2)))
    assert unseen.median < 0.03 and unseen.worst < 0.12


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nvfp4"])
def test_every_stack_has_rates_for_every_gpu(precision: str) -> None:
    for name in stack_names():
        for kind in GPUS.values():
            rates = rates_of(kind, precision, stack_named(name))
            assert 0.05 < rates.gemm <= 1.0 and 0.02 < rates.core <= 1.0 and 0.05 < rates.link <= 1.0
            assert rates.cast_bytes > 0 or precision == "bf16"


def test_what_no_run_calibrates_is_said_so() -> None:
    from octopipe.cli.verbs.plan_answer import rates_words
    from octopipe.costs.cluster.setup import Setup

    known = rates_words(Setup(gpu=gpu("h100"), stack=stack_named("torchtitan")))
    assert "torchtitan" in known and "left out in turn" in known
    assert "no calibration runs" in rates_words(Setup(gpu=gpu("mi300x")))
    assert "no calibration runs" in rates_words(Setup(gpu=gpu("b200"), stack=stack_named("torchtitan")))
