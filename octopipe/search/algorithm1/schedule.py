"""Schedule tuning: advance F and I, delay W, and insert other work where a rank waits for a transfer.

Paper, section VI, "Scheduling Tuning". Knows: which ops delay the end of a bubble, and how orders change. Does not
know: phases. `Evaluator.advance_weights` advances a W where memory is short.

1. Starting from the last op and from the longest bubbles, the search traces back what each op waited for. An F or I
   that was ready while its rank ran another op is moved before that op (advance; if the other is a W: delay of W).
2. Where a rank waits for a transfer, a later op that is ready is moved into the gap, and the producers of the rank's
   next ops are advanced, so that one of them can run meanwhile (overlap-aware insertion).
3. A W that delays other ops is moved to a later bubble of its rank, or to the end (delay of W).
4. All of these at once: the whole order is derived by list scheduling, with F and I as early as possible and W in gaps.
Every advance is evaluated twice: with the other ops unchanged, and with the rest of the order derived by list
scheduling.

Under a memory limit, if recomputation is allowed, this phase also decides what is recomputed, because that determines
which orders fit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from octopipe.plans.plan import B, F, I, R, W
from octopipe.search.algorithm1.candidate import Candidate, Evaluator, State, shifted
from octopipe.search.algorithm1.structure import derived, keys_of, recomputed, rule_keys, stages_of

_TINY = 1e-6


def moves(evaluator: Evaluator, now: Candidate, lot: random.Random, recompute: bool) -> Iterator[tuple[str, State]]:
    """Yield advances, insertions, delays and whole orders with their names, chosen by the bubbles of the timeline. For
    a chain, also changes of the recomputed layers if `recompute` is True and memory is limited."""
    seen, settings = _Waits(evaluator, now), evaluator.settings
    critical = seen.delays(int(np.argmax(now.timeline.spans.end_ms)))
    bubbles = seen.longest_bubbles()
    behind = [pair for x in bubbles for pair in seen.delays(x)[:4]]
    advances = list(dict.fromkeys(critical + behind))
    op = now.timeline.op
    for x, y in _some(advances, settings.advances, lot):
        yield from seen.both(f"advance {op(x)} before {op(y)}", x, y)
    fillers = list(dict.fromkeys(pair for x in bubbles for pair in seen.fillers(x)))
    for x, y in _some(fillers, settings.insertions, lot):
        yield from seen.both(f"insert {op(x)} before {op(y)} where the rank waits", x, y)
    for x, y in _some(seen.late_places(critical), settings.delays, lot):
        yield f"delay {op(x)} behind {op(y)}", shifted(now.state, x, y)
    if now.state.chain:
        yield from _orders(evaluator, now, lot)
        if recompute and evaluator.has_limit:
            yield from _recomputations(evaluator, now, lot)


def _some(pairs: list[tuple[int, int]], most: int, lot: random.Random) -> list[tuple[int, int]]:
    return pairs if len(pairs) <= most else lot.sample(pairs, most)


def _orders(evaluator: Evaluator, now: Candidate, lot: random.Random) -> Iterator[tuple[str, State]]:
    """Yield whole orders from list scheduling: with the present start times or a rule's keys as priorities, and random
    values of `wait_ms` and `overrun`."""
    keys = keys_of(now.state, now.timeline.spans.start_ms)
    rules = list(rule_keys(evaluator, now.state.stages))
    longest = float(now.state.prices.ms.max())
    for _ in range(evaluator.settings.rules):
        kind = lot.randrange(3)
        name, base = "derive the order anew", keys
        if kind == 1:
            name, base = "derive the order from a rule", lot.choice(rules)
        elif kind == 2:
            # Shift the priorities of gradients against those of forwards.
            name, base = "shift I against F", keys + np.array([0.0, lot.gauss(0.0, 2.0 * longest)])[:, None, None]
        wait, overrun = lot.choice((0.0, 0.0, 0.1, 0.3)) * longest, lot.choice((1.0, 1.0, 0.5, 0.0))
        yield from (
            (name, order)
            for order in derived(evaluator, now.state, base, wait_ms=wait, overrun=overrun, cutoff_ms=now.step_ms)
        )


def _recomputations(evaluator: Evaluator, now: Candidate, lot: random.Random) -> Iterator[tuple[str, State]]:
    """Yield changes of the recomputed layers, each with the present order and with orders from list scheduling."""
    st, layers = now.state, evaluator.costs.num_layers
    again = recomputed(st.stages)
    keys = keys_of(st, now.timeline.spans.start_ms)
    for _ in range(evaluator.settings.recomputations):
        stage = lot.choice(st.stages)
        mine = list(range(stage.first, stage.stop))
        dropped, stays = [k for k in mine if k in again], [k for k in mine if k not in again]
        kind = lot.randrange(4)
        then = set(again)
        if kind == 0 and dropped:
            name, then = "keep the activations of a stage", again - set(mine)
        elif kind in (0, 1) and dropped:
            name, then = "keep the activations of a layer", again - {lot.choice(dropped)}
        elif kind == 2 and dropped and stays:
            name, then = "recompute another layer", (again - {lot.choice(dropped)}) | {lot.choice(stays)}
        elif stays:
            more = stays if lot.random() < 0.3 else [lot.choice(stays)]
            name, then = f"recompute {len(more)} layers of rank {stage.rank}", again | set(more)
        if then == again or not then <= set(range(layers)):
            continue
        moved = evaluator.restaged(st, stages_of(st.bounds, st.prices.rank.tolist(), then))
        yield name, moved
        yield from ((name, order) for order in derived(evaluator, moved, keys, cutoff_ms=now.step_ms))


class _Waits:
    """Which ops waited for which in a timeline."""

    def __init__(self, evaluator: Evaluator, now: Candidate) -> None:
        self.evaluator, self.state, self.timeline = evaluator, now.state, now.timeline
        spans, transfers = now.timeline.spans, now.timeline.transfers
        self.spans, self.count = spans, spans.rank.size
        self.preds = now.plan.predecessor_table()
        own = np.where(self.preds >= 0, spans.end_ms[self.preds], 0.0)
        local = (self.preds >= 0) & (spans.rank[self.preds] == spans.rank[:, None])
        self.ready = np.where(local, own, 0.0).max(axis=1)
        """[op]: when all inputs of the op had arrived."""
        np.maximum.at(self.ready, transfers.consumer, transfers.end_ms)

    def delays(self, span: int) -> list[tuple[int, int]]:
        """Trace back what op `span` waited for and return pairs (x, y): x was ready when its rank started y, the op
        before it, and so had to wait for y. A second pair names the first op that x could have preceded, if that is not
        y."""
        out: list[tuple[int, int]] = []
        node, binding, s = span, self.timeline.binding, self.spans
        for _ in range(self.evaluator.settings.depth * 8):
            before = int(binding[node])
            if before < 0 or len(out) >= self.evaluator.settings.depth:
                break
            if node < self.count and before == node - 1 and s.kind[node] in (F, I, B):
                first = self._earliest(node)
                if first < node:
                    out.append((node, before))
                    if first < before:
                        out.append((node, first))
            node = before
        return out

    def _earliest(self, x: int) -> int:
        """Return the earliest position in the order of its rank at which x would not have had to wait for its
        inputs."""
        s, y = self.spans, x
        while (
            y > 0
            and s.rank[y - 1] == s.rank[x]
            and s.start_ms[y - 1] > self.ready[x] - _TINY
            and y - 1 not in (self.preds[x])
        ):
            y -= 1
        return y

    def longest_bubbles(self) -> list[int]:
        """Return the ops that follow the longest idle intervals between two ops of a rank."""
        s = self.spans
        same = np.concatenate(([False], s.rank[1:] == s.rank[:-1]))
        gap = np.where(same, s.start_ms - np.concatenate(([0.0], s.end_ms[:-1])), 0.0)
        longest = np.argsort(-gap, kind="stable")[: self.evaluator.settings.bubbles]
        return [int(x) for x in longest if gap[x] > _TINY]

    def fillers(self, span: int) -> list[tuple[int, int]]:
        """Return pairs (x, y), x to be moved before y, that may fill the gap before `span`: later ops of the rank that
        are ready when the gap begins, and delays of the ops on other ranks that the next ops wait for."""
        s = self.spans
        begins = float(s.end_ms[span - 1])
        out: list[tuple[int, int]] = []
        for z in range(span + 1, min(span + 4 * self.evaluator.num_micro_batches, self.count)):
            if s.rank[z] != s.rank[span]:
                break
            if self.ready[z] <= begins + _TINY:
                out.append((z, span))
            elif s.kind[z] != W and z < span + 7:
                for p in self.preds[z]:
                    if p >= 0 and s.rank[p] != s.rank[z]:
                        out += self.delays(int(p))[:1]
            if len(out) >= 2 * self.evaluator.settings.insertions:
                break
        return out

    def late_places(self, critical: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return pairs (w, y): the W of a critical delay can be moved behind y, where a later bubble of its rank
        begins, or to the end of the rank's order."""
        s = self.spans
        out = []
        for _, w in critical:
            if s.kind[w] != W:
                continue
            rank_end = int(self.state.offsets[s.rank[w] + 1])
            gaps = [y for y in range(w + 1, rank_end - 1) if s.start_ms[y + 1] - s.end_ms[y] > _TINY]
            out += [(w, y) for y in (*gaps[:1], rank_end - 1) if y > w]
        return list(dict.fromkeys(out))

    def both(self, name: str, x: int, y: int) -> Iterator[tuple[str, State]]:
        """Yield the states in which x runs before y: with the other ops unchanged, and in orders from list scheduling
        in which x has a smaller key than y."""
        moved = shifted(self.state, x, y)
        if self.spans.kind[x] == I and x > 0 and self.spans.kind[x - 1] == R:
            # The R of x is moved with it.
            moved = shifted(shifted(self.state, x, y), x, y)
        yield name, moved
        if not self.state.chain or self.spans.kind[x] not in (F, I) or self.spans.kind[y] not in (F, I):
            return
        keys = keys_of(self.state, self.spans.start_ms)
        row, stage, batch = (0 if self.spans.kind[x] == F else 1), self.spans.stage[x], self.spans.micro_batch[x]
        keys[row, stage, batch] = self.spans.start_ms[y] - _TINY
        yield from (
            (name, order) for order in derived(self.evaluator, self.state, keys, cutoff_ms=self.timeline.step_ms)
        )
