"""Every assumption that the paper leaves open, changed one at a time; every reason given for a difference, tested.

Knows: nine absolute measurements of baselines that the paper prints (Table III, the first line of Table V, the bubble
of Figure 2) and what each reading predicts for them. Does not know: how a reading is applied (reading.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octopipe.search.systems.layer_ranges import one_f_one_b_plan
from octopipe.simulation.simulator import simulate
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.noise import NOISE, noisy_gain
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.bubbles import BUBBLE, largest_bubble
from octopipe.views.reproduce.parts.communication import PAPER as TABLE_3
from octopipe.views.reproduce.parts.end_to_end import headless_gain
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
TOKENS = dict(zip(BASELINES, STRONG[32], strict=False))


def run(bench: Bench) -> Result:
    if bench.options.profiles is None:
        text = ("Without the authors' layer times no assumption can be told from another.",)
        return Result(rows=(), costs=bench.costs_in_words, text=text)
    rows = [
        _heads(bench),
        _changed(
            bench,
            "sensitivity.backward",
            "Backward whole, instead of W put off into bubbles",
            replace(PUBLISHED, backward="fused"),
        ),
        _changed(
            bench,
            "sensitivity.in-place",
            "W right after I, instead of put off into bubbles",
            replace(PUBLISHED, backward="in place"),
        ),
        _changed(
            bench,
            "sensitivity.sent",
            "Each GPU sends its share of a tensor, instead of the whole tensor",
            replace(PUBLISHED, sent="share"),
        ),
        _changed(
            bench,
            "sensitivity.channel",
            "Transfers of the baselines side by side, instead of in one queue per rank",
            replace(PUBLISHED, channel="directed"),
        ),
        _changed(
            bench,
            "sensitivity.mist",
            "Mist's stages of any size, instead of within two layers of the mean",
            replace(PUBLISHED, mist_slack=None),
        ),
        _chunks(bench),
        _remainder(bench),
        _tessel(bench),
        _split(bench),
        _memory(bench),
        _noise(bench),
        _iterations(bench),
        _no_head(bench),
    ]
    table, lines = _errors(bench)
    return Result(rows=tuple(rows), costs=bench.costs_in_words, text=(TEXT,), tables=((table, COLUMNS, lines),))


TEXT = (
    "Under both readings of the head the other assumptions are those that fit nine measurements of baselines best: W "
    "put off into bubbles, whole tensors, one queue of transfers per rank, Mist's stages within two layers of the "
    "mean, remainder layers on the last stages, Tessel's fast mode, and PP 4, TP 8 and 16 micro-batches for Table V."
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
    """Return our values and the paper's: four step times, four throughputs, a bubble."""
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
        "sensitivity.head", "Factor on the head's time: mean error on nine measurements of baselines", baseline(text)
    )


def _changed(bench: Bench, id: str, claim: str, reading: Reading) -> Row:
    """Return a row with one assumption changed and the published head: 1F1B, Interleaved, Tessel, Mist."""
    costs = bench.costs(BIG, 8, 8, reading=reading)
    ms = [bench.baseline(n, costs, 8, 8, reading=reading).step_ms for n in BASELINES]
    kept = bench.costs(BIG, 8, 8)
    was = [bench.baseline(n, kept, 8, 8).step_ms for n in BASELINES]
    text = "56B: " + ", ".join(f"{a:.0f} → {b:.0f}" for a, b in zip(was, ms, strict=True)) + " ms"
    return Row.shown(id, claim, baseline(text), paper="2406, 2116, 2142, 1996 ms")


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
    claim = "Interleaved by its number of chunks (stages per rank)"
    return Row.shown("sensitivity.chunks", claim, baseline(text), paper="56B, 7 chunks: 2116 ms")


def _remainder(bench: Bench) -> Row:
    costs = bench.costs(BIG, 8, 8)
    plan = baseline_plan("1f1b", costs, 8, 8, bench.reading)
    sizes = tuple(s.num_layers for s in plan.stages)
    first = with_backward(one_f_one_b_plan(costs, 8, 8, sizes[::-1]), costs, bench.reading.backward)
    ms = [simulate(p, costs, channel=bench.reading.channel, check=False).step_ms for p in (plan, first)]
    text = f"56B, 1F1B: {ms[0]:.0f} → {ms[1]:.0f} ms"
    return Row.shown(
        "sensitivity.remainder", "Remainder layers on the first stages, instead of the last", baseline(text)
    )


def _tessel(bench: Bench) -> Row:
    costs = bench.costs(BIG, 8, 8)
    t = bench.baseline("tessel", costs, 8, 8)
    one = bench.baseline("1f1b", costs, 8, 8).step_ms
    most = one / float(t.busy_ms.max())
    text = f"{one / t.step_ms:.2f} ×; no order of its stages can pass {most:.2f} × (its busiest rank)"
    claim = "Tessel's fast mode on 56B over 1F1B, and the most that its solver could reach"
    return Row.shown("sensitivity.tessel", claim, baseline(text), paper="1.12 ×")


def _split(bench: Bench) -> Row:
    out = []
    for ranks, batches in ((4, 8), (4, 16), (4, 32), (8, 16)):
        tokens = []
        for m in (batches, batches // 4):
            costs = bench.costs(SMALL, ranks, m)
            tokens.append(tokens_per_gpu(m, ranks * 8, bench.baseline("1f1b", costs, ranks, m).step_ms))
        out.append(f"PP {ranks}, M {batches}: {tokens[0]:.0f}, {tokens[1] / tokens[0]:.2f}")
    claim = "Table V by PP and micro-batches M: 1F1B's tokens/GPU/s on 32 GPUs, and the share left of them on 128"
    return Row.shown("sensitivity.split", claim, baseline("; ".join(out)), paper="1407, 0.83")


def _memory(bench: Bench) -> Row:
    costs = bench.costs(BIG, 8, 8)
    free = costs.replace(rank_memory_bytes=())
    plan = bench.plan("algorithm1", costs, 8, 8)
    other = bench.plan("algorithm1", free, 8, 8)
    peak = float(np.max(bench.step(plan, costs).peak_bytes)) / 2**30
    limited, unlimited = bench.step(plan, costs).step_ms, bench.step(other, free).step_ms
    text = f"{limited:.0f} ms at {peak:.0f} GiB → {unlimited:.0f} ms without a limit"
    return Row.shown("sensitivity.memory", "Algorithm 1 on 56B without a memory limit", baseline(text))


def _noise(bench: Bench) -> Row:
    out = []
    for model, m in ((BIG, 8), (BIG, 16), ("jamba-52b", 16), (SMALL, 16)):
        still = bench.cell(model, 8, m, "published").over("1f1b")
        out.append(f"{model}, M {m}: {still:.2f} → {noisy_gain(bench, model, 8, m):.2f}")
    claim = f"{100 * NOISE:.1f} % of noise on every op, and OctoPipe's transfers in one queue per rank: its speed-up"
    return Row.shown("sensitivity.noise", claim, baseline("; ".join(out) + " ×"))


def _iterations(bench: Bench) -> Row:
    out = []
    for model, ranks, m in ((BIG, 8, 8), ("nemotron-h-47b", 16, 32)):
        costs = bench.costs(model, ranks, m)
        rounds = bench.options.rounds
        ms = [bench.step(bench.iterated(costs, ranks, m, iterations=n), costs).step_ms for n in (rounds, 3 * rounds)]
        out.append(f"{model}, PP {ranks}: {ms[0]:.0f} → {ms[1]:.0f} ms")
    claim = f"Algorithm 1 with {3 * bench.options.rounds} iterations, instead of {bench.options.rounds}"
    return Row.shown("sensitivity.iterations", claim, baseline("; ".join(out)))


def _no_head(bench: Bench) -> Row:
    out = [
        f"{model}: {bench.cell(model, 8, 16, 'published').over('1f1b'):.2f} → {headless_gain(bench, model):.2f}"
        for model in ("llama3-8b", "llama3-70b", SMALL, BIG)
    ]
    claim = "A head that costs nothing, 16 micro-batches: Algorithm 1 over 1F1B"
    return Row.shown("sensitivity.no-head", claim, baseline("; ".join(out) + " ×"))


PART = Part(name="sensitivity", title="What the paper leaves open", labels=(), run=run)
