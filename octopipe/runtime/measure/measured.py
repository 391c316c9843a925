"""What every rank measured of a list of layers, and the profile that the measurements of all ranks become.

Knows: how times of ranks are averaged, and which measured numbers become which costs. Does not know: how anything is
measured (`profiler.py`), plans or links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.mode import Mode
from octopipe.costs.profile_file import Profile
from octopipe.costs.routing import Routing
from octopipe.costs.table import CostTable
from octopipe.runtime.measure.exchanges import MeasuredExchange, segments_of
from octopipe.runtime.measure.one_layer import LayerMemory
from octopipe.runtime.measure.shards import Seen, shard_times
from octopipe.runtime.wire.telling import gather_values

Floats = NDArray[np.float64]
KINDS = ("forward", "input", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rank's measurement of a list of layers; arrays have one row per distinct layer."""

    group_of: tuple[int, ...]
    """Which distinct layer each layer is."""
    loaded_ms: Floats
    """[layers, 3]: medians of F, I, W with all ranks at work."""
    partial_ms: Mapping[int, Floats]
    """The same with only so many ranks at work and the others at rest."""
    host_share: float
    """Time the host took to issue the work over the time the device took for it: below 1, the device is kept busy."""
    spread: Floats
    """Interquartile range over median of `loaded_ms`."""
    memory: tuple[LayerMemory, ...]
    repeatable: tuple[bool, ...]
    """Whether a second forward did what the first did."""
    resident_bytes: float
    """What the device's libraries keep for themselves (matrix workspaces), whatever the layers."""
    seconds: float
    exchanges: tuple[MeasuredExchange, ...] = ()
    """Which parts of every distinct layer exchange tokens; empty where none does."""
    tokens_per_expert: tuple[tuple[float, ...], ...] = ()
    """Of one micro-batch, by distinct layer; an empty row where a layer has no router."""
    expert_ranks: int = 0
    """The largest group in which layers exchange tokens; 0 where they do not, or none is known."""
    shards: Seen = field(default_factory=dict)
    """Times of shards of the first and the last layer; empty where they were not measured or cannot be cut."""


def gather(mine: Measured, group: dist.ProcessGroup | None) -> list[Measured]:
    """Every rank's measurement (collective)."""
    if group is None:
        return [mine]
    return gather_values(group, mine)


def assemble(
    ranks: Sequence[Measured],
    *,
    model: str,
    symbols: str,
    tokens: int | None = None,
    links: Mapping[tuple[int, int], Link] | None = None,
    state_factor: float = 2.0,
    memory_bytes: float | None = None,
    op_overhead_ms: float = 0.0,
    tied: bool = False,
    mode: Mode | None = None,
    about: Mapping[str, Any] | None = None,
) -> Profile:
    """One profile of what all ranks measured. `state_factor`: the optimizer's moments, each as large as what it updates
    (AdamW of torch: 2; none: 0, and no master weights). `tied`: the head's weights are the embedding's. `mode`: how the
    layers ran."""
    first = ranks[0]
    if len(symbols) != len(first.group_of):
        raise OctoPipeError(f"{len(symbols)} symbols for {len(first.group_of)} layers; give one character per layer")
    loaded = np.mean([m.loaded_ms for m in ranks], axis=0)
    of = np.array(first.group_of)
    slow = [float(m.loaded_ms[of].sum() / loaded[of].sum()) for m in ranks]
    resident = max(m.resident_bytes for m in ranks)

    def column(values: Sequence[float] | Floats) -> Floats:
        return np.asarray(values, np.float64)[of]

    def sizes(name: str) -> Floats:
        return column([getattr(m, name) for m in first.memory])

    stash = sizes("stash_bytes")
    static = sizes("parameter_bytes") + sizes("gradient_bytes")
    if state_factor:
        static = static + sizes("master_bytes") + state_factor * sizes("updated_bytes")
    pairs = dict(links or {})
    worst = max(pairs.values(), key=lambda x: x.transfer_ms(1 << 20), default=Link())
    costs = CostTable(
        model=model,
        symbols=symbols,
        forward_ms=column(loaded[:, 0]),
        input_ms=column(loaded[:, 1]),
        weight_ms=column(loaded[:, 2]),
        activation_bytes=np.maximum(sizes("activation_bytes"), stash),
        stash_bytes=stash,
        static_bytes=static,
        tied_bytes=float(min(static[0], static[-1])) if tied else 0.0,
        gradient_bytes=sizes("gradient_bytes"),
        boundary_bytes=sizes("boundary_bytes"),
        workspace_bytes=sizes("workspace_bytes") + resident,
        network=Network(intra=worst, inter=worst, pairs=pairs),
        rank_slowdown=tuple(slow) if len(ranks) > 1 else (),
        rank_memory_bytes=() if memory_bytes is None else (memory_bytes,),
        tokens_per_micro_batch=tokens,
        mode=mode,
        shard_times=shard_times([m.shards for m in ranks]),
        routing=_routing(ranks),
        segments=segments_of([m.exchanges for m in ranks], first.group_of),
        repeatable=tuple(all(m.repeatable[g] for m in ranks) for g in first.group_of),
    )
    partial = {}
    for level, times in first.partial_ms.items():
        # An op is not slower for having fewer neighbours: what says so is noise.
        quick = np.minimum(times, loaded)
        partial[level] = costs.replace(
            forward_ms=column(quick[:, 0]), input_ms=column(quick[:, 1]), weight_ms=column(quick[:, 2])
        )
    told = {**_about(ranks), **(about or {})}
    return Profile(costs=costs, partial=partial, op_overhead_ms=op_overhead_ms, about=told)


def _about(ranks: Sequence[Measured]) -> dict[str, Any]:
    """What a profile says about its measurement, for people."""
    spread = np.median([m.spread for m in ranks], axis=0)[np.array(ranks[0].group_of)]
    return {
        "ranks": len(ranks),
        "seconds": max(m.seconds for m in ranks),
        "spread": {kind: spread[:, k].round(4).tolist() for k, kind in enumerate(KINDS)},
        "host_share": float(max(m.host_share for m in ranks)),
        "resident_mib": float(max(m.resident_bytes for m in ranks) / (1 << 20)),
    }


def _routing(ranks: Sequence[Measured]) -> Routing | None:
    """The first rank's routing: all ranks run the same layers on the same micro-batch. None where no layer routes, and
    where layers exchange tokens among ranks whose number is not known or does not divide their experts."""
    first = ranks[0]
    tokens = tuple(first.tokens_per_expert[g] for g in first.group_of) if first.tokens_per_expert else ()
    among = first.expert_ranks if first.exchanges else 1
    if not any(tokens) or among == 0 or any(len(row) % among for row in tokens):
        return None
    return Routing(tokens=tokens, ranks=among)
