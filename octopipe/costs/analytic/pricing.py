"""What the price of a layer depends on besides the layer: the set-up, the cluster, and the rates of the stack.

Knows: which rates belong to a set-up, and which resources are priced as free. Does not know: any price
(`products.py`, `layer_pricing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octopipe.costs.analytic.calibration import Rates, rates_of
from octopipe.costs.analytic.traffic import Exchange
from octopipe.costs.cluster.hardware import Cluster
from octopipe.costs.cluster.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """The properties of the run that the formulas below need."""

    setup: Setup
    cluster: Cluster
    rates: Rates
    plain: Rates
    """Rates of operations that stay in bf16."""
    exchange: Exchange = field(default_factory=Exchange)
    """How experts exchange tokens."""
    free: frozenset[str] = frozenset()
    """The resources (of `shares.RESOURCES`) that are priced as free, to find out what a resource costs."""

    @classmethod
    def of(cls, setup: Setup, rates: Mapping[str, Rates] | None = None, exchange: Exchange | None = None) -> Pricing:
        cluster = setup.cluster()
        found = rates or {name: rates_of(cluster.gpu, name, setup.stack) for name in {setup.precision, "bf16"}}
        return cls(
            setup=setup,
            cluster=cluster,
            rates=found[setup.precision],
            plain=found["bf16"],
            exchange=exchange or Exchange(most_nodes=setup.nodes_per_token),
        )

    def unless_free(self, what: str, took_ms: float) -> float:
        """Return the time, or zero if the resource `what` is priced as free."""
        return 0.0 if what in self.free else took_ms

    @property
    def bytes_per_ms(self) -> float:
        return self.cluster.gpu.hbm_bytes_per_ms * self.rates.hbm

    @property
    def host_bytes_per_ms(self) -> float:
        """Bandwidth of the link to the host's memory, in each direction."""
        return 1e6 * (self.setup.host_gb_per_s or self.cluster.gpu.host_gb_per_s)

    def flops_per_ms(self, precision: str) -> float:
        return self.cluster.gpu.peak_flops_per_ms(precision) * self.cluster.gpu.clock
