"""Goodput against a simulation of failures; cost and energy; the kinds of context parallelism."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from octopipe.cli import main
from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.zoo import preset
from octopipe.search.planner.economy import Economy, goodput, segment_s, words_of


def simulated_share(
    *, between_s: float, interval_s: float, checkpoint_s: float, restart_s: float, work_s: float
) -> float:
    """Useful work over time of one long job that fails at random and restarts from its last checkpoint."""
    dice = random.Random(5)
    now = done = 0.0
    next_failure = dice.expovariate(1 / between_s)

    def fails_within(seconds: float) -> bool:
        """Let time pass, to its end or to a failure."""
        nonlocal now, next_failure
        if now + seconds < next_failure:
            now += seconds
            return False
        now = next_failure
        next_failure = now + dice.expovariate(1 / between_s)
        return True

    while done < work_s:
        if fails_within(interval_s + checkpoint_s):
            while fails_within(restart_s):
                pass
        else:
            done += interval_s
    return done / now


@pytest.mark.parametrize(("hours", "checkpoint_s"), [(3.0, 30.0), (1.0, 120.0), (24.0, 300.0)])
def test_goodput_is_what_a_simulated_job_gets(hours: float, checkpoint_s: float) -> None:
    found = goodput(gpus=1000, mtbf_hours=1000 * hours, checkpoint_s=checkpoint_s, restart_s=600)
    assert found.hours_between_failures == pytest.approx(hours)
    share = simulated_share(
        between_s=3600 * hours,
        interval_s=found.interval_s,
        checkpoint_s=checkpoint_s,
        restart_s=600,
        work_s=4e4 * found.interval_s,
    )
    assert found.share == pytest.approx(share, rel=0.01)


def test_the_interval_is_the_best_one() -> None:
    found = goodput(gpus=16384, mtbf_hours=50_000, checkpoint_s=30, restart_s=600)
    for factor in (0.5, 0.8, 1.25, 2.0):
        other = found.interval_s * factor
        assert other / segment_s(other, 30, 600, 3600 * found.hours_between_failures) < found.share


def test_more_gpus_and_slower_checkpoints_lose_more() -> None:
    few, many = (goodput(gpus=n, mtbf_hours=50_000).share for n in (64, 16384))
    slow = goodput(gpus=16384, mtbf_hours=50_000, checkpoint_s=600).share
    assert 0.99 < few < 1.0 and slow < many < few


def test_cost_and_energy_by_hand() -> None:
    numbers = Economy(price=2.0).numbers(gpus=8, tokens_per_gpu_per_second=1000.0, watts=700.0)
    assert numbers["price_per_million_tokens"] == pytest.approx(2.0 * 1000 / 3600)
    assert numbers["kwh_per_million_tokens"] == pytest.approx(0.7 * 1000 / 3600)
    assert numbers["goodput"] is None and len(words_of(numbers)) == 2


def test_plan_tells_goodput_cost_and_energy(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama3-8b", "--gpus", "8", "--gpu", "h100", "--global-batch", "16", "--budget", "2s", "--json"]
    assert main([*words, "--mtbf", "50000", "--price-per-gpu-hour", "2.5"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0.9 < told["economy"]["goodput"] < 1.0
    assert any("useful work" in line for line in told["changes"])
    with pytest.raises(SystemExit):
        main([*words, "--mtbf", "0"])


# -- context parallelism ---------------------------------------------------------------------------------------------


def attention_ms(kind: str, *, cp: int = 8, seq: int = 65536, node: int | None = None) -> float:
    setup = Setup(gpu=gpu("h100"), cp=cp, cp_kind=kind, seq=seq, gpus_per_node=node)  # type: ignore[arg-type]
    return float(setup_costs(preset("llama3-8b"), setup).forward_ms.sum())


def test_without_context_parallelism_its_kind_changes_nothing() -> None:
    assert len({attention_ms(kind, cp=1, seq=8192) for kind in ("ring", "all-gather", "ulysses", "hierarchical")}) == 1


def test_a_ring_hides_behind_long_sequences_and_a_gather_never() -> None:
    assert attention_ms("ring") < attention_ms("all-gather")
    # Behind attention that takes longer than the ring, the ring costs nothing: as if links were without end.
    endless = replace(gpu("h100"), intra_gb_per_s=1e6, inter_gb_per_s=1e6)
    setup = Setup(gpu=endless, cp=8, seq=65536)
    free = float(setup_costs(preset("llama3-8b"), setup).forward_ms.sum())
    assert attention_ms("ring") == pytest.approx(free, rel=0.01)


def test_inside_a_node_hierarchical_is_ulysses_and_across_nodes_it_is_less_exposed() -> None:
    assert attention_ms("hierarchical") == pytest.approx(attention_ms("ulysses"))
    assert attention_ms("hierarchical", node=4) < attention_ms("ulysses", node=4)


@pytest.mark.parametrize("kind", ["ring", "all-gather", "ulysses", "hierarchical"])
def test_faster_links_are_never_slower(kind: str) -> None:
    def step(scale: float) -> float:
        card = replace(gpu("h100"), intra_gb_per_s=450 * scale, inter_gb_per_s=50 * scale)
        setup = Setup(gpu=card, cp=16, tp=2, cp_kind=kind, seq=32768)  # type: ignore[arg-type]
        return float(setup_costs(preset("llama3-70b"), setup).layer_ms.sum())

    assert step(2.0) <= step(1.0) <= step(0.5)


def test_the_kind_reaches_the_simulator_and_megatrons_flags(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["llama3-8b", "--gpu", "h100", "--seq", "65536", "--json"]
    steps = {}
    for kind in ("ring", "all-gather"):
        assert main(["simulate", *common, "--pp", "2", "--tp", "1", "--cp", "8", "--cp-kind", kind]) == 0
        steps[kind] = json.loads(capsys.readouterr().out)["step_ms"]
    assert steps["ring"] < steps["all-gather"]
    words = [
        "plan",
        *common,
        "--gpus",
        "16",
        "--global-batch",
        "16",
        "--cp",
        "8",
        "--for",
        "megatron",
        "--budget",
        "2s",
    ]
    assert main([*words, "--cp-kind", "ulysses"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "--cp-comm-type a2a" in told["commands"]["megatron"] and told["setup"]["cp_kind"] == "ulysses"
