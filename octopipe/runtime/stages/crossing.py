"""Detects values that would bypass the pipeline between stages: through an attribute, a list, a closure.

Knows: which objects belong to other stages and the loss, and how to reject a tensor that a forward has stored where
they can reach it. Does not know: how places are found (`places.py`) or when forwards run (`replay.py`).

The balance loss of a router is often stored in an attribute of the layer, or appended to a list, where the loss
function reads it. This works in one process, because the loss runs directly after the layers on the same micro-batch.
In a pipeline, the loss belongs to another stage, on another rank (where the attribute still has its initial value) or
several micro-batches later (where it has the value of another one), so the loss would be silently wrong. Therefore a
tensor with an autograd graph that a forward stores in such a place is rejected. Values that only the same stage can
reach are allowed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan
from octopipe.runtime.stages.chain import StageChain
from octopipe.runtime.stages.places import snapshot_of_modules
from octopipe.runtime.stages.replay import Replay, key_of
from octopipe.runtime.stages.state import Box, Snapshot, items_of
from octopipe.runtime.values import flatten


class Elsewhere:
    """The places in which the forwards of one group of layers must not store tensors with a graph."""

    def __init__(self, things: Sequence[tuple[str, weakref.ref[Any]]], loss_fn: Any):
        """`things`: the other layers with their names for messages. `loss_fn`: None if it runs after these layers."""
        self._things, self._loss_fn = things, loss_fn
        self._looked: set[Any] = set()

    def check(self, before: Snapshot, moved: Sequence[Box]) -> None:
        """Raise an error if a forward has stored a tensor with a graph where other layers or the loss can reach it.

        `moved`: the places that the forward has changed.
        """
        known = before.tensors
        for box in moved:
            key = next((k for k, v in items_of(box.read()) if _has_graph(v, known)), None)
            if key is None or (key_of(box), key) in self._looked:
                continue
            self._looked.add((key_of(box), key))
            if who := self._reached_by(box, key):
                raise OctoPipeError(
                    f"a forward leaves a value in {box.describe(key)}, where {who} can reach it, but {who} runs in "
                    "another stage, for other micro-batches or on another rank: return the value with the layer's "
                    "output and pass it on (or inject a router's loss with an autograd function); detach values "
                    "that are only inspected"
                )

    def _reached_by(self, box: Box, key: Any) -> str:
        if self._loss_fn is not None and _holds(snapshot_of_modules([], [("loss_fn", self._loss_fn)]), box, key):
            return "loss_fn"
        for label, ref in self._things:
            thing = ref()
            if thing is not None and _holds(snapshot_of_modules([(label, thing)]), box, key):
                return label
        return ""


def keep_apart(
    plan: Plan, chains: Mapping[int, StageChain], layers: Mapping[int, weakref.ref[nn.Module]], loss_fn: Any
) -> None:
    """Make every group of layers reject values that bypass the pipeline. `layers`: all known layers, on any rank."""
    last = {route[-1] for route in plan.routes}
    for number, chain in chains.items():
        for k, (stage, _) in enumerate(chain.parts):
            replay: Replay = stage.replay
            own = range(stage.first_layer, stage.first_layer + len(stage.modules))
            things = [(f"layer {j}", ref) for j, ref in layers.items() if j not in own]
            has_loss = number in last and k == len(chain.parts) - 1
            replay.elsewhere = Elsewhere(things, None if has_loss else loss_fn).check if things else None


def warn_of_copies(chains: Mapping[int, StageChain], ranks_of: Mapping[int, Collection[int]]) -> bool:
    """Warn once if a layer that keeps state has copies on several ranks; returns whether there was a warning."""
    for chain in chains.values():
        for stage, _ in chain.parts:
            holders = sorted(ranks_of.get(stage.first_layer, ()))
            cut = any(hasattr(module, "shard_start") for module in stage.modules)  # shards see all micro-batches
            if len(holders) > 1 and not cut and (places := stage.replay.kept()):
                warnings.warn(
                    f"{places[0]} changes from forward to forward, and ranks {holders} each hold a copy of its layer: "
                    "every copy sees its own micro-batches only (buffers are averaged, other things stay apart); plan "
                    "without copies (--no-copies) where they must be one",
                    stacklevel=4,
                )
                return True
    return False


def known_layers(layers: Sequence[Any] | Mapping[int, Any]) -> dict[int, weakref.ref[nn.Module]]:
    """Layers that are already modules, by number, as weak references."""
    pairs = layers.items() if isinstance(layers, Mapping) else enumerate(layers)
    return {k: weakref.ref(layer) for k, layer in pairs if isinstance(layer, nn.Module)}


def _holds(found: Snapshot, box: Box, key: Any) -> bool:
    whole = box.kind not in ("variables", "fields")
    return any(b.thing is box.thing and (whole or key in b.names) for b, _ in found.boxes)


def _has_graph(value: Any, known: Mapping[int, Any]) -> bool:
    """Whether a value contains a tensor with a new autograd history."""
    if isinstance(value, Tensor):
        return value.grad_fn is not None and id(value) not in known
    if not isinstance(value, (list, tuple, dict)) or len(value) > 64:
        return False
    leaves: list[Any] = []
    flatten(value, leaves)
    return any(isinstance(t, Tensor) and t.grad_fn is not None and id(t) not in known for t in leaves)
