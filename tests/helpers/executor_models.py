"""Small models for the executor's tests: everything a stage boundary may meet, in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from random_plans import random_plan
from torch import Tensor, nn

from octopipe.plans.plan import Plan
from octopipe.simulation.lowering import CHANNELS

VOCAB, WIDTH = 11, 6
NUM_LAYERS = 8


class Case(NamedTuple):
    layers: list[nn.Module]
    inputs: list[Any]
    """One per micro-batch."""
    targets: list[Any]
    loss_fn: Callable[..., Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Experts(nn.Module):
    """A mixture of experts: every token to every expert, weighted (batched weights, a gate, an odd reshape)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        each = torch.bmm(flat.expand(3, -1, -1), self.weight)
        return x + (self.gate(flat).softmax(-1).T[..., None] * each).sum(0).view_as(x)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Several(nn.Module):
    """Passes a dict on: a float that is trained, an int tensor, a float nobody differentiates, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.side = nn.Linear(WIDTH, 2)

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            ids, scale = torch.arange(value.shape[1], device=value.device), value.detach().mean()
            value = {"x": value, "ids": ids, "scale": scale, "aux": (0.0, None)}
        x = self.block(value["x"]) * (1 + 0.1 * value["scale"]) + 0.01 * value["ids"][None, :, None]
        aux = value["aux"][0] + self.side(x).square().mean()
        return {"x": x, "ids": value["ids"].flip(0), "scale": value["scale"], "aux": (aux, value["aux"][1])}


class Pair(nn.Module):
    """Takes two arguments and gives a tuple of two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, a: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        b = a if b is None else b
        both = torch.tanh(self.mix(torch.cat((a, b), -1)))
        return both[..., :WIDTH], both[..., WIDTH:]


class Transposed(nn.Module):
    """Gives a view (strided, not contiguous) of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != WIDTH:
            x = x.transpose(-1, -2)
        return torch.tanh(self.inner(x)).transpose(-1, -2)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.block(x), 0.3)


def _tokens(generator: torch.Generator, count: int, unequal: bool) -> list[Tensor]:
    shapes = [(1 + m % 3, 3 + m % 4) if unequal else (2, 4) for m in range(count)]
    return [torch.randint(VOCAB, shape, generator=generator) for shape in shapes]


def _cross_entropy(output: Any, target: Tensor) -> Tensor:
    extra = 0.0
    if isinstance(output, dict):
        output, extra = output["x"] @ output["x"].new_ones(WIDTH, VOCAB).cumsum(1), output["aux"][0]
    elif isinstance(output, tuple):
        output = torch.cat(output, -1)
    if output.shape[-1] < VOCAB:
        output = F.pad(output, (0, VOCAB - output.shape[-1]))
    return F.cross_entropy(output.reshape(-1, output.shape[-1])[: target.numel()], target.flatten()) + 0.1 * extra


KINDS = ("plain", "tied", "moe", "several", "pair", "views", "shapes", "frozen")


def random_jobs(size: int, number: int, *, first_seed: int) -> list[tuple[str, str, Plan, str]]:
    """Random plans on `size` ranks, each with a name, a kind of model and a channel model; all of them occur soon."""
    jobs = []
    for seed in range(number):
        rng = random.Random(first_seed + seed)
        plan = random_plan(rng, num_ranks=size, num_layers=NUM_LAYERS, num_micro_batches=rng.choice((3, 4, 5)))
        channel = CHANNELS[(seed + seed // len(KINDS)) % len(CHANNELS)]
        jobs.append((f"seed {seed}", KINDS[seed % len(KINDS)], plan, channel))
    return jobs


def make(kind: str, num_micro_batches: int, *, num_layers: int = NUM_LAYERS, seed: int = 0) -> Case:
    """A model of this kind with its micro-batches; the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inner: Sequence[Callable[[], nn.Module]] = {
            "moe": (Block, Experts),
            "several": (Several,),
            "pair": (Pair,),
            "views": (Transposed,),
            "dropout": (Dropped,),
        }.get(kind, (Block,))
        layers: list[nn.Module] = [nn.Embedding(VOCAB, WIDTH)]
        layers += [inner[k % len(inner)]() for k in range(num_layers - 2)]
        layers.append(Head() if kind in ("plain", "tied", "moe", "shapes", "frozen", "dropout") else inner[0]())
        for layer in layers:
            layer.double()
    if kind == "tied":
        layers[-1].weight = layers[0].weight
    if kind == "frozen":
        layers[0].requires_grad_(False)
        layers[3].requires_grad_(False)
    generator = torch.Generator().manual_seed(seed + 1)
    inputs = _tokens(generator, num_micro_batches, kind == "shapes")
    targets = [torch.randint(VOCAB, x.shape, generator=generator) for x in inputs]
    return Case(layers, inputs, targets, _cross_entropy)
