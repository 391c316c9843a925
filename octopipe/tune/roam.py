"""Annealing of structures whose priorities are bred along the way, in a herd of walkers.

Knows: a walker that is a structure and a population of keys, its moves, and how a herd is thinned. Does not know: time,
threads or plans; lane.py shares out the budget.

Judged under one fixed set of priorities most changes of a structure look bad, because the priorities suit the structure
as it was. Here a changed structure is judged under the best keys and a child or two of the population, and where it is
accepted, the population is judged again and bred a little on it. Keys know no single stage or op, so they carry over
from one structure to the next; what single offsets gain on top is left to `anneal.py`, which goes on from here.

One walker depends much on luck. So several walk at falling temperature, and between its steps those that are behind
make room for copies of those ahead (population annealing): a walker of step time t is expected to have exp(-t / scale)
descendants in proportion, the scale being a small multiple of the temperature.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from octopipe.tune.anneal import (
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
from octopipe.tune.kernels import LAPS, Problem, Scratch, quick_bound
from octopipe.tune.keys import NUM_KEYS, breed, count_of, judge_keys, keep_keys, make_child, use_keys
from octopipe.tune.lottery import Start, twin

POPULATION = 16
"""Keys that a walker breeds from."""
DRAWN, BRED = 100, 300
"""Keys drawn and bred for a structure before its walk begins."""
TRIES, REJUDGED, AGAIN_BRED = 2, 4, 4
"""Keys under which a changed structure is judged (the best so far, then children); once it is accepted, keys that are
judged again and children bred on it. More of each gave less: moves are worth more than care."""
NEAR = 1.04
"""Keys that are so much worse than the best on a new structure leave the population."""
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
        self.current = np.inf
        self.name = start.name
        if start.keys is not None:
            self.population[0] = start.keys
            self.values[0] = start.step_ms

    def copy(self, problem: Problem, max_stages: int) -> Walker:
        other = Walker(problem, max_stages, Start(self.current, self.name, self.state))
        other.population[:], other.values[:], other.current = self.population, self.values, self.current
        return other


class Herd:
    """Several walkers, and the best structure and keys that any of them came to."""

    def __init__(
        self, problem: Problem, max_stages: int, scratch: Scratch, margin: np.ndarray, rng: np.ndarray,
        may_recompute: bool,
    ) -> None:  # fmt: skip
        self.problem, self.max_stages, self.scratch, self.margin = problem, max_stages, scratch, margin
        self.rng, self.may_recompute = rng, may_recompute
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
        walker.current = float(walker.values[0])
        if walker.current < np.inf:
            use_keys(self.problem, walker.state, walker.population[0])
            self.walkers.append(walker)
            self._keep(walker.current, walker.name, walker.state, walker.population[0])
        return drawn + bred

    def run(self, walker: Walker, moves: int, temperature: float) -> tuple[int, np.ndarray]:
        """So many moves of one walker; returns how many schedules were judged, and lines as `anneal` writes them."""
        current, best_ms, judged, lines = roam(
            self.problem, walker.state, self.back, self.seen, walker.population, walker.values, self.seen_keys,
            self.margin, self.scratch, self.rng, moves, temperature, walker.current, self.best_ms, self.may_recompute,
            self.log,
        )  # fmt: skip
        walker.current = float(current)
        if best_ms < self.best_ms:
            self._keep(float(best_ms), walker.name, self.seen, self.seen_keys)
        return int(judged), self.log[:lines]

    def thin(self, temperature: float, dice: np.random.Generator) -> None:
        """Those behind make room for copies of those ahead."""
        times = np.array([w.current for w in self.walkers])
        weight = np.exp(-(times - times.min()) / (SCALE * temperature * times.min()))
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
        self.walkers = sorted([*self.walkers, *copies], key=lambda w: w.current)[:size]

    def rejudge(self) -> None:
        """After more memory was reserved: what does not fit any more goes."""
        kept, best = self.walkers, self.best
        self.walkers, self.best = [], None
        for walker in kept:
            keys = walker.population[0]
            walker.current = float(judge_keys(self.problem, walker.state, keys, self.margin, np.inf, self.scratch))
            if walker.current < np.inf:
                self.walkers.append(walker)
                self._keep(walker.current, walker.name, walker.state, keys)
        if best is not None and best.keys is not None:
            value = float(judge_keys(self.problem, best.state, best.keys, self.margin, np.inf, self.scratch))
            self._keep(value, best.name, best.state, best.keys)

    def results(self) -> list[Start]:
        """What the walkers came to, the best first."""
        found = [] if self.best is None else [self.best]
        for walker in self.walkers:
            use_keys(self.problem, walker.state, walker.population[0])
            found.append(Start(walker.current, walker.name, walker.state, keys=walker.population[0]))
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
def roam(
    p, st, back, best, population, values, best_keys, margin, sc, rng, moves, heat, current, best_ms, may_recompute, log
):  # type: ignore[no-untyped-def]
    """`moves` of one walker; returns (its step time, the best one's, schedules judged, lines written to `log`).

    `best` and `best_keys` receive what is better than `best_ms`; `heat` is the temperature as a share of the step time.
    """
    keys, chosen = np.zeros(NUM_KEYS), np.zeros(NUM_KEYS)
    hints = np.zeros((1, 6), np.int32)
    pace, limit = np.full(LAPS, np.inf), np.full(LAPS, np.inf)
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
        cutoff = current - heat * current * np.log(max(uniform(rng), 1e-300))
        target = cutoff
        if current <= balance * (1.0 + FULL) and uniform(rng) < 0.3:
            target = current * (1.0 - RELIEF * uniform(rng))
        value = np.inf
        if repair(p, st, rng, target, sc.free) <= cutoff:
            late = p.num_ranks * (cutoff - current + SLACK * current)
            if uniform(rng) < FULL_RACE:
                late = np.inf
            for lap in range(LAPS):
                limit[lap] = pace[lap] + late
            for t in range(TRIES):
                if t == 0:
                    keys[:] = population[0]
                else:
                    make_child(p, population, count_of(values), keys, rng)
                use_keys(p, st, keys)
                then = race(p, st, margin, min(cutoff, value), limit, sc)
                judged += 1
                if then < value:
                    value = then
                    chosen[:] = keys
        if not value <= cutoff:
            copy_state(st, back)
            continue
        renew(p, st, population, values, chosen, value, margin, sc, rng)
        judged += REJUDGED + AGAIN_BRED
        current = judge_keys(p, st, population[0], margin, np.inf, sc)
        pace[:] = sc.pace
        critical = sc.count[p.num_ranks]
        balance = quick_bound(p, st.size[0], st.bounds, st.rank, st.recompute, sc.free)
        if current < best_ms - 1e-9:
            if lines < log.shape[0]:
                log[lines, 0] = i
                log[lines, 1] = move
                log[lines, 2] = best_ms
                log[lines, 3] = current
                lines += 1
            best_ms = current
            copy_state(best, st)
            best_keys[:] = population[0]
    return current, best_ms, judged, lines


@njit(cache=True, nogil=True)
def renew(p, st, population, values, keys, value, margin, sc, rng):  # type: ignore[no-untyped-def]
    """Judge the best of a population again, on a structure that was accepted under `keys`, and breed it a little.

    The others remain as parents behind them: to judge all of them every time took longer than the walk itself.
    """
    before = population.copy()
    values[:] = np.inf
    keep_keys(population, values, keys, value)
    for i in range(REJUDGED):
        keep_keys(population, values, before[i], judge_keys(p, st, before[i], margin, value * NEAR, sc))
    count = count_of(values)
    for i in range(REJUDGED, before.shape[0]):
        if count < values.size:
            population[count] = before[i]
            values[count] = value * NEAR * (1.0 + 1e-9 * i)
            count += 1
    breed(p, st, population, values, 0, AGAIN_BRED, margin, sc, rng)
