"""Costs of the stages of a structure, as the arrays that the kernels of this package take.

Knows: the arrays. Does not know: how they are filled (`candidate`), or what they are used for (`replay`, `arrange`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


class Prices(NamedTuple):
    """Times and bytes, [stage, micro_batch] unless stated otherwise, as in `plans/price.py`."""

    ms: Floats
    """[kind, stage, micro_batch]"""
    forward_ms: Floats
    """The transfer of what F hands to the next stage."""
    gradient_ms: Floats
    """The transfer of what I hands to the stage before."""
    kept: Floats
    """Bytes that F leaves where the stage recomputes."""
    held: Floats
    """Bytes that F leaves where it does not, and that R brings back."""
    stash: Floats
    """Bytes that stay from I until W."""
    work: Floats
    """[stage]: workspace of an op."""
    static: Floats
    """[rank]: weights and whatever else stays."""
    rank: Ints
    """[stage]"""
    before: Ints
    """[route, stage]: the stage before it on a route, or -1."""
    after: Ints
    route: Ints
    """[micro_batch]"""
    update_ms: Floats
    """[rank]: the optimizer after its last op."""
