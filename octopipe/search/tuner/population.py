"""Population annealing of structures: several members are annealed, and bad ones are replaced by copies of good ones.

Knows: a member (a structure and its evolving population of keys) and how a population is resampled. Does not know:
time, threads or plans.

The result of a single annealing run depends strongly on chance. Therefore several members are annealed at a falling
temperature. Between temperature steps, the number of descendants of a member with score t is proportional to
exp(-t / scale), where the scale is a small multiple of the temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import math

import numpy as np

from octopipe.search.tuner.core.anneal import (
    BEST_MS, BRED, DRAWN, HALT, HEAT, KNOWN, LIMIT_MS, MAY_RECOMPUTE, MOVES, NEAR_KNOWN, NUM_TASKS, NUM_VALUES, SCORE,
    STEP_MS, WORK_MS, walk,
)  # fmt: skip
from octopipe.search.tuner.core.decode import LAPS
from octopipe.search.tuner.core.rows import NUM_KEYS
from octopipe.search.tuner.core.problem import Problem, Scratch, make_scratch, make_structure
from octopipe.search.tuner.settings import SETTINGS


class Start(NamedTuple):
    """A structure with keys, and the step time that they give."""

    step_ms: float
    """The step takes this long under the first keys."""
    name: str
    """This says where the structure comes from."""
    structure: np.ndarray
    """The rows are described in core/problem.py."""
    keys: np.ndarray
    """These are one or several vectors of keys, the best first."""


class Judge:
    """One thread's working space for schedules, and its random numbers."""

    def __init__(
        self, problem: Problem, max_stages: int, rng: np.ndarray, work_ms: float = 0.0, may_recompute: bool = False
    ) -> None:
        self.problem, self.max_stages, self.rng = problem, max_stages, rng
        self.scratch: Scratch = make_scratch(problem, max_stages, LAPS)
        self.back, self.best = make_structure(problem, max_stages), make_structure(problem, max_stages)
        self.best_keys, self.pace = np.zeros(NUM_KEYS), np.full(LAPS, np.inf)
        self.task, self.value, self.log = np.zeros(NUM_TASKS, np.int64), np.zeros(NUM_VALUES), np.zeros((64, 4))
        self.value[WORK_MS] = work_ms
        self.task[MAY_RECOMPUTE] = may_recompute

    def breed(
        self, structure: np.ndarray, population: np.ndarray, values: np.ndarray, *, known: int = 0, near: int = 0,
        drawn: int = 0, bred: int = 0, limit_ms: float = np.inf,
    ) -> float:  # fmt: skip
        """Find the best of many keys for a structure, put them first in the population, and return the step time.

        The first `known` keys of the population are evaluated, then variants of them, new ones and children. The
        scratch holds the orders of the best.
        """
        self.task[[KNOWN, NEAR_KNOWN, DRAWN, BRED, MOVES]] = known, near, drawn, bred, 0
        self.value[LIMIT_MS] = limit_ms
        walk(
            self.problem, structure, self.back, self.best, population, values, self.best_keys, self.pace, self.scratch,
            self.rng, self.task, self.value, self.log,
        )  # fmt: skip
        return float(self.value[STEP_MS]) if values[0] < np.inf or known + drawn + bred == 0 else float("inf")

    def halt(self) -> None:
        """Stop the evaluation that another thread runs with this object, after its present schedule."""
        self.task[HALT] = 1

    def step_ms(self, start: Start) -> float:
        """The step time of a structure under its keys; its orders are left in the scratch."""
        keys = np.atleast_2d(start.keys)[:1].copy()
        # A copy: another thread may be walking from the same start.
        return self.breed(start.structure.copy(), keys, np.full(1, np.inf))


class Member:
    """A member of a population."""

    def __init__(self, start: Start) -> None:
        self.structure, self.name = start.structure.copy(), start.name
        keys = np.atleast_2d(start.keys)[: SETTINGS.key_population]
        self.population = np.zeros((SETTINGS.key_population, NUM_KEYS))
        self.population[: len(keys)] = keys
        self.known = len(keys)
        self.values = np.full(SETTINGS.key_population, np.inf)
        self.step_ms = self.score = np.inf
        self.pace = np.full(LAPS, np.inf)
        """This is the pace of the member's schedule (see `Scratch.pace`)."""

    def start(self) -> Start:
        return Start(self.step_ms, self.name, self.structure.copy(), self.population[:1].copy())

    def copy(self) -> Member:
        other = Member(self.start())
        other.population[:], other.values[:], other.known = self.population, self.values, self.known
        other.step_ms, other.score, other.pace[:] = self.step_ms, self.score, self.pace
        return other


class Population:
    """Several members, and the best structure and keys that any of them reached."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.members: list[Member] = []
        self.best: Start | None = None

    def add(self, start: Start, effort: float = 1.0) -> int:
        """Add a member that begins with this start, after breeding keys for it; returns the number of evaluations."""
        member = Member(start)
        drawn, bred = (max(int(effort * share * SETTINGS.bred), 4) for share in (0.25, 0.75))
        if self._judge(member, drawn=drawn, bred=bred):
            self.members.append(member)
        return drawn + bred

    def _judge(self, member: Member, drawn: int = 0, bred: int = 0) -> bool:
        """Set a member's step time and score under its best keys; returns False if it does not fit."""
        known = member.known if drawn + bred else 0
        judge = self.judge
        member.step_ms = judge.breed(
            member.structure, member.population, member.values, known=known, drawn=drawn, bred=bred
        )
        member.score, member.pace[:] = float(judge.value[SCORE]), judge.pace
        self._keep(member.step_ms, member.name, member.structure, member.population[0])
        return member.step_ms < np.inf

    def run(self, member: Member, moves: int, temperature: float) -> tuple[int, np.ndarray]:
        """Make this many moves of one member; returns the number of schedules evaluated and a log line for every
        improvement."""
        judge, best_ms = self.judge, self.best.step_ms if self.best is not None else np.inf
        judge.task[[KNOWN, NEAR_KNOWN, DRAWN, BRED, MOVES]] = 0, 0, 0, 0, moves
        judge.value[[HEAT, STEP_MS, SCORE, BEST_MS]] = temperature, member.step_ms, member.score, best_ms
        judged, lines = walk(
            judge.problem, member.structure, judge.back, judge.best, member.population, member.values, judge.best_keys,
            member.pace, judge.scratch, judge.rng, judge.task, judge.value, judge.log,
        )  # fmt: skip
        member.step_ms, member.score = float(judge.value[STEP_MS]), float(judge.value[SCORE])
        self._keep(float(judge.value[BEST_MS]), member.name, judge.best, judge.best_keys)
        return int(judged), judge.log[:lines]

    def resample(self, temperature: float, dice: np.random.Generator) -> None:
        """Replace members that are behind by copies of members that are ahead."""
        scores = np.array([m.score for m in self.members])
        scale = SETTINGS.resample_scale * temperature * scores.min()
        # math.exp, because the last digit of np.exp of an array depends on the processor.
        weight = np.array([math.exp(-(score - scores.min()) / scale) for score in scores])
        reach = np.cumsum(weight) / weight.sum()
        count = len(self.members)
        chosen = np.minimum(np.searchsorted(reach, (dice.random() + np.arange(count)) / count), count - 1)
        kept: list[Member] = []
        for i in chosen:
            member = self.members[int(i)]
            kept.append(member.copy() if any(member is m for m in kept) else member)
        self.members = kept

    def admit(self, others: list[Member]) -> None:
        """Replace members that are behind by copies of better members of other lanes."""
        size = len(self.members)
        self.members = sorted([*self.members, *(m.copy() for m in others)], key=lambda m: m.score)[:size]

    def rejudge(self) -> None:
        """Evaluate all members again after more memory was reserved, and drop those that no longer fit."""
        best, self.best = self.best, None
        self.members = [m for m in self.members if self._judge(m)]
        if best is not None:
            self._keep(self.judge.step_ms(best), best.name, best.structure, best.keys[0])

    def results(self) -> list[Start]:
        """The best result of the population and the present state of every member, the best first."""
        found = [] if self.best is None else [self.best]
        return sorted([*found, *(m.start() for m in self.members)], key=lambda s: s.step_ms)

    def _keep(self, step_ms: float, name: str, structure: np.ndarray, keys: np.ndarray) -> None:
        if step_ms < (self.best.step_ms if self.best is not None else np.inf):
            self.best = Start(step_ms, name, structure.copy(), keys.copy()[None])
