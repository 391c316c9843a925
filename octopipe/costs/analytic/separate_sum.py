"""What it takes to add the weight gradients of experts in a pass of its own, where no kernel does both.

Knows: the memory traffic of that pass. Does not know: which kernels a runtime has (callers do), or anything about times
that were measured.

The prices of W (`layer_pricing.py`) let the matrix product add into the gradient, as the kernels of published runs do:
the longer of the two counts. torch has such a kernel for single matrix products and for batches of equal ones, but not
for grouped products, whose rows are distributed unevenly. There the product is written in 16 bits, and read again by a
second kernel that adds it. A layer with many experts and few tokens for each has much more gradient than work.
"""

from __future__ import annotations

from octopipe.costs.analytic.flops import items_of, part_work
from octopipe.costs.analytic.layer_pricing import Pricing, gpu_share
from octopipe.models.layers import Moe
from octopipe.models.spec import Layer

PRODUCT_BYTES = 4.0
"""Traffic per weight: a product in bfloat16, written and read."""


def separate_sum_ms(layer: Layer, pricing: Pricing) -> float:
    """How much longer W of a layer takes than its price if experts' gradients are added by a kernel of its own."""
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
