"""Analytic costs of multi-token prediction as a path of its own, beside those of the layer that Megatron-LM has."""

from __future__ import annotations

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.resolve import resolve_costs, resolve_spec
from octopipe.models.spec import ModelSpec
from octopipe.plans.file import load_plan
from octopipe.plans.setting import costs_of_plan

SETTING = {"pp": 4, "tp": 8, "seq": 2048}


def spec(name: str = "deepseek-v3") -> ModelSpec:
    found = resolve_spec(name)
    assert found is not None
    return found


def test_the_path_has_the_work_of_the_layer_and_holds_the_embedding_once() -> None:
    chain, forked = resolve_costs(spec(), **SETTING), resolve_costs(spec().with_prediction_paths(), **SETTING)
    alone, last = resolve_costs(spec().without_mtp(), **SETTING), chain.num_layers - 1
    assert forked.symbols == chain.symbols[: last - 1] + "LPL" and forked.graph is not None
    assert forked.graph.takes[-2:] == ((0, last - 2), (last,)) and forked.graph.ends == (last - 1, last + 1)
    for name in ("forward_ms", "input_ms", "weight_ms"):
        mine, theirs = getattr(forked, name), getattr(chain, name)
        assert np.array_equal(mine[: last - 1], theirs[: last - 1]) and mine[last] == theirs[last - 1]
        assert mine[last - 1] == getattr(alone, name)[-1] and mine[last + 1] == pytest.approx(mine[last - 1], rel=0.01)
    ((heads, nbytes),) = forked.graph.shared
    assert heads == (last - 1, last + 1) and 0 < nbytes <= forked.static_bytes[last + 1]
    # The layer holds the table of the embedding too; on the path, embeddings come from the embedding.
    assert chain.static_bytes[last - 1] - forked.static_bytes[last] == pytest.approx(nbytes, rel=0.01)
    assert forked.boundary_bytes[last] == chain.boundary_bytes[last - 1] / 2


def test_a_model_without_predictions_has_no_path_for_them() -> None:
    assert spec("llama3-8b").takes == () == spec().takes
    with pytest.raises(OctoPipeError, match="has no multi-token prediction; leave --mtp out"):
        spec("llama3-8b").with_prediction_paths()


def test_a_plan_of_a_preset_keeps_the_costs_of_its_paths(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    plan = f"{tmp_path}/plan.json"
    asked = ["--pp", "4", "--tp", "8", "--micro-batches", "4", "--memory-gib", "2000", "--iterations", "20", "-o", plan]
    assert main(["tune", "deepseek-v3", "--mtp", *asked]) == 0
    capsys.readouterr()
    costs = costs_of_plan(load_plan(plan))
    assert costs.graph is not None and costs.digest() == load_plan(plan).extra["costs"]
    assert main(["simulate", "--plan", plan]) == 0
    assert "path by rank" in capsys.readouterr().out
