"""The stack of our own runtime: prices of what its kernels do differently, by hand; its fit, made again."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.analytic.calibration import OWN_STACK, stack_from, stack_named
from octopipe.costs.analytic.layer_pricing import LayerCost, priced
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.zoo import preset

ROOT = Path(__file__).resolve().parents[2]


def pricing(seq: int = 4096, gradients: str = "fp32", **changes: float) -> Pricing:
    found = Pricing.of(Setup(gpu=gpu("h200"), seq=seq, gradients=gradients))  # type: ignore[arg-type]
    rates = replace(found.rates, **changes)
    return replace(found, rates=rates, plain=rates)


def block(model: str, how: Pricing) -> LayerCost:
    return priced(preset(model).layers[1], how)[0]


def more_ms(model: str, **given: Any) -> float:
    """By how much W takes longer where a kernel of its own adds the experts' gradients."""
    return block(model, pricing(**given, separate_sum=1.0)).weight_ms - block(model, pricing(**given)).weight_ms


def test_few_tokens_leave_the_product_hidden_behind_the_gradient() -> None:
    """qwen3-next: 512 experts of 2048 x 1024 and 512 x 2048, ten per token. Its gradient takes longer than its product,
    so that the product itself and two bytes written and read come on top."""
    how = pricing()
    weights = 512 * (2048 * 1024 + 512 * 2048)
    took = 4 * weights / how.bytes_per_ms
    for inner, outer in ((2048, 1024), (512, 2048)):
        reached = how.plain.product_share(80, inner, outer)
        took += 2 * 40960 * inner * outer / (how.flops_per_ms("bf16") * reached)
    assert more_ms("qwen3-next-80b") == pytest.approx(took)


def test_many_tokens_leave_the_gradient_on_top_of_the_product() -> None:
    weights, how = 32 * (2880 * 5760 + 2880 * 2880), pricing(65536)
    assert more_ms("gpt-oss-20b", seq=65536) == pytest.approx((4 + 8) * weights / how.bytes_per_ms)
    assert more_ms("gpt-oss-20b", seq=65536, gradients="bf16") == pytest.approx((4 + 4) * weights / how.bytes_per_ms)


def test_layers_without_experts_have_no_such_pass() -> None:
    assert more_ms("llama3-8b") == 0.0
    assert block("llama3-8b", pricing(moe_backward=3.0)) == block("llama3-8b", pricing())


def test_rates_of_the_backward_change_nothing_but_the_backward() -> None:
    plain, slow = block("gpt-oss-20b", pricing()), block("gpt-oss-20b", pricing(backward_passes=2.5, moe_backward=2.0))
    assert slow.input_ms > plain.input_ms
    assert (slow.forward_ms, slow.weight_ms) == (plain.forward_ms, plain.weight_ms)


def test_segments_of_a_slower_backward_add_up_to_it() -> None:
    setup = Setup(gpu=gpu("h200"), seq=4096, ep=8, pp=1, dp=8)
    for stack in (None, stack_named(OWN_STACK)):
        cost = priced(preset("qwen3-next-80b").layers[1], Pricing.of(replace(setup, stack=stack)))[0]
        assert sum(ms for _, ms in cost.forward_parts) == pytest.approx(cost.forward_ms)
        assert sum(ms for _, ms in cost.input_parts) == pytest.approx(cost.input_ms)


def test_plans_for_our_runtime_are_priced_by_its_stack(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama3-8b", "--gpus", "8", "--gpu", "h200", "--global-batch", "16", "--budget", "1s", "--json"]
    named = {}
    for runtime in ("octopipe", "megatron"):
        assert main([*asked, "--for", runtime]) == 0
        named[runtime] = json.loads(capsys.readouterr().out)["setup"]["stack"]
    assert named["octopipe"] == OWN_STACK and named["megatron"].startswith("megatron-")


def test_errors_say_what_was_left_out() -> None:
    own = stack_named(OWN_STACK)
    assert own.errors is not None and " timed ops, each left out in turn: " in own.errors.words()
    raw = own.as_dict()
    assert stack_from(raw, "f") == own
    with pytest.raises(OctoPipeError, match="f: errors are of 'guesses'; one of runs, timed ops"):
        stack_from({**raw, "errors": {**raw["errors"], "of": "guesses"}}, "f")


@pytest.mark.slow
def test_the_stack_is_what_the_measured_layers_give() -> None:
    script = ROOT / "benchmarks" / "fit_own_stack.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=ROOT)
    own = stack_named(OWN_STACK)
    assert own.errors is not None and done.stdout.splitlines()[-1] == own.errors.words()
