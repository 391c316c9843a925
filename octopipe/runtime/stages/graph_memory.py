"""Memory of CUDA graphs: their shared pool, and views of what they leave in it.

Knows: how work is captured into a graph from a private pool of torch's allocator. Does not know: what is captured
(`cuda_graphs.py`), how inputs come to the addresses that a graph reads (`graph_inputs.py`), how it is launched
(`graph_launch.py`).

A tensor produced by a graph is kept only as a view that does not own its memory (`viewed`). Otherwise graphs captured
later could not reuse its memory, as they do without graphs.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.stages.graph_driver import GraphDriver
from octopipe.runtime.stages.graph_fills import TYPES, FillDriver, replace_memsets
from octopipe.runtime.stages.graph_launch import Graph, copy_driver
from octopipe.runtime.torch_private import current_raw_stream, end_allocating_to_pool

VIEW = "_graph_view"
"""Attribute of a tensor made by a captured op: its view, which replays pass on instead."""


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all pools, because libraries keep a workspace per stream."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        # cuBLAS allocates its workspace now. Allocated during a capture, it would lie in a graph's pool.
        small = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        torch.mm(small, small)
    stream.synchronize()
    return stream


class Pool:
    """A private pool of device memory, and the stream that work is captured on."""

    def __init__(self, device: torch.device, driver: GraphDriver | None = None, fills: FillDriver | None = None):
        """`driver` and `fills` are given only to try these calls out (`graph_driver`, `fill_driver`). Otherwise the
        pool uses them if the trial has succeeded."""
        self._driver = driver or graph_driver(device)
        self._fills = fills if driver is not None else fill_driver(device)
        self._id = torch.cuda.graph_pool_handle()
        self._kept: list[Graph] = []
        """All graphs of the pool; torch frees its memory with the last of them."""
        self._stream = _capture_stream(device)

    @property
    def copies_inside(self) -> bool:
        """Whether copies inside graphs can be redirected."""
        return self._driver is not None

    def capture(self, body: Callable[[], Any]) -> tuple[Graph, Any]:
        """Capture everything that `body` launches, without running it; returns the graph and the result of `body`."""
        driver = self._driver
        graph = torch.cuda.CUDAGraph() if driver is None else torch.cuda.CUDAGraph(keep_graph=True)
        generator = torch.cuda.default_generators[self._stream.device.index]
        drawn = generator.get_state()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # an op that launches nothing
            # Other threads query events meanwhile, so the restrictions of a capture must apply to this thread only.
            graph.capture_begin(pool=self._id, capture_error_mode="thread_local")
            try:
                result = body()
                graph.capture_end()
            except BaseException:
                self._break_off(graph, generator, drawn)
                raise
        if driver is not None:
            if self._fills is not None:
                replace_memsets(self._fills, graph.raw_cuda_graph(), self._stream)
            graph.instantiate()
        made = Graph(graph, self._stream.device, driver)
        self._kept.append(made)
        return made, result

    def _break_off(self, graph: Any, generator: torch.Generator, drawn: Tensor) -> None:
        """End a capture that failed, and undo what torch leaves behind: its allocator would go on allocating from the
        pool, and its generator would refuse to draw outside a capture."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError, AttributeError):
            end_allocating_to_pool(self._stream.device.index, self._id)
        fresh = torch.Generator(self._stream.device)
        fresh.set_state(drawn)
        generator.graphsafe_set_state(fresh)


@functools.cache
def graph_driver(device: torch.device) -> GraphDriver | None:
    """The driver's calls on graphs; None if a trial shows that they do not work here."""
    if copy_driver() is None or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
        return None
    try:
        driver = GraphDriver()
        return driver if _redirects(driver, device) else None
    except (OSError, AttributeError, TypeError, RuntimeError):
        return None


def _redirects(driver: GraphDriver, device: torch.device) -> bool:
    """Whether a copy inside a graph can be found, redirected and launched."""
    first, second, target = (torch.full((4096,), float(k), device=device) for k in range(3))
    made, _ = Pool(device, driver).capture(lambda: captured_copy(first, target))
    (node,) = made.copy_nodes([(first.data_ptr(), target.data_ptr())])
    made.replay_first()
    seen = [target.unique().tolist()]
    for source in (second, first):
        target.fill_(9.0)
        node.move(source.data_ptr())
        made.replay()
        seen.append(target.unique().tolist())
    return seen == [[0.0], [1.0], [0.0]]


@functools.cache
def fill_driver(device: torch.device) -> FillDriver | None:
    """The driver's calls on memsets; None if a trial shows that kernels cannot replace memsets here."""
    driver = graph_driver(device)
    if driver is None:
        return None
    try:
        fills = FillDriver(driver)
        return fills if _replaces(driver, fills, device) else None
    except (OSError, AttributeError, TypeError, RuntimeError):
        return None


def _replaces(driver: GraphDriver, fills: FillDriver, device: torch.device) -> bool:
    """Whether the memsets between two kernels, and those at the ends of a graph, can be replaced."""
    stream = _capture_stream(device)
    with torch.cuda.stream(stream):
        for dtype in TYPES.values():  # load these kernels now: not every driver can load them during a capture
            torch.empty(64, dtype=dtype, device=device).fill_(1)
    stream.synchronize()
    seen, cleared, last = (torch.zeros(65, dtype=torch.uint8, device=device) for _ in range(3))

    def body() -> None:
        fills.memset(stream.cuda_stream, cleared[:64], 3)
        seen.add_(cleared)
        fills.memset(stream.cuda_stream, cleared[1:], 255)
        seen.add_(cleared)
        fills.memset(stream.cuda_stream, last, 5)

    made, _ = Pool(device, driver, fills).capture(body)
    made.replay_first()
    made.replay()
    first = 2 * (3 + 3)  # only the first memset writes the first byte
    middle, end = 2 * (3 + 255) % 256, (0 + 255 + 255 + 255) % 256
    told = seen.tolist() == [first, *[middle] * 63, end] and last.unique().tolist() == [5]
    return told and "memset" not in made.node_counts()


def captured_copy(source: Tensor, target: Tensor) -> None:
    """Copy between contiguous tensors of one device during a capture, as one node of the graph."""
    driver = copy_driver()
    assert driver is not None and current_raw_stream is not None
    driver.copy(current_raw_stream(target.get_device()), target.data_ptr(), source.data_ptr(), target.nbytes)


class _Address:
    """A tensor's memory with the interface by which torch accepts arrays of other libraries."""

    def __init__(self, tensor: Tensor):
        nbytes = tensor.untyped_storage().nbytes()
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (tensor.untyped_storage().data_ptr(), False),
            "version": 3,
        }


def viewed(leaf: Any) -> Any:
    """A view of the tensor's memory that does not own it, also stored in the leaf's attribute `VIEW`. Values other than
    tensors are returned unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    known = getattr(leaf, VIEW, None)
    if known is not None:
        return known
    if leaf.untyped_storage().nbytes() == 0:
        view = leaf.detach()
    else:
        memory = torch.as_tensor(_Address(leaf), device=leaf.device)
        view = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        view.set_(memory.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())
    setattr(view, VIEW, view)
    setattr(leaf, VIEW, view)
    return view
