"""A profile is run again with the layers that were measured, or refused if its recipe or its model was changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from octopipe.base.errors import OctoPipeError
from octopipe.cli.verbs.recorded import recorded_workload
from octopipe.cli.verbs.runnable import model_of, settings_of
from octopipe.costs.mode import Mode
from octopipe.costs.profile_file import Profile, load_profile
from octopipe.costs.table import CostTable
from octopipe.runtime.measure.layer_sizes import layer_parameters

RECIPE = {
    "model": "llama3-8b", "scale": 0.01, "num_layers": 4, "tokens": 16, "micro_batch_size": 2, "device": "cpu",
    "precision": "fp32", "dtype": None, "kernels": [], "own_layers": False, "graphs": False, "compile_scans": None,
}  # fmt: skip


def profile(folder: Path, spec: Any, **recipe: Any) -> Profile:
    costs = CostTable.uniform(num_layers=spec.num_layers)
    costs = costs.replace(tokens_per_micro_batch=32, mode=Mode(precision="fp32"))
    about = {
        "recipe": {**RECIPE, **recipe}, "parameters": layer_parameters(spec), "settings": settings_of(spec),
    }  # fmt: skip
    Profile(costs=costs, about=about).save(folder / "p.json")
    return load_profile(folder / "p.json")


def own() -> Any:
    return model_of("llama3-8b", scale=0.01, num_layers=4)


def test_a_recipe_is_run_as_it_was_measured(tmp_path: Path) -> None:
    work = recorded_workload(profile(tmp_path, own()), "p.json")
    assert (work.tokens, work.micro_batch_size, work.precision, work.spec.num_layers) == (16, 2, "fp32", 4)
    assert recorded_workload(profile(tmp_path, own()), "p.json", precision="bf16").precision == "bf16"


@pytest.mark.parametrize(
    ("edited", "said"),
    [
        ({"tokens": "many"}, "tokens 'many', and it takes a whole number from 1 on"),
        ({"tokens": None}, "tokens null|tokens None"),
        ({"tokens": 16.5}, "takes a whole number from 1 on"),
        ({"tokens": 32}, "has the times of micro-batches of 32 tokens, and its recipe says 2 x 32"),
        ({"micro_batch_size": 0}, "micro_batch_size 0, and it takes"),
        ({"micro_batch_size": 4}, "its recipe says 4 x 16"),
        ({"device": "tpu"}, "device 'tpu', and it takes cpu or cuda"),
        ({"scale": "half"}, "takes a number above 0"),
        ({"scale": 0.02}, "was measured on another model: layer 0 has"),
        ({"num_layers": 5}, "has 4 layers, llama3-8b.* has 5"),
        ({"model": 3}, "takes a model's name or path"),
        ({"kernels": "sdpa"}, "takes a list of names"),
        ({"precision": "bf16"}, "has times in fp32, and its recipe says bf16"),
        ({"precision": "bf17"}, "bf17"),
        ({"graphs": "no"}, "takes true or false"),
        ({"frozen": 3}, "frozen is 3; give ranges of layers"),
        ({"mtp": "yes"}, "takes a number from 0 on"),
    ],
)
def test_a_recipe_that_was_edited_is_refused_in_one_line(edited: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(OctoPipeError, match=said) as refusal:
        recorded_workload(profile(tmp_path, own(), **edited), "p.json")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"num_attention_heads": 8, "num_key_value_heads": 8},
            "(head_dim is 8 there and 4|num_attention_heads is 4 there and 8)",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout is 0"),
        ({"intermediate_size": 40}, "layer 1 has"),
    ],
)
def test_a_model_whose_config_changed_after_the_profile_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    made = profile(tmp_path, model_of(str(file)), model=str(file), scale=None, num_layers=None)
    assert recorded_workload(made, "p.json").spec.num_layers == 4
    described = {**json.loads(file.read_text()), **change}
    described.pop("head_dim", None)
    file.write_text(json.dumps(described))
    with pytest.raises(OctoPipeError, match=f"was measured on another model: .*{said}"):
        recorded_workload(made, "p.json")
