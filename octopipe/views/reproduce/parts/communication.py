"""Table III: stages, communications, overlap and step time of Nemotron-H 56B, and the cost of more overlap."""

from __future__ import annotations

from typing import Any

from octopipe.plans.plan import Plan
from octopipe.simulation.lowering import Channel
from octopipe.simulation.timeline import Timeline
from octopipe.views.reproduce.bench import TUNERS, Bench
from octopipe.views.reproduce.overlap import Receives, share_of
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts.common import HIGHER, SHORT_HEAD, both, bounds, plain, tuned
from octopipe.views.reproduce.pictures import bars, lines
from octopipe.views.reproduce.reading import BASELINES, TITLES, Head, baseline_plan, interleaved_by_chunks
from octopipe.views.reproduce.row import Pair, Result, Row, Value, baseline

MODEL, RANKS, MICRO_BATCHES = "nemotron-h-56b", 8, 8
PAPER = {
    "1f1b": (8, 224, 112, 2406.0),
    "mist": (8, 224, 112, 1996.0),
    "tessel": (16, 480, 320, 2142.0),
    "interleaved": (56, 1760, 1330, 2116.0),
    "octopipe": (56, 1760, 1606, 1619.0),
}
"""The paper's stages, communications, overlapped communications and step time."""
ORDER = ("1f1b", "tessel", "interleaved", "mist", "octopipe")
SOURCE = "Table III"
SLACKS = (0.0, 0.02, 0.06, 0.12)
WALK_MOVES = 3000
PAPER_CHUNKS = 7
"""Stages per rank of the paper's Interleaved and OctoPipe, which have 56 stages on 8 ranks."""
RECEIVES: tuple[Receives, ...] = ("when needed", "one ahead", "early")
Seen = dict[Head, dict[str, Timeline]]


def run(bench: Bench) -> Result:
    seen = {head: _timelines(bench, head) for head in bench.heads}
    shares = {head: _shares(bench, head) for head in bench.heads}
    rows: list[Row] = []
    for name, (stages, count, hidden, step) in PAPER.items():
        rows += [
            *_sizes(bench, seen, name, float(stages), float(count)),
            _overlap(bench, shares, name, hidden / count),
            _step(bench, seen, name, step),
        ]
    rows += _orders(bench, seen)
    curve = frontier(trade_off(bench))
    rows += [_open(bench, shares, curve), *_tests(bench, curve), _counts(shares["published"], seen["published"])]
    pictures = {"trade-off.svg": _curve(curve), "communication.svg": _picture(seen["published"])}
    text = (
        "Overlap counts sends and receives, each on its own rank, that can overlap with computation (§V of the paper): "
        "a send if a computation follows it, a receive if its tensor is under way while the receiving rank still "
        "computes something else. The trade-off curve is the lower edge of all plans at hand: those of both tuners, "
        f"those of walks from them through slower orders ({WALK_MOVES} moves each), and Interleaved by its number of "
        f"chunks. The most that any of them overlaps is {100 * curve[-1][1]:.1f} %.",
    )
    return Result(rows=tuple(rows), costs=bench.costs_in_words, text=text, pictures=pictures)


def _plan(bench: Bench, head: Head, name: str) -> tuple[Plan, Channel]:
    """Return a system's plan, and the channel model of its transfers."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES, head=head)
    for tuner in TUNERS:
        if name == tuner:
            return bench.plan(tuner, costs, RANKS, MICRO_BATCHES), "directed"
    return baseline_plan(name, costs, RANKS, MICRO_BATCHES, bench.reading), bench.reading.channel


def _timelines(bench: Bench, head: Head) -> dict[str, Timeline]:
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES, head=head)
    out = {name: bench.baseline(name, costs, RANKS, MICRO_BATCHES) for name in BASELINES}
    for tuner in TUNERS:
        out[tuner] = bench.step(bench.plan(tuner, costs, RANKS, MICRO_BATCHES), costs, label=TITLES[tuner])
    return out


def _shares(bench: Bench, head: Head, receives: Receives = "early") -> dict[str, float]:
    """Return, for every system, the share of its sends and receives that can overlap."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES, head=head)
    out = {}
    for name in (*BASELINES, *TUNERS):
        plan, channel = _plan(bench, head, name)
        out[name] = share_of(plan, costs, channel=channel, receives=receives)
    return out


def _sizes(bench: Bench, seen: Seen, name: str, stages: float, count: float) -> list[Row]:
    """Return rows on a system's numbers of stages and communications."""
    rows = []
    for of, paper in (("stages", stages), ("communications", count)):
        id, claim, group = f"comm.{name}.{of}", f"{TITLES[name]}: {of}", f"comm.{of}"
        if name in ("1f1b", "mist"):
            ours = _number(seen["published"][name], of)
            rows.append(Row.constructed(id, claim, paper, ours, ours == paper, source=SOURCE, group=group))
            continue
        why, tested, plan, test = {
            "interleaved": (
                "with its best number of chunks Interleaved has fewer stages",
                "sensitivity.chunks",
                _seven_chunks,
                f"{PAPER_CHUNKS} chunks",
            ),
            "tessel": (
                "Tessel's V-shaped placement keeps one boundary of each micro-batch on a rank",
                "comm.tessel.placement",
                _seven_chunks,
                "",
            ),
            "octopipe": (
                "fewer, larger stages are faster in these layer times",
                "comm.many-stages",
                _many_stages,
                f"begun with {PAPER_CHUNKS * RANKS} stages",
            ),
        }[name]
        if name == "octopipe":
            values = tuned(bench, lambda h, t, of=of: _number(seen[h][t], of))  # type: ignore[misc]
        else:
            values = plain(bench, lambda h, of=of: _number(seen[h][name], of))  # type: ignore[misc]
        more: dict[str, Any] = {"source": SOURCE, "group": group, "why": why, "tested": tested}
        if test:
            more |= {"test": test, "trial": lambda of=of, plan=plan: _number(_timeline(bench, plan(bench)), of)}
        rows.append(Row.number(id, claim, paper, values, **more))
    return rows


def _seven_chunks(bench: Bench) -> Plan:
    """Return Interleaved with as many stages as the paper's, or the most that its schedule allows."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    by = interleaved_by_chunks(costs, RANKS, MICRO_BATCHES, bench.reading)
    return by[max(k for k in by if k <= PAPER_CHUNKS)][0]


def _many_stages(bench: Bench) -> Plan:
    """Return the plan of Algorithm 1 started from as many stages as the paper's."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    return bench.iterated(costs, RANKS, MICRO_BATCHES, iterations=bench.options.rounds, start=_seven_chunks(bench))


def _timeline(bench: Bench, plan: Plan) -> Timeline:
    return bench.step(plan, bench.costs(MODEL, RANKS, MICRO_BATCHES))


def _overlap(bench: Bench, shares: dict[Head, dict[str, float]], name: str, paper: float) -> Row:
    ours = name == "octopipe"
    values = tuned(bench, lambda h, t: shares[h][t]) if ours else plain(bench, lambda h: shares[h][name])
    why = {
        "octopipe": "Algorithm 1 looks for a short step alone, and does not find the orders that overlap as much",
        "1f1b": "Megatron's 1F1B posts a receive only when it is needed: then its sends alone overlap",
        "mist": "its 1F1B posts a receive only when it is needed: then its sends alone overlap",
    }.get(name, "how early the paper's executor posts a receive is not stated")
    how: Receives = "when needed" if name in ("1f1b", "mist") else "one ahead"
    return Row.number(
        f"comm.{name}.overlap",
        f"{TITLES[name]}: overlap rate",
        paper,
        values,
        unit="%",
        source=SOURCE,
        group="comm.overlap",
        why=why,
        test=f"receives {how}",
        trial=None if ours else lambda: _shares(bench, "published", how)[name],
        tested="comm.trade-off" if ours else "comm.receives",
    )


def _step(bench: Bench, seen: Seen, name: str, paper: float) -> Row:
    ours = name == "octopipe"
    values = tuned(bench, lambda h, t: seen[h][t].step_ms) if ours else plain(bench, lambda h: seen[h][name].step_ms)
    return Row.number(
        f"comm.{name}.step",
        f"{TITLES[name]}: time per step",
        paper,
        values,
        unit="ms",
        source=SOURCE,
        group=f"comm.{'octopipe' if ours else 'baselines'}.step",
        why=HIGHER if ours else SHORT_HEAD,
        tested="sensitivity.noise" if ours else "sensitivity.head",
        bound=_bounds(bench) if ours else (None, None),
        used_in_fit=not ours,
    )


def _bounds(bench: Bench) -> Pair:
    return bounds(bench, lambda h: bench.cell(MODEL, RANKS, MICRO_BATCHES, h))


def _number(timeline: Timeline, of: str) -> float:
    return float(timeline.spans.stage.max()) + 1 if of == "stages" else float(timeline.overlap.communications)


def _orders(bench: Bench, seen: Seen) -> list[Row]:
    def ms(head: Head, name: str) -> float:
        return seen[head]["algorithm1" if name == "octopipe" else name].step_ms

    def ordered(head: Head) -> bool:
        times = [ms(head, n) for n in ORDER]
        return times == sorted(times, reverse=True)

    def with_seven_chunks() -> tuple[Value, bool]:
        costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
        seven = bench.step(_seven_chunks(bench), costs, channel=bench.reading.channel).step_ms
        times = {n: seven if n == "interleaved" else ms("published", n) for n in ORDER}
        found = sorted(ORDER, key=lambda n: -times[n])
        return " > ".join(TITLES[n] for n in found), tuple(found) == ORDER

    faster = ("tessel", "interleaved", "octopipe")
    return [
        Row.order(
            "comm.order",
            "the five systems by step time, the slowest first",
            " > ".join(TITLES[n] for n in ORDER),
            plain(bench, lambda h: " > ".join(TITLES[n] for n in sorted(ORDER, key=lambda n: -ms(h, n)))),
            both(bench, ordered),
            used_in_fit=True,
            source=SOURCE,
            why="Interleaved with its best number of chunks is faster than Mist; with the paper's 7 chunks it is not",
            test=f"{PAPER_CHUNKS} chunks",
            trial=with_seven_chunks,
            tested="sensitivity.chunks",
        ),
        Row.order(
            "comm.faster",
            "Tessel, Interleaved and OctoPipe are faster than 1F1B, although they communicate more",
            "yes",
            plain(bench, lambda h: "yes" if all(ms(h, n) < ms(h, "1f1b") for n in faster) else "no"),
            both(bench, lambda h: all(ms(h, n) < ms(h, "1f1b") for n in faster)),
            source="§VIII-A",
            why="their transfers cost more than their stages save",
            tested="sensitivity.channel",
        ),
    ]


def _open(bench: Bench, shares: dict[Head, dict[str, float]], curve: list[tuple[float, float]]) -> Row:
    step, share = next(((ms, s) for ms, s in curve if s >= _paper_share()), curve[-1])
    return Row.number(
        "comm.open",
        "OctoPipe: share of communications that cannot overlap",
        0.087,
        tuned(bench, lambda h, t: 1 - shares[h][t]),
        unit="%",
        within=0.02,
        absolute=True,
        source="§VIII-A",
        why="Algorithm 1 looks for a short step alone, and does not find the orders that overlap as much",
        test=f"least step that overlaps as much, {step:.0f} ms",
        trial=lambda: 1 - share,
        tested="comm.trade-off",
    )


def _paper_share() -> float:
    _, count, overlapped, _ = PAPER["octopipe"]
    return overlapped / count


def _tests(bench: Bench, curve: list[tuple[float, float]]) -> list[Row]:
    """Return rows with the results of the changes that might explain the differences above."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    by = {how: _shares(bench, "published", how) for how in RECEIVES}
    names = (*BASELINES, "algorithm1")
    receives = "; ".join(f"{how}: " + ", ".join(f"{100 * by[how][n]:.0f}" for n in names) for how in RECEIVES)
    many = _many_stages(bench)
    timeline = bench.step(many, costs)
    few = bench.step(bench.plan("algorithm1", costs, RANKS, MICRO_BATCHES), costs)
    sent = bench.baseline("tessel", costs, RANKS, MICRO_BATCHES).overlap.communications
    kept = 2 * 2 * MICRO_BATCHES
    return [
        Row.shown(
            "comm.trade-off",
            "Least step time by the share of transfers that overlap, published head",
            baseline("; ".join(f"{100 * share:.1f} %: {ms:.0f} ms" for ms, share in curve)),
            source="Table III, §VIII-A",
            paper="91.3 %: 1619 ms",
        ),
        Row.shown(
            "comm.receives",
            "Overlap (%) by when a receive is posted: 1F1B, Interleaved, Tessel, Mist, Algorithm 1",
            baseline(receives),
            paper="50, 76, 67, 50, 91",
            source=SOURCE,
        ),
        Row.shown(
            "comm.many-stages",
            f"Algorithm 1 begun from Interleaved's {PAPER_CHUNKS * RANKS} stages, instead of 1F1B's {RANKS}",
            baseline(
                f"{len(many.stages)} stages, {timeline.overlap.communications} communications: {timeline.step_ms:.0f} "
                f"ms, instead of {_number(few, 'stages'):.0f} stages and {few.step_ms:.0f} ms"
            ),
            paper="56 stages, 1760 communications: 1619 ms",
            source=SOURCE,
        ),
        Row.shown(
            "comm.tessel.placement",
            "Tessel's communications with the boundary that stays on a rank counted as well",
            baseline(float(sent + kept)),
            paper=480.0,
            source=SOURCE,
        ),
    ]


def _counts(shares: dict[str, float], seen: dict[str, Timeline]) -> Row:
    """Return a row with overlap rates under stricter definitions than the paper's: overlap in the simulated step."""
    names = (*BASELINES, *TUNERS)

    def listed(shares: dict[str, float]) -> str:
        return ", ".join(f"{100 * shares[name]:.0f}" for name in names)

    count = {name: seen[name].overlap for name in names}
    partly = {name: of.overlappable / of.communications for name, of in count.items()}
    wholly = {name: of.overlapped / of.communications for name, of in count.items()}
    return Row.shown(
        "comm.counts",
        "Overlap (%) by what is counted: 1F1B, Interleaved, Tessel, Mist, Algorithm 1, our search",
        baseline(
            f"can overlap (§V): {listed(shares)}; overlaps partly: {listed(partly)}; overlaps wholly: {listed(wholly)}"
        ),
        paper="50, 76, 67, 50, 91",
        source=SOURCE,
    )


def trade_off(bench: Bench) -> list[tuple[float, float]]:
    """Return (step time, share of transfers that can overlap) of every available plan."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    made = [plan for plan, _ in interleaved_by_chunks(costs, RANKS, MICRO_BATCHES, bench.reading).values()]
    tuned_plans = (bench.plan(tuner, costs, RANKS, MICRO_BATCHES) for tuner in TUNERS)
    for begin in (*tuned_plans, _many_stages(bench)):
        made.append(begin)
        made += [bench.overlapping(begin, costs, moves=WALK_MOVES, slack=slack) for slack in SLACKS]
    return [(bench.step(plan, costs).step_ms, share_of(plan, costs)) for plan in made]


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points for which no other is as fast and overlaps as much, fastest first.

    >>> frontier([(10.0, 0.5), (12.0, 0.9), (13.0, 0.8)])
    [(10.0, 0.5), (12.0, 0.9)]
    """
    out: list[tuple[float, float]] = []
    for ms, share in sorted(points, key=lambda p: (p[0], -p[1])):
        if not out or share > out[-1][1]:
            out.append((ms, share))
    return out


def _curve(curve: list[tuple[float, float]]) -> str:
    return lines(
        "Table III, 56B, 8 micro-batches: what more overlap costs",
        {"least step time, ours": [(100 * share, ms) for ms, share in curve]},
        points={"OctoPipe in the paper": (91.3, 1619.0)},
        x_name="% of sends and receives that can overlap with computation",
        y_name="ms",
    )


def _picture(seen: dict[str, Timeline]) -> str:
    names = ("1f1b", "mist", "tessel", "interleaved", "algorithm1", "search")
    keys = ("1f1b", "mist", "tessel", "interleaved", "octopipe", "octopipe")
    return bars(
        "Table III, Nemotron-H 56B, PP 8, 8 micro-batches: time per step, head as published",
        [TITLES[n] for n in names],
        {"ours": [seen[n].step_ms for n in names]},
        paper={"ours": [PAPER[k][3] for k in keys]},
        unit="ms",
    )


PART = Part(name="communication", title="Communication of Nemotron-H 56B", labels=("tab:comm_nemotron",), run=run)
