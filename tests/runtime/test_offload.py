"""Activations in host memory: the same gradients as one process, and less memory while they are away."""

from __future__ import annotations

from dataclasses import replace

import pytest
from effort import WHOLE, some

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from ranks import PATIENCE_S, shared_ranks  # noqa: E402
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.cluster.hardware import Link  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.stages.chain import StageChain  # noqa: E402
from octopipe.runtime.stages.offload import HostStore, Parcel  # noqa: E402
from octopipe.runtime.stages.stage import Stage  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

WIDTH, TOKENS = 32, 128


class Block(nn.Module):
    """Views, shared memory, in-place work and a buffer: what saved tensors are made of."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((TOKENS, WIDTH), 1.5))

    def forward(self, x):
        q, k, v = self.into(self.norm(x)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        return x + self.out(F.gelu(mixed) * self.scale.to(x.dtype))


def offloading(plan):
    return replace(plan, stages=tuple(replace(s, offload=True) for s in plan.stages)).check()


def run_systems(world, names):
    out = []
    costs = CostTable.uniform(num_layers=8, p2p_ms=0.05).replace(host_link=Link(latency_ms=0.01))
    for name in names:
        plan = offloading(build_plan(name, costs, world.size, 8))
        torch.manual_seed(3)
        layers = [Block().double() for _ in range(8)]
        batch, target = ([torch.randn(2, TOKENS, WIDTH, dtype=torch.float64) for _ in range(8)] for _ in range(2))
        total = 0.0
        for x, y in zip(batch, target, strict=True):
            value = x
            for layer in layers:
                value = layer(value)
            loss = F.mse_loss(value, y) / 8
            loss.backward()
            total += float(loss.detach())
        wanted = [[p.grad.clone() for p in layer.parameters()] for layer in layers]
        for layer in layers:
            layer.zero_grad()
        with Pipeline(layers, plan, F.mse_loss, costs=costs, group=world, timeout_s=PATIENCE_S) as pipe:
            for _ in range(2):  # the second step finds the buffers of the first
                pipe.zero_grad()
                loss = float(pipe.step(batch, target))
            evaluated = float(pipe.evaluate(batch, target))
            moved = pipe.executor.ops.host.moved_bytes if pipe.executor.ops.host is not None else 0
            worst = max(
                float((p.grad - g).abs().max())
                for number, module in pipe.modules().items()
                for p, g in zip(module.parameters(), wanted[number], strict=True)
            )
            left = [c.parcel for c in pipe.executor.program.cells if c.parcel is not None]
        out.append((name, worst, abs(loss - total), abs(evaluated - total), moved, len(left)))
    return out


@pytest.mark.parametrize("size", some([2, 4]))
def test_plans_that_offload_give_the_gradients_of_one_process(size):
    names = ["zb-v", "interleaved", "gpipe", "1f1b"]
    names = names if WHOLE else names[:2]
    for per_rank in shared_ranks(size).run(run_systems, names):
        for name, worst, loss, evaluated, _, left in per_rank:
            assert max(worst, loss, evaluated) <= 1e-12, name
            assert left == 0
        assert all(moved > 0 for name, *_, moved, _ in per_rank if name in ("gpipe", "interleaved"))


def test_what_is_in_host_memory_takes_none_on_the_device_and_comes_back_as_it_was():
    store, parcel = HostStore(torch.device("cpu"), small_bytes=0), Parcel(small_bytes=0)
    base = torch.randn(64, 48)
    given = torch.randn(5)
    parcel.begin([given])
    tensors = [base[:, :16], base.t(), base[3:7, ::2], base.view(torch.int32), given]
    copies = [t.clone() for t in tensors]
    kept = [parcel.pack(t) for t in tensors]
    assert len(parcel.memories) == 1 and parcel.nbytes == base.numel() * 4
    assert parcel.unpack(kept[-1]).data_ptr() == given.data_ptr()
    watched = torch.empty(0, dtype=torch.uint8).set_(base.untyped_storage())
    del base, tensors
    store.down(parcel)
    store.release(parcel)
    assert all(memory.bytes is None for memory in parcel.memories.values())
    watched.zero_()  # whoever gets the memory next may write to it
    with pytest.raises(OctoPipeError, match="host memory"):
        parcel.unpack(kept[0])
    store.fetch(parcel, torch.device("cpu"))
    store.ready(parcel)
    for before, ticket in zip(copies, kept, strict=True):
        after = parcel.unpack(ticket)
        assert after.dtype == before.dtype and torch.equal(after, before)


def test_host_buffers_are_used_again():
    store = HostStore(torch.device("cpu"), small_bytes=0)
    addresses = []
    for _ in range(3):
        parcel = store.parcel()
        parcel.begin([])
        parcel.pack(torch.randn(100))
        store.down(parcel)
        addresses.append(next(iter(parcel.memories.values())).host.bytes.data_ptr())
        store.release(parcel)
        store.fetch(parcel, torch.device("cpu"))
        store.ready(parcel)
    assert len(set(addresses)) == 1


def left_before_w(offloads: bool) -> int:
    """Bytes of saved tensors that exist after I, while W is still to come."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(3)]
    chain = StageChain([(Stage(layers, first_layer=0), False)])
    store, parcel = HostStore(torch.device("cpu"), small_bytes=0), Parcel(small_bytes=0)
    runs = chain.forward(torch.randn(64, 32), [True], None, None, again=False, side=None, parcel=parcel)[0]
    held = dict(parcel.memories)
    if offloads:
        store.down(parcel)
        store.release(parcel)
        store.fetch(parcel, torch.device("cpu"))
        watched = [(m.bytes.untyped_storage()._weak_ref(), m.nbytes) for m in held.values()]
        store.ready(parcel)
    else:
        watched = [(m.bytes.untyped_storage()._weak_ref(), m.nbytes) for m in held.values()]
        parcel.memories.clear()
    held.clear()
    StageChain.backward(runs, [torch.ones(64, 32)], fused=False)
    return sum(nbytes for weak, nbytes in watched if not torch.UntypedStorage._expired(weak))


def test_after_i_only_what_w_needs_is_left_as_without_offload():
    assert 0 < left_before_w(offloads=True) == left_before_w(offloads=False)


class Squared(nn.Module):
    """Differentiates inside its forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.func.grad(lambda v: (v * v * self.weight).sum())(x)


def run_refused(world):
    costs = CostTable.uniform(num_layers=4).replace(host_link=Link())
    plan = offloading(build_plan("gpipe", costs, world.size, 2))
    with Pipeline(
        [Squared() for _ in range(4)], plan, F.mse_loss, costs=costs, group=world, timeout_s=PATIENCE_S
    ) as pipe:
        batch = [torch.randn(4, WIDTH) for _ in range(2)]
        try:
            pipe.step(batch, batch)
        except OctoPipeError as error:
            return str(error)
    return ""


def test_layers_whose_saved_tensors_cannot_be_taken_are_refused_by_name():
    answers = shared_ranks(2).run(run_refused)
    assert any("cannot be moved to host memory" in answer and "Squared" in answer for answer in answers)
