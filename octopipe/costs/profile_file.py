"""Profile files: measurements on real devices, read from a file into costs.

Knows: the format `octopipe.profile/1`: a layer-times file (`layer_times.py`) whose tables have one number per layer,
with additional measured links, rank speeds and times with fewer busy ranks. Does not know: how anything is measured
(`runtime/measure/profiler.py`).

    {"format": "octopipe.profile/1", "model": "tiny", "pattern": "EL",
     "forward_ms": [0.1, 2.0], "backward_ms": [0.0, 2.1], "weight_ms": [0.1, 1.0],
     "partial": {"1": {"forward_ms": [...], "backward_ms": [...], "weight_ms": [...]}},     one rank alone at work
     "links": [{"source": 0, "destination": 1, "latency_ms": 0.01, "gb_per_s": 40.0}],
     "rank_slowdown": [1.0, 1.02], "memory_gib": 30.0, "op_overhead_ms": 0.01, "fused_factor": 0.97,
     "shards": [{"layer": 1, "fixed": [0.02, 0.01, 0.0], "share": [1.0, 1.0, 1.0]}],
     "routing": {"ranks": 1, "micro_batches": 1, "counted": [{"layers": [1], "tokens": [300, 212]}]},
     "graph": {"takes": {"7": [0, 5]}, "shared": [{"layers": [6, 8], "gib": 0.9}]},
     "repeatable": [true, false], "mode": {"precision": "bf16-main-fp32", "graphs": false}, "about": {...}}

`shards` states the time of one of n shards of a layer that is cut by vocabulary (`shard_times.py`). `routing` states
how many tokens every expert of a layer received, and over how many ranks the experts were distributed (`routing.py`).
`graph` states which layers' outputs a layer takes, and which layers share weights (`layer_graph.py`).
`repeatable` states for each layer whether a second forward gave the same result as the first.

Times are those of a rank while all ranks are busy. Every key from `partial` on is optional. `mode` states how the
layers ran (`mode.py`): a run in another precision has different times.

>>> file = {"pattern": "EL", "forward_ms": [1, 2], "backward_ms": [0, 2], "weight_ms": [1, 1]}
>>> links = [{"source": 0, "destination": 1, "latency_ms": 0.5, "gb_per_s": 1.0}]
>>> profile_from_object({**file, "links": links}, name="tiny").costs.network.transfer_ms(0, 1, 1e6)
1.5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, check_format, kind_of, read_json_object, shown, stem_of
from octopipe.base.limits import MAX_LINKS, MAX_RANKS, MAX_RATIO, MAX_TIME_MS, finite, over
from octopipe.costs.cluster.hardware import GIB, Link, Network
from octopipe.costs.cluster.setup import Setup, setup_from
from octopipe.costs.foreign_times import load_foreign_profile
from octopipe.costs.layer_graph import layer_graph_from_object
from octopipe.costs.layer_times import TIMES, costs_of_layer_times
from octopipe.costs.mode import mode_from_object
from octopipe.costs.profile import FORMAT, Profile
from octopipe.costs.routing import routing_from_object
from octopipe.costs.shard_times import shard_times_from_object
from octopipe.costs.table import CostTable


def load_profile(path: str | Path) -> Profile:
    """Read a profile; a plain layer-times file and another tool's recording are accepted as well."""
    recorded = load_foreign_profile(path)
    if recorded is not None:
        return recorded
    return profile_from_object(read_json_object(path), name=stem_of(path), where=shown(path))


def profile_from_object(file: Mapping[str, object], *, name: str, where: str = "profile") -> Profile:
    """The profile in an already decoded JSON object; `where` opens every error line."""
    tag = file.get("format")
    if tag is None and "pattern" not in file and ("model_type" in file or "architectures" in file):
        raise OctoPipeError(f"{where}: a Hugging Face config, not a profile; `octopipe profile {where}` writes one")
    if isinstance(tag, str) and tag.startswith("octopipe.") and not tag.startswith("octopipe.layer-times"):
        check_format(tag, FORMAT, where)
    model = file.get("model")
    costs = costs_of_layer_times(file, name=model if isinstance(model, str) and model else name, where=where)
    if file.get("optimizer_ms") is not None:
        costs = costs.replace(optimizer_ms=_numbers(file["optimizer_ms"], f'{where}: "optimizer_ms"', costs.num_layers))
    if file.get("tied_gib"):
        costs = costs.replace(tied_bytes=GIB * _numbers([file["tied_gib"]], f'{where}: "tied_gib"')[0])
    costs = costs.replace(shard_times=shard_times_from_object(file.get("shards"), costs.num_layers, where))
    costs = costs.replace(graph=layer_graph_from_object(file.get("graph"), costs.num_layers, where))
    costs = costs.replace(routing=routing_from_object(file.get("routing"), costs.num_layers, where))
    pairs = _links(file.get("links"), where)
    if pairs:
        worst = max(pairs.values(), key=lambda link: link.transfer_ms(1 << 20))
        costs = costs.replace(network=Network(intra=worst, inter=worst, pairs=pairs))
    for key in ("host_link", "copy_sum"):
        if file.get(key) is not None:
            costs = costs.replace(**{key: _link(file[key], f'{where}: "{key}"')})
    slow = file.get("rank_slowdown")
    if slow is not None and slow != []:
        costs = costs.replace(rank_slowdown=tuple(_ranks(slow, f'{where}: "rank_slowdown"', most=MAX_RATIO)))
    memory = file.get("memory_gib")
    if memory is not None and memory != []:
        sizes = _ranks(memory if isinstance(memory, list) else [memory], f'{where}: "memory_gib"')
        costs = costs.replace(rank_memory_bytes=tuple(v * GIB for v in sizes))
    costs = costs.replace(mode=mode_from_object(file.get("mode"), where))
    repeatable = file.get("repeatable")
    if repeatable is not None:
        if not isinstance(repeatable, list) or [type(r) for r in repeatable] != [bool] * costs.num_layers:
            raise OctoPipeError(f'{where}: "repeatable" is {brief(repeatable)}; give true or false for every layer')
        costs = costs.replace(repeatable=tuple(repeatable))
    about = file.get("about")
    costs = costs.replace(setup=_measured_with(about, costs.tokens_per_micro_batch, where))
    partial = _partial(file.get("partial"), costs, where)
    overhead, fused = file.get("op_overhead_ms"), file.get("fused_factor")
    overhead_ms = _numbers([0.0 if overhead is None else overhead], f'{where}: "op_overhead_ms"')[0]
    factor = _numbers([1.0 if fused is None else fused], f'{where}: "fused_factor"', positive=True, most=MAX_RATIO)[0]
    return Profile(
        costs=costs,
        partial=partial,
        op_overhead_ms=overhead_ms,
        fused_factor=factor,
        about=about if isinstance(about, dict) else {},
    )


def _measured_with(about: object, tokens: int | None, where: str) -> Setup | None:
    """Return the set-up of layers that were measured with several sequences, with stated inputs of an encoder or with
    frozen layers; None for one sequence and nothing else."""
    recipe = about.get("recipe") if isinstance(about, dict) else None
    if not isinstance(recipe, dict):
        return None
    rows = recipe.get("micro_batch_size")
    rows = rows if isinstance(rows, int) and tokens is not None and rows > 0 and tokens % rows == 0 else 1
    names = ("images", "recordings", "encoder_seq", "frozen")
    known = {name: recipe[name] for name in names if recipe.get(name) is not None}
    for name in ("images", "recordings"):
        if isinstance(known.get(name), str):  # the name of a file, which may be another one by now
            del known[name]
    if rows == 1 and not known:
        return None
    seq = None if tokens is None else tokens // rows
    return setup_from({**known, "seq": seq, "micro_batch_size": rows}, f'{where}: "recipe"')


def _partial(value: object, costs: CostTable, where: str) -> dict[int, CostTable]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise OctoPipeError(f'{where}: "partial" is a JSON {kind_of(value)}; give an object')
    out: dict[int, CostTable] = {}
    for level, tables in value.items():
        what = f'{where}: "partial" of {brief(level)}'
        number = int(level) if str(level).isascii() and str(level).isdigit() and len(str(level)) <= 6 else 0
        if not 1 <= number <= MAX_RANKS or number in out or not isinstance(tables, dict):
            raise OctoPipeError(f"{what}: give a number of ranks (1 to {MAX_RANKS}), once, and an object of times")
        times = {name: _numbers(tables.get(key), f'{what}: "{key}"', costs.num_layers) for key, name in TIMES.items()}
        out[number] = costs.replace(**times)
    return out


def _links(value: object, where: str) -> dict[tuple[int, int], Link]:
    if value is None:
        return {}
    if not isinstance(value, list):
        raise OctoPipeError(f'{where}: "links" is a JSON {kind_of(value)}; give a list of objects')
    too_many = over("links", len(value), MAX_LINKS)
    if too_many:
        raise OctoPipeError(f"{where}: {too_many[0]}")
    pairs: dict[tuple[int, int], Link] = {}
    for i, entry in enumerate(value):
        what = f'{where}: "links" entry {i}'
        link = _link(entry, what)
        assert isinstance(entry, dict)
        ends: list[Any] = [entry.get("source"), entry.get("destination")]
        if any(isinstance(e, bool) or not isinstance(e, int) or not 0 <= e < MAX_RANKS for e in ends):
            raise OctoPipeError(f"{what} has source {brief(ends[0])} and destination {brief(ends[1])}; give ranks")
        if (ends[0], ends[1]) in pairs:
            raise OctoPipeError(f"{what}: the link from {ends[0]} to {ends[1]} was given before; keep one of the two")
        pairs[ends[0], ends[1]] = link
    return pairs


def _link(entry: object, what: str) -> Link:
    """Return the link {"latency_ms": ..., "gb_per_s": ...}; a key that is left out costs no time."""
    if not isinstance(entry, dict):
        raise OctoPipeError(f"{what} is a JSON {kind_of(entry)}; give an object")
    latency = _numbers([entry.get("latency_ms", 0.0)], f"{what}: latency_ms")[0]
    speed = entry.get("gb_per_s")
    rate = 0.0 if speed is None else 1e-6 / _numbers([speed], f"{what}: gb_per_s", positive=True)[0]
    return Link(latency_ms=latency, ms_per_byte=rate)


def _ranks(value: object, what: str, *, most: float = MAX_TIME_MS) -> list[float]:
    """Numbers > 0, one per rank."""
    if isinstance(value, list) and len(value) > MAX_RANKS:
        raise OctoPipeError(f"{what}: {over('ranks', len(value), MAX_RANKS)[0]}")
    return _numbers(value, what, positive=True, most=most)


def _numbers(
    value: object, what: str, count: int | None = None, *, positive: bool = False, most: float = MAX_TIME_MS
) -> list[float]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise OctoPipeError(f"{what} is a JSON {kind_of(value)}; give a list of numbers")
    if count is not None and len(value) != count:
        raise OctoPipeError(f"{what} has {len(value)} numbers for {count} layers; give one per layer")
    out = []
    for item in value:
        number, least = finite(item), 1 / most if positive else 0.0
        if number is None or not least <= number <= most:
            raise OctoPipeError(f"{what} holds {brief(item)}; give finite numbers from {least:g} to {most:g}")
        out.append(number)
    return out


__all__ = ["FORMAT", "Profile", "load_profile", "profile_from_object"]
