"""A captured graph is given up when anything changes that the host read during the capture, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from captured_layers import COUNT, VOCABULARY, WIDTH, Block, plan
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.stages.capturable import _Draws, fixed_reason
from octopipe.runtime.stages.chain import StageChain
from octopipe.runtime.stages.graph_facts import Facts, Surroundings
from octopipe.runtime.stages.stage import Stage as RunningStage


def test_facts_hold_until_something_changes() -> None:
    block = Block()
    block.register_buffer("table", torch.zeros(3))
    block.activation, block.config = torch.nn.functional.gelu, SimpleNamespace(scale=1.0)
    facts = Facts(list(block.modules()))
    known = facts.read()
    assert facts.read() == known
    changes: list[Callable[[], object]] = [
        lambda: setattr(block, "factor", 0.5),
        lambda: block.eval(),
        lambda: block.table.add_(1.0),  # type: ignore[operator]
        lambda: setattr(block, "up", nn.Linear(WIDTH, 2 * WIDTH)),
        lambda: block.norm.weight.requires_grad_(False),
        lambda: block.register_forward_hook(lambda *_: None),
        lambda: setattr(block, "activation", torch.nn.functional.relu),
        lambda: setattr(block.config, "scale", 2.0),
        lambda: setattr(block, "forward", lambda x: x),
        lambda: setattr(block.down.weight, "data", block.down.weight.data.t()),  # at the same address
        lambda: block.down.weight.register_hook(lambda g: g),
        lambda: block.down.bias.register_post_accumulate_grad_hook(lambda p: None),
        lambda: block.down.load_state_dict({k: v.clone() for k, v in block.down.state_dict().items()}, assign=True),
    ]
    for number, change in enumerate(changes):
        change()
        assert facts.read() != known, number
        known = facts.read()
    with torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else _autocast_of_cuda():
        assert facts.read() != known
    with torch.no_grad():
        block.down.weight.add_(1.0)  # values are not facts: graphs read them
    assert facts.read() == known


class _autocast_of_cuda:
    """What `torch.autocast("cuda")` sets, where there is no GPU."""

    def __enter__(self) -> None:
        torch.set_autocast_enabled("cuda", True)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled("cuda", False)


@dataclass
class Settings:
    factors: list[float] = field(default_factory=lambda: [1.0])


class Adapted(Block):
    """Reads its factor where adapters keep theirs: in a dict of a layer, in a class, in an object in a tuple."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scaling = {"default": 1.0}
        self.settings = (Settings(),)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scaling["default"] * self.shared * self.settings[0].factors[0]


class Smoothed(nn.Module):
    """A loss with an attribute that a training script changes as it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.smoothing = 0.1

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=self.smoothing)


def weighted(weights: dict[str, float]) -> Any:
    factor = 1.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return factor * weights["main"] * nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return loss, change


def trained(loss: Any, *middle: nn.Module) -> tuple[Pipeline, Callable[[], Any]]:
    """A pipeline after three steps, and what runs another one."""
    torch.manual_seed(0)
    made = [nn.Embedding(VOCABULARY, WIDTH), *middle, nn.Linear(WIDTH, VOCABULARY)]
    pipe = Pipeline(made, plan(len(made)), loss, device="cpu")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

    def step() -> None:
        both = torch.randint(VOCABULARY, (2, COUNT, 4))
        pipe.step(both[0], both[1])
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return pipe, step


def test_what_forwards_and_losses_read_outside_modules_is_compared() -> None:
    weights = {"main": 1.0}
    loss, change_factor = weighted(weights)
    adapted, smoothed = Adapted(), Smoothed()
    one, step = trained(loss, adapted, Block())
    other, _ = trained(smoothed, Block())
    changes: list[tuple[Pipeline, Callable[[], object]]] = [
        (one, lambda: adapted.scaling.update(default=2.0)),
        (one, lambda: setattr(Adapted, "shared", 2.0)),
        (one, lambda: adapted.settings[0].factors.append(3.0)),
        (one, lambda: weights.update(main=0.5)),
        (one, lambda: change_factor(2.0)),
        (other, lambda: setattr(smoothed, "smoothing", 0.0)),
    ]
    try:
        for pipe, change in changes:
            read = Surroundings(pipe.executor.chains.values())
            if pipe is one:
                step()
            assert not read.changed()
            change()
            assert read.changed()
    finally:
        Adapted.shared = 1.0


class Skipping(Block):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.draw() > -1 else x


class Owning(Block):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        g = self.generator
        return super().forward(x) * (
            float(torch.rand((), generator=g)) if isinstance(g, torch.Generator) else g.random()
        )


def noisy(output: Tensor) -> Tensor:
    return (output * torch.rand(())).mean()


@pytest.mark.parametrize(
    ("layer", "then", "found"),
    [
        (Block(), Tensor.mean, ""),
        (Skipping(random.random), Tensor.mean, "layer 0 (Skipping)"),
        (Skipping(numpy.random.rand), Tensor.mean, "layer 0 (Skipping)"),
        (Owning(torch.Generator().manual_seed(0)), Tensor.mean, "layer 0 (Owning)"),
        (Owning(numpy.random.default_rng(0)), Tensor.mean, "layer 0 (Owning)"),
        (Owning(random.Random(0)), Tensor.mean, "layer 0 (Owning)"),
        (Block(), noisy, "the loss or a backward"),
        (Block(), lambda output: output.mean() * random.random(), "the loss or a backward"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [None, 5])
def test_numbers_drawn_from_any_generator_keep_a_stage_from_its_graphs(
    layer: nn.Module, then: Any, found: str, seed: int | None
) -> None:
    stage = RunningStage([layer])
    value = torch.randn(2, WIDTH)
    stage.forward(value, then=then, seed=seed)
    chain, device = StageChain([(stage, False)]), SimpleNamespace(get_offset=lambda: 0)
    with _Draws(chain, seed is not None, device, seeds_loss=seed is not None) as draws:
        stage.forward(value, then=then, seed=seed)
    assert draws.found == found


def test_a_hook_on_the_node_that_accumulates_a_gradient_keeps_a_stage_from_its_graphs() -> None:
    pipe, step = trained(Smoothed(), Block())
    weight = pipe.modules()[1].up.weight  # type: ignore[union-attr]
    before = {number: fixed_reason(chain) for number, chain in pipe.executor.chains.items()}
    kept = [get_gradient_edge(weight).node]  # whoever registers a hook on such a node has to keep it
    kept[0].register_hook(lambda *_: None)
    step()
    after = {number: fixed_reason(chain) for number, chain in pipe.executor.chains.items()}
    changed = [reason for number, reason in after.items() if reason != before[number]]
    assert len(changed) == 1 and "1.up.weight" in changed[0]


def test_a_hook_for_all_modules_keeps_every_stage_from_its_graphs() -> None:
    pipe, _ = trained(Smoothed(), Block())
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        assert all("hook" in fixed_reason(chain) for chain in pipe.executor.chains.values())
    finally:
        handle.remove()
