"""The extra time of adding the weight gradients of experts in a separate pass, where no fused kernel exists.

Knows: the memory traffic of that pass. Does not know: which kernels a runtime has (callers do), or anything about times
that were measured.

The prices of W (`layer_pricing.py`) assume that the matrix product itself adds into the gradient, as the kernels of
published runs do, so that only the longer of the two counts. torch has such a kernel for single matrix products and for
batches of equal ones, but not for grouped products, whose rows are distributed unevenly. There the product is written
in 16 bits, and read again by a second kernel that adds it. In a layer with many experts and few tokens for each, adding
the gradient takes much longer than computing it.
"""

from __future__ import annotations

from octopipe.costs.analytic.flops import items_of, part_work
from octopipe.costs.analytic.layer_pricing import Pricing, gpu_share
from octopipe.models.layers import Moe
from octopipe.models.spec import Layer

PRODUCT_BYTES = 4.0
"""Traffic per weight: a product in bfloat16, written and read."""


def separate_sum_ms(layer: Layer, pricing: Pricing) -> float:
    """Return by how many ms W of a layer exceeds its price if a separate kernel adds the experts' gradients."""
    setup, more = pricing.setup, 0.0
    assert setup.seq is not None
    for part, source in zip(layer.parts, layer.sources, strict=True):
        if not isinstance(part, Moe):
            continue
        length, count, share = items_of(source, setup.seq, setup.micro_batch_size)
        work = part_work(part, seq=length, micro_batch_size=count)
        for product in work.products:
            if product.experts:
                rows, inner, outer, weights = gpu_share(product, work.tokens, pricing)
                reached = pricing.plain.product_share(rows / weights, inner, outer)
                took = 2.0 * rows * inner * outer / (pricing.flops_per_ms("bf16") * reached)
                elements = weights * inner * outer
                added = 2 * setup.gradient_bytes * elements / pricing.bytes_per_ms
                written = PRODUCT_BYTES * elements / pricing.bytes_per_ms
                more += share * (took + written + added - max(took, added))
    return more
