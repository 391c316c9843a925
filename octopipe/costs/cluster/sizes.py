"""Derived sizes: the missing parallel size for a given number of GPUs, the micro-batches of a global batch, and the
layers that full recomputation runs again.

Knows: products of parallel sizes. Does not know: the set-up that contains them (`setup.py`).
"""

from __future__ import annotations

import math

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.fields import Whole


def derived_sizes(
    *, gpus: int | None, tp: int | None, cp: int | None, pp: int | None, dp: int | None
) -> dict[str, int | None]:
    """Fill in the one size that the others and the number of GPUs leave open.

    >>> derived_sizes(gpus=64, tp=4, cp=None, pp=8, dp=None)["dp"]
    2
    """
    sizes = {"tp": tp, "cp": 1 if cp is None else cp, "pp": pp, "dp": dp}
    if gpus is None:
        return sizes
    Whole().read("gpus", gpus)
    open_ones = [name for name in ("dp", "pp", "tp") if sizes[name] is None]
    known = math.prod(v for v in sizes.values() if v is not None)
    if gpus % known or (not open_ones and known != gpus):
        given = " x ".join(f"{k} {v}" for k, v in sizes.items() if v is not None)
        raise OctoPipeError(f"{given} = {known} does not make {gpus} GPUs; change one, or leave one out")
    if len(open_ones) == 1:
        sizes[open_ones[0]] = gpus // known
    elif open_ones == ["dp", "tp"]:
        return sizes  # tp has a default of its own; dp follows once it is known
    elif open_ones:
        raise OctoPipeError(
            f"{gpus} GPUs leave {' and '.join(open_ones)} open; give all but one, or let `octopipe plan` choose"
        )
    return sizes


def micro_batches_of(*, global_batch: int | None, micro_batch_size: int, dp: int, pp: int, given: int | None) -> int:
    """Return the micro-batches per pipeline and step: the given number, that of the global batch, or 2 x pp.

    Raise an error if the given number and the global batch contradict each other.
    """
    if global_batch is None:
        return given or 2 * pp
    Whole().read("global_batch", global_batch)
    if global_batch % (micro_batch_size * dp):
        raise OctoPipeError(
            f"global batch {global_batch} is not a multiple of micro-batch size {micro_batch_size} x dp {dp}; "
            "change one"
        )
    found = global_batch // (micro_batch_size * dp)
    if given is not None and given != found:
        raise OctoPipeError(
            f"global batch {global_batch} makes {found} micro-batches, not {given}; leave --micro-batches out"
        )
    return found


def checkpointed_layers(num_layers: int, count: int | None) -> tuple[int, ...]:
    """Return the layers that full recomputation runs again inside the backward: all between embedding and head, or
    `count` of them, spread evenly."""
    inner = num_layers - 2
    count = inner if count is None else min(count, inner)
    return tuple(i for i in range(1, inner + 1) if i * count // inner > (i - 1) * count // inner)
