"""Searches for layers that fork, together with split heads, host memory and pairs of ops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Link
from octopipe.costs.layer_graph import LayerGraph
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.models.zoo import preset
from octopipe.plans.price import static_bytes
from octopipe.search.graphs.cut_branches import cut_plan, spread_heads
from octopipe.search.offload import finer
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate

HEADS = (6, 8)


def forked(head_ms: float, *, shared: tuple[tuple[tuple[int, ...], float], ...] = ((HEADS, 12.0),)) -> CostTable:
    """Six layers, then a head, and a prediction with a head of the same weight."""
    takes = ((), (0,), (1,), (2,), (3,), (4,), (5,), (0, 5), (7,))
    costs = CostTable.uniform(num_layers=9, p2p_ms=0.01, model="forked")
    slow, held = np.ones(9), np.full(9, 2.0)
    slow[list(HEADS)], held[list(HEADS)] = head_ms, 12.0
    times = {name: getattr(costs, name) * slow for name in ("forward_ms", "input_ms", "weight_ms")}
    graph = LayerGraph(takes=takes, shared=shared)
    return costs.replace(graph=graph, boundary_bytes=np.ones(9), static_bytes=held, **times)


def test_heads_that_are_most_of_the_work_are_cut_on_the_same_ranks() -> None:
    costs = forked(6.0)
    whole, cut = (tune(costs, 4, 6, iterations=60, seed=0, copies=False, cut_head=asked) for asked in (False, True))
    assert cut.step_ms < 0.9 * whole.step_ms and cut.step_ms >= cut.lower_bound_ms
    assert cut.plan.cut_heads == set(HEADS) and cut.plans.cuts_head
    assert cut.plan.shards()[6] == cut.plan.shards()[8]
    assert "the heads are cut into 4 shards" in cut.notes[0]


def test_heads_that_cost_nothing_stay_whole() -> None:
    found = tune(forked(0.01), 2, 4, iterations=100, seed=0, copies=False, cut_head=True)
    assert not found.plan.shards() and "no plan with a cut head was faster" in found.notes[0]


def test_parts_of_one_weight_count_once_on_a_rank() -> None:
    costs = forked(3.0)
    plan = cut_plan(build_plan("1f1b", costs, 3, 4), costs, HEADS, 3)
    assert plan is not None
    body = [sum(2.0 * s.num_layers for s in plan.stages if s.rank == r and not s.shard) for r in range(3)]
    assert static_bytes(plan, costs).tolist() == [held + 12.0 / 3 for held in body]


def test_spread_heads_have_the_work_of_whole_ones() -> None:
    costs = forked(3.0)
    spread = spread_heads(costs, HEADS, 4)
    assert spread.layer_ms.sum() == pytest.approx(costs.layer_ms.sum())
    assert spread.layer_ms[6] == costs.layer_ms[6] / 4 and spread.layer_ms[0] == costs.layer_ms[0]


def test_heads_that_are_tied_to_the_embedding_are_not_cut() -> None:
    costs = forked(3.0, shared=(((0, *HEADS), 2.0),))
    with pytest.raises(OctoPipeError, match="share their weight with the embedding"):
        tune(costs, 2, 4, iterations=50, copies=False, cut_head=True)


def test_a_loss_takes_the_shards_of_the_layer_before_it() -> None:
    costs = forked(3.0)
    plan = cut_plan(build_plan("1f1b", costs, 2, 2), costs, HEADS, 2)
    assert plan is not None
    losses = [s for s, stage in enumerate(plan.stages) if stage.first == stage.stop]
    assert [plan.stages[s].first for s in losses] == [7, 9]
    fewer = replace(plan, edges=(plan.edges[0][:-1],))
    assert fewer.problems() == [
        f"path 0: stages 7 and 8 are shards of layers [8, 9) but hand their output to different stages, [{losses[1]}] "
        "and []; give both the same"
    ]


def test_activations_of_a_path_go_to_host_memory_where_that_is_faster_than_recomputing() -> None:
    costs = forked(2.0, shared=()).replace(
        host_link=Link(latency_ms=0.01),
        static_bytes=np.zeros(9),
        activation_bytes=np.full(9, 10.0),
        stash_bytes=np.full(9, 5.0),
        rank_memory_bytes=(55.0,) * 3,
    )
    without, found = (tune(costs, 3, 8, iterations=60, seed=0, copies=False, offload=asked) for asked in (False, True))
    assert found.plan.offloads and found.plan.forks and found.step_ms < without.step_ms
    timeline = simulate(found.plan, costs)
    assert timeline.fits and timeline.step_ms == found.step_ms >= found.lower_bound_ms


def test_pairs_hide_the_exchange_of_experts_beside_a_path() -> None:
    spec = preset("deepseek-v3")
    spec = replace(spec, layers=(spec.layers[0], *spec.layers[4:11], *spec.layers[-2:])).with_prediction_paths()
    costs = resolve_costs(spec, pp=2, micro_batches=6, gpu="h100", ep=8, dp=8, seq=4096, memory_gib=2000.0)
    alone, found = (
        tune(prices, 2, 6, iterations=30, seed=0, copies=False, recompute=False)
        for prices in (costs.replace(segments=None), costs)
    )
    assert found.plan.pairs and found.plan.forks and not found.plan.problems()
    assert found.lower_bound_ms <= found.step_ms < simulate(alone.plan, costs).step_ms
    single = replace(found.plan, pairs=frozenset())
    assert found.step_ms == simulate(found.plan, costs).step_ms < simulate(single, costs).step_ms


def test_finer_stages_of_a_path_take_what_the_coarse_ones_took() -> None:
    costs = forked(2.0)
    plan = build_plan("1f1b", costs, 2, 4)
    fine = finer(plan, 1).check()
    assert all(stage.num_layers == 1 for stage in fine.stages) and fine.forks
    assert simulate(fine, costs).step_ms == pytest.approx(simulate(plan, costs).step_ms)
    assert costs.graph is not None
    number = {stage.first: s for s, stage in enumerate(fine.stages)}
    wanted = {(number[k], number[layer]) for layer, row in enumerate(costs.graph.takes) for k in row}
    assert set(fine.edges[0]) == wanted
