"""The one rule for when a tensor has arrived, compiled: list schedulers and whatever times given orders call it.

Knows: directed channels (one queue per direction of a rank pair, in order). Does not know: ops, orders or plans.

An op may start when its rank is free and everything it needs has arrived. What was made on the same rank has arrived at
once. What goes to another rank waits for the queue of that direction, and then takes its transfer time.
"""

from __future__ import annotations

from octopipe.base.compile import njit


@njit
def handed_over(channel, source, target, end, transfer_ms):  # type: ignore[no-untyped-def]
    """When what an op on rank `source` has made, at `end`, is on rank `target`; takes its place in the queue."""
    if source == target:
        return end
    at = max(end, channel[source, target]) + transfer_ms
    channel[source, target] = at
    return at
