"""Starting points of searches: structures and keys drawn at random, of which the best are kept.

Knows: how to draw a structure (stages, their order over the ranks, sizes) and keys for it, and that shapes and keys
that worked well for one structure are worth trying on the next. Does not know: how the kept ones are annealed.

The result of an annealing run depends more on its start than on the run: over hundreds of runs on the published layer
times, the step times of starts and of results correlate by 0.78 to 0.95. Good starts have two properties that a
balanced partition in complete rounds lacks: small stages in the first round (so that every rank starts to work early)
and an incomplete last round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octopipe.search.tuner.core.anneal import balance
from octopipe.search.tuner.core.rows import NUM_KEYS
from octopipe.search.tuner.core.problem import BOUNDS, RANK, REDO, SIZE, TOTAL, Problem, make_structure
from octopipe.search.tuner.population import Judge, Start
from octopipe.search.tuner.settings import SETTINGS

SMALLEST = 0.1
"""The smallest size that is wanted of a visit to a rank; visits in the middle of the way have size 1."""
WIDE = 3.0
"""A visit may consist of several stages only if visits have this many layers on average."""
ROUNDS_SPREAD = 16
"""If the number of rounds is not whole, the number of stages varies up and down by one per this many ranks."""
MORE_VISITS = 2
"""A shape similar to another one has at most this many visits more or fewer."""


class Shape(NamedTuple):
    """What a structure is drawn from: the way over the ranks and the wanted sizes of stages."""

    way: tuple[int, ...]
    """These are the ranks in the order in which a micro-batch visits them."""
    stages_in_visit: tuple[int, ...]
    """Every visit consists of this many stages, one after another on the same rank."""
    kind: str
    """How the way goes round the ranks: one of `Settings.kinds`, which are explained at `go_round`."""
    small_first: float = 0.0
    """The first visit is smaller than the others by this share; the difference fades out within a round."""
    small_last: float = 0.0
    """The last visit is smaller than the others by this share, in the same way."""

    @property
    def name(self) -> str:
        return f"{sum(self.stages_in_visit)} stages, {self.kind}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of every stage."""
        return tuple(rank for rank, count in zip(self.way, self.stages_in_visit) for _ in range(count))

    def sizes(self, num_ranks: int) -> np.ndarray:
        """The wanted work of every stage, in proportion."""
        at = np.arange(len(self.way))
        first, last = np.maximum(0.0, 1.0 - at / num_ranks), np.maximum(0.0, 1.0 - at[::-1] / num_ranks)
        visits = np.maximum(1.0 - self.small_first * first - self.small_last * last, SMALLEST)
        return np.repeat(visits / self.stages_in_visit, self.stages_in_visit)


def draw_shape(problem: Problem, max_stages: int, stages: int, kind: str, lot: np.random.Generator) -> Shape:
    """A random way over the ranks, with random wanted sizes."""
    small = lot.choice(SETTINGS.small, 2)
    way = go_round(problem.ranks, min(max(stages, 1), max_stages), kind, lot)
    shape = Shape(way, (1,) * len(way), kind, float(small[0]), float(small[1]))
    while _wide(problem, shape) and lot.random() < SETTINGS.sometimes:
        shape = divide(shape, max_stages, lot)
    return shape


def _wide(problem: Problem, shape: Shape) -> bool:
    return problem.layers >= WIDE * sum(shape.stages_in_visit)


def divide(shape: Shape, max_stages: int, lot: np.random.Generator) -> Shape:
    """The shape with one visit divided into one more stage."""
    if sum(shape.stages_in_visit) >= max_stages:
        return shape
    at = int(lot.integers(len(shape.way)))
    return shape._replace(
        stages_in_visit=tuple(stages_in_visit + (i == at) for i, stages_in_visit in enumerate(shape.stages_in_visit))
    )


def go_round(ranks: int, stages: int, kind: str, lot: np.random.Generator) -> tuple[int, ...]:
    """The ranks of the stages: rounds over all ranks, of which the last may be incomplete.

    A "loop" begins every round at rank 0; a "turn" is a loop whose last round runs backward; a "wave" reverses after
    every round and may begin at any rank; in a "mixed" way, every round after the first runs up or down at random; in a
    "skip", some rounds leave out ranks or run backward.
    """
    up, down = list(range(ranks)), list(range(ranks - 1, -1, -1))
    out: list[int] = []
    if kind == "wave":
        first = int(lot.integers(2 * ranks)) if lot.random() < 0.5 else 0
        out = [(up + down)[(first + s) % (2 * ranks)] for s in range(stages)]
    while len(out) < stages:
        through = up
        if out and kind == "skip" and lot.random() < 0.5:
            some = int(lot.integers(max(ranks // 2, 1), ranks + 1))
            through = sorted(lot.choice(ranks, some, replace=False).tolist())
        turn = float(len(out) + ranks >= stages)
        back = {"mixed": 0.5, "skip": SETTINGS.sometimes, "turn": turn}.get(kind, 0.0)
        if out and lot.random() < back:
            through = through[::-1]
        out += through
    out = out[:stages]
    if len(set(out)) < min(ranks, stages):
        out = [s % ranks for s in range(stages)]
    return tuple(out)


def near_shape(problem: Problem, max_stages: int, shape: Shape, lot: np.random.Generator) -> Shape:
    """A shape similar to this one: with other numbers of visits or of stages per visit, or with other sizes."""
    way, stages_in_visit, visits = shape.way, shape.stages_in_visit, len(shape.way)
    if (_wide(problem, shape) or max(stages_in_visit) > 1) and lot.random() < SETTINGS.sometimes:
        if max(stages_in_visit) == 1 or (_wide(problem, shape) and lot.random() < 0.5):
            stages_in_visit = divide(shape, max_stages, lot).stages_in_visit
        else:
            at = int(lot.choice(np.flatnonzero(np.array(stages_in_visit) > 1)))
            stages_in_visit = tuple(n - (i == at) for i, n in enumerate(stages_in_visit))
    elif lot.random() < 0.5:
        most = max_stages - sum(stages_in_visit) + visits
        step = MORE_VISITS
        visits = min(max(visits + int(lot.integers(-step, step + 1)), min(problem.ranks, visits)), most)
        way = (way + go_round(problem.ranks, visits, shape.kind, lot)[len(way) :])[:visits]
        stages_in_visit = (stages_in_visit + (1,) * visits)[:visits]
        if len(set(way)) < len(set(shape.way)):
            way, stages_in_visit = shape.way, shape.stages_in_visit
    elif lot.random() < SETTINGS.sometimes:
        way = go_round(problem.ranks, visits, shape.kind, lot)
    small = np.array((shape.small_first, shape.small_last))
    small += lot.normal(0.0, SETTINGS.keys.step, 2) * (lot.random(2) < 0.5)
    first, last = np.clip(small, 0.0, max(SETTINGS.small))
    return Shape(way, stages_in_visit, shape.kind, float(first), float(last))


def partition_evenly(
    judge: Judge, ranks: tuple[int, ...], sizes: np.ndarray, *, even: float, tilt: float, rising: bool
) -> np.ndarray:
    """A structure of stages on these ranks: cut in proportion to `sizes`, then annealed on its imbalance.

    `even` is the weight of deviations from the wanted sizes: stages that take equally long keep the ranks in step, and
    of everything that was tried this improved starts most. `tilt` is the weight of I relative to F. With `rising`,
    early stages are assumed to hold more micro-batches.
    """
    problem, stages = judge.problem, len(ranks)
    st = make_structure(problem, judge.max_stages)
    total = problem.whole[TOTAL]
    share = total / max(total[-1], 1e-300)
    wanted = np.asarray(sizes, np.float64) / np.sum(sizes)
    reach = np.cumsum(wanted)
    bounds = [0]
    for s in range(1, stages):
        cut = int(np.argmin(np.abs(share - reach[s - 1])))
        bounds.append(min(max(cut, bounds[-1] + 1), problem.layers - (stages - s)))
    st[SIZE, 0] = stages
    st[BOUNDS, : stages + 1] = [*bounds, problem.layers]
    st[RANK, :stages] = ranks
    balance(
        problem, st, judge.back, judge.scratch, judge.rng, SETTINGS.balance_moves, float(even), float(tilt),
        bool(rising), wanted,
    )  # fmt: skip
    return st


class Starts:
    """Draws initial structures and keeps the best few of every size."""

    def __init__(self, judge: Judge, seed: tuple[int, ...]) -> None:
        self.judge, self.problem, self.max_stages = judge, judge.problem, judge.max_stages
        self.lot = np.random.default_rng(seed)
        self.keys: dict[int, list[tuple[float, np.ndarray]]] = {}
        """These are the best keys for structures of each size, the best first."""
        self.kept: list[Start] = []
        self.draws = 0
        self.deck: list[tuple[float, str]] = []
        """The pairs (number of rounds, kind of way) that are still to be drawn."""
        self.shapes: list[tuple[float, Shape]] = []
        """These are the best shapes of every size, the best first."""

    def draw(self, recompute: bool) -> Start | None:
        """Draw one structure and evaluate it under known and new keys."""
        self.draws += 1
        shape = self._shape()
        structure = partition_evenly(
            self.judge,
            shape.ranks,
            shape.sizes(self.problem.ranks),
            even=float(self.lot.choice(SETTINGS.even)),
            tilt=float(self.lot.random()),
            rising=bool(self.lot.random() >= SETTINGS.sometimes),
        )
        structure[REDO, : int(structure[SIZE, 0])] = recompute
        start = self.keyed(shape.name, structure)
        if start is not None:
            self._remember(start.step_ms, shape)
        return start

    def first(self, rounds: float, wave: bool, recompute: bool) -> Start | None:
        """Evaluate one of the structures that a search begins with: even stages, a loop or a wave, under more keys than
        later ones."""
        stages = min(max(round(self.problem.ranks * rounds), 1), self.max_stages)
        kind = "wave" if wave else "loop"
        up = range(self.problem.ranks)
        turn = [*up, *reversed(up)] if wave else up
        shape = Shape(tuple(turn[s % len(turn)] for s in range(stages)), (1,) * stages, kind)
        even = sorted(SETTINGS.even)[len(SETTINGS.even) // 2]
        structure = partition_evenly(self.judge, shape.ranks, np.ones(stages), even=even, tilt=1.0, rising=True)
        structure[REDO, :stages] = recompute
        return self.keyed(shape.name, structure, SETTINGS.key_population)

    def keyed(self, name: str, structure: np.ndarray, drawn: int = SETTINGS.kept) -> Start | None:
        """Evaluate a structure under the best known keys, variants of them and new keys; keep it if it is good."""
        size = self._size(int(structure[SIZE, 0]))
        alike = [s for s in self.kept if self.size(s) == size]
        bar = alike[-1].step_ms if len(alike) >= SETTINGS.kept else np.inf
        known = self._known_keys(size)
        near = SETTINGS.keys_near if known else 0
        population = np.zeros((len(known) + near + drawn, NUM_KEYS))
        population[: len(known)] = known or 0.0
        values = np.full(len(population), np.inf)
        step_ms = self.judge.breed(
            structure, population, values, known=len(known), near=near, drawn=drawn, limit_ms=bar
        )
        if not step_ms < bar:
            return None
        keys = next((k for k in known if np.array_equal(k, population[0])), population[0].copy())
        self._learn_keys(step_ms, keys, size)
        start = Start(step_ms, name, structure, keys[None].copy())
        self._keep(start)
        return start

    def size(self, start: Start) -> int:
        """The number of half rounds over the ranks."""
        return self._size(int(start.structure[SIZE, 0]))

    def _size(self, stages: int) -> int:
        return 2 * stages // self.problem.ranks

    def _shape(self) -> Shape:
        """A new shape, or one similar to a shape that did well; the best one most often."""
        if self.shapes and self.lot.random() < SETTINGS.again * self.draws / (self.draws + SETTINGS.spread):
            chosen = self.shapes[int(self.lot.random() ** 2 * len(self.shapes))][1]
            return near_shape(self.problem, self.max_stages, chosen, self.lot)
        if not self.deck:
            self.deck = [(rounds, kind) for rounds in SETTINGS.rounds for kind in SETTINGS.kinds]
            self.lot.shuffle(self.deck)
        rounds, kind = self.deck.pop()
        low = high = round(self.problem.ranks * rounds)
        if rounds % 1.0:
            some = self.problem.ranks // ROUNDS_SPREAD
            low, high = low - some, high + some
        return draw_shape(self.problem, self.max_stages, int(self.lot.integers(low, high + 1)), kind, self.lot)

    def _known_keys(self, size: int) -> list[np.ndarray]:
        """The best keys for structures of this size, and for all sizes."""
        every = sorted((x for known in self.keys.values() for x in known), key=lambda x: x[0])
        found: list[np.ndarray] = []
        for _, keys in self.keys.get(size, []) + every[: SETTINGS.kept]:
            if all(keys is not k for k in found):
                found.append(keys)
        return found

    def _learn_keys(self, step_ms: float, keys: np.ndarray, size: int) -> None:
        known = self.keys.get(size, [])
        before = min((v for v, k in known if k is keys), default=np.inf)
        others = [x for x in known if x[1] is not keys]
        self.keys[size] = sorted([*others, (min(step_ms, before), keys)], key=lambda x: x[0])[: SETTINGS.kept]

    def learn(self, other: Starts) -> None:
        """Remember what another lane found to be good."""
        for step_ms, shape in list(other.shapes):
            if all(shape is not s for _, s in self.shapes):
                self._remember(step_ms, shape)
        for size, known in dict(other.keys).items():
            for step_ms, keys in known:
                self._learn_keys(step_ms, keys, size)

    def _remember(self, step_ms: float, shape: Shape) -> None:
        size = self._size(len(shape.ranks))
        alike = [x for x in self.shapes if self._size(len(x[1].ranks)) == size] + [(step_ms, shape)]
        others = [x for x in self.shapes if self._size(len(x[1].ranks)) != size]
        best = sorted(alike, key=lambda x: x[0])[: SETTINGS.kept]
        self.shapes = sorted(others + best, key=lambda x: x[0])

    def take(self) -> list[Start]:
        """Hand out what was kept, and forget it."""
        taken, self.kept = self.kept, []
        return taken

    def _keep(self, start: Start) -> None:
        """Keep the best few of every size."""
        if any(s.step_ms == start.step_ms for s in self.kept):
            return
        size = self.size(start)
        alike = sorted([s for s in self.kept if self.size(s) == size] + [start], key=lambda s: s.step_ms)
        others = [s for s in self.kept if self.size(s) != size]
        self.kept = sorted(others + alike[: SETTINGS.kept], key=lambda s: s.step_ms)
