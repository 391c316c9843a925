"""Layers that are split over ranks: assembled for a checkpoint, and split again when loading.

Knows: which rows of a parameter and of its optimizer state this rank holds, and how the parts are collected on the rank
that writes the layer. Does not know: files. A checkpoint always contains whole layers, so it resumes under any plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.stages.shards import rows_of_shard
from octopipe.runtime.wire.telling import naming_lost_peers


def with_whole_layers(pipe: Pipeline, contents: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Return the values that a rank writes into a checkpoint, with split layers assembled (collective over the pipeline
    if any layer is split). `contents` has this rank's part of every such layer."""
    cut = pipe.plan.shards()
    if not cut:
        return contents
    mine = {content["layer"]: content for content in contents}
    with naming_lost_peers(pipe.timeout_s):
        return _made_whole(pipe, cut, mine)


def _made_whole(
    pipe: Pipeline, cut: Mapping[int, Sequence[int]], mine: dict[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    for k, ranks in sorted(cut.items()):
        if k not in mine:
            continue
        sizes: Mapping[str, int] = pipe.modules()[k].cut_parameters  # type: ignore[assignment]
        if min(ranks) != pipe.rank:
            for _, _, part in _parts(mine.pop(k), sizes):
                pipe.world.control.send([part.contiguous()], min(ranks), k).wait()
            continue
        content = mine[k]
        for holder, key, part in list(_parts(content, sizes)):
            rows = sizes[_parameter(holder, key, content)]
            whole = torch.empty((rows, *part.shape[1:]), dtype=part.dtype)
            for number, rank in enumerate(ranks):
                start, stop = rows_of_shard(rows, number, len(ranks))
                if rank == pipe.rank:
                    whole[start:stop] = part
                else:
                    pipe.world.control.recv([whole[start:stop]], rank, k).wait()
            holder[key] = whole
    return list(mine.values())


def _parts(content: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield every tensor of which a rank has a part, in the same order on all ranks: its container, its key there, and
    the tensor."""
    for name in sorted(sizes):
        state = content["state"]
        yield state, name, state[name]
        moments = content["optimizer"].get(name, {})
        for key in sorted(moments):
            if isinstance(moments[key], Tensor) and moments[key].shape == state[name].shape:
                yield moments, key, moments[key]


def _parameter(holder: Mapping[str, Any], key: str, content: Mapping[str, Any]) -> str:
    """Return the name of the parameter that a part belongs to."""
    if holder is content["state"]:
        return key
    return next(name for name, moments in content["optimizer"].items() if moments is holder)


def part_of(pipe: Pipeline, name: str, value: Any) -> Any:
    """Return this rank's part of a whole value that belongs to the parameter `layer.name`; other values are returned as
    they are."""
    layer, _, path = name.partition(".")
    module = pipe.modules().get(int(layer))
    rows = getattr(module, "cut_parameters", {}).get(path)
    if module is None or rows is None:
        return value
    start, count = int(module.shard_start), module.get_parameter(path).shape[0]  # type: ignore[arg-type]

    def cut(found: Any) -> Any:
        if isinstance(found, Tensor) and found.ndim and found.shape[0] == rows:
            return found[start : start + count].clone()
        return {key: cut(inner) for key, inner in found.items()} if isinstance(found, dict) else found

    return cut(value)
