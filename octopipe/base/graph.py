"""Directed graphs given as predecessor tables: a topological order, or one cycle.

Knows: integers. Does not know: what the nodes mean; callers turn a cycle into words.

`preds` has one row per node, padded with -1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octopipe.base.compile import njit

Ints = NDArray[np.int32]


@njit
def topological_order(preds: Ints) -> Ints:
    """Return the nodes with predecessors first; if there is a cycle, the result has fewer nodes than the graph."""
    nodes, width = preds.shape
    missing = np.zeros(nodes, np.int32)
    first = np.zeros(nodes + 1, np.int32)
    for node in range(nodes):
        for k in range(width):
            if preds[node, k] >= 0:
                missing[node] += 1
                first[preds[node, k] + 1] += 1
    for node in range(nodes):
        first[node + 1] += first[node]
    fill = first[:-1].copy()
    successors = np.empty(first[nodes], np.int32)
    for node in range(nodes):
        for k in range(width):
            p = preds[node, k]
            if p >= 0:
                successors[fill[p]] = node
                fill[p] += 1
    order = np.empty(nodes, np.int32)
    done = 0
    for node in range(nodes):
        if missing[node] == 0:
            order[done] = node
            done += 1
    head = 0
    while head < done:
        node = order[head]
        head += 1
        for k in range(first[node], first[node + 1]):
            successor = successors[k]
            missing[successor] -= 1
            if missing[successor] == 0:
                order[done] = successor
                done += 1
    return order[:done]


def find_cycle(preds: Ints) -> list[int]:
    """Return one cycle as nodes in the order in which they wait (each needs the next one), or an empty list."""
    order = topological_order(preds)
    if order.size == preds.shape[0]:
        return []
    stuck = np.ones(preds.shape[0], bool)
    stuck[order] = False
    node = int(np.flatnonzero(stuck)[0])
    seen: dict[int, int] = {}
    path: list[int] = []
    # Every stuck node has a stuck predecessor, so walking backwards must reach a node twice.
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = next(int(p) for p in preds[node] if p >= 0 and stuck[p])
    return path[seen[node] :]
