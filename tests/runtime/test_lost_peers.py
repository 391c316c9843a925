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
from octopipe.runtime.wire.telling import PeerError, WireError, peer_words  # noqa: E402
from octopipe.runtime.wire.transports.delivery import reason  # noqa: E402
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


# -- wherever else it shows -----------------------------------------------------------------------------


def one_rank():
    return build_plan("1f1b", CostTable.uniform(num_layers=2), 1, 2)


def loses_a_peer(*_):
    raise RuntimeError(GLOO)


class NotBuilt:
    """A factory whose layer communicates when it is made."""

    def __call__(self):
        loses_a_peer()


def test_a_peer_that_is_lost_while_the_pipeline_is_built_is_told_as_one():
    with pytest.raises(PeerError, match="a rank was lost; look for the one that ended first"):
        Pipeline([NotBuilt(), nn.Tanh()], one_rank(), lambda o, t: o.mean())


@pytest.mark.parametrize("place", ["_finish_step", "_mean_loss"])
def test_a_peer_that_is_lost_behind_the_ops_of_a_step_is_told_as_one(place, monkeypatch):
    parts = [torch.ones(2, 4)] * 2
    with Pipeline([nn.Linear(4, 4), nn.Tanh()], one_rank(), lambda o, t: o.mean()) as pipe:
        monkeypatch.setattr(pipe, place, loses_a_peer)
        with pytest.raises(PeerError, match=r"^in step 0, a rank was lost; .*pending ops: rank 0: in step"):
            pipe.step(parts, parts)
        with pytest.raises(OctoPipeError, match=r"was interrupted .*call recover\(\)"):
            pipe.step(parts, parts)


def test_a_peer_that_is_lost_while_the_timeline_is_collected_is_told_as_one(monkeypatch):
    parts = [torch.ones(2, 4)] * 2
    with Pipeline([nn.Linear(4, 4), nn.Tanh()], one_rank(), lambda o, t: o.mean()) as pipe:
        pipe.step(parts, parts)
        monkeypatch.setattr(pipe.recorder, "all_times", loses_a_peer)
        with pytest.raises(PeerError, match=r"^while the timeline was collected, a rank was lost"):
            pipe.timeline()


PLACE = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(f"{PLACE}pair.cc:553] Connection closed by peer [127.0.0.1]:37279"), "the peer is gone"),
        (RuntimeError(f"{PLACE}pair.cc:547] Read error [127.0.0.1]:1: Connection reset by peer"), "the peer is gone"),
        (RuntimeError(f"{PLACE}pair.cc:417] writev [127.0.0.1]:58: Broken pipe"), "the peer is gone"),
        (RuntimeError(f"{PLACE}unbound_buffer.cc:81] Timed out waiting 1000ms for recv"), "timed out"),
        (WireError("connection closed by peer"), "the peer is gone"),
        (WireError("timed out"), "timed out"),
        (
            RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
            "shape '[2, 3]' is invalid for input of size 5",
        ),
    ],
)
def test_all_words_for_a_lost_peer_are_one_reason(error, expected):
    assert reason(error) == expected
    assert (peer_words(error) is None) == expected.startswith("shape")
