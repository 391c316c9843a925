"""The models of the paper's Table II, and the layer times that its authors measured.

Knows: the ten models, the authors' own sizes of the two Jambas, and how measured layer times are combined with our own
memory model. Does not know: readings of the paper (reading.py), plans.

The authors' public configurations of Jamba 20B and 100B differ from the paper's Table II (64 layers instead of 32, a
vocabulary of 65536 instead of 128k). Measured times are used with the public configurations, since those were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from octopipe.base.errors import OctoPipeError
from octopipe.costs.layer_times import load_layer_times
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.models.spec import Attention, Embedding, Head, Layer, Mamba2, Mlp, ModelSpec, Moe
from octopipe.models.zoo import preset

GPU, SEQ = "h800", 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """A line of Table II."""

    name: str
    family: str
    size: str
    layers: int
    hidden: int
    kinds: str
    """Symbols of the layer kinds that the model contains."""
    heterogeneous: bool = True


TABLE = tuple(
    PaperModel(
        name=name, family=family, size=size, layers=layers, hidden=hidden, kinds=kinds, heterogeneous=kinds != "T"
    )
    for name, family, size, layers, hidden, kinds in (
        ("llama3-8b", "LLaMA", "8B", 32, 4096, "T"),
        ("llama3-32b", "LLaMA", "32B", 64, 6144, "T"),
        ("llama3-70b", "LLaMA", "70B", 80, 8192, "T"),
        ("jamba-20b", "Jamba", "20B", 32, 4096, "#*-M"),
        ("jamba-52b", "Jamba", "52B", 64, 4096, "#*-M"),
        ("jamba-100b", "Jamba", "100B", 144, 8192, "#*-M"),
        ("nemotron-h-4b", "Nemotron-H", "4B", 52, 3072, "*-M"),
        ("nemotron-h-8b", "Nemotron-H", "8B", 52, 4096, "*-M"),
        ("nemotron-h-47b", "Nemotron-H", "47B", 98, 8192, "*-M"),
        ("nemotron-h-56b", "Nemotron-H", "56B", 118, 8192, "*-M"),
    )
)


def _authors_jamba(name: str, *, units: int, hidden: int, ffn: int, expert_ffn: int, heads: int) -> ModelSpec:
    """Return Jamba as the authors published it: Mamba-2 instead of Mamba-1, experts of another width."""
    kinds: dict[str, Layer] = {
        "M": Mamba2(hidden=hidden, heads=2 * hidden // 64, head_dim=64, state=128),
        "-": Mlp(hidden=hidden, ffn=ffn),
        "*": Attention(hidden=hidden, heads=heads, kv_heads=8, head_dim=128),
        "#": Moe(hidden=hidden, experts=16, top_k=2, ffn=expert_ffn),
    }
    inner = [kinds[symbol] for symbol in "M-M#M-M#*-M#M-M#" * units]
    ends = (Embedding(hidden=hidden, vocab=65536), Head(hidden=hidden, vocab=65536))
    return ModelSpec(name=name, layers=(ends[0], *inner, ends[1]), norm_eps=1e-6)


AUTHORS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "jamba-20b": _authors_jamba(
            "jamba-20b, authors' sizes", units=4, hidden=4096, ffn=14336, expert_ffn=4224, heads=32
        ),
        "jamba-100b": _authors_jamba(
            "jamba-100b, authors' sizes", units=9, hidden=8192, ffn=24576, expert_ffn=3456, heads=64
        ),
    }
)
"""Models as the authors published them, if they differ from what we inferred from Table II."""


def spec_of(name: str, *, authors: bool) -> ModelSpec:
    """Return the layers of a model; with `authors` as its authors published them."""
    return AUTHORS[name] if authors and name in AUTHORS else preset(name)


def model_costs(
    name: str,
    profiles: Path | None,
    *,
    pp: int,
    micro_batches: int,
    tp: int = 8,
    dp: int = 1,
    recompute: bool = False,
    authors: bool | None = None,
) -> CostTable:
    """Return a model's costs: times measured by the authors if they are available, memory from our own cost model.

    `recompute` computes every layer but the head again before its backward. `authors` (default: if their times are
    used): whether to use the sizes that the authors published.
    """
    measured = None if profiles is None or authors is False else profiles / f"{name}.json"
    if measured is not None and not measured.exists():
        measured = None
    wanted = measured is not None if authors is None else authors
    spec = spec_of(name, authors=wanted)
    costs = resolve_costs(spec, pp=pp, tp=tp, dp=dp, gpu=GPU, seq=SEQ, micro_batches=micro_batches)
    if measured is None:
        return recomputed(costs) if recompute else costs
    times = load_layer_times(measured)
    if times.symbols != costs.symbols:
        raise OctoPipeError(
            f"{measured.name}: {len(times.symbols)} layers in another order than the {len(costs.symbols)} of "
            f"{spec.name}; give the authors' own files, or --profiles none"
        )
    costs = costs.replace(
        model=name, forward_ms=times.forward_ms, input_ms=times.input_ms, weight_ms=times.weight_ms, model_flops=None
    )
    return recomputed(costs) if recompute else costs


def recomputed(costs: CostTable) -> CostTable:
    """Return the costs with every layer but the head recomputed inside its backward, and only its input kept."""
    again = costs.forward_ms.copy()
    again[-1] = 0.0
    kept = costs.boundary_bytes.copy()
    kept[-1] = costs.activation_bytes[-1]
    kept = kept.clip(max=costs.activation_bytes)
    return costs.replace(
        input_ms=costs.input_ms + again,
        activation_bytes=kept,
        stash_bytes=costs.stash_bytes.clip(max=kept),
        workspace_bytes=costs.workspace_bytes + (costs.activation_bytes - kept),
    )


def costs_in_words(profiles: Path | None) -> str:
    if profiles is None:
        return "analytic costs of an H800 (no measured layer times at hand)"
    return "layer times measured by the paper's authors; memory and reductions from our analytic costs of an H800"
