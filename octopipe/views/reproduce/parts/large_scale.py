"""Table VI: 8192 GPUs by simulation: 128 replicas of PP 8 and TP 8 that wait for the slowest of them.

Every op and transfer of a replica is jittered by a log-normal of 3 %; a step takes the mean of the largest of 128
draws. The micro-batches of the whole job grow with the replicas, those of one replica stay 16.
"""

from __future__ import annotations

import numpy as np

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.simulation.lowering import Channel, lower
from octopipe.simulation.simulator import jitter_ms, simulate
from octopipe.views.reproduce.bench import TUNERS, Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.common import HIGHER, both, plain, tuned
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.reading import BASELINES, TITLES, Head, baseline_plan
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
    "tessel": "Tessel stands otherwise to 1F1B in these times",
    "mist": "Mist stands otherwise to 1F1B in these times",
}


def run(bench: Bench) -> Result:
    rows: list[Row] = []
    gains = {(m, h): gains_of(bench, m, h) for m in PAPER for h in bench.heads}
    for model, paper in PAPER.items():
        for name, value in paper.items():
            id, claim = f"large.{model}.{name}", f"{model}: {TITLES[name]} over 1F1B"
            more = {"unit": "×", "source": SOURCE, "within": WITHIN, "tested": "sensitivity.losses"}
            if name == "octopipe":
                ours = tuned(bench, lambda h, t, m=model: gains[m, h][t])  # type: ignore[misc]
                rows.append(Row.number(id, claim, value, ours, group=f"large.{model}.octopipe", why=HIGHER, **more))  # type: ignore[arg-type]
            else:
                ours = plain(bench, lambda h, m=model, n=name: gains[m, h][n])  # type: ignore[misc]
                fit = {"used_in_fit": True, "why": WHY[name], "group": f"large.{model}"}
                rows.append(Row.number(id, claim, value, ours, **(more | fit)))  # type: ignore[arg-type]
    for word, end, value in (("smallest", min, 1.17), ("largest", max, 1.22)):
        ours = tuned(bench, lambda h, t, e=end: e([gains[m, h][t] for m in PAPER]))  # type: ignore[misc]
        claim = f"{word} speed-up on {GPUS} GPUs"
        rows.append(
            Row.number(
                f"large.{word}",
                claim,
                value,
                ours,
                unit="×",
                source=SOURCE,
                group="large.range",
                why=HIGHER,
                tested="sensitivity.losses",
            )
        )
    rows.append(
        Row.order(
            "large.fastest",
            "OctoPipe outperforms the baselines on all three",
            "yes",
            tuned(
                bench,
                lambda h, t: f"by {min(gains[m, h][t] / max(gains[m, h][n] for n in BASELINES) for m in PAPER):.2f} ×",
            ),
            both(
                bench, lambda h: all(gains[m, h]["algorithm1"] >= max(gains[m, h][n] for n in BASELINES) for m in PAPER)
            ),
            source=SOURCE,
            why="Algorithm 1's few iterations",
            tested="large.fastest",
        )
    )
    names = (*BASELINES, "algorithm1", "search")
    series = {TITLES[n]: [gains[m, "published"][n] for m in PAPER] for n in names}
    marks: dict[str, list[float | None]] = {TITLES[n]: [PAPER[m][n] for m in PAPER] for n in BASELINES[1:]}
    marks[TITLES["algorithm1"]] = [PAPER[m]["octopipe"] for m in PAPER]
    picture = bars(
        f"Throughput over 1F1B on {GPUS} GPUs, head as published",
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
    """Speed-ups over 1F1B of replicas that wait for the slowest of them."""
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


def slowest_ms(plan: Plan, costs: CostTable, dp: int, channel: Channel, seed: int) -> float:
    """The expected step of `dp` jittered replicas: the largest of so many draws, and what follows the pipeline."""
    program = lower(plan, costs, channel=channel)
    timeline = simulate(program, costs, check=False)
    draws = np.sort(jitter_ms(program, costs, sigma=SIGMA, runs=DRAWS, seed=seed))
    share = np.diff((np.arange(draws.size + 1) / draws.size) ** dp)
    return float(draws @ share) + (timeline.step_ms - timeline.makespan_ms)


PART = Part(name="large-scale", title="8192 GPUs", labels=("tab:throughput_results",), run=run)
