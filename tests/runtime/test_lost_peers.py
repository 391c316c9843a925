"""A peer that is gone shows in many places: when a receive is posted, or in a layer's own communication. Every rank
tells it in the same words, and none takes it for its own failure."""

from __future__ import annotations

import pytest
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.wire.telling import PeerError  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37279"


class Gone:
    """A group whose peer has closed its connection: what is posted from now on fails at once."""

    def __init__(self, group):
        self._group = group

    def __getattr__(self, name):
        return getattr(self._group, name)

    def recv(self, tensors, source, tag):
        raise RuntimeError(GLOO)


class Talks(nn.Module):
    """A layer that communicates itself, with a peer that is gone."""

    def forward(self, x):
        raise RuntimeError(GLOO)


def _tell(world, layers, sizes, leave):
    plan = build_plan("1f1b", CostTable.uniform(num_layers=2), 2, 2)
    parts = [torch.ones(n, 4) for n in sizes]
    try:
        with Pipeline(layers, plan, lambda o, t: o.mean(), group=world, timeout_s=PATIENCE_S) as pipe:
            if leave and world.rank == 1:
                delivery = pipe.executor.transport.delivery
                delivery.control = Gone(delivery.control)
            pipe.step(parts, parts)
    except OctoPipeError as error:
        return isinstance(error, PeerError), str(error)
    return False, "trained"


def posts(world):
    """Over 4 MiB and new to the receiver: taken with a receive of its own."""
    return _tell(world, [nn.Linear(4, 4), nn.Tanh()], [600_000, 600_000], True)


def communicates(world):
    return _tell(world, [nn.Linear(4, 4), Talks()], [2, 2], False)


def test_a_receive_that_cannot_be_posted_is_told_as_a_lost_peer(two):
    of_peer, text = two.run(posts)[1]
    assert of_peer and "rank 1 did not get the" in text and "the peer is gone" in text, text


def test_a_peer_lost_inside_a_layer_is_not_taken_for_this_ranks_failure(two):
    of_peer, text = two.run(communicates)[1]
    assert of_peer and "rank 1, in 1F0" in text and "a rank was lost" in text, text
