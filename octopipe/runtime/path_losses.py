"""Several losses along one path: heads that branch off the backbone, each with its own loss.

Knows: which loss belongs to which layer. Does not know: how losses are computed or added; the loss of a micro-batch is
the sum of all losses on its path, and the gradients are those of that sum.

    losses = octopipe.PathLosses({5: cross_entropy, 8: lambda out, target: 0.3 * cross_entropy(*shifted(out, target))})
    octopipe.Pipeline(layers, plan, losses)       # layers 5 and 8 end stages that no edge leaves
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan


class PathLosses:
    """A loss function for every layer at which a path ends, such as the heads of multi-token prediction.

    `losses` maps the number of such a layer to its `loss(output, target)`; the loss of a micro-batch is their sum.
    """

    def __init__(self, losses: Mapping[int, Callable[[Any, Any], Tensor]]):
        if not losses:
            raise OctoPipeError("PathLosses of no layer; give one loss function for each layer that ends a path")
        self.losses = dict(losses)

    def each(self, wrap: Callable[[Callable[[Any, Any], Tensor]], Callable[[Any, Any], Tensor]]) -> PathLosses:
        """Return the losses of the same layers, each wrapped by `wrap`."""
        return PathLosses({layer: wrap(loss) for layer, loss in self.losses.items()})

    def __call__(self, output: Any, target: Any) -> Tensor:
        raise OctoPipeError("PathLosses is several losses: use it with a plan whose paths fork")

    def of_layer(self, layer: int) -> Callable[[Any, Any], Tensor]:
        """Return the loss of the stage that ends with this layer."""
        if layer not in self.losses:
            known = ", ".join(map(str, sorted(self.losses)))
            raise OctoPipeError(f"a path ends with layer {layer}, and losses are given for {known}; add one for it")
        return self.losses[layer]

    def check(self, plan: Plan) -> None:
        """Raise an error if a path of the plan ends with a layer that has no loss."""
        for number, route in enumerate(plan.routes):
            leaves = {a for a, _ in plan.edges[number]} if plan.edges else set(route[:-1])
            for s in route:
                if s not in leaves:
                    self.of_layer(plan.stages[s].stop - 1)
