"""Figures and the algorithm that show how the system works and print no number: where each lives in our code."""

from __future__ import annotations

import importlib.util

from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import Result, Row

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
        rows.append(Row.holds(f"{label}: {what}", "drawn", f"`{module}`", there, why="the module has moved"))
    return Result(rows=tuple(rows), costs="none needed")


PART = Part(name="illustrations", title="Figures without numbers", labels=tuple(PLACES), run=run)
