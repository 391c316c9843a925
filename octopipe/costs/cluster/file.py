"""Cluster files: unequal nodes as a small TOML or JSON file, and the resulting GPUs of every pipeline rank.

Knows: the file format; which GPUs a pipeline rank gets, its memory and its links. Does not know: models; the relative
speed of a rank is computed by pricing the model on its GPU (`resolve.py`).

    [[nodes]]
    gpu = "h100"          a preset (`octopipe gpus`)
    count = 2             nodes of this kind (default: 1)
    gpus_per_node = 8     default: as the preset's usual node

    [[nodes]]
    gpu = "a100"
    count = 2

GPUs are numbered node after node, in the file's order, and pipeline ranks take tp * cp * dp of them in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, check_format, kind_of, read_toml, shown
from octopipe.base.limits import MAX_GPUS, MAX_LINKS, over
from octopipe.costs.cluster.hardware import GIB, INTER_LATENCY_MS, INTRA_LATENCY_MS, Gpu, Link, Network, gpu

Nodes = tuple[tuple[str, int, int], ...]
"""(GPU, nodes, GPUs per node) in order: `Setup.nodes`."""
FORMAT = "octopipe.cluster/1"
"""The "format" of such a file; it may be left out."""


def read_cluster(path: str | Path) -> Nodes:
    """The nodes in a cluster file."""
    return nodes_from_object(read_toml(path), shown(path))


def nodes_from_object(raw: object, where: str = "cluster") -> Nodes:
    """The nodes in an already decoded cluster file."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("nodes"), list) or not raw["nodes"]:
        raise OctoPipeError(f'{where}: no nodes; write `[[nodes]]`, then `gpu = "h100"` and `count = 4`')
    unknown = sorted(set(raw) - {"nodes", "format"})
    if unknown:
        raise OctoPipeError(f"{where}: unknown key {brief(unknown[0])}; a cluster file has [[nodes]] only")
    if raw.get("format") is not None:
        check_format(raw["format"], FORMAT, where)
    nodes = tuple(_group(entry, f"{where}: nodes entry {i}") for i, entry in enumerate(raw["nodes"]))
    too_many = over("GPUs", count_gpus(nodes), MAX_GPUS)
    if too_many:
        raise OctoPipeError(f"{where}: {too_many[0]}")
    makers = {gpu(name).generation.startswith("cdna"): name for name, _, _ in nodes}
    if len(makers) > 1:
        raise OctoPipeError(
            f"{where}: no collective library connects {makers[False]} and {makers[True]}, GPUs of two vendors; list "
            "the nodes of one vendor"
        )
    return nodes


def _group(entry: Any, where: str) -> tuple[str, int, int]:
    if not isinstance(entry, Mapping):
        raise OctoPipeError(f"{where} is a {kind_of(entry)}; give gpu and count")
    unknown = sorted(set(entry) - {"gpu", "count", "gpus_per_node"})
    if unknown:
        raise OctoPipeError(f"{where}: unknown key {brief(unknown[0])}; one of gpu, count, gpus_per_node")
    if not isinstance(entry.get("gpu"), str):
        raise OctoPipeError(f'{where}: gpu is {brief(entry.get("gpu"))}; give a preset, like "h100"')
    try:
        found = gpu(entry["gpu"])
    except OctoPipeError as error:
        raise OctoPipeError(f"{where}: {error}") from None
    numbers = []
    for name, default in (("count", 1), ("gpus_per_node", found.gpus_per_node)):
        value = entry.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_GPUS:
            raise OctoPipeError(f"{where}: {name} is {brief(value)}; give a whole number from 1 to {MAX_GPUS}")
        numbers.append(value)
    return found.name, numbers[0], numbers[1]


def count_gpus(nodes: Nodes) -> int:
    return sum(count * size for _, count, size in nodes)


def node_gpus(nodes: Nodes, kind: str | None = None) -> int | None:
    """Return the GPUs on the fast links of the smallest node (of this GPU kind); None if there is no such node.

    >>> node_gpus((("h100", 2, 8), ("a100", 1, 4))), node_gpus((("h100", 2, 8), ("a100", 1, 4)), "h100"), node_gpus(())
    (4, 8, None)
    """
    return min((size for name, _, size in nodes if kind in (None, name)), default=None)


def used_gpus(nodes: Nodes, gpus: int) -> list[tuple[str, int]]:
    """Return the first `gpus` GPUs of the nodes as (GPU, number), entry by entry.

    >>> used_gpus((("h100", 1, 8), ("a100", 2, 8), ("l40s", 1, 8)), 12)
    [('h100', 8), ('a100', 4)]
    """
    out = []
    for name, count, size in nodes:
        if used := min(count * size, gpus):
            out.append((name, used))
            gpus -= used
    return out


class RankGpus(NamedTuple):
    """The GPUs of one pipeline rank, including all its replicas."""

    gpu: Gpu
    """The slowest GPU kind of the rank; the others wait for it."""
    memory_gib: float
    """The smallest GPU memory of the rank."""
    nodes: frozenset[int]
    node_gpus: int
    """GPUs on the fast links of the smallest of these nodes."""


def ranks_on(nodes: Nodes, pp: int, gpus_per_stage: int) -> list[RankGpus]:
    """The GPUs of every pipeline rank."""
    if pp * gpus_per_stage > count_gpus(nodes):
        raise OctoPipeError(
            f"{pp} ranks of {gpus_per_stage} GPUs need {pp * gpus_per_stage}, and the cluster file has "
            f"{count_gpus(nodes)}; lower pp, tp, cp or dp"
        )
    kinds: list[tuple[Gpu, int]] = []
    sizes: list[int] = []
    for name, count, size in nodes:
        for _ in range(count):
            kinds += [(gpu(name), len(sizes))] * size
            sizes.append(size)
    out = []
    for rank in range(pp):
        mine = kinds[rank * gpus_per_stage : (rank + 1) * gpus_per_stage]
        slowest = min((kind for kind, _ in mine), key=lambda g: g.bf16_tflops * g.clock)
        near = frozenset(n for _, n in mine)
        out.append(RankGpus(slowest, min(k.memory_gib for k, _ in mine), near, min(sizes[n] for n in near)))
    return out


def network_of(ranks: Sequence[RankGpus]) -> Network:
    """Return the links between ranks: the slower GPU's fast link within a node, its network link between nodes."""
    too_many = over("links between ranks of unequal nodes", len(ranks) * (len(ranks) - 1), MAX_LINKS)
    if too_many:
        raise OctoPipeError(too_many[0])
    pairs = {}
    for a, mine in enumerate(ranks):
        for b, other in enumerate(ranks):
            if a == b:
                continue
            near = mine.nodes == other.nodes and len(mine.nodes) == 1
            name = "intra_gb_per_s" if near else "inter_gb_per_s"
            speed = min(getattr(mine.gpu, name), getattr(other.gpu, name))
            pairs[a, b] = Link.of_bandwidth(speed, INTRA_LATENCY_MS if near else INTER_LATENCY_MS)
    worst = max(pairs.values(), key=lambda link: link.transfer_ms(1 << 20)) if pairs else Link()
    return Network(intra=worst, inter=worst, pairs=pairs)


def memory_bytes(ranks: Sequence[RankGpus], reserve_gib: float | None, default: Any) -> tuple[float, ...]:
    """Return the usable memory of every rank, after the reserve, which `default` computes if `reserve_gib` is None."""
    out = []
    for rank in ranks:
        kept = default(rank.memory_gib) if reserve_gib is None else reserve_gib
        if kept >= rank.memory_gib:
            raise OctoPipeError(
                f"reserve_gib {kept:g} leaves nothing of a {rank.gpu.name}'s {rank.memory_gib:g} GiB; reserve less"
            )
        out.append((rank.memory_gib - kept) * GIB)
    return tuple(out)
