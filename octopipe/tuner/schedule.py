"""Schedule tuning: advance F and I, delay W, and put other work where a rank waits for a transfer.

Paper, section VI, "Scheduling Tuning". Knows: which ops stand in the way of a bubble's end. Does not know: phases.

1. From the last op and from the longest bubbles it walks back through what each op waited for. An F or I that was
   ready while its rank ran another op goes before that one (advance).
2. Where a rank waits for a transfer, the producers of its next other ops are advanced, so that one of them is
   there to run meanwhile (overlap-aware insertion).
3. W runs in gaps anyway; how far it may overrun an arrival, how long a rank waits for a better op, and when a W goes
   before F and I (delay and advance of W) are tried as a whole. Under a memory limit so are the micro-batches a stage
   may hold; that a W is advanced where memory lacks is the list scheduler's own rule.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from octopipe.plan import F, I, W
from octopipe.tuner.anneal import State
from octopipe.tuner.candidate import Candidate, Desk
from octopipe.tuner.kernels import A_F, A_I, B_F, B_I, C_I, C_W, LOOK, RHO, W_OVER

ADVANCES, INSERTIONS, RULES = 14, 6, 4
"""Candidates of each kind judged in an iteration."""
_BUBBLES, _DEPTH = 6, 40
_TINY = 1e-6


def moves(desk: Desk, now: Candidate, lot: random.Random) -> Iterator[tuple[str, State]]:
    """Advances, insertions and changes of the rules for W, by the bubbles of the current timeline."""
    seen = _Waits(desk, now)
    critical = seen.delays(int(np.argmax(now.timeline.spans.end_ms)))
    bubbles = seen.longest_bubbles()
    behind = [pair for x in bubbles for pair in seen.delays(x)[:4]]
    advances = list(dict.fromkeys(critical)) + [p for p in dict.fromkeys(behind) if p not in critical]
    for x, y in _some(advances, ADVANCES, lot):
        yield f"advance {now.timeline.op(x)} before {now.timeline.op(y)}", seen.advanced(x, y)
    fillers = [pair for x in bubbles for pair in seen.fillers(x)]
    for x, y in _some([p for p in dict.fromkeys(fillers) if p not in advances], INSERTIONS, lot):
        yield f"advance {now.timeline.op(x)} to fill a bubble", seen.advanced(x, y)
    for _ in range(RULES):
        yield _rule(desk, now.state, lot)


def _some(pairs: list[tuple[int, int]], most: int, lot: random.Random) -> list[tuple[int, int]]:
    return pairs if len(pairs) <= most else lot.sample(pairs, most)


def _rule(desk: Desk, st: State, lot: random.Random) -> tuple[str, State]:
    """One of the numbers that govern waiting and W."""
    changed = desk.copy(st)
    n, most = int(st.size[0]), desk.problem.num_micro_batches
    kind = lot.randrange(6 if desk.problem.has_limit else 4)
    if kind == 0:
        changed.glob[W_OVER] = lot.choice((0.0, 0.02, 0.05, 0.1, 10.0))
        return "delay W at arrivals", changed
    if kind == 1:
        changed.glob[LOOK] = lot.choice((0.0, 0.005, 0.01, 0.02, 0.04))
        return "wait for a better op", changed
    if kind == 2:
        changed.glob[C_W] = 1e9 if lot.random() < 0.5 else most * lot.random() * 2
        return "advance or delay W", changed
    if kind == 3:
        at = lot.choice((A_F, B_F, A_I, B_I, C_I))
        changed.glob[at] = (
            max(0.05, st.glob[at] * lot.uniform(0.8, 1.25)) if at in (A_F, A_I) else (st.glob[at] + lot.gauss(0.0, 1.0))
        )
        return "priority of F against I", changed
    if kind == 4:
        s = lot.randrange(n)
        changed.flight[s:n] = np.clip(st.flight[s:n] + lot.choice((-1, 1)), 1, most)
        return f"micro-batches in flight from stage {s} on", changed
    changed.glob[RHO] = lot.random()
    return "memory kept free", changed


class _Waits:
    """Who waited for what in a timeline."""

    def __init__(self, desk: Desk, now: Candidate) -> None:
        self.desk, self.state, self.timeline = desk, now.state, now.timeline
        spans, transfers = now.timeline.spans, now.timeline.transfers
        self.spans, self.count = spans, spans.rank.size
        self.preds = now.plan.predecessor_table()
        own = np.where(self.preds >= 0, spans.end_ms[self.preds], 0.0)
        local = (self.preds >= 0) & (spans.rank[self.preds] == spans.rank[:, None])
        self.ready = np.where(local, own, 0.0).max(axis=1)
        """When everything an op needs was there."""
        np.maximum.at(self.ready, transfers.consumer, transfers.end_ms)
        self.place = np.empty(st_size(now.state), np.int64)
        self.place[now.state.entry] = np.arange(self.place.size)

    def delays(self, span: int) -> list[tuple[int, int]]:
        """(x, y): on the way back from `span`, x was ready when its rank began y, and had to wait for y."""
        out: list[tuple[int, int]] = []
        node, binding, s = span, self.timeline.binding, self.spans
        for _ in range(_DEPTH * 8):
            before = int(binding[node])
            if before < 0 or len(out) >= _DEPTH:
                break
            if node < self.count and before < self.count and before == node - 1 and s.kind[node] in (F, I):
                early = self.ready[node] < s.start_ms[before] - _TINY
                if early and s.kind[before] in (F, I) and s.stage[before] != s.stage[node]:
                    out.append((node, before))
            node = before
        return out

    def longest_bubbles(self) -> list[int]:
        """The ops that end the longest idle intervals inside ranks' work."""
        s = self.spans
        same = np.concatenate(([False], s.rank[1:] == s.rank[:-1]))
        gap = np.where(same, s.start_ms - np.concatenate(([0.0], s.end_ms[:-1])), 0.0)
        longest = np.argsort(-gap, kind="stable")[:_BUBBLES]
        return [int(x) for x in longest if gap[x] > _TINY]

    def fillers(self, span: int) -> list[tuple[int, int]]:
        """Delays of the producers of the ops that follow a bubble: were they earlier, they could fill it."""
        s = self.spans
        out: list[tuple[int, int]] = []
        for z in range(span + 1, min(span + 7, self.count)):
            if s.rank[z] != s.rank[span] or s.kind[z] == W or self.ready[z] < s.start_ms[span] - _TINY:
                continue
            for p in self.preds[z]:
                if p >= 0 and s.rank[p] != s.rank[z]:
                    out += self.delays(int(p))[:1]
        return out

    def advanced(self, x: int, y: int) -> State:
        """The state in which x has just the better priority of the two."""
        changed = self.desk.copy(self.state)
        kind, stage, at = self._cell(x)
        changed.wiggle[kind, stage, at] += self._key(y) - self._key(x) - 1e-3
        return changed

    def _cell(self, x: int) -> tuple[int, int, int]:
        s = self.spans
        return (0 if s.kind[x] == F else 1), int(s.stage[x]), int(self.place[s.micro_batch[x]])

    def _key(self, x: int) -> float:
        """The list scheduler's key of an F or I."""
        kind, stage, at = self._cell(x)
        p, st, g = self.desk.problem, self.state, self.state.glob
        own = float(st.offset[kind, stage] + st.wiggle[kind, stage, at])
        if kind == 0:
            share = p.forward[0, st.bounds[stage]] / max(p.forward[0, -1], 1e-12)
            return own + float(g[B_F] * share + g[A_F] * at)
        share = 1.0 - p.input[0, st.bounds[stage + 1]] / max(p.input[0, -1], 1e-12)
        return own + float(g[C_I] + g[B_I] * share + g[A_I] * at)


def st_size(st: State) -> int:
    """Micro-batches of a state."""
    return int(st.entry.size)
