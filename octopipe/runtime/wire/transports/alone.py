"""The transport of a single rank, which has nothing to send."""

from __future__ import annotations

from typing import Any

from octopipe.runtime.slots import Slot
from octopipe.runtime.wire.transports.base import TransferError, Transport


class NoTransport(Transport):
    """Every call is an error, because a plan for one rank has no transfers."""

    name = "none"

    def _refuse(self, slot: Slot, *_: Any) -> Any:
        raise TransferError(slot, "a single rank has no other rank to send to")

    post = send_forward = take_forward = send_gradient = take_gradient = release = _refuse  # type: ignore[assignment]
