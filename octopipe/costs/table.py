"""CostTable: the time and memory of every layer, and the cost of moving a tensor.

Knows: per-layer F / I / W / R times, bytes held until I and until W, static bytes, boundary tensors, links,
per-rank speed and per-micro-batch size. Does not know: plans; it only sums costs over ranges of layers.

The table is all that the planner, the simulator, the systems and the tuner know about a model.

>>> table = CostTable.uniform(num_layers=4, forward_ms=1.0, input_ms=1.0, weight_ms=1.0)
>>> table.range_ms("F", 0, 4), table.range_ms("B", 0, 2)
(4.0, 4.0)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from octopipe.base.display import one_line
from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.base.limits import MAX_BYTES, MAX_FACTOR_CELLS, MAX_RATIO, MAX_SIZE, MAX_TIME_MS, finite, over
from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.layer_graph import LayerGraph
from octopipe.costs.mode import Mode
from octopipe.costs.routing import Routing, cannot_change, rerouted
from octopipe.costs.segments import Segments
from octopipe.costs.shard_times import ShardTimes

Array = NDArray[np.float64]
PER_LAYER = (
    "forward_ms",
    "input_ms",
    "weight_ms",
    "activation_bytes",
    "stash_bytes",
    "static_bytes",
    "gradient_bytes",
    "boundary_bytes",
    "workspace_bytes",
    "optimizer_ms",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable:
    """Costs of one micro-batch on one rank of speed 1; every array has one entry per layer.

    Arrays left out count as zero. `micro_batch_factor` multiplies the times and the activation and boundary
    bytes of micro-batch m (shape [M], or [M, layers] if layer kinds scale differently).
    """

    model: str
    symbols: str
    """One character per layer, embedding and head included: `EM-M*-L`."""
    forward_ms: Array
    input_ms: Array
    """I: the input-gradient half of the backward pass."""
    weight_ms: Array
    """W: the weight-gradient half."""
    activation_bytes: Array = field(default_factory=lambda: np.zeros(0))
    """Bytes held from F until I."""
    stash_bytes: Array = field(default_factory=lambda: np.zeros(0))
    """Bytes held from I until W: a part of activation_bytes, or more if I runs the layer's forward again."""
    static_bytes: Array = field(default_factory=lambda: np.zeros(0))
    """Weights, gradients and optimizer state."""
    gradient_bytes: Array = field(default_factory=lambda: np.zeros(0))
    """Bytes of gradients that a reduction over data-parallel pipelines or copies moves."""
    boundary_bytes: Array = field(default_factory=lambda: np.zeros(0))
    """Bytes of the layer's output: what a transfer after it moves, and what recomputation of the next layer keeps."""
    workspace_bytes: Array = field(default_factory=lambda: np.zeros(0))
    """Extra bytes while one of the layer's ops runs."""
    optimizer_ms: Array = field(default_factory=lambda: np.zeros(0))
    """Time of the layer's optimizer update, once per step."""
    tied_bytes: float = 0.0
    """Static bytes that the first and the last layer have in common (a head tied to the embedding). The static bytes of
    both include them; a rank that holds both layers stores them once."""
    network: Network = field(default_factory=lambda: Network.constant(0.0))
    host_link: Link | None = None
    """The link between a rank and its host's memory, each way; None: not known, so nothing can be offloaded."""
    copy_sum: Link | None = None
    """Measured: the link over which two ranks that hold the same layer sum its gradients. None: the network's link
    between the two. Ranks that share a GPU also share its link to the host's memory, so that a sum, in which both send
    and receive at once, takes longer than a transfer."""
    rank_slowdown: tuple[float, ...] = ()
    """Compute-time factor per rank; empty means 1 everywhere, 2.0 is a rank of half the speed."""
    rank_memory_bytes: tuple[float, ...] = ()
    """Capacity per rank; empty means unlimited; one entry means the same for all."""
    micro_batch_factor: Array | None = None
    boundary_factor: Array | None = None
    """Factors of the boundary bytes, [M, layers], if they are not `micro_batch_factor`: layers of one of two towers
    also hand on what belongs to the other."""
    tokens_per_micro_batch: int | None = None
    data_parallel: int = 1
    """Pipelines that train side by side and reduce their gradients at the end of a step."""
    reduction: Link = field(default_factory=Link)
    """The link over which that reduction runs."""
    gpus_per_rank: float = 1
    """GPUs of one pipeline rank (tp * cp; their mean if stages differ), for tokens per GPU per second."""
    model_flops: float | None = None
    """FLOPs of the whole model for one micro-batch, forward and backward, without recomputation."""
    setup: Setup | None = None
    """The set-up that these costs apply to; None: not stated."""
    mode: Mode | None = None
    """How the layers ran when they were measured; None: the costs were computed, or their file does not say."""
    repeatable: tuple[bool, ...] = ()
    """Per layer: whether a second forward was observed to give the same result as the first, so that the layer may be
    recomputed. Empty: not tested (analytic costs, whose layers are known to be repeatable)."""
    segments: Segments | None = None
    """Which parts of F and I exchange tokens between expert ranks; None: all ops only compute."""
    shard_times: tuple[ShardTimes, ...] = ()
    """Measured times of the shards of layers that are cut; the time of a layer that is not listed divides evenly."""
    routing: Routing | None = None
    """Measured: how many tokens the experts received; None: no layer routes tokens, or they were not counted."""
    graph: LayerGraph | None = None
    """Which layers' outputs every layer takes; None: that of the layer before it."""

    def __post_init__(self) -> None:
        layers = len(self.symbols)
        if layers == 0:
            raise OctoPipeError(f"{self.model}: the model has no layers; give at least one")
        for name in PER_LAYER:
            values = np.ascontiguousarray(getattr(self, name), dtype=np.float64)
            if values.size == 0:
                values = np.zeros(layers)
            if values.shape != (layers,):
                raise OctoPipeError(
                    f"{self.model}: {name} has {values.size} entries for {layers} layers; give one per layer"
                )
            most = MAX_TIME_MS if name.endswith("_ms") else MAX_BYTES
            bad = np.flatnonzero(~((values >= 0) & (values <= most)))
            if bad.size:
                i = int(bad[0])
                raise OctoPipeError(
                    f"{self.model}: {name} of layer {i} ({self.symbols[i]}) is {values[i]}; give a finite number >= 0"
                    f" and at most {most:g}"
                )
            values.setflags(write=False)
            object.__setattr__(self, name, values)
        if self.graph is not None and self.graph.num_layers != layers:
            raise OctoPipeError(
                f"{self.model}: graph connects {self.graph.num_layers} layers, and the table has {layers}; make them "
                "equal"
            )
        if self.segments is not None and self.segments.num_layers != layers:
            raise OctoPipeError(
                f"{self.model}: segments describe {self.segments.num_layers} layers, and the table has {layers}; make "
                "them equal"
            )
        if not 0 <= self.tied_bytes <= min(self.static_bytes[0], self.static_bytes[-1]) * (1 + 1e-9):
            raise OctoPipeError(
                f"{self.model}: tied_bytes is {self.tied_bytes}; give a part of the static bytes of the first and the "
                "last layer, which hold the tied weight"
            )
        # Only a layer whose forward runs again inside I, which needs workspace, holds more for W than it kept from F.
        larger = np.flatnonzero((self.stash_bytes > self.activation_bytes) & (self.workspace_bytes == 0))
        if larger.size:
            i = int(larger[0])
            raise OctoPipeError(
                f"{self.model}: layer {i} ({self.symbols[i]}) stashes more than its activation; stash is a part of it"
            )
        for name in ("tokens_per_micro_batch", "data_parallel", "gpus_per_rank"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not 1 <= (finite(value) or 0) <= MAX_SIZE):
                raise OctoPipeError(f"{self.model}: {name} is {brief(value)}; give a whole number >= 1")
        if self.model_flops is not None and not (-1.0 if finite(self.model_flops) is None else self.model_flops) >= 0:
            raise OctoPipeError(f"{self.model}: model_flops is {brief(self.model_flops)}; give a finite number >= 0")
        for name, most in (("rank_slowdown", MAX_RATIO), ("rank_memory_bytes", MAX_BYTES)):
            if any(not 0 < (finite(v) or 0.0) <= most for v in getattr(self, name)):
                raise OctoPipeError(
                    f"{self.model}: {name} {brief(getattr(self, name))}: give finite numbers > 0 and at most {most:g}"
                )
        if self.repeatable and (len(self.repeatable) != layers or any(type(r) is not bool for r in self.repeatable)):
            raise OctoPipeError(f"{self.model}: repeatable is {brief(self.repeatable)}; give true or false per layer")
        if self.micro_batch_factor is not None:
            factor = np.asarray(self.micro_batch_factor, dtype=np.float64)
            too_many = over("micro-batches x layers", len(factor) * layers, MAX_FACTOR_CELLS) if factor.ndim else []
            if too_many:
                raise OctoPipeError(f"{self.model}: {too_many[0]}")
            if factor.ndim == 1:
                factor = np.repeat(factor[:, None], layers, axis=1)
            if factor.ndim != 2 or factor.shape[1] != layers:
                raise OctoPipeError(f"{self.model}: micro_batch_factor must be [M] or [M, {layers}]")
            if not np.all((factor > 0) & (factor <= MAX_RATIO)):
                raise OctoPipeError(f"{self.model}: micro_batch_factor needs finite numbers > 0 up to {MAX_RATIO:g}")
            factor = np.ascontiguousarray(factor)
            factor.setflags(write=False)
            object.__setattr__(self, "micro_batch_factor", factor)
        if self.boundary_factor is not None:
            moved = np.ascontiguousarray(self.boundary_factor, dtype=np.float64)
            if self.micro_batch_factor is None or moved.shape != self.micro_batch_factor.shape:
                raise OctoPipeError(f"{self.model}: boundary_factor must have the shape of micro_batch_factor")
            if not np.all((moved > 0) & (moved <= MAX_RATIO)):
                raise OctoPipeError(f"{self.model}: boundary_factor needs finite numbers > 0 up to {MAX_RATIO:g}")
            moved.setflags(write=False)
            object.__setattr__(self, "boundary_factor", moved)

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        forward_ms: float = 1.0,
        input_ms: float = 1.0,
        weight_ms: float = 1.0,
        activation_bytes: float = 0.0,
        stash_bytes: float = 0.0,
        p2p_ms: float = 0.0,
        model: str = "uniform",
    ) -> CostTable:
        """Return the costs of equal layers, for which the published closed-form formulas hold."""

        def fill(value: float) -> Array:
            return np.full(num_layers, float(value))

        return cls(
            model=model,
            symbols="T" * num_layers,
            forward_ms=fill(forward_ms),
            input_ms=fill(input_ms),
            weight_ms=fill(weight_ms),
            activation_bytes=fill(activation_bytes),
            stash_bytes=fill(stash_bytes),
            network=Network.constant(p2p_ms),
        )

    def __repr__(self) -> str:
        f, i, w = (float(getattr(self, name).sum()) for name in ("forward_ms", "input_ms", "weight_ms"))
        limit = sorted({round(b / (1 << 30), 1) for b in self.rank_memory_bytes})
        memory = f"{' to '.join(f'{g:g}' for g in (limit[0], limit[-1])[: len(limit)])} GiB a rank" if limit else ""
        times = f"F {f:.4g} I {i:.4g} W {w:.4g} ms"
        return one_line("CostTable", self.model, f"{self.num_layers} layers", times, memory)

    @property
    def num_layers(self) -> int:
        return len(self.symbols)

    @property
    def layer_ms(self) -> Array:
        """F + I + W of every layer."""
        return self.forward_ms + self.input_ms + self.weight_ms

    def slowdown(self, rank: int) -> float:
        return _of_rank(self.rank_slowdown, rank, "rank speeds") if self.rank_slowdown else 1.0

    def capacity_bytes(self, rank: int) -> float:
        """Return the memory of a rank; infinite if no limit was given."""
        if not self.rank_memory_bytes:
            return float("inf")
        if len(self.rank_memory_bytes) == 1:
            return self.rank_memory_bytes[0]
        return _of_rank(self.rank_memory_bytes, rank, "memory sizes")

    def free_bytes(self, num_ranks: int) -> float:
        """Return the most memory that all ranks together can have left after the static bytes of every layer, if each
        layer is held once."""
        saved = num_ranks * self.tied_bytes
        return sum(self.capacity_bytes(r) for r in range(num_ranks)) - float(self.static_bytes.sum()) + saved

    def layer_times(self, kind: str) -> Array:
        """Per-layer time of an op kind; B is I + W, R is a second forward."""
        match kind:
            case "F" | "R":
                return self.forward_ms
            case "I":
                return self.input_ms
            case "W":
                return self.weight_ms
            case "B":
                return self.input_ms + self.weight_ms
        raise OctoPipeError(f"unknown op kind {kind!r}; one of F, I, W, B, R")

    @property
    def exchanges(self) -> bool:
        """Whether any op has an exchange that another op's computation could hide."""
        return self.segments is not None and self.segments.any_exchange

    @property
    def handed_factor(self) -> Array | None:
        """The factor of every micro-batch for the boundary bytes of every layer; None: 1 for all."""
        return self.micro_batch_factor if self.boundary_factor is None else self.boundary_factor

    def factor(self, micro_batch: int) -> Array | float:
        """Size factor of a micro-batch, per layer."""
        return 1.0 if self.micro_batch_factor is None else self.micro_batch_factor[micro_batch]

    def handed(self, micro_batch: int) -> Array | float:
        """Size factor of what a micro-batch's layers hand over, per layer."""
        return 1.0 if self.handed_factor is None else self.handed_factor[micro_batch]

    def range_ms(self, kind: str, first: int, stop: int, *, micro_batch: int | None = None) -> float:
        """Time of one op over layers [first, stop) on a rank of speed 1."""
        times = self.layer_times(kind)[first:stop]
        if micro_batch is not None and self.micro_batch_factor is not None:
            times = times * self.micro_batch_factor[micro_batch, first:stop]
        return float(times.sum())

    def only(self, layers: Sequence[int]) -> CostTable:
        """Return the costs of a chain of only these layers."""
        at = np.asarray(layers, dtype=np.int64)
        factor, moved = self.micro_batch_factor, self.boundary_factor
        return self.replace(
            symbols="".join(self.symbols[k] for k in layers),
            micro_batch_factor=None if factor is None else factor[:, at],
            boundary_factor=None if moved is None else moved[:, at],
            repeatable=tuple(self.repeatable[k] for k in layers) if self.repeatable else (),
            **{name: getattr(self, name)[at] for name in PER_LAYER},
            tied_bytes=0.0,
            segments=None,
            shard_times=(),
            routing=None,
            graph=None,
        )

    def as_chain(self) -> CostTable:
        """Return the costs with the layers as a chain, for searches over chains.

        A layer that does not feed the next one passes on as many bytes as the next one takes.
        """
        if self.graph is None:
            return self
        boundary = self.boundary_bytes.copy()
        for layer, taken in enumerate(self.graph.takes):
            if layer and layer - 1 not in taken:
                boundary[layer - 1] = sum(self.boundary_bytes[k] for k in taken)
        return self.replace(boundary_bytes=boundary, segments=None, graph=None)

    def not_repeatable(self) -> tuple[int, ...]:
        """Return the layers that must not be recomputed, because their second forward gave another result."""
        return tuple(k for k, known in enumerate(self.repeatable) if not known)

    def replace(self, **changes: object) -> CostTable:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def with_memory_gib(self, gib: float | Sequence[float] | None) -> CostTable:
        """A copy whose ranks have this capacity (one number for all, or one per rank)."""
        if gib is None:
            return self
        values = [gib] if isinstance(gib, int | float) else list(gib)
        return self.replace(rank_memory_bytes=tuple(float(v) * float(1 << 30) for v in values))

    def with_imbalance(self, imbalance: tuple[float, ...]) -> CostTable:
        """Return measured costs converted to this imbalance of routing (as in `Setup`; empty: even routing).

        Costs that cannot be converted are returned unchanged (`routing.cannot_change`).
        """
        if self.routing is None or self.segments is None or cannot_change(self.routing, self.segments):
            return self
        times = {name: getattr(self, name) for name in ("forward_ms", "input_ms", "weight_ms")}
        times, segments = rerouted(times, self.segments, self.routing.factors(imbalance))
        return self.replace(segments=segments, **times)

    def throughput(self, num_ranks: int, num_micro_batches: int, step_ms: float) -> dict[str, float | None]:
        """Return tokens per second per GPU, model TFLOP/s per GPU and MFU; None for those that are not known."""
        out: dict[str, float | None] = {
            "tokens_per_gpu_per_second": None,
            "model_tflops_per_gpu": None,
            "mfu": None,
        }
        if step_ms <= 0:
            return out
        per_gpu_second = num_micro_batches / (num_ranks * self.gpus_per_rank) / (step_ms / 1e3)
        if self.tokens_per_micro_batch is not None:
            out["tokens_per_gpu_per_second"] = self.tokens_per_micro_batch * per_gpu_second
        if self.model_flops is not None:
            flops = self.model_flops * per_gpu_second
            out["model_tflops_per_gpu"] = flops / 1e12
            peak = None if self.setup is None else self.setup.peak_flops_per_ms
            if peak is not None:
                out["mfu"] = flops / (1e3 * peak)
        return out

    def sum_link(self, one: int, other: int) -> Link:
        """The link over which two ranks sum the gradients of layers that both hold."""
        return self.network.link(one, other) if self.copy_sum is None else self.copy_sum

    def digest(self) -> str:
        """Return a short hash of everything that affects a prediction; plans store it as provenance.

        The link to the host's memory is left out: plans that do not offload are not affected by it, and their digests
        stayed the same when it was introduced.
        """
        h = hashlib.sha256()
        for f in fields(self):
            value = getattr(self, f.name)
            optional = f.name in ("tied_bytes", "segments", "repeatable", "copy_sum", "shard_times", "graph")
            absent = (optional and not value) or (f.name == "boundary_factor" and value is None)
            if f.name in ("setup", "model_flops", "mode", "host_link", "routing") or absent:
                continue
            h.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        return h.hexdigest()[:16]


def _of_rank(values: tuple[float, ...], rank: int, what: str) -> float:
    """Return a rank's own value. Raise an error if there is none: the values of other ranks do not apply to it."""
    if rank >= len(values):
        raise OctoPipeError(f"{len(values)} {what} for {rank + 1} ranks or more; give one per rank")
    return values[rank]
