"""ZB-1p and ZB-2p: the zero-bubble heuristic scheduler under a memory limit of p or 2p micro-batches.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, the automatic scheduler without its ILP.
Rule: stage i on rank i. Warm-up: every stage runs F0 and as many more F as memory and the wait for its first
gradient allow. Then rounds of one F per stage and one I per stage in reverse; W runs where it fits a gap,
where memory is short, or where the gap would lengthen the worst stage's idle time. Three yes/no choices
(see Choices) are tried in all combinations; the smallest span wins, then the smallest makespan.

The times of every stage, micro-batch and link are used. The limit of rank i is p (2p) times the bytes of one
micro-batch of its own stage (F adds M_B, I frees M_B - M_W, W frees M_W), and never more than the rank's
capacity without weights and buffers, if that is enough for a micro-batch. If the costs contain no bytes at
all, M_B = 1 and M_W = 32/34, the paper's ratio 32h / (34h + 5as) without attention scores.
Simplified: the authors assume equal stages. Here, a forward that does not fit after all W are done, or whose
input has not arrived yet, waits for a later round (theirs would stop).
"""

from __future__ import annotations

from itertools import accumulate, product
from typing import NamedTuple

from octopipe.costs.table import CostTable
from octopipe.plans.plan import F, I, Op, Plan, W
from octopipe.plans.price import hop_times, match, stage_memory, stage_times
from octopipe.search.systems.closed_forms import ClosedForm
from octopipe.search.systems.registry import Setting, system
from octopipe.search.systems.zero_bubble import ZERO_BUBBLE, handcrafted_order, rate_forms, straight_plan
from octopipe.simulation.simulator import simulate

STASH_WITHOUT_BYTES = 32 / 34
RETRIES = 3
"""How often the limit is reduced because buffers, in addition to activations, exceed the memory of a rank."""
_EPS = 1e-7
"""Times that differ by less than this share of the longest op count as equal."""
Table = list[list[float]]
"""[stage][micro-batch]."""


@system(name="zb-1p", title="ZB-1p", paper=ZERO_BUBBLE, year=2024, tunes=("scheduling",))
def zb_1p(setting: Setting) -> Plan:
    return heuristic_plan(setting.costs, setting.num_ranks, setting.num_micro_batches, setting.num_ranks)


@system(name="zb-2p", title="ZB-2p", paper=ZERO_BUBBLE, year=2024, tunes=("scheduling",))
def zb_2p(setting: Setting) -> Plan:
    return heuristic_plan(setting.costs, setting.num_ranks, setting.num_micro_batches, 2 * setting.num_ranks)


class Choices(NamedTuple):
    """The three yes/no choices of the heuristic."""

    overshoot: bool
    """The last warm-up forward may end after the first gradient arrives."""
    skip: bool
    """A stage two or more forwards ahead of the next stage may skip one forward to run its I in time."""
    fill: bool
    """A W may run in a gap that is shorter than the W, even if the gap alone would do no harm."""


class Prices(NamedTuple):
    """The times and bytes that the scheduler uses."""

    forward_ms: Table
    input_ms: Table
    weight_ms: Table
    send_ms: Table
    """Transfer of a stage's output to the next stage."""
    return_ms: Table
    """Transfer of a stage's input gradient to the previous stage."""
    held: Table
    """M_B: bytes that F adds."""
    stashed: Table
    """M_W: the part of M_B that is held after I until W."""
    limit: list[float]
    """Largest sum of activations of each rank."""


def heuristic_plan(costs: CostTable, p: int, m: int, in_flight: int) -> Plan:
    """Return the best plan over all choices if each rank may hold `in_flight` micro-batches."""
    shape = straight_plan(costs, p, m, [handcrafted_order(i, p, m, 1) for i in range(p)])
    prices = _prices(shape, costs, in_flight)
    for _ in range(RETRIES):
        best = _best(prices)
        plan = straight_plan(costs, p, m, best.orders)
        if not costs.rank_memory_bytes:
            break
        timeline = simulate(plan, costs, check=False)
        beside = timeline.peak_bytes - best.peak
        room = [costs.capacity_bytes(r) - float(beside[r]) for r in range(p)]
        if timeline.fits or any(room[r] < max(prices.held[r]) for r in range(p)):
            break
        prices = prices._replace(limit=[min(a, b) for a, b in zip(prices.limit, room)])
    return plan


def _prices(plan: Plan, costs: CostTable, in_flight: int) -> Prices:
    match(plan, costs)
    times, memory = stage_times(plan, costs), stage_memory(plan, costs)
    send, back = hop_times(plan, costs)
    held, stashed = memory.activation, memory.stash
    if not held.any():
        held = held + 1.0
        stashed = stashed + STASH_WITHOUT_BYTES
    # A tolerance for rounded sums, so that an exact fit is not rejected.
    limit = held.max(axis=1) * in_flight * (1 + 1e-12)
    return Prices(
        forward_ms=times[F].tolist(),
        input_ms=times[I].tolist(),
        weight_ms=times[W].tolist(),
        send_ms=send.tolist(),
        return_ms=back.tolist(),
        held=held.tolist(),
        stashed=stashed.tolist(),
        limit=limit.tolist(),
    )


def _best(prices: Prices) -> _Schedule:
    schedules = [_Schedule(prices, Choices(*booleans)) for booleans in product((False, True), repeat=3)]
    return min(schedules, key=lambda s: (round(s.span_ms / s.eps), s.makespan_ms))


class _Schedule:
    """One run of the heuristic, which builds the schedule op by op."""

    def __init__(self, prices: Prices, choices: Choices) -> None:
        self.prices, self.choices = prices, choices
        self.p, self.m = len(prices.forward_ms), len(prices.forward_ms[0])
        longest = max(max(row) for table in prices[:3] for row in table)
        self.eps = _EPS * (longest or 1.0)
        self.orders: list[list[Op]] = [[] for _ in range(self.p)]
        self.first = [0.0] * self.p
        self.clock = [0.0] * self.p
        self.idle = [0.0] * self.p
        """Idle time of a rank since its first op."""
        self.memory = [0.0] * self.p
        self.peak = [0.0] * self.p
        self.forwards, self.inputs, self.weights = ([0] * self.p for _ in range(3))
        self.forward_end = [[0.0] * self.m for _ in range(self.p)]
        self.input_end = [[0.0] * self.m for _ in range(self.p)]
        self._warm_up()
        for _ in range(1, self.m):
            self._round()
        for s in range(self.p):
            while self.weights[s] < self.m:
                self._put_w(s)

    @property
    def span_ms(self) -> float:
        return max(end - first for end, first in zip(self.clock, self.first))

    @property
    def makespan_ms(self) -> float:
        return max(self.clock)

    # -- single ops ------------------------------------------------------------------------------------

    def _forward_ready(self, s: int) -> float:
        b = self.forwards[s]
        return self.forward_end[s - 1][b] + self.prices.send_ms[s - 1][b] if s > 0 else 0.0

    def _input_ready(self, s: int) -> float:
        b = self.inputs[s]
        if s == self.p - 1:
            return self.forward_end[s][b]
        return self.input_end[s + 1][b] + self.prices.return_ms[s + 1][b]

    def _run(self, s: int, ready: float, took: float) -> float:
        if not self.orders[s]:
            self.first[s] = self.clock[s] = ready
        self.idle[s] += max(0.0, ready - self.clock[s])
        self.clock[s] = max(self.clock[s], ready) + took
        return self.clock[s]

    def _put_f(self, s: int) -> None:
        b = self.forwards[s]
        self.forward_end[s][b] = self._run(s, self._forward_ready(s), self.prices.forward_ms[s][b])
        self.orders[s].append(Op(s, "F", b))
        self.forwards[s] += 1
        self.memory[s] += self.prices.held[s][b]
        self.peak[s] = max(self.peak[s], self.memory[s])

    def _put_i(self, s: int) -> None:
        b = self.inputs[s]
        self.input_end[s][b] = self._run(s, self._input_ready(s), self.prices.input_ms[s][b])
        self.orders[s].append(Op(s, "I", b))
        self.inputs[s] += 1
        self.memory[s] += self.prices.stashed[s][b] - self.prices.held[s][b]

    def _put_w(self, s: int) -> None:
        b = self.weights[s]
        self.clock[s] += self.prices.weight_ms[s][b]
        self.orders[s].append(Op(s, "W", b))
        self.weights[s] += 1
        self.memory[s] -= self.prices.stashed[s][b]

    def _pending(self, s: int) -> bool:
        return self.weights[s] < self.inputs[s]

    def _fill_gap(self, s: int, ready: float) -> None:
        """Run pending W in the time until `ready`, as far as the choices allow."""
        while self._pending(s):
            took = self.prices.weight_ms[s][self.weights[s]]
            gap = ready - self.clock[s]
            if gap <= self.eps:
                return
            worse = self.idle[s] + gap > max(self.idle) + self.eps
            if took > gap + self.eps and not worse and not self.choices.fill:
                return
            self._put_w(s)

    # -- phases ----------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Run F0 on every stage, more forwards while the first gradient is under way, then the first I."""
        for s in range(self.p):
            self._put_f(s)
        more = [0] * self.p
        gradient = self.clock[-1] + self.prices.input_ms[-1][0]
        for s in reversed(range(self.p - 1)):
            gradient += self.prices.return_ms[s + 1][0]
            ends = list(accumulate(self.prices.forward_ms[s][1:], initial=self.clock[s]))
            held = list(accumulate(self.prices.held[s]))
            n = 0
            while n + 1 < self.m and held[n + 1] <= self.prices.limit[s]:
                if self.choices.overshoot and ends[n] >= gradient - self.eps:
                    break
                if not self.choices.overshoot and ends[n + 1] > gradient + self.eps:
                    break
                n += 1
            more[s] = n
            gradient = max(gradient, ends[n]) + self.prices.input_ms[s][0]
        for s in range(1, self.p):
            more[s] = min(more[s], max(0, more[s - 1] - 1))
        for s in range(self.p):
            for _ in range(more[s]):
                self._put_f(s)
        for s in reversed(range(self.p)):
            self._put_i(s)

    def _round(self) -> None:
        """Run one round: one forward (unless skipped or impossible) and one I of every stage."""
        skipped = self._skipped() if self.choices.skip else -1
        for s in range(self.p):
            if self.forwards[s] < self.m and s > skipped and self._forward_fits(s):
                held = self.prices.held[s][self.forwards[s]]
                while self._pending(s) and self.memory[s] + held > self.prices.limit[s]:
                    self._put_w(s)
                self._fill_gap(s, self._forward_ready(s))
                self._put_f(s)
        for s in reversed(range(self.p)):
            self._fill_gap(s, self._input_ready(s))
            self._put_i(s)
        if self.forwards[0] == self.m:
            while self._pending(0):
                self._put_w(0)

    def _forward_fits(self, s: int) -> bool:
        """Whether the next forward's input exists and its activations fit after all pending W have run."""
        b = self.forwards[s]
        if s > 0 and self.forwards[s - 1] <= b:
            return False
        if b == self.inputs[s]:
            return True  # the round's own I needs it; nothing else is in flight
        freed = sum(self.prices.stashed[s][self.weights[s] : self.inputs[s]])
        return self.memory[s] - freed + self.prices.held[s][b] <= self.prices.limit[s]

    def _skipped(self) -> int:
        """Return the last stage that skips its forward in this round (all stages before it do too), or -1.

        A stage two or more forwards ahead of the next one skips a forward that would delay its I, unless waiting
        for the gradient would make it the stage with the most idle time.
        """
        worst = max(self.idle)
        for s in reversed(range(self.p - 1)):
            if self.forwards[s] == self.m or self.forwards[s] - self.forwards[s + 1] < 2:
                continue
            b = self.inputs[s]
            gradient = self.clock[s + 1] + self.prices.input_ms[s + 1][b] + self.prices.return_ms[s + 1][b]
            gradient += self.prices.forward_ms[s + 1][self.forwards[s + 1]]
            late = self.clock[s] + self.prices.forward_ms[s][self.forwards[s]] > gradient + self.eps
            if late and self.idle[s] + max(0.0, gradient - self.clock[s]) <= worst + self.eps:
                return s
        return -1


def closed_forms() -> list[ClosedForm]:
    """The paper's bubble rates, under its memory limits."""
    return rate_forms("zb-1p", "zb-2p")
