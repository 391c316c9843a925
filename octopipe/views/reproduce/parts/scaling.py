"""Table V: strong and weak scaling of Nemotron-H 8B on 32, 64 and 128 GPUs, tokens per GPU and second.

PP 4, TP 8 and 16 micro-batches on 32 GPUs are inferred (the paper does not say; the sensitivity part has other
splits). Strong scaling halves the micro-batches with every doubling of the replicas; weak scaling keeps them.
"""

from __future__ import annotations

from typing import Any

from octopipe.views.reproduce.bench import Bench, Cell
from octopipe.views.reproduce.models import SEQ
from octopipe.views.reproduce.noise import NOISE_AND_QUEUE, noisy_gain, noisy_steps
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.common import FASTEST, HIGHER, arrow, both, bounds, plain, tuned
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.reading import BASELINES, TITLES, Head
from octopipe.views.reproduce.row import Pair, Result, Row

MODEL, RANKS, TP, MICRO_BATCHES = "nemotron-h-8b", 4, 8, 16
GPUS = (32, 64, 128)
NAMES = (*BASELINES, "octopipe")
STRONG = {32: (1407, 1448, 1445, 1535, 1791), 64: (1328, 1357, 1368, 1462, 1689), 128: (1165, 1179, 1199, 1294, 1519)}
WEAK = {32: (1407, 1448, 1445, 1535, 1791), 64: (1369, 1419, 1410, 1504, 1739), 128: (1328, 1360, 1372, 1460, 1688)}
SOURCE = "Table V"
FASTER = "the published time of the head is too short: every pipeline of these times is faster than the measured one"


def tokens_per_gpu(micro_batches: int, gpus: int, step_ms: float) -> float:
    """Return tokens per GPU and second for one pipeline's micro-batches on its GPUs."""
    return micro_batches * SEQ / gpus / (step_ms / 1e3)


def micro_batches_of(kind: str, gpus: int) -> int:
    return MICRO_BATCHES * RANKS * TP // gpus if kind == "strong" else MICRO_BATCHES


def run(bench: Bench) -> Result:
    rows: list[Row] = []
    for kind, table in (("strong", STRONG), ("weak", WEAK)):
        for gpus, paper in table.items():
            if gpus == 32 and kind == "weak":
                continue  # the same as the first line of strong scaling
            rows += _line(bench, kind, gpus, paper)
    rows += _trends(bench)
    series = {TITLES[n]: [_tokens(bench, "published", n, *w) for w in _where()] for n in (*BASELINES, "algorithm1")}
    titles = [*(TITLES[n] for n in BASELINES), TITLES["algorithm1"]]
    paper_of = {
        t: [float((STRONG if k == "strong" else WEAK)[g][i]) for k, g in _where()] for i, t in enumerate(titles)
    }
    title = "Table V: Nemotron-H 8B, PP 4, TP 8, tokens per GPU and second, published head"
    groups = [f"{k}\n{g} GPUs" for k, g in _where()]
    pictures = {"scaling.svg": bars(title, groups, series, paper=paper_of, unit="tokens/GPU/s")}
    return Result(rows=tuple(rows), costs=bench.costs_in_words, pictures=pictures)


def _where() -> list[tuple[str, int]]:
    return [(kind, gpus) for kind in ("strong", "weak") for gpus in GPUS]


def _cell(bench: Bench, head: Head, kind: str, gpus: int) -> Cell:
    return bench.cell(MODEL, RANKS, micro_batches_of(kind, gpus), head, dp=gpus // (RANKS * TP))


def _tokens(bench: Bench, head: Head, name: str, kind: str, gpus: int) -> float:
    cell = _cell(bench, head, kind, gpus)
    return tokens_per_gpu(micro_batches_of(kind, gpus), RANKS * TP, cell.steps[name])


def _limits(bench: Bench, kind: str, gpus: int) -> Pair:
    """Return the most tokens per GPU and second that any plan can reach."""
    found = bounds(bench, lambda h: _cell(bench, h, kind, gpus))
    m = micro_batches_of(kind, gpus)
    first, second = (tokens_per_gpu(m, RANKS * TP, ms) if isinstance(ms, float) else None for ms in found)
    return first, second


def _line(bench: Bench, kind: str, gpus: int, paper: tuple[int, ...]) -> list[Row]:
    rows = []
    for name, value in zip(NAMES, paper, strict=True):
        id = f"scaling.{kind}.{gpus}.{name}"
        more: dict[str, Any] = {"unit": "tokens/GPU/s", "source": SOURCE, "why": FASTER, "tested": "sensitivity.head"}
        claim = f"{kind} scaling, {gpus} GPUs: {TITLES[name]}"
        if name == "octopipe":
            ours = tuned(bench, lambda h, t: _tokens(bench, h, t, kind, gpus))
            limit = _limits(bench, kind, gpus)
            noisy = {"test": f"fitted head, {NOISE_AND_QUEUE}", "trial": lambda: _noisy_tokens(bench, kind, gpus)}
            group = f"{kind}.octopipe"
            rows.append(Row.number(id, claim, float(value), ours, group=group, bound=limit, **(more | noisy)))
        else:
            ours = plain(bench, lambda h, n=name: _tokens(bench, h, n, kind, gpus))  # type: ignore[misc]
            fit = gpus == 32
            rows.append(Row.number(id, claim, float(value), ours, group=f"{kind}.{gpus}", used_in_fit=fit, **more))
    ratio = tuned(bench, lambda h, t: _cell(bench, h, kind, gpus).over("1f1b", t))
    id = f"scaling.{kind}.{gpus}.over"
    claim = f"{kind} scaling, {gpus} GPUs: OctoPipe over 1F1B"
    rows.append(
        Row.number(
            id,
            claim,
            paper[4] / paper[0],
            ratio,
            unit="×",
            source=SOURCE,
            group="scaling.over",
            why=HIGHER,
            test=NOISE_AND_QUEUE,
            trial=lambda: noisy_gain(bench, MODEL, RANKS, micro_batches_of(kind, gpus)),
        )
    )
    return rows


def _noisy_tokens(bench: Bench, kind: str, gpus: int) -> float:
    """Return OctoPipe's tokens with the fitted head, noise and one queue per rank; reductions are unchanged."""
    m, head = micro_batches_of(kind, gpus), bench.heads[-1]
    after_ms = (
        _cell(bench, head, kind, gpus).steps["algorithm1"] - bench.cell(MODEL, RANKS, m, head).steps["algorithm1"]
    )
    step_ms = noisy_steps(bench, MODEL, RANKS, m, head=head)["algorithm1"] + after_ms
    return tokens_per_gpu(m, RANKS * TP, step_ms)


def _trends(bench: Bench) -> list[Row]:
    def gains(kind: str, head: Head, tuner: str = "algorithm1") -> list[float]:
        return [_cell(bench, head, kind, g).over("1f1b", tuner) for g in GPUS]

    return [
        Row.order(
            "scaling.strong.largest-at-128",
            "strong scaling: the relative gain is largest at 128 GPUs",
            "1.27 → 1.27 → 1.30 ×",
            tuned(bench, lambda h, t: arrow(gains("strong", h, t))),
            both(bench, lambda h: gains("strong", h)[-1] >= max(gains("strong", h))),
            source="§VIII-E",
            why="gradients are reduced after the pipeline, which takes a larger share of the faster plan's step",
            test="reductions that cost nothing",
            trial=lambda: _without_reductions(bench),
        ),
        Row.order(
            "scaling.weak.consistent",
            "weak scaling: the advantage varies by less than 5 %",
            "1.27 → 1.27 → 1.27 ×",
            tuned(bench, lambda h, t: arrow(gains("weak", h, t))),
            both(bench, lambda h: max(gains("weak", h)) / min(gains("weak", h)) < 1.05),
            source="§VIII-E",
            why="reductions weigh more on the faster plan",
            tested="sensitivity.split",
        ),
        Row.order(
            "scaling.fastest",
            "OctoPipe is the fastest at every number of GPUs",
            "yes",
            tuned(bench, lambda h, t: f"by {_least(bench, h, t):.2f} ×"),
            both(bench, lambda h: _least(bench, h, "algorithm1") > 1),
            source="§VIII-E",
            group=FASTEST,
            why="Algorithm 1 has too few iterations",
            tested="sensitivity.iterations",
        ),
    ]


def _without_reductions(bench: Bench) -> tuple[str, bool]:
    """Return strong scaling's speed-ups with free reductions, and whether the last one is the largest."""
    cells = [bench.cell(MODEL, RANKS, micro_batches_of("strong", g), "published") for g in GPUS]
    gains = [cell.over("1f1b") for cell in cells]
    return arrow(gains), gains[-1] >= max(gains)


def _least(bench: Bench, head: Head, tuner: str) -> float:
    return min(_cell(bench, head, *w).over(n, tuner) for w in _where() for n in BASELINES)


PART = Part(name="scaling", title="Strong and weak scaling", labels=("tab:scaling_res",), run=run)
