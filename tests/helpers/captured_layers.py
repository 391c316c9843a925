"""Layers, plans and training runs for the tests of CUDA graphs.

Knows: layers that a graph may hold and layers that it must not, and how a run with graphs is compared with one without.
Does not know: what is captured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.plans.plan import Op, Plan, Stage
from octopipe.runtime.pipeline import Pipeline

WIDTH, TOKENS, COUNT, VOCABULARY = 64, 16, 4, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Counting(Block):
    """The host looks at a value."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.sum().item() > 1e9 else 0.5)


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(super().forward(x), 0.3, self.training)


class Remembering(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Tabling(Block):
    """A table that is made in the first forward and only read from then on, as of positions or masks."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] not in self.tables:
            self.tables[x.shape[-1]] = torch.linspace(0.5, 1.5, x.shape[-1], device=x.device, dtype=x.dtype)
        return super().forward(x) * self.tables[x.shape[-1]]


class Averaging(Block):
    """A statistic that every forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return super().forward(x) * (1 + self.mean)


class Half(Block):
    """A parameter that no backward reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


def layers(*middle: type[nn.Module], dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    torch.manual_seed(0)
    made = [nn.Embedding(VOCABULARY, WIDTH), *(kind() for kind in middle), nn.Linear(WIDTH, VOCABULARY)]
    return [m.to("cuda", dtype) for m in made]


def plan(num_layers: int, *, fused: bool = False, recompute: bool = False) -> Plan:
    """Two stages on one rank, several micro-batches in flight, Ws as late as they go."""
    cut = num_layers // 2
    stages = (
        Stage(first=0, stop=cut, rank=0, recompute=recompute),
        Stage(first=cut, stop=num_layers, rank=0, recompute=recompute),
    )
    order: list[Op] = []
    for pair in range(0, COUNT, 2):
        mine = (pair, pair + 1)
        order += [Op(0, "F", m) for m in mine] + [Op(1, "F", m) for m in mine]
        for m in mine:
            for s in (1, 0):
                order += [Op(s, "R", m)] * recompute
                order += [Op(s, "B" if fused else "I", m)]
        order += [Op(s, "W", m) for s in (0, 1) for m in mine] * (not fused)
    return Plan(
        num_layers=num_layers, num_ranks=1, num_micro_batches=COUNT, stages=stages, orders=(tuple(order),)
    ).check()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def data(step: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    both = torch.randint(VOCABULARY, (2, COUNT * 2, tokens), generator=generator).cuda()
    return both[0], both[1]


Between = Callable[[int, Pipeline], Any]


def trained(
    made: list[nn.Module],
    by: Plan,
    *,
    graphs: bool,
    steps: int = 8,
    between: Between | None = None,
    tokens: Callable[[int], int] = lambda step: TOKENS,
    **more: Any,
) -> tuple[list[float], dict[str, Tensor], Pipeline]:
    """Losses of some steps of SGD, the weights after them, and the pipeline."""
    pipe = Pipeline(copy.deepcopy(made), by, loss_fn, device="cuda", cuda_graphs=graphs, **more)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        if between is not None:
            between(step, pipe)
        losses.append(float(pipe.step(*data(step, tokens(step)))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in pipe.named_parameters()}, pipe


def same(made: list[nn.Module], by: Plan, *, captured: bool = True, **more: Any) -> Pipeline:
    """Trains with and without graphs; the results are the same, bit for bit. Returns the pipeline with graphs."""
    plain, plain_weights, _ = trained(made, by, graphs=False, **more)
    seen, weights, pipe = trained(made, by, graphs=True, **more)
    assert seen == plain
    for name, weight in plain_weights.items():
        assert torch.equal(weights[name], weight), name
    assert (pipe.executor.ops.captured > 0) == captured
    return pipe
