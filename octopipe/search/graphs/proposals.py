"""What the search for split heads proposes: initial layouts and keys, and random changes of them.

Knows: how starts are drawn and how a layout and its keys are changed. Does not know: what a proposal is worth and
which one is kept (`cut_head`). All random numbers come from the one generator that the search hands in.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.graphs.layout import Layout
from octopipe.search.graphs.schedule import A_F, A_I, C_I, LOOK, NUM_NUMBERS, OVER, RESERVE
from octopipe.search.graphs.surrogate import layout_of

Number = TypeVar("Number", int, float)
MOST_CHUNKS = 6
"""Stages per rank, at most, in the layouts that are drawn as starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Priorities of a layout's stages, in the order of its stages (see `schedule`)."""

    forward: tuple[float, ...]
    inward: tuple[float, ...]
    flight: tuple[int, ...]
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """Initial layouts and random changes for one model on a number of ranks."""

    costs: CostTable
    num_ranks: int
    num_micro_batches: int
    layer_ms: np.ndarray
    """Time of every layer for one micro-batch, forward and backward together."""
    starts: Sequence[Plan]
    """Plans whose layouts are the first starts."""
    dice: random.Random

    @property
    def _head(self) -> int:
        return self.costs.num_layers - 1

    def drawn_layout(self, number: int) -> Layout | None:
        """An initial layout: first those of the given plans, then loops and waves over balanced stages."""
        dice, ranks = self.dice, self.num_ranks
        tied = self.costs.tied_bytes > 0
        if number < len(self.starts):
            made = layout_of(self.starts[number], ranks)
            if made is None or not tied:
                return made
            return None if made.bounds[1] == 1 else replace(made, bounds=(1, *made.bounds[1:]))
        number -= len(self.starts)
        chunks, wave, plain = 1 + number % MOST_CHUNKS, (number // MOST_CHUNKS) % 2 == 0, number < 2 * MOST_CHUNKS
        first = 1 if tied or (not plain and dice.random() < 0.4) else 0
        size = chunks * ranks
        if size > self._head - first:
            return None
        work = self.layer_ms[first : self._head]
        ahead = np.concatenate(([0.0], np.cumsum(work)))
        parts = np.array([1.0 if plain else dice.uniform(0.85, 1.15) for _ in range(size)])
        goals = ahead[-1] * np.cumsum(parts)[:-1] / parts.sum()
        bounds = [0]
        for k, goal in enumerate(goals):
            cut = int(np.argmin(np.abs(ahead - goal)))
            bounds.append(max(bounds[-1] + 1, min(cut, len(work) - (size - 1 - k))))
        bounds.append(len(work))
        turn = [s % (2 * ranks) for s in range(size)]
        place = [r if r < ranks else 2 * ranks - 1 - r for r in turn] if wave else [s % ranks for s in range(size)]
        shards = list(range(ranks))
        if not plain and dice.random() < 0.4 and ranks > 2:
            shards = sorted(dice.sample(shards, dice.randint(2, ranks - 1)))
        return Layout(bounds=tuple(first + b for b in bounds), ranks=tuple(place), shards=tuple(shards), loss=place[-1])

    def drawn_keys(self, layout: Layout, *, varied: bool) -> Keys:
        dice, size = self.dice, len(layout.ranks)
        ahead = self._ahead(layout)
        unit = float(self.layer_ms.sum()) / self.num_ranks
        depth = dice.uniform(0.0, 6.0) if varied else 2.0
        back = dice.uniform(-3.0, 4.0) if varied else 0.0
        lead = dice.choice((0.6, 0.8, 1.0, 1.3, 2.0, 9.0)) if varied else 1.5
        chunks = max(1.0, size / self.num_ranks)
        flight = tuple(
            min(self.num_micro_batches, max(1, math.ceil(lead * (1.0 + (1.0 - a) * 2.0 * self.num_ranks / chunks))))
            for a in ahead
        )
        numbers = [0.0] * NUM_NUMBERS
        numbers[A_F] = 1.0
        numbers[A_I] = dice.uniform(0.5, 2.0) if varied else 1.0
        numbers[C_I] = dice.uniform(-8.0, 3.0) if varied else -2.0
        numbers[LOOK] = unit * (dice.choice((0.0, 0.0, 0.01, 0.03, 0.1)) if varied else 0.01)
        numbers[OVER] = unit * (dice.choice((0.0, 0.01, 0.05)) if varied else 0.01)
        numbers[RESERVE] = dice.choice((0.3, 0.7, 1.0)) if varied else 1.0
        return Keys(
            forward=tuple(-depth * a for a in ahead),
            inward=tuple(-back * (1.0 - a) for a in ahead),
            flight=flight,
            numbers=tuple(numbers),
        )

    def _ahead(self, layout: Layout) -> list[float]:
        """For every stage, the share of the model's work that is in the layers before it."""
        work = np.concatenate(([0.0], np.cumsum(self.layer_ms)))
        return [float(work[s.first] / max(work[-1], 1e-12)) for s in layout.stages()]

    def moved(self, layout: Layout, keys: Keys) -> tuple[Layout, Keys]:
        """The layout and keys after one random change."""
        dice = self.dice
        kind = dice.random()
        if kind < 0.42:
            return self._moved_body(layout, keys, kind / 0.42)
        if kind < 0.50:
            return self._moved_shards(layout, keys)
        count = len(keys.forward)
        s = dice.randrange(count)
        if kind < 0.64:
            return layout, replace(keys, forward=_with(keys.forward, s, keys.forward[s] + dice.gauss(0.0, 1.2)))
        if kind < 0.76:
            return layout, replace(keys, inward=_with(keys.inward, s, keys.inward[s] + dice.gauss(0.0, 1.2)))
        if kind < 0.84:
            n = min(self.num_micro_batches, max(1, keys.flight[s] + dice.choice((-2, -1, 1, 2))))
            return layout, replace(keys, flight=_with(keys.flight, s, n))
        k = dice.randrange(NUM_NUMBERS)
        value = keys.numbers[k]
        unit = float(self.layer_ms.sum()) / self.num_ranks
        if k in (LOOK, OVER):
            value = max(0.0, value + unit * dice.gauss(0.0, 0.02))
        elif k == RESERVE:
            value = min(1.2, max(0.0, value + dice.gauss(0.0, 0.2)))
        else:
            value += dice.gauss(0.0, 0.3 if k != C_I else 1.0)
        return layout, replace(keys, numbers=_with(keys.numbers, k, value))

    def _moved_body(self, layout: Layout, keys: Keys, kind: float) -> tuple[Layout, Keys]:
        dice, size = self.dice, len(layout.ranks)
        bounds, ranks = list(layout.bounds), list(layout.ranks)
        offset = len(layout.shards) if layout.cuts_embedding else 0
        if kind < 0.5 and size > 1:  # move a boundary, or several adjacent boundaries together
            k = dice.randrange(1, size)
            step = dice.choice((-1, 1))
            stop = dice.randrange(k, min(size, k + 4)) if dice.random() < 0.3 else k
            for at in range(k, stop + 1):
                bounds[at] += step
            if any(a >= b for a, b in itertools.pairwise(bounds)):
                return layout, keys
        elif kind < 0.72 and size > 1:
            a, b = dice.sample(range(size), 2)
            ranks[a], ranks[b] = ranks[b], ranks[a]
        elif kind < 0.82:
            ranks[dice.randrange(size)] = dice.randrange(self.num_ranks)
        elif kind < 0.91 and size > self.num_ranks:  # merge two neighbouring stages
            k = dice.randrange(size - 1)
            del bounds[k + 1]
            del ranks[k if dice.random() < 0.5 else k + 1]
            keys = _without(keys, offset + k)
        else:  # split a stage in two
            wide = [k for k in range(size) if bounds[k + 1] - bounds[k] > 1]
            if not wide:
                return layout, keys
            k = dice.choice(wide)
            bounds.insert(k + 1, dice.randrange(bounds[k] + 1, bounds[k + 1]))
            ranks.insert(k + 1, dice.randrange(self.num_ranks))
            keys = _doubled(keys, offset + k)
        return replace(layout, bounds=tuple(bounds), ranks=tuple(ranks)), keys

    def _moved_shards(self, layout: Layout, keys: Keys) -> tuple[Layout, Keys]:
        """Add or remove a shard, move one or the loss to another rank, or split the embedding or make it whole
        again."""
        dice, shards = self.dice, list(layout.shards)
        others = [r for r in range(self.num_ranks) if r not in shards]
        head = len(keys.forward) - 1 - len(shards)
        kind = dice.random()
        if kind < 0.25:
            return replace(layout, loss=dice.randrange(self.num_ranks)), keys
        if kind < 0.5 and others:
            k = dice.randrange(len(shards))
            shards[k] = dice.choice(others)
            return replace(layout, shards=tuple(shards)), keys
        if kind < 0.7 and others:
            shards.append(dice.choice(others))
            if layout.cuts_embedding:
                keys = _doubled(keys, 0)
                head += 1
            return replace(layout, shards=tuple(shards)), _doubled(keys, head)
        if kind < 0.9 and len(shards) > 2:
            k = dice.randrange(len(shards))
            del shards[k]
            keys = _without(keys, head + k)
            if layout.cuts_embedding:
                keys = _without(keys, k)
            return replace(layout, shards=tuple(shards)), keys
        if self.costs.tied_bytes > 0 or layout.bounds[1] == 1:
            return layout, keys
        if layout.cuts_embedding:
            for _ in shards:
                keys = _without(keys, 0)
            return replace(layout, bounds=(0, *layout.bounds[1:])), keys
        for _ in shards:
            keys = _doubled(keys, 0)
        return replace(layout, bounds=(1, *layout.bounds[1:])), keys


def _with(values: tuple[Number, ...], at: int, value: Number) -> tuple[Number, ...]:
    changed = list(values)
    changed[at] = value
    return tuple(changed)


def _without(keys: Keys, at: int) -> Keys:
    """The keys without those of one stage."""
    return replace(
        keys,
        forward=keys.forward[:at] + keys.forward[at + 1 :],
        inward=keys.inward[:at] + keys.inward[at + 1 :],
        flight=keys.flight[:at] + keys.flight[at + 1 :],
    )


def _doubled(keys: Keys, at: int) -> Keys:
    """The keys with one more stage after stage `at`, whose keys are copies of those of `at`."""
    return replace(
        keys,
        forward=(*keys.forward[: at + 1], *keys.forward[at:]),
        inward=(*keys.inward[: at + 1], *keys.inward[at:]),
        flight=(*keys.flight[: at + 1], *keys.flight[at:]),
    )
