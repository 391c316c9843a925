"""Kernels take the place of the memsets of a captured graph: the same bytes, in the same order.

A driver on the host stands in for libcuda: its graphs are nodes of host memory with the nodes before them.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octopipe.runtime.stages import graph_fills
from octopipe.runtime.stages.graph_driver import MEMCPY_NODE, MEMSET_NODE
from octopipe.runtime.stages.graph_fills import TYPES, FillParams, pattern, replace_memsets

KERNEL = 0


class HostGraphs:
    """One graph: what each node does, and which nodes are before it."""

    def __init__(self) -> None:
        self.kinds: dict[int, int] = {}
        self.acts: dict[int, Any] = {}
        self.before: dict[int, list[int]] = {}
        self.typed_edges: set[int] = set()
        self.most_nodes_per_act = 1

    def node(self, kind: int, act: Any, before: Sequence[int]) -> int:
        number = max(self.kinds, default=0) + 1
        self.kinds[number], self.acts[number], self.before[number] = kind, act, list(before)
        return number

    def nodes(self, graph: int) -> list[tuple[int, int]]:
        return list(self.kinds.items())

    def params(self, node: int) -> FillParams:
        return self.acts[node]

    def neighbours(self, node: int) -> tuple[list[int], list[int]] | None:
        if node in self.typed_edges:
            return None
        return self.before[node], [other for other, before in self.before.items() if node in before]

    def add(self, graph: int, stream: Any, before: Sequence[int], act: Callable[[], object]) -> list[int]:
        return [self.node(KERNEL, act, before) for _ in range(self.most_nodes_per_act)]

    def connect(self, graph: int, node: int, after: Sequence[int]) -> None:
        for other in after:
            self.before[other].append(node)

    def destroy(self, node: int) -> None:
        del self.kinds[node], self.acts[node], self.before[node]
        for before in self.before.values():
            if node in before:
                before.remove(node)

    def run(self) -> None:
        done: set[int] = set()
        while len(done) < len(self.kinds):
            ready = [n for n in self.kinds if n not in done and done.issuperset(self.before[n])]
            assert ready, "the graph has a circle"
            for node in sorted(ready, reverse=True):  # as little by the order of capture as possible
                act = self.acts[node]
                memset(act) if isinstance(act, FillParams) else act()
                done.add(node)


def memset(params: FillParams) -> None:
    """What the driver does, row by row."""
    element = (params.value & ((1 << (8 * params.element_bytes)) - 1)).to_bytes(params.element_bytes, "little")
    for row in range(params.height):
        ctypes.memmove(params.target + row * params.pitch, element * params.width, params.element_bytes * params.width)


def elements(address: int, count: int, size: int, device: Any) -> Tensor:
    memory = (ctypes.c_ubyte * (count * size)).from_address(address)
    return torch.frombuffer(memory, dtype=TYPES[size])


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_fills, "_memory", elements)


STREAM: Any = SimpleNamespace(device=torch.device("cpu"))


def test_the_record_of_a_memset_has_the_layout_of_cuda_h() -> None:
    assert ctypes.sizeof(FillParams) == 40
    offsets = {"target": 0, "pitch": 8, "value": 16, "element_bytes": 20, "width": 24, "height": 32}
    assert {name: getattr(FillParams, name).offset for name in offsets} == offsets


@pytest.mark.parametrize("seed", range(40))
def test_a_fill_writes_the_bytes_of_its_memset(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4))
    room = torch.zeros(256, dtype=torch.uint8)
    target = room.data_ptr() + size * rng.randrange(8)
    params = FillParams(target, 0, rng.getrandbits(32), size, rng.randrange(1, 24), 1)
    memset(params)
    expected = room.clone()
    room.zero_()
    wide, count, value = pattern(params)
    assert wide >= size and wide * count == size * params.width and target % wide == 0
    elements(target, count, wide, None).fill_(value)
    assert torch.equal(room, expected)


def test_fills_keep_the_order_of_the_graph(on_the_host: None) -> None:
    """Two sums of memory that is cleared between them, with a fork, and a memset at either end."""
    graphs, memory, seen = HostGraphs(), torch.full((8,), 9, dtype=torch.uint8), []

    def clear(value: int) -> FillParams:
        return FillParams(memory.data_ptr(), 0, value, 1, 8, 1)

    first = graphs.node(MEMSET_NODE, clear(1), [])
    left = graphs.node(KERNEL, lambda: seen.append(int(memory.sum())), [first])
    right = graphs.node(MEMCPY_NODE, lambda: seen.append(int(memory.sum())), [first])
    middle = graphs.node(MEMSET_NODE, clear(2), [left, right])
    graphs.node(MEMSET_NODE, clear(3), [graphs.node(KERNEL, lambda: seen.append(int(memory.sum())), [middle])])
    assert replace_memsets(graphs, 3, STREAM) == 3
    assert MEMSET_NODE not in graphs.kinds.values() and len(graphs.kinds) == 6
    graphs.run()
    assert seen == [8, 8, 16] and int(memory.sum()) == 24


def test_what_a_fill_cannot_do_stays_a_memset(on_the_host: None) -> None:
    """Memory with gaps, and an edge that says more than an order."""
    graphs, memory = HostGraphs(), torch.zeros(64, dtype=torch.uint8)
    gaps = graphs.node(MEMSET_NODE, FillParams(memory.data_ptr(), 16, 7, 1, 4, 3), [])
    typed = graphs.node(MEMSET_NODE, FillParams(memory.data_ptr() + 60, 0, 7, 1, 4, 1), [gaps])
    graphs.typed_edges.add(typed)
    assert replace_memsets(graphs, 3, STREAM) == 0
    graphs.run()
    assert int((memory == 7).sum()) == 16


def test_a_fill_that_is_not_one_kernel_ends_the_capture(on_the_host: None) -> None:
    graphs, memory = HostGraphs(), torch.zeros(4, dtype=torch.uint8)
    graphs.node(MEMSET_NODE, FillParams(memory.data_ptr(), 0, 7, 1, 4, 1), [])
    graphs.most_nodes_per_act = 2
    with pytest.raises(RuntimeError, match="2 nodes of a graph instead of one"):
        replace_memsets(graphs, 3, STREAM)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_this_gpu_graphs_have_no_memsets() -> None:
    from octopipe.runtime.stages.graph_memory import Pool, fill_driver

    device = torch.device("cuda", 0)
    assert fill_driver(device) is not None
    heads = torch.randn(1, 4, 256, 64, device=device, dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    attend(heads, heads, heads, is_causal=True)  # a library's first call allocates, which a capture does not allow
    made, out = Pool(device).capture(lambda: attend(heads, heads, heads, is_causal=True))
    made.replay_first()
    made.replay()
    assert "memset" not in made.node_counts()
    assert torch.equal(out, attend(heads, heads, heads, is_causal=True))
