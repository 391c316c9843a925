"""The routing that a profile was measured with: how many tokens every expert of a layer received.

Knows: tokens per expert and layer, over how many ranks the experts were distributed, and how the times of a layer
change if the busiest of these ranks receives another share of the tokens. Does not know: how tokens are counted
(`runtime/measure/routing.py`), or what uneven routing costs in analytic prices (`analytic/`).

Measured times already contain the wait for the busiest rank. They are therefore corrected by the ratio of the requested
spread to the measured one, so that the slowest rank is priced once. What grows with the tokens of a rank is
everything from the first exchange of an op to its last one (dispatch, experts, combine). A weight gradient has no
exchange: it grows by the share of the experts in the computation of F, whose matrix products it repeats. Memory stays
as measured.

>>> busiest_rank((30.0, 10.0, 10.0, 10.0), 2)
1.3333333333333333
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, kind_of
from octopipe.base.limits import MAX_EXPERTS, MAX_RANKS, MAX_SIZE, finite
from octopipe.costs.segments import Part, Segments, alone_ms

Tokens = tuple[float, ...]
"""The number of tokens of every expert of a layer."""


def busiest_rank(tokens: Sequence[float], ranks: int) -> float:
    """Return the tokens of the busiest of `ranks` ranks over the mean of all; a rank holds consecutive experts."""
    held = len(tokens) // ranks
    loads = [sum(tokens[r * held : (r + 1) * held]) for r in range(ranks)]
    return max(loads) * ranks / sum(loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How many tokens the routers of a model sent to every expert while it was measured."""

    tokens: tuple[Tokens, ...]
    """One row per layer, empty for a layer without a router. Counts are per micro-batch, as a mean over all counted."""
    ranks: int = 1
    """The number of ranks over which the experts of a layer were distributed; 1: every rank held all of them."""
    micro_batches: int = 1
    """The number of micro-batches that were counted."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have a router."""
        return tuple(k for k, row in enumerate(self.tokens) if row)

    def record(self) -> dict[str, Any]:
        """Return the routing as a profile stores it; layers with equal counts share an entry."""
        rows: dict[Tokens, list[int]] = {}
        for k in self.layers:
            rows.setdefault(self.tokens[k], []).append(k)
        counted = [{"layers": layers, "tokens": list(row)} for row, layers in rows.items()]
        return {"ranks": self.ranks, "micro_batches": self.micro_batches, "counted": counted}

    def words(self) -> list[str]:
        """Describe every distinct routing in one line: how evenly its experts and their ranks were used."""
        out = []
        for row in dict.fromkeys(self.tokens[k] for k in self.layers):
            mean, idle = sum(row) / len(row), row.count(0.0)
            line = (
                f"routing of {len(row)} experts: {mean:.4g} tokens in the mean, {max(row):.4g} for the busiest "
                f"({max(row) / mean:.2f} times the mean), {min(row):.4g} for the least busy"
            )
            line += f", none for {idle}" if idle else ""
            if self.ranks > 1:
                line += f"; the busiest of {self.ranks} ranks has {busiest_rank(row, self.ranks):.2f} times the mean"
            out.append(line)
        return out

    def wanted(self, imbalance: Tokens, layer: int) -> float:
        """Return the requested spread over ranks: the number in `imbalance`, or the spread of its tokens per expert."""
        if len(imbalance) < 2:
            return imbalance[0] if imbalance else 1.0
        if len(imbalance) != len(self.tokens[layer]):
            raise OctoPipeError(
                f"imbalance has the tokens of {len(imbalance)} experts, and layer {layer} has "
                f"{len(self.tokens[layer])}; give one number per expert"
            )
        return busiest_rank(imbalance, self.ranks)

    def factors(self, imbalance: Tokens) -> dict[int, float]:
        """Return, per layer with a router, the factor by which the tokens of its busiest rank grow if the spread is the
        requested one."""
        return {k: self.wanted(imbalance, k) / busiest_rank(self.tokens[k], self.ranks) for k in self.layers}


def cannot_change(routing: Routing | None, segments: Segments | None) -> str:
    """Return why times measured with this routing cannot be converted to another one, or "" if they can."""
    if routing is None:
        return "its times were measured, and it does not say with which routing"
    if routing.ranks == 1:
        return "every rank held all experts when it was measured, and has as many tokens however they are routed"
    if segments is None or not segments.any_exchange:
        return "it does not say which parts of its layers exchange tokens"
    return ""


def rerouted(
    times: Mapping[str, np.ndarray[Any, Any]], segments: Segments, factors: Mapping[int, float]
) -> tuple[dict[str, np.ndarray[Any, Any]], Segments]:
    """Return F, I and W times ("forward_ms", "input_ms", "weight_ms") and segments, with the tokens of every layer in
    `factors` multiplied by its factor."""
    out = {name: array.copy() for name, array in times.items()}
    rows: dict[str, list[list[Part]]] = {}
    slowing = segments.slows_compute, segments.slows_exchange
    for kind, name in (("F", "forward_ms"), ("I", "input_ms")):
        made = rows[kind] = [list(segments.parts(kind, k)) for k in range(segments.num_layers)]
        for k, factor in factors.items():
            made[k] = _grown(made[k], factor)
            out[name][k] *= alone_ms(made[k], *slowing)
    for k, factor in factors.items():
        out["weight_ms"][k] *= 1.0 + _experts_share(segments.parts("F", k)) * (factor - 1.0)
    scaled = Segments.from_ms(rows["F"], rows["I"], slows_compute=slowing[0], slows_exchange=slowing[1])
    return out, scaled


def _between(parts: Sequence[Part]) -> tuple[int, int]:
    """Return the indices of the first and the last exchange, or an empty range (0, -1) if there is none."""
    found = [k for k, (lane, _) in enumerate(parts) if lane == "exchange"]
    return (found[0], found[-1]) if found else (0, -1)


def _grown(parts: Sequence[Part], factor: float) -> list[Part]:
    """Return the parts with those that depend on routed tokens taking `factor` times as long; `beside` does not."""
    first, last = _between(parts)
    return [
        (lane, amount * factor if first <= k <= last and lane != "beside" else amount)
        for k, (lane, amount) in enumerate(parts)
    ]


def _experts_share(parts: Sequence[Part]) -> float:
    """Return the share of F's computation that lies between its exchanges and depends on them."""
    first, last = _between(parts)
    whole = sum(amount for lane, amount in parts if lane != "exchange")
    routed = sum(amount for k, (lane, amount) in enumerate(parts) if lane == "compute" and first <= k <= last)
    return routed / whole if whole > 0 else 0.0


def routing_from_object(value: object, num_layers: int, where: str) -> Routing | None:
    """Return the routing in a profile's "routing", or None if it has none; `where` opens every error line."""
    if value is None:
        return None
    what = f'{where}: "routing"'
    if not isinstance(value, dict) or not isinstance(value.get("counted"), list):
        raise OctoPipeError(f'{what} is a JSON {kind_of(value)}; give an object with "counted", a list of objects')
    rows: list[Tokens] = [()] * num_layers
    for i, entry in enumerate(value["counted"]):
        layers, tokens = _entry(entry, num_layers, f"{what} entry {i}")
        for layer in layers:
            rows[layer] = tokens
    ranks = _whole(value.get("ranks", 1), MAX_RANKS, f"{what}: ranks")
    if any(row and len(row) % ranks for row in rows):
        raise OctoPipeError(f"{what}: ranks is {ranks}; give a divisor of the number of experts")
    return Routing(
        tokens=tuple(rows),
        ranks=ranks,
        micro_batches=_whole(value.get("micro_batches", 1), MAX_SIZE, f"{what}: micro_batches"),
    )


def _entry(entry: object, num_layers: int, what: str) -> tuple[list[int], Tokens]:
    layers, tokens = (entry.get("layers"), entry.get("tokens")) if isinstance(entry, dict) else (None, None)
    if not isinstance(layers, list) or any(type(k) is not int or not 0 <= k < num_layers for k in layers):
        raise OctoPipeError(f"{what} is of layers {brief(layers)}; give a list of numbers from 0 to {num_layers - 1}")
    counts = [finite(x) for x in tokens] if isinstance(tokens, list) else []
    if not 1 < len(counts) <= MAX_EXPERTS or any(c is None or c < 0 for c in counts) or not any(counts):
        raise OctoPipeError(f"{what}: tokens is {brief(tokens)}; give the tokens of every expert, >= 0 and not all 0")
    return layers, tuple(float(c) for c in counts if c is not None)


def _whole(value: object, most: float, what: str) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise OctoPipeError(f"{what} is {brief(value)}; give a whole number from 1 to {most:g}")
    return value
