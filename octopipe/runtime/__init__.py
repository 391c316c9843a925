"""Execution of plans: the packages that may import torch (with `octopipe.runtime.nn`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from octopipe.runtime.ranks.launch import load_kernels_early

if TYPE_CHECKING:
    from octopipe.runtime.pipeline import Pipeline

__all__ = ["Pipeline"]

if "RANK" in os.environ and "LOCAL_RANK" in os.environ:  # under torchrun: most probably before CUDA starts
    load_kernels_early()


if not TYPE_CHECKING:  # a checker reads the names above, and reports all others

    def __getattr__(name: str) -> Any:
        if name == "Pipeline":  # torch takes a second to import, which only training needs
            from octopipe.runtime.pipeline import Pipeline

            return Pipeline
        raise AttributeError(f"module 'octopipe.runtime' has no attribute {name!r}")
