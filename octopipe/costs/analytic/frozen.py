"""Partial training: frozen layers, and low-rank adapters (LoRA) on frozen matrices.

Knows: which layers of a model have no gradients, which products adapters add to a layer, the number of adapter weights,
and the FLOPs of a step. Does not know: times (`layer_pricing.py`) or memory (`footprint.py`).

A frozen layer has no W, no gradient and no optimizer state. Its I is still needed if an earlier layer is trained,
because the gradient has to pass through. A frozen layer without trained layers before it runs only its forward and
keeps no activations.

Adapters (Hu et al., "LoRA", ICLR 2022) of rank r turn a product y = x M into x M + (x A) B, with A of width r. Each
matrix of a block gets a pair, those of routed experts included, or those of attention alone (`lora_on`); embedding and
head get none.

>>> layer_states(5, ((0, 1), (3, 3)))
('idle', 'idle', 'trained', 'frozen', 'trained')
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.flops import layer_flops
from octopipe.costs.analytic.work import Product, Work
from octopipe.costs.cluster.fields import ranges_text
from octopipe.costs.cluster.hardware import Cluster
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import Attention, Embedding, Head, LatentAttention, Layer, ModelSpec

State = Literal["trained", "frozen", "idle"]
"""The state of a layer. trained: its weights are trained; frozen: they are not trained, but gradients pass through the
layer; idle: they are not trained, and no gradient passes through the layer."""


@lru_cache(maxsize=256)
def layer_states(num_layers: int, ranges: tuple[tuple[int, int], ...]) -> tuple[State, ...]:
    """Return the state of every layer, without regard to adapters. Raise an error if `ranges` do not fit the model."""
    if ranges and ranges[-1][1] >= num_layers:
        raise OctoPipeError(
            f"frozen {ranges_text(ranges)} names layer {ranges[-1][1]}; the model has layers 0 to {num_layers - 1}"
        )
    frozen = {i for first, last in ranges for i in range(first, last + 1)}
    if len(frozen) == num_layers:
        raise OctoPipeError(f"frozen {ranges_text(ranges)} leaves no layer to train; name fewer")
    first_trained = next(i for i in range(num_layers) if i not in frozen)
    return tuple("trained" if i not in frozen else "idle" if i < first_trained else "frozen" for i in range(num_layers))


def trained_share(spec: ModelSpec, setup: Setup) -> float:
    """Return the share of a model's weights that have gradients and optimizer state; adapters are not counted."""
    return 0.0 if setup.lora is not None else _share(spec, setup, ("trained",))


def backward_share(spec: ModelSpec, setup: Setup) -> float:
    """Return the share of a model's weights that a backward needs: those of all layers that gradients pass through."""
    return _share(spec, setup, ("trained", "frozen"))


def _share(spec: ModelSpec, setup: Setup, states: tuple[State, ...]) -> float:
    every = zip(spec.layers, layer_states(spec.num_layers, setup.frozen), strict=True)
    sizes = [(float(layer.parameters), state) for layer, state in every]
    return sum(size for size, state in sizes if state in states) / max(sum(size for size, _ in sizes), 1.0)


def adapted(part: Layer, setup: Setup, state: State) -> bool:
    """Whether this part of a layer has adapters."""
    if setup.lora is None or state != "trained" or isinstance(part, Embedding | Head):
        return False
    return setup.lora_on == "all" or isinstance(part, Attention | LatentAttention)


def adapters(work: Work, rank: int) -> Work:
    """Return `work` with the products that adapters of this rank add, in place of its own.

    Every matrix gets two factors. Tensor parallelism shards the one on the side on which it shards the matrix.
    """
    products: list[Product] = []
    for p in work.products:
        first = p._replace(outer=rank, cut="inner" if p.cut == "inner" else "", low_precision=False)
        second = p._replace(inner=rank, cut="outer" if p.cut == "outer" else "", low_precision=False)
        products += [first, second]
    return replace(work, products=tuple(products))


def adapter_parameters(work: Work, rank: int, cluster: Cluster) -> tuple[float, float]:
    """Return the numbers of adapter weights of a part on one GPU before ZeRO shards them: dense, and of experts."""
    dense = experts = 0.0
    for p in adapters(work, rank).products:
        tp = cluster.expert_tp if p.experts else cluster.tp
        size = p.inner * p.outer / (tp if p.cut else 1)
        if p.experts:
            experts += size * p.experts / cluster.ep
        else:
            dense += size
    return dense, experts


@lru_cache(maxsize=64)
def needed_flops(layers: tuple[Layer, ...], frozen: tuple[tuple[int, int], ...], adapters: bool, seq: int) -> float:
    """Return the FLOPs per sequence that utilisation (MFU) counts: those that must be computed once.

    A frozen layer counts its forward, and the same again if gradients pass through it. A trained layer counts three
    times its forward, or twice with adapters. The FLOPs of the adapters themselves are left out.
    """
    total, states = 0.0, layer_states(len(layers), frozen)
    for layer, state in zip(layers, states, strict=True):
        passes = {"trained": 2 if adapters else 3, "frozen": 2, "idle": 1}[state]
        total += passes * layer_flops(layer, seq=seq).forward
    return total
