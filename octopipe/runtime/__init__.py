"""Running plans for real: the rooms that may import torch (with `octopipe.nn`)."""

from __future__ import annotations

from typing import Any

__all__ = ["Pipeline"]


def __getattr__(name: str) -> Any:
    if name == "Pipeline":  # torch takes a second to import: only who trains pays for it
        from octopipe.runtime.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module 'octopipe.runtime' has no attribute {name!r}")
