"""Plans as files and as JSON text, as functions (docs/plan-format.md).

Knows: the function names that callers use. Does not know: the format (`plan_json`), or when a plan is valid (`rules`).
"""

from __future__ import annotations

import os

from octopipe.plans.plan import Plan
from octopipe.plans.plan_json import FORMAT, FORMAT_2, plan_to_json


def plan_from_json(data: bytes | str, where: str = "plan") -> Plan:
    """A checked plan from JSON text; `where` names the source in errors."""
    return Plan.from_json(data, where)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file."""
    return Plan.load(path)


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan; an interrupted write leaves the old file intact."""
    plan.save(path)


__all__ = ["FORMAT", "FORMAT_2", "load_plan", "plan_from_json", "plan_to_json", "save_plan"]
