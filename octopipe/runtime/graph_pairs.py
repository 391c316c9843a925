"""Pairs of ops in plans whose paths fork and join.

Knows: that an op of such a plan has several inputs and consumers, which the executor of graphs collects and serves.
Does not know: how two ops alternate (`turns.py`), or how inputs are joined and gradients added (`graph_executor.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from octopipe.plans.plan import B
from octopipe.runtime.paired_ops import Given, PairedOps, Prepared
from octopipe.runtime.slots import Step
from octopipe.runtime.stages.cuda_graphs import GraphedOps

if TYPE_CHECKING:
    from octopipe.runtime.graph_executor import GraphExecutor
    from octopipe.runtime.graph_program import GraphCell


class GraphPairs(PairedOps):
    """Runs the pairs of one `GraphExecutor`'s program."""

    def _forward(self, ins: Step, given: Given) -> Prepared:
        executor, cell = cast("GraphExecutor", self._executor), cast("GraphCell", ins.cell)
        value, needs = executor.inputs(cell, given.micro_batches)
        then = executor.then(cell, given.targets)
        seed = executor.micro_batch_seeds[cell.micro_batch]
        side = None if given.sides is None else given.sides[cell.micro_batch]
        results: list[Any] = []

        def compute() -> None:
            results.append(executor.ops.forward(cell, value, needs, then, seed, side))

        def finish() -> None:
            cell.runs, out, cell.needs = results.pop()
            executor.made(cell, out, given.losses)

        return Prepared(compute, finish)

    def _backward(self, ins: Step, given: Given) -> Prepared:
        executor, cell = cast("GraphExecutor", self._executor), cast("GraphCell", ins.cell)
        gradients = executor.gradients(cell, given.losses, given.scales)
        ops, results = executor.ops, list[Any]()
        # As for chains: a pair's B leaves its weight gradients until its next exchange.
        split = ins.code == B and not isinstance(ops, GraphedOps)

        def compute() -> None:
            results.append(ops.backward(cell, gradients, fused=ins.code == B and not split))
            if split:
                ops.weight(cell)

        def finish() -> None:
            executor.hand_back(cell, results.pop(), given.micro_batches)

        return Prepared(compute, finish, (lambda: ops.weight_so_far(cell)) if split else None)
