"""Sums between ranks that share a device: gloo's, bit for bit the same on every member, and gradients of copies."""

from __future__ import annotations

import functools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE_S
from torch import nn

from octopipe import CostTable, Pipeline, build_plan
from octopipe.runtime.ranks.ring_group import RingGroup

WIDTH, COUNT = 6, 4


def summed(world, sizes, chunk_bytes, chunks):
    sizing = {"chunk_bytes": chunk_bytes, "chunks": chunks, "piece_bytes": 1000}
    rings = RingGroup(dist.group.WORLD, torch.device("cpu"), timeout_s=PATIENCE_S, lost=bool, **sizing)
    found = []
    for k, size in enumerate(sizes):
        mine = torch.randn(size, generator=torch.Generator().manual_seed(10 * k + world.rank))
        ours, theirs = mine.clone(), mine.double()
        rings.all_reduce(ours).wait(timedelta(seconds=60))
        dist.all_reduce(theirs)
        found.append((ours, float((ours.double() - theirs).abs().max())))
    rings.close()
    return found


@pytest.mark.parametrize(("chunk_bytes", "chunks"), [(64, 1), (100, 3), (1 << 16, 4)])
def test_sums_are_gloos_and_equal_on_all_members(chunk_bytes: int, chunks: int, four) -> None:
    ranks = four.run(summed, [1, 7, 300, 4096], chunk_bytes, chunks)
    for sums in zip(*ranks, strict=True):
        assert max(error for _, error in sums) < 1e-5
        assert all(torch.equal(values, sums[0][0]) for values, _ in sums)


def summed_together(world):
    """Several sums under way at once, waited for in the opposite order."""
    rings = RingGroup(
        dist.group.WORLD,
        torch.device("cpu"),
        timeout_s=PATIENCE_S,
        lost=bool,
        chunk_bytes=96,
        chunks=2,
        piece_bytes=800,
    )
    given = [
        [torch.randn(size, generator=torch.Generator().manual_seed(10 * k + rank)) for rank in range(world.size)]
        for k, size in enumerate((3, 500, 1, 257))
    ]
    ours = [row[world.rank].clone() for row in given]
    sums = [rings.all_reduce(values) for values in ours]
    for one in reversed(sums):
        one.wait(timedelta(seconds=60))
    rings.close()
    expected = [functools.reduce(torch.add, row) for row in given]
    return [torch.equal(mine, right) for mine, right in zip(ours, expected, strict=True)]


def test_sums_under_way_together_are_added_in_the_order_of_the_members(four) -> None:
    assert four.run(summed_together) == [[True] * 4] * 4


def gradients_of_copies(world, transport):
    plan = build_plan("chimera", CostTable.uniform(num_layers=4), 2, COUNT)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]
    batches = [torch.randn(3, WIDTH, dtype=torch.float64) for _ in range(COUNT)]
    found = []
    with Pipeline(layers, plan, nn.functional.mse_loss, group=world, transport=transport, timeout_s=PATIENCE_S) as pipe:
        for _ in range(3):  # chunks of earlier steps are used again
            pipe.zero_grad()
            pipe.step(batches, batches)
            found.append({name: p.grad.clone() for name, p in pipe.named_parameters()})
        assert any(e.name == "reduce" for e in pipe.timeline().extras)
    return found


def test_gradients_of_copies_are_the_same_through_rings_as_through_gloo(two) -> None:
    through_rings, through_gloo = (two.run(gradients_of_copies, name) for name in ("cuda_ipc", "gloo"))
    for ours, theirs in zip(through_rings, through_gloo, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.keys() == other.keys() and mine
            assert all(torch.allclose(mine[name], other[name], rtol=0, atol=1e-14) for name in mine)
