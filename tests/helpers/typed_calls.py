"""Calls of the public functions, right and wrong ones, which mypy reads and nobody runs.

`make types` checks this file together with the package. A right call must pass. A wrong call carries the error that
mypy has to report for it, and an ignore without its error is an error itself (`warn_unused_ignores` in
pyproject.toml): if the package lost its types, this file would no longer pass.
"""

from __future__ import annotations

import octopipe


def right_calls() -> float:
    plan = octopipe.build_plan("1f1b", "llama3-8b", 4, 8, tp=2)
    step_ms: float = octopipe.simulate(plan).step_ms
    return step_ms


def wrong_calls() -> None:
    octopipe.tune("llama3-8b", 4, budget="10s")  # type: ignore[call-arg]
    octopipe.simulate(4, "llama3-8b")  # type: ignore[arg-type]
    octopipe.build_plan("1f1b", "llama3-8b", 4, gpuu="h100")  # type: ignore[call-arg]
    octopipe.tuned("llama3-8b", 4)  # type: ignore[attr-defined]
    octopipe.megatron.placements  # type: ignore[attr-defined]  # noqa: B018
    octopipe.Plan.load(3)  # type: ignore[arg-type]
    octopipe.Pipeline([], "plan.json", print)  # type: ignore[arg-type]
