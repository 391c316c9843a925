"""A training run has the size of the profile or plan that it is given, and refuses the times of another model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from octopipe import tune
from octopipe.base.errors import OctoPipeError
from octopipe.cli.verbs.train_sizes import check_model, take_sizes
from octopipe.costs.mode import Mode
from octopipe.costs.profile_file import Profile
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.models.spec import Attention, Embedding, Head, ModelSpec
from octopipe.plans.file import load_plan, save_plan
from octopipe.plans.plan import Plan
from octopipe.runtime.measure.layer_sizes import layer_parameters
from octopipe.search.systems import build_plan


def spec(hidden: int = 16) -> ModelSpec:
    attention = Attention(hidden=hidden, heads=2, kv_heads=1, head_dim=8)
    ends = (Embedding(hidden=hidden, vocab=64), Head(hidden=hidden, vocab=64))
    return ModelSpec(name="tiny", layers=(ends[0], attention, attention, ends[1]))


def profile(*, tokens: int | None = 128, rows: int | None = 2, **about: Any) -> Profile:
    costs = CostTable.uniform(num_layers=4).replace(tokens_per_micro_batch=tokens, mode=Mode(precision="fp32"))
    recipe = {"device": "cpu"} | ({} if rows is None else {"micro_batch_size": rows})
    return Profile(costs=costs, about={"recipe": recipe, "parameters": layer_parameters(spec()), **about})


def flags(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"seq": None, "micro_batch_size": None, "lengths": None, "profile": "p.json", "plan": "plan.json"} | given
    )


def planned(tokens: int) -> Plan:
    plan = build_plan("1f1b", CostTable.uniform(num_layers=4), 2, 4)
    return plan.with_extra(cost_table={"tokens_per_micro_batch": tokens}, mode={"precision": "fp32", "graphs": False})


@pytest.mark.parametrize(
    "given, size",
    [
        ({}, (2, 64)),
        ({"seq": 64}, (2, 64)),
        ({"micro_batch_size": 2}, (2, 64)),
        ({"lengths": "lengths.txt"}, (None, None)),
    ],
)
def test_a_run_takes_its_profiles_size(given: dict[str, Any], size: tuple[int | None, int | None]) -> None:
    args = flags(**given)
    take_sizes(args, profile(), None)
    assert (args.micro_batch_size, args.seq) == size


@pytest.mark.parametrize("given", [{"seq": 32}, {"micro_batch_size": 1}, {"seq": 128, "micro_batch_size": 1}])
def test_another_size_than_the_profiles_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OctoPipeError, match=r"p\.json has the times of micro-batches of 2 x 64 tokens, and this"):
        take_sizes(flags(**given), profile(), None)


def test_a_plan_states_the_sequences_of_its_profiles_micro_batches(tmp_path: Path) -> None:
    profile().save(tmp_path / "p.json")
    costs = resolve_costs(tmp_path / "p.json", pp=2)
    assert costs.setup is not None and (costs.setup.micro_batch_size, costs.setup.seq) == (2, 64)
    assert costs.tokens_per_micro_batch == 128
    save_plan(tune(tmp_path / "p.json", 2, 4, iterations=20).plan, tmp_path / "plan.json")
    args = flags()
    take_sizes(args, None, load_plan(tmp_path / "plan.json"))
    assert (args.micro_batch_size, args.seq) == (2, 64)


def test_a_profile_without_rows_states_tokens_alone() -> None:
    args = flags(seq=32, micro_batch_size=4)
    take_sizes(args, profile(rows=None), None)
    take_sizes(args, profile(tokens=None), None)
    with pytest.raises(OctoPipeError, match="micro-batches of 128 tokens, and this run has 1 x 32"):
        take_sizes(flags(seq=32), profile(rows=None), None)


def test_a_run_takes_the_size_of_the_times_in_its_plan_and_says_where_it_has_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = flags()
    take_sizes(args, None, planned(96))
    assert (args.micro_batch_size, args.seq) == (1, 96) and not capsys.readouterr().err
    take_sizes(flags(seq=32), None, planned(96))
    assert "plan.json has the times of micro-batches of 96 tokens, and this run has 1 x 32" in capsys.readouterr().err
    args = flags()
    take_sizes(args, None, build_plan("1f1b", CostTable.uniform(num_layers=4), 2, 4))
    assert (args.micro_batch_size, args.seq) == (None, None)


def test_times_of_another_model_or_device_are_refused() -> None:
    check_model(profile(), spec(), "p.json", "cpu")
    check_model(profile(parameters=None), spec(32), "p.json", "cpu")  # an older profile does not state parameters
    with pytest.raises(OctoPipeError, match=r"layer 0 has 1,024 parameters there and 2,048 in tiny; profile"):
        check_model(profile(), spec(32), "p.json", "cpu")
    with pytest.raises(OctoPipeError, match="measured with --device cpu, and this run has --device cuda"):
        check_model(profile(), spec(), "p.json", "cuda")
    with pytest.raises(OctoPipeError, match="measured on transformers' layers, and this run has octopipe's own layers"):
        check_model(profile(model_code="transformers' layers"), spec(), "p.json", "cpu")
    fewer = Profile(costs=CostTable.uniform(num_layers=3))
    with pytest.raises(OctoPipeError, match=r"p\.json has 3 layers, tiny has 4"):
        check_model(fewer, spec(), "p.json", "cpu")
