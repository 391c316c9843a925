"""Segments: which parts of a layer's ops compute, and which exchange tokens between ranks of an expert group.

Knows: the two lanes of a rank (compute and exchange), an op of a layer as a sequence of segments on them, how much the
lanes slow each other down, and the time of an op that runs alone. Does not know: stages, pairs of ops
(`plans/two_lanes.py`), or times in milliseconds: a segment is a share of its layer's time in the cost table, so that
whatever scales a layer's time (a slower rank, a longer micro-batch) scales its segments as well.

Lanes of a segment:

- `compute`: the multiprocessors (attention, router, experts);
- `exchange`: the network between the ranks that share the experts (dispatch, combine);
- `beside`: compute that does not depend on the exchange directly before it (shared experts). In an op that runs alone,
  it overlaps with that exchange; within a pair the other op computes there, and it uses the compute lane in turn.

A weight gradient (W) has no exchange: it is compute and can be divided anywhere.

>>> forward = [("compute", 2.0), ("exchange", 1.0), ("beside", 0.5), ("compute", 1.0), ("exchange", 1.0)]
>>> alone_ms(forward)
5.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.base.limits import finite

LANES = ("compute", "exchange", "beside")
COMPUTE, EXCHANGE, BESIDE = range(3)
Part = tuple[str, float]
"""A lane and an amount: in milliseconds in files and measurements, as a share of the layer's time in `Segments`."""
MAX_SEGMENTS = 64
"""The most segments that one op of one layer is cut into."""
MAX_SLOWING = 100.0
ROUNDING = 1e-6
"""The relative difference allowed between the time of a layer and that of its segments."""


def together_ms(compute: float, exchange: float, slows_compute: float = 0.0, slows_exchange: float = 0.0) -> float:
    """Return the time of compute and an exchange that start together, each slowed while the other runs; at most the
    time of running them one after the other."""
    return beside_ms(compute, exchange, slows_compute, slows_exchange)


def beside_ms(compute: float, exchange: float, slows_compute: float, slows_exchange: float) -> float:
    """`together_ms` without defaults, as searches compile it."""
    computing, exchanging = compute * (1.0 + slows_compute), exchange * (1.0 + slows_exchange)
    if computing <= exchanging:
        took = computing + exchange - computing / (1.0 + slows_exchange)
    else:
        took = exchanging + compute - exchanging / (1.0 + slows_compute)
    return min(took, compute + exchange)


def alone_ms(parts: Sequence[Part], slows_compute: float = 0.0, slows_exchange: float = 0.0) -> float:
    """Return the time of an op with these parts if no other op runs at the same time."""
    total, k = 0.0, 0
    while k < len(parts):
        lane, amount = parts[k]
        if lane == "exchange" and k + 1 < len(parts) and parts[k + 1][0] == "beside":
            total += together_ms(parts[k + 1][1], amount, slows_compute, slows_exchange)
            k += 1
        else:
            total += amount
        k += 1
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The parts of F and I of every layer, as shares of the layer's own time; an empty row is all compute."""

    forward: tuple[tuple[Part, ...], ...]
    """One row per layer: F's parts in the order in which they run. R is a second F."""
    input: tuple[tuple[Part, ...], ...]
    """I's parts. B consists of them and of the layer's W, which can be placed wherever the compute lane is free."""
    slows_compute: float = 0.0
    """Compute that overlaps with an exchange takes 1 + `slows_compute` times as long, because the exchange uses
    multiprocessors and memory bandwidth."""
    slows_exchange: float = 0.0
    """An exchange that overlaps with compute takes 1 + `slows_exchange` times as long."""

    def __post_init__(self) -> None:
        for name in ("slows_compute", "slows_exchange"):
            value = finite(getattr(self, name))
            if value is None or not 0 <= value <= MAX_SLOWING:
                raise OctoPipeError(f"segments: {name} is {brief(getattr(self, name))}; give 0 to {MAX_SLOWING:g}")
        if len(self.forward) != len(self.input):
            raise OctoPipeError(
                f"segments: {len(self.forward)} layers in forward, {len(self.input)} in input; give both"
            )
        seen: set[int] = set()  # most layers are alike, and share their row
        for name in ("forward", "input"):
            for layer, row in enumerate(getattr(self, name)):
                if id(row) in seen:
                    continue
                seen.add(id(row))
                wrong = _wrong(row) or self._off(row)
                if wrong:
                    raise OctoPipeError(f"segments: {name} of layer {layer}: {wrong}")

    def _off(self, row: tuple[Part, ...]) -> str:
        took = alone_ms(row, self.slows_compute, self.slows_exchange) if row else 1.0
        return "" if abs(took - 1.0) <= ROUNDING else f"its parts take {took:g} of the layer's time; they must take 1"

    @classmethod
    def from_ms(
        cls,
        forward: Sequence[Sequence[Part]],
        input: Sequence[Sequence[Part]],
        *,
        slows_compute: float = 0.0,
        slows_exchange: float = 0.0,
    ) -> Segments:
        """Make segments from parts in milliseconds; rows without an exchange become plain compute."""

        def shares(rows: Sequence[Sequence[Part]]) -> tuple[tuple[Part, ...], ...]:
            known: dict[int, tuple[Part, ...]] = {}  # layers that are alike share their row
            for row in rows:
                if id(row) not in known:
                    alone = alone_ms(row, slows_compute, slows_exchange)
                    exchanges = any(lane == "exchange" and amount > 0 for lane, amount in row)
                    kept = tuple((lane, float(a) / alone) for lane, a in row if a > 0)
                    known[id(row)] = kept if exchanges else ()
            return tuple(known[id(row)] for row in rows)

        return cls(
            forward=shares(forward), input=shares(input), slows_compute=slows_compute, slows_exchange=slows_exchange
        )

    @property
    def num_layers(self) -> int:
        return len(self.forward)

    @property
    def any_exchange(self) -> bool:
        return any(self.forward) or any(self.input)

    def parts(self, kind: str, layer: int) -> tuple[Part, ...]:
        """Return the parts of an op of a layer as shares of its time; plain compute if the row is empty."""
        row = self.forward[layer] if kind in "FR" else self.input[layer] if kind in "IB" else ()
        return row or (("compute", 1.0),)

    def share(self, kind: str, lane: str) -> NDArray[np.float64]:
        """Return, per layer, the share of F's or I's time that lies on a lane; `compute` includes `beside`."""
        lanes = ("compute", "beside") if lane == "compute" else (lane,)
        rows = [self.parts(kind, layer) for layer in range(self.num_layers)]
        return np.array([sum(amount for name, amount in row if name in lanes) for row in rows])


def _wrong(row: object) -> str:
    """Return what is wrong with a row of parts, in words, or an empty string."""
    if not isinstance(row, tuple) or len(row) > MAX_SEGMENTS:
        return f"give at most {MAX_SEGMENTS} parts, each a lane and an amount"
    before = ""
    for part in row:
        if not isinstance(part, tuple) or len(part) != 2 or part[0] not in LANES:
            return f"{brief(part)} is not a segment; give a lane ({', '.join(LANES)}) and an amount"
        amount = finite(part[1])
        if amount is None or amount < 0:
            return f"{brief(part[1])} is not an amount; give a number >= 0"
        if part[0] == "beside" and before != "exchange":
            return '"beside" must stand directly after the "exchange" that it may run beside'
        before = part[0]
    return ""
