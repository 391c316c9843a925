"""The executor against one device: every system, random irregular plans, everything that may cross a boundary."""

from __future__ import annotations

import pytest
from effort import WHOLE, draws, some

torch = pytest.importorskip("torch")

from executor_models import KINDS, NUM_LAYERS, make, random_jobs  # noqa: E402
from ranks import PATIENCE_S, shared_ranks  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.base.errors import NotApplicableError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.search.systems import build_plan, systems  # noqa: E402

TOLERANCE = 1e-12


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
        with Pipeline(case.layers, plan, case.loss_fn, group=world, channel=channel, timeout_s=PATIENCE_S) as pipe:
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


@pytest.mark.parametrize("size", some([2, 4]))
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
    # The quick tier runs every third plan; the random ones below are unlike all of them.
    _assert_equal(shared_ranks(size).run(run_plans, jobs if WHOLE else jobs[::3]))


@pytest.mark.parametrize("size", [2, 4])
def test_random_irregular_plans_give_the_gradients_of_one_device(size):
    # On two ranks every kind of model runs, also in the quick tier.
    jobs = random_jobs(size, draws(200 // size, least=len(KINDS) if size == 2 else 4), first_seed=1000 * size)
    _assert_equal(shared_ranks(size).run(run_plans, jobs))
