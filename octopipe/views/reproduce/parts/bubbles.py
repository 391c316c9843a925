"""Figure 2: bubbles of 1F1B on a homogeneous and on a heterogeneous model."""

from __future__ import annotations

import numpy as np

from octopipe.simulation.timeline import Timeline
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.common import both, plain
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.reading import NODE_GB_PER_S, READING, Head
from octopipe.views.reproduce.row import Result, Row, baseline

SOURCE = "Fig. 2, §III-A"
BUBBLE = 0.538
RANKS, MICRO_BATCHES = 4, 8


Seen = dict[Head, tuple[Timeline, Timeline]]
"""For each reading of the head, the timelines of GPT-13B and of Nemotron-9B under 1F1B."""


def run(bench: Bench) -> Result:
    seen = {h: _timelines(bench, h) for h in bench.heads}
    gpt, nemotron = seen["published"]
    pictures = {
        "bubbles-a.svg": _bubble_picture(gpt, nemotron),
        "bubbles-b.svg": _layer_picture(bench),
        "bubbles-c.svg": _stage_picture(gpt, nemotron),
    }
    rows = (*_largest_bubbles(bench, seen), *_gaps(bench, seen))
    return Result(rows=rows, costs=f"{bench.costs_in_words}; GPT-13B analytic", pictures=pictures)


def _largest_bubbles(bench: Bench, seen: Seen) -> list[Row]:
    """Return rows on the largest bubble of a rank, in each model and compared."""
    gpt, _ = seen["published"]
    return [
        Row.number(
            "bubbles.gpt",
            "GPT-13B, 1F1B: largest bubble of a rank",
            0.214,
            baseline(largest_bubble(gpt)),
            unit="%",
            source=SOURCE,
            group="bubbles.largest",
            why="analytic costs: its layer times are not published",
            test=f"head × {READING.head:g}",
            trial=lambda: largest_bubble(_with_head(bench, READING.head)),
        ),
        Row.number(
            "bubbles.nemotron",
            "Nemotron-9B, 1F1B: largest bubble of a rank",
            BUBBLE,
            plain(bench, lambda h: largest_bubble(seen[h][1])),
            unit="%",
            source=SOURCE,
            group="bubbles.largest",
            why="the published time of the head is too short: with the fitted factor the bubble is the paper's",
            used_in_fit=True,
            tested="sensitivity.head",
        ),
        Row.order(
            "bubbles.order",
            "the heterogeneous model has the larger bubble",
            "21.4 < 53.8 %",
            plain(bench, lambda h: " < ".join(f"{100 * largest_bubble(t):.1f}" for t in seen[h]) + " %"),
            both(bench, lambda h: largest_bubble(seen[h][0]) < largest_bubble(seen[h][1])),
            source=SOURCE,
            why="the costs are too even",
            tested="bubbles.nemotron.batches",
        ),
    ]


def _gaps(bench: Bench, seen: Seen) -> list[Row]:
    """Return rows on the gap between the most and the least loaded rank, in each model and compared."""
    _, nemotron = seen["published"]
    gap = {h: [_gap(t) for t in pair] for h, pair in seen.items()}
    return [
        Row.number(
            "bubbles.gpt.gap",
            "GPT-13B: gap between the most and the least loaded stage",
            200.0,
            baseline(gap["published"][0]),
            unit="ms",
            source=SOURCE,
            group="bubbles.gaps",
            why="GPT-13B's last stage differs by its head alone, which weighs more in the paper's runs",
            test=f"head × {READING.head:g}",
            trial=lambda: _gap(_with_head(bench, READING.head)),
        ),
        Row.number(
            "bubbles.nemotron.gap",
            "Nemotron-9B: gap between the most and the least loaded stage",
            1800.0,
            plain(bench, lambda h: gap[h][1]),
            unit="ms",
            source=SOURCE,
            group="bubbles.gaps",
            why=f"with these layer times the whole step takes {nemotron.makespan_ms:.0f} ms, less than the gap that "
            "the paper prints; its figure may add up several steps",
            tested="bubbles.nemotron.batches",
        ),
        Row.order(
            "bubbles.gap.grows",
            "the gap grows with heterogeneity",
            "200 → 1800 ms",
            plain(bench, lambda h: f"{gap[h][0]:.0f} → {gap[h][1]:.0f} ms"),
            both(bench, lambda h: gap[h][1] > gap[h][0]),
            source=SOURCE,
            why="the costs are too even",
            tested="bubbles.nemotron.batches",
        ),
        Row.shown(
            "bubbles.nemotron.batches",
            "Micro-batches with which Nemotron-9B's gap would be 1800 ms (published head / fitted head)",
            plain(bench, lambda h: round(1800.0 * MICRO_BATCHES / gap[h][1])),
            paper=float(MICRO_BATCHES),
        ),
    ]


def _layer_picture(bench: Bench) -> str:
    nemotron_costs = bench.costs("nemotron-nano-v2-9b", RANKS, MICRO_BATCHES, tp=1, gb_per_s=NODE_GB_PER_S)
    kinds = {"M": "Mamba", "-": "MLP", "*": "attention", "E": "embedding", "L": "head"}
    at = {symbol: nemotron_costs.symbols.index(symbol) for symbol in kinds}
    unit = float(nemotron_costs.forward_ms[at["M"]])
    return bars(
        "Fig. 2 (b): Nemotron-9B, time of a layer",
        [kinds[k] for k in at],
        {
            "F": [float(nemotron_costs.forward_ms[i]) / unit for i in at.values()],
            "I": [float(nemotron_costs.input_ms[i]) / unit for i in at.values()],
            "W": [float(nemotron_costs.weight_ms[i]) / unit for i in at.values()],
        },
        unit="× a Mamba layer's F",
    )


def _bubble_picture(first: Timeline, second: Timeline) -> str:
    return bars(
        "Fig. 2 (a): share of the step in which a rank idles, 1F1B (the paper prints the largest)",
        [f"rank {r}" for r in range(RANKS)],
        {
            name: [100 * (1 - float(x) / t.makespan_ms) for x in t.busy_ms]
            for name, t in (("GPT-13B", first), ("Nemotron-9B", second))
        },
        paper={"GPT-13B": _at_largest(first, 21.4), "Nemotron-9B": _at_largest(second, 53.8)},
        unit="%",
    )


def _stage_picture(first: Timeline, second: Timeline) -> str:
    return bars(
        "Fig. 2 (c): computation of a rank in a step (the paper prints gaps of 200 and 1800 ms)",
        [f"rank {r}" for r in range(RANKS)],
        {"GPT-13B": first.busy_ms.tolist(), "Nemotron-9B": second.busy_ms.tolist()},
        unit="ms",
    )


def _timelines(bench: Bench, head: Head) -> tuple[Timeline, Timeline]:
    names = ("gpt-13b", "nemotron-nano-v2-9b")
    tables = [bench.costs(n, RANKS, MICRO_BATCHES, tp=1, gb_per_s=NODE_GB_PER_S, head=head) for n in names]
    first, second = (bench.baseline("1f1b", costs, RANKS, MICRO_BATCHES) for costs in tables)
    return first, second


def _gap(timeline: Timeline) -> float:
    """Return the difference in computation between the most and the least loaded rank."""
    return float(timeline.busy_ms.max() - timeline.busy_ms.min())


def _with_head(bench: Bench, factor: float) -> Timeline:
    """Return the timeline of GPT-13B under 1F1B with the times of its head multiplied by a factor."""
    costs = bench.costs("gpt-13b", RANKS, MICRO_BATCHES, tp=1)
    times = {name: getattr(costs, name).copy() for name in ("forward_ms", "input_ms", "weight_ms")}
    for values in times.values():
        values[-1] *= factor
    return bench.baseline("1f1b", costs.replace(**times), RANKS, MICRO_BATCHES)


def _at_largest(timeline: Timeline, value: float) -> list[float | None]:
    """Return the paper's largest bubble at the rank with our largest, None for the others."""
    at = int(np.argmin(timeline.busy_ms))
    return [value if r == at else None for r in range(RANKS)]


def largest_bubble(timeline: Timeline) -> float:
    """Return the largest share of the makespan, over all ranks, in which a rank does not compute."""
    return 1.0 - float(np.min(timeline.busy_ms)) / timeline.makespan_ms


PART = Part(name="bubbles", title="Bubbles by heterogeneity", labels=("fig:combined_1f1b_heter_bubble",), run=run)
