"""Small pipelines of linear layers beside plain torch in one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

WIDTH, LAYERS, COUNT = 5, 4, 4
EXACT = 1e-11


def plan_of(name, count=COUNT):
    return build_plan(name, CostTable.uniform(num_layers=LAYERS), 2, count)


def linears(seed=0):
    torch.manual_seed(seed)
    return [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)]


def data(count=COUNT):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, WIDTH, dtype=torch.float64, generator=generator) for _ in range(count)]


def square(output, target):
    return (output - target).square().mean()


def plainly(layers, loss_fn, batches, steps=1, optimizer=None, between=None):
    """One process: the mean over micro-batches, step by step; returns the losses."""
    losses = []
    for step in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        total = 0.0
        for x in batches:
            out = x
            for layer in layers:
                out = layer(out)
            loss = loss_fn(out, x)
            (loss / len(batches)).backward()
            total += float(loss.detach())
        losses.append(total / len(batches))
        if optimizer is not None:
            optimizer.step()
        if between is not None:
            between(step)
    return losses


def worst(pairs):
    apart = 0.0
    for name, ours, theirs in pairs:
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            apart = max(apart, float((ours - theirs).abs().max()))
    return apart
