"""Uneven routing and overlap in prices: what the busiest expert rank costs, and which splits hide the exchange."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.zoo import preset
from octopipe.search.planner.pricing import Pricer, evenly_routed_ms, exchange_hidden
from octopipe.search.planner.splits import Split

SPEC = preset("qwen3-235b-a22b")
BASE = Setup(gpu=gpu("h200"), tp=1, ep=8, pp=8, dp=8, seq=4096)


def test_the_busiest_rank_sets_the_pace_of_layers_with_experts_alone() -> None:
    even, uneven = (setup_costs(SPEC, replace(BASE, imbalance=spread)) for spread in ((), (1.5,)))
    for name in ("forward_ms", "input_ms", "weight_ms", "activation_bytes"):
        before, after = getattr(even, name), getattr(uneven, name)
        assert np.all(after[1:-1] > before[1:-1]) and np.all(after[1:-1] < 1.5 * before[1:-1] + 1e-9)
        assert after[0] == before[0] and after[-1] == before[-1]
    share = uneven.forward_ms * uneven.segments.share("F", "exchange")
    assert np.all(share[1:-1] > 1.2 * (even.forward_ms * even.segments.share("F", "exchange"))[1:-1])


def test_counts_of_every_expert_give_the_spread_of_their_ranks(tmp_path: Path) -> None:
    counts = [1.0] * 128
    counts[5] = 17.0  # rank 0 of 8 holds experts 0 to 15: 32 of 144 tokens, where the mean is 18
    path = tmp_path / "counts.txt"
    path.write_text("\n".join(map(str, counts)))
    setup = replace(BASE, imbalance=path)
    assert setup.busiest_expert_rank(128) == pytest.approx(32 / 18)
    assert replace(setup, ep=1).busiest_expert_rank(128) == 1.0
    assert replace(BASE, imbalance=1.2).busiest_expert_rank(128) == 1.2
    with pytest.raises(OctoPipeError, match="tokens of 128 experts, and a layer has 64; give"):
        setup.busiest_expert_rank(64)


@pytest.mark.parametrize("wrong", [0.5, [0.0, 0.0], [1.0, -1.0], "nowhere.txt"])
def test_a_wrong_spread_is_one_line(wrong: object) -> None:
    with pytest.raises(OctoPipeError) as told:
        replace(BASE, imbalance=wrong)
    assert "\n" not in str(told.value)


def test_a_runtime_that_overlaps_is_priced_so_and_told_what_uneven_routing_costs() -> None:
    split = Split(tp=1, cp=1, ep=8, pp=4, dp=8, vp=2, micro_batch_size=1, zero=1)
    base = replace(BASE, imbalance=(1.3,))
    found = {
        name: Pricer(SPEC, base, 64, overlaps=overlaps).simulated(split, "selective")
        for name, overlaps in (("plain", ()), ("overlapped", ("interleaved-overlap",)))
    }
    plain, overlapped = found["plain"], found["overlapped"]
    assert plain.how == "interleaved" and plain.timeline.exchange.share < 0.01
    if overlapped.how == "interleaved-overlap":
        assert overlapped.fits and overlapped.step_ms < plain.step_ms and overlapped.timeline.exchange.share > 0.3
    else:
        assert overlapped.step_ms == plain.step_ms
    even = evenly_routed_ms(overlapped)
    assert even is not None and even < overlapped.step_ms


def test_hidden_exchange_is_never_more_than_both_nor_less_than_the_busier_lane() -> None:
    costs = setup_costs(SPEC, BASE)
    hidden = exchange_hidden(costs)
    assert np.all(hidden.layer_ms <= costs.layer_ms + 1e-9)
    exchange = costs.forward_ms * costs.segments.share("F", "exchange")
    exchange = exchange + costs.input_ms * costs.segments.share("I", "exchange")
    assert np.all(hidden.layer_ms >= np.maximum(exchange, costs.layer_ms - exchange) - 1e-9)


def test_simulate_tells_what_uneven_routing_costs(tmp_path, capsys) -> None:
    flags = ["simulate", "qwen3-30b-a3b", "--gpu", "h800", "--tp", "1", "--pp", "4", "--ep", "8", "--dp", "8"]
    flags += ["--micro-batches", "8", "--system", "dualpipev"]
    plan = str(tmp_path / "plan.json")
    main([*flags, "--imbalance", "1.4", "-o", plan, "--json"])
    told = json.loads(capsys.readouterr().out)
    main(["simulate", "--plan", plan, "--imbalance", "1.4", "--json"])
    again = json.loads(capsys.readouterr().out)
    main([*flags, "--json"])
    even = json.loads(capsys.readouterr().out)
    assert "evenly_routed_ms" not in even
    # DualPipeV cuts by the number of layers, so the evenly routed run has the same plan.
    assert told["evenly_routed_ms"] == pytest.approx(even["step_ms"])
    assert told["evenly_routed_ms"] < told["step_ms"]
    assert again["evenly_routed_ms"] == pytest.approx(told["evenly_routed_ms"])
    main([*flags, "--imbalance", "1.4"])
    words = " ".join(capsys.readouterr().out.split())
    assert "Experts exchange tokens for" in words
    share = 100 * (1 - told["evenly_routed_ms"] / told["step_ms"])
    assert f"Uneven routing costs {share:.1f} % of the step" in words
