"""Pairs of ops in plans whose paths fork and join.

Knows: that an op of such a plan has several inputs and consumers, which the executor of graphs collects and serves.
Does not know: how two ops alternate (`turns.py`), or how inputs are joined and gradients added (`graph_executor.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from octopipe.runtime.paired_ops import PairedOps, Prepared, StepArguments
from octopipe.runtime.slots import Step

if TYPE_CHECKING:
    from octopipe.runtime.graph_executor import GraphExecutor
    from octopipe.runtime.graph_program import GraphCell


class GraphPairs(PairedOps):
    """Runs the pairs of one `GraphExecutor`'s program."""

    def _forward(self, ins: Step, given: StepArguments) -> Prepared:
        executor, cell = cast("GraphExecutor", self._executor), cast("GraphCell", ins.cell)
        value, needs = executor.inputs(cell, given.micro_batches)
        then = executor.then(cell, given.targets)

        def hand_on(out: Any) -> None:
            executor.made(cell, out, given.losses)

        return self._forward_of(cell, given, (value, needs, then), hand_on)

    def _backward(self, ins: Step, given: StepArguments) -> Prepared:
        executor, cell = cast("GraphExecutor", self._executor), cast("GraphCell", ins.cell)
        gradients = executor.gradients(cell, given.losses, given.scales)

        def hand_back(found: list[Any]) -> None:
            executor.hand_back(cell, found, given.micro_batches)

        return self._backward_of(ins, gradients, hand_back)
