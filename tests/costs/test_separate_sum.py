"""Experts' weight gradients that are added in a pass of its own, against sums by hand."""

from __future__ import annotations

import pytest

from octopipe.cli.verbs.against_analytic import KindRow, words
from octopipe.costs.analytic.layer_pricing import Pricing
from octopipe.costs.analytic.separate_sum import separate_sum_ms
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.zoo import preset


def pricing(gradients: str = "fp32", seq: int = 4096) -> Pricing:
    return Pricing.of(Setup(gpu=gpu("h200"), seq=seq, gradients=gradients))  # type: ignore[arg-type]


def test_few_tokens_leave_the_product_hidden_behind_the_gradient() -> None:
    """qwen3-next: 512 experts of 2048 x 1024 and 512 x 2048, ten per token. Its gradient takes longer than its product,
    so that the product itself and two bytes written and read come on top."""
    spec, how = preset("qwen3-next-80b"), pricing()
    weights = 512 * (2048 * 1024 + 512 * 2048)
    written = 4 * weights / how.bytes_per_ms
    took = 0.0
    for inner, outer in ((2048, 1024), (512, 2048)):
        reached = how.plain.product_share(80, inner, outer)
        took += 2 * 40960 * inner * outer / (how.flops_per_ms("bf16") * reached)
    assert separate_sum_ms(spec.layers[1], how) == pytest.approx(written + took)


def test_many_tokens_leave_the_gradient_on_top_of_the_product() -> None:
    spec, how = preset("gpt-oss-20b"), pricing(seq=65536)
    weights = 32 * (2880 * 5760 + 2880 * 2880)
    assert separate_sum_ms(spec.layers[1], how) == pytest.approx((4 + 8) * weights / how.bytes_per_ms)
    narrow = separate_sum_ms(spec.layers[1], pricing("bf16", seq=65536))
    assert narrow == pytest.approx((4 + 4) * weights / how.bytes_per_ms)


def test_layers_without_experts_have_no_such_pass() -> None:
    assert separate_sum_ms(preset("llama3-8b").layers[1], pricing()) == 0.0


def test_the_words_compare_with_and_without_the_pass() -> None:
    times = {"F": 1.0, "I": 1.0, "W": 5.0}
    row = KindRow(kind="Moe", layers=2, measured_ms=times, analytic_ms={**times, "W": 2.0}, separate_sum_ms=2.0)
    [line] = words([row, KindRow(kind="Mlp", layers=1, measured_ms=times, analytic_ms=times)])
    assert line.startswith("Moe:") and "2.000 ms more" in line and "1.25 times its price" in line
