"""The interface between the executor and transports, and the error of a failed transfer.

Knows: the interface. Does not know: any device or network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.slots import RankProgram, Slot


class TransferError(OctoPipeError):
    """A transfer timed out, or its peer is gone. The executor adds what every other rank was doing."""

    def __init__(self, slot: Slot, reason: str):
        self.slot, self.reason = slot, reason
        super().__init__(f"{slot.describe()}: {reason}")


class Transport(ABC):
    """Moves the tensors of slots. One object serves one pipeline; all calls come from one thread.

    For a forward slot, the executor calls `post` (on the receiver) and `send_forward`, then `take_forward`; for a
    gradient slot `post`, `send_gradient` and `take_gradient`. `release` states that a sent tensor has certainly been
    received.
    """

    name = ""
    ordered = False
    """Whether `post` must come exactly in program order, also before a gradient's form is known."""
    waiting: Slot | None = None
    """The slot the host is blocked on right now; a watchdog reads it."""

    def open(self, program: RankProgram) -> None:  # noqa: B027
        """Prepare for the slots of this program (collective over the pipeline's ranks)."""

    def begin_step(self) -> None:  # noqa: B027
        """Called when a training step starts."""

    @abstractmethod
    def post(self, slot: Slot) -> None:
        """Prepare to receive. Unless the transport is `ordered`, a gradient is posted only after its forward message
        has been sent."""

    @abstractmethod
    def send_forward(self, slot: Slot, value: Any, needs: list[bool] | None) -> Any:
        """Send a stage's output; returns the `Spec` of the message."""

    @abstractmethod
    def take_forward(self, slot: Slot) -> tuple[Any, Any]:
        """Wait for an output that was posted; returns the value and its `Spec`."""

    @abstractmethod
    def send_gradient(self, slot: Slot, gradients: list[Tensor | None]) -> None:
        """Send the gradients of the tensors that requested one."""

    @abstractmethod
    def take_gradient(self, slot: Slot) -> list[Tensor | None]:
        """Wait for gradients that were posted; returns one entry per leaf of the output."""

    @abstractmethod
    def release(self, slot: Slot) -> None:
        """Release a tensor that was sent."""

    def sent(self) -> Sequence[Any]:
        """CUDA events after which the device's copy engines have finished everything sent so far; empty if sends do not
        use them."""
        return ()

    def end_step(self) -> None:  # noqa: B027
        """Called when all slots have been released."""

    def dead(self) -> Collection[int]:
        """Ranks that are known to have died, among those that send to this rank. Called from another thread."""
        return ()

    def abandon(self) -> None:  # noqa: B027
        """Called when a step is interrupted on this rank: notify the ranks that wait for it, if possible."""

    def close(self) -> None:  # noqa: B027
        """Release everything that is held outside this process."""


def spread(wanted: Sequence[bool], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients as one entry per leaf, None for leaves that requested none."""
    it = iter(tensors)
    return [next(it) if flag else None for flag in wanted]
