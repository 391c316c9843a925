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
"""The least size that is asked of a stage; the others are asked for 1."""
WIDE = 3.0
"""A visit may fall into several stages only where visits have so many layers on average."""
ROUNDS_SPREAD = 16
"""Where the number of rounds is not whole, the number of stages varies by one in so many ranks."""
MORE_VISITS = 2
"""A shape like another one has at most so many visits more or fewer."""


class Shape(NamedTuple):
    """What a structure is drawn from."""

    way: tuple[int, ...]
    """The ranks in the order in which a micro-batch visits them."""
    parts: tuple[int, ...]
    """How many stages, one after another on its rank, every visit consists of."""
    kind: str
    small_first: float = 0.0
    """How much smaller than the others the very first visit is to be; this fades out within a round."""
    small_last: float = 0.0

    @property
    def name(self) -> str:
        return f"{sum(self.parts)} stages, {self.kind}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the stages."""
        return tuple(rank for rank, parts in zip(self.way, self.parts) for _ in range(parts))

    def sizes(self, num_ranks: int) -> np.ndarray:
        """Work wanted of every stage, in proportion."""
        at = np.arange(len(self.way))
        first, last = np.maximum(0.0, 1.0 - at / num_ranks), np.maximum(0.0, 1.0 - at[::-1] / num_ranks)
        visits = np.maximum(1.0 - self.small_first * first - self.small_last * last, SMALLEST)
        return np.repeat(visits / self.parts, self.parts)


def draw_shape(problem: Problem, max_stages: int, stages: int, kind: str, lot: np.random.Generator) -> Shape:
    """A way round the ranks with stages of drawn sizes."""
    small = lot.choice(SETTINGS.small, 2)
    way = go_round(problem.ranks, min(max(stages, 1), max_stages), kind, lot)
    shape = Shape(way, (1,) * len(way), kind, float(small[0]), float(small[1]))
    while _wide(problem, shape) and lot.random() < SETTINGS.divided:
        shape = divide(shape, max_stages, lot)
    return shape


def _wide(problem: Problem, shape: Shape) -> bool:
    return problem.layers >= WIDE * sum(shape.parts)


def divide(shape: Shape, max_stages: int, lot: np.random.Generator) -> Shape:
    """One visit in one part more."""
    if sum(shape.parts) >= max_stages:
        return shape
    at = int(lot.integers(len(shape.way)))
    return shape._replace(parts=tuple(parts + (i == at) for i, parts in enumerate(shape.parts)))


def go_round(ranks: int, stages: int, kind: str, lot: np.random.Generator) -> tuple[int, ...]:
    """Stages' ranks: rounds over all ranks, the last one cut short.

    Loops begin every round at the same rank, turns go the last one back; waves always turn round, the first time
    anywhere; mixed ones go up or down as it falls; some rounds of skip leave ranks out.
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
        back = {"mixed": 0.5, "skip": SETTINGS.back_skip, "turn": turn}.get(kind, 0.0)
        if out and lot.random() < back:
            through = through[::-1]
        out += through
    out = out[:stages]
    if len(set(out)) < min(ranks, stages):
        out = [s % ranks for s in range(stages)]
    return tuple(out)


def near_shape(problem: Problem, max_stages: int, shape: Shape, lot: np.random.Generator) -> Shape:
    """A shape like this one: a few visits more or less, other parts, or other sizes."""
    way, parts, visits = shape.way, shape.parts, len(shape.way)
    if (_wide(problem, shape) or max(parts) > 1) and lot.random() < SETTINGS.divided:
        if max(parts) == 1 or (_wide(problem, shape) and lot.random() < SETTINGS.near_divide):
            parts = divide(shape, max_stages, lot).parts
        else:
            at = int(lot.choice(np.flatnonzero(np.array(parts) > 1)))
            parts = tuple(n - (i == at) for i, n in enumerate(parts))
    elif lot.random() < 0.5:
        most = max_stages - sum(parts) + visits
        step = MORE_VISITS
        visits = min(max(visits + int(lot.integers(-step, step + 1)), min(problem.ranks, visits)), most)
        way = (way + go_round(problem.ranks, visits, shape.kind, lot)[len(way) :])[:visits]
        parts = (parts + (1,) * visits)[:visits]
        if len(set(way)) < len(set(shape.way)):
            way, parts = shape.way, shape.parts
    elif lot.random() < SETTINGS.near_way:
        way = go_round(problem.ranks, visits, shape.kind, lot)
    small = np.array((shape.small_first, shape.small_last))
    small += lot.normal(0.0, SETTINGS.near_size_step, 2) * (lot.random(2) < 0.5)
    first, last = np.clip(small, 0.0, SETTINGS.small_most)
    return Shape(way, parts, shape.kind, float(first), float(last))


def partition_evenly(
    judge: Judge, ranks: tuple[int, ...], sizes: np.ndarray, *, even: float, tilt: float, rising: bool
) -> np.ndarray:
    """A structure of stages on these ranks: cut at equal work, then annealed on the imbalance.

    `even` weighs stages that differ from their wanted sizes: ranks hand micro-batches on in step where stages take
    equally long, and of all that was tried this made starts better by most; `tilt` is how much their I counts beside
    their F. `rising`: early stages are taken to hold more micro-batches.
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
    """Draws starts and keeps the best few, of different sizes."""

    def __init__(self, judge: Judge, seed: tuple[int, ...]) -> None:
        self.judge, self.problem, self.max_stages = judge, judge.problem, judge.max_stages
        self.lot = np.random.default_rng(seed)
        self.keys: dict[int, list[tuple[float, np.ndarray]]] = {}
        """By size, the best first."""
        self.kept: list[Start] = []
        self.draws = 0
        self.deck: list[tuple[float, str]] = []
        """Rounds and kinds still to be drawn."""
        self.shapes: list[tuple[float, Shape]] = []
        """The best shapes of every size."""

    def draw(self, recompute: bool) -> Start | None:
        """One structure under old and new keys."""
        self.draws += 1
        shape = self._shape()
        structure = partition_evenly(
            self.judge,
            shape.ranks,
            shape.sizes(self.problem.ranks),
            even=float(self.lot.choice(SETTINGS.evenness)),
            tilt=float(self.lot.choice(SETTINGS.tilts)),
            rising=bool(self.lot.random() < SETTINGS.rising),
        )
        structure[REDO, : int(structure[SIZE, 0])] = recompute
        start = self.keyed(shape.name, structure)
        if start is not None:
            self._remember(start.step_ms, shape)
        return start

    def first(self, rounds: float, wave: bool, recompute: bool) -> Start | None:
        """One of the structures a search begins with: even stages, a loop or a wave, under more keys than later."""
        stages = min(max(round(self.problem.ranks * rounds), 1), self.max_stages)
        kind = "wave" if wave else "loop"
        up = range(self.problem.ranks)
        turn = [*up, *reversed(up)] if wave else up
        shape = Shape(tuple(turn[s % len(turn)] for s in range(stages)), (1,) * stages, kind)
        structure = partition_evenly(self.judge, shape.ranks, np.ones(stages), even=4.0, tilt=1.0, rising=True)
        structure[REDO, :stages] = recompute
        return self.keyed(shape.name, structure, SETTINGS.keys_first)

    def keyed(self, name: str, structure: np.ndarray, drawn: int = SETTINGS.kept) -> Start | None:
        """A structure under the best of known keys, some like them and some new ones; kept if it is good."""
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
        """Half rounds over the ranks."""
        return self._size(int(start.structure[SIZE, 0]))

    def _size(self, stages: int) -> int:
        return 2 * stages // self.problem.ranks

    def _shape(self) -> Shape:
        """A new shape, or one like those that did well; the best most of all."""
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
        """The best keys for structures of this size, and of all."""
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
        """Remember what another found good."""
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
        best = sorted(alike, key=lambda x: x[0])[: SETTINGS.shapes_kept]
        self.shapes = sorted(others + best, key=lambda x: x[0])

    def take(self) -> list[Start]:
        """What was kept, which is then forgotten."""
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
