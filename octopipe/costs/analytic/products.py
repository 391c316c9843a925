"""The time of a layer's matrix products on one GPU.

Knows: one GPU's share of a product, how fast it is multiplied, and how the product of W is added to a gradient. Does
not know: everything else that a layer does (`layer_pricing.py`).
"""

from __future__ import annotations

from octopipe.costs.analytic.footprint import WEIGHT_BYTES
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.analytic.work import Product, Work

PRODUCT_BYTES = 4.0
"""Traffic per weight of a weight gradient that a second kernel adds: the product in bfloat16, written and read."""


class Products:
    """Time of a part's matrix products: equal in F, I and W except for the memory traffic of weights."""

    def __init__(self, work: Work, pricing: Pricing):
        self.forward_ms = self.weight_ms = self.experts_ms = 0.0
        self.cast_in = self.cast_out = 0.0
        setup = pricing.setup
        for product in work.products:
            rows, inner, outer, weights = gpu_share(product, work.tokens, pricing)
            low = setup.precision != "bf16" and product.low_precision
            rates = pricing.rates if low else pricing.plain
            share = rates.product_share(rows / max(weights, 1.0), inner, outer)
            took = 2.0 * rows * inner * outer / (pricing.flops_per_ms(setup.precision if low else "bf16") * share)
            elements = weights * inner * outer
            self.forward_ms += max(took, WEIGHT_BYTES * elements / pricing.bytes_per_ms)
            if product.experts:
                self.experts_ms += max(took, WEIGHT_BYTES * elements / pricing.bytes_per_ms)
            # W adds into the gradient: one read, one write. The product itself does so, and the longer of the two
            # counts, or a second kernel does after it.
            added = 2 * setup.gradient_bytes * elements / pricing.bytes_per_ms
            apart = rates.separate_sum if product.experts else 0.0
            second = took + PRODUCT_BYTES * elements / pricing.bytes_per_ms + added
            self.weight_ms += (1.0 - apart) * max(took, added) + apart * second
            if low:
                self.cast_in += rows * inner
                self.cast_out += rows * outer


def gpu_share(product: Product, tokens: float, pricing: Pricing) -> tuple[float, float, float, float]:
    """Return the rows, the two side lengths and the number of weights of one GPU's share of a product."""
    cluster = pricing.cluster
    rows, weights, tp = tokens / cluster.cp * product.rows, 1.0, cluster.tp
    if product.experts:
        # Balanced routing: a GPU computes as many rows as it sends, over its own experts.
        weights, tp = product.experts / cluster.ep, cluster.expert_tp
        rows *= tp / cluster.tp
    inner = product.inner / tp if product.cut == "inner" else float(product.inner)
    outer = product.outer / tp if product.cut == "outer" else float(product.outer)
    return rows, inner, outer, weights
