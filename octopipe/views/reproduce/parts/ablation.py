"""Figure 11: phases of the tuner switched on one by one: Nemotron-H 47B, PP 16, 32 micro-batches.

The letters A (placement), S (scheduling) and P (partitioning) are the phases of Algorithm 1 that are enabled, starting
from 1F1B; O is an executor that runs transfers beside computation. Without O, computation waits for each transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter

import numpy as np

from octopipe.search.algorithm1 import IterativeSearch
from octopipe.search.algorithm1.candidate import Candidate
from octopipe.search.algorithm1.search import bubble_phase
from octopipe.simulation.bounds.bounds import lower_bound
from octopipe.simulation.lowering import lower
from octopipe.simulation.simulator import jitter_ms, simulate
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.noise import DRAWS, NOISE, NOISE_AND_QUEUE, noisy_ms
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.common import HIGHER, both
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.reading import PUBLISHED, Head, Reading, reading_of
from octopipe.views.reproduce.row import Result, Row, Value, Values, baseline

MODEL, RANKS, MICRO_BATCHES = "nemotron-h-47b", 16, 32
LETTERS = {"A": "placement", "S": "schedule", "P": "partition"}
VARIANTS = ("A", "S", "P", "AS", "AP", "SP", "ASP")
PAPER = {"A": 1.02, "S": 1.07, "P": 1.10, "ASP": 1.29, "ASPO": 1.39}
SOURCE = "Fig. 11, §VIII-B"
SHARE = "each GPU sends its share"
"""The change, as rows name it: transfers take an eighth of the time."""


def run(bench: Bench) -> Result:
    gains = {head: gains_of(bench, reading_of(head, MODEL)) for head in bench.heads}
    rows = [
        *_single_gains(bench, gains),
        *_joint_gains(bench, gains),
        *_idle_time(bench),
        *_placement(bench, gains["published"]),
    ]
    return Result(
        rows=tuple(rows),
        costs=bench.costs_in_words,
        tables=(_table(gains),),
        pictures={"ablation.svg": _picture(gains["published"])},
    )


Gains = dict[Head, dict[str, float]]
"""For each reading of the head, the speed-up of every combination of phases over 1F1B (`gains_of`)."""


def _shared(bench: Bench) -> dict[str, float]:
    """Return the gains if each GPU sends its share of a tensor, so that transfers take an eighth of the time."""
    return gains_of(bench, replace(PUBLISHED, sent="share"))


def _values(gains: Gains, value: Callable[[dict[str, float]], Value]) -> Values:
    """Return a value computed from Algorithm 1's gains, for each reading of the head."""
    found = {head: (value(of_head), None) for head, of_head in gains.items()}
    return Values(published=found["published"], fitted=found.get("fitted", (None, None)))


def _single_gains(bench: Bench, gains: Gains) -> list[Row]:
    """Return one row for every combination of phases that the paper prints."""

    def gain_of(name: str) -> float:
        return _shared(bench)[name]

    rows = []
    for name, paper in PAPER.items():
        rows.append(
            Row.number(
                f"ablation.{name}",
                f"+{name} over 1F1B",
                paper,
                _values(gains, itemgetter(name)),
                unit="×",
                source=SOURCE,
                group="ablation.single" if len(name) == 1 else "ablation.all",
                why=WHY[name],
                test=NOISE_AND_QUEUE if name == "ASPO" else SHARE,
                trial=partial(_noisy, bench) if name == "ASPO" else partial(gain_of, name),
            )
        )
    return rows


def _joint_gains(bench: Bench, gains: Gains) -> list[Row]:
    """Return rows on how the phases compare with each other and together, without and with overlap."""
    single = "ASP"
    return [
        Row.order(
            "ablation.partition-largest",
            "partitioning is the largest single gain",
            "+P",
            _values(gains, lambda g: "+" + max(single, key=lambda n: g[n])),
            both(bench, lambda h: max(single, key=lambda n: gains[h][n]) == "P"),
            source=SOURCE,
            why="other phases balance the published times better",
            tested="sensitivity.head",
        ),
        Row.order(
            "ablation.joint",
            "all three phases gain more than any one (without overlap)",
            "1.29 > 1.10 ×",
            _values(gains, _joint),
            both(bench, lambda h: gains[h]["ASP"] > max(gains[h][n] for n in single)),
            source=SOURCE,
            why=WHY["ASP"],
            test=SHARE,
            trial=lambda: (_joint(g := _shared(bench)), g["ASP"] > max(g[n] for n in single)),
        ),
        Row.order(
            "ablation.joint-overlap",
            "all three phases gain more than any one (with overlap)",
            "1.39 ×",
            _values(gains, lambda g: f"{g['ASPO']:.2f} against {max(g[n + 'O'] for n in single):.2f} ×"),
            both(bench, lambda h: gains[h]["ASPO"] > max(gains[h][n + "O"] for n in single)),
            source=SOURCE,
            why="Algorithm 1 has too few iterations",
            tested="sensitivity.iterations",
        ),
        Row.order(
            "ablation.overlap-always",
            "+O improves every configuration",
            "yes",
            _values(gains, lambda g: f"by {min(g[n + 'O'] / g[n] for n in ('', *VARIANTS)):.3f} × at least"),
            both(bench, lambda h: all(gains[h][n + "O"] >= gains[h][n] for n in ("", *VARIANTS))),
            source=SOURCE,
            why="transfers cost nothing",
            tested="sensitivity.sent",
        ),
        Row.order(
            "ablation.overlap-most",
            "+O gains most on top of co-optimization",
            "+ASP",
            _values(gains, lambda g: "+" + max(VARIANTS, key=lambda n: g[n + "O"] / g[n])),
            both(bench, lambda h: max(VARIANTS, key=lambda n: gains[h][n + "O"] / gains[h][n]) == "ASP"),
            source=SOURCE,
            why="another combination's plan leaves more transfers in the open",
            tested="sensitivity.sent",
        ),
    ]


def _idle_time(bench: Bench) -> list[Row]:
    """Return rows on where ranks are idle under 1F1B, and after partitioning."""
    return [
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
            tested="sensitivity.sent",
        ),
    ]


def _table(gains: Gains) -> tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]:
    lines = tuple(
        (h, f"+{n}" if n else "1F1B", f"{gains[h][n]:.3f}×", f"{gains[h][n + 'O']:.3f}×")
        for h in gains
        for n in ("", *VARIANTS)
    )
    return "Every combination", ("head", "phases on", "over 1F1B", "over 1F1B, with +O"), lines


def _picture(g: dict[str, float]) -> str:
    names = ["", *VARIANTS]
    return bars(
        "Fig. 11: phases switched on one by one, Nemotron-H 47B, PP 16, 32 micro-batches, published head",
        [f"+{n}" if n else "1F1B" for n in names],
        {"without overlap": [g[n] for n in names], "with overlap (+O)": [g[n + "O"] for n in names]},
        paper={
            "without overlap": [PAPER.get(n) for n in names],
            "with overlap (+O)": [PAPER.get(n + "O") for n in names],
        },
        unit="× 1F1B",
    )


class OrdersByRule(IterativeSearch):
    """Algorithm 1 without its schedule phase: a changed plan gets an order by rule, and no order is tuned."""

    name = "octopipe"
    on: tuple[str, ...] = ("partition", "placement")

    def choose(self, now: Candidate) -> str:
        wanted = bubble_phase(now.timeline, self.least_layer_ms)
        turn = sorted(self.on, key=lambda phase: phase != wanted)
        left = [phase for phase in turn if phase not in self.spent]
        if not left:  # the schedule phase is disabled and has no moves
            self.spent.add("schedule")
        return (left or turn)[0]


class PartitionByRule(OrdersByRule):
    """The same with partitioning alone."""

    on = ("partition",)


class PlacementByRule(OrdersByRule):
    """The same with placement alone."""

    on = ("placement",)


def _placement(bench: Bench, gains: dict[str, float]) -> list[Row]:
    """Return a row on the gain of placement: with orders kept, with orders by rule, and with orders tuned."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    start = bench.one_f_one_b(costs, RANKS, MICRO_BATCHES)
    one = simulate(start, costs, check=False).step_ms
    found = {}
    for kind in (PlacementByRule, PartitionByRule, OrdersByRule):
        phases = (*kind.on, "schedule")
        rounds = bench.options.rounds
        plan = bench.iterated(costs, RANKS, MICRO_BATCHES, iterations=rounds, phases=phases, start=start, kind=kind)
        found[kind] = one / simulate(plan, costs, check=False).step_ms
    by_rule = found[OrdersByRule] / found[PartitionByRule]
    bound = lower_bound(costs, RANKS, MICRO_BATCHES, False, False).ms
    least = bound * gains["SPO"] / (gains["O"] * one)
    text = (
        f"order kept: +A {gains['AO'] / gains['O']:.3f}, +AP over +P {gains['APO'] / gains['PO']:.3f}; order by rule: "
        f"+A {found[PlacementByRule]:.3f}, +AP over +P {by_rule:.3f}; order tuned: +ASP over +SP "
        f"{gains['ASPO'] / gains['SPO']:.3f} × (no plan can be more than {1 / least:.3f} × +SP)"
    )
    claim = "What placement earns with overlap, by how a changed plan gets its order"
    return [Row.shown("ablation.placement", claim, baseline(text), source=SOURCE, paper="+A 1.02 × (without overlap)")]


def _joint(gains: dict[str, float]) -> str:
    return f"{gains['ASP']:.2f} against {max(gains[n] for n in 'ASP'):.2f} ×"


def gains_of(bench: Bench, reading: Reading) -> dict[str, float]:
    """Return speed-ups over 1F1B without overlap, for every combination of phases, without and with overlap."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES, reading=reading)
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


def _noisy(bench: Bench) -> float:
    """Return the speed-up of +ASPO over 1F1B under noise, with its transfers in one queue per rank."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    start = bench.one_f_one_b(costs, RANKS, MICRO_BATCHES)
    plan = bench.iterated(costs, RANKS, MICRO_BATCHES, iterations=bench.options.rounds, start=start)
    waits = lower(start, costs, channel="blocking")
    one = float(np.mean(jitter_ms(waits, costs, sigma=NOISE, runs=DRAWS, seed=bench.options.seed)))
    return one / noisy_ms(bench, plan, costs)


def _imbalance(bench: Bench, head: Head) -> float:
    """Return the share of imbalance in all idle time of 1F1B."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES, head=head)
    b = bench.baseline("1f1b", costs, RANKS, MICRO_BATCHES).bubbles
    return float(np.sum(b.imbalance_ms) / np.sum(b.idle_ms))


def _boundary(bench: Bench, head: Head) -> float:
    """Return the share of boundary bubbles in the idle time of +P that is not imbalance."""
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
    "A": "without overlap every further stage costs two waits per micro-batch",
    "S": "our 1F1B has its W put off into bubbles already, which leaves little to scheduling alone",
    "P": "the head's share of the imbalance decides what partitioning alone can remedy",
    "ASP": "the tuner counts on overlap: its plans send more, and without overlap every transfer makes a rank wait",
    "ASPO": HIGHER,
}
PART = Part(name="ablation", title="The phases one by one", labels=("fig:ablation_study",), run=run)
