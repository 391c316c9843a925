"""The host's own time of an op that is replayed from a CUDA graph: `python benchmarks/bench_host_path.py`.

Runs the executor and its graphed ops as they are, on a rank in the middle of a pipeline, with every call of the device
replaced by one that does nothing: what is measured is Python, on any machine, without a GPU. Prints, by op kind, the
median microseconds inside ops (as the executor's recorder times them) and of everything around them (receives, sends,
events), and how often the copy of an input inside a graph had to be redirected.

What calls of the driver cost is measured by `bench_step.py --phases host --graphs` on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from one_line import start
from torch import Tensor, nn

from octopipe.costs.table import CostTable
from octopipe.runtime.executor import Executor
from octopipe.runtime.measured import Recorder
from octopipe.runtime.ranks.pending_board import Board
from octopipe.runtime.slots import Slot, rank_program
from octopipe.runtime.stages import cuda_graphs, graph_inputs
from octopipe.runtime.stages.cuda_graphs import CAPTURING, GraphedOps
from octopipe.runtime.stages.graph_driver import CopyNode, CopyParams
from octopipe.runtime.stages.graph_launch import direct_launch
from octopipe.runtime.stages.graph_memory import VIEW
from octopipe.runtime.wire.transports.base import Transport
from octopipe.search.systems import build_plan
from octopipe.simulation.lowering import lower

WIDTH = 8


class FreeDriver:
    """Calls that cost nothing, and how often a copy was redirected."""

    def __init__(self) -> None:
        self.moved = 0

    def set_copy(self, *_: object) -> None:
        self.moved += 1


class FreeGraph:
    """A graph whose launch goes the usual way and does nothing."""

    def __init__(self, driver: FreeDriver):
        self._driver = driver
        self.replay = direct_launch(lambda executable, stream: 0, 1, lambda device: 0, 0)

    def replay_first(self) -> None:
        pass

    def copy_nodes(self, wanted: list[tuple[int, int]]) -> list[CopyNode]:
        return [CopyNode(self._driver, 1, 2, CopyParams(source=a, target=b), 0) for a, b in wanted]


class FreePool:
    """Runs what is captured, and keeps nothing of it."""

    copies_inside = True
    driver = FreeDriver()

    def __init__(self, device: torch.device):
        pass

    def capture(self, body: Callable[[], Any]) -> tuple[FreeGraph, Any]:
        return FreeGraph(self.driver), body()


class FreeEvent:
    def record(self, stream: object = None) -> None:
        pass


class Handing(Transport):
    """Everything is there at once: at the same addresses in every step, or (`moving`) never at the same twice."""

    def __init__(self, moving: bool):
        self._moving = moving
        self._arrived: dict[int, Tensor] = {}
        self._spec = type("Spec", (), {"wanted": [True]})()

    def _take(self, slot: Slot) -> Tensor:
        known = self._arrived.get(slot.number)
        if known is None or self._moving:
            known = self._arrived[slot.number] = torch.ones(4, WIDTH)
        return known

    def post(self, slot: Slot) -> None:
        pass

    def send_forward(self, slot: Slot, value: Any, needs: list[bool] | None) -> Any:
        return self._spec

    def take_forward(self, slot: Slot) -> tuple[Any, Any]:
        return self._take(slot), self._spec

    def send_gradient(self, slot: Slot, gradients: list[Tensor | None]) -> None:
        pass

    def take_gradient(self, slot: Slot) -> list[Tensor | None]:
        return [self._take(slot)]

    def release(self, slot: Slot) -> None:
        pass


def view_of(leaf: Any) -> Any:
    """A tensor's stand-in for what `graph_memory.viewed` makes of a GPU's."""
    if not isinstance(leaf, Tensor):
        return leaf
    view = getattr(leaf, VIEW, None)
    if view is None:
        view = leaf.detach()
        setattr(view, VIEW, view)
        setattr(leaf, VIEW, view)
    return view


def executor_of(args: argparse.Namespace, moving: bool) -> Executor:
    """The executor of one rank, ready to capture its next step."""
    costs = CostTable.uniform(num_layers=2 * args.ranks, p2p_ms=0.05)
    plan = build_plan(args.system, costs, args.ranks, args.micro_batches)
    program = rank_program(lower(plan, costs), args.rank)
    layers: dict[int, nn.Module] = {k: nn.Linear(WIDTH, WIDTH) for k in range(plan.num_layers)}
    recorder = Recorder(len(plan.orders[args.rank]), torch.device("cpu"))
    recorder.events = [FreeEvent() for _ in range(2 * len(plan.orders[args.rank]) + 1)]
    recorder.mark = recorder._mark_event
    made = Executor(
        program,
        layers,
        lambda output: output.sum(),
        Handing(moving),
        board=Board(None, "bench", args.rank, args.ranks),
        recorder=recorder,
        seed=None,
        replica=0,
        autocast=None,
        timeout_s=60.0,
        cuda_graphs=torch.device("cuda", 0),
    )
    ops = made.ops
    assert isinstance(ops, GraphedOps)
    ops.on_device = contextlib.nullcontext  # type: ignore[method-assign]
    for chain in made.chains.values():
        for stage, _ in chain.parts:
            stage.draws = False
    ops._known, ops._phase = ops._facts.read(), CAPTURING
    ops._gradients._bound = {id(p) for layer in layers.values() for p in layer.parameters()}
    return made


@contextlib.contextmanager
def no_device() -> Iterator[None]:
    """All calls of the device that steps make, done without one."""
    names = ("synchronize", "empty_cache", "reset_peak_memory_stats", "max_memory_allocated")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(torch.cuda, name, lambda *_: 0))
        stack.enter_context(patch.object(cuda_graphs, "Pool", FreePool))
        stack.enter_context(patch.object(cuda_graphs, "viewed", view_of))
        stack.enter_context(patch.object(graph_inputs, "viewed", view_of))
        stack.enter_context(patch.object(graph_inputs, "_room", torch.empty_like))
        stack.enter_context(patch.object(graph_inputs, "captured_copy", lambda source, room: room.copy_(source)))
        yield


def measure(args: argparse.Namespace, moving: bool) -> None:
    executor = executor_of(args, moving)
    recorder, plan = executor.recorder, executor.program.plan
    kinds = np.array([op.kind for op in plan.orders[args.rank]])
    batch = [torch.ones(4, WIDTH) for _ in range(args.micro_batches)]
    inside: list[np.ndarray] = []
    around: list[float] = []
    executor.run(batch, None, step=0)
    FreePool.driver.moved = 0
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        executor.run(batch, None, step=step)
        whole = time.perf_counter() - began
        took = np.subtract(recorder.ended, recorder.started)
        inside.append(took)
        around.append((whole - took.sum()) / kinds.size)
    assert executor.ops.captured == kinds.size
    rows = 1e6 * np.array(inside)
    words = [f"{kind} {np.median(rows[:, kinds == kind]):.2f}" for kind in "FIWBR" if (kinds == kind).any()]
    what = "inputs at new addresses" if moving else "inputs at the same addresses"
    moved = FreePool.driver.moved / args.steps
    print(
        f"{what}: us inside an op: {', '.join(words)}; around an op {1e6 * np.median(around):.2f}; "
        f"{moved:.1f} copies redirected in a step of {kinds.size} ops",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", default="zb-v")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with no_device():
        for moving in (False, True):
            measure(args, moving)


if __name__ == "__main__":
    start(main)
