"""Fidelity and adaptation, against differences put there on purpose and a run that never switched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import PATIENCE_S

from octopipe.base.errors import OctoPipeError
from octopipe.costs.profile_file import Profile
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.models.zoo import preset
from octopipe.runtime.measure.trial import Workload
from octopipe.runtime.nn import cross_entropy
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.ranks.launch import by_rank, run_ranks
from octopipe.runtime.ranks.world import World
from octopipe.runtime.training.adapt import Adapter, corrected, switch
from octopipe.search.systems import build_plan
from octopipe.simulation.fidelity import compare, hidden
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Spans, Timeline, Transfers


def hybrid() -> CostTable:
    return resolve_costs("nemotron-h-8b", pp=4, tp=4)


def test_equal_timelines_have_no_error() -> None:
    costs = hybrid()
    plan = build_plan("zb-v", costs, 4, 8)
    a = simulate(plan, costs)
    found = compare(a, replace(a, measured=True), measured_bytes=a.peak_bytes.tolist())
    assert found.step_error == 0 and found.op_error == 0 and set(found.kind_error.values()) == {0.0}
    assert found.mean_memory_error == pytest.approx(0) and set(found.busy_error) == {0.0}


def test_errors_are_where_they_were_put() -> None:
    costs = hybrid()
    plan = build_plan("1f1b", costs, 4, 8, split_backward=True)
    predicted = simulate(plan, costs)
    slow_w = simulate(plan, costs.replace(weight_ms=1.25 * costs.weight_ms))
    found = compare(predicted, slow_w, measured_bytes=[2 * b for b in predicted.peak_bytes])
    assert found.kind_error["W"] == pytest.approx(-0.2)
    assert found.kind_error["F"] == pytest.approx(0.0) and found.kind_error["I"] == pytest.approx(0.0)
    assert found.memory_error == pytest.approx((-0.5,) * 4)
    assert all("W" in w.op for w in found.worst)
    slow_rank = simulate(plan, costs.replace(rank_slowdown=(1, 1, 2, 1)))
    assert compare(predicted, slow_rank).busy_error == pytest.approx((0, 0, -0.5, 0))


def test_timelines_of_two_plans_are_not_compared() -> None:
    costs = hybrid()
    a, b = (simulate(build_plan(s, costs, 4, 8), costs) for s in ("1f1b", "interleaved"))
    with pytest.raises(OctoPipeError, match="different plans"):
        compare(a, b)


def _two_ranks(transfer: tuple[float, float], receiver: tuple[float, float]) -> Timeline:
    """Rank 0 computes from 0 to 4 and from 4 to 8, rank 1 in `receiver`; one transfer of rank 0's first op."""
    starts, ends = [0.0, 4.0, receiver[0], 9.0], [4.0, 8.0, receiver[1], 10.0]
    ranks = np.array([0, 0, 1, 1], np.int32)
    zeros = np.zeros(4, np.int32)
    spans = Spans(ranks, ranks, zeros, np.array([0, 1, 7, 0], np.int32), np.array(starts), np.array(ends))
    ends_of = [np.array([v], np.int32) for v in (0, 3, 0, 1)]
    times = [np.array([v]) for v in (*transfer, 8.0)]
    return Timeline(num_ranks=2, spans=spans, transfers=Transfers(*ends_of, *times))


@pytest.mark.parametrize(
    ("transfer", "receiver", "want"),
    [
        ((4.0, 6.0), (3.0, 7.0), (1.0, 1.0, 1.0)),
        ((4.0, 6.0), (0.0, 5.0), (0.5, 1.0, 0.75)),
        ((4.0, 6.0), (0.0, 3.0), (0.5, 0.5, 0.5)),
        ((4.0, 10.0), (0.0, 3.0), (0.0, 1.0, 5 / 12)),
    ],
)
def test_overlap_is_counted_whole_in_part_and_by_time(transfer, receiver, want) -> None:
    assert hidden(_two_ranks(transfer, receiver)) == pytest.approx(want)


def test_overlap_agrees_with_the_timeline_on_whole_transfers() -> None:
    costs = hybrid()
    for system in ("1f1b", "interleaved", "zb-v"):
        timeline = simulate(build_plan(system, costs, 4, 8), costs)
        seen, own = hidden(timeline, gap_ms=0.0), timeline.overlap
        assert seen.wholly == pytest.approx(own.rate)
        assert seen.time == pytest.approx(own.hidden_ms / own.total_ms)
        assert seen.partly >= seen.wholly


def test_a_mispriced_layer_kind_is_found_out() -> None:
    costs = hybrid()
    mamba = np.array([s == "M" for s in costs.symbols])
    true = costs.replace(input_ms=np.where(mamba, 1.7, 1.0) * costs.input_ms)
    plan = build_plan("interleaved", costs, 4, 8, split_backward=True)
    seen = corrected(costs, plan, simulate(plan, true))
    assert np.allclose(seen.input_ms[mamba] / costs.input_ms[mamba], 1.7, rtol=0.12)
    assert np.allclose(seen.forward_ms, costs.forward_ms, rtol=0.12)
    assert abs(simulate(plan, seen).makespan_ms / simulate(plan, true).makespan_ms - 1) < 0.02


def test_a_slow_rank_is_found_out() -> None:
    costs = hybrid()
    true = costs.replace(rank_slowdown=(1.0, 1.5, 1.0, 1.0))
    plan = build_plan("interleaved", costs, 4, 8, split_backward=True)
    seen = corrected(costs, plan, simulate(plan, true))
    slow = np.array(seen.rank_slowdown)
    assert slow[1] / slow[[0, 2, 3]].mean() == pytest.approx(1.5, rel=0.1)
    assert abs(simulate(plan, seen).makespan_ms / simulate(plan, true).makespan_ms - 1) < 0.02


def test_the_adapter_switches_only_when_it_pays() -> None:
    costs = CostTable.uniform(num_layers=8, forward_ms=2.0, input_ms=2.0, weight_ms=2.0)
    plan = build_plan("zb-v", costs, 2, 8)
    adapter = Adapter(Profile(costs=costs), budget_s=1.5, threshold=0.2, blend=1.0)
    assert adapter.propose(plan) is None
    true = costs.replace(rank_slowdown=(1.0, 3.0))
    adapter.observe(plan, simulate(plan, true))
    better = adapter.propose(plan)
    assert better is not None and adapter.last_gain > 0.2
    assert simulate(better, true).makespan_ms < simulate(plan, true).makespan_ms / 1.2


def _train_twice(rank: int, nproc: int, payload: object) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    world = World.make(None, None, None)
    return [_train(world, nproc, change) for change in (False, True)]


def _train(world: World, nproc: int, change: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    work = Workload(spec=preset("nemotron-h-8b").scaled(0.01, num_layers=6), tokens=16, dtype="float64")
    device = torch.device("cpu")
    costs = CostTable.uniform(num_layers=6)
    plans = [build_plan(name, costs, nproc, 4) for name in ("1f1b", "zb-v")]

    def make_pipe(plan):
        return Pipeline(work.layers(device), plan, cross_entropy, group=world, device=device, timeout_s=PATIENCE_S)

    def make_optimizer(pipe):
        return torch.optim.AdamW(pipe.parameters(), lr=1e-3)

    pipe = make_pipe(plans[0])
    optimizer = make_optimizer(pipe)
    losses = []
    for step in range(4):
        if change and step in (1, 3):
            pipe, optimizer = switch(
                pipe, optimizer, plans[(step == 1) * 1], make_pipe=make_pipe, make_optimizer=make_optimizer
            )
        now = replace(work, seed=step)
        losses.append(float(pipe.step(now.batch(device, 4), now.targets(device, 4))))
        optimizer.step()
        optimizer.zero_grad()
    state = {k: v.clone() for k, v in pipe.state_dict().items()}
    pipe.close()
    return losses, state


def test_switching_plans_does_not_change_the_loss_curve() -> None:
    ((straight, a), (switched, c)), ((_, b), (_, d)) = run_ranks(
        by_rank(_train_twice), 2, threads=1, timeout_s=PATIENCE_S
    )
    assert switched == pytest.approx(straight, rel=1e-12)
    whole, moved = {**a, **b}, {**c, **d}
    assert whole.keys() == moved.keys()
    assert all(torch.allclose(whole[k], moved[k], rtol=1e-9, atol=1e-12) for k in whole)
