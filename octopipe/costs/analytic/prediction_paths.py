"""The connections of a model whose multi-token prediction is on paths of its own, and the weight that its heads share.

Knows: which layers of a `ModelSpec` fork, and how many bytes the projection to the vocabulary takes. Does not know: the
times of layers (`layer_pricing.py`).
"""

from __future__ import annotations

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.footprint import Weights, static_bytes
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.layer_graph import LayerGraph
from octopipe.models.spec import Head, ModelSpec


def graph_of(spec: ModelSpec, pricing: Pricing, held: np.ndarray) -> LayerGraph | None:
    """Return the connections of layers that fork, or None if the layers form a chain.

    They include the weight that all heads share, also with the embedding if it is tied.
    """
    if not spec.takes:
        return None
    if pricing.setup.vocab_parallel:
        raise OctoPipeError(f"{spec.name}: its heads are on paths of their own (--mtp); leave vocab_parallel out")
    heads = [k for k, layer in enumerate(spec) if isinstance(layer, Head)]
    first = spec.layers[heads[0]]
    weights = Weights(spec.vocab * spec.hidden / pricing.cluster.tp, 0.0)
    size = static_bytes(weights, pricing.setup, pricing.cluster)
    layers = (0, *heads) if first.tied_parameters else tuple(heads)
    return LayerGraph(takes=spec.takes, shared=((layers, float(min(size, *(held[k] for k in layers)))),))
