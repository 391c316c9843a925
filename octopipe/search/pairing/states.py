"""States of the search for pairs: a structure with the parameters of its orders; how they are drawn and moved.

Knows: loops and waves over balanced stages, the positions of ops in a periodic schedule, random changes. Does not know:
how a state is evaluated (`search`).

A state is either *free* (keys and flights for list scheduling, `schedule`) or *steady* (positions within a period and a
rotation, `rhythm`).

**Rotation.** In the steady state, every slot of a rank pairs an F with an I, and the number of slots between a
micro-batch's F and its I on the same rank equals the number of stages on its way. As many micro-batches are in flight
at once, and this determines the activation memory of a plan with pairs. `rotation` is the maximum number of
micro-batches that start in that time: fewer need less memory, and leave slots empty on all ranks in turn, so that all
pairs stay intact.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octopipe.plans.plan import Plan

Floats = NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class State:
    """A structure with keys."""

    bounds: list[int]
    rank: list[int]
    key_f: list[float]
    """In a free state, a stage's priority; in a steady one, the slot of its first F (`key_i`: of its first I)."""
    key_i: list[float]
    flight: list[int]
    """In a free state: a stage with this many micro-batches in flight runs no F alone."""
    numbers: list[float]
    """As `rhythm` reads them; `schedule` reads the first six."""
    rotation: int = 0
    """In a steady state, the largest number of micro-batches that start in one rotation; 0 in a free state."""

    def copy(self) -> State:
        return State(
            bounds=self.bounds[:],
            rank=self.rank[:],
            key_f=self.key_f[:],
            key_i=self.key_i[:],
            flight=self.flight[:],
            numbers=self.numbers[:],
            rotation=self.rotation,
        )

    @property
    def period(self) -> int:
        """The number of slots in which F and I of every stage run once."""
        return max(map(self.rank.count, set(self.rank)))

    def starts(self, count: int) -> Floats:
        """The slot in which each micro-batch enters a steady rhythm, relative to the first."""
        m = np.arange(count)
        turn = max(full_rotation(self.rank), self.rotation)
        return (self.period * (m + m // self.rotation * (turn - self.rotation))).astype(np.float64)


def full_rotation(rank: list[int]) -> int:
    """How many micro-batches enter while one passes through all stages, if every slot is used."""
    return max(1, math.ceil(len(rank) / max(map(rank.count, set(rank)))))


def places(rank: list[int]) -> tuple[list[float], list[float]]:
    """The slots of the first F and I of every stage: along the chain, each in the first slot that is free on its
    rank in every period."""
    period = max(map(rank.count, set(rank)))
    out: tuple[list[float], list[float]] = ([0.0] * len(rank), [0.0] * len(rank))
    at = -1
    for way, order in enumerate((range(len(rank)), reversed(range(len(rank))))):
        taken: set[tuple[int, int]] = set()
        for s in order:
            at += 1
            while (rank[s], at % period) in taken:
                at += 1
            taken.add((rank[s], at % period))
            out[way][s] = float(at)
    return out


class Drawing:
    """Draws states for given costs, ranks and micro-batches, and changes them."""

    def __init__(self, proxy: Floats, num_ranks: int, num_micro_batches: int, dice: random.Random):
        self.proxy, self.num_ranks, self.num_micro_batches, self.dice = proxy, num_ranks, num_micro_batches, dice
        self.num_layers = proxy.size

    def drawn(self, chunks: int, wave: bool, *, varied: bool) -> State:
        """A free state: a loop or a wave of stages of about equal duration."""
        size, ranks, dice = chunks * self.num_ranks, self.num_ranks, self.dice
        ahead = np.concatenate(([0.0], np.cumsum(self.proxy)))
        shares = np.array([dice.uniform(0.9, 1.1) if varied else 1.0 for _ in range(size)])
        goals = ahead[-1] * np.cumsum(shares)[:-1] / shares.sum()
        bounds = [0]
        for k, goal in enumerate(goals):
            cut = int(np.argmin(np.abs(ahead - goal)))
            bounds.append(max(bounds[-1] + 1, min(cut, self.num_layers - (size - 1 - k))))
        bounds.append(self.num_layers)
        turn = [s % (2 * ranks) for s in range(size)]
        rank = [r if r < ranks else 2 * ranks - 1 - r for r in turn] if wave else [s % ranks for s in range(size)]
        depth = dice.choice((0.0, 0.5, 1.0, 2.0)) if varied else 1.0
        unit = float(self.proxy.sum()) / size
        lead = dice.choice((0.5, 0.7, 0.85, 1.0, 1.2, 2.0, 1e3)) if varied else 1.0
        return State(
            bounds=bounds,
            rank=rank,
            key_f=[-depth * s for s in range(size)],
            key_i=[dice.choice((-1.0, 0.0, 1.0)) * s if varied else 0.0 for s in range(size)],
            flight=self._flights(size, lead),
            numbers=[
                unit * (dice.choice((0.0, 0.1, 0.3, 0.6, 1.0)) if varied else 0.3),
                dice.choice((0.2, 0.5, 1.0)) if varied else 0.5,
                dice.choice((0.0, 0.5, 0.9, 1.1)) if varied else 0.9,
                dice.choice((0.5, 1.0)) if varied else 1.0,
                dice.choice((0.3, 0.7, 1.0)) if varied else 0.7,
                dice.choice((0.0, 0.7, 0.85, 0.95)) if varied else 0.0,
                0.0,
                0.0,
                0.0,
            ],
        )

    def steady(self, state: State, rotation: int, *, fused: float = 1.1) -> State:
        """The structure of a state in a steady rhythm."""
        out = state.copy()
        out.key_f, out.key_i = places(out.rank)
        out.rotation = max(1, rotation)
        out.numbers = [math.inf, 0.5, fused, 0.0, 0.7, 0.0, 0.0, 1.0, 0.0]
        return out

    def _flights(self, size: int, lead: float) -> list[int]:
        """`lead` times the number of micro-batches that pass a stage between an F and its I, if every step on the way
        takes as long as a pair; between 1 and all micro-batches."""
        per_rank = size / self.num_ranks
        most = self.num_micro_batches
        return [min(most, max(1, math.ceil(lead * 2 * (size - s) / per_rank))) for s in range(size)]

    def of_plan(self, plan: Plan) -> State | None:
        """The structure of a plan with default keys; None if it holds layers twice or its paths fork."""
        if len(plan.routes) != 1 or plan.forks:
            return None
        stages = [plan.stages[s] for s in plan.routes[0]]
        state = self.drawn(1, True, varied=False)
        size = len(stages)
        state.bounds = [0, *(s.stop for s in stages)]
        state.rank = [s.rank for s in stages]
        state.key_f = [-1.0 * s for s in range(size)]
        state.key_i = [0.0] * size
        state.flight = self._flights(size, 1.0)
        return state

    def move(self, state: State) -> None:
        """Apply one random change in place."""
        dice, size = self.dice, len(state.rank)
        kind = dice.random()
        if kind < 0.3 and size > 1:  # a border moves
            k = dice.randrange(1, size)
            to = state.bounds[k] + dice.choice((-1, 1))
            if state.bounds[k - 1] < to < state.bounds[k + 1]:
                state.bounds[k] = to
        elif kind < (0.31 if state.rotation else 0.36) and size > 1:  # two stages change ranks
            a, b = dice.randrange(size), dice.randrange(size)
            state.rank[a], state.rank[b] = state.rank[b], state.rank[a]
            if state.rotation:
                state.key_f, state.key_i = places(state.rank)
        elif kind < (0.5 if state.rotation else 0.40) and size > 2:  # borders between two move together
            a, b = sorted(dice.sample(range(1, size), 2)) if size > 2 else (1, 1)
            step = dice.choice((-1, 1))
            moved = [x + step if a <= k <= b else x for k, x in enumerate(state.bounds)]
            if all(x < y for x, y in itertools.pairwise(moved)) and moved[-1] == self.num_layers:
                state.bounds = moved
        elif kind < 0.55:
            state.key_f[dice.randrange(size)] += self._shift(state)
        elif kind < 0.66:
            state.key_i[dice.randrange(size)] += self._shift(state)
        elif kind < 0.8 and state.rotation:
            what = dice.random()
            if what < 0.3:
                state.rotation = max(1, state.rotation + dice.choice((-1, 1)))
            elif what < 0.7:
                state.numbers[8] = max(0.0, state.numbers[8] + dice.choice((-6.0, -2.0, -1.0, 1.0, 2.0, 6.0)))
            elif what < 0.85:
                state.numbers[6] = max(0.0, state.numbers[6] + dice.choice((-8.0, -2.0, 2.0, 8.0)))
            else:
                state.numbers[7] = float(dice.choice((0, 1, 1, 2, 3)))
        elif kind < 0.76:
            s = dice.randrange(size)
            state.flight[s] = min(self.num_micro_batches, max(1, state.flight[s] + dice.choice((-3, -2, -1, 1, 2, 3))))
        elif kind < 0.8:
            scale = math.exp(dice.gauss(0.0, 0.2))
            state.flight = [max(1, round(n * scale)) for n in state.flight]
        elif kind < 0.88:
            unit = float(self.proxy.sum()) / size
            if math.isinf(state.numbers[0]):
                state.numbers[0] = unit * dice.choice((0.5, 1.0, 2.0, 4.0))
            elif state.rotation and dice.random() < 0.3:
                state.numbers[0] = math.inf
            else:
                state.numbers[0] *= math.exp(dice.gauss(0.0, 0.5))
                if dice.random() < 0.1:
                    state.numbers[0] = unit * dice.random()
        else:
            k = dice.randrange(1, 6)
            state.numbers[k] = min(1.2, max(0.0, state.numbers[k] + dice.gauss(0.0, 0.2)))

    def _shift(self, state: State) -> float:
        return self.dice.choice((-2.0, -1.0, 1.0, 2.0)) if state.rotation else self.dice.gauss(0.0, 1.5)
