"""Figure 9: traces of 1F1B and OctoPipe on Nemotron-H 8B, PP 4, eight micro-batches."""

from __future__ import annotations

from collections.abc import Callable

from octopipe.simulation.timeline import Timeline
from octopipe.views.export.svg import timeline_svg
from octopipe.views.reproduce.bench import TUNERS, Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.reading import TITLES
from octopipe.views.reproduce.row import Result, Row, Value, Values

MODEL, RANKS, MICRO_BATCHES = "nemotron-h-8b", 4, 8
SECTION = "Fig. 9, §VIII-A"
KINDS = ("imbalance", "boundary", "residual")


def run(bench: Bench) -> Result:
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    first = bench.baseline("1f1b", costs, RANKS, MICRO_BATCHES)
    found = {t: bench.step(bench.plan(t, costs, RANKS, MICRO_BATCHES), costs, label=TITLES[t]) for t in TUNERS}
    second = found["algorithm1"]

    def ours(value: Callable[[Timeline], Value]) -> Values:
        return Values(published=(value(found["algorithm1"]), value(found["search"])))

    rows = [
        Row.order(
            "traces.smaller",
            "OctoPipe's white regions are much smaller than 1F1B's (less than half)",
            "smaller",
            ours(lambda t: f"{100 * first.bubble_ratio:.1f} → {100 * t.bubble_ratio:.1f} % of the step"),
            (second.bubble_ratio < 0.5 * first.bubble_ratio, None),
            source=SECTION,
            why="the published time of the head leaves 1F1B less to lose",
            tested="sensitivity.head",
        ),
        Row.order(
            "traces.marginal",
            "marginal bubbles persist",
            "yes",
            ours(lambda t: f"{100 * t.bubble_ratio:.1f} %"),
            (second.bubble_ratio > 0, None),
            source=SECTION,
            why="none are left",
            tested="sensitivity.noise",
        ),
        Row.order(
            "traces.kinds",
            "balance, placement and schedule each shrink their bubbles (imbalance, boundary, residual and waiting)",
            "each",
            ours(lambda t: ", ".join(f"{_share(first, k):.1f} → {_share(t, k):.1f} %" for k in KINDS)),
            (all(_share(second, k) < _share(first, k) for k in KINDS), None),
            source=SECTION,
            why="finer stages wait for more transfers",
            tested="sensitivity.sent",
        ),
    ]
    svg = timeline_svg([first, *found.values()], title="Fig. 9: Nemotron-H 8B, PP 4, TP 8, eight micro-batches")
    return Result(rows=tuple(rows), costs=bench.costs_in_words, pictures={"traces.svg": svg})


def _share(timeline: Timeline, kind: str) -> float:
    idle = getattr(timeline.bubbles, f"{kind}_ms").sum()
    return (
        100.0
        * float(idle + (timeline.bubbles.communication_ms.sum() if kind == "residual" else 0.0))
        / (timeline.makespan_ms * timeline.num_ranks)
    )


PART = Part(name="traces", title="Traces of 1F1B and OctoPipe", labels=("fig:realtraces",), run=run)
