"""Every assumption that the paper leaves open, changed one at a time, and every reason given for a difference, tested.

Knows: nine absolute measurements the paper prints of its baselines (Table III, the first line of Table V, the bubble
of Figure 2) and what each reading makes of them. Does not know: how a reading is applied (reading.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octopipe.search.systems.layer_ranges import one_f_one_b_plan
from octopipe.simulation.lowering import lower
from octopipe.simulation.simulator import jitter_ms, simulate
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.bubbles import BUBBLE, largest_bubble
from octopipe.views.reproduce.parts.communication import PAPER as TABLE_3
from octopipe.views.reproduce.parts.scaling import STRONG, tokens_per_gpu
from octopipe.views.reproduce.reading import (
    BASELINES,
    HEADS,
    NODE_GB_PER_S,
    PUBLISHED,
    READING,
    Reading,
    baseline_plan,
    interleaved_by_chunks,
    with_backward,
)
from octopipe.views.reproduce.row import Result, Row, Value, baseline

BIG, SMALL, NANO = "nemotron-h-56b", "nemotron-h-8b", "nemotron-nano-v2-9b"
NOISE = 0.064
"""Of two equal layers, by the paper (§VIII-C)."""
TOKENS = dict(zip(BASELINES, STRONG[32], strict=False))


def run(bench: Bench) -> Result:
    if bench.options.profiles is None:
        text = ("Without the authors' layer times no assumption can be told from another.",)
        return Result(rows=(), costs=bench.costs_in_words, text=text)
    rows = [
        _heads(bench),
        _changed(
            bench, "sensitivity.backward", "backward whole, instead of W put off", replace(PUBLISHED, backward="fused")
        ),
        _changed(
            bench,
            "sensitivity.in-place",
            "I and W one after the other, instead of W put off",
            replace(PUBLISHED, backward="in place"),
        ),
        _changed(
            bench,
            "sensitivity.sent",
            "a GPU sends its share of a tensor, instead of the whole",
            replace(PUBLISHED, sent="share"),
        ),
        _changed(
            bench,
            "sensitivity.channel",
            "transfers beside computation, instead of one queue a rank",
            replace(PUBLISHED, channel="directed"),
        ),
        _changed(
            bench,
            "sensitivity.mist",
            "Mist's stages of any size, instead of ± 2 layers",
            replace(PUBLISHED, mist_slack=None),
        ),
        _chunks(bench),
        _remainder(bench),
        _tessel(bench),
        _split(bench),
        _memory(bench),
        _losses(bench),
        _no_head(bench),
    ]
    table, lines = _errors(bench)
    return Result(rows=tuple(rows), costs=bench.costs_in_words, text=(TEXT,), tables=((table, COLUMNS, lines),))


TEXT = (
    "Under both readings of the head the other assumptions are those that fitted the nine measurements best: W put off "
    "into bubbles, whole tensors, one queue of transfers a rank, Mist's stages within two layers of the mean, "
    "remainder layers on the last stages, Tessel's fast mode, PP 4 and TP 8 and 16 micro-batches for Table V."
)
COLUMNS = (
    "reading",
    "56B: 1F1B, Interleaved, Tessel, Mist (ms)",
    "8B: tokens/GPU/s",
    "9B: bubble",
    "mean error",
    "within 10 %",
)


def nine(bench: Bench, reading: Reading) -> tuple[list[float], list[float]]:
    """Ours and the paper's: four step times, four throughputs, a bubble."""
    costs = bench.costs(BIG, 8, 8, reading=reading)
    ours = [bench.baseline(n, costs, 8, 8, reading=reading).step_ms for n in BASELINES]
    costs = bench.costs(SMALL, 4, 16, reading=reading)
    ours += [tokens_per_gpu(16, 32, bench.baseline(n, costs, 4, 16, reading=reading).step_ms) for n in BASELINES]
    costs = bench.costs(NANO, 4, 8, tp=1, gb_per_s=NODE_GB_PER_S, reading=reading)
    ours.append(largest_bubble(bench.baseline("1f1b", costs, 4, 8, reading=reading)))
    return ours, [*(TABLE_3[n][3] for n in BASELINES), *(float(TOKENS[n]) for n in BASELINES), BUBBLE]


def _error(bench: Bench, reading: Reading) -> float:
    ours, paper = nine(bench, reading)
    return float(np.mean([abs(o / p - 1) for o, p in zip(ours, paper, strict=True)]))


def _errors(bench: Bench) -> tuple[str, tuple[tuple[Value, ...], ...]]:
    lines: list[tuple[Value, ...]] = []
    for reading in (*(replace(READING, head=h) for h in HEADS),):
        ours, paper = nine(bench, reading)
        off = [abs(o / p - 1) for o, p in zip(ours, paper, strict=True)]
        lines.append(
            (
                reading.words,
                ", ".join(f"{x:.0f}" for x in ours[:4]),
                ", ".join(f"{x:.0f}" for x in ours[4:8]),
                f"{100 * ours[8]:.1f} %",
                f"{100 * float(np.mean(off)):.1f} %",
                f"{sum(x <= 0.1 for x in off)} of 9",
            )
        )
    return "Nine measurements of baselines, by the factor on the head", tuple(lines)


def _heads(bench: Bench) -> Row:
    text = ", ".join(f"× {h:g}: {100 * _error(bench, replace(READING, head=h)):.0f} %" for h in HEADS)
    return Row.shown(
        "sensitivity.head", "the head's time × 1 to 3: mean error on nine measured baselines", baseline(text)
    )


def _changed(bench: Bench, id: str, claim: str, reading: Reading) -> Row:
    """One assumption changed, head as published."""
    costs = bench.costs(BIG, 8, 8, reading=reading)
    ms = [bench.baseline(n, costs, 8, 8, reading=reading).step_ms for n in BASELINES]
    kept = bench.costs(BIG, 8, 8)
    was = [bench.baseline(n, kept, 8, 8).step_ms for n in BASELINES]
    rate = bench.baseline("1f1b", costs, 8, 8, reading=reading).overlap.overlappable_rate
    text = (
        "56B "
        + ", ".join(f"{a:.0f} → {b:.0f}" for a, b in zip(was, ms, strict=True))
        + f" ms; 1F1B hides {100 * rate:.0f} %"
    )
    return Row.shown(id, claim, baseline(text))


def _chunks(bench: Bench) -> Row:
    costs = bench.costs(BIG, 8, 8)
    by = {k: ms for k, (_, ms) in interleaved_by_chunks(costs, 8, 8, bench.reading).items()}
    large = bench.costs("nemotron-h-47b", 16, 32)
    seven = {k: ms for k, (_, ms) in interleaved_by_chunks(large, 16, 32, bench.reading).items()}
    one = bench.baseline("1f1b", large, 16, 32).step_ms
    most = max(seven)
    text = (
        "56B: "
        + ", ".join(f"{k}: {ms:.0f}" for k, ms in by.items())
        + f" ms; 47B, PP 16, {most} chunks: {one / seven[most]:.2f} × 1F1B"
    )
    return Row.shown("sensitivity.chunks", "Interleaved by its number of chunks", baseline(text))


def _remainder(bench: Bench) -> Row:
    costs = bench.costs(BIG, 8, 8)
    plan = baseline_plan("1f1b", costs, 8, 8, bench.reading)
    sizes = tuple(s.num_layers for s in plan.stages)
    first = with_backward(one_f_one_b_plan(costs, 8, 8, sizes[::-1]), costs, bench.reading.backward)
    ms = [simulate(p, costs, channel=bench.reading.channel, check=False).step_ms for p in (plan, first)]
    text = f"56B, 1F1B: {ms[0]:.0f} → {ms[1]:.0f} ms"
    return Row.shown(
        "sensitivity.remainder", "remainder layers on the first stages, instead of the last", baseline(text)
    )


def _tessel(bench: Bench) -> Row:
    costs = bench.costs(BIG, 8, 8)
    t = bench.baseline("tessel", costs, 8, 8)
    one = bench.baseline("1f1b", costs, 8, 8).step_ms
    most = one / float(t.busy_ms.max())
    text = f"{one / t.step_ms:.2f} ×; no order of its stages can pass {most:.2f} × (its busiest rank)"
    return Row.shown(
        "sensitivity.tessel", "Tessel's fast mode, 56B, over 1F1B; what any solver could reach", baseline(text)
    )


def _split(bench: Bench) -> Row:
    out = []
    for ranks, batches in ((4, 8), (4, 16), (4, 32), (8, 16)):
        tokens = []
        for m in (batches, batches // 4):
            costs = bench.costs(SMALL, ranks, m)
            tokens.append(tokens_per_gpu(m, ranks * 8, bench.baseline("1f1b", costs, ranks, m).step_ms))
        out.append(f"PP {ranks}, M {batches}: {tokens[0]:.0f}, {tokens[1] / tokens[0]:.2f}")
    claim = "Table V by its split: 1F1B's tokens on 32 GPUs (1407) and what is left of them on 128 (0.83)"
    return Row.shown("sensitivity.split", claim, baseline("; ".join(out)))


def _memory(bench: Bench) -> Row:
    costs = bench.costs(BIG, 8, 8)
    free = costs.replace(rank_memory_bytes=())
    plan = bench.plan("algorithm1", costs, 8, 8)
    other = bench.plan("algorithm1", free, 8, 8)
    peak = float(np.max(bench.step(plan, costs).peak_bytes)) / 2**30
    limited, unlimited = bench.step(plan, costs).step_ms, bench.step(other, free).step_ms
    text = f"{limited:.0f} ms at {peak:.0f} GiB → {unlimited:.0f} ms without a limit"
    return Row.shown("sensitivity.memory", "no memory limit, Algorithm 1 on 56B", baseline(text))


def _losses(bench: Bench) -> Row:
    """The paper's own noise on every op, and OctoPipe's transfers in one queue a rank, as the baselines' are."""
    out = []
    for model, m in ((BIG, 8), (BIG, 16), ("jamba-52b", 16)):
        costs = bench.costs(model, 8, m)
        one = baseline_plan("1f1b", costs, 8, m, bench.reading)
        plan = bench.plan("algorithm1", costs, 8, m)
        noisy = [
            float(
                np.mean(
                    jitter_ms(lower(p, costs, channel="single"), costs, sigma=NOISE, runs=50, seed=bench.options.seed)
                )
            )
            for p in (one, plan)
        ]
        still = bench.cell(model, 8, m, "published").over("1f1b")
        out.append(f"{model}, M {m}: {still:.2f} → {noisy[0] / noisy[1]:.2f}")
    claim = "6.4 % of noise on every op and OctoPipe's transfers in one queue a rank: its speed-up over 1F1B"
    return Row.shown("sensitivity.losses", claim, baseline("; ".join(out)))


def _no_head(bench: Bench) -> Row:
    out = []
    for model in ("llama3-70b", BIG):
        costs = bench.costs(model, 8, 16, reading=replace(PUBLISHED, head=0.01))
        one = bench.baseline("1f1b", costs, 8, 16).step_ms
        gain = one / bench.step(bench.plan("algorithm1", costs, 8, 16), costs).step_ms
        out.append(f"{model}: {bench.cell(model, 8, 16, 'published').over('1f1b'):.2f} → {gain:.2f}")
    claim = "a head that costs nothing, 16 micro-batches: Algorithm 1 over 1F1B"
    return Row.shown("sensitivity.no-head", claim, baseline("; ".join(out)))


PART = Part(name="sensitivity", title="What the paper leaves open", labels=(), run=run)
