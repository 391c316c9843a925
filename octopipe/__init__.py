"""OctoPipe: decide together which layers form a stage, which rank holds it and in which order ranks work.

Public names load on first use, so that `import octopipe` costs nothing and torch is never imported unless
a name that trains is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "OctoPipeError": "octopipe.errors",
    "CostTable": "octopipe.cost",
    "ModelSpec": "octopipe.model",
    "preset": "octopipe.zoo",
    "resolve_costs": "octopipe.resolve",
    "Op": "octopipe.plan",
    "Stage": "octopipe.plan",
    "Plan": "octopipe.plan",
    "Program": "octopipe.lowering",
    "lower": "octopipe.lowering",
    "Timeline": "octopipe.timeline",
    "simulate": "octopipe.simulator",
    "build_plan": "octopipe.systems",
    "tune": "octopipe.tuner",
    "Pipeline": "octopipe.runtime",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'octopipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
