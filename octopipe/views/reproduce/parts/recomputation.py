"""Table VII: throughput over 1F1B with recomputation forced on: all layers but the head computed twice.

The paper does not say how many micro-batches: eight, as in Table III.
"""

from __future__ import annotations

from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.common import HIGHER, arrow, both, plain, tuned
from octopipe.views.reproduce.parts.large_scale import WHY
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.reading import BASELINES, TITLES, Head
from octopipe.views.reproduce.row import Result, Row

RANKS, MICRO_BATCHES = 8, 8
PAPER = {
    "llama3-70b": {"interleaved": 1.09, "tessel": 1.12, "mist": 1.11, "octopipe": 1.21},
    "jamba-100b": {"interleaved": 1.09, "tessel": 1.08, "mist": 1.14, "octopipe": 1.34},
    "nemotron-h-56b": {"interleaved": 1.06, "tessel": 1.09, "mist": 1.15, "octopipe": 1.33},
}
SOURCE = "Table VII, §VIII-F"


def run(bench: Bench) -> Result:
    def gain(model: str, head: Head, name: str, *, again: bool = True) -> float:
        return bench.cell(model, RANKS, MICRO_BATCHES, head, recompute=again).over("1f1b", name)

    rows: list[Row] = []
    for model, paper in PAPER.items():
        for name, value in paper.items():
            id, claim = f"recompute.{model}.{name}", f"{model}: {TITLES[name]} over 1F1B"
            more = {"unit": "×", "source": SOURCE, "tested": "sensitivity.losses"}
            if name == "octopipe":
                ours = tuned(bench, lambda h, t, m=model: gain(m, h, t))  # type: ignore[misc]
                rows.append(Row.number(id, claim, value, ours, group=f"recompute.{model}.octopipe", why=HIGHER, **more))  # type: ignore[arg-type]
            else:
                ours = plain(bench, lambda h, m=model, n=name: gain(m, h, n))  # type: ignore[misc]
                fit = {"used_in_fit": True, "why": WHY[name], "group": f"recompute.{model}"}
                rows.append(Row.number(id, claim, value, ours, **(more | fit)))  # type: ignore[arg-type]
    rows.append(
        Row.order(
            "recompute.outperforms",
            "OctoPipe outperforms 1F1B with recomputation too",
            "1.21 to 1.34 ×",
            tuned(bench, lambda h, t: arrow([gain(m, h, t) for m in PAPER])),
            both(bench, lambda h: all(gain(m, h, "algorithm1") > 1 for m in PAPER)),
            source=SOURCE,
            why="1F1B has less to lose",
            tested="sensitivity.losses",
        )
    )
    rows.append(
        Row.order(
            "recompute.lower",
            "with recomputation the speed-up can be lower than without (some of the three models)",
            "can be",
            tuned(bench, lambda h, t: arrow([gain(m, h, t) / gain(m, h, t, again=False) for m in PAPER])),
            both(bench, lambda h: any(gain(m, h, "algorithm1") < gain(m, h, "algorithm1", again=False) for m in PAPER)),
            source=SOURCE,
            why="recomputation makes the inner layers weigh more against the head, whose share of the imbalance falls "
            "for our tuner too, and the backward that follows is longer than what it hides",
            tested="sensitivity.no-head",
        )
    )
    names = (*BASELINES, "algorithm1", "search")
    series = {TITLES[n]: [gain(m, "published", n) for m in PAPER] for n in names}
    marks: dict[str, list[float | None]] = {TITLES[n]: [PAPER[m][n] for m in PAPER] for n in BASELINES[1:]}
    marks[TITLES["algorithm1"]] = [PAPER[m]["octopipe"] for m in PAPER]
    title = "Throughput over 1F1B with recomputation, 8 micro-batches, head as published"
    picture = bars(title, list(PAPER), series, unit="× 1F1B", base=0.5, paper=marks)
    return Result(rows=tuple(rows), costs=bench.costs_in_words, pictures={"recomputation.svg": picture})


PART = Part(name="recomputation", title="Recomputation forced on", labels=("tab:recompute_throughput",), run=run)
