"""Every registered system on real models: a plan that check accepts and every channel model can run, or a reason.

Parametrised over the registry, so that a new system is held to it from its first day.
"""

from __future__ import annotations

from functools import cache

import pytest
from effort import WHOLE, some

from octopipe.base.errors import DoesNotFitError, NotApplicableError
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.search.systems import build_plan, systems
from octopipe.simulation.lowering import CHANNELS, lower

SIZES = ((4, 4), (4, 8), (4, 16), (8, 8), (8, 16))
"""Ranks and micro-batches."""
MODELS = ("llama3-8b", "jamba-52b", "nemotron-h-56b")
OPTIONS = {"tessel": {"time_limit_s": 0.5}, "optpipe": {"effort": 0.05}}
"""Searches that take as long as they are given."""


@cache
def costs_of(model: str, pp: int) -> CostTable:
    return resolve_costs(model, pp=pp)


@pytest.mark.parametrize("model", some(MODELS, quick=["jamba-52b"]))
@pytest.mark.parametrize("name", systems())
def test_every_system_runs_or_says_why_not(name: str, model: str) -> None:
    if name in ("tessel", "optpipe"):
        pytest.importorskip("ortools")
    ran = 0
    for pp, m in SIZES if WHOLE else SIZES[:2]:
        costs = costs_of(model, pp)
        try:
            # build_plan checks; splitting on alternate cases covers both forms at half the price
            split = (m // pp) % 2 == 0
            plan = build_plan(name, costs, pp, m, split_backward=split or None, **OPTIONS.get(name, {}))
        except (NotApplicableError, DoesNotFitError) as error:
            assert str(error).startswith(f"{name}: ") and "\n" not in str(error) and len(str(error)) > 20
            continue
        ran += 1
        assert (plan.num_ranks, plan.num_micro_batches, plan.num_layers) == (pp, m, costs.num_layers)
        assert plan.extra["system"] == name
        for channel in CHANNELS:
            lower(plan, costs, channel=channel)  # proves freedom from deadlock, or raises
    assert ran > 0, f"{name} never applies to {model}"
