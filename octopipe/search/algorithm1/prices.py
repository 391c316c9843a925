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
    """Transfer time of the output of F to the next stage."""
    gradient_ms: Floats
    """Transfer time of the gradient that I sends to the previous stage."""
    kept: Floats
    """Bytes that a forward leaves in memory if the stage recomputes."""
    held: Floats
    """Bytes of all activations, which a forward leaves in memory if the stage does not recompute, and R restores."""
    stash: Floats
    """Bytes that stay in memory from I until W."""
    work: Floats
    """[stage]: workspace of an op."""
    static: Floats
    """[rank]: bytes of weights and everything else that is held during the whole step."""
    rank: Ints
    """[stage]: rank of the stage."""
    before: Ints
    """[route, stage]: the previous stage on the route, or -1."""
    after: Ints
    """[route, stage]: the next stage on the route, or -1."""
    route: Ints
    """[micro_batch]: number of its route."""
    update_ms: Floats
    """[rank]: time of the optimizer, which follows the last op."""
