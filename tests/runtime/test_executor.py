"""The executor against one device: every system, random irregular plans, everything that may cross a boundary."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from executor_models import KINDS, NUM_LAYERS, make  # noqa: E402
from random_plans import random_plan  # noqa: E402
from ranks import shared_ranks  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.base.errors import NotApplicableError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.search.systems import build_plan, systems  # noqa: E402
from octopipe.simulation.lowering import CHANNELS  # noqa: E402

TOLERANCE = 1e-12
TIMEOUT_S = 20.0


def _costs() -> CostTable:
    return CostTable.uniform(num_layers=NUM_LAYERS, p2p_ms=0.1)


# -- jobs: run on every rank ---------------------------------------------------------------------------


def run_plans(world, jobs):
    """[(name, kind, plan, channel)] -> [(name, worst gradient error, loss error)] of this rank."""
    out = []
    cases = {}
    for name, kind, plan, channel in jobs:
        key = kind, plan.num_micro_batches
        if key not in cases:
            case = make(*key)
            cases[key] = case, *plain_gradients(*case)
        case, expected, losses = cases[key]
        with Pipeline(case.layers, plan, case.loss_fn, group=world, channel=channel, timeout_s=TIMEOUT_S) as pipe:
            loss = pipe.step(case.inputs, case.targets)
        out.append((name, worst_error(pipe, expected), abs(float(loss) - sum(losses) / len(losses))))
        pipe.zero_grad()
    return out


def _assert_equal(results):
    for per_rank in results:
        for name, gradient, loss in per_rank:
            assert gradient <= TOLERANCE, name
            assert loss <= TOLERANCE, name


# -- equal to one device -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_every_system_gives_the_gradients_of_one_device(size):
    jobs, seen = [], set()
    for i, name in enumerate(systems()):
        for split in (None, True):
            try:
                plan = build_plan(name, _costs(), size, 8, split_backward=split)
            except NotApplicableError:
                continue
            if (plan.stages, plan.orders) in seen:  # it splits anyway, or on equal layers it is another system
                continue
            seen.add((plan.stages, plan.orders))
            jobs.append((f"{name} {split}", KINDS[i % len(KINDS)], plan, "directed"))
    assert len(jobs) > 10
    _assert_equal(shared_ranks(size).run(run_plans, jobs))


@pytest.mark.parametrize("size", [2, 4])
def test_random_irregular_plans_give_the_gradients_of_one_device(size):
    jobs = []
    for seed in range(200 // size):
        rng = random.Random(1000 * size + seed)
        plan = random_plan(rng, num_ranks=size, num_layers=NUM_LAYERS, num_micro_batches=rng.choice((3, 4, 5)))
        jobs.append((f"seed {seed}", KINDS[seed % len(KINDS)], plan, CHANNELS[seed // len(KINDS) % len(CHANNELS)]))
    _assert_equal(shared_ranks(size).run(run_plans, jobs))
