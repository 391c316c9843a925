"""Messages over 4 MiB are sent from the tensors' own memory while the next forwards run: what those change in place is
kept apart, or refused by name. And layers that come wrapped in the older FSDP are refused."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from effort import some
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.wire.transports import delivery  # noqa: E402
from octopipe.runtime.wire.transports.mail import BODIES_BYTES  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

ROWS, WIDTH, COUNT = 1100, 512, 4
TOLERANCE = 1e-9
assert ROWS * WIDTH * 8 > BODIES_BYTES


class Running(nn.Module):
    """A mean over all that was seen, changed in place and handed on as it is now."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(ROWS, WIDTH, dtype=torch.float64))

    def forward(self, x):
        self.mean.mul_(0.5).add_(x.detach(), alpha=0.5)
        return x * self.scale, self.mean


class Joins(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, value):
        x, mean = value
        return x * self.scale + mean * x


class Overwrites(nn.Module):
    """Changes what it returned for the micro-batch before."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.last = None

    def forward(self, x):
        out = x * self.scale
        if self.last is not None:
            with torch.no_grad():
                self.last.mul_(0.0)
        self.last = out.detach()
        return out


def build(kind):
    return [Running(), Joins()] if kind == "mean" else [Overwrites(), nn.Tanh()]


def data():
    torch.manual_seed(4)
    return [torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(COUNT)]


def trained(world, kind, system, large):
    rows = ROWS if large else 8
    parts = [x[:rows] for x in data()]
    layers = build(kind)
    if kind == "mean" and not large:
        layers[0].mean = layers[0].mean[:rows].clone()
    plan = build_plan(system, CostTable.uniform(num_layers=2), 2, COUNT)
    loss_fn = lambda o, t: (o - t).square().mean()  # noqa: E731
    try:
        with Pipeline(layers, plan, loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            losses = [float(pipe.step(parts, parts)) for _ in range(2)]
            return losses, {n: float(p.grad) for n, p in pipe.named_parameters()}
    except OctoPipeError as error:
        return str(error)


def plain(kind, large):
    rows = ROWS if large else 8
    layers = build(kind)
    if not large:
        layers[0].mean = layers[0].mean[:rows].clone()
    losses = []
    for _ in range(2):
        total = 0.0
        for x in data():
            x = x[:rows]
            loss = (layers[1](layers[0](x)) - x).square().mean() / COUNT
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
    return losses, {f"{k}.{n}": float(p.grad) for k, m in enumerate(layers) for n, p in m.named_parameters()}


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("system", some(["zb-h1", "gpipe", "1f1b"]))
def test_a_buffer_that_is_handed_on_and_changed_arrives_as_it_was(system, large, two):
    losses, grads = plain("mean", large)
    for found, mine in two.run(trained, "mean", system, large):
        assert found == pytest.approx(losses, rel=TOLERANCE)
        assert mine == pytest.approx({n: grads[n] for n in mine}, rel=TOLERANCE)


@pytest.mark.parametrize("system", ["gpipe", "zb-h1"])
def test_an_output_that_a_later_forward_writes_to_is_refused(system, two):
    texts = two.run(trained, "overwrites", system, True)
    assert any("changed in place an output" in text and "return a copy" in text for text in texts), texts


def broken_off(world, rows):
    """The first rank fails as soon as it has begun to send, in the middle of a message of several megabytes."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    plan = build_plan("gpipe", CostTable.uniform(num_layers=2), 2, COUNT)
    parts = [torch.zeros(rows, WIDTH) for _ in range(COUNT)]
    pipe = Pipeline(layers, plan, lambda o, t: o.mean(), group=world, timeout_s=PATIENCE_S)
    deliver = pipe.transport.delivery.send_late

    def begin(slot, tensor):
        deliver(slot, tensor)
        raise OctoPipeError("broken off on purpose")

    if world.rank == 0:
        pipe.transport.delivery.send_late = begin
    try:
        pipe.step(parts, parts)
    except OctoPipeError as error:
        return str(error)
    finally:
        pipe.close()
    return "over"


@pytest.mark.parametrize("rows", [8_000, 20_000])
def test_a_step_that_breaks_off_inside_a_message_ends_on_the_receiver_at_once(rows, two):
    """Whose peer is alive: it heard nothing, and waited until its timeout."""
    first, second = two.run(broken_off, rows)
    assert "broken off on purpose" in first
    assert "did not get the output of 0F1" in second and "the peer is gone" in second, second


def given_up(world, rows):
    """The last rank fails in its first op; its peer has sent messages that nobody will read."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(delivery, "SENDS_END_S", 2 * PATIENCE_S)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    plan = build_plan("gpipe", CostTable.uniform(num_layers=2), 2, COUNT)
    parts = [torch.zeros(rows, WIDTH) for _ in range(COUNT)]

    def refuse(module, inputs):
        raise OctoPipeError("refused on purpose")

    layers[1].register_forward_pre_hook(refuse)
    pipe = Pipeline(layers, plan, lambda o, t: o.mean(), group=world, timeout_s=PATIENCE_S)
    try:
        pipe.step(parts, parts)
    except OctoPipeError as error:
        return str(error)
    finally:
        pipe.close()
        monkeypatch.undo()
    return "over"


def test_messages_to_a_rank_that_has_failed_are_not_waited_for(two):
    """They would be waited for twice as long as this test has patience."""
    first, second = two.run(given_up, 8_000)
    assert "the peer is gone" in first and "refused on purpose" in first, first
    assert "refused on purpose" in second and "the peer" not in second


class Work:
    def __init__(self):
        self.patience_s = None

    def wait(self, timeout):
        self.patience_s = timeout.total_seconds()
        raise RuntimeError("timed out")


@pytest.mark.parametrize("lost", [1, None])
def test_an_error_that_passes_from_rank_to_rank_is_delayed_once(lost):
    """A rank that lost another one counts from its last send; only the first rank to fail counts from now."""
    slots = [SimpleNamespace(peer=peer, state=SimpleNamespace(works=[Work()])) for peer in (1, 2)]
    sender = SimpleNamespace(_sending=slots, _inline=True, _lost=lost, sent_at_s=time.monotonic() - 600.0)
    delivery.Delivery.end_sends(sender)
    assert [slot.state.works[0].patience_s is None for slot in slots] == [lost == 1] * 2
    sender.sent_at_s = time.monotonic() + 600.0  # as if it had just sent
    delivery.Delivery.end_sends(sender)
    assert [slot.state.works[0].patience_s is None for slot in slots] == [lost == 1, False]


def wrapped(world, nested):
    from torch.distributed.fsdp import FullyShardedDataParallel

    linear = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    layers = [nn.Linear(4, 4), nn.Sequential(nn.Tanh(), linear) if nested else linear]
    plan = build_plan("1f1b", CostTable.uniform(num_layers=2), 2, COUNT)
    try:
        Pipeline(layers, plan, lambda o, t: o.mean(), group=world, timeout_s=PATIENCE_S)
    except OctoPipeError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize("nested", [False, True])
def test_the_older_fsdp_is_refused_by_name(nested, two):
    texts = two.run(wrapped, nested)
    assert any("layer 1 is wrapped in FullyShardedDataParallel; shard it with fully_shard" in text for text in texts)
    assert "taken" not in texts
