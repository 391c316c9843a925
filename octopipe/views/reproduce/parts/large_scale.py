"""Table VI: 8192 GPUs by simulation: 128 replicas of PP 8 and TP 8, of which each step waits for the slowest.

Every op and transfer of a replica is jittered by a log-normal of 3 %; a step takes the mean of the largest of 128
draws. The number of micro-batches of the whole job grows with the replicas; each replica has 16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.simulation.lowering import Channel, lower
from octopipe.simulation.simulator import jitter_ms, simulate
from octopipe.views.reproduce.bench import TUNERS, Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.common import FASTEST, HIGHER, both, plain, tuned
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.reading import (
    BASELINES,
    TITLES,
    Head,
    baseline_plan,
    in_place,
    interleaved_by_chunks,
    whole_plan,
)
from octopipe.views.reproduce.row import Result, Row

RANKS, MICRO_BATCHES, GPUS, TP = 8, 16, 8192, 8
SIGMA, DRAWS = 0.03, 400
WITHIN = 0.10
PAPER = {
    "llama3-70b": {"interleaved": 1.08, "tessel": 1.11, "mist": 1.12, "octopipe": 1.17},
    "jamba-100b": {"interleaved": 1.06, "tessel": 1.08, "mist": 1.11, "octopipe": 1.22},
    "nemotron-h-56b": {"interleaved": 0.99, "tessel": 1.09, "mist": 1.14, "octopipe": 1.21},
}
SOURCE = "Table VI, §VIII-F"
WHY = {
    "interleaved": "Interleaved has its best number of chunks here",
    "tessel": "Tessel's W fill the gaps that its stages leave, which its runtime may not do",
    "mist": "Mist's stages depart from the mean by two layers at most",
}
TESTS = {"interleaved": "7 chunks, or as many as fit", "tessel": "Tessel's W in place", "mist": "stages of any size"}
"""The change of each baseline that tests the reason of a difference."""


def run(bench: Bench) -> Result:
    rows: list[Row] = []
    gains = {(m, h): gains_of(bench, m, h) for m in PAPER for h in bench.heads}
    for model, paper in PAPER.items():
        for name, value in paper.items():
            id, claim = f"large.{model}.{name}", f"{model}: {TITLES[name]} over 1F1B"
            more: dict[str, Any] = {"unit": "×", "source": SOURCE, "within": WITHIN}
            if name == "octopipe":
                ours = tuned(bench, lambda h, t, m=model: gains[m, h][t])  # type: ignore[misc]
                trial: dict[str, Any] = {"test": "one queue", "trial": lambda m=model: _queued(bench, m)}
                rows.append(Row.number(id, claim, value, ours, group="large.octopipe", why=HIGHER, **more, **trial))
            else:
                ours = plain(bench, lambda h, m=model, n=name: gains[m, h][n])  # type: ignore[misc]
                trial = {"test": TESTS[name], "trial": lambda m=model, n=name: _changed(bench, m, n)}
                fit: dict[str, Any] = {"used_in_fit": True, "why": WHY[name], "group": f"large.{model}"}
                rows.append(Row.number(id, claim, value, ours, **more, **fit, **trial))
    for word, end, value in (("smallest", min, 1.17), ("largest", max, 1.22)):
        ours = tuned(bench, lambda h, t, e=end: e([gains[m, h][t] for m in PAPER]))  # type: ignore[misc]
        claim = f"{word}: OctoPipe over 1F1B"
        rows.append(
            Row.number(
                f"large.{word}",
                claim,
                value,
                ours,
                unit="×",
                source=SOURCE,
                group="large.octopipe",
                why=HIGHER,
                test="one queue",
                trial=lambda e=end: e([_queued(bench, m) for m in PAPER]),  # type: ignore[misc]
            )
        )
    rows.append(
        Row.order(
            "large.fastest",
            "OctoPipe is the fastest on 8192 GPUs",
            "yes",
            tuned(
                bench,
                lambda h, t: f"by {min(gains[m, h][t] / max(gains[m, h][n] for n in BASELINES) for m in PAPER):.2f} ×",
            ),
            both(
                bench, lambda h: all(gains[m, h]["algorithm1"] >= max(gains[m, h][n] for n in BASELINES) for m in PAPER)
            ),
            source=SOURCE,
            group=FASTEST,
            why="Algorithm 1 has too few iterations for Jamba 100B",
            test=f"{3 * bench.options.rounds} iterations",
            trial=lambda: _longer(bench, gains),
        )
    )
    names = (*BASELINES, "algorithm1", "search")
    series = {TITLES[n]: [gains[m, "published"][n] for m in PAPER] for n in names}
    marks: dict[str, list[float | None]] = {TITLES[n]: [PAPER[m][n] for m in PAPER] for n in BASELINES[1:]}
    marks[TITLES["algorithm1"]] = [PAPER[m]["octopipe"] for m in PAPER]
    picture = bars(
        f"Table VI: throughput over 1F1B on {GPUS} GPUs, published head",
        list(PAPER),
        series,
        unit="× 1F1B",
        base=0.5,
        paper=marks,
    )
    text = (
        f"{GPUS // (RANKS * TP)} replicas, op times jittered by {100 * SIGMA:g} %, {DRAWS} draws, gradients reduced at "
        "the end of the step.",
    )
    return Result(rows=tuple(rows), costs=bench.costs_in_words, text=text, pictures={"large-scale.svg": picture})


def gains_of(bench: Bench, model: str, head: Head) -> dict[str, float]:
    """Return speed-ups over 1F1B of replicas that wait for the slowest of them."""
    bench.say(f"{model} on {GPUS} GPUs")
    dp = GPUS // (RANKS * TP)
    tuning, costs = (bench.costs(model, RANKS, MICRO_BATCHES, head=head, dp=n) for n in (1, dp))
    steps = {}
    for name in BASELINES:
        plan = baseline_plan(name, costs, RANKS, MICRO_BATCHES, bench.reading)
        steps[name] = slowest_ms(plan, costs, dp, bench.reading.channel, bench.options.seed)
    for tuner in TUNERS:
        plan = bench.plan(tuner, tuning, RANKS, MICRO_BATCHES)
        steps[tuner] = slowest_ms(plan, costs, dp, "directed", bench.options.seed)
    return {name: steps["1f1b"] / ms for name, ms in steps.items()}


def _steps_of(bench: Bench, model: str, plan: Plan, channel: Channel) -> tuple[float, float]:
    """Return the step times of 1F1B and of a plan on all GPUs, with the published head."""
    dp = GPUS // (RANKS * TP)
    costs = bench.costs(model, RANKS, MICRO_BATCHES, dp=dp)
    one = baseline_plan("1f1b", costs, RANKS, MICRO_BATCHES, bench.reading)
    seed = bench.options.seed
    return slowest_ms(one, costs, dp, bench.reading.channel, seed), slowest_ms(plan, costs, dp, channel, seed)


def _queued(bench: Bench, model: str) -> float:
    """Return Algorithm 1's speed-up with its transfers in one queue per rank."""
    costs = bench.costs(model, RANKS, MICRO_BATCHES)
    one, ours = _steps_of(bench, model, bench.plan("algorithm1", costs, RANKS, MICRO_BATCHES), "single")
    return one / ours


def _changed(bench: Bench, model: str, name: str) -> float:
    """Return a baseline's speed-up with the change that TESTS names."""
    costs = bench.costs(model, RANKS, MICRO_BATCHES, dp=GPUS // (RANKS * TP))
    one, changed = _steps_of(bench, model, changed_plan(bench, costs, name, MICRO_BATCHES), bench.reading.channel)
    return one / changed


def changed_plan(bench: Bench, costs: CostTable, name: str, micro_batches: int) -> Plan:
    """Return a baseline's plan with the change that TESTS names."""
    if name == "interleaved":
        by = interleaved_by_chunks(costs, RANKS, micro_batches, bench.reading)
        return by[max(by)][0]
    if name == "tessel":
        return in_place(whole_plan(name, costs, RANKS, micro_batches))
    return baseline_plan(name, costs, RANKS, micro_batches, replace(bench.reading, mist_slack=None))


def _longer(bench: Bench, gains: dict[tuple[str, Head], dict[str, float]]) -> tuple[str, bool]:
    """Compare Algorithm 1 at three times the iterations with the best baseline, on all models."""
    least = float("inf")
    for model in PAPER:
        costs = bench.costs(model, RANKS, MICRO_BATCHES)
        plan = bench.iterated(costs, RANKS, MICRO_BATCHES, iterations=3 * bench.options.rounds)
        one, ours = _steps_of(bench, model, plan, "directed")
        least = min(least, one / ours / max(gains[model, "published"][n] for n in BASELINES))
    return f"by {least:.2f} ×", least >= 1


def slowest_ms(plan: Plan, costs: CostTable, dp: int, channel: Channel, seed: int) -> float:
    """Return the expected step time of `dp` jittered replicas: the mean of the largest of `dp` draws, plus the time of
    what follows the pipeline."""
    program = lower(plan, costs, channel=channel)
    timeline = simulate(program, costs, check=False)
    draws = np.sort(jitter_ms(program, costs, sigma=SIGMA, runs=DRAWS, seed=seed))
    share = np.diff((np.arange(draws.size + 1) / draws.size) ** dp)
    return float(draws @ share) + (timeline.step_ms - timeline.makespan_ms)


PART = Part(name="large-scale", title="8192 GPUs", labels=("tab:throughput_results",), run=run)
