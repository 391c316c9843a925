"""Inputs of captured ops reach the memory that a graph reads, by copies inside the graph that follow their sources.

A driver on the host stands in for libcuda: it finds, redirects and performs the copies of "graphs" of host memory.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.slots import Cell
from octopipe.runtime.stages import graph_inputs
from octopipe.runtime.stages.captured import REPLAYED, Captured
from octopipe.runtime.stages.chain import StageChain
from octopipe.runtime.stages.cuda_graphs import REPLAYING, GraphedOps
from octopipe.runtime.stages.graph_driver import CopyParams
from octopipe.runtime.stages.graph_inputs import Inputs
from octopipe.runtime.stages.graph_launch import Graph, direct_launch
from octopipe.runtime.stages.graph_memory import VIEW
from octopipe.runtime.stages.stage import Stage


class HostDriver:
    """The graphs' part of libcuda, on host memory."""

    def __init__(self) -> None:
        self.nodes_captured: list[CopyParams] = []
        self.redirected = 0

    def capture(self, source: Tensor, target: Tensor) -> None:
        self.nodes_captured.append(CopyParams(source=source.data_ptr(), target=target.data_ptr(), width=target.nbytes))

    def copies(self, graph: int) -> list[tuple[int, CopyParams]]:
        return [(k, CopyParams.from_buffer_copy(params)) for k, params in enumerate(self.nodes_captured)]

    def nodes(self, graph: int) -> list[tuple[int, int]]:
        return [(9, 0), (8, 2), *((k, 1) for k in range(len(self.nodes_captured))), (7, 11), (6, 0)]

    def context(self) -> int:
        return 7

    def set_copy(self, executable: int, node: int, params: CopyParams, context: int) -> None:
        assert (executable, context) == (5, 7)
        self.nodes_captured[node] = CopyParams.from_buffer_copy(params)
        self.redirected += 1

    def launch(self) -> None:
        for params in self.nodes_captured:
            ctypes.memmove(params.target, params.source, params.width)


class HostGraph:
    """What torch's graph object tells of itself."""

    def raw_cuda_graph(self) -> int:
        return 3

    def raw_cuda_graph_exec(self) -> int:
        return 5

    def replay(self) -> None:
        pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    def viewed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            view = leaf.detach()
            setattr(view, VIEW, view)
            return view
        return leaf

    made = HostDriver()
    monkeypatch.setattr(graph_inputs, "captured_copy", made.capture)
    monkeypatch.setattr(graph_inputs, "_room", torch.zeros_like)
    monkeypatch.setattr(graph_inputs, "viewed", viewed)
    return made


def captured(driver: HostDriver, given: list[Any], **more: Any) -> tuple[Inputs, list[Any]]:
    """The inputs of an op that was captured with these leaves, and where the op reads them."""
    inputs = Inputs(None, None, inside=True, **more)
    read = inputs.placed(given)
    inputs.bind(Graph(HostGraph(), torch.device("cpu"), driver))  # type: ignore[arg-type]
    return inputs, read


def test_the_record_of_a_copy_has_the_layout_of_cuda_h() -> None:
    assert ctypes.sizeof(CopyParams) == 200
    offsets = {"source_kind": 32, "source": 48, "target_kind": 120, "target": 136, "width": 176, "depth": 192}
    assert {name: getattr(CopyParams, name).offset for name in offsets} == offsets


def test_a_graph_copies_what_arrived_last_and_is_redirected_only_where_it_moved(driver: HostDriver) -> None:
    first, second, third = torch.arange(6.0), torch.arange(6.0) * 10, torch.zeros(6)
    inputs, read = captured(driver, [first, "constant", third])
    kept = [first, "constant", torch.ones(6)]
    for value, moves in ((first, 1), (second, 2), (second, 2), (first, 3)):
        kept[0] = value
        inputs.fill(kept)  # the third leaf moves once, before the first launch
        driver.launch()
        assert torch.equal(read[0], value) and torch.equal(read[2], torch.ones(6))
        assert driver.redirected == moves
    second.add_(1)  # the graph reads the memory, not what was there
    kept[0] = second
    inputs.fill(kept)
    driver.launch()
    assert torch.equal(read[0], second)


def test_a_tensor_that_an_earlier_graph_leaves_in_place_is_not_copied(driver: HostDriver) -> None:
    made = torch.ones(3)
    view = made.detach()
    setattr(made, VIEW, view)
    inputs, read = captured(driver, [made])
    assert read[0] is made and not driver.nodes_captured
    assert inputs.fit(None, [view], None) and not inputs.fit(None, [torch.ones(3)], None)


def test_a_leaf_with_gaps_is_copied_before_the_launch(driver: HostDriver) -> None:
    inputs, read = captured(driver, [torch.ones(4, 6)[:, ::2]])
    assert not driver.nodes_captured and inputs.first_node() is None
    inputs.fill([torch.full((4, 6), 2.0)[:, ::2]])
    assert torch.equal(read[0], torch.full((4, 3), 2.0))


def test_gradients_that_are_missing_or_have_gaps_arrive_all_the_same(driver: HostDriver) -> None:
    inputs, read = captured(driver, [torch.ones(2, 3), torch.ones(3)])
    spread = torch.arange(12.0).view(2, 6)[:, ::2]
    inputs.fill_gradients([spread, None])
    driver.launch()
    assert torch.equal(read[0], spread) and not read[1].any()
    whole = [torch.full((2, 3), 4.0), torch.full((3,), 5.0)]
    inputs.fill_gradients(whole)
    driver.launch()
    assert torch.equal(read[0], whole[0]) and torch.equal(read[1], whole[1])


@pytest.mark.parametrize("gradients", [[torch.ones(4)], [torch.ones(3, dtype=torch.bfloat16)], [], [torch.ones(3)] * 2])
def test_gradients_of_another_form_are_refused(driver: HostDriver, gradients: list[Tensor]) -> None:
    inputs, _ = captured(driver, [torch.ones(3)])
    with pytest.raises(OctoPipeError, match="other gradients than were captured"):
        inputs.fill_gradients(gradients)
    assert driver.redirected == 0


def test_a_copy_that_is_not_in_the_graph_is_an_error(driver: HostDriver) -> None:
    graph = Graph(HostGraph(), torch.device("cpu"), driver)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not among the 0 copies"):
        graph.copy_nodes([(1, 2)])


def test_the_nodes_of_a_graph_are_counted_by_kind(driver: HostDriver) -> None:
    captured(driver, [torch.ones(3)])
    graph = Graph(HostGraph(), torch.device("cpu"), driver)  # type: ignore[arg-type]
    assert graph.node_counts() == {"kernel": 2, "copy": 1, "memset": 1, "kind 11": 1}
    assert Graph(HostGraph(), torch.device("cpu"), None).node_counts() == {}


@pytest.mark.parametrize("casts", [False, True])
def test_under_autocast_a_stage_stays_with_calls_for_the_rest_of_a_step_that_began_so(casts: bool) -> None:
    """The graph of a step's first micro-batch casts the weights for all; where it is not launched, the others would
    compute with the weights of the step before."""

    class Fitting:
        def __init__(self, fits: bool):
            self.fits = fits

        def fit(self, *_: Any) -> bool:
            return self.fits

        def fill(self, given: Any) -> None:
            pass

    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16) if casts else None
    chain = StageChain([(Stage([torch.nn.Linear(3, 3)]), False)])
    ops = GraphedOps({0: chain}, autocast, torch.device("cpu"))
    ops._phase, ops._known = REPLAYING, ops._facts.read()
    inputs = [Fitting(False), Fitting(True)]
    cells = [Cell(0, m, False, False, False) for m in range(2)]
    for cell, one in zip(cells, inputs):
        cell.graphs = {"F": Captured(HostGraph(), one, True, [torch.ones(3)], None, None)}  # type: ignore[arg-type]

    def replayed() -> list[bool]:
        ops.begin_step()
        return [ops.forward(cell, torch.ones(2, 3), None, None, None, None)[0] is REPLAYED for cell in cells]

    assert replayed() == [False, not casts]
    inputs[0].fits = True
    assert replayed() == [True, True]


def test_only_a_message_of_the_form_that_was_found_to_fit_is_not_looked_at_again(driver: HostDriver) -> None:
    value, spec = torch.ones(3), object()
    inputs, _ = captured(driver, [value])
    cell = Cell(0, 0, False, False, False)
    known = Captured(Graph(HostGraph(), torch.device("cpu"), None), inputs, True, [value], None, None)
    known.learn(cell, value)
    assert known.input_message is None  # it came from this rank's own memory: nothing is said about the next
    cell.input_message = spec
    known.learn(cell, (value,))
    assert known.input_message is None
    known.learn(cell, value)
    assert known.input_message is spec and known.node is inputs.first_node()


def test_a_launch_that_fails_names_the_call_and_its_error() -> None:
    launched: list[tuple[int, int]] = []

    def launch(executable: int, stream: int) -> int:
        launched.append((executable, stream))
        return 0 if len(launched) == 1 else 700

    replay = direct_launch(launch, 5, lambda device: 40 + device, 2)
    replay()
    assert launched == [(5, 42)]
    with pytest.raises(RuntimeError, match="cuGraphLaunch failed with CUDA error 700"):
        replay()
