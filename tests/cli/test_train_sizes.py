"""A training run has the size of the profile or plan that it is given, and refuses the times of another model."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from verbs import run, simulated

from octopipe import tune
from octopipe.base.errors import OctoPipeError
from octopipe.cli.verbs.runnable import frozen_layers
from octopipe.cli.verbs.train_sizes import check_model, take_sizes, taken_inputs
from octopipe.costs.mode import Mode
from octopipe.costs.profile_file import Profile, load_profile
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.huggingface.inputs import InputForm
from octopipe.models.spec import Attention, Embedding, Head, ModelSpec
from octopipe.models.zoo import preset
from octopipe.plans.file import load_plan, save_plan
from octopipe.plans.plan import Plan
from octopipe.runtime.measure.layer_sizes import layer_parameters
from octopipe.runtime.training.job import TrainJob
from octopipe.runtime.training.run_parts import item_factor, plan_of, sized
from octopipe.search.systems import build_plan


def spec(hidden: int = 16) -> ModelSpec:
    attention = Attention(hidden=hidden, heads=2, kv_heads=1, head_dim=8)
    ends = (Embedding(hidden=hidden, vocab=64), Head(hidden=hidden, vocab=64))
    return ModelSpec(name="tiny", layers=(ends[0], attention, attention, ends[1]))


def profile(*, tokens: int | None = 128, rows: int | None = 2, **about: Any) -> Profile:
    costs = CostTable.uniform(num_layers=4).replace(tokens_per_micro_batch=tokens, mode=Mode(precision="fp32"))
    recipe = {"device": "cpu"} | ({} if rows is None else {"micro_batch_size": rows})
    return Profile(costs=costs, about={"recipe": recipe, "parameters": layer_parameters(spec()), **about})


def measured_with(folder: Path, **recipe: Any) -> Profile:
    """A profile that was written to a file and read again, with more in its recipe."""
    known = {"device": "cpu", "micro_batch_size": 2, **recipe}
    profile(recipe=known).save(folder / "p.json")
    return load_profile(folder / "p.json")


def flags(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"seq": None, "micro_batch_size": None, "lengths": None, "profile": "p.json", "plan": "plan.json"}
        | {
            "images": None,
            "recordings": None,
            "model": "llama3-8b",
            "encoder_seq": None,
            "frozen": None,
            "offload_optimizer": None,
        }
        | given
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
    take_sizes(args := flags(micro_batch_size=4), None, load_plan(tmp_path / "plan.json"))
    assert (args.micro_batch_size, args.seq) == (4, 64)  # the length of a sequence does not follow from their number


def test_a_global_batch_counts_the_sequences_of_a_profiles_micro_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile().save(tmp_path / "p.json")
    answer = simulated(capsys, str(tmp_path / "p.json"), "--pp", "2", "--global-batch", "8")
    assert answer["micro_batches"] == 4 and answer["setup"]["global_batch"] == 8
    code, _, err = run(capsys, "simulate", str(tmp_path / "p.json"), "--pp", "2", "--global-batch", "7")
    assert code == 2 and "global batch 7 is not a multiple of micro-batch size 2" in err


def test_the_plan_of_a_run_states_the_runs_size(tmp_path: Path) -> None:
    job = TrainJob(spec=spec(), nproc=2, seq=64, micro_batch_size=2, micro_batches=4, frozen=(0,))
    save_plan(plan_of(job, sized(job, profile(rows=None)), lambda _: None), tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    args = flags()
    take_sizes(args, None, plan)
    taken_inputs(args, plan, None)
    assert (args.micro_batch_size, args.seq, args.frozen) == (2, 64, "0")
    longer = TrainJob(spec=spec(), nproc=2, seq=128, micro_batch_size=2)
    assert sized(longer, profile(rows=None)).costs.setup is None  # times of other micro-batches than the run's


def test_a_run_takes_encoder_inputs_and_frozen_layers_from_its_profile_or_plan(tmp_path: Path) -> None:
    measured = measured_with(tmp_path, images=2.0, encoder_seq=16, frozen="0-1")
    args = flags()
    assert taken_inputs(args, None, measured) == {"images": (2.0,), "recordings": (), "encoder_seq": 16}
    assert args.frozen == "0-1"
    args = flags(images=3.0, frozen="2")
    assert taken_inputs(args, None, measured)["images"] == (3.0,) and args.frozen == "2"
    save_plan(tune(tmp_path / "p.json", 2, 4, iterations=20).plan, tmp_path / "plan.json")
    args = flags()
    assert taken_inputs(args, load_plan(tmp_path / "plan.json"), None) == {
        "images": (2.0,),
        "recordings": (),
        "encoder_seq": 16,
    }
    assert args.frozen == "0-1"


def test_tied_layers_are_frozen_together(tmp_path: Path) -> None:
    whole = preset("llama3-8b").scaled(0.02, num_layers=4)
    tied = dataclasses.replace(whole, layers=(*whole.layers[:-1], dataclasses.replace(whole.layers[-1], tied=True)))
    last = tied.num_layers - 1
    for model, asked, frozen in ((whole, "0-2", (0, 1, 2)), (tied, "1-2", (1, 2)), (tied, f"0,{last}", (0, last))):
        assert frozen_layers(model, asked) == frozen
    for asked, words in (("0-2", f"layer 0 is tied to layer {last}"), (f"{last}", f"layer {last} is tied to layer 0")):
        with pytest.raises(
            OctoPipeError, match=rf"^{words} \(--frozen names only the first\): freeze both, or neither$"
        ):
            frozen_layers(tied, asked)


def test_times_with_other_frozen_layers_or_encoder_inputs_are_refused(tmp_path: Path) -> None:
    measured = measured_with(tmp_path, frozen="0-1")
    check_model(measured, spec(), "p.json", "cpu", frozen=(0, 1))
    with pytest.raises(OctoPipeError, match="with layer 1 frozen, and this run trains it; give its --frozen"):
        check_model(measured, spec(), "p.json", "cpu", frozen=(0,))
    with pytest.raises(OctoPipeError, match="with layer 0 trained, and this run freezes it"):
        check_model(profile(), spec(), "p.json", "cpu", frozen=(0,))

    class Towers(ModelSpec):
        inputs = InputForm(num_tower_layers=2, positions=32, images=(3.0,))

    towers = Towers(name="tiny", layers=spec().layers)
    check_model(measured_with(tmp_path, images=2.0, encoder_seq=32), towers, "p.json", "cpu")
    with pytest.raises(OctoPipeError, match="with --encoder-seq 16, and this run has 32; leave"):
        check_model(measured_with(tmp_path, encoder_seq=16), towers, "p.json", "cpu")
    with pytest.raises(OctoPipeError, match="was measured without images, and this run has some"):
        check_model(measured_with(tmp_path, images=0.0), towers, "p.json", "cpu")


def test_times_of_a_tower_are_relative_to_the_images_that_a_profile_measured(tmp_path: Path) -> None:
    job = TrainJob(spec=spec(), nproc=2, seq=64, micro_batch_size=2, micro_batches=4)

    class Asked:
        inputs = InputForm(num_tower_layers=2, images=(3.0,))
        micro_batch_size, num_micro_batches, spec = 2, 4, job.spec

    assert item_factor(Asked()) is None  # type: ignore[arg-type]  # measured by the run itself
    factor = item_factor(Asked(), measured_with(tmp_path, images=2.0))  # type: ignore[arg-type]
    assert factor.tolist() == [[1.5, 1.5, 1.0, 1.0]] * 4


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
