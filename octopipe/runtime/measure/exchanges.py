"""Measures which parts of a layer's F and I exchange tokens, and how much two concurrent ops slow each other down.

Knows: where exchanges begin and end (`turns.watching` reports those at which a pair would switch), and how a layer's F
runs paired with its own I of another micro-batch. Does not know: the times of layers (`profiler.py`), plans.

Layers run as in the profiler, with all ranks busy and each at a different layer. The result is the duration in
milliseconds of alternating compute and exchange parts; a profile stores them as shares of the layer's time
(`costs/segments.py`). The slowdown of computation by a concurrent exchange is the single number for which the best
interleaving of the measured parts takes as long as the measured pair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octopipe.costs.segments import MAX_SEGMENTS, MAX_SLOWING, Part, Segments
from octopipe.plans.two_lanes import interleave, sequence
from octopipe.runtime.measure.one_layer import Layer
from octopipe.runtime.turns import Turns, watching

Row = tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredExchange:
    """One distinct layer's parts, in milliseconds; empty rows where it exchanges nothing."""

    forward: Row = ()
    input: Row = ()
    paired_ms: float = 0.0
    """What its F and the I of another micro-batch take together; 0 where that was not measured."""


class _Clock:
    """Moments on the compute stream, or on the host's clock."""

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
        """Between neighbouring moments; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.moments, self.moments[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self.moments, self.moments[1:], strict=False)]


def exchanges_of(
    ready: Sequence[Layer], ring: Sequence[int], device: torch.device, repeats: int
) -> tuple[MeasuredExchange, ...]:
    """Every distinct layer's parts (collective over whatever the layers' exchanges are); () where there are none.

    `ring` is the order in which this rank runs the layers; members of an expert group have the same one.
    """
    seen: list[tuple[list[list[float]], list[list[float]]]] = [([], []) for _ in ready]
    for k in range(repeats):
        # The device is waited for once a round, as when times are taken.
        for i, (clock, borders) in [(i, _watched(ready[i], device)) for i in ring]:
            ms = clock.ms()
            for kind in (0, 1):
                seen[i][kind].append(ms[borders[kind] : borders[kind + 1]])
        if k == 0 and not any(len(row) > 1 for kinds in seen for rows in kinds for row in rows):
            return ()
    together: list[list[float]] = [[] for _ in ready]
    both = [i for i in ring if all(len(seen[i][kind][0]) > 1 for kind in (0, 1))]
    turns = Turns()
    try:
        for k in range(repeats + 1):
            for i, clock in [(i, _paired(ready[i], turns, device)) for i in both]:
                if k > 0:  # the first is for what happens once
                    together[i].append(clock.ms()[0])
    finally:
        turns.close()
    return tuple(
        MeasuredExchange(forward=_row(f), input=_row(g), paired_ms=float(np.median(ms)) if ms else 0.0)
        for (f, g), ms in zip(seen, together, strict=True)
    )


def _watched(layer: Layer, device: torch.device) -> tuple[_Clock, list[int]]:
    """F, I and W of a layer; where each of them begins among the moments. The parts of F and I are compute, exchange,
    compute and so on, compute first."""
    clock = _Clock(device)
    borders: list[int] = []

    def border() -> None:
        borders.append(len(clock.moments))
        clock()

    with watching(clock):
        layer.once(border)
    return clock, borders


def _paired(layer: Layer, turns: Turns, device: torch.device) -> _Clock:
    """F of one micro-batch together with I of another, between two moments."""
    earlier = layer.forward()
    earlier.outputs = None
    found: list[Any] = []
    clock = _Clock(device)
    clock()
    failed = turns.together(
        lambda: found.append(layer.forward()),
        lambda: earlier.backward_input(layer.grads),  # type: ignore[arg-type, return-value]
        [layer.stage.mode, layer.stage.rerun],
        begins=1,
    )
    clock()
    if failed is not None:
        raise turns.error
    earlier.backward_weight()
    found[0].outputs = None
    found[0].backward_input(layer.grads)
    found[0].backward_weight()
    return clock


def _row(runs: Sequence[Sequence[float]]) -> Row:
    """The median of every part; nothing where a layer exchanges nothing, or not always as often."""
    if len({len(run) for run in runs}) != 1 or not 1 < len(runs[0]) <= MAX_SEGMENTS:
        return ()
    return tuple(
        ("exchange" if k % 2 else "compute", float(ms)) for k, ms in enumerate(np.median(np.array(runs), axis=0))
    )


def segments_of(ranks: Sequence[Sequence[MeasuredExchange]], group_of: Sequence[int]) -> Segments | None:
    """What all ranks measured as the segments of a cost table; None where nothing is exchanged."""
    if not ranks[0]:
        return None
    layers = [_mean([rank[g] for rank in ranks]) for g in range(len(ranks[0]))]
    slows = [_slowing(layer) for layer in layers if layer.paired_ms > 0]
    rows = [[getattr(layer, kind) or (("compute", 1.0),) for layer in layers] for kind in ("forward", "input")]
    return Segments.from_ms(
        [rows[0][g] for g in group_of],
        [rows[1][g] for g in group_of],
        slows_compute=float(np.median(slows)) if slows else 0.0,
    )


def _mean(ranks: Sequence[MeasuredExchange]) -> MeasuredExchange:
    def row(of: Callable[[MeasuredExchange], Row]) -> Row:
        rows = [of(rank) for rank in ranks]
        if len({len(r) for r in rows}) != 1:
            return ()
        return tuple((parts[0][0], float(np.mean([ms for _, ms in parts]))) for parts in zip(*rows, strict=True))

    return MeasuredExchange(
        forward=row(lambda m: m.forward),
        input=row(lambda m: m.input),
        paired_ms=float(np.mean([rank.paired_ms for rank in ranks])),
    )


def _slowing(layer: MeasuredExchange) -> float:
    """By which share computation is slowed beside an exchange, so that the pair takes what it took."""
    first, second = sequence(layer.forward), sequence(layer.input)
    low, high = 0.0, 4.0
    if interleave(first, second, low).ms >= layer.paired_ms:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if interleave(first, second, middle).ms < layer.paired_ms else (low, middle)
    return min(high, MAX_SLOWING)
