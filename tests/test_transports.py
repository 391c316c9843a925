"""Transports: every form of message, deadlocks that show, and programs that never block."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
from random_plans import random_plan  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch import nn  # noqa: E402

from octopipe.cost import CostTable  # noqa: E402
from octopipe.errors import DeadlockError, OctoPipeError  # noqa: E402
from octopipe.lower import CHANNELS, lower, prove_deadlock_free  # noqa: E402
from octopipe.plan import Plan, Stage, parse_orders  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def _loss(output, target):
    return (output - target).square().mean()


# -- the strict transport ------------------------------------------------------------------------------


def run_strictly(world, jobs, naive, timeout_s):
    """[(seed, plan, channel)] with layers of one number each -> losses, or the error's text."""
    out = []
    for seed, plan, channel in jobs:
        torch.manual_seed(seed)
        layers = [nn.Linear(2, 2) for _ in range(plan.num_layers)]
        data = [torch.randn(1, 2) for _ in range(plan.num_micro_batches)]
        costs = CostTable.uniform(num_layers=plan.num_layers, p2p_ms=0.1)
        program = lower(plan, costs, channel=channel, naive=naive, check=not naive)
        with Pipeline(layers, program, _loss, group=world, transport="strict", timeout_s=timeout_s) as pipe:
            try:
                out.append(float(pipe.step(data, data)))
            except OctoPipeError as error:
                out.append(str(error))
    return out


def _crossing_plan() -> Plan:
    """Two micro-batches in opposite directions: both ranks naively send before they receive."""
    stages = tuple(Stage(first=k, stop=k + 1, rank=r) for k, r in ((0, 0), (1, 1), (0, 1), (1, 0)))
    orders = parse_orders([["0F0", "3F1", "3B1", "0B0"], ["2F1", "1F0", "1B0", "2B1"]])
    return Plan(
        num_layers=2,
        num_ranks=2,
        num_micro_batches=2,
        stages=stages,
        orders=orders,
        routes=((0, 1), (2, 3)),
        route_of_micro_batch=(0, 1),
    ).check()


@pytest.mark.parametrize("channel", ["blocking", "single", "pair"])
def test_naive_order_deadlocks_and_every_rank_names_all_pending_ops(channel, two):
    plan = _crossing_plan()
    naive = lower(plan, CostTable.uniform(num_layers=2), channel=channel, naive=True, check=False)
    with pytest.raises(DeadlockError):
        prove_deadlock_free(naive)
    for (error,) in two.run(run_strictly, [(0, plan, channel)], True, 1.0):
        assert "within 1 s" in error
        assert "rank 0: waits for the" in error
        assert "rank 1: waits for the" in error
        assert "0F0" in error and "2F1" in error
        assert "micro-batch" in error


def test_lowered_order_of_the_same_plan_finishes(two):
    jobs = [(0, _crossing_plan(), channel) for channel in CHANNELS]
    for losses in two.run(run_strictly, jobs, False, 20.0):
        assert len(set(losses)) == 1
        assert isinstance(losses[0], float)


def test_mismatched_directed_queue_deadlocks_naively(two):
    """The receiver uses two tensors in another order than they were sent in."""
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    plan = Plan(
        num_layers=2,
        num_ranks=2,
        num_micro_batches=2,
        stages=stages,
        orders=parse_orders([["0F0", "0F1", "0B0", "0B1"], ["1F1", "1F0", "1B0", "1B1"]]),
    ).check()
    for (error,) in two.run(run_strictly, [(0, plan, "directed")], True, 1.0):
        assert isinstance(error, str)
    for (loss,) in two.run(run_strictly, [(0, plan, "directed")], False, 20.0):
        assert isinstance(loss, float)


@pytest.mark.parametrize("size", [2, 4])
def test_random_plans_finish_on_the_strict_transport(size, two, four):
    jobs = []
    for seed in range(250):
        rng = random.Random(7000 * size + seed)
        plan = random_plan(rng, num_ranks=size, num_layers=5, num_micro_batches=rng.randint(1, 4), recompute=False)
        jobs.append((seed, plan, CHANNELS[seed % len(CHANNELS)]))
    for results in (two if size == 2 else four).run(run_strictly, jobs, False, 30.0):
        assert all(isinstance(loss, float) for loss in results), results
