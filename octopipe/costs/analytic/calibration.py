"""What published runs calibrate: how much of its peak a GPU generation reaches, per precision.

Knows: one set of rates per (generation, precision), fitted to published training throughput by
`benchmarks/bench_published.py --fit`; nothing here depends on a model. Does not know: what the rates are applied
to (`analytic.py`).

A matrix product of m x k by k x n reaches `gemm / (1 + half * (1/m + 1/n + 1/k))` of the peak: the share of a large
product, less what small sides lose to tile edges, prologues and waves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from octopipe.costs.cluster.hardware import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Shares of data-sheet figures that training kernels reach."""

    gemm: float
    """Of the peak FLOP rate, by a large matrix product."""
    half: float
    """Values: a product whose three sides are this long reaches a quarter of `gemm`."""
    core: float
    """Of the bf16 peak, by softmax attention."""
    launch_ms: float = 0.017
    """Per kernel of our count: start, drain and the host's time, as far as they show, and smaller kernels beside it."""
    passes: float = 2.25
    """Times every saved value crosses the memory bus in F; half as often again in I."""
    moe_passes: float = 5.8
    """Times the routed tokens cross it to be sorted, gathered and weighted; in F, and again in I."""
    cast_bytes: float = 0.0
    """Memory traffic per value that is quantized before a product."""
    hbm: float = 0.8
    """Of the memory bandwidth, by streaming kernels. Our choice."""
    link: float = 0.9
    """Of the link bandwidth, by collectives; a part of them runs behind compute, which this holds too."""

    def product_share(self, rows: float, inner: float, outer: float) -> float:
        """Share of the peak of one product."""
        return self.gemm / (1.0 + self.half * (1.0 / rows + 1.0 / inner + 1.0 / outer))


RATES: Mapping[tuple[str, str], Rates] = MappingProxyType(
    {
        ("hopper", "bf16"): Rates(gemm=0.78, half=200.0, core=0.51),
        ("hopper", "fp8"): Rates(gemm=0.69, half=310.0, core=0.51, cast_bytes=3.8),
        ("blackwell", "bf16"): Rates(gemm=0.72, half=285.0, core=0.40),
        ("blackwell", "fp8"): Rates(gemm=0.64, half=400.0, core=0.40, cast_bytes=3.8),
    }
)
UNCALIBRATED = "hopper"
"""Generations without published runs here take this one's rates."""


def rates_of(gpu: Gpu, precision: str) -> Rates:
    """The rates of a GPU's generation in this precision."""
    return RATES.get((gpu.generation, precision)) or RATES[UNCALIBRATED, precision]


def is_calibrated(gpu: Gpu, precision: str = "bf16") -> bool:
    return (gpu.generation, precision) in RATES
