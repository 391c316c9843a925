"""Checkpoints for other tools: what transformers and torch.distributed.checkpoint read is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from effort import some

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hf_families import tiny_config  # noqa: E402

from octopipe.cli import main  # noqa: E402
from octopipe.huggingface import layers  # noqa: E402
from octopipe.runtime.training.checkpoint import checkpoints, read_layer, read_record  # noqa: E402

torch.set_num_threads(1)
COMMON = ["--seq", "8", "--micro-batches", "2", "--no-measure", "--dtype", "float64", "--json"]


def trained(home: Path, family: str, *flags: str, **changes: Any) -> tuple[Path, Path]:
    """The folder of a run and the config it was trained from."""
    config = home / "config.json"
    if not config.exists():
        config.write_text(tiny_config(family, **changes).to_json_string(use_diff=False))
    run = home / f"run-{len(list(home.iterdir()))}"
    assert main(["train", str(config), "--checkpoint", str(run), *COMMON, *flags]) == 0
    return run, config


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A llama with tied embeddings: a run of two ranks that wrote behind its steps, and one of one rank that waited."""
    home = tmp_path_factory.mktemp("tied")
    flags = ("--steps", "3", "--save-every", "1")
    behind, config = trained(home, "llama", "--nproc", "2", "--async-save", *flags, tie_word_embeddings=True)
    waited, _ = trained(home, "llama", "--nproc", "1", *flags)
    return behind, waited, config


def states(path: Path) -> dict[str, Any]:
    record = read_record(path)
    return {
        f"{k}.{name}": value
        for k in range(record["num_layers"])
        for name, value in read_layer(path, k, record)["state"].items()
    }


def test_what_is_written_behind_the_steps_is_the_state_of_its_step(tied: tuple[Path, Path, Path]) -> None:
    behind, waited, _ = (checkpoints(folder) for folder in tied)
    assert [p.name for p in behind] == [p.name for p in waited] == [f"step-0000000{k}" for k in (1, 2, 3)]
    for a, b in zip(behind, waited):
        mine, theirs = states(a), states(b)
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-9, atol=1e-12)
    assert not list(tied[0].glob("*.partial"))


def test_from_pretrained_gives_the_logits_of_what_was_trained(tied: tuple[Path, Path, Path], tmp_path: Path) -> None:
    behind, _, config = tied
    out = tmp_path / "exported"
    assert main(["convert", str(behind), "--to", "huggingface", "--model", str(config), "-o", str(out)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    ids = torch.arange(8).view(1, 8) + 3
    parts, path = layers(config, dtype=torch.float64), checkpoints(behind)[-1]
    record, value = read_record(path), ids
    for k, factory in enumerate(parts):
        module = factory()
        module.load_state_dict(read_layer(path, k, record)["state"])
        value = module.eval()(value)
    assert torch.equal(model.eval()(ids).logits, value)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # What the run started from is something else.
    fresh = layers(config, dtype=torch.float64)
    start = fresh[1]().state_dict()["layer.mlp.up_proj.weight"]
    assert not torch.equal(start, model.model.layers[0].mlp.up_proj.weight)


def test_experts_are_written_as_their_family_writes_them(tmp_path: Path) -> None:
    run, config = trained(tmp_path, "qwen3_moe", "--nproc", "1", "--steps", "1")
    out = tmp_path / "exported"
    words = ["convert", str(run), "--to", "huggingface", "--model", str(config), "-o", str(out), "--dtype", "bfloat16"]
    assert main(words) == 0
    from safetensors.torch import load_file

    kept = load_file(out / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in kept  # one by one, not as the model holds them
    assert {value.dtype for value in kept.values()} == {torch.bfloat16}
    found = states(checkpoints(run)[-1])
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    mine = found["2.layer.mlp.experts.gate_up_proj"].bfloat16()
    assert torch.equal(model.model.layers[1].mlp.experts.gate_up_proj, mine)
    # And our own reader takes it, under any plan.
    again = layers(out, dtype=torch.bfloat16)[2]().state_dict()
    assert torch.equal(again["layer.mlp.experts.gate_up_proj"], mine)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize("family_names", some([True, False]))
def test_plain_torch_reads_a_dcp_folder(family_names: bool, tied: tuple[Path, Path, Path], tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    keys = []
    for number, folder in enumerate(tied[:2]):
        out = tmp_path / f"dcp-{number}"
        words = ["convert", str(folder), "--step", "2", "--to", "dcp", "-o", str(out)]
        assert main([*words, "--model", str(tied[2])] if family_names else words) == 0
        metadata = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
        keys.append(set(metadata))
        state = {key: torch.empty(m.size, dtype=m.properties.dtype) for key, m in metadata.items()}
        dcp.load(state, checkpoint_id=str(out), no_dist=True)
        path = checkpoints(folder)[1]
        record = read_record(path)
        block = read_layer(path, 2, record)
        name = "layer.mlp.up_proj.weight"
        base = "model.layers.1.mlp.up_proj.weight" if family_names else f"2.{name}"
        assert torch.equal(state[f"model.{base}"], block["state"][name])
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(state[f"optimizer.{base}.{moment}"], block["optimizer"][name][moment])
        assert json.loads((out / "octopipe.json").read_text())["step"] == 2
    assert keys[0] == keys[1]  # whatever the plan and the number of ranks


def test_weights_that_nothing_was_learnt_in_come_back_byte_by_byte(tmp_path: Path) -> None:
    """Hugging Face -> our checkpoint -> Hugging Face, by a step of learning rate zero on two ranks."""
    model, run, out = tmp_path / "model", tmp_path / "run", tmp_path / "out"
    transformers.AutoModelForCausalLM.from_config(tiny_config("qwen3_moe")).save_pretrained(model)
    words = ["train", str(model), "--checkpoint", str(run), "--nproc", "2", "--steps", "1", "--lr", "0"]
    assert main([*words, "--seq", "8", "--micro-batches", "2", "--no-measure", "--json"]) == 0
    assert main(["convert", str(run), "--to", "huggingface", "--model", str(model), "-o", str(out)]) == 0
    assert (out / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_dcp_folder_is_written_and_never_read(
    tied: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behind, _, config = tied
    out = tmp_path / "dcp"
    assert main(["convert", str(behind), "--to", "dcp", "-o", str(out)]) == 0
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config.read_text())
    (tmp_path / "model" / ".metadata").write_bytes((out / ".metadata").read_bytes())
    capsys.readouterr()
    for words in (
        ["convert", str(out), "--to", "huggingface", "--model", str(config), "-o", str(tmp_path / "x")],
        ["train", str(config), "--checkpoint", str(out), "--resume", "--nproc", "1", *COMMON],
        ["train", str(tmp_path / "model"), "--nproc", "1", *COMMON],
    ):
        assert main(words) == 2, words
        said = capsys.readouterr().err
        assert "of torch.distributed.checkpoint" in said and "pickled" in said and said.count("\n") == 1, said


def test_what_cannot_be_converted_is_one_line(
    tied: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behind = tied[0]
    other = tmp_path / "config.json"
    other.write_text(tiny_config("mistral").to_json_string(use_diff=False))
    short = tmp_path / "short.json"
    short.write_text(tiny_config("llama", num_hidden_layers=3).to_json_string(use_diff=False))
    full = tmp_path / "full"
    full.mkdir()
    (full / "kept").touch()
    out = str(tmp_path / "out")
    for words, why in (
        ([str(behind), "--to", "huggingface", "-o", out], "needs --model"),
        ([str(behind), "--to", "huggingface", "--model", str(other), "-o", out], "not of MistralForCausalLM"),
        ([str(behind), "--to", "huggingface", "--model", str(short), "-o", out], "has 6 layers"),
        ([str(behind), "--to", "dcp", "-o", str(full)], "already exists"),
        ([str(behind), "--to", "dcp", "--step", "9", "-o", out], "no checkpoint of step 9"),
        ([str(tmp_path), "--to", "dcp", "-o", out], "no checkpoint there"),
        ([str(behind), "--to", "dcp", "--dtype", "float32", "-o", out], "--dtype is for"),
    ):
        assert main(["convert", *words]) == 2, words
        said = capsys.readouterr().err
        assert why in said and said.count("\n") == 1, said
