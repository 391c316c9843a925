"""Reasons to end a run early: a signal, or values that are not finite.

Knows: signals, which are handled between two steps, and how the loss and the gradient norm are checked in every step
without making a GPU wait. Does not know: checkpoints or plans.
"""

from __future__ import annotations

import math
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError

ASKED = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM"}
PASSED_ON = {int(signal.SIGUSR1): int(signal.SIGINT)}
"""Signals that a launcher sends its ranks, by the signal that each stands for, if ranks do not get that one themselves
(see `launch`)."""


class Diverged(OctoPipeError):
    """Raised when the loss or a gradient is no longer finite."""


class StopRequest:
    """Records SIGTERM and Ctrl-C, so that the current step can end and be saved; a second signal takes effect at
    once."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the signal that was received, or 0."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (*ASKED, *PASSED_ON):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = PASSED_ON.get(number, number)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


class FiniteWatch:
    """Checks the loss and the gradient norm of every step; on a GPU one step later, when the values have arrived."""

    def __init__(self, device: torch.device):
        self._late = device.type == "cuda"
        self._pending: tuple[int, Tensor, Any] | None = None

    def look(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Record the values of a step. Raises an error if a step is known to have values that are not finite."""
        if not self._late:
            _judge(step, float(loss), float(norm))
            return
        self.settle()
        host = torch.empty(2, dtype=torch.float64, pin_memory=True)
        host.copy_(torch.stack([loss.double(), norm.double().to(loss.device)]), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = step, host, event

    def settle(self) -> None:
        """Check the values that are still pending."""
        if self._pending is not None:
            step, host, event = self._pending
            self._pending = None
            event.synchronize()
            _judge(step, *host.tolist())


def _judge(step: int, loss: float, norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        what = f"the loss is {loss:g}" if not math.isfinite(loss) else f"the gradient norm is {norm:g}"
        raise Diverged(f"{what} at step {step}; use a smaller --lr or a --warmup")
