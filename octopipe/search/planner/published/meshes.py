"""The GPUs of one pipeline stage and what every layer costs on them.

Knows: a mesh of replicas that may differ in kind and in the samples they take, and the price of each layer there.
Does not know: how a system chooses meshes, or how stages follow each other (`arrangement.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.analytic.footprint import STATE_BYTES, WEIGHT_BYTES, Weights, shards_of
from octopipe.costs.analytic.layer_pricing import LayerCost
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.analytic.reduction import reduction_ms
from octopipe.costs.analytic.table import checkpointed, price_layers
from octopipe.costs.cluster.file import node_gpus
from octopipe.costs.cluster.hardware import GIB, Gpu, gpu
from octopipe.costs.cluster.setup import Setup, default_reserve_gib
from octopipe.models.spec import ModelSpec, Moe
from octopipe.search.planner.splits import tensor_sizes

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The replicas of one stage; each is a tensor-parallel group of one kind of GPU."""

    kinds: tuple[str, ...]
    """GPU preset of every replica, in the order of their GPUs."""
    shares: tuple[int, ...]
    """Samples of every micro-batch that each replica takes."""
    tp: int
    ep: int = 1
    zero: int = 0
    recompute: str = "none"

    @property
    def dp(self) -> int:
        return len(self.kinds)

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    def words(self) -> str:
        named = "+".join(f"{self.kinds.count(kind) * self.tp} x {kind}" for kind in dict.fromkeys(self.kinds))
        sizes = [f"tp {self.tp}", f"dp {self.dp}"] + [f"ep {self.ep}"] * (self.ep > 1)
        if len(set(self.shares)) > 1:
            shares = ", ".join(
                f"{share} samples on {kind}" for kind, share in dict.fromkeys(zip(self.kinds, self.shares, strict=True))
            )
            sizes.append(f"shares {shares}")
        return f"{named} ({', '.join(sizes)})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPrices:
    """The costs of one micro-batch on a mesh, as arrays over layers: the maximum over its replicas."""

    forward_ms: Floats
    input_ms: Floats
    weight_ms: Floats
    activation_bytes: Floats
    stash_bytes: Floats
    static_bytes: Floats
    gradient_bytes: Floats
    boundary_bytes: Floats
    workspace_bytes: Floats
    optimizer_ms: Floats
    reduction_ms: Floats
    """Time to reduce gradients and gather weights once per step, without overlap."""
    held_weight_bytes: Floats
    held_gradient_bytes: Floats
    held_state_bytes: Floats
    """Weights, gradients and optimizer state: the parts of the static bytes that offloading can move to the host."""
    capacity_bytes: float
    host_ms_per_byte: float

    @property
    def layer_ms(self) -> Floats:
        return self.forward_ms + self.input_ms + self.weight_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The cluster's GPUs in the order in which a pipeline uses them."""

    kinds: tuple[str, ...]
    """Preset of every GPU."""
    node_of: tuple[int, ...]

    @classmethod
    def of(cls, setup: Setup, gpus: int) -> Devices:
        assert setup.gpu is not None
        if not setup.nodes:
            size = setup.gpus_per_node or setup.gpu.gpus_per_node
            return cls(kinds=(setup.gpu.name,) * gpus, node_of=tuple(i // size for i in range(gpus)))
        kinds: list[str] = []
        nodes: list[int] = []
        for name, count, size in setup.nodes:
            for _ in range(count):
                number = nodes[-1] + 1 if nodes else 0
                kinds += [name] * size
                nodes += [number] * size
        return cls(kinds=tuple(kinds[:gpus]), node_of=tuple(nodes[:gpus]))

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.kinds))

    @property
    def node_size(self) -> int:
        """The number of GPUs of the smallest node."""
        return _smallest(self.node_of)

    def grouped(self, order: tuple[str, ...]) -> Devices:
        """Return the same GPUs, sorted by kind in this order."""
        at = sorted(range(len(self.kinds)), key=lambda i: (order.index(self.kinds[i]), i))
        return Devices(kinds=tuple(self.kinds[i] for i in at), node_of=tuple(self.node_of[i] for i in at))

    def in_one_node(self, first: int, stop: int) -> bool:
        return len(set(self.node_of[first:stop])) == 1


@lru_cache(maxsize=16)
def _smallest(node_of: tuple[int, ...]) -> int:
    return min(Counter(node_of).values())


class MeshPricer:
    """Computes the costs of layers on meshes, for each mesh once."""

    def __init__(self, spec: ModelSpec, base: Setup):
        self.spec, self.base = spec, base
        self.experts = [part.experts for layer in spec for part in layer.parts if isinstance(part, Moe)]
        self._known: dict[Mesh, LayerPrices] = {}
        self._node_size = {name: node_gpus(base.nodes, name) for name, _, _ in base.nodes}

    def setup(self, mesh: Mesh, replica: int = 0) -> Setup:
        """Return the set-up of a mesh as if all replicas were equal to this one."""
        return replace(
            self.base,
            gpu=gpu(mesh.kinds[replica]),
            tp=mesh.tp,
            cp=1,
            ep=mesh.ep,
            pp=1,
            dp=mesh.dp,
            zero=mesh.zero,
            micro_batch_size=max(1, mesh.shares[replica]),
            micro_batches=None,
            recompute=mesh.recompute if mesh.recompute != "full" else "none",  # type: ignore[arg-type]
            recompute_layers=None,
            memory_gib=(),
            speeds=(),
            nodes=(),
            gpus_per_node=self._node_size.get(mesh.kinds[replica], self.base.gpus_per_node),
        )

    def tensor_sizes(self, kind: str, node_size: int) -> list[int]:
        return [tp for tp in tensor_sizes(self.spec, gpu(kind), node_size) if tp <= node_size]

    def expert_sizes(self, gpus: int) -> list[int]:
        """Return the expert-parallel sizes to try: 1, and the largest power of two that divides the GPUs and the
        experts."""
        if not self.experts:
            return [1]
        most = 1
        while gpus % (2 * most) == 0 and all(n % (2 * most) == 0 for n in self.experts):
            most *= 2
        return sorted({1, most})

    def capacity_bytes(self, kind: Gpu) -> float:
        reserve = default_reserve_gib(kind.memory_gib) if self.base.reserve_gib is None else self.base.reserve_gib
        limit = min(self.base.memory_gib) if self.base.memory_gib else kind.memory_gib - reserve
        return limit * GIB

    def price(self, mesh: Mesh) -> LayerPrices:
        if mesh not in self._known:
            self._known[mesh] = self._price(mesh)
        return self._known[mesh]

    def _price(self, mesh: Mesh) -> LayerPrices:
        slowest: dict[str, Floats] = {}
        distinct = {pair: r for r, pair in enumerate(zip(mesh.kinds, mesh.shares, strict=True))}
        for replica in distinct.values():
            for name, values in self._columns(mesh, replica).items():
                slowest[name] = np.maximum(slowest[name], values) if name in slowest else values
        kinds = [gpu(name) for name in set(mesh.kinds)]
        return LayerPrices(
            **slowest,
            capacity_bytes=min(self.capacity_bytes(kind) for kind in kinds),
            host_ms_per_byte=1e-6 / min(kind.host_gb_per_s for kind in kinds),
        )

    def _columns(self, mesh: Mesh, replica: int) -> dict[str, Floats]:
        setup = self.setup(mesh, replica)
        pricing = Pricing.of(setup)
        costs, weights = price_layers(self.spec, pricing)
        if mesh.recompute == "full":
            inner = range(1, len(costs) - 1)
            costs = [checkpointed(c, costs[i - 1].boundary_bytes) if i in inner else c for i, c in enumerate(costs)]
        taken = [name for name in LayerCost.__dataclass_fields__ if name in LayerPrices.__dataclass_fields__]
        out = {name: np.array([getattr(c, name) for c in costs]) for name in taken}
        out["reduction_ms"] = np.array(reduction_ms(weights, pricing))
        held = _held(weights, setup, pricing)
        return out | {
            "held_weight_bytes": held[:, 0],
            "held_gradient_bytes": held[:, 1],
            "held_state_bytes": held[:, 2],
        }


def _held(weights: list[Weights], setup: Setup, pricing: Pricing) -> Floats:
    """Return [layer, 3]: the bytes of weights, gradients and optimizer state on a GPU after sharding by ZeRO."""
    copies = shards_of(setup, pricing.cluster)
    rows = []
    for held in weights:
        row = [0.0, 0.0, 0.0]
        for count, n in zip(held, copies, strict=True):
            row[0] += 0.0 if setup.zero == 3 else WEIGHT_BYTES * count
            row[1] += setup.gradient_bytes * count / (n if setup.zero >= 2 else 1.0)
            row[2] += STATE_BYTES * count / (n if setup.zero >= 1 else 1.0)
        rows.append(row)
    return np.array(rows)


def powers_of_two(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
