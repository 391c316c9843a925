"""Commands on transformers models: their own code is run, named and measured, with the kernels that were asked for."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hf_families import tiny_config  # noqa: E402

from octopipe import OctoPipeError  # noqa: E402
from octopipe.huggingface import layers  # noqa: E402

# -- the verbs ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny config on disk."""
    tiny_config("qwen3").save_pretrained(tmp_path / "tiny-qwen")
    return tmp_path / "tiny-qwen"


def test_train_runs_the_models_own_code_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from octopipe.cli import main

    flags = ["--nproc", "1", "--steps", "2", "--seq", "8", "--no-measure", "--json", "--micro-batches", "2"]
    assert main(["train", str(folder / "config.json"), *flags]) == 0
    mine = json.loads(capsys.readouterr().out)
    assert mine["layers"] == "transformers' Qwen3ForCausalLM, fresh weights"
    assert main(["train", str(folder), *flags, "--own-layers"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["layers"] == "octopipe's own layers"
    # The first loss is the unsplit model's own on the same tokens.
    from octopipe.runtime.training.data.batches import micro_batches as tokens
    from octopipe.runtime.training.data.opening import open_source

    parts = layers(folder)
    modules = [factory() for factory in parts]
    model = transformers.AutoModelForCausalLM.from_config(parts.config)
    for k, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            model.get_parameter(parts.name_in_model(k, name)).data.copy_(parameter)
    inputs, targets = tokens(open_source(None, vocab=parts.vocab, seq=8, seed=0), 0, 2, 1)
    with torch.no_grad():
        losses = [float(model(input_ids=a, labels=a, shift_labels=b).loss) for a, b in zip(inputs, targets)]
    assert mine["losses"][0] == pytest.approx(sum(losses) / 2, abs=1e-5)


def test_train_says_what_it_cannot_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from octopipe.cli import main

    assert main(["train", str(folder), "--scale", "0.5"]) == 2
    assert "--scale applies to octopipe's own layers" in capsys.readouterr().err
    assert main(["train", "llama3-8b", "--own-layers"]) == 2
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    for verb in (["train"], ["profile"], ["simulate", "--pp", "2"], ["tune", "--pp", "2"]):
        assert main([verb[0], str(folder), *verb[1:]]) == 2
        assert "encoder" in capsys.readouterr().err


def test_without_transformers_train_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OctoPipeError, match=r"pip install \"octopipe\[hf\]\""):
        layers(folder)


def test_profiles_name_the_models_layers_and_kernels(folder: Path, tmp_path: Path) -> None:
    from octopipe.cli.verbs.profile import workload_of
    from octopipe.costs.profile_file import load_profile
    from octopipe.runtime.measure.trial import profile_workload
    from octopipe.runtime.ranks.world import World

    work = workload_of({"model": str(folder), "tokens": 8, "own_layers": False})
    profile = profile_workload(work, World(None), repeats=1, warm_up=0)
    profile.save(tmp_path / "profile.json")
    about = load_profile(tmp_path / "profile.json").about
    assert about["layers"][0] == "embedding" and "Qwen3DecoderLayer" in about["layers"][1]
    assert len(about["layers"]) == profile.costs.num_layers == 6
    assert set(about["kernels"]) == {"attention", "packages"}
    assert profile.costs.static_bytes[1] == pytest.approx(profile.costs.static_bytes[2])


# -- kernels --------------------------------------------------------------------------------------------


def test_kernels_are_chosen_by_device_and_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from octopipe.runtime.nn import kernels

    there: set[str] = set()
    monkeypatch.setattr(kernels, "installed", lambda *names: set(names) <= there)
    assert kernels.choose("cpu") == kernels.Kernels(scan="eager", delta="eager")
    assert kernels.choose("cuda").scan == "eager"  # nothing to compile with
    there |= {"triton"}
    assert kernels.choose("cuda").scan == "compiled"
    assert kernels.choose("cuda", compiled=False).scan == "eager"
    there |= {"mamba_ssm", "causal_conv1d", "fla"}
    assert kernels.choose("cuda") == kernels.Kernels(scan="mamba_ssm", delta="fla", loss="fused")
    assert kernels.choose("cuda", compiled=True).scan == "compiled"
    assert kernels.choose("cpu").scan == "eager"
    there |= {"flash_attn"}
    assert kernels.choose("cuda").attention == "flash_attn"
    asked = kernels.choose("cuda", asked=("sdpa", "compiled"))
    assert asked == kernels.Kernels(scan="compiled", delta="fla", attention="sdpa", loss="fused")
    for words, device, why in (
        (("flash_attn",), "cpu", "runs on a GPU"),
        (("fast",), "cuda", "give some of"),
        (("mamba_ssm", "eager"), "cuda", "one of them runs scan"),
    ):
        with pytest.raises(OctoPipeError, match=why):
            kernels.choose(device, asked=words)
    there.clear()
    with pytest.raises(OctoPipeError, match="needs the package causal_conv1d, which is not installed"):
        there.add("mamba_ssm")
        kernels.choose("cuda", asked=("mamba_ssm",))


@pytest.mark.parametrize("window", [None, 3])
def test_flash_attention_is_called_as_its_package_defines_it(window: int | None, monkeypatch: Any) -> None:
    """A stand-in with the package's signature, in plain torch: the layer's result stays the same."""
    import sys
    import types

    from octopipe.models.mixers import Attention as Spec
    from octopipe.runtime.nn import kernels
    from octopipe.runtime.nn.attention import Attention

    calls = []

    def flash(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, window_size: tuple[int, int]) -> Any:
        assert causal and q.dtype is torch.bfloat16
        calls.append(window_size)
        tokens, heads = q.shape[1], q.shape[2]
        q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
        i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
        seen = (j <= i) & ((j >= i - window_size[0]) if window_size[0] >= 0 else True)
        scores = (q @ k.transpose(-1, -2) * softmax_scale).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).to(torch.bfloat16)

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_func=flash))
    layer = Spec(hidden=16, heads=4, kv_heads=2, head_dim=8, window=window)
    torch.manual_seed(0)
    plain = Attention(layer, 1e-5, {"dtype": torch.bfloat16, "device": torch.device("cpu")})
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.3)
    fast = copy.deepcopy(plain)
    fast.attend = kernels.flash_attend()
    x = torch.randn(2, 7, 16, dtype=torch.bfloat16)
    assert torch.allclose(fast(x), plain(x), atol=0.05)
    assert calls == [(-1, -1) if window is None else (window - 1, 0)]
    wide = fast.float()(x.float())  # no kernel for single precision: torch's own
    assert len(calls) == 1 and wide.dtype is torch.float32


def test_liger_is_put_into_the_model_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the package's two names: norms are replaced in every layer, the loss stays the model's."""
    import sys
    import types

    given, ran = {}, []

    def patch(model: Any, **flags: Any) -> None:
        given.update(flags)
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                usual = type(module).forward

                def forward(self: Any, x: Any, usual: Any = usual) -> Any:
                    ran.append(id(self))
                    return usual(self, x)

                module.forward = types.MethodType(forward, module)

    there = types.ModuleType("liger_kernel.transformers")
    there.monkey_patch = types.SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None})  # type: ignore[attr-defined]
    there._apply_liger_kernel_to_instance = patch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", there)
    config = tiny_config("llama")
    outputs = []
    for liger in (False, True):
        value: Any = torch.arange(8).view(1, 8)
        made = [factory() for factory in layers(copy.deepcopy(config), dtype=torch.float64, liger=liger)]
        for module in made:
            value = module(value)
        outputs.append(value)
    assert torch.equal(*outputs)
    norms = {id(n) for module in made[1:] for n in module.modules() if type(n).__name__ == "LlamaRMSNorm"}
    assert len(norms) == 9 and norms <= set(ran)  # two a block and the last one, each in the copy that runs
    assert given == {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    with pytest.raises(OctoPipeError, match="does not support gpt2"):
        layers(tiny_config("gpt2"), liger=True)


def test_attention_of_any_name_that_transformers_knows_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    calls = []

    def counted(*args: Any, **more: Any) -> Any:
        calls.append(1)
        return sdpa_attention_forward(*args, **more)

    AttentionInterface.register("counted", counted)
    value: Any = torch.arange(8).view(1, 8)
    for factory in layers(tiny_config("llama"), attention="counted"):
        value = factory()(value)
    assert len(calls) == 4


def test_kernels_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from octopipe.cli import main

    for model, words, why in (
        (str(folder), "flash-attn", "runs on a GPU"),
        (str(folder), "compiled", "give some of eager, sdpa, flash_attn, liger"),
        (str(folder), "sdpa,eager", "one of them runs attention"),
        ("nemotron-h-4b", "liger", "is for transformers' models"),
    ):
        assert main(["train", model, "--kernels", words, "--no-measure"]) == 2
        assert why in capsys.readouterr().err


def test_installed_scan_kernels_are_called_as_their_packages_define_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the packages' signatures, in plain torch: the mixer's result stays the same."""
    import sys
    import types

    import torch.nn.functional as F

    from octopipe.models.mixers import Mamba2
    from octopipe.runtime.nn import kernels
    from octopipe.runtime.nn.mamba import _ssd_scan, mamba2_mix

    def conv(x: Any, weight: Any, bias: Any, activation: str) -> Any:
        assert activation == "silu"
        taps, channels = weight.shape[1], weight.shape[0]
        return F.silu(F.conv1d(F.pad(x, (taps - 1, 0)), weight[:, None], bias, groups=channels))

    def scan(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any, dt_bias: Any, dt_softplus: bool) -> Any:
        assert dt_softplus
        dt = F.softplus(dt + dt_bias)
        return _ssd_scan(x * dt[..., None], dt * A, B, C, chunk_size) + x * D[:, None]

    monkeypatch.setitem(sys.modules, "causal_conv1d", types.SimpleNamespace(causal_conv1d_fn=conv))
    name = "mamba_ssm.ops.triton.ssd_combined"
    for package in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(mamba_chunk_scan_combined=scan))
    layer = Mamba2(hidden=16, heads=4, head_dim=8, state=6, groups=2, conv=4, chunk=4)
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    given = (
        draw(2, 10, layer.projection_width), draw(layer.conv_width, 4), draw(layer.conv_width), draw(4), draw(4),
        draw(4), draw(layer.inner),
    )  # fmt: skip
    assert torch.allclose(kernels.mamba_ssm_mix()(layer, 1e-5, *given), mamba2_mix(layer, 1e-5, *given), atol=1e-9)
