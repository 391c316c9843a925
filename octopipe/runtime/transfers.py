"""Issues the sends and receives of a rank's program in the same way for every executor, including that for Megatron-LM.

Knows: when a receive may be posted, and what a send passes on. Does not know: what ops compute, or how tensors travel
(`wire/transports`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octopipe.runtime.slots import RECEIVE, Cell, Step
from octopipe.runtime.wire.transports import Transport

TakeOutput = Callable[[Any], tuple[Any, Any]]
"""Returns a cell's output, and which of its leaves require a gradient. The cell drops it once no other stage needs
it."""


def take_output(cell: Cell) -> tuple[Any, Any]:
    """Return the output of a cell that has one consumer, and remove it from the cell."""
    value, cell.value = cell.value, None
    return value, cell.needs


def transfer(step: Step, transport: Transport, take: TakeOutput = take_output) -> None:
    """Post a receive, or send an output or a gradient.

    A gradient has the form of the output that it belongs to, so its receive is posted when that output has been sent.
    """
    slot, cell = step.slot, step.cell
    assert slot is not None
    if step.code == RECEIVE:
        if slot.forward or cell.output_message is not None or transport.ordered:
            transport.post(slot)
        else:
            slot.deferred = True
        return
    slot.started = time.perf_counter()
    if not slot.forward:
        gradients, cell.gradients = cell.gradients, None
        transport.send_gradient(slot, gradients)
        return
    cell.output_message = transport.send_forward(slot, *take(cell))
    answer = cell.gradient_slot
    if answer is not None and answer.deferred:
        answer.deferred = False
        transport.post(answer)
