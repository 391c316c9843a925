"""Many quick starts: structures and priorities drawn at random, the best of them kept.

Knows: how to draw a structure (stages, the way round the ranks, sizes) and a set of priorities, and that shapes and
priorities which served one structure well are worth trying on the next. Does not know: annealing.

What a walk comes to depends more on its start than on the walk: over hundreds of walks on the published layer times
the step times of starts and of what became of them correlate by 0.78 to 0.95. Two things make good starts that a
balanced partition in whole rounds does not have: stages of the first round that are small (every rank gets to work
soon) and a last round that is cut short anywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from octopipe.tuner.anneal import State, below, copy_state, make_state
from octopipe.tuner.kernels import Problem, Scratch
from octopipe.tuner.keys import NUM_KEYS, draw_keys, judge_keys, use_keys, vary_keys
from octopipe.tuner.starts import partition_evenly

KEPT = 4
"""Starts kept of one size."""
KEYS_KEPT = 4
"""Priorities remembered of one size, and taken from all sizes."""
KEYS_NEAR, KEYS_DRAWN = 6, 4
"""Per structure: the best priorities so far, some like them, and new ones."""
AGAIN, SPREAD, LIKED = 0.85, 60, 3
"""How often a shape like one of the best is drawn in the end, after how many draws half as often, and how many of one
size are remembered for that."""
ROUNDS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.0, 3.5, 4.0, 4.0, 5.0, 6.0)
"""Rounds over the ranks, a few stages more or less."""
KINDS = ("loop", "loop", "turn", "turn", "mixed", "wave", "skip")
"""Ways round the ranks. All kinds of all lengths are drawn in turn, so that no search misses the good ones."""
DIVIDED, WIDE = 0.3, 3.0
"""How often a visit to a rank falls into one stage more, one after another on that rank: no transfer between them, but
memory is taken and given back in smaller pieces, and other ops can run in between. Only where visits have so many
layers on average."""
SMALLEST = 0.1
"""Least size asked of a stage, the others' being 1."""
BALANCE = 2000
"""Moves of the partition's own annealing."""


class Shape(NamedTuple):
    """What a structure is drawn from."""

    way: tuple[int, ...]
    """The ranks in the order in which a micro-batch visits them."""
    parts: tuple[int, ...]
    """How many stages, one after another on its rank, every visit consists of."""
    kind: str
    small_first: float
    """How much smaller than the others the very first visit is to be; this fades out within a round."""
    small_last: float

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


class Start(NamedTuple):
    """A drawn start."""

    step_ms: float
    name: str
    state: State
    used: bool = False
    """It was walked from, or is what a walk came to."""
    keys: np.ndarray | None = None
    """All its priorities, where no stage or op has an offset."""


@njit(cache=True, nogil=True)
def try_keys(p, st, tries, known, near, margin, cutoff, sc, rng):  # type: ignore[no-untyped-def]
    """The best of many priorities for a structure: (its row in `tries` or -1, step time).

    The first rows are `known`; the next ones become like those, the others new. All in one call, so that threads do
    not wait for each other's turn in between.
    """
    best, chosen = cutoff, -1
    for i in range(tries.shape[0]):
        if known <= i < known + near:
            tries[i] = tries[below(rng, known)]
            vary_keys(p, tries[i], rng)
        elif i >= known:
            draw_keys(p, tries[i], rng)
        value = judge_keys(p, st, tries[i], margin, best, sc)
        if value < best:
            best, chosen = value, i
    if chosen >= 0:
        use_keys(p, st, tries[chosen])
    return chosen, best


def draw_shape(problem: Problem, max_stages: int, stages: int, kind: str, lot: np.random.Generator) -> Shape:
    """A way round the ranks with stages of drawn sizes."""
    small = lot.choice([0.0, 0.3, 0.6, 0.85], 2)
    stages = min(max(stages, 1), max_stages)
    way = go_round(problem.num_ranks, stages, kind, lot)
    shape = Shape(way, (1,) * len(way), kind, float(small[0]), float(small[1]))
    while wide(problem, shape) and lot.random() < DIVIDED:
        shape = divide(shape, max_stages, lot)
    return shape


def wide(problem: Problem, shape: Shape) -> bool:
    return problem.num_layers >= WIDE * sum(shape.parts)


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
            through = sorted(
                lot.choice(ranks, int(lot.integers(max(ranks // 2, 1), ranks + 1)), replace=False).tolist()
            )
        back = {"mixed": 0.5, "skip": 0.3, "turn": float(len(out) + ranks >= stages)}.get(kind, 0.0)
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
    if (wide(problem, shape) or max(parts) > 1) and lot.random() < DIVIDED:
        if max(parts) == 1 or (wide(problem, shape) and lot.random() < 0.6):
            parts = divide(shape, max_stages, lot).parts
        else:
            at = int(lot.choice(np.flatnonzero(np.array(parts) > 1)))
            parts = tuple(n - (i == at) for i, n in enumerate(parts))
    elif lot.random() < 0.5:
        most = max_stages - sum(parts) + visits
        visits = min(max(visits + int(lot.integers(-2, 3)), min(problem.num_ranks, visits)), most)
        way = (way + go_round(problem.num_ranks, visits, shape.kind, lot)[len(way) :])[:visits]
        parts = (parts + (1,) * visits)[:visits]
        if len(set(way)) < len(set(shape.way)):
            way, parts = shape.way, shape.parts
    elif lot.random() < 0.3:
        way = go_round(problem.num_ranks, visits, shape.kind, lot)
    small = np.array((shape.small_first, shape.small_last)) + lot.normal(0.0, 0.15, 2) * (lot.random(2) < 0.5)
    first, last = np.clip(small, 0.0, 0.9)
    return Shape(way, parts, shape.kind, float(first), float(last))


class Lottery:
    """Draws starts and keeps the best few, of different shapes."""

    def __init__(self, problem: Problem, max_stages: int, scratch: Scratch, margin: np.ndarray, seed: tuple[int, ...]):
        self.problem, self.max_stages, self.scratch, self.margin = problem, max_stages, scratch, margin
        self.lot = np.random.default_rng(seed)
        self.rng = self.lot.integers(1, 1 << 62, 1).astype(np.uint64)
        self.keys: dict[int, list[tuple[float, np.ndarray]]] = {}
        """By size, the best first."""
        self.starts: list[Start] = []
        self.draws = 0
        self.deck: list[tuple[float, str]] = []
        """Rounds and kinds still to be drawn."""
        self.liked: list[tuple[float, Shape]] = []
        """The best shapes of every size, for good."""

    def draw(self, recompute: bool, size: int | None = None) -> None:
        """One structure under old and new priorities; of the given size (half rounds over the ranks)."""
        self.draws += 1
        st = make_state(self.problem, self.max_stages)
        shape = self._shape(size)
        partition_evenly(
            self.problem,
            st,
            list(shape.ranks),
            seed=int(self.lot.integers(1 << 40)),
            even=float(self.lot.choice([1.0, 4.0, 4.0, 16.0])),
            tilt=float(self.lot.choice([0.0, 0.5, 1.0])),
            rising=bool(self.lot.random() < 0.7),
            iterations=BALANCE,
            sizes=shape.sizes(self.problem.num_ranks),
        )
        st.recompute[: int(st.size[0])] = recompute
        alike = [s for s in self.starts if self.size(s) == self._size(len(shape.ranks))]
        bar = alike[-1].step_ms if len(alike) >= KEPT else np.inf
        size = self._size(len(shape.ranks))
        known = self._known_keys(size)
        near = KEYS_NEAR if known else 0
        tries = np.zeros((len(known) + near + KEYS_DRAWN, NUM_KEYS))
        tries[: len(known)] = known or 0.0
        chosen, best_ms = try_keys(
            self.problem, st, tries, len(known), near, self.margin, bar, self.scratch, self.rng
        )  # fmt: skip
        if chosen < 0:
            return
        keys = known[chosen] if chosen < len(known) else tries[chosen].copy()
        self._learn_keys(float(best_ms), keys, size)
        self._like(float(best_ms), shape)
        self._keep(Start(float(best_ms), shape.name, st, keys=keys))

    def size(self, start: Start) -> int:
        """Half rounds over the ranks."""
        return self._size(int(start.state.size[0]))

    def _size(self, stages: int) -> int:
        return 2 * stages // self.problem.num_ranks

    def _shape(self, size: int | None) -> Shape:
        """A new shape, or one like those that did well; the best most of all."""
        liked = [s for _, s in self.liked if size is None or self._size(len(s.ranks)) == size]
        if liked and self.lot.random() < AGAIN * self.draws / (self.draws + SPREAD):
            return near_shape(self.problem, self.max_stages, liked[int(self.lot.random() ** 2 * len(liked))], self.lot)
        if not self.deck:
            self.deck = [(rounds, kind) for rounds in ROUNDS for kind in KINDS]
            self.lot.shuffle(self.deck)
        rounds, kind = self.deck.pop()
        width = self.problem.num_ranks
        low = high = round(width * rounds)
        if size is not None:
            low, high = -(-size * width // 2), min(((size + 1) * width - 1) // 2, self.max_stages)
        elif rounds % 1.0:
            low, high = low - width // 16, high + width // 16
        return draw_shape(
            self.problem, self.max_stages, int(self.lot.integers(low, max(low, high) + 1)), kind, self.lot
        )

    def _known_keys(self, size: int) -> list[np.ndarray]:
        """The best priorities for structures of this size, and of all."""
        every = sorted((x for known in self.keys.values() for x in known), key=lambda x: x[0])
        found: list[np.ndarray] = []
        for _, keys in self.keys.get(size, []) + every[:KEYS_KEPT]:
            if all(keys is not k for k in found):
                found.append(keys)
        return found

    def _learn_keys(self, step_ms: float, keys: np.ndarray, size: int) -> None:
        known = self.keys.get(size, [])
        before = min((v for v, k in known if k is keys), default=np.inf)
        others = [x for x in known if x[1] is not keys]
        self.keys[size] = sorted([*others, (min(step_ms, before), keys)], key=lambda x: x[0])[:KEYS_KEPT]

    def learn(self, liked: list[tuple[float, Shape]], keys: dict[int, list[tuple[float, np.ndarray]]]) -> None:
        """Remember what another lottery found good."""
        for step_ms, shape in liked:
            if all(shape is not s for _, s in self.liked):
                self._like(step_ms, shape)
        for size, known in keys.items():
            for step_ms, k in known:
                self._learn_keys(step_ms, k, size)

    def _like(self, step_ms: float, shape: Shape) -> None:
        size = self._size(len(shape.ranks))
        alike = [x for x in self.liked if self._size(len(x[1].ranks)) == size] + [(step_ms, shape)]
        others = [x for x in self.liked if self._size(len(x[1].ranks)) != size]
        self.liked = sorted(others + sorted(alike, key=lambda x: x[0])[:LIKED], key=lambda x: x[0])

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
