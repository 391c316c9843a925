"""Sends and receives of a rank's program, issued the same way by every executor: ours and the one inside Megatron-LM.

Knows: when a receive may be posted, and what a send hands over. Does not know: what ops compute, or how tensors travel
(`wire/transports`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octopipe.runtime.slots import RECEIVE, Cell, Step
from octopipe.runtime.wire.transports import Transport

TakeOutput = Callable[[Any], tuple[Any, Any]]
"""Gives a cell's output, and which of its leaves take a gradient; the cell keeps it no longer than others need it."""


def take_output(cell: Cell) -> tuple[Any, Any]:
    """The output of a cell that one other stage takes."""
    value, cell.value = cell.value, None
    return value, cell.needs


def transfer(step: Step, transport: Transport, take: TakeOutput = take_output) -> None:
    """Post a receive, or send an output or a gradient.

    The form of a gradient is that of the output it answers, so its receive is posted when that was sent.
    """
    slot, cell = step.slot, step.cell
    assert slot is not None
    if step.code == RECEIVE:
        if slot.forward or cell.sent is not None or transport.ordered:
            transport.post(slot)
        else:
            slot.deferred = True
        return
    slot.started = time.perf_counter()
    if not slot.forward:
        gradients, cell.gradients = cell.gradients, None
        transport.send_gradient(slot, gradients)
        return
    cell.sent = transport.send_forward(slot, *take(cell))
    answer = cell.gradient_slot
    if answer is not None and answer.deferred:
        answer.deferred = False
        transport.post(answer)
