"""Figures, and the algorithm, that show how the system works without printing numbers: where each is in our code."""

from __future__ import annotations

import importlib.util
from itertools import combinations, permutations, product
from math import comb, factorial

from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import Result, Row, baseline

PLACES = {
    "fig:pipeline_phases": ("partition, placement and schedule of a plan; the executor", "octopipe.plans.plan"),
    "fig:overview": ("profile → simulator → tuner → executor", "octopipe.api"),
    "fig:5_sim": ("the pipeline as a graph of computation, communication and memory", "octopipe.simulation.simulator"),
    "fig:pipeline_tuner": (
        "layer migration, stage dispersion, layer exchange, advances and delays",
        "octopipe.search.algorithm1",
    ),
    "alg:tuning": ("Algorithm 1, with its priorities", "octopipe.search.algorithm1.search"),
}
"""Label -> what it shows, and our module for it."""


def run(bench: Bench) -> Result:
    rows = []
    for label, (what, module) in PLACES.items():
        there = importlib.util.find_spec(module) is not None
        rows.append(Row.constructed(label, f"{label}: {what}", "drawn", f"`{module}`", there, group="illustrations"))
    rows += _space()
    return Result(rows=tuple(rows), costs="none needed")


def _space() -> list[Row]:
    """Return a row that compares the paper's formula for the size of the search space with a count on a small case."""
    layers, stages, gpus, batches = 6, 3, 2, 3
    cuts = sum(1 for _ in combinations(range(1, layers), stages - 1))
    places = sum(1 for _ in product(range(gpus), repeat=stages))
    ops = [(kind, m) for m in range(batches) for kind in "FB"]
    orders = sum(
        1 for order in permutations(ops) if all(order.index(("F", m)) < order.index(("B", m)) for m in range(batches))
    )
    formula = comb(layers - 1, stages - 1) * gpus**stages * factorial(2 * batches) // 2**batches
    counted = cuts * places * orders
    return [
        Row.number(
            "space.formula",
            f"size of the space by its formula (L {layers}, S {stages}, N {gpus}, M {batches}), counted one by one",
            float(formula),
            baseline(float(counted)),
            within=0.0,
            source="§III-C",
            why="the formula counts the orders of one device alone",
        )
    ]


PART = Part(name="illustrations", title="Figures without numbers", labels=tuple(PLACES), run=run)
