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
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.reading import BASELINES, TITLES, whole_plan, with_backward
from octopipe.views.reproduce.row import Result, Row

RANKS, MICRO_BATCHES, GPUS, TP = 8, 16, 8192, 8
SIGMA, DRAWS = 0.03, 1000
PAPER = {
    "llama3-70b": {"interleaved": 1.08, "tessel": 1.11, "mist": 1.12, "octopipe": 1.17},
    "jamba-100b": {"interleaved": 1.06, "tessel": 1.08, "mist": 1.11, "octopipe": 1.22},
    "nemotron-h-56b": {"interleaved": 0.99, "tessel": 1.09, "mist": 1.14, "octopipe": 1.21},
}
SOURCE = "Table VI, §VIII-F"


def run(bench: Bench) -> Result:
    dp = GPUS // (RANKS * TP)
    rows: list[Row] = []
    lines = []
    for model, paper in PAPER.items():
        bench.say(f"{model} on {GPUS} GPUs")
        tuning = bench.costs(model, RANKS, MICRO_BATCHES)
        costs = bench.costs(model, RANKS, MICRO_BATCHES, dp=dp)
        steps = {}
        for name in BASELINES:
            whole = whole_plan(name, costs, RANKS, MICRO_BATCHES, mist_slack=bench.reading.mist_slack)
            plan = with_backward(whole, costs, bench.reading.backward)
            steps[name] = slowest_ms(plan, costs, dp, bench.reading.channel, bench.options.seed)
        steps["octopipe"] = slowest_ms(
            bench.tuned(tuning, RANKS, MICRO_BATCHES), costs, dp, "directed", bench.options.seed
        )
        gains = {name: steps["1f1b"] / ms for name, ms in steps.items()}
        for name, value in paper.items():
            claim = f"{model}: {TITLES[name]} over 1F1B"
            if name == "octopipe":
                rows.append(
                    Row.at_least(claim, value, gains[name], unit="×", source=SOURCE, why="more --iterations help")
                )
            else:
                rows.append(
                    Row.close(
                        claim,
                        value,
                        gains[name],
                        unit="×",
                        source=SOURCE,
                        within=0.15,
                        note="within 15 %",
                        why=f"{TITLES[name]} stands better or worse to 1F1B in our times",
                    )
                )
        lines.append((model, *(f"{paper.get(n, 1.0):.2f}× / {gains[n]:.2f}×" for n in TITLES)))
    smallest = min(row.ours for row in rows if "OctoPipe" in row.claim and isinstance(row.ours, float))
    rows.append(
        Row.at_least("smallest speed-up at 8192 GPUs", 1.17, smallest, unit="×", source=SOURCE, why="see above")
    )
    tables = (("Throughput over 1F1B, paper / ours", ("model", *TITLES.values()), tuple(lines)),)
    text = (
        f"{dp} replicas, op times jittered by {100 * SIGMA:g} %, {DRAWS} draws, gradients reduced at the end of the "
        "step.",
    )
    return Result(rows=tuple(rows), costs=bench.costs_in_words, text=text, tables=tables)


def slowest_ms(plan: Plan, costs: CostTable, dp: int, channel: Channel, seed: int) -> float:
    """The expected step of `dp` jittered replicas: the largest of so many draws, and what follows the pipeline."""
    program = lower(plan, costs, channel=channel)
    timeline = simulate(program, costs, check=False)
    draws = np.sort(jitter_ms(program, costs, sigma=SIGMA, runs=DRAWS, seed=seed))
    share = np.diff((np.arange(draws.size + 1) / draws.size) ** dp)
    return float(draws @ share) + (timeline.step_ms - timeline.makespan_ms)


PART = Part(name="large-scale", title="8192 GPUs", labels=("tab:throughput_results",), run=run)
