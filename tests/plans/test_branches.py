"""Layers that fork and join: plans of their chain become plans of their graph, with the costs and bounds of it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Network
from octopipe.costs.layer_graph import LayerGraph
from octopipe.costs.profile_file import Profile, profile_from_object
from octopipe.costs.table import CostTable
from octopipe.costs.table_file import costs_from_record, record_of
from octopipe.plans.branches import along_graph, chain_of, check_connections
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.plans.price import stage_memory, static_bytes
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.bounds.bounds import lower_bound
from octopipe.simulation.lowering import lower, prove_deadlock_free
from octopipe.simulation.simulator import simulate

TRUNK = 6
"""Embedding and blocks; behind them the head, a prediction layer and its head."""
HEAD, LAYER, SECOND = TRUNK, TRUNK + 1, TRUNK + 2


def graph(shared: float = 0.0) -> LayerGraph:
    takes = [(), *((k,) for k in range(TRUNK)), (0, TRUNK - 1), (LAYER,)]
    return LayerGraph(takes=tuple(takes), shared=(((HEAD, SECOND), shared),) if shared else ())


def costs(shared: float = 0.0) -> CostTable:
    times = np.array([0.5, *[1.0] * (TRUNK - 1), 2.0, 1.5, 2.0])
    sizes = np.array([*[1e6] * TRUNK, 0.0, 1e6, 0.0])
    return CostTable(
        model="predicting", symbols="ETTTTTLPL", forward_ms=times, input_ms=times, weight_ms=times,
        activation_bytes=np.full(9, 1e6), boundary_bytes=sizes, static_bytes=np.full(9, 8e6),
        gradient_bytes=np.full(9, 4e6), network=Network.constant(0.25), graph=graph(shared),
    )  # fmt: skip


def one_stage_each(ranks: tuple[int, ...]) -> Plan:
    """A chain of three stages: the trunk, the last block with both heads, nothing else divided."""
    stages = (Stage(first=0, stop=5, rank=ranks[0]), Stage(first=5, stop=9, rank=ranks[1]))
    orders = ((Op(0, "F", 0), Op(0, "B", 0)), (Op(1, "F", 0), Op(1, "B", 0)))
    return Plan(num_layers=9, num_ranks=2, num_micro_batches=1, stages=stages, orders=orders)


def test_a_stage_is_divided_where_the_path_forks_and_its_ops_with_it() -> None:
    plan = along_graph(one_stage_each((0, 1)), graph())
    assert plan.partition == (1, 4, 1, 1, 2)
    assert plan.edges == (((0, 1), (1, 2), (2, 3), (0, 4), (2, 4)),)
    assert [str(op) for op in plan.orders[0]] == ["0F0", "1F0", "1B0", "0B0"]
    assert [str(op) for op in plan.orders[1]] == ["2F0", "3F0", "4F0", "4B0", "3B0", "2B0"]
    assert along_graph(plan, graph()) is plan


def test_stages_that_recompute_are_divided_with_their_recomputation() -> None:
    chain = one_stage_each((0, 1))
    stages = (chain.stages[0], Stage(first=5, stop=9, rank=1, recompute=(5, 7)))
    orders = (chain.orders[0], (Op(1, "F", 0), Op(1, "R", 0), Op(1, "B", 0)))
    plan = along_graph(Plan(num_layers=9, num_ranks=2, num_micro_batches=1, stages=stages, orders=orders), graph())
    assert [stage.recompute for stage in plan.stages] == [False, False, (5,), False, (7,)]
    assert [str(op) for op in plan.orders[1]] == ["2F0", "3F0", "4F0", "2R0", "4R0", "4B0", "3B0", "2B0"]


def test_a_recomputed_prediction_layer_keeps_what_it_takes_from_both_sides() -> None:
    plan = along_graph(one_stage_each((0, 1)), graph())
    found = costs().replace(activation_bytes=np.full(9, 9e6))
    stages = (*plan.stages[:4], Stage(first=LAYER, stop=9, rank=1, recompute=True))
    kept = stage_memory(replace(plan, stages=stages), found).after_forward[4, 0]
    assert kept == 2e6  # the embedding's output and the last block's


@pytest.mark.parametrize("system", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dapple", "mario"])
def test_published_systems_run_along_the_graph_no_slower_than_along_the_chain(system: str) -> None:
    found = costs()
    plan = build_plan(system, found, 3, 6)
    assert plan.forks
    prove_deadlock_free(lower(plan, found))
    chain = build_plan(system, found.as_chain(), 3, 6)
    # Along the chain a head hands on what the next layer takes; along the graph the embedding sends to two ranks, which
    # share its link.
    slack = 6 * 2 * 0.25
    assert simulate(plan, found).step_ms <= simulate(chain, found.as_chain()).step_ms + slack


def test_the_search_places_the_branches_and_is_not_below_the_bound() -> None:
    found = costs()
    result = tune(found, 3, 4, iterations=300, seed=1, copies=False)
    assert result.plan.forks and simulate(result.plan, found).step_ms == pytest.approx(result.step_ms)
    assert result.lower_bound_ms <= result.step_ms
    for system in ("1f1b", "zb-h1", "dapple"):
        assert result.step_ms <= simulate(build_plan(system, found, 3, 4), found).step_ms
    again = tune(found, 3, 4, iterations=300, seed=1, copies=False)
    assert again.plan.orders == result.plan.orders and again.plan.stages == result.plan.stages


def test_the_bound_counts_all_work_and_one_path() -> None:
    found = costs()
    every = float(found.layer_ms.sum())
    assert lower_bound(found, 2, 6).ms >= 6 * every / 2
    one = lower_bound(found, 4, 1).ms  # the way to the second head and back
    through = found.forward_ms[[*range(TRUNK), LAYER, SECOND]]
    assert one >= 2 * float(through.sum())
    assert one <= tune(found, 4, 1, iterations=50, copies=False).step_ms


def test_a_weight_that_two_heads_share_is_held_once_by_a_rank_with_both() -> None:
    shared = costs(shared=5e6)
    together, apart = (along_graph(one_stage_each((0, 1)), graph()) for _ in range(2))
    stages = tuple(Stage(first=s.first, stop=s.stop, rank=0 if s.first == HEAD else s.rank) for s in apart.stages)
    orders = tuple(tuple(Op.parse(op) for op in row) for row in (
        ["0F0", "1F0", "3F0", "3B0", "1B0", "0B0"], ["2F0", "4F0", "4B0", "2B0"],
    ))  # fmt: skip
    apart = Plan(
        num_layers=9, num_ranks=2, num_micro_batches=1, stages=stages, orders=orders, routes=apart.routes,
        edges=apart.edges,
    ).check()  # fmt: skip
    assert static_bytes(together, shared).sum() == pytest.approx(static_bytes(together, costs()).sum() - 5e6)
    assert static_bytes(apart, shared).sum() == pytest.approx(static_bytes(apart, costs()).sum())
    names = {extra.name for extra in simulate(apart, shared).extras}
    assert "reduce shared weights" in names
    assert "reduce shared weights" not in {extra.name for extra in simulate(together, shared).extras}


def test_the_graph_is_kept_by_profiles_and_stored_costs() -> None:
    found = costs(shared=float(1 << 30))
    profile = Profile(costs=found)
    read = profile_from_object(json.loads(profile.to_json()), name="predicting").costs
    assert read.graph == found.graph
    assert costs_from_record(record_of(found)).digest() == found.digest() != found.replace(graph=None).digest()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], 'give an object with "takes"'),
        ({"takes": {"7": [9]}}, "give layers before it"),
        ({"takes": {"70": [0]}}, "give lists of layers of the model"),
        ({"takes": {"7": [0, 5]}, "shared": [{"layers": [6], "gib": 1}]}, "give two or more layers"),
        ({"takes": {"7": [0, 5]}, "shared": [{"layers": [6, 8]}]}, "objects with layers and gib"),
    ],
)
def test_a_graph_that_is_none_is_refused_in_one_line(value: object, why: str) -> None:
    file = json.loads(Profile(costs=costs()).to_json()) | {"graph": value}
    with pytest.raises(OctoPipeError, match=why) as error:
        profile_from_object(file, name="predicting")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("options", [{"target": "torch"}, {"target": "megatron"}])
def test_what_cannot_be_combined_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(OctoPipeError, match="layers that fork"):
        tune(costs(), 2, 2, budget_s=1, **options)  # type: ignore[arg-type]


def test_a_layer_that_runs_again_keeps_all_that_it_takes() -> None:
    """The prediction layer takes the embedding's output and the last block's; the layer before it hands on nothing."""
    large = costs().replace(activation_bytes=np.full(9, 5e6))
    found = Profile(costs=large, partial={1: large}).checkpointing([1, LAYER])
    for table in (found.costs, found.partial[1]):
        assert table.activation_bytes[[1, LAYER]].tolist() == [1e6, 2e6]
        assert table.workspace_bytes[[1, LAYER]].tolist() == [4e6, 3e6]


def with_edges(plan: Plan, *edges: tuple[int, int]) -> Plan:
    return replace(plan, edges=(edges,)).check()


def test_a_plan_that_forks_must_have_the_connections_of_the_layers() -> None:
    plan = along_graph(one_stage_each((0, 1)), graph())
    assert plan.edges == (((0, 1), (1, 2), (2, 3), (0, 4), (2, 4)),)
    assert along_graph(plan, graph()) is plan
    swapped = with_edges(plan, (0, 1), (1, 2), (2, 3), (2, 4), (0, 4))
    with pytest.raises(OctoPipeError, match=r"stage 4 takes its input from stages \[2, 0\], .* stages \[0, 2\]"):
        along_graph(swapped, graph())
    with pytest.raises(OctoPipeError, match=r"stage 2 takes its input from stages \[0, 1\]"):
        along_graph(with_edges(plan, (0, 1), (0, 2), (1, 2), (2, 3), (0, 4), (2, 4)), graph())
    with pytest.raises(OctoPipeError, match=r"stage 3 takes its input from stages \[1\], .* stages \[2\]"):
        check_connections(with_edges(plan, (0, 1), (1, 2), (1, 3), (3, 4), (2, 4)), chain_of(9))


def test_a_path_of_a_model_holds_all_of_its_layers_in_stages_that_begin_where_they_fork() -> None:
    plan = along_graph(one_stage_each((0, 1)), graph())
    orders = tuple(tuple(op for op in order if op.stage != 4) for order in plan.orders)
    less = replace(plan, orders=orders, routes=((0, 1, 2, 3), (0, 1, 2, 3, 4)), route_of_micro_batch=(0,))
    less = replace(less, edges=(((0, 1), (1, 2), (2, 3)), plan.edges[0])).check()
    with pytest.raises(OctoPipeError, match="path 0 leaves out layer 7"):
        along_graph(less, graph())
    merged = Plan(
        num_layers=9, num_ranks=1, num_micro_batches=1,
        stages=(Stage(first=0, stop=7, rank=0), Stage(first=7, stop=9, rank=0)),
        orders=((Op(0, "F", 0), Op(0, "B", 0), Op(1, "F", 0), Op(1, "B", 0)),), edges=((),),
    )  # fmt: skip
    with pytest.raises(OctoPipeError, match=r"stage 0 holds layers \[0, 7\), and layer 1 must begin a stage"):
        check_connections(replace(merged, routes=((0, 1),)), graph())


def test_every_part_of_a_cut_embedding_is_taken_in_any_order() -> None:
    stages = (*(Stage(first=0, stop=1, rank=0, shard=(k, 2)) for k in range(2)), Stage(first=1, stop=3, rank=0))
    ops = tuple(Op(s, kind, 0) for kind in "FB" for s in ((0, 1, 2) if kind == "F" else (2, 1, 0)))
    plan = Plan(num_layers=3, num_ranks=1, num_micro_batches=1, stages=stages, orders=(ops,), edges=(((1, 2), (0, 2)),))
    check_connections(plan.check(), chain_of(3))
    with pytest.raises(OctoPipeError, match=r"takes its input from stages \[1\]"):
        check_connections(replace(plan, edges=(((1, 2),),)), chain_of(3))
