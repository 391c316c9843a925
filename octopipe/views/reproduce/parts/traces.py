"""Figure 9: traces of 1F1B and OctoPipe on Nemotron-H 8B, PP 4, eight micro-batches."""

from __future__ import annotations

from octopipe.simulation.timeline import Timeline
from octopipe.views.export.svg import timeline_svg
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import Result, Row

MODEL, RANKS, MICRO_BATCHES = "nemotron-h-8b", 4, 8
SECTION = "Fig. 9, §VIII-A"


def run(bench: Bench) -> Result:
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    first = bench.baseline("1f1b", costs, RANKS, MICRO_BATCHES)
    plan = bench.tuned(costs, RANKS, MICRO_BATCHES)
    second = bench.step(plan, costs)
    rows = [
        Row.holds(
            "OctoPipe's white regions are much smaller than 1F1B's",
            "smaller",
            f"{100 * first.bubble_ratio:.1f} % → {100 * second.bubble_ratio:.1f} % of the step",
            second.bubble_ratio < 0.5 * first.bubble_ratio,
            source=SECTION,
            why="more --iterations help",
        ),
        Row.holds(
            "marginal bubbles persist",
            "yes",
            f"{100 * second.bubble_ratio:.1f} %",
            second.bubble_ratio > 0,
            why="none are left",
            source=SECTION,
        ),
        Row.shown("speed-up over 1F1B", first.step_ms / second.step_ms, unit="×", source=SECTION),
        *(
            Row.shown(
                f"{kind} bubbles, 1F1B → OctoPipe",
                f"{_share(first, kind):.1f} % → {_share(second, kind):.1f} %",
                source=SECTION,
            )
            for kind in ("boundary", "communication", "imbalance", "residual")
        ),
    ]
    svg = timeline_svg([first, second], title="Nemotron-H 8B, PP 4, TP 8, eight micro-batches")
    return Result(rows=tuple(rows), costs=bench.costs_in_words, pictures={"traces.svg": svg})


def _share(timeline: Timeline, kind: str) -> float:
    idle = getattr(timeline.bubbles, f"{kind}_ms").sum()
    return 100.0 * float(idle) / (timeline.makespan_ms * timeline.num_ranks)


PART = Part(name="traces", title="Traces of 1F1B and OctoPipe", labels=("fig:realtraces",), run=run)
