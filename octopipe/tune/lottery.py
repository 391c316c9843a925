"""Many quick starts: structures and priorities drawn at random, the best of them kept.

Knows: how to draw a structure (stages, directions of the rounds, an even partition) and a set of priorities, and
that priorities which served one structure well are worth trying on the next. Does not know: annealing.

A draw costs some twenty list schedulings, most of which die at the cutoff long before their end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from octopipe.tune.anneal import State, copy_state, fit_flight, judge, make_state
from octopipe.tune.kernels import (
    A_F,
    A_I,
    B_F,
    B_I,
    BANK,
    C_I,
    C_W,
    LOOK,
    NEVER,
    NUM_GLOBALS,
    RHO,
    W_OVER,
    Problem,
    Scratch,
)
from octopipe.tune.starts import limit_flight, partition_evenly

KEPT = 4
"""Starts kept of one size."""
KEYS_KEPT = 6
KEYS_NEAR, KEYS_DRAWN = 8, 8
"""Per structure: the best priorities so far, some like them, and new ones."""
AGAIN = 0.6
"""How often a shape among the best is drawn again."""
BALANCE = 4000
"""Moves of the partition's own annealing."""


class Keys(NamedTuple):
    """One set of priorities and the rule for micro-batches in flight."""

    glob: np.ndarray
    rule: int
    """0: no limit; 1: the same for all stages; 2: fill a share of each rank's memory; 3: Little's law."""
    a: float
    b: float


class Start(NamedTuple):
    """A drawn start."""

    step_ms: float
    name: str
    state: State
    used: bool = False
    """It was walked from, or is what a walk came to."""


def draw_keys(problem: Problem, lot: np.random.Generator) -> Keys:
    """Priorities, limits and tolerances from the ranges in which good ones were seen."""
    r = float(problem.num_ranks)
    glob = np.zeros(NUM_GLOBALS)
    glob[A_F], glob[A_I] = 10 ** lot.uniform(-1, 1), 10 ** lot.uniform(-1, 1)
    glob[B_F], glob[B_I] = lot.uniform(-2 * r, 4 * r), lot.uniform(-2 * r, 4 * r)
    glob[C_I] = -1e3 if lot.random() < 0.5 else lot.uniform(-2 * r, 2 * r)
    glob[LOOK] = 0.0 if lot.random() < 0.5 else lot.uniform(0, 0.05 if lot.random() < 0.8 else 0.5)
    glob[RHO] = 1.0 if lot.random() < 0.5 else lot.random()
    glob[W_OVER] = 10.0 if lot.random() < 0.25 else lot.uniform(0, 0.1)
    glob[C_W] = NEVER
    glob[BANK] = 0.0 if not problem.has_limit or lot.random() < 0.85 else lot.random()
    u = lot.random()
    if not problem.has_limit and u < 0.6:
        return Keys(glob, 0, 0.0, 0.0)
    if u < 0.4:
        return Keys(glob, 1, problem.num_ranks + float(lot.integers(-2, 4)), 0.0)
    if u < 0.75 and problem.has_limit:
        return Keys(glob, 2, lot.uniform(0.7, 1.3), 0.0)
    return Keys(glob, 3, 10 ** lot.uniform(0, 0.5), lot.uniform(0.5, 3.0))


@njit(cache=True, nogil=True)
def use_keys(p, st, glob, rule, a, b):  # type: ignore[no-untyped-def]
    """Set a state's priorities; offsets of stages and ops are cleared."""
    n = st.size[0]
    st.glob[:] = glob
    st.offset[:, :n] = 0.0
    st.wiggle[:, :n] = 0.0
    st.flight[:] = p.num_micro_batches
    if rule == 1:
        st.flight[:n] = min(max(int(a), 1), p.num_micro_batches)
    elif rule == 2:
        for rank in range(p.num_ranks):
            fit_flight(p, st, rank, a)
    elif rule == 3:
        limit_flight(p, st, a, b)


@njit(cache=True, nogil=True)
def try_keys(p, st, globs, rules, a, b, margin, cutoff, sc):  # type: ignore[no-untyped-def]
    """The best of many priorities for a structure: (its number or -1, step time); all in one call, so that threads
    do not wait for each other's turn in between."""
    best, chosen = cutoff, -1
    for i in range(rules.size):
        use_keys(p, st, globs[i], rules[i], a[i], b[i])
        value = judge(p, st, margin, best, sc)
        if value < best:
            best, chosen = value, i
    if chosen >= 0:
        use_keys(p, st, globs[chosen], rules[chosen], a[chosen], b[chosen])
    return chosen, best


def draw_shape(problem: Problem, max_stages: int, lot: np.random.Generator) -> tuple[int, str]:
    """A number of stages and a way round the ranks."""
    rounds = lot.choice([1.5, 2, 2, 3, 3, 4, 4, 5, 6, 8])
    stages = round(problem.num_ranks * rounds + lot.integers(-1, 2) * (lot.random() < 0.4))
    return int(np.clip(stages, 1, max_stages)), ("loop", "wave", "mixed")[int(lot.choice(3, p=[0.3, 0.5, 0.2]))]


def go_round(problem: Problem, stages: int, kind: str, lot: np.random.Generator) -> list[int]:
    """Stages' ranks: rounds over all ranks, up or down, the last one perhaps cut short."""
    ranks = problem.num_ranks
    out: list[int] = []
    while len(out) < stages:
        number = len(out) // ranks
        down = {"loop": False, "wave": number % 2 == 1, "mixed": bool(lot.random() < 0.5)}[kind]
        out += range(ranks - 1, -1, -1) if down else range(ranks)
    out = out[:stages]
    if len(set(out)) < min(ranks, stages):
        out = [s % ranks for s in range(stages)]
    return out


def near(keys: Keys, lot: np.random.Generator) -> Keys:
    """The same priorities, a little different."""
    glob = keys.glob.copy()
    for k in (A_F, A_I):
        glob[k] *= 10 ** lot.normal(0.0, 0.12)
    for k in (B_F, B_I, C_I):
        glob[k] += lot.normal(0.0, 0.5)
    if lot.random() < 0.5:
        glob[LOOK] = max(0.0, glob[LOOK] + lot.normal(0.0, 0.01))
    if lot.random() < 0.5:
        glob[RHO] = np.clip(glob[RHO] + lot.normal(0.0, 0.15), 0.0, 1.0)
    if lot.random() < 0.3:
        glob[W_OVER] = lot.uniform(0, 0.1)
    spread = {0: 0.0, 1: 1.0, 2: 0.06, 3: 0.1}[keys.rule]
    a = keys.a + lot.normal(0.0, spread) if spread else 0.0
    return Keys(glob, keys.rule, a, keys.b + (lot.normal(0.0, 0.3) if keys.rule == 3 else 0.0))


class Lottery:
    """Draws starts and keeps the best few, of different shapes."""

    def __init__(self, problem: Problem, max_stages: int, scratch: Scratch, margin: np.ndarray, seed: tuple[int, ...]):
        self.problem, self.max_stages, self.scratch, self.margin = problem, max_stages, scratch, margin
        self.lot = np.random.default_rng(seed)
        self.keys: list[tuple[float, Keys]] = []
        self.starts: list[Start] = []
        self.draws = 0
        self.shapes: dict[str, tuple[int, str]] = {}

    def draw(self, recompute: bool, size: int | None = None) -> None:
        """One structure under old and new priorities; of the given size (half rounds over the ranks)."""
        self.draws += 1
        st = make_state(self.problem, self.max_stages)
        shape = draw_shape(self.problem, self.max_stages, self.lot)
        if size is not None:
            width = self.problem.num_ranks
            low, high = -(-size * width // 2), min(((size + 1) * width - 1) // 2, self.max_stages)
            shape = (int(self.lot.integers(low, max(low, min(high, low + 2)) + 1)), shape[1])
        elif self.starts and self.lot.random() < AGAIN:
            # Shapes that did well are worth another try; the best most of all.
            shape = self.shapes[self.starts[int(self.lot.random() ** 2 * len(self.starts))].name]
        name = f"{shape[0]} stages, {shape[1]}"
        self.shapes[name] = shape
        ranks = go_round(self.problem, *shape, self.lot)
        partition_evenly(
            self.problem,
            st,
            ranks,
            seed=int(self.lot.integers(1 << 40)),
            even=float(self.lot.choice([1.0, 4.0, 4.0, 16.0])),
            tilt=float(self.lot.choice([0.0, 0.5, 1.0])),
            rising=bool(self.lot.random() < 0.7),
            iterations=BALANCE,
        )
        st.recompute[: int(st.size[0])] = recompute
        alike = [s for s in self.starts if self.size(s) == self.size(Start(0.0, name, st))]
        bar = alike[-1].step_ms if len(alike) >= KEPT else np.inf
        tries = [k for _, k in self.keys]
        if tries:
            tries += [near(tries[int(self.lot.integers(len(tries)))], self.lot) for _ in range(KEYS_NEAR)]
        tries += [draw_keys(self.problem, self.lot) for _ in range(KEYS_DRAWN)]
        chosen, best_ms = try_keys(
            self.problem, st, np.array([k.glob for k in tries]), np.array([k.rule for k in tries]),
            np.array([k.a for k in tries]), np.array([k.b for k in tries]), self.margin, bar, self.scratch,
        )  # fmt: skip
        if chosen < 0:
            return
        best_keys = tries[chosen]
        if all(k is not best_keys for _, k in self.keys):
            self.keys.append((best_ms, best_keys))
        self.keys = sorted(((min(v, best_ms) if k is best_keys else v, k) for v, k in self.keys), key=lambda x: x[0])[
            :KEYS_KEPT
        ]
        self._keep(Start(float(best_ms), name, st))

    def size(self, start: Start) -> int:
        """Half rounds over the ranks."""
        return int(2 * start.state.size[0]) // self.problem.num_ranks

    def take(self) -> list[Start]:
        """What was kept, which is then forgotten."""
        taken, self.starts = self.starts, []
        return taken

    def _keep(self, start: Start) -> None:
        """Keep the best few of every size."""
        if any(s.step_ms == start.step_ms for s in self.starts):
            return
        alike = sorted([s for s in self.starts if self.size(s) == self.size(start)] + [start], key=lambda s: s.step_ms)
        others = [s for s in self.starts if self.size(s) != self.size(start)]
        self.starts = sorted(others + alike[:KEPT], key=lambda s: s.step_ms)


def twin(problem: Problem, max_stages: int, st: State) -> State:
    """A copy of a state."""
    out = make_state(problem, max_stages)
    copy_state(out, st)
    return out
