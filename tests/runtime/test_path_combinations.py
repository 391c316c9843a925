"""A second head along the way, together with what else a plan may decide: split heads, host memory, pairs of ops."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from effort import some

torch = pytest.importorskip("torch")
from ranks import PATIENCE_S, shared_ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import octopipe  # noqa: E402
from octopipe import Pipeline  # noqa: E402
from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.cluster.hardware import Link  # noqa: E402
from octopipe.costs.layer_graph import LayerGraph  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.branches import along_graph  # noqa: E402
from octopipe.plans.plan import Plan  # noqa: E402
from octopipe.runtime.nn.head import cross_entropy  # noqa: E402
from octopipe.runtime.path_losses import PathLosses  # noqa: E402
from octopipe.runtime.stages.shards import MeanCrossEntropy  # noqa: E402
from octopipe.search.graphs.cut_branches import cut_plan  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

VOCAB, WIDTH, TOKENS, COUNT, TOLERANCE = 22, 32, 40, 4, 1e-12
TAKES = ((), (0,), (1,), (2,), (3,), (0, 3), (5,))
HEADS = (4, 6)


class Next(nn.Module):
    """Joins the embedding, moved on by a token, and the last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.tanh(self.both(torch.cat((embedded.roll(-1, 1), hidden), -1)))


class Exchange(torch.autograd.Function):
    """Where the op beside this one has its turn, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        with octopipe.exchange():
            return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with octopipe.exchange():
            return gradient.clone()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(Exchange.apply(hidden)))


class Later:
    """0.3 times the loss of one token further on."""

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        return 0.3 * cross_entropy(output, later(target))

    def of_shards(self) -> LaterOfShards:
        return LaterOfShards()


class LaterOfShards(MeanCrossEntropy):
    def labels(self, target: Any) -> Tensor:
        return later(target).flatten()

    def of_tokens(self, token_losses: Tensor, target: Any) -> Tensor:
        return 0.3 * super().of_tokens(token_losses, target)


def later(target: Tensor) -> Tensor:
    return torch.cat((target[:, 1:], torch.full_like(target[:, :1], -100)), 1)


def forked(*, tied: bool = False) -> tuple[list[nn.Module], PathLosses]:
    """Two heads with one weight; with `tied`, the embedding's."""
    torch.manual_seed(4)
    layers: list[Any] = [nn.Embedding(VOCAB, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, VOCAB, bias=False)]
    layers += [Next(), nn.Linear(WIDTH, VOCAB, bias=False)]
    layers[6].weight = layers[4].weight
    if tied:
        layers[0].weight = layers[4].weight
    return [layer.double() for layer in layers], PathLosses({4: cross_entropy, 6: Later()})


def costs() -> CostTable:
    found = CostTable.uniform(num_layers=len(TAKES), p2p_ms=0.05, model="forked")
    slow = np.array([2.0 if k in HEADS else 1.0 for k in range(len(TAKES))])
    times = {name: getattr(found, name) * slow for name in ("forward_ms", "input_ms", "weight_ms")}
    graph = LayerGraph(takes=TAKES, shared=((HEADS, 0.0),))
    link = Link(latency_ms=0.01)
    return found.replace(graph=graph, boundary_bytes=np.ones(len(TAKES)), host_link=link, **times)


def batches() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randint(VOCAB, (2, TOKENS), generator=generator) for _ in range(2 * COUNT)]
    return drawn[:COUNT], drawn[COUNT:]


def expected(layers: list[nn.Module], losses: PathLosses) -> tuple[float, dict[int, Tensor]]:
    """The loss and the gradients of the layers run one after the other in this process."""
    total: Any = 0.0
    for x, y in zip(*batches(), strict=True):
        out: dict[int, Any] = {}
        for k, layer in enumerate(layers):
            out[k] = layer(*(out[j] for j in TAKES[k])) if k else layer(x)
        total = total + sum(losses.losses[k](out[k], y) for k in HEADS) / COUNT
    parameters = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    grads = torch.autograd.grad(total, parameters)
    return float(total.detach()), {id(p): g for p, g in zip(parameters, grads, strict=True)}


def differences(world: Any, plans: Mapping[str, Plan]) -> dict[str, tuple[float, float, float, int]]:
    """Per plan: how far the loss of a step, that of an evaluation, and the worst gradient are away; and how many bytes
    went to host memory."""
    torch.set_num_threads(1)
    out = {}
    for name, plan in plans.items():
        layers, losses = forked()
        loss, grads = expected(layers, losses)
        by_name = {f"{k}.{n}": grads[id(p)] for k, layer in enumerate(layers) for n, p in layer.named_parameters()}
        with Pipeline(layers, plan, losses, costs=costs(), group=world, timeout_s=PATIENCE_S) as pipe:
            found, again = float(pipe.step(*batches())), float(pipe.evaluate(*batches()))
            worst = 0.0
            for key, parameter in pipe.named_parameters():
                wanted = by_name[key]
                if pipe.layers.is_cut(key):
                    ranks = plan.shards()[int(key.split(".")[0])]
                    number, rows = ranks.index(world.rank), wanted.shape[0]
                    wanted = wanted[rows * number // len(ranks) : rows * (number + 1) // len(ranks)]
                assert parameter.grad is not None and parameter.grad.shape == wanted.shape
                worst = max(worst, float((parameter.grad - wanted).abs().max()))
            host = pipe.executor.ops.host
        out[name] = abs(found - loss), abs(again - loss), worst, 0 if host is None else host.moved_bytes
    return out


@pytest.mark.parametrize("size", some([2, 4]))
def test_both_heads_cut_give_the_loss_and_gradients_of_one_process(size: int) -> None:
    plans = {}
    for name in ("1f1b", "zb-h1"):
        for count in sorted({2, size}):
            plan = cut_plan(build_plan(name, costs(), size, COUNT), costs(), HEADS, count)
            assert plan is not None and plan.cut_heads == set(HEADS) and set(plan.shards()) == set(HEADS)
            plans[f"{name} {count}"] = plan
    for rank in shared_ranks(size).run(differences, plans):
        for name, (*away, moved) in rank.items():
            assert max(away) <= TOLERANCE and moved == 0, name


def offloading(plan: Plan) -> Plan:
    """The plan with the activations of all stages that have layers in host memory."""
    return replace(plan, stages=tuple(replace(s, offload=s.first < s.stop) for s in plan.stages)).check()


@pytest.mark.parametrize("size", some([2, 4]))
def test_paths_that_offload_give_the_loss_and_gradients_of_one_process(size: int) -> None:
    whole = {name: build_plan(name, costs(), size, COUNT) for name in ("gpipe", "1f1b", "zb-h1")}
    plans = {name: offloading(plan) for name, plan in whole.items()}
    cut = cut_plan(whole["gpipe"], costs(), HEADS, size)
    assert cut is not None
    plans["cut"] = offloading(cut)
    found = shared_ranks(size).run(differences, plans)
    for rank in found:
        for name, (*away, _) in rank.items():
            assert max(away) <= TOLERANCE, name
    assert all(sum(rank[name][-1] for rank in found) > 0 for name in ("gpipe", "cut"))


def paired(plan: Plan) -> Plan:
    """The plan with neighbouring forwards and backwards of different micro-batches running together."""
    for order in plan.orders:
        for first, second in itertools.pairwise(order):
            kinds = {first.kind, second.kind}
            if "F" in kinds and kinds & {"I", "B"} and first.micro_batch != second.micro_batch:
                more = replace(plan, pairs=plan.pairs | {(first, second)})
                plan = plan if more.problems() else more
    return plan


@pytest.mark.parametrize("size", some([2, 4]))
def test_pairs_of_ops_on_paths_give_the_loss_and_gradients_of_one_process(size: int) -> None:
    plans = {name: paired(build_plan(name, costs().as_chain(), size, COUNT)) for name in ("1f1b", "zb-h1")}
    plans = {name: along_graph(plan, costs().graph) for name, plan in plans.items()}
    cut = cut_plan(build_plan("1f1b", costs(), size, COUNT), costs(), HEADS, size)
    assert cut is not None
    plans["cut"] = paired(cut)
    assert all(len(plan.pairs) > 1 and plan.forks for plan in plans.values())
    for rank in shared_ranks(size).run(differences, plans):
        for name, (*away, _) in rank.items():
            assert max(away) <= TOLERANCE, name


def test_one_cut_head_beside_a_whole_one_with_the_same_weight_is_refused() -> None:
    plan = cut_plan(build_plan("1f1b", costs(), 2, COUNT), costs(), (4,), 2)
    assert plan is not None
    assert all("are one parameter" in words for words in shared_ranks(2).run(refusal, plan))


def refusal(world: Any, plan: Plan) -> str:
    layers, losses = forked()
    with pytest.raises(OctoPipeError) as caught:
        Pipeline(layers, plan, losses, group=world, timeout_s=PATIENCE_S)
    return str(caught.value)


class Known(list[Any]):
    """Layers that know their connections, as those of `octopipe.huggingface.layers` do."""

    takes = TAKES


def refused_edges(world: Any, plans: Mapping[str, Plan]) -> dict[str, str]:
    out = {}
    for name, plan in plans.items():
        layers, losses = forked()
        with pytest.raises(OctoPipeError) as caught:
            Pipeline(Known(layers), plan, losses, group=world, timeout_s=PATIENCE_S)
        out[name] = str(caught.value)
    return out


def test_edges_that_make_another_model_of_the_layers_are_refused_on_every_rank() -> None:
    plan = build_plan("1f1b", costs(), 2, COUNT)
    joined = next(s for s, stage in enumerate(plan.stages) if stage.first == 5)
    into = [edge for edge in plan.edges[0] if edge[1] == joined]
    swapped = [*(edge for edge in plan.edges[0] if edge[1] != joined), *reversed(into)]
    plans = {"swapped": replace(plan, edges=(tuple(swapped),)).check()}
    plans["chain"] = build_plan("1f1b", costs().replace(graph=None), 2, COUNT)
    for words in shared_ranks(2).run(refused_edges, plans):
        assert "from stages [2, 0], but layer 5 takes the outputs of layers [0, 3]" in words["swapped"]
        assert "layer 1 must begin a stage" in words["chain"]


def known(world: Any, plan: Plan) -> float:
    layers, losses = forked()
    loss, _ = expected(layers, losses)
    with Pipeline(Known(layers), plan, losses, costs=costs(), group=world, timeout_s=PATIENCE_S) as pipe:
        return abs(float(pipe.step(*batches())) - loss)


def test_plans_with_the_connections_of_the_layers_are_taken() -> None:
    assert max(shared_ranks(2).run(known, build_plan("zb-h1", costs(), 2, COUNT))) <= TOLERANCE
