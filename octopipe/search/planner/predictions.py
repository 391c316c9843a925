"""Multi-token prediction in a plan for a cluster: the form in which a runtime runs it, and where its parts are placed.

Knows: which runtimes run it as a path of its own and which as layers of the chain before the head, and on which ranks a
plan places it. Does not know: how plans of either form are found (`search.py`, `search/graphs/branches.py`), or the
runtimes' flags (`megatron_line.py`).
"""

from __future__ import annotations

from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.models.spec import Head, ModelSpec, Mtp
from octopipe.plans.plan import Plan
from octopipe.search.planner.pricing import Candidate

PATHS = ("any", "octopipe")
"""Values of `--for` under which `plan --mtp` plans a path: `octopipe.Pipeline` alone runs plans that fork."""
CHAINS = ("megatron",)
"""Runtimes whose own multi-token prediction has a placement in their flags."""


def planned_for(spec: ModelSpec, runtime: str) -> ModelSpec:
    """Return the model with its multi-token prediction in the form that the runtime runs: a path or part of the
    chain."""
    paths = spec.with_prediction_paths()  # refuses a model without it
    if runtime in PATHS:
        return paths
    if runtime in CHAINS:
        return spec
    raise OctoPipeError(
        f"--for {runtime} runs chains of layers and has no placement for multi-token prediction; leave --mtp out, or "
        "plan for octopipe or megatron"
    )


def refuses_paths(runtime: str, spec: ModelSpec) -> str:
    """Return why a runtime cannot run predictions on a path of their own; empty if it can, or if there are none."""
    if not spec.takes or runtime in PATHS:
        return ""
    instead = "plan with --for megatron, which places them before the head" if runtime in CHAINS else "plan without it"
    return f"it runs chains of layers, and --mtp planned the predictions as a path of their own; {instead}"


def placement(candidate: Candidate) -> dict[str, Any] | None:
    """Return how the predictions are planned (path or chain) and the ranks of their layers and of the heads; None for a
    model without predictions, or if the split was not simulated."""
    spec, plan = candidate.spec, candidate.plan
    if spec is None or plan is None:
        return None
    modules = [k for k, layer in enumerate(spec) if isinstance(layer, Mtp)]
    if not modules:
        return None
    heads = [k for k, layer in enumerate(spec) if isinstance(layer, Head)]
    return {
        "planned_as": "path" if spec.takes else "chain",
        "prediction_layers": [{"layer": k, "ranks": _ranks_of(plan, k)} for k in modules],
        "heads": [{"layer": k, "ranks": _ranks_of(plan, k)} for k in heads],
    }


def placement_words(candidate: Candidate) -> list[str]:
    """Return the result of `placement` as a sentence, or no sentence."""
    found = placement(candidate)
    if found is None:
        return []
    layers = _at(found["prediction_layers"])
    if found["planned_as"] == "chain":
        return [f"Multi-token prediction is part of the chain: prediction layer on rank {layers}, before the head."]
    main, *more = (_at([head]) for head in found["heads"])
    return [
        f"Multi-token prediction is a path of its own: prediction layer on rank {layers}, its head on rank "
        f"{', '.join(more)}, the main head on rank {main}."
    ]


def _at(rows: list[dict[str, Any]]) -> str:
    return ", ".join("/".join(map(str, row["ranks"])) for row in rows)


def _ranks_of(plan: Plan, layer: int) -> list[int]:
    return sorted({stage.rank for stage in plan.stages if stage.first <= layer < stage.stop})
