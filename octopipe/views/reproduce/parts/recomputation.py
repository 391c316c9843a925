"""Table VII: throughput over 1F1B with recomputation forced on: all layers but the head are computed twice.

The paper does not state the number of micro-batches; eight are used, as in Table III.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.noise import NOISE_AND_QUEUE, noisy_gain
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.common import HIGHER, arrow, both, plain, tuned
from octopipe.views.reproduce.parts.large_scale import TESTS, WHY, changed_plan
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.reading import BASELINES, TITLES, Head
from octopipe.views.reproduce.row import Result, Row, baseline

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
            more: dict[str, Any] = {"unit": "×", "source": SOURCE}
            if name == "octopipe":
                ours = tuned(bench, lambda h, t, m=model: gain(m, h, t))  # type: ignore[misc]
                trial: dict[str, Any] = {"test": NOISE_AND_QUEUE, "trial": lambda m=model: _noisy(bench, m)}
                rows.append(Row.number(id, claim, value, ours, group="recompute.octopipe", why=HIGHER, **more, **trial))
            else:
                ours = plain(bench, lambda h, m=model, n=name: gain(m, h, n))  # type: ignore[misc]
                trial = {"test": TESTS[name], "trial": lambda m=model, n=name: _changed(bench, m, n)}
                fit: dict[str, Any] = {"used_in_fit": True, "why": WHY[name], "group": f"recompute.{model}"}
                rows.append(Row.number(id, claim, value, ours, **more, **fit, **trial))
    rows.append(
        Row.order(
            "recompute.outperforms",
            "OctoPipe outperforms 1F1B with recomputation too",
            "1.21 to 1.34 ×",
            tuned(bench, lambda h, t: arrow([gain(m, h, t) for m in PAPER])),
            both(bench, lambda h: all(gain(m, h, "algorithm1") > 1 for m in PAPER)),
            source=SOURCE,
            why="1F1B has less to lose",
            test=NOISE_AND_QUEUE,
            trial=lambda: (arrow(found := [_noisy(bench, m) for m in PAPER]), min(found) > 1),
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
            why="the paper expects recomputation to lower the share of bubbles in the step; in 1F1B here it raises it, "
            "because W, which fills bubbles, stays as short as it was",
            test="backward whole in 1F1B and Algorithm 1's plan unchanged",
            trial=lambda: _whole_backward(bench),
            tested="recompute.bubbles",
        )
    )
    rows.append(
        Row.shown(
            "recompute.bubbles",
            "1F1B's share of bubbles without → with recomputation (LLaMA 70B, Jamba 100B, Nemotron-H 56B)",
            baseline("; ".join(_bubbles(bench, m) for m in PAPER)),
            paper="falls",
            source=SOURCE,
        )
    )
    names = (*BASELINES, "algorithm1", "search")
    series = {TITLES[n]: [gain(m, "published", n) for m in PAPER] for n in names}
    marks: dict[str, list[float | None]] = {TITLES[n]: [PAPER[m][n] for m in PAPER] for n in BASELINES[1:]}
    marks[TITLES["algorithm1"]] = [PAPER[m]["octopipe"] for m in PAPER]
    title = "Table VII: throughput over 1F1B with recomputation, 8 micro-batches, published head"
    picture = bars(title, list(PAPER), series, unit="× 1F1B", base=0.5, paper=marks)
    return Result(rows=tuple(rows), costs=bench.costs_in_words, pictures={"recomputation.svg": picture})


def _noisy(bench: Bench, model: str) -> float:
    return noisy_gain(bench, model, RANKS, MICRO_BATCHES, recompute=True)


def _changed(bench: Bench, model: str, name: str) -> float:
    """Return a baseline's speed-up over 1F1B with the change that TESTS names."""
    costs = bench.costs(model, RANKS, MICRO_BATCHES, recompute=True)
    plan = changed_plan(bench, costs, name, MICRO_BATCHES)
    return (
        bench.baseline("1f1b", costs, RANKS, MICRO_BATCHES).step_ms
        / bench.step(plan, costs, channel=bench.reading.channel).step_ms
    )


def _whole_backward(bench: Bench) -> tuple[str, bool]:
    """Return speed-ups with recomputation relative to those without, if 1F1B runs its backward fused."""
    fused, ratios = replace(bench.reading, backward="fused"), []
    for model in PAPER:
        gains = []
        for again in (True, False):
            costs = bench.costs(model, RANKS, MICRO_BATCHES, recompute=again)
            one = bench.baseline("1f1b", costs, RANKS, MICRO_BATCHES, reading=fused).step_ms
            gains.append(one / bench.step(bench.plan("algorithm1", costs, RANKS, MICRO_BATCHES), costs).step_ms)
        ratios.append(gains[0] / gains[1])
    return arrow(ratios), min(ratios) < 1


def _bubbles(bench: Bench, model: str) -> str:
    shares = [
        bench.baseline(
            "1f1b", bench.costs(model, RANKS, MICRO_BATCHES, recompute=again), RANKS, MICRO_BATCHES
        ).bubble_ratio
        for again in (False, True)
    ]
    return f"{100 * shares[0]:.1f} → {100 * shares[1]:.1f} %"


PART = Part(name="recomputation", title="Recomputation forced on", labels=("tab:recompute_throughput",), run=run)
