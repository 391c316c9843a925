"""Many quick starts: structures and priorities drawn at random, the best of them kept.

Knows: how to draw a structure (stages, directions of the rounds, an even partition) and a set of priorities, and
that priorities which served one structure well are worth trying on the next. Does not know: annealing.

A draw costs one list scheduling, and most die at the cutoff long before its end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octopipe.tune.anneal import State, copy_state, fit_flight, judge, make_state
from octopipe.tune.kernels import A_F, A_I, B_F, B_I, BANK, C_I, C_W, LOOK, NUM_GLOBALS, RHO, W_OVER, Problem, Scratch
from octopipe.tune.starts import NEVER, limit_flight, partition_evenly

KEYS_KEPT = 6
KEYS_DRAWN = 14
"""Per structure: the best priorities so far, and new ones."""
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


def draw_keys(problem: Problem, lot: np.random.Generator) -> Keys:
    """Priorities, limits and tolerances from the ranges in which good ones were seen."""
    r = float(problem.num_ranks)
    glob = np.zeros(NUM_GLOBALS)
    glob[A_F], glob[A_I] = 10 ** lot.uniform(-1, 1), 10 ** lot.uniform(-1, 1)
    glob[B_F], glob[B_I] = lot.uniform(-2 * r, 4 * r), lot.uniform(-2 * r, 4 * r)
    glob[C_I] = -1e3 if lot.random() < 0.5 else lot.uniform(-2 * r, 2 * r)
    glob[LOOK] = 0.0 if lot.random() < 0.5 else lot.uniform(0, 0.05)
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


def use_keys(problem: Problem, st: State, keys: Keys) -> None:
    """Set a state's priorities; offsets of stages and ops are cleared."""
    n = int(st.size[0])
    st.glob[:] = keys.glob
    st.offset[:, :n] = 0.0
    st.wiggle[:, :n] = 0.0
    st.flight[:] = problem.num_micro_batches
    if keys.rule == 1:
        st.flight[:n] = int(np.clip(keys.a, 1, problem.num_micro_batches))
    elif keys.rule == 2:
        for rank in range(problem.num_ranks):
            fit_flight(problem, st, rank, keys.a)
    elif keys.rule == 3:
        limit_flight(problem, st, keys.a, keys.b)


def draw_ranks(problem: Problem, max_stages: int, lot: np.random.Generator) -> tuple[str, list[int]]:
    """Stages' ranks: rounds over all ranks, up or down, the last one perhaps cut short."""
    ranks = problem.num_ranks
    stages = int(
        np.clip(
            round(ranks * lot.choice([1.5, 2, 2, 3, 3, 4, 4, 5, 6, 8]) + lot.integers(-1, 2) * (lot.random() < 0.4)),
            1,
            max_stages,
        )
    )
    kind = ("loop", "wave", "mixed")[int(lot.choice(3, p=[0.3, 0.5, 0.2]))]
    out: list[int] = []
    while len(out) < stages:
        number = len(out) // ranks
        down = {"loop": False, "wave": number % 2 == 1, "mixed": bool(lot.random() < 0.5)}[kind]
        out += range(ranks - 1, -1, -1) if down else range(ranks)
    out = out[:stages]
    if len(set(out)) < min(ranks, stages):
        out = [s % ranks for s in range(stages)]
    return f"{stages} stages, {kind}", out


class Lottery:
    """Draws starts and keeps the best few, of different shapes."""

    def __init__(self, problem: Problem, max_stages: int, scratch: Scratch, margin: np.ndarray, seed: tuple[int, ...]):
        self.problem, self.max_stages, self.scratch, self.margin = problem, max_stages, scratch, margin
        self.lot = np.random.default_rng(seed)
        self.keys: list[tuple[float, Keys]] = []
        self.starts: list[Start] = []
        self.draws = 0

    def draw(self, keep: int, recompute: bool) -> None:
        """One structure under old and new priorities."""
        self.draws += 1
        st = make_state(self.problem, self.max_stages)
        name, ranks = draw_ranks(self.problem, self.max_stages, self.lot)
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
        # Keys are kept per structure they were tried on, so a start far from the best may still use them up.
        bar = self.starts[-1].step_ms if len(self.starts) >= keep else np.inf
        best_ms, best_keys = bar, None
        tries = [k for _, k in self.keys] + [draw_keys(self.problem, self.lot) for _ in range(KEYS_DRAWN)]
        for keys in tries:
            use_keys(self.problem, st, keys)
            value = float(judge(self.problem, st, self.margin, best_ms, self.scratch))
            if value < best_ms:
                best_ms, best_keys = value, keys
        if best_keys is None:
            return
        use_keys(self.problem, st, best_keys)
        if all(k is not best_keys for _, k in self.keys):
            self.keys.append((best_ms, best_keys))
        self.keys = sorted(((min(v, best_ms) if k is best_keys else v, k) for v, k in self.keys), key=lambda x: x[0])[
            :KEYS_KEPT
        ]
        self._keep(Start(best_ms, name, st), keep)

    def _keep(self, start: Start, keep: int) -> None:
        """Keep the best, at most three of one shape."""
        if any(s.step_ms == start.step_ms for s in self.starts):
            return
        alike = [s for s in self.starts if s.name == start.name]
        if len(alike) >= 3:
            worst = max(alike, key=lambda s: s.step_ms)
            if worst.step_ms <= start.step_ms:
                return
            self.starts = [s for s in self.starts if s is not worst]
        self.starts = sorted([*self.starts, start], key=lambda s: s.step_ms)[:keep]


def twin(problem: Problem, max_stages: int, st: State) -> State:
    """A copy of a state."""
    out = make_state(problem, max_stages)
    copy_state(out, st)
    return out
