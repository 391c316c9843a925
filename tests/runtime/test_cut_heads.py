"""Heads cut by vocabulary, and a second head along the way, against whole heads in one process."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from effort import draws, some

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from plans import interleaved  # noqa: E402
from random_plans import needed  # noqa: E402
from ranks import PATIENCE_S, shared_ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.models import layers as spec  # noqa: E402
from octopipe.plans.plan import Op, Plan, Stage  # noqa: E402
from octopipe.runtime.nn.basic import Embedding, Mlp  # noqa: E402
from octopipe.runtime.nn.head import Head, cross_entropy  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402

TOLERANCE = 1e-12
WIDTH, VOCAB, TOKENS = 6, 23, 5


# -- a head in shards --------------------------------------------------------------------------------------


def model(kind: str) -> tuple[list[nn.Module], Any]:
    torch.manual_seed(3)
    made = {"dtype": torch.float64, "device": "cpu"}
    tied = "tied" in kind
    if kind.startswith("plain"):
        ends: list[nn.Module] = [
            nn.Embedding(VOCAB, WIDTH, **made),
            nn.Linear(WIDTH, VOCAB, bias="bias" in kind, **made),
        ]
        loss: Any = nn.CrossEntropyLoss()
    else:
        ends = [
            Embedding(spec.Embedding(hidden=WIDTH, vocab=VOCAB), made, tied),
            Head(spec.Head(hidden=WIDTH, vocab=VOCAB, tied=tied), 1e-5, made, lean="lean" in kind),
        ]
        loss = cross_entropy
    body = [Mlp(spec.Mlp(hidden=WIDTH, ffn=12), 1e-5, made) for _ in range(3)]
    for module in (*ends, *body):
        for p in module.parameters():
            nn.init.normal_(p, std=0.5)
    if tied:
        ends[1].weight = ends[0].weight
    return [ends[0], *body, ends[1]], loss


def cut_plan(seed: int, ranks: int, *, embedding: bool, layers: int = 5) -> Plan:
    """A random plan with the head (and the embedding) in shards on all or some ranks."""
    rng = random.Random(seed)
    micro_batches = rng.randint(1, 3)
    held = rng.sample(range(ranks), rng.randint(min(2, ranks), ranks))
    parts = len(held)
    stages: list[Stage] = []
    if embedding:
        stages += [Stage(first=0, stop=1, rank=r, shard=(k, parts)) for k, r in enumerate(held)]
    first = 1 if embedding else 0
    cuts = sorted({first, layers - 1, *(rng.randint(first + 1, layers - 2) for _ in range(2))})
    body = list(range(len(stages), len(stages) + len(cuts) - 1))
    stages += [
        Stage(first=a, stop=b, rank=rng.randrange(ranks), recompute=rng.random() < 0.3)
        for a, b in itertools.pairwise(cuts)
    ]
    again = rng.random() < 0.3
    shards = list(range(len(stages), len(stages) + parts))
    stages += [
        Stage(first=layers - 1, stop=layers, rank=r, shard=(k, parts), recompute=again) for k, r in enumerate(held)
    ]
    loss = len(stages)
    stages.append(Stage(first=layers, stop=layers, rank=rng.randrange(ranks)))
    edges = [(k, body[0]) for k in range(body[0])] + list(itertools.pairwise(body))
    edges += [(body[-1], s) for s in shards] + [(s, loss) for s in shards]
    needs = needed(rng, stages, edges, micro_batches, fused=(loss,))
    orders = interleaved(rng, needs, stages, ranks)
    return Plan(
        num_layers=layers,
        num_ranks=ranks,
        num_micro_batches=micro_batches,
        stages=tuple(stages),
        orders=tuple(map(tuple, orders)),
        routes=(tuple(range(len(stages))),),
        edges=(tuple(edges),),
    ).check()


def run_cut_heads(world, jobs):
    out = []
    for seed, kind, embedding in jobs:
        plan = cut_plan(seed, world.size, embedding=embedding)
        layers, loss_fn = model(kind)
        generator = torch.Generator().manual_seed(seed)
        shape = (2 * TOKENS,) if kind.startswith("plain") else (2, TOKENS)
        tokens = [torch.randint(VOCAB, shape, generator=generator) for _ in range(plan.num_micro_batches)]
        targets = [torch.randint(VOCAB, shape, generator=generator) for _ in range(plan.num_micro_batches)]
        for target in targets:
            target.view(-1)[0] = -100
        names = [(f"{k}.{n}", p) for k, layer in enumerate(layers) for n, p in layer.named_parameters()]
        total = 0.0
        for x, y in zip(tokens, targets, strict=True):
            for layer in layers:
                x = layer(x)
            total = total + loss_fn(x, y) / len(tokens)
        unique = list({id(p): p for _, p in names}.values())
        grads = {id(p): g for p, g in zip(unique, torch.autograd.grad(total, unique), strict=True)}
        expected = {n: grads[id(p)] for n, p in names}
        norm = float(torch.stack([g.norm() for g in grads.values()]).norm())
        with Pipeline(layers, plan, loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            evaluated = float(pipe.evaluate(tokens, targets))
            found = float(pipe.step(tokens, targets))
            found_norm = float(pipe.grad_norm())
        worst = 0.0
        for name, p in pipe.named_parameters():
            wanted = expected[name]
            if pipe.layers.is_cut(name):
                start = pipe.layers.modules[int(name.split(".")[0])].shard_start
                wanted = wanted[start : start + p.shape[0]]
            worst = max(worst, float((p.grad - wanted).abs().max()))
        away = max(abs(found - total.item()), abs(evaluated - total.item()), abs(found_norm - norm))
        out.append(((seed, kind, embedding), worst, away))
        pipe.zero_grad()
    return out


KINDS = (
    ("ours", False),
    ("ours lean", True),
    ("ours lean tied", True),
    ("ours", True),
    ("plain", False),
    ("plain bias", True),
)


@pytest.mark.parametrize("size", some([2, 3, 4], quick=[2, 4]))
def test_a_cut_head_gives_the_loss_and_gradients_of_the_whole_one(size):
    jobs = [(100 * size + k, *KINDS[k % len(KINDS)]) for k in range(draws(24, least=len(KINDS) if size == 2 else 4))]
    for per_rank in shared_ranks(size).run(run_cut_heads, jobs):
        for job, gradient, away in per_rank:
            assert gradient <= TOLERANCE and away <= TOLERANCE, job


def refused(world, what):
    layers, loss_fn = model("ours tied" if what == "tie" else "ours")
    plan = cut_plan(7, world.size, embedding=False)
    if what == "loss":
        loss_fn = F.mse_loss
    if what == "module":
        layers[-1] = nn.Sequential(layers[-1])
    with pytest.raises(OctoPipeError) as caught:
        Pipeline(layers, plan, loss_fn, group=world, timeout_s=PATIENCE_S)
    return str(caught.value)


def test_what_cannot_be_cut_is_named():
    words = {"tie": "are one parameter", "loss": "mean cross-entropy", "module": "vocabulary_shard"}
    for what, expected in words.items():
        for said in shared_ranks(2).run(refused, what):
            assert expected in said, said


# -- Hugging Face heads ------------------------------------------------------------------------------------


def hf_config(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    common = {
        "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0,
        "tie_word_embeddings": "tied" in kind,
    }  # fmt: skip
    if kind.startswith("gemma"):
        return transformers.Gemma3TextConfig(**common, sliding_window=8, final_logit_softcapping=5.0)
    return transformers.LlamaConfig(**common)


def in_double(model_: Any) -> None:
    """transformers' norms compute in float32, where the order of a sum shows at 1e-8: these do not."""
    for module in model_.modules():
        if type(module).__name__.endswith("RMSNorm"):
            type(module).forward = _norm_in_double


def _norm_in_double(self: Any, x: Tensor) -> Tensor:
    gemma = hasattr(self, "eps")
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (self.eps if gemma else self.variance_epsilon))
    return x * scale * (1.0 + self.weight if gemma else self.weight)


def run_hf_heads(world, jobs):
    import transformers

    from octopipe import huggingface

    out = []
    for seed, kind in jobs:
        torch.manual_seed(5)
        model_ = transformers.AutoModelForCausalLM.from_config(hf_config(kind), attn_implementation="sdpa").double()
        in_double(model_)
        plan = cut_plan(seed, world.size, embedding="tied" in kind)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, 37, (2 * plan.num_micro_batches, 6), generator=generator)
        labels = ids.clone()
        labels[0, :2] = -100
        model_.zero_grad(set_to_none=True)
        inputs, targets = huggingface.micro_batches({"input_ids": ids, "labels": labels}, plan.num_micro_batches)
        total = 0.0
        for x, y in zip(inputs, targets, strict=True):
            # transformers' own loss turns logits into float32; this is the same in float64.
            logits, later = model_(**x).logits[:, :-1].flatten(0, 1), y["labels"][:, 1:].flatten()
            loss = F.cross_entropy(logits, later, reduction="sum") / y["num_items_in_batch"] / len(inputs)
            loss.backward()
            total += float(loss.detach())
        expected = {n: p.grad.clone() for n, p in model_.named_parameters(remove_duplicate=False)}
        model_.zero_grad(set_to_none=True)
        parts = huggingface.layers(model_)
        with Pipeline(parts, plan, parts.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            found = float(pipe.step(inputs, targets))
        worst = 0.0
        for name, p in pipe.named_parameters():
            layer, path = name.split(".", 1)
            wanted = expected[parts.name_in_model(int(layer), path)]
            if pipe.layers.is_cut(name):
                start = pipe.layers.modules[int(layer)].shard_start
                wanted = wanted[start : start + p.shape[0]]
            worst = max(worst, float((p.grad - wanted).abs().max()))
        out.append(((seed, kind), worst, abs(found - total)))
        pipe.zero_grad()
    return out


def test_cut_heads_of_transformers_give_the_gradients_of_the_model():
    pytest.importorskip("transformers")
    jobs = [(k, kind) for k, kind in enumerate(("llama", "llama tied", "gemma tied", "gemma", "llama tied"))]
    for per_rank in shared_ranks(2).run(run_hf_heads, jobs):
        for job, gradient, away in per_rank:
            assert gradient <= TOLERANCE and away <= TOLERANCE, job


# -- checkpoints -------------------------------------------------------------------------------------------


def train_and_save(world, folder, cut_first):
    """Three steps under one plan, saved, loaded under the other, two more; and the losses of a run without a change."""
    from octopipe.runtime.training.checkpoint import load_checkpoint, save_checkpoint

    cut = cut_plan(11, world.size, embedding=True)
    whole = Plan(
        num_layers=5,
        num_ranks=2,
        num_micro_batches=cut.num_micro_batches,
        stages=(Stage(first=0, stop=2, rank=0), Stage(first=2, stop=5, rank=1)),
        orders=tuple(
            tuple(op for m in range(cut.num_micro_batches) for op in (Op(r, "F", m), Op(r, "B", m))) for r in range(2)
        ),
    ).check()
    plans = (cut, whole) if cut_first else (whole, cut)
    generator = torch.Generator().manual_seed(1)
    shape = (5, cut.num_micro_batches, 2, TOKENS)
    tokens, targets = (torch.randint(VOCAB, shape, generator=generator) for _ in range(2))

    def run(plan, steps, load=None, save=None):
        layers, loss_fn = model("ours lean tied")
        with Pipeline(layers, plan, loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
            if load is not None:
                load_checkpoint(load, pipe, optimizer)
            losses = []
            for k in steps:
                losses.append(float(pipe.step(list(tokens[k]), list(targets[k]))))
                pipe.clip_grad_norm_(0.5)
                optimizer.step()
                pipe.zero_grad()
            path = save and save_checkpoint(save, pipe, optimizer, step=len(losses))
        return losses, path

    straight, _ = run(whole, range(5))
    first, path = run(plans[0], range(3), save=folder)
    second, _ = run(plans[1], range(3, 5), load=path)
    return max(abs(a - b) for a, b in zip(straight, first + second, strict=True))


@pytest.mark.parametrize("cut_first", [True, False])
def test_checkpoints_hold_the_whole_head_and_resume_under_either_plan(tmp_path, cut_first):
    for away in shared_ranks(2).run(train_and_save, str(tmp_path), cut_first):
        assert away <= 1e-11
    head = torch.load(next(tmp_path.glob("step-*/layer-0004.pt")), weights_only=True)
    assert head["state"]["weight"].shape == (VOCAB, WIDTH)


def test_the_trainers_loss_of_shards_is_that_of_the_whole_head():
    from octopipe.runtime.stages.shards import JoinedShards, cut_module
    from octopipe.runtime.training.data.batches import StepLoss

    torch.manual_seed(0)
    head, hidden = nn.Linear(WIDTH, VOCAB, bias=False).double(), torch.randn(2, TOKENS, WIDTH).double()
    target = torch.randint(VOCAB, (2, TOKENS))
    target[0, 0] = -100
    loss = StepLoss(cross_entropy, shifted=False)
    cut, shards = loss.of_shards(), [cut_module(head, k, 3, 0) for k in range(3)]
    for given in (target, (target, torch.tensor(0.7)), {"labels": target, "items": torch.tensor(4.5)}):
        tokens = JoinedShards()(*[cut.partial(shard)(shard(hidden), given) for shard in shards])
        assert float((cut.of_tokens(tokens, given) - loss(head(hidden), given)).detach().abs()) <= TOLERANCE


# -- heads along the way -----------------------------------------------------------------------------------


class NextToken(nn.Module):
    """A multi-token-prediction module as in DeepSeek-V3: hidden states and the next tokens' embeddings, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.block = Mlp(spec.Mlp(hidden=WIDTH, ffn=12), 1e-5, {"dtype": torch.float64, "device": "cpu"})

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        ahead = torch.cat((embedded[:, 1:], embedded[:, -1:]), 1)
        return self.block(self.join(torch.cat((hidden, ahead), -1)))


def second_loss(output: Any, target: Tensor) -> Tensor:
    """The token after the next one."""
    later = torch.cat((target[:, 1:], torch.full_like(target[:, :1], -100)), 1)
    return 0.3 * cross_entropy(output, later)


def run_mtp(world):
    from octopipe.runtime.path_losses import PathLosses

    (embedding, *body, head), loss_fn = model("ours lean tied")
    torch.manual_seed(8)
    layers = [embedding, *body, head, NextToken(), model("ours lean")[0][-1]]
    layers[6].weight = head.weight  # one projection for both heads, and the embedding's
    last = world.size - 1
    stages = (
        Stage(first=0, stop=1, rank=0),
        Stage(first=1, stop=4, rank=0),
        Stage(first=4, stop=5, rank=last),
        Stage(first=5, stop=6, rank=1, recompute=True),
        Stage(first=6, stop=7, rank=last),
    )
    edges = ((0, 1), (0, 3), (1, 2), (1, 3), (3, 4))
    forward = ["0F", "1F", "2F", "3F", "4F"]
    backward = ["4I", "4W", "3R", "3B", "2I", "2W", "1B", "0B"]
    orders: list[list[Op]] = [[] for _ in range(world.size)]
    for m in range(2):
        for text in forward + backward:
            op = Op.parse(f"{text}{m}")
            orders[stages[op.stage].rank].append(op)
    plan = Plan(
        num_layers=7,
        num_ranks=world.size,
        num_micro_batches=2,
        stages=stages,
        orders=tuple(map(tuple, orders)),
        routes=((0, 1, 2, 3, 4),),
        edges=(edges,),
    ).check()
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(VOCAB, (2, TOKENS), generator=generator) for _ in range(2)]
    targets = [torch.randint(VOCAB, (2, TOKENS), generator=generator) for _ in range(2)]
    total: Any = 0.0
    for x, y in zip(tokens, targets, strict=True):
        embedded = layers[0](x)
        hidden = embedded
        for layer in layers[1:4]:
            hidden = layer(hidden)
        second = second_loss(layers[6](layers[5](embedded, hidden)), y)
        total = total + (loss_fn(layers[4](hidden), y) + second) / 2
    parameters = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    expected = {id(p): g for p, g in zip(parameters, torch.autograd.grad(total, parameters), strict=True)}
    with Pipeline(layers, plan, PathLosses({4: loss_fn, 6: second_loss}), group=world, timeout_s=PATIENCE_S) as pipe:
        found = float(pipe.step(tokens, targets))
    worst = max((float((p.grad - expected[id(p)]).abs().max()) for _, p in pipe.named_parameters()), default=0.0)
    with pytest.raises(OctoPipeError, match="ends with layer 6"):
        Pipeline(layers, plan, PathLosses({4: loss_fn}), group=world, timeout_s=PATIENCE_S)
    return worst, abs(found - total.item())


@pytest.mark.parametrize("size", some([2, 4]))
def test_a_second_head_along_the_way_gives_the_gradients_of_one_process(size):
    for worst, away in shared_ranks(size).run(run_mtp):
        assert worst <= TOLERANCE and away <= TOLERANCE
