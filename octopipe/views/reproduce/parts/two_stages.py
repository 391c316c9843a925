"""Figure "tuning the 1F1B schedule of a model with two stages": 2T and 4T, two micro-batches, each phase and all."""

from __future__ import annotations

import numpy as np

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.systems.layer_ranges import one_f_one_b_plan
from octopipe.simulation.simulator import simulate
from octopipe.views.export.svg import timeline_svg
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import Result, Row

SECTION = "Fig. 3, §III-B"
BEST_SINGLE_T, JOINT_T, BASE_T = 26.0, 20.0, 30.0
"""The paper: 1F1B takes 30T, a single phase saves up to 4T, all three 10T."""
VARIANTS = (
    ("(b) partitioning", ("partition",)),
    ("(c) placement", ("placement",)),
    ("(d) scheduling", ("schedule",)),
)
ROUNDS = 60


def run(bench: Bench) -> Result:
    costs = six_layers()
    base = one_f_one_b_plan(costs, 2, 2, (2, 4))
    base_t = simulate(base, costs).step_ms
    rows = [Row.close("(a) 1F1B, backward whole", BASE_T, base_t, within=0.0, unit="T", source=SECTION)]
    timelines = [simulate(base, costs, label="(a) 1F1B")]
    for title, phases in VARIANTS:
        plan = _single(bench, costs, base, phases)
        timeline = simulate(plan, costs, label=title)
        timelines.append(timeline)
        rows.append(
            Row.at_most(
                f"{title} alone (the paper: at best {BEST_SINGLE_T:g}T)",
                BEST_SINGLE_T,
                timeline.step_ms,
                unit="T",
                why=WHY[phases[0]],
                source=SECTION,
                note=NOTES.get(phases[0], ""),
            )
        )
    joint = bench.searched(costs, 2, 2, iterations=2 * ROUNDS, method="octopipe", start=base)
    plan = bench.searched(costs, 2, 2, iterations=bench.options.iterations // 4 + 100)
    exact = bench.searched(costs, 2, 2, iterations=1, method="exact")
    for title, found in (("Algorithm 1", joint), ("the default search", plan)):
        rows.append(
            Row.at_most(
                f"(e) all three phases, {title}",
                JOINT_T,
                simulate(found, costs).step_ms,
                unit="T",
                why="a worse plan than the paper's",
                source=SECTION,
            )
        )
    best = simulate(exact, costs, label="(e) all three, optimum")
    timelines.append(best)
    rows.append(
        Row.at_most(
            "(e) all three phases, the optimum",
            JOINT_T,
            best.step_ms,
            unit="T",
            source=SECTION,
            note="proven by CP-SAT for plans that hold each layer once",
            why="",
        )
    )
    saved = 1.0 - min(simulate(p, costs).step_ms for p in (joint, plan, exact)) / base_t
    rows.append(Row.at_least("time saved by all three together", 1 / 3, saved, unit="%", source=SECTION))
    text = (
        "Six layers of 1T for each of F, I and W: stage 0 holds two of them (2T an op), stage 1 four (4T). Single "
        "phases by `tune --method octopipe --phases …` from 1F1B.",
    )
    svg = timeline_svg(timelines, title="Two stages of 2T and 4T, two micro-batches")
    return Result(rows=tuple(rows), costs="the paper's example, exact", text=text, pictures={"two-stages.svg": svg})


WHY = {
    "partition": "alone it balances the work and leaves both ends idle: 3T + 3T takes 27T whole",
    "placement": "alone it keeps 2T on one rank and 4T on the other",
    "schedule": "alone it fills only what the two stages leave",
}
NOTES = {"placement": "our stage dispersion deals single layers to ranks, which balances their work as well"}


def six_layers() -> CostTable:
    ones = np.ones(6)
    return CostTable(model="two stages, 2T and 4T", symbols="TTTTTT", forward_ms=ones, input_ms=ones, weight_ms=ones)


def _single(bench: Bench, costs: CostTable, base: Plan, phases: tuple[str, ...]) -> Plan:
    """The phase alone on 1F1B. Only scheduling may split the backward: partition is judged with it whole."""
    if phases == ("partition",):
        plans = [one_f_one_b_plan(costs, 2, 2, (k, 6 - k)) for k in range(1, 6)]
        return min(plans, key=lambda plan: simulate(plan, costs).step_ms)
    return bench.searched(costs, 2, 2, iterations=ROUNDS, method="octopipe", phases=phases, start=base)


PART = Part(name="two-stages", title="The two-stage example", labels=("fig:3_co_opt",), run=run)
