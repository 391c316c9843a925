"""Annealing of structures whose priorities are bred along the way, in a herd of walkers.

Knows: a walker that is a structure and a population of keys, its moves, and how a herd is thinned. Does not know: time,
threads or plans; lane.py shares out the budget.

Judged under one fixed set of priorities most changes of a structure look bad, because the priorities suit the structure
as it was. Here a changed structure is judged under the best keys and a child or two of the population, and where it is
accepted, the population is judged again and bred a little on it. Keys know no single stage or op, so they carry over
from one structure to the next; what single offsets gain on top is left to `anneal.py`, which goes on from here.

One walker depends much on luck. So several walk at falling temperature, and between its steps those that are behind
make room for copies of those ahead (population annealing): a walker of score t is expected to have exp(-t / scale)
descendants in proportion, the scale being a small multiple of the temperature. What counts is not the step time alone
but a score that also sees progress the step time hides: when the ranks finish on average, and whether one is so full
that the others' gains lead nowhere.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from octopipe.tuner.anneal import (
    FULL,
    FULL_RACE,
    RELIEF,
    SLACK,
    State,
    below,
    copy_state,
    make_state,
    mutate,
    race,
    repair,
    uniform,
)
from octopipe.tuner.kernels import LAPS, Problem, Scratch, quick_bound
from octopipe.tuner.keys import NUM_KEYS, breed, count_of, judge_keys, keep_keys, make_child, use_keys
from octopipe.tuner.lottery import Start, twin

POPULATION = 16
"""Keys that a walker breeds from."""
DRAWN, BRED = 100, 300
"""Keys drawn and bred for a structure before its walk begins."""
TRIES, REJUDGED, AGAIN_BRED = 2, 4, 4
"""Keys under which a changed structure is judged (the best so far, then children); once it is accepted, keys that are
judged again and children bred on it. More of each gave less: moves are worth more than care."""
HOPEFUL = LAPS - 3
"""The lap that a schedule must have come to for other keys to be tried: of 10000 that fell behind before it, other keys
made three good enough, of those that fell behind later two in a hundred."""
NEAR = 1.04
"""Keys that are so much worse than the best on a new structure leave the population."""
MEAN, EARLIER = 0.2, 0.01
"""Weight of the ranks' mean finish in a walker's score, beside that of the step time: changes that help any rank but
the last are steps on the way. And how much earlier than now it is hoped to be, at most."""
BEHIND = 0.01
"""Share of the step time by which the ranks' mean finish may fall behind the best keys' while others are judged."""
ROOM = 0.8
"""Share of the way from the best possible load to the step time that the busiest rank may take up; what is beyond
counts against a structure. Where one rank is nearly full, no change of the others shortens the step, and walks rest: of
60 searches of nemotron-h-8b at 1F1B's memory those that ended above 437 ms mostly had a rank of 435 ms, those below
436 had none above 424."""
COMPOUND = 0.3
"""How often another change follows at once."""
OTHER_MOVES = 0.1
"""Share of moves that change recomputation, or the order of micro-batches of different sizes, where that matters."""
SCALE = 3.0
"""Difference of step times, in temperatures, at which a walker has a third of another's descendants."""


class Walker:
    """One of a herd."""

    def __init__(self, problem: Problem, max_stages: int, start: Start) -> None:
        self.state = twin(problem, max_stages, start.state)
        self.population = np.zeros((POPULATION, NUM_KEYS))
        self.values = np.full(POPULATION, np.inf)
        self.step_ms = np.inf
        self.score = np.inf
        """What it is judged by."""
        self.name = start.name
        self.pace = np.full(LAPS, np.inf)
        """Of its schedule."""
        if start.keys is not None:
            self.population[0] = start.keys
            self.values[0] = start.step_ms

    def copy(self, problem: Problem, max_stages: int) -> Walker:
        other = Walker(problem, max_stages, Start(self.step_ms, self.name, self.state))
        other.population[:], other.values[:] = self.population, self.values
        other.step_ms, other.score, other.pace[:] = self.step_ms, self.score, self.pace
        return other


class Herd:
    """Several walkers, and the best structure and keys that any of them came to."""

    def __init__(
        self, problem: Problem, max_stages: int, scratch: Scratch, margin: np.ndarray, rng: np.ndarray,
        may_recompute: bool, work_ms: float,
    ) -> None:  # fmt: skip
        self.problem, self.max_stages, self.scratch, self.margin = problem, max_stages, scratch, margin
        self.rng, self.may_recompute, self.work_ms = rng, may_recompute, work_ms
        self.walkers: list[Walker] = []
        self.back = make_state(problem, max_stages)
        self.seen = make_state(problem, max_stages)
        self.seen_keys = np.zeros(NUM_KEYS)
        self.best: Start | None = None
        self.log = np.zeros((64, 4))

    @property
    def best_ms(self) -> float:
        return self.best.step_ms if self.best is not None else np.inf

    def add(self, start: Start, effort: float = 1.0) -> int:
        """A walker from this start, its keys bred first; returns how many were judged."""
        walker = Walker(self.problem, self.max_stages, start)
        drawn, bred = max(int(effort * DRAWN), 4), max(int(effort * BRED), 4)
        breed(
            self.problem, walker.state, walker.population, walker.values, drawn, bred, self.margin, self.scratch,
            self.rng,
        )  # fmt: skip
        if self._judge(walker):
            self.walkers.append(walker)
        return drawn + bred

    def _judge(self, walker: Walker) -> bool:
        """Set a walker's step time and score under its best keys; False where it does not fit."""
        keys = walker.population[0]
        walker.step_ms = float(judge_keys(self.problem, walker.state, keys, self.margin, np.inf, self.scratch))
        load = quick_bound(
            self.problem, walker.state.size[0], walker.state.bounds, walker.state.rank, walker.state.recompute,
            self.scratch.free,
        )  # fmt: skip
        walker.pace[:] = self.scratch.pace
        walker.score = float(rate(walker.step_ms, walker.pace, self.problem.num_ranks, load, self.work_ms))
        if walker.step_ms < np.inf:
            self._keep(walker.step_ms, walker.name, walker.state, keys)
        return walker.step_ms < np.inf

    def run(self, walker: Walker, moves: int, temperature: float) -> tuple[int, np.ndarray]:
        """So many moves of one walker; returns how many schedules were judged, and lines as `anneal` writes them."""
        step_ms, score, best_ms, judged, lines = roam(
            self.problem, walker.state, self.back, self.seen, walker.population, walker.values, self.seen_keys,
            self.margin, self.scratch, self.rng, moves, temperature, walker.step_ms, walker.score, self.best_ms,
            walker.pace, self.may_recompute, self.work_ms, self.log,
        )  # fmt: skip
        walker.step_ms, walker.score = float(step_ms), float(score)
        if best_ms < self.best_ms:
            self._keep(float(best_ms), walker.name, self.seen, self.seen_keys)
        return int(judged), self.log[:lines]

    def thin(self, temperature: float, dice: np.random.Generator) -> None:
        """Those behind make room for copies of those ahead."""
        scores = np.array([w.score for w in self.walkers])
        weight = np.exp(-(scores - scores.min()) / (SCALE * temperature * scores.min()))
        reach = np.cumsum(weight) / weight.sum()
        count = len(self.walkers)
        chosen = np.minimum(np.searchsorted(reach, (dice.random() + np.arange(count)) / count), count - 1)
        kept: list[Walker] = []
        for i in chosen:
            walker = self.walkers[int(i)]
            kept.append(walker.copy(self.problem, self.max_stages) if any(walker is w for w in kept) else walker)
        self.walkers = kept

    def admit(self, others: list[Walker]) -> None:
        """Copies of others' walkers take the places of those that are behind them."""
        size = len(self.walkers)
        copies = [w.copy(self.problem, self.max_stages) for w in others]
        self.walkers = sorted([*self.walkers, *copies], key=lambda w: w.score)[:size]

    def rejudge(self) -> None:
        """After more memory was reserved: what does not fit any more goes."""
        kept, best = self.walkers, self.best
        self.walkers, self.best = [], None
        for walker in kept:
            if self._judge(walker):
                self.walkers.append(walker)
        if best is not None and best.keys is not None:
            value = float(judge_keys(self.problem, best.state, best.keys, self.margin, np.inf, self.scratch))
            self._keep(value, best.name, best.state, best.keys)

    def results(self) -> list[Start]:
        """What the walkers came to, the best first."""
        found = [] if self.best is None else [self.best]
        for walker in self.walkers:
            use_keys(self.problem, walker.state, walker.population[0])
            found.append(Start(walker.step_ms, walker.name, walker.state, keys=walker.population[0]))
        return sorted(found, key=lambda s: s.step_ms)

    def _keep(self, step_ms: float, name: str, state: State, keys: np.ndarray) -> None:
        if step_ms < self.best_ms:
            best = twin(self.problem, self.max_stages, state)
            use_keys(self.problem, best, keys)
            self.best = Start(step_ms, name, best, keys=keys.copy())


@njit(cache=True, nogil=True)
def change(p, st, rng, may_recompute, critical, hints):  # type: ignore[no-untyped-def]
    """One random change of anything but priorities; returns its number in MOVES or -1."""
    if may_recompute and uniform(rng) < OTHER_MOVES:
        s = below(rng, st.size[0])
        st.recompute[s] = not st.recompute[s]
        return 10
    if p.variants > 1 and uniform(rng) < OTHER_MOVES:
        a, b = below(rng, p.num_micro_batches), below(rng, p.num_micro_batches)
        st.entry[a], st.entry[b] = st.entry[b], st.entry[a]
        return 11
    return mutate(p, st, rng, False, 1.0, critical, hints, 0)


@njit(cache=True, nogil=True)
def rate(step_ms, pace, ranks, load, work):  # type: ignore[no-untyped-def]
    """A walker's score: its step time, a little of its ranks' mean finish as seen after nine tenths of the ops, and by
    how much its busiest rank's `load` exceeds what there is room for (`work`: the least load possible)."""
    mean = min(pace[LAPS - 2] / ranks, step_ms)
    return (1.0 - MEAN) * step_ms + MEAN * mean + max(load - room(step_ms, work), 0.0)


@njit(cache=True, nogil=True)
def room(step_ms, work):  # type: ignore[no-untyped-def]
    """How busy a rank may be without making the others' orders hopeless."""
    return work + ROOM * max(step_ms - work, 0.0)


@njit(cache=True, nogil=True)
def roam(
    p, st, back, best, population, values, best_keys, margin, sc, rng, moves, heat, step_ms, score, best_ms,
    pace, may_recompute, work, log,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """`moves` of one walker; returns (its step time and score, the best step time, schedules judged, lines of `log`).

    `best` and `best_keys` receive what is better than `best_ms`; `heat` is the temperature as a share of the step time.
    """
    keys, chosen = np.zeros(NUM_KEYS), np.zeros(NUM_KEYS)
    hints = np.zeros((1, 6), np.int32)
    limit = np.full(LAPS, np.inf)
    balance = quick_bound(p, st.size[0], st.bounds, st.rank, st.recompute, sc.free)
    critical = -1
    judged = 0
    lines = 0
    for i in range(moves):
        copy_state(back, st)
        move = change(p, st, rng, may_recompute, critical, hints)
        while uniform(rng) < COMPOUND:
            more = change(p, st, rng, may_recompute, critical, hints)
            if move < 0:
                move = more
        if move < 0:
            copy_state(st, back)
            continue
        cutoff = score - heat * score * np.log(max(uniform(rng), 1e-300))
        # A step time beyond this takes a mean finish so much earlier that it is not worth waiting for.
        limit_ms = (cutoff - MEAN * (1.0 - EARLIER) * min(pace[LAPS - 2] / p.num_ranks, step_ms)) / (1.0 - MEAN)
        target = room(limit_ms, work)
        if step_ms <= balance * (1.0 + FULL) and uniform(rng) < 0.3:
            target = step_ms * (1.0 - RELIEF * uniform(rng))
        value = np.inf
        load = repair(p, st, rng, target, sc.free)
        if load <= limit_ms:
            late = p.num_ranks * (cutoff - score + SLACK * score)
            if uniform(rng) < FULL_RACE:
                late = np.inf
            for lap in range(LAPS):
                limit[lap] = pace[lap] + late
            for t in range(TRIES):
                if t == 0:
                    keys[:] = population[0]
                elif value <= cutoff or sc.pace[HOPEFUL] == np.inf:
                    break
                else:
                    make_child(p, population, count_of(values), keys, rng)
                use_keys(p, st, keys)
                then_ms = race(p, st, margin, limit_ms, limit, sc)
                then = rate(then_ms, sc.pace, p.num_ranks, load, work)
                judged += 1
                if then < value:
                    value = then
                    chosen[:] = keys
        if not value <= cutoff:
            copy_state(st, back)
            continue
        step_ms, score, critical = renew(p, st, population, values, chosen, margin, sc, rng, pace, limit, load, work)
        judged += 1 + REJUDGED + AGAIN_BRED
        balance = load
        if step_ms < best_ms - 1e-9:
            if lines < log.shape[0]:
                log[lines, 0] = i
                log[lines, 1] = move
                log[lines, 2] = best_ms
                log[lines, 3] = step_ms
                lines += 1
            best_ms = step_ms
            copy_state(best, st)
            best_keys[:] = population[0]
    return step_ms, score, best_ms, judged, lines


@njit(cache=True, nogil=True)
def renew(p, st, population, values, keys, margin, sc, rng, pace, limit, load, work):  # type: ignore[no-untyped-def]
    """Judge the best of a population again, on a structure that was accepted under `keys`, and breed it a little.

    The others remain as parents behind them: to judge all of them every time took longer than the walk itself. Returns
    step time and score under the best keys and the rank that finishes last; `pace` becomes theirs.
    """
    before = population.copy()
    values[:] = np.inf
    value = judge_keys(p, st, keys, margin, np.inf, sc)
    score, critical = rate(value, sc.pace, p.num_ranks, load, work), sc.count[p.num_ranks]
    pace[:] = sc.pace
    keep_keys(population, values, keys, value)
    other = np.zeros(NUM_KEYS)
    for i in range(REJUDGED + AGAIN_BRED):
        if i == REJUDGED:
            count = count_of(values)
            for j in range(REJUDGED, min(before.shape[0], REJUDGED + values.size - count)):
                population[count] = before[j]
                values[count] = value * NEAR * (1.0 + 1e-9 * j)
                count += 1
        if i < REJUDGED:
            other[:] = before[i]
        else:
            make_child(p, population, count_of(values), other, rng)
        for lap in range(LAPS):
            limit[lap] = pace[lap] + p.num_ranks * BEHIND * value
        use_keys(p, st, other)
        then = race(p, st, margin, min(value * NEAR, values[values.size - 1]), limit, sc)
        if then < values[0]:
            score, critical = rate(then, sc.pace, p.num_ranks, load, work), sc.count[p.num_ranks]
            pace[:] = sc.pace
        keep_keys(population, values, other, then)
    use_keys(p, st, population[0])
    return values[0], score, critical
