"""Figure 11: phases of the tuner switched on one by one: Nemotron-H 47B, PP 16, 32 micro-batches.

A placement, S scheduling, P partitioning are the phases of Algorithm 1 that are on (`tune --method octopipe --phases …`
from 1F1B); O is the executor that runs transfers beside computation. Without O computation waits for each transfer.
"""

from __future__ import annotations

from octopipe.simulation.simulator import simulate
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.reading import whole_plan, with_backward
from octopipe.views.reproduce.row import Result, Row

MODEL, RANKS, MICRO_BATCHES = "nemotron-h-47b", 16, 32
LETTERS = {"A": "placement", "S": "schedule", "P": "partition"}
VARIANTS = ("A", "S", "P", "AS", "AP", "SP", "ASP")
PAPER = {"A": 1.02, "S": 1.07, "P": 1.10, "ASP": 1.29, "ASPO": 1.39}
SECTION = "Fig. 11, §VIII-B"


def run(bench: Bench) -> Result:
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    base = with_backward(whole_plan("1f1b", costs, RANKS, MICRO_BATCHES), costs, bench.reading.backward)
    plans = {"": base}
    for letters in VARIANTS:
        bench.say(f"+{letters}")
        phases = tuple(LETTERS[c] for c in "PAS" if c in letters)
        plans[letters] = bench.searched(
            costs, RANKS, MICRO_BATCHES, iterations=bench.options.rounds, method="octopipe", phases=phases, start=base
        )
    step = {}
    for letters, plan in plans.items():
        step[letters] = simulate(plan, costs, channel="blocking").step_ms
        step[letters + "O"] = simulate(plan, costs, channel="directed").step_ms
    gain = {name: step[""] / ms for name, ms in step.items()}
    rows = [
        Row.at_least(f"+{name} over 1F1B", paper, gain[name], unit="×", source=SECTION, why=WHY.get(name, WHY["A"]))
        for name, paper in PAPER.items()
    ]
    single = {name: gain[name] for name in "ASP"}
    rows += [
        Row.holds(
            "partitioning is the largest single gain",
            "+P",
            "+" + max(single, key=lambda n: single[n]),
            max(single, key=lambda n: single[n]) == "P",
            source=SECTION,
            why="our scheduling and placement phases balance as they go",
        ),
        Row.holds(
            "co-optimisation gains more than any single phase, with overlap",
            "+ASPO",
            f"{gain['ASPO']:.2f}×",
            gain["ASPO"] > max(gain[n + "O"] for n in "ASP"),
            source=SECTION,
            why="more --rounds help",
        ),
        Row.holds(
            "co-optimisation gains more than any single phase, without overlap",
            "+ASP",
            f"{gain['ASP']:.2f}×",
            gain["ASP"] > max(single.values()),
            source=SECTION,
            why="our tuner counts on overlap: its plans have more transfers, and without overlap each of them waits",
        ),
        Row.holds(
            "+O improves every configuration",
            "yes",
            "yes" if _always(gain) else "no",
            _always(gain),
            source=SECTION,
            why="see the table",
        ),
        Row.holds(
            "+O gains most on top of co-optimisation",
            "+ASP",
            f"{gain['ASPO'] / gain['ASP']:.2f}×",
            gain["ASPO"] / gain["ASP"] >= max(gain[n + "O"] / gain[n] for n in ("", "A", "S", "P")),
            source=SECTION,
            why="another phase's plan has more transfers in the open",
        ),
    ]
    names = ["", *VARIANTS]
    lines = tuple(
        (f"+{n}" if n else "1F1B", step[n], f"{gain[n]:.2f}×", step[n + "O"], f"{gain[n + 'O']:.2f}×") for n in names
    )
    tables = (("Every combination", ("phases on", "ms", "over 1F1B", "ms with +O", "over 1F1B"), lines),)
    picture = bars(
        "Phases switched on one by one, Nemotron-H 47B, PP 16, 32 micro-batches",
        [f"+{n}" if n else "1F1B" for n in names],
        {"without overlap": [gain[n] for n in names], "with overlap (+O)": [gain[n + "O"] for n in names]},
        paper={
            "without overlap": [PAPER.get(n) for n in names],
            "with overlap (+O)": [PAPER.get(n + "O") for n in names],
        },
        unit="× 1F1B",
    )
    return Result(rows=tuple(rows), costs=bench.costs_in_words, tables=tables, pictures={"ablation.svg": picture})


def _always(gain: dict[str, float]) -> bool:
    return all(gain[n + "O"] >= gain[n] for n in ("", *VARIANTS))


WHY = {
    "A": "without overlap every further stage costs two waits a micro-batch",
    "S": "our 1F1B has its W put off into bubbles already, as the reading says: little is left for scheduling alone",
    "P": "the imbalance that partitioning alone can mend is smaller in these times",
    "ASP": "without overlap every further stage costs two waits a micro-batch",
    "ASPO": "more --rounds help",
}
PART = Part(name="ablation", title="The phases one by one", labels=("fig:ablation_study",), run=run)
