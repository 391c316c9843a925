"""Tokens per expert as a profile counts them, against the routers' own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.nn.functional import all_to_all_single  # noqa: E402

from octopipe.cli import main  # noqa: E402
from octopipe.costs.profile_file import load_profile  # noqa: E402
from octopipe.models import layers as spec  # noqa: E402
from octopipe.runtime.measure import trial  # noqa: E402
from octopipe.runtime.measure.profiler import assemble, profile_layers  # noqa: E402
from octopipe.runtime.measure.routing import recorded_routing  # noqa: E402
from octopipe.runtime.nn.moe import Moe  # noqa: E402


def tokens_of(choose: Any, x: Any) -> tuple[float, ...]:
    before = torch.topk, torch.Tensor.topk
    with recorded_routing() as heard:
        choose(x)
    assert (torch.topk, torch.Tensor.topk) == before
    return heard.tokens_per_expert(x)


def counted(chosen: Any, experts: int) -> tuple[float, ...]:
    """One by one."""
    return tuple(float(sum(int(c) == e for c in chosen.flatten())) for e in range(experts))


def test_a_plain_router_is_counted() -> None:
    x, gate = torch.randn(2, 9, 8), torch.randn(8, 6)
    assert tokens_of(lambda x: (x @ gate).topk(2, dim=-1), x) == counted(torch.topk(x @ gate, 2)[1], 6)
    assert tokens_of(lambda x: torch.topk(x.flatten(0, 1) @ gate, k=3, dim=-1), x) == counted((x @ gate).topk(3)[1], 6)


def test_a_router_that_chooses_groups_first_is_counted_by_experts() -> None:
    """DeepSeek-V3's: the two best of every group, then groups, then experts of these groups."""
    x, gate = torch.randn(1, 12, 8), torch.randn(8, 8)
    last: list[Any] = []

    def choose(x: Any) -> None:
        scores = (x @ gate).flatten(0, 1).sigmoid()
        groups = scores.view(-1, 4, 2).topk(2, dim=-1)[0].sum(-1)
        best = torch.topk(groups, 2, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(groups).scatter_(1, best, 1).repeat_interleave(2, 1)
        last.append(scores.masked_fill(mask == 0, 0).topk(2, dim=-1)[1])

    assert tokens_of(choose, x) == counted(last[0], 8)


def test_what_is_no_router_is_not_counted() -> None:
    x = torch.randn(2, 9, 8)
    gate = torch.randn(8, 4)
    assert tokens_of(lambda x: x.softmax(-1), x) == ()
    assert tokens_of(lambda x: (x @ gate).flatten(0, 1).t().topk(5, dim=-1), x) == ()  # experts choose tokens
    assert tokens_of(lambda x: (x @ x.transpose(1, 2)).flatten().topk(3), x) == ()
    assert tokens_of(lambda x: (x @ x.transpose(1, 2)).topk(3), x) == ()  # every token chooses keys
    many = torch.randn(8, 200)
    assert tokens_of(lambda x: (x @ many).topk(100), x) == ()  # sparse attention chooses keys


def test_a_profile_holds_the_routing_of_each_kind_of_layer() -> None:
    torch.manual_seed(3)
    made = {"device": torch.device("cpu"), "dtype": torch.float32}
    kinds = [spec.Moe(hidden=16, ffn=8, experts=e, top_k=2) for e in (4, 6)]
    layers: list[Any] = [nn.Linear(16, 16), *(Moe(kind, 1e-5, made) for kind in (*kinds, kinds[0]))]
    for layer in layers:
        for p in layer.parameters():
            nn.init.normal_(p, std=0.3)
    x = torch.randn(1, 20, 16)
    measured = profile_layers(layers, x, lambda out, y: (out - y).square().mean(), x, repeats=1, warm_up=0)
    routing = assemble([measured], model="m", symbols="LXYX").costs.routing
    assert routing is not None and routing.ranks == 1 and routing.micro_batches == 1
    assert [len(row) for row in routing.tokens] == [0, 4, 6, 4]
    assert all(sum(row) == 2 * 20 for row in routing.tokens[1:])
    with torch.no_grad():
        inner = layers[0](x)
        logits = layers[1].router(layers[1].norm(inner).flatten(0, 1))
    assert routing.tokens[1] == counted(logits.topk(2)[1], 4)


class Exchanging(nn.Module):
    """Four experts on two ranks, in name: rows go there and back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        self.gate(x).topk(2)
        there = all_to_all_single(torch.empty_like(x), x)
        return all_to_all_single(torch.empty_like(x), there * self.gate.weight.sum())


def measure_exchanging(world: Any) -> Any:
    x = torch.ones(6, 4)
    layers = [Exchanging(), Exchanging(), nn.Linear(4, 4)]
    group = dist.new_group([world.rank], use_local_synchronization=True)
    measured = profile_layers(layers, x, lambda out, y: out.sum(), x, repeats=1, warm_up=0, group=group)
    return assemble([measured], model="m", symbols="XXL").costs.routing


def test_a_profile_knows_over_how_many_ranks_experts_were_distributed(two: Ranks) -> None:
    for routing in two.run(measure_exchanging):
        assert routing.ranks == 2 and routing.layers == (0, 1)
        assert sum(routing.tokens[0]) == 12 and sorted(routing.tokens[0]) == [0, 0, 6, 6]


def test_the_command_shows_the_routing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is said about memory here: the rank need not be a fresh process, which would import torch for seconds.
    monkeypatch.setattr(trial, "STEADY_MEMORY", {})
    flags = ["profile", "gpt-oss-20b", "--scale", "0.02", "--layers", "4", "--seq", "16", "--repeats", "1"]
    path = str(tmp_path / "p.json")
    assert main([*flags, "-o", path]) == 0
    assert "routing of 4 experts: 16 tokens in the mean" in " ".join(capsys.readouterr().out.split())
    routing = load_profile(path).costs.routing
    assert routing is not None and routing.layers == (1, 2)
    assert main([*flags, "-o", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["routing"] == routing.record()
