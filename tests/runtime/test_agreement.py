"""All ranks run one program: what differs is mended or named."""

from __future__ import annotations

import random

import pytest
from effort import draws
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
from executor_models import NUM_LAYERS, make  # noqa: E402
from random_plans import random_plan  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.base.errors import DeadlockError, OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402
from octopipe.simulation.lowering import lower  # noqa: E402


def _costs(rank, num_layers=NUM_LAYERS):
    """Every rank has measured something else."""
    rng = random.Random(rank)
    return CostTable.uniform(num_layers=num_layers, forward_ms=1.0 + 0.5 * rank, p2p_ms=0.1 + 3 * rng.random() * rank)


def own_costs(world, jobs):
    out = []
    for plan, channel in jobs:
        case = make("plain", plan.num_micro_batches)
        expected, _ = plain_gradients(*case)
        costs = _costs(world.rank)
        mine = lower(plan, costs, channel=channel)
        with Pipeline(
            case.layers,
            plan,
            case.loss_fn,
            costs=costs,
            channel=channel,
            group=world,
            transport="strict",
            timeout_s=PATIENCE_S,
        ) as pipe:
            pipe.step(case.inputs, case.targets)
        lists = [tuple(map(str, pipe.program.instructions(r))) for r in range(world.size)]
        other = [tuple(map(str, mine.instructions(r))) for r in range(world.size)] != lists
        out.append((worst_error(pipe, expected), lists, other))
    return out


def test_ranks_with_other_costs_run_the_first_ranks_program(two):
    rng = random.Random(3)
    plans = [
        random_plan(rng, num_ranks=2, num_layers=NUM_LAYERS, num_micro_batches=4) for _ in range(draws(6, least=3))
    ]
    jobs = [(plan, channel) for plan in plans for channel in ("pair", "single")]
    first, second = two.run(own_costs, jobs)
    for (error, lists, _), (more, theirs, _) in zip(first, second):
        assert lists == theirs
        assert max(error, more) <= 1e-12
    assert any(other for *_, other in second)  # without that, the second rank would have run another one


def refused(world, how):
    case = make("plain", 4)
    plan = build_plan("1f1b", _costs(0), 2, 4, split_backward=how == "orders" and world.rank == 1)
    given, channel = plan, "directed"
    if how == "channel":
        channel = ("directed", "single")[world.rank]
    if how == "program":
        rng = random.Random(3)
        for _ in range(50):
            given = random_plan(rng, num_ranks=2, num_layers=NUM_LAYERS, num_micro_batches=4)
            a, b = (lower(given, _costs(r), channel="single") for r in range(2))
            if list(a.instr_id) != list(b.instr_id):
                given = (a, b)[world.rank]
                break
    if how == "kind":
        given = plan if world.rank else lower(plan, _costs(0))
    try:
        Pipeline(case.layers, given, case.loss_fn, group=world, channel=channel, timeout_s=PATIENCE_S)
    except OctoPipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("orders", "rank 1 runs another plan than rank 0: they differ in the order of rank 0; give all ranks"),
        ("channel", "rank 1 has the channel model 'single', rank 0 'directed'"),
        ("program", "rank 1 runs another program than rank 0: instruction "),
        ("kind", "rank 1 was given a plan, rank 0 a program"),
    ],
)
def test_what_differs_is_named_on_every_rank(how, words, two):
    for text in two.run(refused, how):
        assert words in text
        assert "\n" not in text


def deadlocking(world):
    from test_transports import _crossing_plan

    plan = _crossing_plan()
    naive = lower(plan, CostTable.uniform(num_layers=2), channel="blocking", naive=True, check=False)
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    try:
        Pipeline(layers, naive, lambda o, t: o.mean(), group=world, timeout_s=PATIENCE_S)
    except DeadlockError as error:
        return str(error)
    return ""


def test_a_program_that_deadlocks_is_refused_before_it_runs(two):
    for text in two.run(deadlocking):
        assert text.startswith("deadlock under the blocking channel model: ")
