"""The compiled rule of timing against `Plan.predecessor_table`, and directed queues by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from random_plans import random_plan

from octopipe.plans.plan import R, route_neighbours
from octopipe.simulation.timing import NEVER, begin_paths, handed_over, note_run, pass_on, start_of


def test_results_wait_for_the_queue_of_their_direction() -> None:
    channel = np.zeros((2, 2))
    assert handed_over(channel, 0, 0, 5.0, 3.0) == 5.0  # stays on its rank
    assert handed_over(channel, 0, 1, 5.0, 3.0) == 8.0
    assert handed_over(channel, 0, 1, 6.0, 3.0) == 11.0  # behind the one before it
    assert handed_over(channel, 1, 0, 6.0, 3.0) == 9.0  # the other direction is free
    assert channel.tolist() == [[0.0, 11.0], [9.0, 0.0]]


@pytest.mark.parametrize("seed", range(30))
def test_an_op_may_start_once_all_that_the_plan_says_it_needs_has_run(seed: int) -> None:
    """Ops run in a random order that the dependencies allow; before each of them every op of the plan is looked at."""
    dice = random.Random(seed)
    plan = random_plan(
        dice, num_ranks=dice.randint(1, 4), num_layers=dice.randint(2, 6), num_micro_batches=dice.randint(1, 4)
    )
    table, needs = plan.table(), plan.predecessor_table()
    before, after = route_neighbours(plan)
    route = np.asarray(plan.route_of_micro_batch, np.int32)
    rank = np.array([s.rank for s in plan.stages], np.int32)
    hops = np.zeros((len(plan.stages), plan.num_micro_batches))
    arrived, channel = np.empty((2, *hops.shape)), np.zeros((plan.num_ranks, plan.num_ranks))
    begin_paths(arrived, before, route)
    ops = [(int(table.kind[i]), int(table.stage[i]), int(table.micro_batch[i])) for i in range(table.stage.size)]
    drops = {(s, m) for kind, s, m in ops if kind == R}
    ran: set[int] = set()
    while len(ran) < len(ops):
        ready = []
        for number, (kind, s, m) in enumerate(ops):
            if number in ran:
                continue
            missing = {int(p) for p in needs[number] if p >= 0} - ran
            at = start_of(arrived, kind, s, m, 1.0)
            assert (NEVER < at < np.inf) == (not missing), (plan.op(number), missing)
            if at == NEVER:
                assert any(ops[p][1:] == (s, m) for p in missing)  # of its own stage, so on its own rank
            if not missing:
                ready.append(number)
        number = dice.choice(ready)
        kind, s, m = ops[number]
        note_run(arrived, kind, s, m, (s, m) in drops)
        pass_on(arrived, kind, s, m, before, after, route, rank, channel, 1.0, hops, hops)
        ran.add(number)
