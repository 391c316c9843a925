"""How layers that are measured one by one are connected: the inputs of each, and which of them run with a loss.

Knows: which layers' outputs a layer takes. Does not know: how layers are measured (`profiler.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from octopipe.runtime.path_losses import PathLosses


def ends_of(count: int, takes: Sequence[Sequence[int]]) -> list[int]:
    """Return the layers whose output no layer takes; they run with a loss."""
    taken = {k for row in takes for k in row} if takes else set(range(count - 1))
    return [k for k in range(count) if k not in taken]


def loss_of(loss_fn: Callable[..., Tensor], layer: int, target: Any) -> Callable[[Any], Tensor]:
    """Return the loss of a layer that ends a path, as a function of its output."""
    mine = loss_fn.of_layer(layer) if isinstance(loss_fn, PathLosses) else loss_fn
    return lambda out: mine(out, target)


def input_of(layer: int, takes: Sequence[Sequence[int]], outputs: Mapping[int, Any]) -> Any:
    """Return the input of a layer: one output, or several as a tuple, as after a join."""
    taken = takes[layer] if takes and layer else (layer - 1,)
    return outputs[taken[0]] if len(taken) == 1 else tuple(outputs[k] for k in taken)
