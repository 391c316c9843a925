"""Paths of micro-batches over stages: chains, and graphs that fork and join.

Knows: the edges of a path, the neighbours of a stage on it, and when a path is valid. Does not know: ops, orders or
costs.

A path is a list of stages and edges between them. A path without edges is the chain of its stages. At a fork, several
stages take a stage's output, and their gradients are added. At a join, a stage takes several outputs together and
returns a gradient to each.

>>> before, after = neighbours(((0, 1, 2, 3),), (((0, 2), (1, 2), (2, 3)),), 4)
>>> before[0, 2].tolist(), after[0, 1].tolist()
([0, 1], [2])
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Edge = tuple[int, int]
MAX_EDGES = 1 << 20
"""Maximum number of edges of all paths together."""
MAX_DEGREE = 64
"""Maximum number of stages that one stage takes its input from, or sends its output to."""


def edges_of(routes: Sequence[Sequence[int]], edges: Sequence[Sequence[Edge]], number: int) -> Sequence[Edge]:
    """The edges of one path: the given ones, or those of the chain of its stages."""
    return edges[number] if edges else tuple(itertools.pairwise(routes[number]))


def neighbours(
    routes: Sequence[Sequence[int]], edges: Sequence[Sequence[Edge]], num_stages: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return before[path, stage, k] and after[path, stage, k]: the k-th preceding and following stage, or -1."""
    before, after = _neighbours(
        tuple(map(tuple, routes)), tuple(tuple((a, b) for a, b in row) for row in edges), num_stages
    )
    return before.copy(), after.copy()  # callers may modify theirs, also in a kernel, which ignores write protection


@functools.lru_cache(maxsize=64)
def _neighbours(
    routes: tuple[tuple[int, ...], ...], edges: tuple[tuple[Edge, ...], ...], num_stages: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    lists: list[list[dict[int, list[int]]]] = [[], []]
    for number in range(len(routes)):
        before: dict[int, list[int]] = {}
        after: dict[int, list[int]] = {}
        for a, b in edges_of(routes, edges, number):
            before.setdefault(b, []).append(a)
            after.setdefault(a, []).append(b)
        lists[0].append(before)
        lists[1].append(after)
    out = []
    for rows in lists:
        width = max((len(found) for row in rows for found in row.values()), default=1)
        table = np.full((len(routes), num_stages, max(width, 1)), -1, np.int32)
        for number, row in enumerate(rows):
            for stage, found in row.items():
                table[number, stage, : len(found)] = found
        out.append(table)
    return out[0], out[1]


def levels(route: Sequence[int], path_edges: Sequence[Edge]) -> list[list[int]]:
    """Return the stages of a path, grouped by the length of the longest path to them from its beginning.

    >>> levels((0, 1, 2, 3), ((0, 1), (0, 2), (1, 3), (2, 3)))
    [[0], [1, 2], [3]]
    """
    depth = dict.fromkeys(route, 0)
    for stage in route:  # listed so that every edge leads forward
        for a, b in path_edges:
            if a == stage:
                depth[b] = max(depth[b], depth[a] + 1)
    out: list[list[int]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for stage in route:
        out[depth[stage]].append(stage)
    return out


def only_chains(
    routes: Sequence[Sequence[int]],
    edges: Sequence[Sequence[Edge]],
    stages: Sequence[tuple[int, int, Edge | None]],
    num_layers: int,
) -> bool:
    """Whether the edges are equivalent to lists of stages: chains through all layers, without shards."""
    if len(edges) != len(routes):
        return False
    for route, path_edges in zip(routes, edges, strict=True):
        if tuple(path_edges) != tuple(itertools.pairwise(route)) or any(not 0 <= s < len(stages) for s in route):
            return False
        held = [stages[s] for s in route]
        ends = [0, *(stop for _, stop, _ in held)]
        if ends[-1] != num_layers or any(first != end for (first, _, _), end in zip(held, ends)):
            return False
        if any(shard is not None for _, _, shard in held):
            return False
    return True


def too_many_edges(edges: Sequence[Sequence[Edge]]) -> list[str]:
    """Return an error line if there are too many edges; this is checked before tables are allocated."""
    total = sum(map(len, edges))
    if total > MAX_EDGES:
        return [f"{total} edges of paths; at most {MAX_EDGES} are allowed"]
    for number, path_edges in enumerate(edges):
        for side, word in ((0, "sends its output to"), (1, "takes its input from")):
            counts: dict[int, int] = {}
            for edge in path_edges:
                counts[edge[side]] = counts.get(edge[side], 0) + 1
                if counts[edge[side]] > MAX_DEGREE:
                    return [f"path {number}: stage {edge[side]} {word} more than {MAX_DEGREE} stages"]
    return []


def path_problems(
    number: int, route: Sequence[int], path_edges: Sequence[Edge], stages: Sequence[tuple[int, int, Edge | None]]
) -> list[str]:
    """The problems of a path with edges; `stages` are (first layer, stop, shard) of all stages."""
    return list(itertools.islice(_problems(number, route, path_edges, stages), 4))


def _problems(
    number: int, route: Sequence[int], path_edges: Sequence[Edge], stages: Sequence[tuple[int, int, Edge | None]]
) -> Iterator[str]:
    members = set(route)
    if not route:
        yield f"path {number} is empty; list its stages"
        return
    if len(members) != len(route):
        yield f"path {number} names a stage twice; name each once"
        return
    for s in route:
        if not 0 <= s < len(stages):
            yield f"path {number} names stage {s}; stages go from 0 to {len(stages) - 1}"
            return
    place = {s: k for k, s in enumerate(route)}
    seen = set()
    for a, b in path_edges:
        if a not in members or b not in members:
            yield f"path {number}: edge [{a}, {b}] leads to a stage that is not on the path; list it under stages"
            return
        if place[a] >= place[b]:
            yield f"path {number}: edge [{a}, {b}] leads backward; list the stages so that every edge leads forward"
        if (a, b) in seen:
            yield f"path {number} has the edge [{a}, {b}] twice; keep one"
        seen.add((a, b))
        if stages[a][1] > stages[b][0]:
            yield (
                f"path {number}: edge [{a}, {b}] leads from layer {stages[a][1] - 1} to layer {stages[b][0]}; layers "
                "are numbered so that none needs a later one: let edges lead to higher layers"
            )
    touched = {s for edge in path_edges for s in edge}
    for s in route:
        if len(route) > 1 and s not in touched:
            yield f"path {number}: stage {s} is not connected; add an edge or leave it out"
    yield from _layers_once(number, route, stages)
    yield from _shards_apart(number, route, path_edges, stages)


def _layers_once(number: int, route: Sequence[int], stages: Sequence[tuple[int, int, Edge | None]]) -> Iterator[str]:
    """Yield a problem if a layer of a path is in more than one stage, or not exactly once in each of its shards."""
    whole: dict[int, int] = {}
    parts: dict[tuple[int, int], list[Edge]] = {}
    for s in route:
        first, stop, shard = stages[s]
        if shard is not None:
            parts.setdefault((first, stop), []).append(shard)
            if len(parts[first, stop]) > 1:
                continue
        for layer in range(first, stop):
            if layer in whole:
                yield f"path {number}: layer {layer} is in stage {whole[layer]} and in stage {s}; keep one"
                return
            whole[layer] = s
    for (first, stop), held in parts.items():
        count = held[0][1]  # anyone's number: compare it before making a list of that length
        if len(held) != count or sorted(held) != [(k, count) for k in range(count)]:
            yield (
                f"path {number}: layers [{first}, {stop}) have the shards {[list(k) for k in sorted(held)[:6]]}; "
                f"each of the {count} must be there once"
            )


def _shards_apart(
    number: int, route: Sequence[int], path_edges: Sequence[Edge], stages: Sequence[tuple[int, int, Edge | None]]
) -> Iterator[str]:
    """Yield a problem if shards of one layer are given different inputs, or not all of their outputs are added up.

    A shard's output alone is a part of the layer's, so nothing may take it without the others.
    """
    beside: tuple[dict[int, set[int]], dict[int, set[int]]] = ({s: set() for s in route}, {s: set() for s in route})
    for a, b in path_edges:
        beside[0][b].add(a)
        beside[1][a].add(b)
    groups: dict[tuple[int, int], list[int]] = {}
    for s in route:
        if stages[s][2] is not None:
            groups.setdefault(stages[s][:2], []).append(s)
    for (first, stop), held in groups.items():
        for near, what in zip(beside, ("take their input from", "hand their output to"), strict=True):
            other = next((s for s in held if near[s] != near[held[0]]), None)
            if other is not None:
                yield (
                    f"path {number}: stages {held[0]} and {other} are shards of layers [{first}, {stop}) but {what} "
                    f"different stages, {sorted(near[held[0]])[:6]} and {sorted(near[other])[:6]}; give both the same"
                )
                return
        if not beside[1][held[0]]:
            yield (
                f"path {number} ends with the shards of layers [{first}, {stop}); let them meet in a stage "
                f"[{stop}, {stop}), which computes the loss"
            )
        mixed = next((s for s in sorted(beside[1][held[0]]) if beside[0][s] != set(held)), None)
        if mixed is not None:
            yield (
                f"path {number}: stage {mixed} takes the sum of the shards of layers [{first}, {stop}) together with "
                "outputs of other stages; use a plan in which these layers are whole"
            )
