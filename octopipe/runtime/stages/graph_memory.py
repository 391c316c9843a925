"""Memory of CUDA graphs: their shared pool, the addresses of their inputs, views of their outputs.

Knows: how work is captured into a graph from a private pool of torch's allocator, and how other tensors are copied to
the addresses that a graph reads. Does not know: what is captured (`cuda_graphs.py`).

A tensor produced by a graph is kept only as a view that does not own its memory (`viewed`). Otherwise graphs captured
later could not reuse its memory, as they do without graphs.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.torch_private import current_raw_stream, end_allocating_to_pool
from octopipe.runtime.wire.driver import Driver

Graph = Any
"""A `torch.cuda.CUDAGraph`."""
_VIEW = "_graph_view"
"""Attribute of a tensor made by a captured op: its view, which replays pass on instead."""


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all pools, because libraries keep a workspace per stream."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        # They make it now: made while capturing it would lie in a pool.
        small = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        torch.mm(small, small)
    stream.synchronize()
    return stream


class Pool:
    """A private pool of device memory, and the stream that work is captured on."""

    def __init__(self, device: torch.device):
        self._id = torch.cuda.graph_pool_handle()
        self._kept: list[Graph] = []
        """All graphs of the pool; torch frees its memory with the last of them."""
        self._stream = _capture_stream(device)

    def capture(self, body: Callable[[], Any]) -> tuple[Graph, Any]:
        """A graph of everything that `body` launches (nothing of it runs now), and what it returned."""
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._stream.device.index]
        drawn = generator.get_state()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # an op that launches nothing
            # Other threads of ours ask for events meanwhile: only this one must keep to the rules.
            graph.capture_begin(pool=self._id, capture_error_mode="thread_local")
            try:
                result = body()
                graph.capture_end()
            except BaseException:
                self._break_off(graph, generator, drawn)
                raise
        self._kept.append(graph)
        return graph, result

    def _break_off(self, graph: Graph, generator: torch.Generator, drawn: Tensor) -> None:
        """After a capture that failed: end it, and what torch leaves behind then. Its allocator would go on serving the
        pool, and its generator would refuse to draw outside a capture."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError, AttributeError):
            end_allocating_to_pool(self._stream.device.index, self._id)
        fresh = torch.Generator(self._stream.device)
        fresh.set_state(drawn)
        generator.graphsafe_set_state(fresh)


class Place(NamedTuple):
    """Where one leaf of an op's input lies when the op is replayed."""

    value: Any
    """A view of its memory; a constant; or a tensor that an earlier graph leaves there itself."""
    copied: bool
    """Whether what comes from outside is copied there."""
    shape: Any = None
    dtype: Any = None
    device: int = -1
    stride: Any = None
    """The form of what is copied; its device by number."""
    address: int = 0
    nbytes: int = 0
    """Of memory without gaps, which the driver copies without torch's dispatcher; 0 where torch must copy."""


class Inputs:
    """The inputs of a captured op, leaf by leaf, and their addresses when the op is replayed.

    `fit` and `fill` run before every replay, so each tensor costs them a few attribute reads and one call.
    """

    __slots__ = ("_form", "_needs", "_places")

    def __init__(self, form: Any, needs: Sequence[bool] | None):
        self._form, self._needs = form, None if needs is None else list(needs)
        self._places: list[Place] = []

    def placed(self, given: Sequence[Any]) -> list[Any]:
        """During capture: the leaves for the op, with outside tensors copied to memory of the pool."""
        out = []
        for leaf in given:
            made = getattr(leaf, _VIEW, None) if isinstance(leaf, Tensor) else None
            if not isinstance(leaf, Tensor):
                self._places.append(Place(leaf, False))
            elif made is not None:
                self._places.append(Place(made, False))
            else:
                leaf = torch.empty_like(leaf, device="cuda", requires_grad=False)
                self._places.append(copied_to(leaf))
            out.append(leaf)
        return out

    def fit(self, form: Any, given: Sequence[Any], needs: Sequence[bool] | None) -> bool:
        """Whether the op may be replayed with these leaves."""
        if form != self._form or (needs != self._needs and (needs is None or list(needs) != self._needs)):
            return False
        for leaf, place in zip(given, self._places):
            if place.copied:
                if not isinstance(leaf, Tensor) or leaf.shape != place.shape or leaf.dtype is not place.dtype:
                    return False
                if leaf.get_device() != place.device or leaf.stride() != place.stride:
                    return False
            elif leaf is not place.value:
                value = place.value
                if isinstance(value, Tensor) or isinstance(leaf, Tensor) or leaf != value:
                    return False
        return True

    def fill(self, given: Sequence[Any]) -> None:
        """Copy outside tensors, which `fit`, to the addresses that the graph reads."""
        for leaf, place in zip(given, self._places):
            if place.copied:
                _copy(leaf, place)

    def fill_gradients(self, given: Sequence[Any]) -> None:
        """The same for gradients of a micro-batch whose forward was replayed: a missing gradient counts as zeros."""
        if len(given) != len(self._places):
            raise OctoPipeError(_OTHER_GRADIENTS.format(f"{len(given)} gradients instead of {len(self._places)}"))
        for leaf, place in zip(given, self._places):
            value = place.value
            if leaf is value:
                continue
            if not isinstance(value, Tensor):
                raise OctoPipeError(_OTHER_GRADIENTS.format("a gradient of an output that had none"))
            if leaf is None:
                with torch.no_grad():
                    value.zero_()
                continue
            shape, dtype = (place.shape, place.dtype) if place.copied else (value.shape, value.dtype)
            if leaf.shape != shape or leaf.dtype is not dtype:
                seen = f"shape {tuple(leaf.shape)} instead of {tuple(shape)}"
                raise OctoPipeError(_OTHER_GRADIENTS.format(seen))
            if leaf.is_contiguous() and leaf.get_device() == place.device:
                _copy(leaf, place)
            else:
                with torch.no_grad():
                    value.copy_(leaf)


def copied_to(leaf: Tensor) -> Place:
    """The place of an input that is copied into this tensor's memory."""
    nbytes = leaf.nbytes if leaf.is_contiguous() else 0
    return Place(viewed(leaf), True, leaf.shape, leaf.dtype, leaf.get_device(), leaf.stride(), leaf.data_ptr(), nbytes)


@functools.cache
def _driver() -> Driver | None:
    """libcuda itself; None where there is none (ROCm), or torch does not tell its streams."""
    if current_raw_stream is None:
        return None
    try:
        return Driver()
    except (OSError, AttributeError):
        return None


def _copy(leaf: Tensor, place: Place) -> None:
    """On the current stream, as torch's own copy; without gaps it is one call of the driver. `leaf` has the form of the
    place."""
    driver, stream_of = _driver(), current_raw_stream
    if driver is None or stream_of is None or not place.nbytes:
        with torch.no_grad():
            place.value.copy_(leaf)
    else:
        driver.copy(stream_of(place.device), place.address, leaf.data_ptr(), place.nbytes)


_OTHER_GRADIENTS = "a stage replayed from CUDA graphs got other gradients than were captured: {}; use cuda_graphs=False"


class _Address:
    """Memory in the form in which torch accepts it from other libraries."""

    def __init__(self, tensor: Tensor):
        nbytes = tensor.untyped_storage().nbytes()
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (tensor.untyped_storage().data_ptr(), False),
            "version": 3,
        }


def viewed(leaf: Any) -> Any:
    """A tensor over the same memory that does not own it; the leaf remembers it. Constants are themselves."""
    if not isinstance(leaf, Tensor):
        return leaf
    known = getattr(leaf, _VIEW, None)
    if known is not None:
        return known
    if leaf.untyped_storage().nbytes() == 0:
        view = leaf.detach()
    else:
        memory = torch.as_tensor(_Address(leaf), device=leaf.device)
        view = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        view.set_(memory.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())
    setattr(view, _VIEW, view)
    setattr(leaf, _VIEW, view)
    return view
