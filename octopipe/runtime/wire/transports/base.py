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
    """A transfer timed out or its peer is gone. The executor adds what every other rank was doing."""

    def __init__(self, slot: Slot, reason: str):
        self.slot, self.reason = slot, reason
        super().__init__(f"{slot.describe()}: {reason}")


class Transport(ABC):
    """Moves the tensors of slots. One object serves one pipeline; calls come from one thread.

    The executor calls, for a forward slot, `post` (receiver) and `send_forward`, then `take_forward`; for a
    gradient slot `post`, `send_gradient`, `take_gradient`. `release` says that a send was certainly received.
    """

    name = ""
    ordered = False
    """Whether `post` must come exactly in program order, also before a gradient's form is known."""
    waiting: Slot | None = None
    """The slot the host is blocked on right now; a watchdog reads it."""

    def open(self, program: RankProgram) -> None:  # noqa: B027
        """Make ready for the slots of this program (collective over the pipeline's ranks)."""

    def begin_step(self) -> None:  # noqa: B027
        """A training step starts."""

    @abstractmethod
    def post(self, slot: Slot) -> None:
        """Be ready to receive. Unless `ordered`, a gradient is posted after its forward message was sent."""

    @abstractmethod
    def send_forward(self, slot: Slot, value: Any, needs: list[bool] | None) -> Any:
        """Send a stage's output; returns the `Spec` of the message."""

    @abstractmethod
    def take_forward(self, slot: Slot) -> tuple[Any, Any]:
        """Wait for a posted output: the value and its `Spec`."""

    @abstractmethod
    def send_gradient(self, slot: Slot, gradients: list[Tensor | None]) -> None:
        """Send the gradients of the tensors that asked for one."""

    @abstractmethod
    def take_gradient(self, slot: Slot) -> list[Tensor | None]:
        """Wait for posted gradients: one entry per leaf of the output."""

    @abstractmethod
    def release(self, slot: Slot) -> None:
        """Let go of a sent tensor."""

    def sent(self) -> Sequence[Any]:
        """CUDA events after which everything sent so far is out of the device's copy engines; none where sends do not
        use them."""
        return ()

    def end_step(self) -> None:  # noqa: B027
        """All slots are released."""

    def dead(self) -> Collection[int]:
        """Ranks known to have died, of those that something is received from. Asked from another thread."""
        return ()

    def abandon(self) -> None:  # noqa: B027
        """A step broke off here: let those who wait for this rank know, where that is possible."""

    def close(self) -> None:  # noqa: B027
        """Give back what is held outside this process."""


def spread(wanted: Sequence[bool], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients as one entry per leaf, None where none was asked for."""
    it = iter(tensors)
    return [next(it) if flag else None for flag in wanted]
