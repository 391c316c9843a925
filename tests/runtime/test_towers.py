"""Vision-language models on several ranks against transformers' own forward in one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from effort import WHOLE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from ranks import PATIENCE_S, shared_ranks  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Op, Plan, Stage  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

TOLERANCE = 1e-12
IMAGE, TOKENS, VOCAB = 36, 4, 37


def tiny_llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    torch.manual_seed(4)
    model = transformers.LlavaForConditionalGeneration(config).double()
    model.set_attn_implementation("eager")
    return model


def batch(images: list[int]) -> tuple[list[Any], list[Any]]:
    """Micro-batches of one row with so many images each, of different lengths."""
    generator = torch.Generator().manual_seed(9)
    pixels, tokens = [], []
    for count in images:
        pixels.append(torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=generator))
        words = [torch.randint(1, IMAGE, (3,), generator=generator)]
        for _ in range(count):
            words += [torch.full((TOKENS,), IMAGE), torch.randint(1, IMAGE, (2,), generator=generator)]
        tokens.append(torch.cat(words)[None])
    return pixels, tokens


def labels_of(ids: Any) -> Any:
    return torch.where(ids == IMAGE, -100, ids)


def in_one_process(model: Any, pixels: list[Any], tokens: list[Any]) -> float:
    total = 0.0
    for image, ids in zip(pixels, tokens, strict=True):
        given = {"pixel_values": image} if len(image) else {}
        loss = model(input_ids=ids, labels=labels_of(ids), **given).loss / len(tokens)
        loss.backward()
        total += float(loss.detach())
    return total


def skipping_plan(layers: int, vision: int, images: list[int], ranks: int) -> Plan:
    """The tower on the last rank, the rest in even stages; micro-batches without images leave the tower out."""
    cuts = [vision + (layers - vision) * k // ranks for k in range(ranks + 1)]
    stages = [Stage(first=0, stop=vision, rank=ranks - 1)]
    stages += [Stage(first=a, stop=b, rank=r) for r, (a, b) in enumerate(itertools.pairwise(cuts))]
    with_image, without = tuple(range(ranks + 1)), tuple(range(1, ranks + 1))
    orders: list[list[Op]] = [[] for _ in range(ranks)]
    for m, count in enumerate(images):
        path = with_image if count else without
        for kind in "FB":
            for s in path if kind == "F" else reversed(path):
                orders[stages[s].rank].append(Op(s, kind, m))
    return Plan(
        num_layers=layers,
        num_ranks=ranks,
        num_micro_batches=len(images),
        stages=tuple(stages),
        orders=tuple(map(tuple, orders)),
        routes=(with_image, without),
        edges=tuple(tuple(itertools.pairwise(path)) for path in (with_image, without)),
        route_of_micro_batch=tuple(0 if count else 1 for count in images),
    ).check()


def run_towers(world, frozen):
    from octopipe import huggingface
    from octopipe.runtime.pipeline import Pipeline

    out = []
    images = [2, 0, 1, 3]
    for name in ("1f1b", "gpipe", "skipping") if WHOLE else ("1f1b", "skipping"):
        model = tiny_llava()
        if frozen:
            model.model.vision_tower.requires_grad_(False)
        pixels, tokens = batch(images)
        expected = in_one_process(model, pixels, tokens)
        wanted = {id(p): None if p.grad is None else p.grad.clone() for p in model.parameters()}
        model.zero_grad(set_to_none=True)
        parts = huggingface.vision_language(model)
        count = len(parts.layers)
        if name == "skipping":
            plan = skipping_plan(count, parts.num_vision_layers, images, world.size)
        else:
            plan = build_plan(name, CostTable.uniform(num_layers=count), world.size, 4, split_backward=True)
        with Pipeline(
            parts.layers, plan, parts.loss_fn, group=world, side_inputs=parts.side_inputs, timeout_s=PATIENCE_S
        ) as pipe:
            labels = [labels_of(ids) for ids in tokens]
            found = float(pipe.step(pixels, labels, side={"input_ids": tokens}))
        worst = 0.0
        for _, p in pipe.named_parameters():
            want = wanted[id(p)]
            if p.grad is None or want is None:
                zero = all(g is None or not g.any() for g in (p.grad, want))
                worst = max(worst, 0.0 if zero else 1.0)
                assert not (frozen and want is None and p.grad is not None)
            else:
                worst = max(worst, float((p.grad - want).abs().max()))
        out.append((name, worst, abs(found - expected)))
    return out


@pytest.mark.parametrize(("size", "frozen"), [(2, False), (2, True), pytest.param(4, False, marks=pytest.mark.slow)])
def test_a_vision_language_model_gives_the_gradients_of_one_process(size, frozen):
    for per_rank in shared_ranks(size).run(run_towers, frozen):
        for name, gradient, loss in per_rank:
            assert gradient <= TOLERANCE and loss <= TOLERANCE, name


def test_other_models_are_refused_with_the_reason():
    from octopipe import huggingface

    text = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                    num_attention_heads=1, num_key_value_heads=1)  # fmt: skip
    with pytest.raises(OctoPipeError, match="not built like LLaVA"):
        huggingface.vision_language(transformers.LlamaForCausalLM(text))
