"""Execution of a pair of ops: collects the inputs of both, runs both together, and passes on the result of each.

Knows: where an op's input comes from and where its result goes, as the executor does for single ops. Does not know: how
two ops alternate (`turns.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torch import Tensor

from octopipe.plans.plan import B, F, I, R, W
from octopipe.runtime.slots import Cell, Step
from octopipe.runtime.stages.cuda_graphs import GraphedOps
from octopipe.runtime.turns import Fill, Patience, Turns, give_turn

if TYPE_CHECKING:
    from octopipe.runtime.executor import Executor


class StepArguments(NamedTuple):
    """The inputs of a step, and the losses that it collects."""

    micro_batches: Sequence[Any] | None
    targets: Sequence[Any] | None
    scales: Sequence[float]
    losses: dict[int, Tensor]
    sides: Sequence[Mapping[str, Any]] | None


def begins(first: int, second: int) -> int:
    """Return which op of a pair has the first turn (0 or 1), by their kinds: the same on all members of an expert
    group.

    A backward goes first, if there is one: a layer's backward starts with the exchange that its forward ended with, and
    the other op can compute beside it from the start. A W, which has no exchange, comes second: it runs in portions
    beside the other op's exchanges.

    >>> [begins(a, b) for a, b in ((F, B), (B, F), (W, F), (F, W), (F, F))]
    [1, 0, 1, 0, 0]
    """
    place = {I: 0, B: 0, W: 2}
    return int(place.get(second, 1) < place.get(first, 1))


class Prepared(NamedTuple):
    """An op of a pair whose inputs have been collected."""

    compute: Callable[[], None]
    finish: Callable[[], None]
    """Passes its results on."""
    fill: Fill = None
    """The work that it can compute while its exchanges are under way (see `turns.py`)."""


class Portions:
    """Divides a W over the exchanges of the op beside it: after each portion, the other op gets its turn.

    >>> turns = []
    >>> portions = Portions(6, 3, lambda: turns.append("other"))
    >>> for work in (1, 1, 3, 1):
    ...     portions(work)
    ...     turns.append(work)
    >>> turns
    [1, 'other', 1, 'other', 3, 1]
    """

    def __init__(self, work: int, number: int, give: Callable[[], None]):
        self._work, self._number, self._give = work, number, give
        self._done, self._given = 0, 0

    def __call__(self, work: int) -> None:
        self._done += work
        if self._given + 1 < self._number and self._done * self._number >= self._work * (self._given + 1):
            self._given += 1
            self._give()


class PairedOps:
    """Runs the pairs of one executor's program."""

    def __init__(self, executor: Executor):
        # The executor owns this object: a strong reference to it would keep both until Python collects cycles.
        self._owner, self._turns = ref(executor), Turns()
        self._exchanges: dict[tuple[int, int], int] = {}
        """By stage and kind of an op: how many exchanges it had in its last pair."""
        self.apart = False
        """Whether the ops of all pairs run one after the other: while what each of them adds to `.grad` is recorded."""

    def run(self, first: Step, second: Step, given: StepArguments) -> None:
        executor, clock = self._executor, time.perf_counter
        recorder = executor.recorder
        beside = (second, first)
        ops = [self._prepared(ins, given, other) for ins, other in zip((first, second), beside, strict=True)]
        parts = {id(stage): stage for ins in (first, second) for stage, _ in executor.chains[ins.cell.stage].parts}
        modes = [mode for stage in parts.values() for mode in (stage.mode, stage.rerun)]
        # If a forward works on copies of the state that it changes, no other op of its stage may run in between.
        same = first.cell.stage == second.cell.stage
        apart = self.apart or (same and not all(stage.replay.settled() for stage in parts.values()))
        k = first.number
        recorder.started[k] = clock()
        if recorder.mark is not None:
            recorder.mark(k, 0)
        failed = self._turns.together(
            ops[0].compute,
            ops[1].compute,
            modes,
            apart=apart,
            begins=begins(first.code, second.code),
            patience=Patience(timeout_s=executor.timeout_s, failed=executor.board.failed_elsewhere),
            fills=(ops[0].fill, ops[1].fill),
        )
        if failed is not None:
            executor.at = (first, second)[failed]
            raise self._turns.error
        for ins, handed in zip((first, second), self._turns.handed, strict=True):
            self._exchanges[ins.cell.stage, ins.code] = handed
        if recorder.mark is not None:
            recorder.mark(k, 1)
            recorder.mark(second.number, 0)
            recorder.mark(second.number, 1)
        # As in a predicted timeline: the first op's span covers both, and the second op's is empty at its end.
        recorder.ended[k] = recorder.started[second.number] = recorder.ended[second.number] = clock()
        for op, ins in zip(ops, (first, second), strict=True):
            op.finish()
            if ins.layers_done and executor.layers_done is not None:
                executor.layers_done(ins.layers_done)
            elif executor.between_ops is not None:
                executor.between_ops()

    @property
    def _executor(self) -> Executor:
        executor = self._owner()
        assert executor is not None, "an executor outlives its pairs"
        return executor

    def close(self) -> None:
        self._turns.close()

    def _prepared(self, ins: Step, given: StepArguments, beside: Step) -> Prepared:
        executor = self._executor
        if ins.code == F:
            made = self._forward(ins, given)
        elif ins.code in (R, W):
            made = self._other(ins, beside)
        else:
            made = self._backward(ins, given)
        for sent in ins.release:
            executor.transport.release(sent)
        return made

    def _forward(self, ins: Step, given: StepArguments) -> Prepared:
        executor, cell, slot = self._executor, ins.cell, ins.slot
        if slot is None:
            value, needs = executor.own_input(cell, given.micro_batches)
        else:
            value, cell.input_message = executor.transport.take_forward(slot)
            slot.ended = time.perf_counter()
            needs = cell.input_message.wanted
        then = executor.loss(given.targets, cell.micro_batch) if cell.computes_loss else None

        def hand_on(out: Any) -> None:
            if cell.computes_loss:
                given.losses[cell.micro_batch] = out
            else:
                cell.value = out

        return self._forward_of(cell, given, (value, needs, then), hand_on)

    def _forward_of(
        self, cell: Cell, given: StepArguments, arguments: tuple[Any, Any, Any], hand_on: Callable[[Any], None]
    ) -> Prepared:
        """Prepare F of a cell with its `arguments` (input, which leaves require a gradient, loss); `hand_on` receives
        its output."""
        executor, results = self._executor, list[Any]()
        seed = executor.micro_batch_seeds[cell.micro_batch]
        side = None if given.sides is None else given.sides[cell.micro_batch]

        def compute() -> None:
            results.append(executor.ops.forward(cell, *arguments, seed, side))

        def finish() -> None:
            cell.runs, out, cell.needs = results.pop()
            hand_on(out)

        return Prepared(compute, finish)

    def _backward(self, ins: Step, given: StepArguments) -> Prepared:
        executor, cell = self._executor, ins.cell
        gradients = executor.gradients_for(cell, ins.slot, given.losses, given.scales)

        def hand_back(found: list[Any]) -> None:
            if not cell.takes_batch:
                cell.gradients = found
            elif found and given.micro_batches is not None:
                executor.outside.keep(given.micro_batches[cell.micro_batch], found)

        return self._backward_of(ins, gradients, hand_back)

    def _backward_of(self, ins: Step, gradients: list[Any], hand_back: Callable[[list[Any]], None]) -> Prepared:
        """Prepare I or B from these gradients of the output; `hand_back` receives the gradients of the input.

        The B of a pair defers its weight gradients to its next exchange, where they fill the time that the other op
        leaves.
        """
        ops, cell, results = self._executor.ops, ins.cell, list[Any]()
        split = ins.code == B and not isinstance(ops, GraphedOps)

        def compute() -> None:
            results.append(ops.backward(cell, gradients, fused=ins.code == B and not split))
            if split:
                ops.weight(cell)

        def finish() -> None:
            hand_back(results.pop())

        return Prepared(compute, finish, (lambda: ops.weight_so_far(cell)) if split else None)

    def _other(self, ins: Step, beside: Step) -> Prepared:
        ops, cell = self._executor.ops, ins.cell
        if ins.code == R:
            return Prepared(lambda: ops.recompute(cell), lambda: None)
        # As many portions as the other op had exchanges in its last pair, so that W runs beside all of them.
        number = self._exchanges.get((beside.cell.stage, beside.code), 1)
        portions = Portions(ops.weight_work(cell), number, give_turn)
        return Prepared(lambda: ops.weight(cell, portions), lambda: None)
