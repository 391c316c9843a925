"""Figure 10: Nemotron-H 47B on 4, 8 and 16 pipeline ranks, twice as many micro-batches as ranks."""

from __future__ import annotations

from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.reading import BASELINES, TITLES
from octopipe.views.reproduce.row import Result, Row

MODEL, SIZES = "nemotron-h-47b", (4, 8, 16)
SECTION = "Fig. 10, §VIII-A"


def run(bench: Bench) -> Result:
    steps: dict[int, dict[str, float]] = {}
    for pp in SIZES:
        costs = bench.costs(MODEL, pp, 2 * pp)
        steps[pp] = {name: bench.baseline(name, costs, pp, 2 * pp).step_ms for name in BASELINES}
        steps[pp]["octopipe"] = bench.step(bench.tuned(costs, pp, 2 * pp), costs).step_ms
    gains = [steps[pp]["1f1b"] / steps[pp]["octopipe"] for pp in SIZES]
    interleaved = [steps[pp]["1f1b"] / steps[pp]["interleaved"] for pp in SIZES]
    rows = [
        Row.holds(
            "OctoPipe's advantage over 1F1B grows with the PP size",
            "grows",
            " < ".join(f"{g:.2f}×" for g in gains),
            gains == sorted(gains),
            source=SECTION,
            why="the search leaves more to be found on more ranks",
        ),
        Row.holds(
            "Interleaved loses ground to 1F1B as the PP size grows",
            "surpassed at larger sizes",
            " → ".join(f"{g:.2f}×" for g in interleaved),
            interleaved[-1] < interleaved[0],
            source=SECTION,
            why="with our times its stages stay worth their transfers",
        ),
        *(Row.shown(f"PP {pp}: OctoPipe over 1F1B", g, unit="×") for pp, g in zip(SIZES, gains, strict=True)),
        Row.holds(
            "OctoPipe is the fastest at every size",
            "yes",
            "yes",
            all(steps[pp]["octopipe"] <= min(steps[pp].values()) for pp in SIZES),
            why="see the table",
            source=SECTION,
        ),
    ]
    names = (*BASELINES, "octopipe")
    lines = tuple(
        (f"PP {pp}", *(f"{2 * pp * 4096 / (8 * pp) / (steps[pp][n] / 1e3):.0f}" for n in names)) for pp in SIZES
    )
    series = {TITLES[n]: [2 * pp * 4096 / (8 * pp) / (steps[pp][n] / 1e3) for pp in SIZES] for n in names}
    picture = bars(
        "Nemotron-H 47B, TP 8, micro-batches 2 × PP", [f"PP {pp}" for pp in SIZES], series, unit="tokens/GPU/s"
    )
    tables = (("Tokens per GPU and second", ("size", *(TITLES[n] for n in names)), lines),)
    text = ("The paper shows this figure without numbers; its text states the trends.",)
    return Result(
        rows=tuple(rows), costs=bench.costs_in_words, text=text, tables=tables, pictures={"pp-sizes.svg": picture}
    )


PART = Part(name="pp-sizes", title="PP sizes 4, 8 and 16", labels=("fig:across_pp_nemotron_47b_mb_2xPP",), run=run)
