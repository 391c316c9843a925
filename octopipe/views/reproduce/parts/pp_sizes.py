"""Figure 10: Nemotron-H 47B on 4, 8 and 16 pipeline ranks, twice as many micro-batches as ranks."""

from __future__ import annotations

from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.common import FASTEST, arrow, both, plain, tuned
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.reading import BASELINES, CHUNKS, TITLES, Head, interleaved_by_chunks
from octopipe.views.reproduce.row import Result, Row

MODEL, SIZES = "nemotron-h-47b", (4, 8, 16)
SOURCE = "Fig. 10, §VIII-A"
MOST_CHUNKS = max(CHUNKS)


def run(bench: Bench) -> Result:
    def gains(head: Head, name: str, over: str = "1f1b") -> list[float]:
        return [bench.cell(MODEL, pp, 2 * pp, head).over(over, name) for pp in SIZES]

    rows = [
        Row.order(
            "pp.grows",
            "OctoPipe's advantage over 1F1B grows with the PP size (4 → 8 → 16)",
            "grows",
            tuned(bench, lambda h, t: arrow(gains(h, t))),
            both(bench, lambda h: gains(h, "algorithm1") == sorted(gains(h, "algorithm1"))),
            source=SOURCE,
            why="Algorithm 1 has the same number of iterations for four times the ranks",
            tested="sensitivity.iterations",
        ),
        Row.order(
            "pp.interleaved",
            "Interleaved is slower than 1F1B at some larger PP size",
            "surpassed",
            plain(bench, lambda h: arrow(gains(h, "interleaved"))),
            both(bench, lambda h: min(gains(h, "interleaved")[1:]) < 1),
            source=SOURCE,
            why="with its best number of chunks Interleaved stays ahead; with the 7 of Table III it falls behind",
            test=f"{MOST_CHUNKS} chunks, or as many as fit",
            trial=lambda: _many_chunks(bench),
            tested="sensitivity.chunks",
        ),
        Row.order(
            "pp.fastest",
            "OctoPipe is the fastest at every PP size",
            "yes",
            tuned(bench, lambda h, t: f"by {min(min(gains(h, t, n)) for n in BASELINES):.2f} ×"),
            both(bench, lambda h: all(min(gains(h, "algorithm1", n)) > 1 for n in BASELINES)),
            source=SOURCE,
            group=FASTEST,
            why="Algorithm 1 has too few iterations",
            tested="sensitivity.iterations",
        ),
    ]
    names = (*BASELINES, "algorithm1", "search")
    series = {
        TITLES[n]: [
            2 * pp * 4096 / (8 * pp) / (bench.cell(MODEL, pp, 2 * pp, "published").steps[n] / 1e3) for pp in SIZES
        ]
        for n in names
    }
    title = "Fig. 10: Nemotron-H 47B, TP 8, micro-batches 2 × PP, published head (the paper prints no numbers)"
    picture = bars(title, [f"PP {pp}" for pp in SIZES], series, unit="tokens/GPU/s")
    text = ("The paper draws this figure without numbers; its text states the trends.",)
    return Result(rows=tuple(rows), costs=bench.costs_in_words, text=text, pictures={"pp-sizes.svg": picture})


def _many_chunks(bench: Bench) -> tuple[str, bool]:
    """Return Interleaved's speed-up over 1F1B with the most chunks of each size, and whether it falls behind."""
    gains = []
    for pp in SIZES:
        costs = bench.costs(MODEL, pp, 2 * pp)
        by = interleaved_by_chunks(costs, pp, 2 * pp, bench.reading)
        gains.append(bench.baseline("1f1b", costs, pp, 2 * pp).step_ms / by[max(by)][1])
    return arrow(gains), min(gains[1:]) < 1


PART = Part(name="pp-sizes", title="PP sizes 4, 8 and 16", labels=("fig:across_pp_nemotron_47b_mb_2xPP",), run=run)
