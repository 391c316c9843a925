"""The inputs of captured ops: where each leaf lies when the op is replayed, and how it comes there.

Knows: which leaves earlier graphs leave in place, and how outside tensors are copied to the addresses that a graph
reads: by a copy inside the graph if the driver can redirect it, else by a copy before the launch. Does not know: what
is captured (`cuda_graphs.py`), the memory itself (`graph_memory.py`).

The copy is needed because graphs share their memory: the address belongs to other ops until the op starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.stages.graph_driver import CopyNode
from octopipe.runtime.stages.graph_launch import Graph, copy_driver
from octopipe.runtime.stages.graph_memory import VIEW, captured_copy, viewed
from octopipe.runtime.torch_private import current_raw_stream


@dataclass(slots=True)
class Place:
    """Where one leaf of an op's input lies when the op is replayed."""

    value: Any
    """A view of the memory from which the graph reads the leaf (earlier graphs write their outputs directly to it), or
    the leaf itself if it is not a tensor."""
    copied: bool
    """Whether the leaf comes from outside the graphs and is copied to that memory."""
    shape: Any = None
    dtype: Any = None
    device: int = -1
    stride: Any = None
    """Shape, dtype, device number and stride of a tensor that is copied."""
    address: int = 0
    numel: int = 0
    nbytes: int = 0
    """Bytes of contiguous memory, which the driver copies without torch's dispatcher; 0 if torch must copy."""
    source: int = 0
    """The address from which a copy inside the graph read at capture; 0 if the copy runs before the launch."""
    node: CopyNode | None = None
    """That copy, once the graph is complete."""
    kept: Any = None
    """A contiguous tensor on the device that the copy inside the graph reads, if the given one could not be used."""


class Inputs:
    """The inputs of a captured op, leaf by leaf, and their addresses when the op is replayed.

    `fit` and `fill` run before every replay, so each tensor costs them a few attribute reads and one call.
    """

    __slots__ = ("_form", "_inside", "_needs", "_places")

    def __init__(self, form: Any, needs: Sequence[bool] | None, *, inside: bool = False):
        """`inside`: the graph itself copies outside tensors if possible; call `bind` after the capture."""
        self._form, self._needs, self._inside = form, None if needs is None else list(needs), inside
        self._places: list[Place] = []

    def placed(self, given: Sequence[Any]) -> list[Any]:
        """The leaves that the op reads during capture: outside tensors are replaced by memory of the pool."""
        out: list[Any] = []
        for leaf in given:
            made = getattr(leaf, VIEW, None) if isinstance(leaf, Tensor) else None
            if not isinstance(leaf, Tensor):
                self._places.append(Place(leaf, False))
            elif made is not None:
                self._places.append(Place(made, False))
            else:
                room = _room(leaf)
                place = copied_to(room)
                if self._inside and place.nbytes and leaf.is_contiguous() and leaf.get_device() == place.device:
                    captured_copy(leaf, room)
                    place.source = leaf.data_ptr()
                self._places.append(place)
                leaf = room
            out.append(leaf)
        return out

    def bind(self, graph: Graph) -> None:
        """Find the copies that `placed` put into the graph; called after the capture."""
        inside = [k for k, place in enumerate(self._places) if place.source]
        nodes = graph.copy_nodes([(self._places[k].source, self._places[k].address) for k in inside]) if inside else []
        for k, node in zip(inside, nodes):
            self._places[k].node = node

    @property
    def count(self) -> int:
        """Number of leaves."""
        return len(self._places)

    def first_node(self) -> CopyNode | None:
        """The copy of the first leaf, if the graph contains it."""
        return self._places[0].node

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
        """Copy outside tensors that `fit` to the addresses that the graph reads, or redirect the graph's own copies."""
        for leaf, place in zip(given, self._places):
            node = place.node
            if node is not None:
                address = leaf.data_ptr()
                if address != node.address:
                    node.move(address)
            elif place.copied:
                _copy(leaf, place)

    def fill_gradients(self, given: Sequence[Any]) -> None:
        """`fill` for the gradients of a micro-batch whose forward was replayed. Raises an error if they do not have the
        captured form; a missing gradient counts as zeros."""
        if len(given) != len(self._places):
            raise OctoPipeError(_OTHER_GRADIENTS.format(f"{len(given)} gradients instead of {len(self._places)}"))
        for leaf, place in zip(given, self._places):
            node = place.node
            # A gradient has the shape of its tensor, so comparing the number of elements is enough.
            if (
                node is not None
                and leaf is not None
                and leaf.numel() == place.numel
                and leaf.dtype is place.dtype
                and leaf.is_contiguous()
                and leaf.get_device() == place.device
            ):
                address = leaf.data_ptr()
                if address != node.address:
                    node.move(address)
                continue
            value = place.value
            if leaf is value:
                continue
            if not isinstance(value, Tensor):
                raise OctoPipeError(_OTHER_GRADIENTS.format("a gradient of an output that had none"))
            if leaf is None and place.node is None:
                with torch.no_grad():
                    value.zero_()
                continue
            if leaf is None:
                leaf = place.kept = torch.zeros(place.shape, dtype=place.dtype, device=value.device)
            shape, dtype = (place.shape, place.dtype) if place.copied else (value.shape, value.dtype)
            if leaf.shape != shape or leaf.dtype is not dtype:
                seen = f"shape {tuple(leaf.shape)} instead of {tuple(shape)}"
                raise OctoPipeError(_OTHER_GRADIENTS.format(seen))
            _bring(leaf, place)


def _room(leaf: Tensor) -> Tensor:
    return torch.empty_like(leaf, device="cuda", requires_grad=False)


def copied_to(leaf: Tensor) -> Place:
    """The place of an input that is copied into this tensor's memory."""
    nbytes = leaf.nbytes if leaf.is_contiguous() else 0
    form = (leaf.shape, leaf.dtype, leaf.get_device(), leaf.stride())
    return Place(viewed(leaf), True, *form, leaf.data_ptr(), leaf.numel(), nbytes)


def _bring(leaf: Tensor, place: Place) -> None:
    """Copy a tensor with the shape and dtype of a place, but any strides and device, to that place."""
    plain = leaf.is_contiguous() and leaf.get_device() == place.device
    node = place.node
    if node is not None:
        if not plain:
            leaf = place.kept = leaf.to(place.value.device).contiguous()
        address = leaf.data_ptr()
        if address != node.address:
            node.move(address)
    elif plain:
        _copy(leaf, place)
    else:
        with torch.no_grad():
            place.value.copy_(leaf)


def _copy(leaf: Tensor, place: Place) -> None:
    """Copy `leaf`, which has the form of the place, on the current stream; contiguous memory takes one driver call."""
    driver, stream_of = copy_driver(), current_raw_stream
    if driver is None or stream_of is None or not place.nbytes:
        with torch.no_grad():
            place.value.copy_(leaf)
    else:
        driver.copy(stream_of(place.device), place.address, leaf.data_ptr(), place.nbytes)


_OTHER_GRADIENTS = "a stage replayed from CUDA graphs got other gradients than were captured: {}; use cuda_graphs=False"
