"""Breakdown of a layer's time: products, attention, memory passes, collectives of each kind, recomputation.

Knows: how to find the cost of a resource, by pricing the layer again as if that resource were free. Does not know: the
formulas (`layer_pricing.py`), plans or whole steps (`search/planner/why.py`).

Resources are made free one after the other, in the order of `RESOURCES`, until no time is left. The decrease at each
step is the share of that resource. The shares therefore add up exactly to the layer's time, and communication that
overlaps with other work (context parallelism's ring with attention, FSDP's all-gathers with everything) counts only as
far as it is exposed.

>>> from octopipe.costs.cluster.hardware import gpu
>>> from octopipe.costs.cluster.setup import Setup
>>> from octopipe.models.zoo import preset
>>> shares = layer_shares(preset("llama3-8b"), Setup(gpu=gpu("h100"), tp=2, seq=4096))
>>> parts = shares.shown["I"][:, 1]  # of the first block
>>> [name for name, ms in zip(shares.names, parts) if ms > 0]
['tp', 'launches', 'memory', 'products', 'cores']
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.analytic.calibration import Rates
from octopipe.costs.analytic.layer_pricing import LayerCost
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.analytic.table import price_layers, price_recomputing
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import ModelSpec

RESOURCES = ("host", "dp", "cp", "ep", "tp", "launches", "memory", "products", "cores")
"""The resources in the order in which they are made free: those that overlap with others come first."""
NAMES = ("recomputation", *RESOURCES)
COLLECTIVES = ("dp", "cp", "ep", "tp")
_COLUMNS = {"F": "forward_ms", "I": "input_ms", "W": "weight_ms"}

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShares:
    """The breakdown of layer times for one micro-batch: per op kind (F, I, W), an array [name, layer] in ms."""

    names: tuple[str, ...]
    shown: Mapping[str, Floats]
    """Exposed time: sums over names are the layers' times."""
    alone: Mapping[str, Floats]
    """Time of each collective without overlap; zero for everything else."""

    def per_ms(self, kind: str, first: int, stop: int, *, alone: bool = False) -> Floats:
        """Return, per name, its exposed time per millisecond of an op over layers `first` to `stop - 1`.

        With `alone`: its time without overlap, instead of its exposed time. B is I and W together; R is all
        recomputation.
        """
        if kind == "R":
            return np.array([float(name == "recomputation" and not alone) for name in self.names])
        kinds = ("I", "W") if kind == "B" else (kind,)
        values = self.alone if alone else self.shown
        whole = sum(float(self.shown[k][:, first:stop].sum()) for k in kinds)
        parts = np.sum([values[k][:, first:stop].sum(axis=1) for k in kinds], axis=0)
        return parts / whole if whole > 0 else np.zeros(len(self.names))


def layer_shares(spec: ModelSpec, setup: Setup, *, rates: Mapping[str, Rates] | None = None) -> LayerShares:
    """Return the breakdown of every layer's time under a set-up; `rates` replace the calibrated ones, by precision."""
    pricing = Pricing.of(setup, rates)
    whole = _times(price_recomputing(spec, pricing)[0])
    once = replace(pricing, setup=replace(setup, recompute="none", recompute_layers=None))
    steps = [whole]
    for count in range(len(RESOURCES) + 1):
        steps.append(_times(price_layers(spec, pricing_of(once, RESOURCES[:count]))[0]))
    shown = {kind: np.stack([before[kind] - after[kind] for before, after in pairwise(steps)]) for kind in _COLUMNS}
    alone = {kind: np.zeros_like(values) for kind, values in shown.items()}
    for name in COLLECTIVES:
        others = [resource for resource in RESOURCES if resource != name]
        times = _times(price_layers(spec, pricing_of(once, others))[0])
        for kind in _COLUMNS:
            alone[kind][NAMES.index(name)] = times[kind]
    return LayerShares(names=NAMES, shown=shown, alone=alone)


def pricing_of(pricing: Pricing, free: Iterable[str]) -> Pricing:
    """The pricing with these resources made free."""
    kinds = frozenset(free)

    def without(rates: Rates) -> Rates:
        waits = dict.fromkeys(("launch_ms", "moe_ms", "rack_moe_ms"), 0.0)
        more = waits if "launches" in kinds else {}
        more |= {"hbm": math.inf} if "memory" in kinds else {}
        more |= {"gemm": math.inf} if "products" in kinds else {}
        return replace(rates, **more)

    return replace(pricing, free=kinds, rates=without(pricing.rates), plain=without(pricing.plain))


def _times(costs: list[LayerCost]) -> dict[str, Floats]:
    return {kind: np.array([getattr(cost, name) for cost in costs]) for kind, name in _COLUMNS.items()}
