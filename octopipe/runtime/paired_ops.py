"""Execution of a pair of ops: collects the inputs of both, runs both together, and passes on the result of each.

Knows: where an op's input comes from and where its result goes, as the executor does for single ops. Does not know: how
two ops alternate (`turns.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from octopipe.plans.plan import B, F, I, R, W
from octopipe.runtime.slots import Step
from octopipe.runtime.turns import Patience, Turns

if TYPE_CHECKING:
    from octopipe.runtime.executor import Executor


class Given(NamedTuple):
    """What a step was given, and the losses that it collects."""

    micro_batches: Sequence[Any] | None
    targets: Sequence[Any] | None
    scales: Sequence[float]
    losses: dict[int, Tensor]
    sides: Sequence[Mapping[str, Any]] | None


def begins(first: int, second: int) -> int:
    """Which op of a pair has the first turn, by their kinds: the same on all members of an expert group.

    A backward, where there is one: a layer's backward starts with the exchange that its forward ended with, and the
    other op can compute beside it from the start. A W, which has no exchange, comes second: it runs beside the other
    op's first exchange.

    >>> [begins(a, b) for a, b in ((F, B), (B, F), (W, F), (F, W), (F, F))]
    [1, 0, 1, 0, 0]
    """
    place = {I: 0, B: 0, W: 2}
    return int(place.get(second, 1) < place.get(first, 1))


class PairedOps:
    """Runs the pairs of one executor's program."""

    def __init__(self, executor: Executor):
        self._executor, self._turns = executor, Turns()

    def run(self, first: Step, second: Step, given: Given) -> None:
        executor, clock = self._executor, time.perf_counter
        recorder = executor.recorder
        ops = [self._prepared(ins, given) for ins in (first, second)]
        parts = {id(stage): stage for ins in (first, second) for stage, _ in executor.chains[ins.cell.stage].parts}
        modes = [mode for stage in parts.values() for mode in (stage.mode, stage.rerun)]
        # Where a forward works on copies of what it changes, no other op of its stage may come in between.
        apart = first.cell.stage == second.cell.stage and any(stage.replay.moving() for stage in parts.values())
        k = first.number
        recorder.started[k] = clock()
        if recorder.mark is not None:
            recorder.mark(k, 0)
        failed = self._turns.together(
            ops[0][0],
            ops[1][0],
            modes,
            apart=apart,
            begins=begins(first.code, second.code),
            patience=Patience(timeout_s=executor.timeout_s, failed=executor.board.failed_elsewhere),
        )
        if failed is not None:
            executor.at = (first, second)[failed]
            raise self._turns.error
        if recorder.mark is not None:
            recorder.mark(k, 1)
            recorder.mark(second.number, 0)
            recorder.mark(second.number, 1)
        # As in a prediction: the first has the time of both, the second ends with it.
        recorder.ended[k] = recorder.started[second.number] = recorder.ended[second.number] = clock()
        for (_, finish), ins in zip(ops, (first, second), strict=True):
            finish()
            if ins.layers_done and executor.layers_done is not None:
                executor.layers_done(ins.layers_done)

    def close(self) -> None:
        self._turns.close()

    def _prepared(self, ins: Step, given: Given) -> tuple[Callable[[], None], Callable[[], None]]:
        """An op with its inputs at hand: what computes it, and what hands its results on."""
        executor = self._executor
        make = self._forward if ins.code == F else self._other if ins.code in (R, W) else self._backward
        made = make(ins, given)
        for sent in ins.release:
            executor.transport.release(sent)
        return made

    def _forward(self, ins: Step, given: Given) -> tuple[Callable[[], None], Callable[[], None]]:
        executor, cell, slot, results = self._executor, ins.cell, ins.slot, []  # type: ignore[var-annotated]
        if slot is None:
            value, needs = executor.own_input(cell, given.micro_batches)
        else:
            value, cell.asked = executor.transport.take_forward(slot)
            slot.ended = time.perf_counter()
            needs = cell.asked.wanted
        then = executor.loss(given.targets, cell.micro_batch) if cell.last else None
        seed = executor.micro_batch_seeds[cell.micro_batch]
        side = None if given.sides is None else given.sides[cell.micro_batch]

        def compute() -> None:
            results.append(executor.ops.forward(cell, value, needs, then, seed, side))

        def finish() -> None:
            cell.runs, out, cell.needs = results.pop()
            if cell.last:
                given.losses[cell.micro_batch] = out
            else:
                cell.value = out

        return compute, finish

    def _backward(self, ins: Step, given: Given) -> tuple[Callable[[], None], Callable[[], None]]:
        executor, cell, slot, results = self._executor, ins.cell, ins.slot, []  # type: ignore[var-annotated]
        if slot is not None:
            gradients = executor.transport.take_gradient(slot)
            slot.ended = time.perf_counter()
            cell.sent = None
        elif cell.after is not None:
            gradients, cell.after.gradients = cell.after.gradients, None
        else:
            loss, scale = given.losses[cell.micro_batch], given.scales[cell.micro_batch]
            gradients = [executor.seed_gradient(loss, scale)]

        def compute() -> None:
            results.append(executor.ops.backward(cell, gradients, fused=ins.code == B))

        def finish() -> None:
            found = results.pop()
            if not cell.first:
                cell.gradients = found
            elif found and given.micro_batches is not None:
                executor.outside.keep(given.micro_batches[cell.micro_batch], found)

        return compute, finish

    def _other(self, ins: Step, given: Given) -> tuple[Callable[[], None], Callable[[], None]]:
        ops, cell = self._executor.ops, ins.cell
        run = ops.recompute if ins.code == R else ops.weight
        return lambda: run(cell), lambda: None
