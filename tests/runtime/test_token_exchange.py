"""Rows between ranks that share a device: the same as gloo's all-to-all, forward and backward, and within pairs."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE_S
from torch.distributed.nn.functional import all_to_all_single

from octopipe import OctoPipeError
from octopipe.runtime.token_exchange import TokenExchange


def exchanged(world, jobs, chunk_bytes: int, chunks: int):
    """Rows and gradients of random splits, ours against gloo's."""
    moved = TokenExchange(dist.group.WORLD, "cpu", timeout_s=PATIENCE_S, chunk_bytes=chunk_bytes, chunks=chunks)
    me, worst = world.rank, 0.0
    for seed, table, width in jobs:
        torch.manual_seed(100 * seed + me)
        send, receive = table[me], [row[me] for row in table]
        found = []
        for ours in (True, False):
            rows = torch.randn(
                sum(send), width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + me)
            )
            rows.requires_grad_()
            if ours:
                out = moved(rows, send=send, receive=receive)
            else:
                out = all_to_all_single(rows.new_empty(sum(receive), width), rows, receive, send)
            (out * torch.arange(out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
            found.append((out.detach(), rows.grad))
        for a, b in zip(*found, strict=True):
            assert a.shape == b.shape
            worst = max(worst, float((a - b).abs().max()) if a.numel() else 0.0)
    moved.close()
    return worst


@pytest.mark.parametrize(("chunk_bytes", "chunks"), [(64, 1), (100, 3), (1 << 20, 4)])
def test_rows_and_gradients_are_those_of_gloo(chunk_bytes: int, chunks: int, four) -> None:
    rng = random.Random(chunk_bytes)
    jobs = [
        (seed, [[rng.choice((0, 1, 5, 9)) for _ in range(4)] for _ in range(4)], rng.choice((1, 3, 16)))
        for seed in range(8)
    ]
    assert max(four.run(exchanged, jobs, chunk_bytes, chunks)) == 0.0


def refused(world):
    moved = TokenExchange(dist.group.WORLD, "cpu", timeout_s=PATIENCE_S)
    said = []
    for keywords in ({}, {"send": [1, 1]}, {"send": [1, 2, 0]}):
        try:
            moved(torch.zeros(3, 2), **keywords)
        except OctoPipeError as error:
            said.append(str(error))
    moved.close()
    return said


def test_splits_that_do_not_fit_are_refused(two) -> None:
    for said in two.run(refused):
        assert len(said) == 3
        assert "say how many each gets (send=[...])" in said[0] and "give one number per rank" in said[1]
