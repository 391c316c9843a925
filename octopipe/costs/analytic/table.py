"""The analytic cost model: (ModelSpec, Setup) -> CostTable.

Knows: how the costs of layers form a table, and which layers are checkpointed. Does not know: the cost of one layer
(`layer_pricing.py`), the reduction of gradients (`reduction.py`) or plans.

Everything is per GPU. Measured layer times (`layer_times.py`), if there are any, replace all of it.

>>> from octopipe.costs.cluster.hardware import Cluster, gpu
>>> from octopipe.models.zoo import preset
>>> table = analytic_costs(preset("nemotron-h-56b"), Cluster(gpu=gpu("h800"), tp=8, pp=8))
>>> float(table.boundary_bytes[1]) / (1 << 20), table.tokens_per_micro_batch, table.gpus_per_rank
(8.0, 4096, 8)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.calibration import Rates
from octopipe.costs.analytic.flops import layer_flops, model_flops
from octopipe.costs.analytic.footprint import STATE_BYTES, Weights, frozen_bytes, static_bytes
from octopipe.costs.analytic.frozen import State, layer_states, needed_flops
from octopipe.costs.analytic.items import NEARLY_NONE, items_of_micro_batches, settled
from octopipe.costs.analytic.layer_pricing import LayerCost, priced
from octopipe.costs.analytic.prediction_paths import graph_of
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.analytic.reduction import exposed_reduction_ms
from octopipe.costs.analytic.traffic import Exchange
from octopipe.costs.analytic.work import Flops
from octopipe.costs.cluster.hardware import Cluster, Link
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.cluster.sizes import checkpointed_layers
from octopipe.costs.segments import Segments
from octopipe.costs.table import PER_LAYER, CostTable
from octopipe.models.lengths import Batch
from octopipe.models.spec import Embedding, Layer, ModelSpec, Moe, TowerLayer

__all__ = [
    "STATE_BYTES",
    "Flops",
    "LayerCost",
    "analytic_costs",
    "checkpointed",
    "layer_cost",
    "layer_flops",
    "price_layers",
    "setup_costs",
]


def layer_cost(
    layer: Layer, cluster: Cluster, *, rates: Mapping[str, Rates] | None = None, **options: Any
) -> LayerCost:
    """The cost of one layer on one GPU of a pipeline rank; options as in `analytic_costs`."""
    return priced(layer, Pricing.of(_setup_of(cluster, **options), rates))[0]


def check_divides(spec: ModelSpec, tp: int, ep: int = 1, etp: int = 1) -> None:
    """Raise unless the parallel sizes divide every layer."""
    for i, symbol, name, size in _divided_sizes(spec.layers):
        by, word = {"experts": (ep, "ep"), "expert ffn": (etp, "etp")}.get(name, (tp, "tp"))
        if size % by:
            raise OctoPipeError(
                f"{spec.name}: {word} {by} does not divide the {size} {name} of layer {i} ({symbol}); "
                f"give a divisor of {size}"
            )


def check_experts(spec: ModelSpec, setup: Setup) -> None:
    """Raise an error if a set-up distributes experts that the model does not have."""
    if any(isinstance(part, Moe) for layer in spec for part in layer.parts):
        return
    given = {"ep": setup.ep, "etp": setup.etp, "nodes_per_token": setup.nodes_per_token}
    for name, size in given.items():
        if (size or 1) > 1 or (size and name == "nodes_per_token"):
            raise OctoPipeError(f"{spec.name} has no experts; {name} {size} has no effect; leave it out")


@lru_cache(maxsize=64)
def _divided_sizes(layers: tuple[Layer, ...]) -> tuple[tuple[int, str, str, int], ...]:
    """Return (layer, symbol, name, size) of every size that is sharded, with the first layer that has it."""
    found: dict[tuple[str, int], tuple[int, str]] = {}
    for i, layer in enumerate(layers):
        for part in layer.parts:
            names = ("heads", "value_heads", "inner", "ffn", "shared_ffn", *(["experts"] * isinstance(part, Moe)))
            for name in names:
                size = getattr(part, name, None)
                name = "expert ffn" if name == "ffn" and isinstance(part, Moe) else name
                if isinstance(size, int):
                    found.setdefault((name, size), (i, layer.symbol))
    return tuple((i, symbol, name, size) for (name, size), (i, symbol) in found.items())


def _setup_of(
    cluster: Cluster,
    *,
    seq: int = 4096,
    micro_batch_size: int = 1,
    sequence_parallel: bool = True,
    distributed_optimizer: bool = False,
) -> Setup:
    return Setup(
        gpu=cluster.gpu,
        tp=cluster.tp,
        cp=cluster.cp,
        ep=cluster.ep,
        pp=cluster.pp,
        dp=cluster.dp,
        seq=seq,
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
        zero=int(distributed_optimizer),
        gpus_per_node=cluster.gpus_per_node,
        speeds=cluster.rank_speed,
        memory_gib=cluster.rank_memory_gib,
    )


def analytic_costs(
    spec: ModelSpec,
    cluster: Cluster,
    *,
    seq: int = 4096,
    micro_batch_size: int = 1,
    sequence_parallel: bool = True,
    distributed_optimizer: bool = False,
    micro_batch_tokens: Sequence[int] | None = None,
) -> CostTable:
    """Price every layer of a model on a cluster; callers that have a `Setup` use `setup_costs`."""
    setup = _setup_of(
        cluster,
        seq=seq,
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
        distributed_optimizer=distributed_optimizer,
    )
    return setup_costs(spec, setup, micro_batch_tokens=micro_batch_tokens)


def setup_costs(
    spec: ModelSpec,
    setup: Setup,
    *,
    micro_batch_tokens: Sequence[int] | None = None,
    batch: Batch | None = None,
    rates: Mapping[str, Rates] | None = None,
    exchange: Exchange | None = None,
    lanes: bool = True,
) -> CostTable:
    """Price every layer of a model under a set-up.

    `batch` states which sequences each micro-batch holds, `micro_batch_tokens` the common length of its sequences. The
    table then contains a factor per micro-batch and layer, relative to `seq` (attention grows faster than the rest).
    Tokens per second count sequences without their padding. `rates` replaces the calibrated rates, by precision.
    `exchange` states how experts exchange tokens, if details are known. `lanes`: whether the table states which parts
    of ops compute and which exchange tokens; code that prices thousands of set-ups can leave that out.
    """
    if setup.seq is None:
        raise OctoPipeError(f"{spec.name}: the sequence length is missing; give seq")
    spec, setup = settled(spec, setup)
    assert setup.seq is not None
    check_divides(spec, setup.tp, setup.ep, setup.cluster().expert_tp)
    check_experts(spec, setup)
    pricing = Pricing.of(setup, rates, exchange)
    costs, weights = price_recomputing(spec, pricing)
    columns = {name: np.array([getattr(c, name) for c in costs]) for name in PER_LAYER}
    exposed_ms = exposed_reduction_ms(columns, weights, pricing)
    reduction, total = Link(), float(columns["gradient_bytes"].sum())
    if setup.dp > 1 and total > 0:
        # The simulator multiplies by 2 (n-1)/n, as for an all-reduce among `dp` pipelines.
        reduction = Link(ms_per_byte=exposed_ms / total / (2 * (setup.dp - 1) / setup.dp))
    elif total > 0:
        # One pipeline: context-parallel GPUs reduce among themselves, before the update.
        columns["optimizer_ms"] = columns["optimizer_ms"] + exposed_ms * columns["gradient_bytes"] / total
    if setup.vocab_parallel:
        columns = _over_all_ranks(columns, pricing)
    tokens, factor = setup.seq * setup.micro_batch_size, None
    flops = _model_flops(spec.layers, setup, setup.seq) * setup.micro_batch_size
    if micro_batch_tokens is not None:
        if batch is not None:
            raise OctoPipeError("give micro_batch_tokens or a batch of lengths, not both")
        batch = _batch_of(micro_batch_tokens, setup.micro_batch_size)
    if batch is not None:
        factor, bytes_more = _micro_batch_factor(spec, pricing, costs, batch)
        for name in ("activation_bytes", "stash_bytes", "boundary_bytes"):
            columns[name] = columns[name] * bytes_more
        tokens = max(1, round(batch.tokens / len(batch.groups)))
        every = [length for group in batch.groups for length in group]
        flops = sum(_model_flops(spec.layers, setup, length) for length in every) / len(batch.groups)
    moved = None
    if listed := setup.listed_sequences * (setup.listed_sequences > 1):
        alike = [setup.micro_batch_size] * (setup.micro_batches or max(1, listed // setup.micro_batch_size))
        sizes = alike if batch is None else [len(group) for group in batch.groups]
        items, bytes_more, handed = _item_factors(spec, pricing, sizes)
        if handed is not None:
            moved = handed if factor is None else factor * handed
        factor = items if factor is None else factor * items
        for name in ("activation_bytes", "stash_bytes", *(["boundary_bytes"] if handed is None else [])):
            columns[name] = columns[name] * bytes_more
    return CostTable(
        model=spec.name,
        symbols=spec.pattern,
        network=pricing.cluster.network(),
        host_link=setup.host_link or pricing.cluster.host_link,
        rank_slowdown=pricing.cluster.rank_slowdown(),
        rank_memory_bytes=setup.rank_memory_bytes(),
        micro_batch_factor=factor,
        boundary_factor=moved,
        tokens_per_micro_batch=tokens,
        gpus_per_rank=setup.gpus_per_rank,
        data_parallel=setup.dp,
        reduction=reduction,
        model_flops=flops,
        setup=setup,
        tied_bytes=_tied_bytes(spec, pricing, columns["static_bytes"]),
        segments=_segments(costs, pricing.exchange) if lanes else None,
        graph=graph_of(spec, pricing, columns["static_bytes"]),
        **columns,  # type: ignore[arg-type]
    )


def _segments(costs: Sequence[LayerCost], exchange: Exchange) -> Segments | None:
    """Return the segments of layers that exchange tokens between expert-parallel ranks, or None if no layer does."""
    if not any(cost.forward_parts for cost in costs):
        return None
    return Segments.from_ms(
        [cost.forward_parts for cost in costs],
        [cost.input_parts for cost in costs],
        slows_compute=exchange.slows_compute,
        slows_exchange=exchange.slows_exchange,
    )


def _batch_of(tokens: Sequence[int], size: int) -> Batch:
    if not tokens:
        raise OctoPipeError("micro_batch_tokens is empty; give one sequence length per micro-batch")
    for i, length in enumerate(tokens):
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise OctoPipeError(f"micro_batch_tokens[{i}] is {length!r}; give a whole number >= 1")
    return Batch(groups=tuple((length,) * size for length in tokens))


def _micro_batch_factor(
    spec: ModelSpec, pricing: Pricing, reference: list[LayerCost], batch: Batch
) -> tuple[np.ndarray, np.ndarray]:
    """Return time factors [micro-batch, layer] relative to the set-up's own micro-batch, and a factor per layer for its
    bytes.

    A table scales the bytes of a layer by the same factors as its time. Short sequences have less attention per token,
    so their time falls faster than their tokens; the second factor raises the bytes so that they are never too low.
    """
    setup = pricing.setup
    assert setup.seq is not None
    known: dict[tuple[int, int], np.ndarray] = {}

    def took(count: int, length: int) -> np.ndarray:
        length = -(-length // (2 * setup.cp)) * 2 * setup.cp if setup.cp > 1 else length
        if (count, length) not in known:
            mine = replace(setup, seq=length, micro_batch_size=count)
            known[count, length] = _total_ms(price_recomputing(spec, replace(pricing, setup=mine))[0])
        return known[count, length]

    base, rows, tokens = _total_ms(reference), [], []
    for group in batch.groups:
        tokens.append(batch.tokens_of(group) / (setup.seq * setup.micro_batch_size))
        if not batch.packed or len(group) == 1:
            rows.append(took(len(group), max(group)) / base)
            continue
        # With the same number of tokens only attention differs, and it grows with the sum of squared lengths, so the
        # time is interpolated linearly between one sequence of all tokens and two sequences of half of them.
        half = -(-sum(group) // 2)
        whole, halves = took(1, 2 * half), took(2, half)
        squares = sum(length * length for length in group) / (2.0 * half * half)
        rows.append((halves + (whole - halves) * (squares - 1.0)) / base)
    factor = np.maximum(np.array(rows), 1e-9)
    return factor, np.maximum(1.0, (np.array(tokens)[:, None] / factor).max(axis=0))


def _item_factors(
    spec: ModelSpec, pricing: Pricing, sizes: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return time factors [micro-batch, layer] of a micro-batch's own images and recordings relative to their mean
    numbers, a factor per layer for its bytes, and with two towers the factors of what layers hand over.

    A table scales the bytes of a layer by the same factors as its time. Bytes grow in proportion to the images and time
    a little less; the second factor raises the bytes so that they are never too low. A layer of one of two towers also
    hands on what belongs to the other, which grows with the other's items.
    """
    sources = spec.sources
    known: dict[tuple[int, tuple[float, ...]], list[LayerCost]] = {}

    def priced_with(size: int, items: tuple[float, ...]) -> list[LayerCost]:
        if (size, items) not in known:
            setup = replace(pricing.setup, micro_batch_size=size, images=(), recordings=())
            reading = (source.per(sequence=count) for source, count in zip(sources, items, strict=True))
            known[size, items] = price_recomputing(spec.reading(*reading), replace(pricing, setup=setup))[0]
        return known[size, items]

    average = tuple(source.items for source in sources)
    of = [sources.index(layer.source) if isinstance(layer, TowerLayer) else 0 for layer in spec]
    times, held, handed = [], [], []
    for size, items in zip(sizes, items_of_micro_batches(sources, pricing.setup, sizes), strict=True):
        mine, mean = priced_with(size, items), priced_with(size, average)
        times.append(_ratios(_total_ms(mine), _total_ms(mean), 1.0))
        # A frozen tower keeps nothing for a backward, but its output still grows with its items.
        grown = [items[k] / average[k] if average[k] else 1.0 for k in of]
        held.append(_ratios([c.activation_bytes for c in mine], [c.activation_bytes for c in mean], grown))
        handed.append(_ratios([c.boundary_bytes for c in mine], [c.boundary_bytes for c in mean], 1.0))
    factor = np.maximum(np.array(times), NEARLY_NONE)
    more = np.maximum(1.0, (np.array(held) / factor).max(axis=0))
    return factor, more, np.maximum(np.array(handed), NEARLY_NONE) if len(sources) > 1 else None


def _ratios(values: Any, of: Any, otherwise: Any) -> np.ndarray:
    """Return the quotients of two rows of numbers; `otherwise` where the second is 0."""
    second = np.asarray(of, dtype=np.float64)
    out = np.broadcast_to(np.asarray(otherwise, dtype=np.float64), second.shape).copy()
    return np.divide(np.asarray(values, dtype=np.float64), second, out=out, where=second > 0)


def _tied_bytes(spec: ModelSpec, pricing: Pricing, held: np.ndarray) -> float:
    """Return the static bytes that a tied head shares with the embedding; 0 if both are sharded over all ranks."""
    shared = spec.layers[-1].tied_parameters
    if not shared or spec.takes or pricing.setup.vocab_parallel or not _has_table(spec.layers[0]):
        return 0.0
    weights = Weights(shared / pricing.cluster.tp, 0.0)
    still = pricing.setup.lora is not None or "frozen" in {*layer_states(spec.num_layers, pricing.setup.frozen)}
    one = (frozen_bytes if still else static_bytes)(weights, pricing.setup, pricing.cluster)
    return float(min(one, held[0], held[-1]))


def _has_table(layer: Layer) -> bool:
    """Return whether a layer holds the table that a tied head uses; in a model with a tower, the first does not."""
    return isinstance(layer.parts[0], Embedding)


def price_layers(spec: ModelSpec, pricing: Pricing) -> tuple[list[LayerCost], list[Weights]]:
    kinds, number = _kinds(spec.layers, pricing.setup.frozen, pricing.setup.offload_layers or 0)
    found = [priced(layer, pricing, state, offloaded) for layer, state, offloaded in kinds]
    if pricing.setup.lora is not None and not any(any(trained) for _, trained in found):
        raise OctoPipeError(
            f"{spec.name} has no layer for adapters on {pricing.setup.lora_on}, so nothing is trained; give lora_on "
            "all, or leave lora out"
        )
    return [found[k][0] for k in number], [found[k][1] for k in number]


@lru_cache(maxsize=64)
def _kinds(
    layers: tuple[Layer, ...], frozen: tuple[tuple[int, int], ...], offloaded: int
) -> tuple[tuple[tuple[Layer, State, bool], ...], tuple[int, ...]]:
    """Return the distinct layers of a model and the index of each layer among them, so that each is priced once.

    Layers are also distinguished by their state and by whether their activations are offloaded to the host.
    """
    if offloaded and offloaded > len(layers) - 3:
        raise OctoPipeError(
            f"offload_layers {offloaded} leaves none of the {len(layers) - 2} blocks on the GPU; name at most "
            f"{len(layers) - 3}"
        )
    known: dict[tuple[Layer, State, bool], int] = {}
    states = layer_states(len(layers), frozen)
    every = ((layer, state, 1 <= i <= offloaded) for i, (layer, state) in enumerate(zip(layers, states, strict=True)))
    number = tuple(known.setdefault(kind, len(known)) for kind in every)
    return tuple(known), number


def _model_flops(layers: tuple[Layer, ...], setup: Setup, seq: int) -> float:
    if setup.lora is not None or setup.frozen:
        return needed_flops(layers, setup.frozen, setup.lora is not None, seq)
    return _trained_flops(layers, seq)


@lru_cache(maxsize=64)
def _trained_flops(layers: tuple[Layer, ...], seq: int) -> float:
    return model_flops(layers, seq=seq)


def price_recomputing(spec: ModelSpec, pricing: Pricing) -> tuple[list[LayerCost], list[Weights]]:
    """Price all layers, with those checkpointed that the set-up recomputes.

    Checkpointed layers keep their input, and I first runs their forward again. With full recomputation, the other
    layers keep all of their activations: no runtime checkpoints some layers and recomputes parts of the rest.
    """
    setup = pricing.setup
    if setup.recompute != "full":
        return price_layers(spec, pricing)
    again = checkpointed_layers(spec.num_layers, setup.recompute_layers)
    whole, weights = price_layers(spec, replace(pricing, setup=replace(setup, recompute="none", recompute_layers=None)))
    costs = list(whole)
    known: dict[tuple[int, float], LayerCost] = {}  # layers that are alike share their costs
    for i in again:
        if not whole[i].activation_bytes:
            continue  # it keeps nothing, so there is nothing to run again
        key = id(whole[i]), whole[i - 1].boundary_bytes
        if key not in known:
            known[key] = checkpointed(whole[i], whole[i - 1].boundary_bytes)
        costs[i] = known[key]
    return costs, weights


def checkpointed(layer: LayerCost, kept: float) -> LayerCost:
    """Return the cost of a layer that keeps only its input (`kept` bytes) and runs its forward again before I.

    If I and W are split, this second forward restores the operands of W, which are held until W. The stash is therefore
    that of the whole layer and may be larger than what is kept between F and I.
    """
    return replace(
        layer,
        input_ms=layer.input_ms + layer.forward_ms,
        input_parts=(*layer.forward_parts, *layer.input_parts),
        activation_bytes=min(kept, layer.activation_bytes),
        workspace_bytes=layer.workspace_bytes + max(layer.activation_bytes - kept, 0.0),
    )


def _over_all_ranks(columns: dict[str, np.ndarray], pricing: Pricing) -> dict[str, np.ndarray]:
    """Return the columns with embedding and head sharded over the pipeline ranks.

    Each of the two keeps 1/pp of its cost. The rest of its times and weights is spread evenly over the layers between
    them, which an even partition spreads over the ranks. F and I of the head also include sending the last hidden
    states to every rank and their gradients back.
    """
    pp, out = pricing.setup.pp, {name: values.copy() for name, values in columns.items()}
    inner = len(columns["forward_ms"]) - 2
    if pp == 1 or inner < 1:
        return out
    spread = ("forward_ms", "input_ms", "weight_ms", "static_bytes", "gradient_bytes", "optimizer_ms")
    for name in (*spread, "activation_bytes", "stash_bytes", "workspace_bytes"):
        ends = out[name][0] + out[name][-1]
        out[name][[0, -1]] /= pp
        if name in spread:
            out[name][1:-1] += ends * (pp - 1) / pp / inner
    link = pricing.cluster.inter_link
    sent = math.ceil(math.log2(pp)) * link.latency_ms + columns["boundary_bytes"][0] * link.ms_per_byte
    out["forward_ms"][-1] += sent
    out["input_ms"][-1] += sent
    return out


def _total_ms(costs: list[LayerCost]) -> np.ndarray:
    return np.array([cost.forward_ms + cost.input_ms + cost.weight_ms for cost in costs])
