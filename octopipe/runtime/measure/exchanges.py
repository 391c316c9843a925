"""Measures which parts of a layer's F and I exchange tokens, and how much two concurrent ops slow each other down.

Knows: where exchanges begin and end (`turns.watching` reports those at which a pair would switch), and how ops of one
layer run as a pair: F with the I of another micro-batch, two F, and I with the W of another micro-batch. Does not know:
the times of layers (`profiler.py`), plans.

Layers run as in the profiler, with all ranks busy and each at a different layer. The result is the duration in
milliseconds of alternating compute and exchange parts; a profile stores them as shares of the layer's time
(`costs/segments.py`). How much computation and a concurrent exchange slow each other down are the two numbers with
which the best interleaving of the measured parts comes closest to the time of the measured pairs. A pair of F and I
alone does not tell them apart: there, every exchange has enough computation beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from octopipe.costs.segments import MAX_SEGMENTS, Part, Segments
from octopipe.plans.two_lanes import Sequence as Lanes
from octopipe.plans.two_lanes import interleave, sequence, with_filler
from octopipe.runtime.measure.one_layer import Layer
from octopipe.runtime.paired_ops import Portions
from octopipe.runtime.turns import Turns, give_turn, watching

Row = tuple[Part, ...]
MOST_SLOWING = 4.0
"""The largest slowing considered, more than was ever measured; the grid of `_slowing` begins with it."""
GRID, REFINEMENTS, SHRINK, TIE = 4, 60, 0.75, 1e-9
"""Points of the grid on either side of its middle, how often it becomes finer and by how much, and the
weight of a small slowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredExchange:
    """One distinct layer's parts, in milliseconds; empty rows where it exchanges nothing."""

    forward: Row = ()
    input: Row = ()
    weight_ms: float = 0.0
    """The time of its W."""
    paired_ms: float = 0.0
    """The time of its F and the I of another micro-batch when they run together; 0 if that was not measured."""
    forwards_ms: float = 0.0
    """The time of its F of two micro-batches when they run together; 0 if that was not measured."""
    filled_ms: float = 0.0
    """The time of its I and the W of another micro-batch when they run together; 0 if that was not measured."""


class _Clock:
    """Records moments on the compute stream, or on the host's clock."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self.moments: list[Any] = []

    def __call__(self) -> None:
        if not self._cuda:
            self.moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.moments.append(event)

    def ms(self) -> list[float]:
        """Return the milliseconds between neighbouring moments; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.moments, self.moments[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self.moments, self.moments[1:], strict=False)]


def exchanges_of(
    ready: Sequence[Layer], ring: Sequence[int], device: torch.device, repeats: int
) -> tuple[MeasuredExchange, ...]:
    """Return the parts of every distinct layer; () if no layer exchanges anything. Collective over the groups in which
    layers exchange.

    `ring` is the order in which this rank runs the layers; members of an expert group have the same one.
    """
    seen: list[tuple[list[list[float]], ...]] = [([], [], []) for _ in ready]
    for k in range(repeats):
        # Wait for the device once per round, as when layers are timed.
        for i, (clock, borders) in [(i, _watched(ready[i], device)) for i in ring]:
            ms = clock.ms()
            for kind in range(3):
                seen[i][kind].append(ms[borders[kind] : borders[kind + 1]])
        if k == 0 and not any(len(row) > 1 for kinds in seen for rows in kinds[:2] for row in rows):
            return ()
    both = [i for i in ring if all(len(seen[i][kind][0]) > 1 for kind in (0, 1))]
    together: dict[str, list[float]] = {}
    turns = Turns()
    try:
        for name, ops in PAIRS.items():
            found: list[list[float]] = [[] for _ in ready]
            for k in range(repeats + 1):
                for i, clock in [(i, _paired(ready[i], ops, len(seen[i][1][0]) // 2, turns, device)) for i in both]:
                    if k > 0:  # the first round absorbs one-time work
                        found[i].append(clock.ms()[0])
            together[name] = [float(np.median(ms)) if ms else 0.0 for ms in found]
    finally:
        turns.close()
    return tuple(
        MeasuredExchange(
            forward=_row(f),
            input=_row(g),
            weight_ms=float(np.median([sum(run) for run in w])),
            **{name: times[i] for name, times in together.items()},
        )
        for i, (f, g, w) in enumerate(seen)
    )


def _watched(layer: Layer, device: torch.device) -> tuple[_Clock, list[int]]:
    """Run F, I and W of a layer; return the moments, and where each of the three begins among them. The parts of F and
    I alternate between compute and exchange, compute first."""
    clock = _Clock(device)
    borders: list[int] = []

    def border() -> None:
        borders.append(len(clock.moments))
        clock()

    with watching(clock):
        layer.once(border)
    return clock, borders


PAIRS: dict[str, tuple[str, str]] = {"paired_ms": ("F", "I"), "forwards_ms": ("F", "F"), "filled_ms": ("I", "W")}
"""Which ops make each of the measured pairs."""


def _paired(layer: Layer, kinds: tuple[str, str], exchanges: int, turns: Turns, device: torch.device) -> _Clock:
    """Run two ops of different micro-batches together, between two moments. `exchanges`: how many an I of the layer
    has."""
    rest: list[Callable[[], None]] = []
    ops = [_op(layer, kind, exchanges, rest) for kind in kinds]
    clock = _Clock(device)
    clock()
    failed = turns.together(
        ops[0],
        ops[1],
        [layer.stage.mode, layer.stage.rerun],
        apart=kinds == ("F", "F") and layer.stage.replay.moving(),
        begins=int(kinds == ("F", "I")),
    )
    clock()
    if failed is not None:
        raise turns.error
    for finish in rest:
        finish()
    return clock


def _op(layer: Layer, kind: str, exchanges: int, rest: list[Callable[[], None]]) -> Callable[[], None]:
    """Return an op of the layer that is ready to run. The rest of its micro-batch's work is appended to `rest`."""

    def forward() -> None:
        run = layer.forward()
        run.outputs = None

        def backward() -> None:
            run.backward_input(layer.grads)
            run.backward_weight()

        rest.append(backward)

    if kind == "F":
        return forward
    run = layer.forward()
    run.outputs = None
    if kind == "I":
        rest.append(run.backward_weight)

        def backward_input() -> None:
            run.backward_input(layer.grads)

        return backward_input
    run.backward_input(layer.grads)
    portions = Portions(run.weight_work(), exchanges, give_turn)
    return lambda: run.backward_weight(portions)


def _row(runs: Sequence[Sequence[float]]) -> Row:
    """Return the median of every part; empty if a layer exchanges nothing, or a different number of times in different
    runs."""
    if len({len(run) for run in runs}) != 1 or not 1 < len(runs[0]) <= MAX_SEGMENTS:
        return ()
    return tuple(
        ("exchange" if k % 2 else "compute", float(ms)) for k, ms in enumerate(np.median(np.array(runs), axis=0))
    )


def segments_of(ranks: Sequence[Sequence[MeasuredExchange]], group_of: Sequence[int]) -> Segments | None:
    """Return the measurements of all ranks as the segments of a cost table; None if no layer exchanges tokens."""
    if not ranks[0]:
        return None
    layers = [_mean([rank[g] for rank in ranks]) for g in range(len(ranks[0]))]
    rows = [[getattr(layer, kind) or (("compute", 1.0),) for layer in layers] for kind in ("forward", "input")]
    slows_compute, slows_exchange = _slowing([pair for layer in layers for pair in _pairs_of(layer)])
    return Segments.from_ms(
        [rows[0][g] for g in group_of],
        [rows[1][g] for g in group_of],
        slows_compute=slows_compute,
        slows_exchange=slows_exchange,
    )


def _mean(ranks: Sequence[MeasuredExchange]) -> MeasuredExchange:
    def row(of: Callable[[MeasuredExchange], Row]) -> Row:
        rows = [of(rank) for rank in ranks]
        if len({len(r) for r in rows}) != 1:
            return ()
        return tuple((parts[0][0], float(np.mean([ms for _, ms in parts]))) for parts in zip(*rows, strict=True))

    times = {name: float(np.mean([getattr(rank, name) for rank in ranks])) for name in ("weight_ms", *PAIRS)}
    return MeasuredExchange(forward=row(lambda m: m.forward), input=row(lambda m: m.input), **times)


class _MeasuredPair(NamedTuple):
    """Two sequences of segments, W that fills what they leave exposed, and the time that all of it took."""

    first: Lanes
    second: Lanes
    filler_ms: float
    took_ms: float

    def predicted_ms(self, slows_compute: float, slows_exchange: float) -> float:
        walk = interleave(self.first, self.second, slows_compute, slows_exchange)
        return with_filler(walk, self.filler_ms, slows_compute, slows_exchange)


def _pairs_of(layer: MeasuredExchange) -> list[_MeasuredPair]:
    f, i = sequence(layer.forward), sequence(layer.input)
    made = (
        _MeasuredPair(f, i, 0.0, layer.paired_ms),
        _MeasuredPair(f, f, 0.0, layer.forwards_ms),
        _MeasuredPair(i, sequence(()), layer.weight_ms, layer.filled_ms),
    )
    return [pair for pair in made if pair.took_ms > 0.0]


def _slowing(pairs: Sequence[_MeasuredPair]) -> tuple[float, float]:
    """Return by which shares computation and a concurrent exchange slow each other down. They minimise the squares of
    the pairs' relative errors, and are found on a grid that becomes finer around the best point. Of equal ones, the
    smallest."""
    if not pairs:
        return 0.0, 0.0
    both = any(pair.filler_ms > 0.0 or pair.first is pair.second for pair in pairs)  # see the module's docstring

    def error(slows_compute: float, slows_exchange: float) -> float:
        off = [pair.predicted_ms(slows_compute, slows_exchange) / pair.took_ms - 1.0 for pair in pairs]
        return sum(x * x for x in off) + TIE * (slows_compute + slows_exchange)

    best, span = (0.0, 0.0), MOST_SLOWING
    for _ in range(REFINEMENTS):
        grid = [
            [max(0.0, at + span * k / GRID) for k in range(-GRID, GRID + 1)] if number == 0 or both else [0.0]
            for number, at in enumerate(best)
        ]
        best = min(((a, b) for a in grid[0] for b in grid[1]), key=lambda at: error(*at))
        span *= SHRINK
    return best
