"""One module per table or figure of the paper, each with a PART.

Knows: their order, which is the paper's. Does not know: what any of them does.
"""

from __future__ import annotations

import importlib

from octopipe.views.reproduce.part import Part

MODULES = (
    "bubbles",
    "two_stages",
    "deadlock",
    "taxonomy",
    "model_table",
    "end_to_end",
    "pp_sizes",
    "communication",
    "traces",
    "ablation",
    "fidelity",
    "search",
    "scaling",
    "large_scale",
    "recomputation",
    "illustrations",
    "sensitivity",
    "beyond",
)


def parts() -> tuple[Part, ...]:
    """Return all parts, in the paper's order."""
    return tuple(importlib.import_module(f"{__name__}.{name}").PART for name in MODULES)
