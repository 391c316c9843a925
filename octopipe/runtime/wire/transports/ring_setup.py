"""Setting up the rings between ranks that share memory: every user of rings connects them through `open_rings`.

Knows: which end of a ring creates which memory, and that the memory cannot be opened once all ranks have opened it.
Does not know: the ring's protocol (`ring`), where memory lies (`arenas`), or what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octopipe.runtime.wire.transports.arenas import Arenas
from octopipe.runtime.wire.transports.ring import RingReceiver, RingSender, Until


class Rings(NamedTuple):
    """The ends of rings on this rank, by the peer at the other end."""

    senders: dict[int, RingSender]
    receivers: dict[int, RingReceiver]

    def close(self) -> None:
        """Stop queueing; the creator of the arenas closes them."""
        for receiver in self.receivers.values():
            receiver.close()
        for sender in self.senders.values():
            sender.close()


def open_rings(
    arenas: Arenas,
    *,
    rank: int,
    targets: Sequence[int],
    sources: Sequence[int],
    new_arena: Callable[[], Tensor],
    gather: Callable[[Any], list[Any]],
    until: Until,
) -> Rings:
    """A ring to every target and from every source (collective over all ranks that `gather` spans).

    The receiver creates the arena, the counter of filled chunks and the counters of the hosts; the sender creates the
    counter of freed chunks. `gather` returns the items of all ranks, by rank. `until` makes this rank's host wait for a
    condition.
    """
    incoming = {
        peer: {
            "arena": new_arena(),
            "filled": arenas.counter(),
            "queued": arenas.host_zeros((2,), torch.int64),
        }
        for peer in sources
    }
    freed = {peer: arenas.counter() for peer in targets}
    shown = gather(
        {
            "incoming": {
                peer: {name: arenas.show(tensor) for name, tensor in mine.items()} for peer, mine in incoming.items()
            },
            "freed": {peer: arenas.show(counter) for peer, counter in freed.items()},
        }
    )
    rings = Rings({}, {})
    for peer in targets:
        theirs = shown[peer]["incoming"][rank]
        rings.senders[peer] = RingSender(
            arenas.see(theirs["arena"]),
            arenas.see(theirs["filled"]),
            freed[peer],
            arenas.see_host(theirs["queued"]),
            arenas.lane(),
            until,
        )
    for peer in sources:
        mine = incoming[peer]
        their_freed = arenas.see(shown[peer]["freed"][rank])
        rings.receivers[peer] = RingReceiver(
            mine["arena"], mine["filled"], their_freed, mine["queued"], arenas.lane(), until
        )
    gather(None)  # now all ranks have opened everything
    arenas.all_seen()
    return rings
