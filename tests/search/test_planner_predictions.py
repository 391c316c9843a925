"""Multi-token prediction in plans for clusters: a path of its own where that runs, layers of the chain elsewhere."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.layer_graph import LayerGraph
from octopipe.costs.table import CostTable
from octopipe.models.spec import ModelSpec
from octopipe.models.zoo import preset
from octopipe.plans.file import load_plan
from octopipe.search.graphs.branches import placed
from octopipe.search.planner.commands import command_lines
from octopipe.search.planner.predictions import placement, planned_for
from octopipe.search.planner.pricing import Pricer
from octopipe.search.planner.splits import Split
from octopipe.search.planner.tuning import place_branches
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate


def small() -> ModelSpec:
    spec = preset("deepseek-v3").scaled(0.125)
    return replace(spec, layers=(*spec.layers[:7], *spec.layers[-2:]))


CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 256, "vocab_size": 4096,
    "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "num_nextn_predict_layers": 1, "rope_theta": 10000, "hidden_act": "silu",
}  # fmt: skip


def split(**sizes: int) -> Split:
    return Split(**{"tp": 1, "cp": 1, "ep": 1, "pp": 2, "dp": 1, "vp": 1, "micro_batch_size": 1, "zero": 0, **sizes})


def priced(spec: ModelSpec) -> Pricer:
    return Pricer(spec, Setup(gpu=gpu("h100"), seq=4096), 8)


def test_a_runtime_gets_the_form_that_it_runs() -> None:
    spec = small()
    assert planned_for(spec, "any").takes and planned_for(spec, "octopipe").takes
    assert planned_for(spec, "megatron") == spec
    with pytest.raises(OctoPipeError, match="runs chains of layers and has no placement"):
        planned_for(spec, "torch")
    with pytest.raises(OctoPipeError, match="has no multi-token prediction; leave --mtp out"):
        planned_for(preset("llama3-8b"), "any")


def test_the_path_is_planned_and_trained_with_its_own_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, target = tmp_path / "config.json", str(tmp_path / "plan.json")
    config.write_text(json.dumps(CONFIG))
    asked = ["--gpus", "4", "--global-batch", "8", "--pp", "4", "--micro-batch-size", "1", "--seq", "4096"]
    assert (
        main(["plan", str(config), *asked, "--budget", "2s", "--json", "-o", target, "--mtp", "--for", "octopipe"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    found, plan = told["multi_token_prediction"], load_plan(target)
    assert found["planned_as"] == "path" and plan.forks and plan.num_layers == 6 + 4
    assert [row["layer"] for row in found["prediction_layers"]] == [8]
    assert [row["layer"] for row in found["heads"]] == [7, 9]
    for row in (*found["prediction_layers"], *found["heads"]):
        held = {s.rank for s in plan.stages if s.first <= row["layer"] < s.stop}
        assert set(row["ranks"]) == held
    assert " --mtp " in told["commands"]["octopipe"]
    assert any("Multi-token prediction is a path of its own" in words for words in told["changes"])


def test_commands_say_who_runs_the_path() -> None:
    spec = small()
    path, chain = planned_for(spec, "any"), planned_for(spec, "megatron")
    found = priced(path).simulated(split(), "none")
    lines = command_lines(found, spec=path, model="config.json", plan_file="plan.json", runtime="any")
    assert "octopipe train config.json --plan plan.json --dp 1 --mtp" in lines["octopipe"]
    assert "plan with --for megatron, which places them before the head" in lines["megatron"]
    divided = priced(path).simulated(split(tp=2), "none")
    script = command_lines(divided, spec=path, model="config.json", plan_file="plan.json", runtime="any")["octopipe"]
    assert "octopipe.Pipeline(layers, octopipe.load_plan('plan.json'), losses)" in script and "tp 2" in script
    before = priced(chain).simulated(split(zero=1), "none")
    lines = command_lines(before, spec=chain, model="config.json", plan_file="plan.json", runtime="any")
    assert "--mtp-num-layers 1" in lines["megatron"] and "mL'" in lines["megatron"]
    assert "plan with --mtp" in lines["octopipe"]
    where = placement(before)
    assert where is not None and where["planned_as"] == "chain"
    assert placement(priced(spec.without_mtp()).simulated(split(), "none")) is None


def graph_costs(head_ms: float) -> CostTable:
    """Six layers, then a head and a prediction with a head of its own."""
    takes = ((), (0,), (1,), (2,), (3,), (4,), (5,), (0, 5), (7,))
    costs = CostTable.uniform(num_layers=9, p2p_ms=0.01, model="forked")
    slow = np.ones(9)
    slow[[6, 8]] = head_ms
    times = {name: getattr(costs, name) * slow for name in ("forward_ms", "input_ms", "weight_ms")}
    return costs.replace(graph=LayerGraph(takes=takes), boundary_bytes=np.ones(9), **times)


def test_branches_are_placed_as_well_as_every_single_move_allows() -> None:
    costs = graph_costs(3.0)
    plan = build_plan("1f1b", costs, 3, 6)
    better = placed(plan, costs, lambda: False)
    assert simulate(better, costs).step_ms < 0.95 * simulate(plan, costs).step_ms
    assert placed(plan, costs, lambda: True) == plan
    again = placed(better, costs, lambda: False)
    assert simulate(again, costs).step_ms == simulate(better, costs).step_ms


@pytest.mark.parametrize("form", ["path", "chain"])
def test_no_order_of_a_path_is_below_its_bound(form: str) -> None:
    spec = small().with_prediction_paths() if form == "path" else small()
    pricer = priced(spec)
    for pp, size in itertools.product((2, 4, 8), (1, 2)):
        one = split(pp=pp, micro_batch_size=size)
        found = pricer.simulated(one, "none")
        better = place_branches(pricer, found, lambda: False) if form == "path" else None
        assert pricer.bound_ms(one) <= min(c.step_ms for c in (found, better) if c is not None)


def test_unequal_nodes_divide_a_path_by_their_speed() -> None:
    spec = small().with_prediction_paths()
    nodes = (("h100", 1, 1), ("a100", 1, 1))
    base = Setup(gpu=gpu("h100"), seq=4096, nodes=nodes)
    found = Pricer(spec, base, 8).simulated(split(), "none")
    even = Pricer(spec, base, 8, layouts=False).simulated(split(), "none")
    assert found.plan is not None and found.plan.forks and found.how == "layout"
    assert found.step_ms < even.step_ms
