"""Transformers models cut into layers: the unsplit model's logits, losses and gradients, whatever the plan."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from effort import WHOLE, some

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hf_families import tiny_config  # noqa: E402
from hf_twins import ROWS, batch, chained, cut, grads_of, make, pipeline_differences, plans, whole  # noqa: E402
from ranks import PATIENCE_S, shared_ranks  # noqa: E402
from torch import nn  # noqa: E402

from octopipe import OctoPipeError, Pipeline  # noqa: E402
from octopipe.huggingface import layers, micro_batches  # noqa: E402
from octopipe.huggingface.weights import first_names  # noqa: E402

FAMILIES = """
    llama qwen2 qwen3 mixtral qwen3_moe nemotron_h jamba gpt2 gpt_neox gemma2 gemma3_text deepseek_v3 gpt_oss
    bamba granite granitemoe granitemoehybrid falcon_h1 qwen3_next olmo2 phi3 mistral bloom opt glm4 glm4_moe
    minimax cohere starcoder2 stablelm mamba2 zamba2 ctrl openai-gpt
""".split()  # noqa: SIM905
QUICK_FAMILIES = ("llama", "jamba", "deepseek_v3", "gpt_oss", "qwen3_next", "bloom", "mamba2")
"""Beside those in ranks: one of every kind of layer, router and position; the slow tier cuts all families. Mixtral is
cut below, with the losses of its routers."""
IN_RANKS = ("nemotron_h", "gemma3_text", "zamba2", "gpt2", "falcon_h1")
"""One of hybrid layers, of windows and ties, of tensors beside the hidden state, of learned positions, of tuples;
`benchmarks/bench_families.py` runs every family."""
QUICK_PLANS = ("1f1b", "zb-v", "irregular")
"""B, I and W of several stages of a rank, and stages that jump between the ranks."""


@pytest.mark.parametrize("family", some(FAMILIES, quick=[*IN_RANKS, *QUICK_FAMILIES]))
def test_layers_one_after_another_are_the_model(family: str) -> None:
    assert chained(family) < 1e-6


@pytest.mark.parametrize("family", some(IN_RANKS))
def test_pipelines_give_the_unsplit_models_loss_and_gradients(family: str) -> None:
    chosen = {name: plan for name, plan in plans().items() if WHOLE or name in QUICK_PLANS}
    found = pipeline_differences(shared_ranks(2), family, chosen, padded=family != "nemotron_h")
    assert max(found.values()) < 1e-6, found


SHARED_KEYS = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
"""The last two of four layers attend to the keys and values of the first two."""


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_keys_and_values_that_layers_share_belong_to_their_micro_batch(family: str) -> None:
    """They stand in a mapping that is no dict and is given to all layers."""
    assert chained(family, hidden_size_per_layer_input=4, **SHARED_KEYS) < 1e-6


def test_keys_and_values_that_layers_share_travel_between_ranks() -> None:
    chosen = {name: plan for name, plan in plans().items() if WHOLE or name == "zb-v"}
    found = pipeline_differences(shared_ranks(2), "gemma3n_text", chosen, padded=True, **SHARED_KEYS)
    assert max(found.values()) < 1e-6, found


def test_a_model_of_bytes_whose_patches_depend_on_the_batch_is_the_model() -> None:
    """BLT: four stacks, of which one decides from the tokens how long the sequence of another is."""
    assert chained("blt") < 1e-6


class Remembers(transformers.LlamaForCausalLM):
    """Its head takes the embeddings beside the last layer's output."""

    def forward(self, input_ids: Any, labels: Any = None, **more: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        hidden = self.model(inputs_embeds=embedded, **more).last_hidden_state
        logits = self.lm_head(hidden + embedded)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class Counts(transformers.LlamaForCausalLM):
    """Its head takes the tokens themselves beside the last layer's output."""

    def forward(self, input_ids: Any, labels: Any = None, **more: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, **more).last_hidden_state) + input_ids[..., None]
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)


@pytest.mark.parametrize("kind", [Remembers, Counts])
def test_a_head_gets_what_it_takes_beside_the_last_layers_output(kind: Any) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = kind(config).double()
    ids = torch.arange(12).view(2, 6)
    value: Any = {"input_ids": ids}
    for part in layers(model):
        value = part(value)  # type: ignore[operator]
    assert torch.equal(value, model(ids).logits)


@pytest.mark.parametrize(
    "family", some(["mixtral", "jetmoe", "gemma4_text", "dbrx", "inkling_text", "granitemoe"], quick=3)
)
def test_router_losses_travel_to_the_head(family: str) -> None:
    """Families call the factor of this loss differently, and some ignore what the config says."""
    factors = {"jetmoe": {"aux_loss_coef": 0.5}, "dbrx": {"ffn_config": {"moe_loss_weight": 0.5}}}
    more = factors.get(family, {"router_aux_loss_coef": 0.5})
    assert chained(family, output_router_logits=True, **more) < 1e-6


ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def routed_gradients(world: Any, planned: dict[str, Any]) -> dict[str, Any]:
    """On a rank: the loss and this rank's gradients by name, under every plan."""
    torch.set_num_threads(1)
    config = tiny_config("mixtral", **ROUTED)
    parts, out = cut(config), {}
    for name, plan in planned.items():
        made = [functools.partial(make, parts, k) for k in range(len(parts))]
        inputs, targets = micro_batches(batch(config, padded=False), ROWS)
        with Pipeline(made, plan, parts.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            loss = float(pipe.step(inputs, targets).detach())
            named = ((key.split(".", 1), p) for key, p in pipe.named_parameters())
            out[name] = loss, grads_of((parts.name_in_model(int(k), own), p) for (k, own), p in named)
    return out


def test_router_losses_on_ranks_are_the_mean_of_those_of_the_micro_batches() -> None:
    config = tiny_config("mixtral", **ROUTED)
    parts = cut(config)
    model = whole(config, [make(parts, k) for k in range(len(parts))], parts)
    given = batch(config, padded=False)
    share = (given["labels"][:, 1:] != -100).sum() / ROWS
    rows = [{key: value[k : k + 1] for key, value in given.items()} for k in range(ROWS)]
    answers = [model(**row, num_items_in_batch=share, use_cache=False) for row in rows]
    loss = sum(answer.loss for answer in answers) / ROWS
    loss.backward()
    assert all(float(answer.aux_loss.detach()) > 0.1 for answer in answers)
    first, theirs = first_names(model), grads_of(model.named_parameters())
    names = ("1f1b", "zb-v") if WHOLE else ("zb-v",)
    planned = {name: plan for name, plan in plans(len(parts)).items() if name in names}
    for rank in shared_ranks(2).run(routed_gradients, planned):
        for found, grads in rank.values():
            assert found == pytest.approx(float(loss.detach()), rel=1e-6)
            for name, grad in grads.items():
                torch.testing.assert_close(grad, theirs[first[name]], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("family", "shared"), [("llama", "model.embed_tokens.weight"), ("ctrl", "transformer.w.weight")]
)
def test_tied_embeddings_are_found_and_drawn_alike_everywhere(family: str, shared: str) -> None:
    parts = cut(tiny_config(family, tie_word_embeddings=True))  # CTRL's head has a bias beside the tied weight
    first, last = parts[0](), parts[-1]()
    name = next(iter(first.tied_to))
    assert set(last.tied_to.values()) == set(first.tied_to.values()) == {shared}
    # The head's rank draws what the embedding's rank draws, without a message.
    assert torch.equal(first.get_parameter(name), last.get_parameter(name))


def test_weights_depend_on_the_seed_and_not_on_the_order_of_building() -> None:
    config = tiny_config("jamba")
    a, b, c = (layers(copy.deepcopy(config), seed=seed) for seed in (3, 3, 4))
    late = [b[k]() for k in reversed(range(len(b)))][::-1]
    for k, module in enumerate(late):
        twin, other = a[k]().state_dict(), c[k]().state_dict()
        assert all(torch.equal(v, twin[n]) for n, v in module.state_dict().items())
        assert any(not torch.equal(v, other[n]) for n, v in module.state_dict().items())


def test_only_the_layers_that_are_built_take_memory() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=60)  # 12 billion parameters
    parts = layers(config)
    assert len(parts) == 62 and parts.parameters > 1.2e10
    small = layers(tiny_config("llama"))
    block = small[2]()
    held = sum(p.numel() for p in block.parameters())
    assert held < small.parameters / 4 and all(p.device.type == "cpu" for p in block.parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "gemma3_text", "deepseek_v3"])
def test_weights_load_by_name_from_safetensors(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size="40KB")  # several files; experts are written one by one
    parts = layers(tmp_path)
    found = {}
    for k, factory in enumerate(parts):
        found |= {parts.name_in_model(k, n): p for n, p in factory().named_parameters()}
    theirs = dict(model.named_parameters())
    assert found.keys() == theirs.keys()
    assert all(torch.equal(p, theirs[n]) for n, p in found.items())


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    transformers.AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if "layers.2.mlp.up_proj" not in k}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(OctoPipeError, match=r"no weights of model\.layers\.2\.mlp\.up_proj"):
        layers(tmp_path)[3]()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "__0_0.distcp", "adapter_model.safetensors", "weights.gguf"])
def test_weights_in_files_that_are_not_read_are_never_replaced_by_fresh_ones(name: str, tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    assert layers(tmp_path).parameters > 0  # a config alone: fresh weights
    (tmp_path / name).touch()
    with pytest.raises(OctoPipeError, match=rf"weights are in {name}, .*or name its config.json"):
        layers(tmp_path)
    assert layers(tmp_path / "config.json").parameters > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("cut", r"model-0000\d-of-\d+\.safetensors: its tensors cannot be read \(.*; download it again"),
        ("gone", r"model-0000\d-of-\d+\.safetensors: its tensors cannot be read \(.*; download it again"),
        (
            "elsewhere",
            r"index\.json: '.*' is in '\.\./x\.safetensors', which is not a file beside it; download it again",
        ),
        ("no map", r"index\.json: has no weight_map; download it again"),
    ],
)
def test_a_checkpoint_with_a_damaged_file_is_refused_with_its_name(change: str, said: str, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path, max_shard_size="40KB")
    index, shard = tmp_path / "model.safetensors.index.json", sorted(tmp_path.glob("model-*.safetensors"))[1]
    if change == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif change == "gone":
        shard.unlink()
    else:
        names = json.loads(index.read_text())["weight_map"]
        there = {"weight_map": dict.fromkeys(names, "../x.safetensors")} if change == "elsewhere" else {"weight_map": 3}
        index.write_text(json.dumps(there))
    with pytest.raises(OctoPipeError, match=said):
        for factory in layers(tmp_path):
            factory()


class Lora(nn.Module):
    """What PEFT puts in a linear's place."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(0.1 * torch.randn(2, base.in_features, dtype=torch.float64))
        self.up = nn.Parameter(0.1 * torch.randn(base.out_features, 2, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_frozen_and_lora_parameters_of_a_given_model_stay_what_they_are() -> None:
    config = tiny_config("qwen2", tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
    given = batch(config, padded=True)
    reference = copy.deepcopy(model)
    reference(**given).loss.backward()
    parts = layers(model)
    value: Any = {k: v for k, v in given.items() if k != "labels"}
    for module in parts:
        value = module(value)
    parts.loss_fn(value, given["labels"]).backward()
    theirs = {n: p.grad for n, p in reference.named_parameters()}
    assert {n for n, g in theirs.items() if g is not None} == {n for n in theirs if n.endswith((".down", ".up"))}
    for name, parameter in model.named_parameters():  # the very parameters that were given
        grad = theirs[name]
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.allclose(parameter.grad, grad, atol=1e-9)


def test_micro_batches_weigh_as_the_whole_batch() -> None:
    config = tiny_config("llama")
    parts = cut(config)
    modules = [make(parts, k) for k in range(len(parts))]
    model = whole(config, modules, parts)
    given = batch(config, padded=True)
    given["labels"][0, :-1] = -100  # one micro-batch with a single label
    inputs, targets = micro_batches(given, 3)  # uneven: 2, 1 and 1 rows
    losses = []
    for value, target in zip(inputs, targets):
        for module in modules:
            value = module(value)
        losses.append(float(parts.loss_fn(value, target).detach()))
    assert sum(losses) / 3 == pytest.approx(float(model(**given).loss.detach()), abs=1e-6)
    with pytest.raises(OctoPipeError, match="4 sequences for 5 micro-batches"):
        micro_batches(given, 5)


def test_a_forward_that_was_assigned_and_runs_other_layers_is_refused_with_the_reason() -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama"))
    bound = model.forward
    model.forward = lambda *given, **named: bound(*given, **named)
    with pytest.raises(OctoPipeError, match=r"does not run them, as one that was assigned .* override it in a class"):
        layers(model)


def test_one_module_at_two_places_of_the_stack_is_refused_and_a_copy_with_its_weights_is_not() -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama"))
    first = model.model.layers[0]
    model.model.layers[2] = first
    with pytest.raises(OctoPipeError, match=r"one module at model\.layers\[0\] and model\.layers\[2\]; put a copy"):
        layers(model)
    model.model.layers[2] = copy.deepcopy(first, {id(p): p for p in first.parameters()})
    parts = layers(model)
    assert len(parts) == 6
    assert all(a is b for a, b in zip(parts[1].parameters(), parts[3].parameters(), strict=True))


def test_micro_batches_count_the_items_that_the_batch_states() -> None:
    """As `model(**batch)` does: those of a step with several batches."""
    ids = torch.randint(3, 90, (4, 6))
    given = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(50)}
    listed = [{**{k: v[m : m + 2] for k, v in given.items() if k != "num_items_in_batch"}, "num_items_in_batch": 50}
              for m in (0, 2)]  # fmt: skip
    for batches in (given, listed):
        inputs, targets = micro_batches(batches, 2)
        assert [float(t["num_items_in_batch"]) for t in targets] == [25.0, 25.0]
        assert all(set(row) == {"input_ids"} for row in inputs)
    assert [float(t["num_items_in_batch"]) for t in micro_batches(given, 2, num_items=20)[1]] == [10.0, 10.0]
    with pytest.raises(OctoPipeError, match="state different num_items_in_batch"):
        micro_batches([listed[0], {**listed[1], "num_items_in_batch": 51}], 2)


def test_positions_and_packed_sequences_are_the_models_own() -> None:
    config = tiny_config("mistral")
    parts = cut(config)
    modules = [make(parts, k) for k in range(len(parts))]
    model = whole(config, modules, parts)
    ids = batch(config, padded=False)["input_ids"]
    positions = torch.cat((torch.arange(5), torch.arange(7))).expand(ROWS, -1)
    value: Any = {"input_ids": ids, "position_ids": positions}
    for module in modules:
        value = module(value)
    wanted = model(input_ids=ids, position_ids=positions).logits
    assert not torch.allclose(wanted, model(input_ids=ids).logits)
    assert torch.allclose(value, wanted, atol=1e-9)


def test_changing_shapes_and_masks_are_recorded_anew() -> None:
    config = tiny_config("gemma3_text")
    parts = cut(config)
    modules = [make(parts, k) for k in range(len(parts))]
    model = whole(config, modules, parts)
    given = batch(config, padded=True)
    all_ids, other = given["input_ids"], given["attention_mask"].flip(0)
    for ids, mask in ((all_ids, other), (all_ids[:2, 3:], None), (all_ids, torch.ones_like(other))):
        value: Any = {"input_ids": ids, "attention_mask": mask}
        for module in modules:
            value = module(value)
        seen = torch.ones_like(ids).bool() if mask is None else mask.bool()
        assert torch.allclose(value[seen], model(input_ids=ids, attention_mask=mask).logits[seen], atol=1e-9)


def test_arguments_remembered_by_shape_are_no_state_of_the_layers() -> None:
    """Lengths that change would otherwise look like something that copies of a layer must share."""
    from octopipe.runtime.stages.stage import Stage

    parts = cut(tiny_config("qwen3_moe"))
    embed, stage = make(parts, 0), Stage([make(parts, 1), make(parts, 2)], first_layer=1)
    ids = batch(tiny_config("qwen3_moe"), padded=False)["input_ids"]
    for length in (ids.shape[1], 3, 5, 4):
        stage.forward(embed(ids[:, :length]).detach())
    assert stage.replay.settled() and stage.replay.kept() == []


REFUSALS = {
    "an encoder": ({"model_type": "bert"}, "encoder"),
    "no such family": ({"model_type": "nonesuch"}, "does not know the model type"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_cut_says_why_in_one_line(case: str, tmp_path: Path) -> None:
    data, why = REFUSALS[case]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    with pytest.raises(OctoPipeError, match=why) as error:
        layers(path)
    assert "\n" not in str(error.value)


def test_a_loss_to_which_the_forward_adds_a_term_is_refused() -> None:
    """Bamba's z-loss is of the logits: the model's loss function does not know it."""
    assert layers(tiny_config("bamba", z_loss_coefficient=0.0)).loss_fn.function is not None
    with pytest.raises(OctoPipeError, match="BambaForCausalLM adds to the loss of its loss_function"):
        _ = layers(tiny_config("bamba", z_loss_coefficient=0.1)).loss_fn


def test_a_head_that_leaves_a_part_of_the_vocabulary_out_is_not_cut() -> None:
    """Inkling's padding words have no logits; a shard would take its own words for the first of the vocabulary."""
    assert layers(tiny_config("inkling_text", unpadded_vocab_size=None))[-1]().vocabulary_shard(1, 2).shard_start == 48
    head = layers(tiny_config("inkling_text", unpadded_vocab_size=90))[-1]()
    for number in range(2):
        with pytest.raises(OctoPipeError, match="depends on the whole vocabulary"):
            head.vocabulary_shard(number, 2)


def test_a_body_that_is_no_list_of_layers_is_refused() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    first, second = model.model.layers
    model.model.layers = torch.nn.ModuleDict({"first": first, "second": second})
    with pytest.raises(OctoPipeError, match="LlamaForCausalLM cannot be cut into layers: it has no list of"):
        layers(model)


def test_the_example_of_labels_holds() -> None:
    import doctest

    from octopipe.huggingface import labels

    assert doctest.testmod(labels) == (0, 4)


def test_batches_with_unknown_entries_are_refused() -> None:
    embed = cut(tiny_config("llama"))[0]()
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(OctoPipeError, match="labels as the target"):
        embed({"input_ids": ids, "labels": ids})
    with pytest.raises(OctoPipeError, match="token_type_ids"):
        embed({"input_ids": ids, "token_type_ids": ids})


def test_a_router_loss_that_is_added_in_another_way_is_refused() -> None:
    from octopipe.huggingface.routers import router_weight
    from octopipe.huggingface.source import model_class

    config = tiny_config("mixtral", **ROUTED)
    usual = model_class(config)._from_config(config)
    assert router_weight(usual) == 0.5

    class Otherwise(type(usual)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = usual.forward(*args, **kwargs)
            out.loss = out.loss + out.aux_loss.square()
            return out

    class Called(type(usual)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    assert router_weight(Called(config)) == 0.5
    with pytest.raises(OctoPipeError, match="Otherwise adds its routers' auxiliary loss"):
        router_weight(Otherwise(config))


@pytest.mark.parametrize(
    ("version", "old"), [("5.10.2", True), ("4.57.0", True), ("5.17.0.dev0", False), ("6.0", False)]
)
def test_a_version_whose_models_have_other_losses_is_refused(
    version: str, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octopipe.huggingface.source import transformers as package

    monkeypatch.setattr("transformers.__version__", version)
    if not old:
        assert package().__name__ == "transformers"
        return
    with pytest.raises(OctoPipeError, match=rf"transformers {version} is too old: .*pip install 'transformers>=5\.17'"):
        package()


def test_layers_are_named_and_counted() -> None:
    parts = layers(tiny_config("nemotron_h"))
    assert parts.class_name == "NemotronHForCausalLM" and len(parts) == len(parts.kinds) == 6
    assert parts.kinds[0] == "embedding" and "Mamba" in parts.kinds[1]
    assert parts.groups == (0, 1, 2, 3, 4, 5)
    assert layers(tiny_config("llama")).groups == (0, 1, 1, 1, 1, 2)
    name = parts.name_in_model(1, next(n for n, _ in parts[1]().named_parameters()))
    assert name.startswith("model.layers.0.")


def test_a_config_with_a_tower_that_names_its_text_model_is_shortened() -> None:
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "sliding_window": 16}
    config = transformers.Gemma3Config(
        text_config=text | {"layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 2},
        vision_config=tower | {"image_size": 28, "patch_size": 14},
        architectures=["Gemma3ForCausalLM"],
    )
    assert len(layers(config)) == 8 and len(layers(config, num_layers=4)) == 4
    assert config.text_config.num_hidden_layers == 6 and config.vision_config.num_hidden_layers == 2
