"""Parts of a layer that exchange, measured: layers that sleep for known times."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest
from effort import some

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import octopipe  # noqa: E402
from octopipe.costs.profile_file import profile_from_object  # noqa: E402
from octopipe.plans.two_lanes import interleave, sequence, with_filler  # noqa: E402
from octopipe.runtime.measure.exchanges import MeasuredExchange, segments_of  # noqa: E402
from octopipe.runtime.measure.one_layer import Layer  # noqa: E402
from octopipe.runtime.measure.profiler import assemble, profile_layers  # noqa: E402


class _Slow(torch.autograd.Function):
    """Computes for some time, then exchanges for some; backward exchanges first."""

    @staticmethod
    def forward(ctx, x, compute, exchange):
        ctx.times = compute, exchange
        time.sleep(compute)
        with octopipe.exchange():
            time.sleep(exchange)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        compute, exchange = ctx.times
        with octopipe.exchange():
            time.sleep(exchange)
        time.sleep(2 * compute)
        return gradient * 1.0, None, None


class Slow(nn.Module):
    def __init__(self, compute: float, exchange: float):
        super().__init__()
        self.times = compute, exchange
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return _Slow.apply(x, *self.times) * self.scale


def mse(a, b):
    return (a - b).square().mean()


def test_a_profile_says_which_parts_of_a_layer_exchange(only_sleeping_takes_time: None) -> None:
    layers = [nn.Linear(4, 4), Slow(0.02, 0.06), Slow(0.02, 0.06), nn.Linear(4, 4)]
    layers[0].weight.grad = torch.ones(4, 4)
    measured = profile_layers(layers, torch.randn(2, 4), mse, torch.randn(2, 4), repeats=2, warm_up=0)
    assert layers[1].scale.grad is None and torch.equal(layers[0].weight.grad, torch.ones(4, 4))
    costs = assemble([measured], model="m", symbols="LXXL").costs
    assert costs.segments is not None
    shares = [costs.segments.share(kind, "exchange") for kind in "FI"]
    assert shares[0][[0, 3]].max() == shares[1][[0, 3]].max() == 0.0
    np.testing.assert_allclose(shares[0][1:3], 0.75, atol=1e-3)
    np.testing.assert_allclose(shares[1][1:3], 0.6, atol=1e-3)
    assert [lane for lane, _ in costs.segments.forward[1]][:2] == ["compute", "exchange"]
    file = json.loads(assemble([measured], model="m", symbols="LXXL").to_json())
    again = profile_from_object(file, name="m")
    np.testing.assert_allclose(again.costs.segments.share("F", "exchange"), shares[0], rtol=1e-6)


def test_layers_without_an_exchange_have_no_segments() -> None:
    measured = profile_layers([nn.Linear(4, 4)] * 2, torch.randn(2, 4), mse, torch.randn(2, 4), repeats=1, warm_up=0)
    assert measured.exchanges == () and assemble([measured], model="m", symbols="LL").costs.segments is None


def test_slowing_is_what_makes_the_pair_take_as_long_as_it_did() -> None:
    """F: 4 compute, 2 exchange; I: 2 exchange, 4 compute. Together 8 ms, and 8 (1 + s / 2) when slowed by s beside."""
    layer = MeasuredExchange(
        forward=(("compute", 4.0), ("exchange", 2.0)), input=(("exchange", 2.0), ("compute", 4.0)), paired_ms=8.4
    )
    segments = segments_of([[layer]], [0])
    assert segments is not None
    # Each of the two exchanges runs beside compute throughout: 2 ms of exchange cover 2 / (1 + s) ms of it.
    s = segments.slows_compute
    assert 2 * (4 + 2 - 2 / (1 + s)) == pytest.approx(8.4, abs=1e-6)
    faster = MeasuredExchange(forward=layer.forward, input=layer.input, paired_ms=7.0)
    assert segments_of([[faster]], [0]).slows_compute == 0.0


@pytest.mark.parametrize("slowing", some([(0.2, 0.4), (0.3, 0.0), (0.0, 0.5)]))
def test_three_kinds_of_pairs_tell_apart_what_is_slowed(slowing: tuple[float, float]) -> None:
    """Times of pairs made from known slowings: the same slowings are found again."""
    f = (("compute", 3.7), ("exchange", 1.9), ("compute", 1.9), ("exchange", 1.7), ("compute", 1.7))
    i = (("compute", 0.7), ("exchange", 1.9), ("compute", 2.0), ("exchange", 1.7), ("compute", 10.0))
    one, other = sequence(f), sequence(i)
    alone = interleave(other, sequence(()), *slowing)
    layer = MeasuredExchange(
        forward=f,
        input=i,
        weight_ms=3.0,
        paired_ms=interleave(one, other, *slowing).ms,
        forwards_ms=interleave(one, one, *slowing).ms,
        filled_ms=with_filler(alone, 3.0, *slowing),
    )
    segments = segments_of([[layer]], [0])
    assert segments is not None
    assert (segments.slows_compute, segments.slows_exchange) == pytest.approx(slowing, abs=5e-3)


class NotAlike(nn.Module):
    """Exchanges with the other rank; on one rank no two forwards give the same values."""

    def __init__(self, varies: bool):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.drawn = itertools.count(1) if varies else itertools.repeat(1)

    def forward(self, x):
        rows = dist.nn.functional.all_to_all_single(torch.empty_like(x), x)
        return rows * self.scale * float(next(self.drawn))


def repeated_on_one_rank(world):
    """Whether this rank's layer is repeatable, and what arrives in the exchange after the question."""
    layer = Layer(NotAlike(varies=world.rank == 0), torch.ones(2, 3), None, False)
    repeatable = layer.repeatable()
    arrived = torch.empty(2)
    dist.all_to_all_single(arrived, torch.full((2,), 10.0 + world.rank))
    return repeatable, arrived.tolist()


def test_all_members_run_a_layer_equally_often_whatever_one_of_them_sees(two) -> None:
    """One rank finds that its layer differs and runs it a third time: the other rank must do so, too, or the exchange
    of one meets another one's, or nobody's."""
    found = two.run(repeated_on_one_rank)
    assert [repeatable for repeatable, _ in found] == [False, True]
    assert [arrived for _, arrived in found] == [[10.0, 11.0], [10.0, 11.0]]
