"""The least step time of tiny settings by trying everything: a twin of the bounds and of the exact method.

Every micro-batch chooses a rank for each layer (the same for all where layers are held once), every layer whether it is
recomputed, and ops are added in every order of their start times. One stage per layer, transfers of one latency,
reductions left out. Shares no code with the package.
"""

from __future__ import annotations

import itertools
from typing import Any

from octopipe.costs.table import CostTable


def least_ms(
    costs: CostTable, ranks: int, micro_batches: int, *, copies: bool = False, recompute: bool = False
) -> float:
    """Infinite where nothing fits."""
    layers, best = costs.num_layers, [float("inf")]
    homes = itertools.product(range(ranks), repeat=layers * (micro_batches if copies else 1))
    for flat in homes:
        if flat[0] != 0 and not costs.rank_slowdown:
            continue  # equal ranks: the first op stands on rank 0
        each = range(micro_batches)
        home = [[flat[l * micro_batches + m] if copies else flat[l] for m in each] for l in range(layers)]
        for again in itertools.product((False, True) if recompute else (False,), repeat=layers):
            _Search(costs, ranks, micro_batches, home, again, best).run()
    return best[0]


class _Search:
    def __init__(self, costs: CostTable, ranks: int, most: int, home: Any, again: Any, best: list[float]) -> None:
        self.costs, self.ranks, self.most, self.home, self.again, self.best = costs, ranks, most, home, again, best
        self.layers = costs.num_layers
        self.hop = costs.network.link(0, 1).latency_ms if ranks > 1 else 0.0
        self.ms = {k: [float(x) for x in costs.layer_times(k)] for k in "FIWR"}
        self.room = [costs.capacity_bytes(r) for r in range(ranks)]
        for r in range(ranks):
            self.room[r] -= sum(float(costs.static_bytes[l]) for l in range(self.layers) if r in home[l])
        self.limited = min(self.room) < float("inf")
        self.held = [float(x) for x in costs.activation_bytes]
        self.stash = [float(x) for x in costs.stash_bytes]
        self.kept = [
            min(float(costs.boundary_bytes[l - 1]) if l else 0.0, self.held[l]) if again[l] else self.held[l]
            for l in range(self.layers)
        ]

    def run(self) -> None:
        if min(self.room) < 0:
            return
        left = [0.0] * self.ranks
        for l, m in itertools.product(range(self.layers), range(self.most)):
            left[self.home[l][m]] += self.ms["F"][l] + self.ms["I"][l] + self.ms["W"][l]
        self._add({}, [0.0] * self.ranks, {}, left, [0.0] * self.ranks, [None] * self.ranks, 0.0, 0.0)

    def _add(self, done, clock, queue, left, used, previous, last, latest):  # type: ignore[no-untyped-def]
        if max(max(c + x for c, x in zip(clock, left)), latest) >= self.best[0] - 1e-9:
            return
        if sum(k != "R" for k, _, _ in done) == 3 * self.layers * self.most:
            self.best[0] = latest
            return
        found = []
        for kind, l, m in itertools.product("FRIW", range(self.layers), range(self.most)):
            if (kind, l, m) in done or (kind == "R" and not self.again[l]):
                continue
            if kind == "F" and l == 0 and m > 0 and ("F", 0, m - 1) not in done:
                continue  # micro-batches are alike: they enter in the order of their numbers
            r, ready, takes, gives = self.home[l][m], 0.0, 0.0, 0.0
            if kind != "F":
                own = done.get(("I" if kind == "W" else "F", l, m))
                if own is None:
                    continue
                ready = own[0]
            if kind == "R" and ("I", l, m) in done:
                continue
            if kind == "F":
                takes = self.kept[l]
            elif kind == "R":
                takes = self.held[l] - self.kept[l]
            elif kind == "I":
                gives = self.held[l] - self.stash[l]
                if self.again[l] and ("R", l, m) not in done:
                    if previous[r] != ("F", l, m):
                        continue
                    takes = self.held[l] - self.kept[l]  # nothing was dropped: the backward follows at once
            else:
                gives = self.stash[l]
            near = {"F": l - 1, "I": l + 1}.get(kind, -1)
            if 0 <= near < self.layers:
                if (kind, near, m) not in done:
                    continue
                ready = max(ready, done[kind, near, m][1])
            start = max(clock[r], ready)
            early = start < last - 1e-12 and self.limited
            if early or used[r] + takes > self.room[r] * (1 + 1e-12):
                continue
            end = start + self.ms[kind][l] * self.costs.slowdown(r)
            found.append((end, start, kind, l, m, r, takes, gives))
        if not found:
            return
        if not self.limited:
            # Without a limit some best order is active: no op could have run in time before what was chosen.
            first = min(found)
            found = [x for x in found if x[5] == first[5] and x[1] < first[0] + 1e-12]
        for end, start, kind, l, m, r, takes, gives in found:
            to = {"F": l + 1, "I": l - 1}.get(kind, -1)
            arrival, queue_then = end, queue
            if 0 <= to < self.layers and self.home[to][m] != r:
                arrival = max(end, queue.get((r, self.home[to][m]), 0.0)) + self.hop
                queue_then = {**queue, (r, self.home[to][m]): arrival}
            then, rest, then_used, then_previous = list(clock), list(left), list(used), list(previous)
            then[r], then_previous[r] = end, (kind, l, m)
            then_used[r] += takes - gives
            if kind != "R":
                rest[r] -= self.ms[kind][l]
            self._add(
                {**done, (kind, l, m): (end, arrival)}, then, queue_then, rest, then_used, then_previous, start,
                max(latest, end),
            )  # fmt: skip
