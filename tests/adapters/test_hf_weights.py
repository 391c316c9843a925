"""Weights in a folder that are not plain numbers of the parameters are refused, never read as something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hf_families import tiny_config  # noqa: E402

from octopipe import OctoPipeError  # noqa: E402
from octopipe.huggingface import layers  # noqa: E402


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
def test_quantised_weights_are_refused_not_read_without_their_scales(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    transformers.AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    stored = load_file(file)
    stored[name] = (stored[name] * 50).to(getattr(torch, kind))
    save_file({**stored, f"{name}_scale_inv": torch.full((1,), 0.02)}, file, metadata={"format": "pt"})
    with pytest.raises(OctoPipeError, match=rf"{name} is stored as (F8_E4M3|I8): the weights are quantised, .*dequant"):
        layers(tmp_path)[2]()


def test_packed_weights_are_named_as_quantised_if_the_config_says_so(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = tiny_config("llama")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    stored = load_file(file)
    packed = {f"{name.removesuffix('weight')}qweight": stored.pop(name).to(torch.int32)}
    save_file({**stored, **packed}, file, metadata={"format": "pt"})
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(OctoPipeError, match=rf"no weights of {name}; its config says that they are quantised"):
        layers(tmp_path)[2]()


def test_an_adapter_beside_the_weights_is_refused_not_left_out(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(OctoPipeError, match=r"adapter_model\.safetensors is an adapter beside the weights"):
        layers(tmp_path)
