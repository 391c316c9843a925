"""The two lanes of every rank within a timeline: when it computed and when it exchanged tokens.

Knows: how the segments of single ops and of pairs are positioned within the spans of a simulation. Does not know: how
spans are computed (`simulator`), or how lanes are drawn (`views/`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.segments import COMPUTE, EXCHANGE, together_ms
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import PairPrices, stage_parts
from octopipe.plans.plan import Op, Plan
from octopipe.plans.two_lanes import FIRST, SECOND, trace
from octopipe.simulation.timeline import LaneSpans, Spans

Piece = tuple[int, int, float, float]
"""A segment: the op of a pair that it belongs to (0 or 1), its lane, its start and its end in milliseconds."""


def lane_spans(plan: Plan, costs: CostTable, spans: Spans) -> LaneSpans | None:
    """Return the segments of every op within its span; None if no op exchanges tokens and none is paired."""
    if not plan.pairs and not costs.exchanges:
        return None
    prices = PairPrices(plan, costs)
    t = plan.table()
    every = np.arange(t.stage.size)
    lead = every if t.lead is None else t.lead
    followed = np.append(lead[1:] == every[:-1], False)
    alike: dict[tuple[object, ...], list[int]] = {}
    for number in np.flatnonzero(lead == every).tolist():
        slot = (number, number + 1) if followed[number] else (number,)
        alike.setdefault(tuple(prices.kind_of(plan.op(n)) for n in slot), []).append(number)
    columns: list[list[NDArray[Any]]] = [[], [], [], []]
    for key, found in alike.items():
        numbers = np.array(found)
        ops = [plan.op(found[0] + k) for k in range(len(key))]
        pieces = _pair_pieces(prices, *ops) if len(ops) == 2 else _alone_pieces(prices, ops[0])
        begin, end = spans.start_ms[numbers], spans.end_ms[numbers]
        took = max((piece[3] for piece in pieces), default=0.0)
        # If a span is longer than its op takes alone (contention, overhead), all pieces are stretched in proportion.
        scale = (end - begin) / took if took > 0 else np.ones(numbers.size)
        for which, lane, a, b in pieces:
            row = (numbers + which, np.full(numbers.size, lane), begin + a * scale, np.minimum(begin + b * scale, end))
            for column, values in zip(columns, row, strict=True):
                column.append(values)
    span, lane_of, start, stop = (np.concatenate(c) if c else np.zeros(0) for c in columns)
    return LaneSpans(span.astype(np.int32), lane_of.astype(np.int32), start.astype(float), stop.astype(float))


def exposed_ms(prices: PairPrices, *ops: Op) -> float:
    """Return the exchange time, of an op that runs alone or of two that run together, in which the rank does not
    compute."""
    pieces = _pair_pieces(prices, *ops) if len(ops) == 2 else _alone_pieces(prices, ops[0])
    computing = sorted((a, b) for _, lane, a, b in pieces if lane == COMPUTE)
    end = max((b for *_, b in pieces), default=0.0)
    exchanging = [(a, b) for _, lane, a, b in pieces if lane == EXCHANGE]
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in exchanging for c, d in _gaps(computing, end))


def _alone_pieces(prices: PairPrices, op: Op) -> list[Piece]:
    """Return the segments of an op that runs alone; shared experts compute beside their exchange."""
    if op.kind == "W" or prices.segments is None:
        return [(0, COMPUTE, 0.0, prices.alone_ms(op))]
    kind = "I" if op.kind == "B" else op.kind
    parts = stage_parts(prices.segments, prices.costs, prices.plan.stages[op.stage], kind, op.micro_batch)
    out: list[Piece] = []
    now, k = 0.0, 0
    while k < len(parts):
        lane, ms = parts[k]
        if lane == "exchange" and k + 1 < len(parts) and parts[k + 1][0] == "beside":
            beside = parts[k + 1][1]
            took = together_ms(beside, ms, *prices.slowing)
            slowed = beside * (1 + prices.slowing[0]), ms * (1 + prices.slowing[1])
            out += [(0, EXCHANGE, now, now + min(slowed[1], took)), (0, COMPUTE, now, now + min(slowed[0], took))]
            k, ms = k + 1, took
        else:
            out.append((0, EXCHANGE if lane == "exchange" else COMPUTE, now, now + ms))
        now += ms
        k += 1
    if op.kind == "B":
        out.append((0, COMPUTE, now, now + prices.filler_ms(op)))
    return _merged(out)


def _pair_pieces(prices: PairPrices, first: Op, second: Op) -> list[Piece]:
    """Return the segments of two ops that run together; W fills the exchange time in which nothing else computes."""
    found = prices.together(first, second)
    if found.one_by_one:
        after = prices.alone_ms(first)
        later = [(1, lane, a + after, b + after) for _, lane, a, b in _alone_pieces(prices, second)]
        return _alone_pieces(prices, first) + later
    pieces = trace(prices.sequence(first), prices.sequence(second), found.walk.steps, *prices.slowing)
    out: list[Piece] = list(pieces)
    slow = 1 + prices.slowing[0]
    left = [prices.filler_ms(first), prices.filler_ms(second)]
    for a, b in _gaps(sorted((a, b) for _, lane, a, b in pieces if lane == COMPUTE), found.walk.ms):
        for owner in (FIRST, SECOND):
            used = min(b - a, left[owner] * slow)
            if used > 0:
                out.append((owner, COMPUTE, a, a + used))
                left[owner] -= used / slow
                a += used
    now = found.walk.ms
    for owner in (FIRST, SECOND):
        if left[owner] > 1e-12 * (1 + found.ms):
            out.append((owner, COMPUTE, now, now + left[owner]))
            now += left[owner]
    return out


def _gaps(busy: list[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """Return the intervals up to `end` that the sorted busy intervals leave free."""
    out, now = [], 0.0
    for a, b in [*busy, (end, end)]:
        if a > now:
            out.append((now, a))
        now = max(now, b)
    return out


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Merge neighbouring pieces of one op on one lane, so that the layers of a dense stage form one piece."""
    out: list[Piece] = []
    for piece in pieces:
        if piece[3] <= piece[2]:
            continue
        if out and out[-1][:2] == piece[:2] and abs(out[-1][3] - piece[2]) <= 1e-9 * (1 + piece[2]):
            out[-1] = (*out[-1][:3], piece[3])
        else:
            out.append(piece)
    return out
