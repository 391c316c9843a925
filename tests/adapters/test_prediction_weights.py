"""Weights of multi-token-prediction layers: read from a model's folder, trained, written, and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hf_families import tiny_config  # noqa: E402
from hf_versions import since  # noqa: E402
from ranks import PATIENCE_S, shared_ranks  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from octopipe import Pipeline  # noqa: E402
from octopipe.cli import main  # noqa: E402
from octopipe.costs.layer_graph import LayerGraph  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.huggingface import layers, micro_batches  # noqa: E402
from octopipe.huggingface.prediction_weights import save_with_predictions  # noqa: E402
from octopipe.huggingface.predictions import NEEDS, with_predictions  # noqa: E402
from octopipe.huggingface.source import model_class  # noqa: E402
from octopipe.huggingface.weights import first_names  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

pytestmark = since(NEEDS)
FLAGS = ["--steps", "1", "--seq", "12", "--no-measure", "--micro-batches", "2", "--mtp", "--json"]


def whole_model(family: str) -> Any:
    config = tiny_config(family)
    config.num_mtp_layers = 1
    if family == "qwen3_next":
        config.mtp_layer_types = ["full_attention"]
    torch.manual_seed(3)
    return with_predictions(model_class(config)._from_config(config).train(), 0.3)


def by_deepseek(whole: Any) -> dict[str, Any]:
    """The prediction layer as DeepSeek-V3's folder has it: behind the last layer, every expert by itself."""
    at = f"model.layers.{whole.config.num_hidden_layers}"
    out = {f"{at}.embed_tokens.weight": whole.main.model.embed_tokens.weight.detach().clone()}
    out[f"{at}.shared_head.head.weight"] = whole.main.lm_head.weight.detach().clone()
    for name, value in whole.predictions.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if name == "mlp.experts.gate_up_proj":
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                out[f"{at}.mlp.experts.{e}.gate_proj.weight"] = gate.clone()
                out[f"{at}.mlp.experts.{e}.up_proj.weight"] = up.clone()
        elif name == "mlp.experts.down_proj":
            out |= {f"{at}.mlp.experts.{e}.down_proj.weight": one.clone() for e, one in enumerate(value)}
        else:
            out[f"{at}.{name}"] = value
    return out


def deepseek_folder(path: Path) -> Any:
    """A folder with the main model as transformers writes it, and the predictions under DeepSeek's names."""
    whole = whole_model("deepseek_v3")
    whole.main.save_pretrained(path)
    file = path / "model.safetensors"
    save_file({**load_file(file), **by_deepseek(whole)}, file, metadata={"format": "pt"})
    return whole


def assert_equal_to(whole: Any, parts: Any) -> None:
    """Every piece has the whole model's values; together they have all of them."""
    seen = set()
    for k in range(len(parts)):
        for name, parameter in parts[k]().named_parameters():
            full = parts.name_in_model(k, name)
            assert torch.equal(parameter, whole.get_parameter(full)), full
            seen.add(id(whole.get_parameter(full)))
    assert seen == {id(p) for p in whole.parameters()}


def test_a_folder_of_deepseek_fills_the_path(tmp_path: Path) -> None:
    whole = deepseek_folder(tmp_path)
    parts = layers(tmp_path, predictions=0.3)
    assert parts.fresh == ()
    assert_equal_to(whole, parts)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("glm4_moe", "model.layers.{}.eh_proj.weight"),
        ("inkling_text", "model.mtp.layers.0.eh_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
    ],
)
def test_what_is_written_is_read_again(family: str, key: str, tmp_path: Path) -> None:
    whole = whole_model(family)
    save_with_predictions(whole, tmp_path)
    assert key.format(whole.config.num_hidden_layers) in load_file(tmp_path / "model.safetensors")
    parts = layers(tmp_path, predictions=0.3)
    assert parts.fresh == ()
    assert_equal_to(whole, parts)


def test_transformers_itself_reads_what_is_written(tmp_path: Path) -> None:
    whole = whole_model("deepseek_v3")
    save_with_predictions(whole, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) >= set(by_deepseek(whole))
    read = type(whole.main).from_pretrained(tmp_path)
    # Which layer holds predictions is known there by its number in the published model.
    read._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{whole.config.num_hidden_layers}.*"]
    more = transformers.modeling_layers.MtpModel.from_pretrained(read)
    for theirs, mine in ((read, whole.main), (more.layers, whole.predictions.layers)):
        expected = mine.state_dict()
        assert {k: torch.equal(v, expected[k]) for k, v in theirs.state_dict().items()} == dict.fromkeys(expected, True)


def test_parameters_that_a_folder_lacks_are_drawn_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = deepseek_folder(tmp_path)
    file, tensors = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    some = {key: value for key, value in tensors.items() if "eh_proj" not in key}
    save_file(some, file, metadata={"format": "pt"})
    parts = layers(tmp_path, predictions=0.3)
    assert parts.fresh == ("predictions.layers.0.eh_proj.weight",)
    drawn = layers(tmp_path / "config.json", predictions=0.3)
    at = len(parts) - 2
    read, other = parts[at]().model.predictions.layers[0], drawn[at]().model.predictions.layers[0]
    assert torch.equal(read.eh_proj.weight, other.eh_proj.weight)
    assert torch.equal(read.enorm.weight, whole.predictions.layers[0].enorm.weight)
    assert main(["train", str(tmp_path), "--nproc", "1", *FLAGS]) == 0
    told = capsys.readouterr().err
    assert "has no weights for 1 parameter of its prediction layers: they are initialised randomly" in told


def one_step(world: Any, folder: str, plan: Any) -> dict[str, Any]:
    """The values of this rank's parameters after a step of plain gradient descent, by their names in the model."""
    torch.set_num_threads(1)
    parts = layers(folder, dtype=torch.float64, predictions=0.3)
    with Pipeline(parts, plan, parts.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        pipe.step(*rows(plan.num_micro_batches))
        named = [(key.split(".", 1), p) for key, p in pipe.named_parameters()]
        with torch.no_grad():
            return {parts.name_in_model(int(k), own): p - 0.1 * p.grad for (k, own), p in named}


def rows(count: int) -> tuple[list[Any], list[Any]]:
    ids = torch.randint(3, 90, (count, 10), generator=torch.Generator().manual_seed(5))
    return micro_batches({"input_ids": ids, "labels": ids}, count)


def test_two_ranks_begin_with_a_folder_and_step_as_one_process_does(tmp_path: Path) -> None:
    whole = deepseek_folder(tmp_path).to(torch.float64)
    whole.main.set_experts_implementation("eager")
    whole.predictions.set_experts_implementation("eager")
    parts = layers(whole.main, predictions=0.3)
    parts._cut.model.predictions.load_state_dict(whole.predictions.state_dict())
    count = len(parts)
    costs = CostTable.uniform(num_layers=count).replace(graph=LayerGraph(takes=parts.takes))
    out: dict[int, Any] = {}
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(*rows(2), strict=True):
        for k, piece in enumerate(parts):
            out[k] = piece(*(out[j] for j in parts.takes[k])) if k else piece(x)
        total = total + sum(loss(out[k], y) for k, loss in parts.loss_fn.losses.items()) / 2
    total.backward()
    model = parts._cut.model
    after = {name: (p - 0.1 * p.grad).detach() for name, p in model.named_parameters()}
    first = first_names(model)
    found: dict[str, Any] = {}
    for rank in shared_ranks(2).run(one_step, str(tmp_path), build_plan("1f1b", costs, 2, 2)):
        for name, value in rank.items():
            assert float((value - after[first[name]]).abs().max()) <= 1e-12, name
            found[first[name]] = value
    assert found.keys() == after.keys()
    with torch.no_grad():
        for name, value in found.items():
            whole.get_parameter(name).copy_(value)
    save_with_predictions(whole, tmp_path / "out")
    assert_equal_to(whole, layers(tmp_path / "out", dtype=torch.float64, predictions=0.3))


@pytest.mark.slow
def test_a_folder_is_trained_on_ranks_written_and_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    whole = deepseek_folder(source)
    losses, states = [], []
    for ranks in (1, 2):
        kept, target = tmp_path / f"kept{ranks}", out / str(ranks)
        assert (
            main(["train", str(source), "--nproc", str(ranks), *FLAGS, "--checkpoint", str(kept), "--lr", "0.01"]) == 0
        )
        losses.append(json.loads(capsys.readouterr().out)["losses"])
        assert main(["convert", str(kept), "--to", "huggingface", "--model", str(source), "-o", str(target)]) == 0
        states.append(load_file(target / "model.safetensors"))
        capsys.readouterr()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    before = load_file(source / "model.safetensors")
    assert set(states[0]) == set(states[1]) == set(before)
    for key, value in states[0].items():
        torch.testing.assert_close(value, states[1][key], rtol=1e-5, atol=1e-6)
    moved = f"model.layers.{whole.config.num_hidden_layers}.eh_proj.weight"
    assert not torch.equal(states[0][moved], before[moved])
    assert layers(out / "2", predictions=0.3).fresh == ()
