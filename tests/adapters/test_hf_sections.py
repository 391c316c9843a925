"""Models with several stacks of layers, and layers that share tensors, against their unsplit twins."""

from __future__ import annotations

import collections
import copy
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from effort import WHOLE  # noqa: E402
from hf_families import tiny_config  # noqa: E402
from hf_towers import drawn, tiny_tower, tower_difference, twin_of  # noqa: E402
from hf_twins import chained, finite, grads_of  # noqa: E402
from hf_versions import VERSION  # noqa: E402
from packaging.version import Version  # noqa: E402
from ranks import PATIENCE_S, shared_ranks  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.huggingface import layers, micro_batches  # noqa: E402
from octopipe.huggingface.examples import example_of  # noqa: E402
from octopipe.huggingface.source import build_on_meta  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

KINDS = {
    "t5": {"encoder.block", "decoder.block"},
    "whisper": {"model.encoder.layers", "model.decoder.layers"},
    "qwen3_vl": {"model.visual.blocks", "model.language_model.layers"},
    "gemma3": {"model.vision_tower.encoder.layers", "model.language_model.layers"},
}
"""One family of every kind: biases that layers hand on, audio, features of several layers of a tower, of one layer."""
SHARING = ["glm_moe_dsa", "bart", "rwkv", "roformer"]
"""Layers that take what others return beside the hidden state; a loss by hand; a scaling between layers; positions that
are computed from frozen parameters."""
SLOW = """
    t5 mt5 umt5 switch_transformers bart mbart pegasus pegasus_x marian blenderbot blenderbot-small m2m_100 plbart mvp
    nllb-moe t5gemma t5gemma2 whisper moonshine speech_to_text qwen2_vl qwen2_5_vl qwen3_vl qwen3_5 gemma3 aya_vision
""".split()  # noqa: SIM905


@pytest.mark.parametrize("family", KINDS)
def test_pieces_one_after_another_are_the_model(family: str) -> None:
    off, parts = tower_difference(family)
    assert off < 1e-9
    assert {name for name in parts.stacks if "." in name} == KINDS[family]
    assert parts.stacks[0] == "embedding" and parts.stacks[-1] == "head"


@pytest.mark.parametrize("family", SHARING)
def test_layers_that_share_tensors_are_cut(family: str) -> None:
    assert chained(family) < 1e-6


def body(forward: Any) -> Any:
    """A Llama whose body runs its layers as `forward(body, hidden)` says."""
    kind = type(transformers.LlamaForCausalLM(tiny_config("llama")).model)

    class Body(kind):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Any = None, **_: Any) -> Any:
            hidden = forward(self, self.embed_tokens(input_ids))
            return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(tiny_config("llama"))
    model.model = Body(model.config)
    return model.double()


class Storing(torch.nn.Module):
    """The first of these layers stores its input's image in a container that all share; the others read it."""

    def __init__(self, first: bool):
        super().__init__()
        self.first, self.inner = first, torch.nn.Linear(32, 32)

    def forward(self, hidden: Any, shared: dict[str, Any]) -> Any:
        if self.first:
            shared["keys"] = self.inner(hidden)
        return hidden + torch.tanh(self.inner(hidden) * shared["keys"])


def with_container(self: Any, hidden: Any) -> Any:
    shared = self.container()
    for layer in self.layers:
        hidden = layer(hidden, shared)
    return hidden


def with_sums(self: Any, hidden: Any) -> Any:
    """Something of each layer's own input, and of the first layer's output, beside every layer."""
    first = None
    for layer in self.layers:
        hidden = 0.5 * hidden + layer(hidden, position_embeddings=self.rotary_emb(hidden, torch.arange(7)[None]))
        first = hidden if first is None else first
    return hidden + first


def with_repeats(self: Any, hidden: Any) -> Any:
    """Every layer twice: a model that loops."""
    for _ in range(2):
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=self.rotary_emb(hidden, torch.arange(7)[None]))
    return hidden


def with_changes(self: Any, hidden: Any) -> Any:
    """What every layer returns is changed in place before the next one takes it."""
    place = self.rotary_emb(hidden, torch.arange(7)[None])
    for layer in self.layers:
        hidden = layer(hidden, position_embeddings=place)
        hidden *= 0.5
    return hidden


CONTAINERS = {"container": dict, "mapping": collections.UserDict, "defaults": lambda: collections.defaultdict(list)}


@pytest.mark.parametrize("case", [*CONTAINERS, "sums", "repeats", "changes"])
def test_what_a_forward_does_between_layers_is_done_in_the_pieces(case: str) -> None:
    forwards = {"sums": with_sums, "repeats": with_repeats, "changes": with_changes}
    model = body(forwards.get(case, with_container))
    if case in CONTAINERS:
        model.model.container = CONTAINERS[case]
        model.model.layers = torch.nn.ModuleList(Storing(k == 0) for k in range(4)).double()
    ids = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(0))
    twin = copy.deepcopy(model)
    wanted = twin(input_ids=ids).logits
    wanted.pow(2).sum().backward()
    parts = layers(model)
    assert len(parts) == {"sums": 9, "repeats": 10, "changes": 9}.get(case, 6)
    value: Any = {"input_ids": ids}
    other: Any = {"input_ids": ids.flip(0)}
    for module in parts:
        value = module(value)
        with torch.no_grad():  # another micro-batch on the way leaves nothing that this one would read
            other = module(other)
    value.pow(2).sum().backward()
    assert torch.allclose(value, wanted, atol=1e-12)
    mine, theirs = grads_of(model.named_parameters()), grads_of(twin.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert torch.allclose(mine[name], grad, atol=1e-9), name


class OutOfSight(torch.autograd.Function):
    """Computed where no call of torch's is seen."""

    @staticmethod
    def forward(ctx: Any, hidden: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return hidden * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


def test_what_cannot_be_followed_is_refused_and_never_cut_in_silence() -> None:
    def forward(self: Any, hidden: Any) -> Any:
        for layer in self.layers:
            place = self.rotary_emb(hidden, torch.arange(7)[None])
            hidden = OutOfSight.apply(layer(hidden, position_embeddings=place))
        return hidden

    with pytest.raises(OctoPipeError, match=r"cannot be cut into layers: .* computed by a custom autograd function"):
        layers(body(forward))


def image_batches(config: Any, images: list[int]) -> list[dict[str, Any]]:
    """Micro-batches of one row with so many images of four tokens each, of different lengths."""
    generator = torch.Generator().manual_seed(9)
    out = []
    for count in images:
        words = [torch.randint(3, 400, (3,), generator=generator)]
        for _ in range(count):
            mark = torch.full((4,), config.image_token_id)
            words += [
                torch.tensor([config.vision_start_token_id]),
                mark,
                torch.randint(3, 400, (2,), generator=generator),
            ]
        ids = torch.cat(words)[None]
        row = {"input_ids": ids, "mm_token_type_ids": (ids == config.image_token_id).long()}
        if count:
            row["pixel_values"] = torch.randn(16 * count, 96, dtype=torch.float64, generator=generator)
            row["image_grid_thw"] = torch.tensor([[1, 4, 4]] * count)
        row["labels"] = torch.where(ids == config.image_token_id, -100, ids)
        out.append(row)
    return out


def seq2seq_batches(config: Any, _: list[int]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(9)
    out = []
    for length in (5, 7, 6, 9):
        ids = torch.randint(3, 400, (1, length), generator=generator)
        labels = torch.randint(3, 400, (1, length - 1), generator=generator)
        out.append({"input_ids": ids, "decoder_input_ids": labels.roll(1, 1), "labels": labels})
    return out


def made_up_batches(config: Any, _: list[int]) -> list[dict[str, Any]]:
    """The example of a model's inputs with other values in every micro-batch."""
    example = example_of(build_on_meta(config, dtype=torch.float64, attention=None))
    rows = [drawn(example, seed) for seed in range(4)]
    return [{**row, "labels": row.get("decoder_input_ids", row.get("input_ids")).roll(-1, 1)} for row in rows]


BATCHES = {"t5": seq2seq_batches, "qwen3_vl": image_batches}
"""By family: batches of different lengths; others have made-up ones."""


def run_sections(world: Any, family: str, frozen: bool) -> list[tuple[str, float]]:
    from octopipe.runtime.pipeline import Pipeline

    out = []
    for system in ("1f1b", "zb-v") if WHOLE else ("zb-v",):
        config = tiny_tower(family)
        model = twin_of(family, config)
        if frozen:
            model.model.visual.requires_grad_(False)
        batches = BATCHES.get(family, made_up_batches)(copy.deepcopy(config), [2, 0, 1, 3])
        inputs, targets = micro_batches(batches)
        total = float(sum(((b["labels"] if family == "t5" else b["labels"][:, 1:]) != -100).sum() for b in batches))
        expected = 0.0
        for b in batches:
            count = float(((b["labels"] if family == "t5" else b["labels"][:, 1:]) != -100).sum())
            loss = model(**b, use_cache=False).loss * (count / total)
            loss.backward()
            expected += float(loss.detach())
        wanted = {id(p): None if p.grad is None else p.grad.clone() for p in model.parameters()}
        model.zero_grad(set_to_none=True)
        parts = layers(model)
        costs = CostTable.uniform(num_layers=len(parts))
        plan = build_plan(system, costs, world.size, len(batches))
        with Pipeline(parts, plan, parts.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            found = float(pipe.step(inputs, targets))
            worst = finite(abs(found - expected))
            for name, p in pipe.named_parameters():
                want = wanted[id(p)]
                if p.grad is None or want is None:
                    assert all(g is None or not g.any() for g in (p.grad, want)), name
                else:
                    worst = max(worst, finite(float((p.grad - want).abs().max())))
        out.append((system, worst))
    return out


@pytest.mark.parametrize(
    ("family", "frozen"),
    [
        pytest.param("qwen3_vl", False, marks=pytest.mark.slow),
        ("qwen3_vl", True),
        pytest.param("t5", False, marks=pytest.mark.slow),
    ],
)
def test_on_two_ranks_gradients_are_those_of_one_process(family: str, frozen: bool) -> None:
    for found in shared_ranks(2).run(run_sections, family, frozen):
        for system, worst in found:
            assert worst < 1e-6, system


@pytest.mark.slow
@pytest.mark.parametrize("family", ["molmo2", "nemotron_h_omni", "fun_asr_nano", "dia", "udop", "chameleon"])
def test_on_two_ranks_made_up_inputs_give_the_gradients_of_one_process(family: str) -> None:
    for found in shared_ranks(2).run(run_sections, family, False):
        for system, worst in found:
            assert worst < 1e-6, system


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "t5"])
def test_on_four_ranks_gradients_are_those_of_one_process(family: str) -> None:
    for found in shared_ranks(4).run(run_sections, family, False):
        for system, worst in found:
            assert worst < 1e-6, system


def test_a_config_on_disk_makes_pieces_that_hold_every_weight_once_or_tied(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_tower("qwen3_vl").to_dict()))
    parts = layers(path, dtype=torch.float64)
    found: dict[str, str] = {}
    for k, make in enumerate(parts):
        piece = make()
        for name, _ in piece.named_parameters():
            whole = parts.name_in_model(k, name)
            assert whole not in found or name in piece.tied_to, whole
            found[whole] = name
    model = twin_of("qwen3_vl", tiny_tower("qwen3_vl"))
    assert set(found) == {name for name, _ in model.named_parameters()}


def test_batches_unlike_the_example_are_named() -> None:
    parts = layers(twin_of("t5", tiny_tower("t5")))
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(OctoPipeError, match="labels as the target"):
        parts[0]({"input_ids": ids, "labels": ids})
    with pytest.raises(OctoPipeError, match="pixel_values, which the model's example does not have"):
        parts[0]({"input_ids": ids, "pixel_values": ids})


def test_an_input_without_a_convention_asks_for_an_example() -> None:
    config = tiny_tower("qwen3_vl")
    model = twin_of("qwen3_vl", config)
    model.config.vision_config.patch_size = 5  # not what its weights are made for
    with pytest.raises(OctoPipeError, match=r"takes pixel_values.* give an example of a small batch: layers\(model"):
        layers(model)
    row = image_batches(config, [1])[0]
    parts = layers(model, example={name: value for name, value in row.items() if name != "labels"})
    assert len(parts) > 6


def routed(world: Any, family: str, changes: dict[str, Any]) -> tuple[float, float, float]:
    """On a rank: the loss, the part of it that the routers add, and the worst difference from one process."""
    from octopipe.runtime.pipeline import Pipeline

    config = tiny_tower(family, text_config=changes)
    model = twin_of(family, config)
    batches = image_batches(config, [2, 0, 1, 3])
    inputs, targets = micro_batches(batches)
    share = targets[0]["num_items_in_batch"]
    answers = [model(**b, num_items_in_batch=share, use_cache=False) for b in batches]
    expected = sum(answer.loss for answer in answers) / len(batches)
    expected.backward()
    losses = [0.0 if answer.aux_loss is None else float(answer.aux_loss.detach()) for answer in answers]
    added = sum(losses) / len(batches) * changes["router_aux_loss_coef"]
    wanted = {id(p): None if p.grad is None else p.grad.clone() for p in model.parameters()}
    model.zero_grad(set_to_none=True)
    parts = layers(model)
    plan = build_plan("1f1b", CostTable.uniform(num_layers=len(parts)), world.size, len(batches))
    with Pipeline(parts, plan, parts.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        loss = float(pipe.step(inputs, targets))
        off = finite(abs(loss - float(expected.detach())))
        for name, p in pipe.named_parameters():
            want = wanted[id(p)]
            if p.grad is None or want is None:
                assert all(g is None or not g.any() for g in (p.grad, want)), name
            else:
                off = max(off, finite(float((p.grad - want).abs().max())))
    return loss, added, off


def test_router_losses_of_sections_on_two_ranks_are_those_of_one_process() -> None:
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    for loss, added, off in shared_ranks(2).run(routed, "qwen3_vl_moe", changes):
        assert off < 1e-6
        # What a pipeline without them would lack. transformers 5.17 ignores what this config says.
        assert 0.1 < added < loss or (added == 0 and Version("5.18") > VERSION)


def test_router_losses_of_two_stacks_are_refused() -> None:
    with pytest.raises(OctoPipeError, match="routers of two stacks"):
        layers(twin_of("nllb-moe", tiny_tower("nllb-moe", output_router_logits=True)))


@pytest.mark.slow
@pytest.mark.parametrize("family", SLOW)
def test_every_usual_family_with_a_tower_or_an_encoder_is_the_model(family: str) -> None:
    assert tower_difference(family)[0] < 1e-6
