"""Physics of the analytic costs on random set-ups.

More of a resource is never slower, ZeRO's levels are ordered in time, nothing is hidden twice, and no utilisation is
beyond what kernels reach.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from effort import draws

from octopipe.costs.cluster.hardware import Gpu, gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.resolve import costs_of_setup
from octopipe.models.spec import ModelSpec
from octopipe.models.zoo import preset
from octopipe.search.planner.estimate import estimate
from octopipe.search.planner.splits import Split, splits

MODELS = ("llama3-8b", "llama3-70b", "qwen3-30b-a3b", "deepseek-v3", "nemotron-h-8b", "gpt-oss-20b", "gemma-3-27b")
CASES = draws(150, least=18)
RESOURCES = ("bf16_tflops", "fp8_tflops", "hbm_tb_per_s", "intra_gb_per_s", "inter_gb_per_s")


@cache
def cases() -> list[tuple[ModelSpec, Setup, Split, int]]:
    """Random models, GPUs, sizes and splits."""
    dice, out = random.Random(28), []
    while len(out) < CASES:
        spec = preset(dice.choice(MODELS))
        kind = gpu(dice.choice(["h100", "h800", "a100", "b200", "gb200"]))
        gpus = dice.choice([8, 16, 64, 256])
        batch = gpus * dice.choice([1, 2, 4])
        precision = "bf16" if kind.fp8_tflops is None else dice.choice(["bf16", "fp8"])
        base = Setup(gpu=kind, seq=dice.choice([2048, 4096, 8192]), precision=precision)  # type: ignore[arg-type]
        every = [s for s in splits(spec, base, gpus=gpus, global_batch=batch) if s.zero == 1]
        if every:
            out.append((spec, base, dice.choice(every), batch))
    return out


def step_ms(spec: ModelSpec, base: Setup, split: Split, batch: int, kind: Gpu | None = None, zero: int = 1) -> float:
    setup = replace(split.setup(base, batch), gpu=kind or base.gpu, zero=zero)
    m = batch // (split.dp * split.micro_batch_size)
    return estimate(lambda *how: costs_of_setup(spec, setup), split.pp, split.vp, m, modes=("none",)).step_ms


@pytest.mark.parametrize("number", range(0, CASES, 10))
def test_more_of_any_resource_is_never_slower(number: int) -> None:
    for spec, base, split, batch in cases()[number : number + 10]:
        assert base.gpu is not None
        before = step_ms(spec, base, split, batch)
        for name in RESOURCES:
            if getattr(base.gpu, name) is None:
                continue
            better = replace(base.gpu, **{name: 1.5 * getattr(base.gpu, name)})
            assert step_ms(spec, base, split, batch, better) <= before * (1 + 1e-12), (spec.name, split, name)


@pytest.mark.parametrize("number", range(0, CASES, 10))
def test_zero_levels_are_ordered_in_time_and_nothing_is_hidden_twice(number: int) -> None:
    """Dividing more never saves time: ZeRO-2 reduces in every micro-batch what ZeRO-1 reduces once."""
    for spec, base, split, batch in cases()[number : number + 10]:
        if split.pp == 1:
            times = [step_ms(spec, base, split, batch, zero=zero) for zero in (1, 2, 3)]
            assert times[0] <= times[1] * (1 + 1e-9), (spec.name, split, times)
            assert times[1] <= times[2] * (1 + 1e-9), (spec.name, split, times)


@pytest.mark.parametrize("number", range(0, CASES, 10))
def test_no_split_uses_more_of_the_peak_than_kernels_reach(number: int) -> None:
    for spec, base, split, batch in cases()[number : number + 10]:
        costs = costs_of_setup(spec, split.setup(base, batch))
        m = batch // (split.dp * split.micro_batch_size)
        rate = costs.throughput(split.pp, m, step_ms(spec, base, split, batch))
        assert rate["mfu"] is not None and 0 < rate["mfu"] < 0.65, (spec.name, split, rate)
