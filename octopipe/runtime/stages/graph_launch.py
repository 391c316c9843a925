"""Captured CUDA graphs as the executor launches them.

Knows: torch's graph object, the driver's handles of it. Does not know: what is captured, from which memory
(`graph_memory.py`).

Every call of the driver takes as much host time as the launch of a whole graph, so an op should need only one. Outside
inputs are therefore copied by the graph itself (`GraphDriver`), and graphs are launched by the driver directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from octopipe.runtime.stages.graph_driver import NODE_KINDS, CopyNode, GraphDriver
from octopipe.runtime.torch_private import current_raw_stream
from octopipe.runtime.wire.driver import Driver, check_code


class Graph:
    """One captured op. `replay` launches it on the current stream of its device."""

    __slots__ = ("_device", "_driver", "_graph", "replay")

    def __init__(self, graph: Any, device: torch.device, driver: GraphDriver | None):
        """`driver`: given only if the graph was captured with `keep_graph` and has been instantiated."""
        self._graph, self._device, self._driver = graph, device, driver
        self.replay: Callable[[], None] = graph.replay

    def replay_first(self) -> None:
        """Launch the graph for the first time, through torch. If that does not advance torch's generator (the graph
        draws no random numbers), all later launches go to the driver directly."""
        if self._driver is None or current_raw_stream is None:
            self._graph.replay()
            return
        generator = torch.cuda.default_generators[self._device.index]
        before = generator.get_offset()
        self._graph.replay()
        if generator.get_offset() == before:
            executable = self._graph.raw_cuda_graph_exec()
            self.replay = direct_launch(self._driver.launch, executable, current_raw_stream, self._device.index)

    def copy_nodes(self, wanted: list[tuple[int, int]]) -> list[CopyNode]:
        """The copies of this graph with these (source, target) addresses, in this order.

        Only the copies of inputs read the memory of an outside tensor, so the two addresses identify a copy.
        """
        assert self._driver is not None
        found = {(params.source, params.target): (node, params) for node, params in self._copies()}
        missing = [pair for pair in wanted if pair not in found]
        if missing:
            raise RuntimeError(f"a captured copy is not among the {len(found)} copies of its graph")
        executable, context = self._graph.raw_cuda_graph_exec(), self._driver.context()
        return [CopyNode(self._driver, executable, *found[pair], context) for pair in wanted]

    def node_counts(self) -> dict[str, int]:
        """The number of nodes of each kind, on which the launch time depends. Empty without a driver."""
        driver = self._driver
        kinds = [] if driver is None else [kind for _, kind in driver.nodes(self._graph.raw_cuda_graph())]
        return {NODE_KINDS.get(kind, f"kind {kind}"): kinds.count(kind) for kind in sorted(set(kinds))}

    def _copies(self) -> list[tuple[int, Any]]:
        assert self._driver is not None
        return self._driver.copies(self._graph.raw_cuda_graph())


def direct_launch(
    launch: Callable[[int, int], int], executable: int, stream_of: Callable[[int], int], device: int
) -> Callable[[], None]:
    """Return a launch that is one call of the driver: a closure, which saves attribute look-ups per launch."""

    def replay() -> None:
        code = launch(executable, stream_of(device))
        if code:
            check_code(code, "cuGraphLaunch")

    return replay


@functools.cache
def copy_driver() -> Driver | None:
    """The calls of libcuda; None if there is no libcuda (ROCm) or torch does not expose its current raw stream."""
    if current_raw_stream is None:
        return None
    try:
        return Driver()
    except (OSError, AttributeError):
        return None
