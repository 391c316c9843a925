"""Memsets inside captured graphs, replaced by kernels before a graph is instantiated.

Knows: the driver's records of a memset and of the edges around it, and how a kernel takes its place. Does not know:
what is captured, who asked for the memset (cuBLAS and flash attention clear counters and sums before their kernels).

The driver launches a graph of kernels and copies in nearly constant time, 4 to 7 µs for 10 or 300 kernels, but every
memset in it adds 1.6 µs (H200, driver 580: 93 µs for 60 products that each clear a counter, 4.5 µs for 60 that do not).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.stages.graph_driver import MEMSET_NODE, GraphDriver
from octopipe.runtime.wire.driver import check_code, typed

THREAD_LOCAL = 1
"""`CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: other threads may make any call during the capture."""
TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class FillParams(ctypes.Structure):
    """`CUDA_MEMSET_NODE_PARAMS` of cuda.h."""

    _fields_ = [
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class FillDriver:
    """Calls of libcuda that read and change a graph which is not instantiated yet. Handles are plain numbers."""

    def __init__(self, nodes: GraphDriver) -> None:
        lib = ctypes.CDLL("libcuda.so.1")
        handle, pointer, size = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
        self._nodes = nodes
        self._params = typed(lib.cuGraphMemsetNodeGetParams, handle, pointer)
        # These versions report the data of edges: one that is more than an order (programmatic launch) has to stay.
        self._before = typed(lib.cuGraphNodeGetDependencies_v2, handle, pointer, pointer, pointer)
        self._after = typed(lib.cuGraphNodeGetDependentNodes_v2, handle, pointer, pointer, pointer)
        self._connect = typed(lib.cuGraphAddDependencies_v2, handle, pointer, pointer, pointer, size)
        self._destroy = typed(lib.cuGraphDestroyNode, handle)
        self._begin = typed(lib.cuStreamBeginCaptureToGraph, handle, handle, pointer, pointer, size, ctypes.c_uint)
        self._end = typed(lib.cuStreamEndCapture, handle, pointer)
        self._memset = typed(lib.cuMemsetD8Async, ctypes.c_uint64, ctypes.c_ubyte, size, handle)

    def nodes(self, graph: int) -> list[tuple[int, int]]:
        return self._nodes.nodes(graph)

    def params(self, node: int) -> FillParams:
        found = FillParams()
        check_code(self._params(node, ctypes.addressof(found)), "cuGraphMemsetNodeGetParams")
        return found

    def neighbours(self, node: int) -> tuple[list[int], list[int]] | None:
        """The nodes before and after a node; None if an edge has data, that is, means more than the order."""
        found = []
        for ask, name in (
            (self._before, "cuGraphNodeGetDependencies"),
            (self._after, "cuGraphNodeGetDependentNodes"),
        ):
            count = ctypes.c_size_t(0)
            check_code(ask(node, None, None, ctypes.addressof(count)), name)
            nodes, edges = (ctypes.c_void_p * max(count.value, 1))(), (ctypes.c_uint64 * max(count.value, 1))()
            if count.value:
                check_code(ask(node, ctypes.addressof(nodes), ctypes.addressof(edges), ctypes.addressof(count)), name)
            if any(edges[: count.value]):
                return None
            found.append([handle or 0 for handle in nodes[: count.value]])
        return found[0], found[1]

    def add(self, graph: int, stream: torch.cuda.Stream, before: Sequence[int], act: Callable[[], object]) -> list[int]:
        """Run `act` with `stream` as the current stream, and add what it queues there to a graph, after the nodes
        `before`. Returns the new nodes."""
        known = {node for node, _ in self.nodes(graph)}
        nodes, end = (ctypes.c_void_p * max(len(before), 1))(*before), ctypes.c_void_p(0)
        first = ctypes.addressof(nodes) if before else None
        begun = self._begin(stream.cuda_stream, graph, first, None, len(before), THREAD_LOCAL)
        check_code(begun, "cuStreamBeginCaptureToGraph")
        try:
            with torch.cuda.stream(stream):
                act()
        finally:
            ended = self._end(stream.cuda_stream, ctypes.addressof(end))
        check_code(ended, "cuStreamEndCapture")
        return [node for node, _ in self.nodes(graph) if node not in known]

    def connect(self, graph: int, node: int, after: Sequence[int]) -> None:
        """Add dependencies: each node of `after` waits for `node`."""
        if after:
            sources, targets = (
                (ctypes.c_void_p * len(after))(*[node] * len(after)),
                (ctypes.c_void_p * len(after))(*after),
            )
            code = self._connect(graph, ctypes.addressof(sources), ctypes.addressof(targets), None, len(after))
            check_code(code, "cuGraphAddDependencies")

    def destroy(self, node: int) -> None:
        check_code(self._destroy(node), "cuGraphDestroyNode")

    def memset(self, stream: int, memory: Tensor, value: int) -> None:
        """Set every byte of a tensor's memory to a value on a stream, as libraries do (for the trial)."""
        check_code(self._memset(memory.data_ptr(), value, memory.nbytes, stream), "cuMemsetD8Async")


def replace_memsets(driver: Any, graph: int, stream: torch.cuda.Stream) -> int:
    """Replace the memsets of a captured graph by kernels; returns how many. Memsets of memory with gaps, and those with
    an edge that is more than an order, stay."""
    replaced = 0
    for node, kind in driver.nodes(graph):
        if kind != MEMSET_NODE:
            continue
        around, params = driver.neighbours(node), driver.params(node)
        if around is None or params.height > 1 or params.element_bytes not in TYPES or not params.width:
            continue
        before, after = around
        size, count, value = pattern(params)
        memory = _memory(params.target, count, size, stream.device)
        made = driver.add(graph, stream, before, partial(memory.fill_, value))
        if len(made) != 1:
            raise RuntimeError(f"a fill became {len(made)} nodes of a graph instead of one")
        driver.connect(graph, made[0], after)
        driver.destroy(node)
        replaced += 1
    return replaced


def pattern(params: FillParams) -> tuple[int, int, int]:
    """Size, count and value of the largest elements (at most four bytes) by which a memset can be expressed."""
    size, count, value = params.element_bytes, params.width, params.value & ((1 << (8 * params.element_bytes)) - 1)
    while size < 4 and count % 2 == 0 and params.target % (2 * size) == 0:
        value |= value << (8 * size)
        size, count = 2 * size, count // 2
    if size > 1 and value >= 1 << (8 * size - 1):
        value -= 1 << (8 * size)
    return size, count, value


def _memory(address: int, count: int, size: int, device: torch.device) -> Tensor:
    """A tensor over elements at a device address; it does not own the memory."""
    return torch.as_tensor(_Elements(address, count, size), device=device)


class _Elements:
    """Device memory with the interface by which torch accepts arrays of other libraries."""

    def __init__(self, address: int, count: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1" if size == 1 else f"<i{size}",
            "data": (address, False),
            "version": 3,
        }
