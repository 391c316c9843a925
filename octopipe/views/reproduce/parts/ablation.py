"""Figure 11: phases of the tuner switched on one by one: Nemotron-H 47B, PP 16, 32 micro-batches.

A placement, S scheduling, P partitioning are the phases of Algorithm 1 that are on, from 1F1B; O is the executor that
runs transfers beside computation. Without O computation waits for each transfer.
"""

from __future__ import annotations

import numpy as np

from octopipe.simulation.simulator import simulate
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.common import both
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.reading import Head
from octopipe.views.reproduce.row import Result, Row, Values

MODEL, RANKS, MICRO_BATCHES = "nemotron-h-47b", 16, 32
LETTERS = {"A": "placement", "S": "schedule", "P": "partition"}
VARIANTS = ("A", "S", "P", "AS", "AP", "SP", "ASP")
PAPER = {"A": 1.02, "S": 1.07, "P": 1.10, "ASP": 1.29, "ASPO": 1.39}
SOURCE = "Fig. 11, §VIII-B"


def run(bench: Bench) -> Result:
    gains = {head: gains_of(bench, head) for head in bench.heads}

    def ours(value: object) -> Values:
        found = {h: (value(gains[h]), None) for h in bench.heads}  # type: ignore[operator]
        return Values(published=found["published"], fitted=found.get("fitted", (None, None)))

    rows = [
        Row.number(
            f"ablation.{name}",
            f"+{name} over 1F1B",
            paper,
            ours(lambda g, n=name: g[n]),
            unit="×",
            source=SOURCE,
            group="ablation.single" if len(name) == 1 else "ablation.joint",
            why=WHY[name],
            tested={"S": "sensitivity.backward", "ASP": "ablation.joint-overlap"}.get(name, "sensitivity.losses"),
        )
        for name, paper in PAPER.items()
    ]
    single = "ASP"
    rows += [
        Row.order(
            "ablation.partition-largest",
            "partitioning is the largest single gain",
            "+P",
            ours(lambda g: "+" + max(single, key=lambda n: g[n])),
            both(bench, lambda h: max(single, key=lambda n: gains[h][n]) == "P"),
            source=SOURCE,
            why="the published times are balanced better by other phases",
            tested="sensitivity.head",
        ),
        Row.order(
            "ablation.joint",
            "all three phases gain more than any one (without overlap)",
            "1.29 > 1.10 ×",
            ours(lambda g: f"{g['ASP']:.2f} against {max(g[n] for n in single):.2f} ×"),
            both(bench, lambda h: gains[h]["ASP"] > max(gains[h][n] for n in single)),
            source=SOURCE,
            why="the tuner counts on overlap: its plans send more, and without overlap each transfer waits",
            tested="ablation.joint-overlap",
        ),
        Row.order(
            "ablation.joint-overlap",
            "all three phases gain more than any one (with overlap)",
            "1.39 ×",
            ours(lambda g: f"{g['ASPO']:.2f} against {max(g[n + 'O'] for n in single):.2f} ×"),
            both(bench, lambda h: gains[h]["ASPO"] > max(gains[h][n + "O"] for n in single)),
            source=SOURCE,
            why="too few iterations",
            tested="ablation.placement",
        ),
        Row.order(
            "ablation.overlap-always",
            "+O improves every configuration",
            "yes",
            ours(lambda g: f"by {min(g[n + 'O'] / g[n] for n in ('', *VARIANTS)):.3f} × at least"),
            both(bench, lambda h: all(gains[h][n + "O"] >= gains[h][n] for n in ("", *VARIANTS))),
            source=SOURCE,
            why="transfers cost nothing",
            tested="ablation.overlap-always",
        ),
        Row.order(
            "ablation.overlap-most",
            "+O gains most on top of co-optimisation",
            "+ASP",
            ours(lambda g: "+" + max(VARIANTS, key=lambda n: g[n + "O"] / g[n])),
            both(bench, lambda h: max(VARIANTS, key=lambda n: gains[h][n + "O"] / gains[h][n]) == "ASP"),
            source=SOURCE,
            why="of all seven combinations another one's plan leaves more transfers in the open",
            tested="ablation.overlap-always",
        ),
        Row.order(
            "ablation.imbalance",
            "imbalance is the primary source of 1F1B's bubbles",
            "yes",
            _bubbles(bench),
            both(bench, lambda h: _imbalance(bench, h) > 0.5),
            source=SOURCE,
            why="the ends of the pipeline weigh more in the published times",
            tested="sensitivity.head",
        ),
        Row.order(
            "ablation.boundary",
            "once partitioning has balanced the ranks, boundary bubbles are most of the rest",
            "most",
            _rest(bench),
            both(bench, lambda h: _boundary(bench, h) > 0.5),
            source="§VI",
            why="idle time inside the pipeline weighs more with 32 micro-batches than at its ends",
            tested="ablation.placement",
        ),
        Row.shown(
            "ablation.placement",
            "what placement adds: +AP over +P, +ASP over +SP, with overlap",
            ours(lambda g: f"{g['APO'] / g['PO']:.3f}, {g['ASPO'] / g['SPO']:.3f} ×"),
            source=SOURCE,
        ),
    ]
    names = ["", *VARIANTS]
    lines = tuple(
        (h, f"+{n}" if n else "1F1B", f"{gains[h][n]:.3f}×", f"{gains[h][n + 'O']:.3f}×")
        for h in bench.heads
        for n in names
    )
    tables = (("Every combination", ("head", "phases on", "over 1F1B", "over 1F1B, with +O"), lines),)
    g = gains["published"]
    picture = bars(
        "Phases switched on one by one, Nemotron-H 47B, PP 16, 32 micro-batches, head as published",
        [f"+{n}" if n else "1F1B" for n in names],
        {"without overlap": [g[n] for n in names], "with overlap (+O)": [g[n + "O"] for n in names]},
        paper={
            "without overlap": [PAPER.get(n) for n in names],
            "with overlap (+O)": [PAPER.get(n + "O") for n in names],
        },
        unit="× 1F1B",
    )
    return Result(rows=tuple(rows), costs=bench.costs_in_words, tables=tables, pictures={"ablation.svg": picture})


def gains_of(bench: Bench, head: Head) -> dict[str, float]:
    """Over 1F1B without overlap: every combination of phases, without and with overlap."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES, head=head)
    plans = {"": bench.one_f_one_b(costs, RANKS, MICRO_BATCHES)}
    for letters in VARIANTS:
        phases = tuple(LETTERS[c] for c in "PAS" if c in letters)
        plans[letters] = bench.iterated(
            costs, RANKS, MICRO_BATCHES, iterations=bench.options.rounds, phases=phases, start=plans[""]
        )
    step = {}
    for letters, plan in plans.items():
        step[letters] = simulate(plan, costs, channel="blocking", check=False).step_ms
        step[letters + "O"] = simulate(plan, costs, channel="directed", check=False).step_ms
    return {name: step[""] / ms for name, ms in step.items()}


def _imbalance(bench: Bench, head: Head) -> float:
    """Imbalance's share of all idle time of 1F1B."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES, head=head)
    b = bench.baseline("1f1b", costs, RANKS, MICRO_BATCHES).bubbles
    return float(np.sum(b.imbalance_ms) / np.sum(b.idle_ms))


def _boundary(bench: Bench, head: Head) -> float:
    """Of +P's idle time that is not imbalance, the share at the ends of the pipeline."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES, head=head)
    start = bench.one_f_one_b(costs, RANKS, MICRO_BATCHES)
    plan = bench.iterated(
        costs, RANKS, MICRO_BATCHES, iterations=bench.options.rounds, phases=("partition",), start=start
    )
    b = simulate(plan, costs, check=False).bubbles
    return float(np.sum(b.boundary_ms) / (np.sum(b.idle_ms) - np.sum(b.imbalance_ms)))


def _rest(bench: Bench) -> Values:
    found = {h: (f"{100 * _boundary(bench, h):.0f} % of the rest", None) for h in bench.heads}
    return Values(published=found["published"], fitted=found.get("fitted", (None, None)))


def _bubbles(bench: Bench) -> Values:
    found = {h: (None, f"{100 * _imbalance(bench, h):.0f} % of the idle time") for h in bench.heads}
    return Values(published=found["published"], fitted=found.get("fitted", (None, None)))


WHY = {
    "A": "without overlap every further stage costs two waits a micro-batch",
    "S": "our 1F1B has its W put off into bubbles already: little is left for scheduling alone",
    "P": "the head's share of the imbalance decides what partitioning alone can mend",
    "ASP": "the tuner counts on overlap: its plans send more, and without overlap each transfer waits",
    "ASPO": "measured against predicted: neither noise nor what an executor loses between ops is simulated",
}
PART = Part(name="ablation", title="The phases one by one", labels=("fig:ablation_study",), run=run)
