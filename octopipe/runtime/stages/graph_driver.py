"""Calls of libcuda on CUDA graphs: which copies a graph contains, where they read from, and its launch.

Knows: raw handles, addresses and the driver's record of a copy. Does not know: what is copied, torch's graphs.

An executable graph reads its inputs from fixed addresses, except that the driver can change the operands of a copy
inside it. A copy from outside memory that is part of the graph therefore costs no call of its own, and a call of about
a microsecond where the outside memory has moved since the last launch. Launches that were queued before keep the old
address.
"""

from __future__ import annotations

import ctypes
from typing import Any

from octopipe.runtime.wire.driver import check_code, typed

MEMCPY_NODE, MEMSET_NODE = 1, 2
NODE_KINDS = {0: "kernel", MEMCPY_NODE: "copy", MEMSET_NODE: "memset", 5: "empty"}


class CopyParams(ctypes.Structure):
    """`CUDA_MEMCPY3D` of cuda.h, which also describes copies of one dimension."""

    _fields_ = [
        ("source_place", ctypes.c_size_t * 4),
        ("source_kind", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_reserved", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("source_height", ctypes.c_size_t),
        ("target_place", ctypes.c_size_t * 4),
        ("target_kind", ctypes.c_uint),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_reserved", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("target_height", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    ]


class GraphDriver:
    """Calls of libcuda that read, redirect and launch CUDA graphs. Handles are plain numbers, as torch returns them."""

    def __init__(self) -> None:
        lib = ctypes.CDLL("libcuda.so.1")
        handle, pointer = ctypes.c_void_p, ctypes.c_void_p
        self._nodes = typed(lib.cuGraphGetNodes, handle, pointer, pointer)
        self._kind = typed(lib.cuGraphNodeGetType, handle, pointer)
        self._params = typed(lib.cuGraphMemcpyNodeGetParams, handle, pointer)
        self._set_params = typed(lib.cuGraphExecMemcpyNodeSetParams, handle, handle, pointer, handle)
        self._context = typed(lib.cuCtxGetCurrent, pointer)
        self.launch = typed(lib.cuGraphLaunch, handle, handle)
        """Launches an executable graph on a stream and returns an error code. It is called for every op and therefore
        has no wrapper."""

    def nodes(self, graph: int) -> list[tuple[int, int]]:
        """All nodes of a graph, each with its kind (a key of `NODE_KINDS`)."""
        count = ctypes.c_size_t(0)
        check_code(self._nodes(graph, None, ctypes.addressof(count)), "cuGraphGetNodes")
        nodes = (ctypes.c_void_p * max(count.value, 1))()
        if count.value:
            check_code(self._nodes(graph, ctypes.addressof(nodes), ctypes.addressof(count)), "cuGraphGetNodes")
        found = []
        for node in (handle or 0 for handle in nodes[: count.value]):
            kind = ctypes.c_uint(0)
            check_code(self._kind(node, ctypes.addressof(kind)), "cuGraphNodeGetType")
            found.append((node, kind.value))
        return found

    def copies(self, graph: int) -> list[tuple[int, CopyParams]]:
        """All copies of a graph: the node and its operands."""
        found = []
        for node, kind in self.nodes(graph):
            if kind == MEMCPY_NODE:
                params = CopyParams()
                check_code(self._params(node, ctypes.addressof(params)), "cuGraphMemcpyNodeGetParams")
                found.append((node, params))
        return found

    def context(self) -> int:
        """The calling thread's current context."""
        found = ctypes.c_void_p(0)
        check_code(self._context(ctypes.addressof(found)), "cuCtxGetCurrent")
        return found.value or 0

    def set_copy(self, executable: int, node: int, params: CopyParams, context: int) -> None:
        """Set the operands of a copy for all launches from now on."""
        code = self._set_params(executable, node, ctypes.addressof(params), context)
        if code:
            check_code(code, "cuGraphExecMemcpyNodeSetParams")


class CopyNode:
    """One copy inside an executable graph, whose source may move between launches."""

    __slots__ = ("_context", "_driver", "_executable", "_node", "_params", "address")

    def __init__(self, driver: Any, executable: int, node: int, params: CopyParams, context: int):
        self._driver, self._executable, self._node = driver, executable, node
        self._params, self._context = params, context
        self.address: int = params.source
        """The address from which the next launch copies."""

    def move(self, address: int) -> None:
        self._params.source = address
        self._driver.set_copy(self._executable, self._node, self._params, self._context)
        self.address = address
