"""Odd layers under fused, split and recomputing plans, on one rank and on two, against plain torch."""

from __future__ import annotations

import functools
import random

import pytest
from effort import WHOLE, some
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
import odd_layers  # noqa: E402

from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Op, Plan, Stage  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.world import World  # noqa: E402
from octopipe.runtime.stages.rng import micro_batch_seed, mix  # noqa: E402
from octopipe.search.recompute import recomputing  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

TOLERANCE = 1e-9
COUNT = 4
QUICK = ("fused, recomputing", "interleaved", "split")
"""Plans that the quick tier runs: B with R, I and W over several stages of a rank (on two ranks), I and W (on one). On
two ranks, every odd layer is run under one of them."""
TWO_RANKS = QUICK[:2]
torch.set_num_threads(1)


def plans(num_ranks: int) -> dict[str, Plan]:
    costs = CostTable.uniform(num_layers=4)
    if num_ranks == 1:
        stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=0), Stage(first=2, stop=4, rank=0))
        forwards = [Op(s, "F", m) for m in range(COUNT) for s in range(3)]
        fused = [Op(s, "B", m) for m in range(COUNT) for s in (2, 1, 0)]
        split = [Op(s, k, m) for k in "IW" for m in range(COUNT) for s in (2, 1, 0)]
        shape = {"num_layers": 4, "num_ranks": 1, "num_micro_batches": COUNT, "stages": stages}
        found = {
            "fused": Plan(orders=((*forwards, *fused),), **shape).check(),
            "split": Plan(orders=((*forwards, *split),), **shape).check(),
        }
    else:
        found = {
            "fused": build_plan("1f1b", costs, 2, COUNT),
            "split": build_plan("zb-h1", costs, 2, COUNT),
            "interleaved": build_plan("interleaved", costs, 2, COUNT, split_backward=True),
        }
    return found | {f"{name}, recomputing": recomputing(found[name], head=True).check() for name in ("fused", "split")}


@functools.cache
def plain(name: str, steps: int):
    """Gradients, losses and buffers of `steps` steps on one device, in micro-batch order."""
    layers, (inputs, targets) = odd_layers.make(name), odd_layers.batches(COUNT)
    losses = []
    random.seed(3)
    for step in range(steps):
        for m, (x, y) in enumerate(zip(inputs, targets)):
            value = x.clone()
            seed = micro_batch_seed(0, step, 0, m)
            for k, layer in enumerate(layers):
                torch.manual_seed(mix(seed, k))
                value = layer(value)
            torch.manual_seed(mix(seed, -1))
            loss = odd_layers.loss(value, y)
            losses.append(float(loss.detach()))
            (loss / COUNT).backward()
    grads = {f"{k}.{n}": p.grad for k, layer in enumerate(layers) for n, p in layer.named_parameters()}
    return grads, losses, {f"{k}.{n}": b for k, layer in enumerate(layers) for n, b in layer.named_buffers()}


def run_cases(world, jobs, steps):
    """[(case, plan)] -> what differs from plain torch on this rank, in words."""
    wrong = []
    for name, title, plan in jobs:
        grads, losses, buffers = plain(name, steps)
        layers, (inputs, targets) = odd_layers.make(name), odd_layers.batches(COUNT)
        random.seed(3)
        try:
            with Pipeline(layers, plan, odd_layers.loss, group=world, timeout_s=PATIENCE_S) as pipe:
                for step in range(steps):
                    loss = float(pipe.step([x.clone() for x in inputs], targets))
                    want = sum(losses[COUNT * step : COUNT * (step + 1)]) / COUNT
                    if abs(loss - want) > TOLERANCE * max(1, abs(want)):
                        wrong.append(f"{name}, {title}: loss {loss} for {want}")
        except Exception as error:
            wrong.append(f"{name}, {title}: {type(error).__name__} {error}")
            if world.size > 1:
                raise RuntimeError(wrong[-1]) from error
            continue
        for key, p in pipe.named_parameters():
            got, want = p.grad, grads[key]
            if (got is None) != (want is None):
                wrong.append(f"{name}, {title}: {key} is None {'here' if got is None else 'in plain torch'} alone")
            if got is None or want is None:
                continue
            error = float((got - want).abs().max())
            if error > TOLERANCE * max(1e-3, float(want.abs().max())):
                wrong.append(f"{name}, {title}: {key} off by {error} of {float(want.abs().max())}")
        for key, want in buffers.items():
            if int(key.split(".")[0]) in pipe.modules():
                got = pipe.state_dict().get(key)
                if got is not None and not torch.allclose(got, want, rtol=1e-9, atol=1e-9):
                    wrong.append(f"{name}, {title}: buffer {key} is {got} for {want}")
    return wrong


# What plain torch gives no gradient either is compared below; that the pipeline warns of it is no news.
@pytest.mark.filterwarnings("ignore:rank 0. .* got no gradient in the first step:UserWarning")
@pytest.mark.parametrize("name", odd_layers.CASES)
def test_odd_layers_train_on_one_rank_as_in_plain_torch(name):
    jobs = [(name, title, plan) for title, plan in plans(1).items() if WHOLE or title in QUICK]
    if not WHOLE:  # under one of the plans, in turn
        jobs = jobs[list(odd_layers.CASES).index(name) % len(jobs) :][:1]
    assert run_cases(World(None), jobs, 2) == []


NOT_IN_ORDER = {"python's random numbers"}
"""One sequence for all ranks: no plan of two ranks can draw it in one rank's order."""


@pytest.mark.parametrize("title", some(plans(2), quick=TWO_RANKS))
def test_odd_layers_train_on_two_ranks_as_in_plain_torch(title, two):
    names = [name for name in odd_layers.CASES if name not in NOT_IN_ORDER]
    if not WHOLE and title in TWO_RANKS:  # the slow titles are also run alone, by `make test-torch`
        names = names[TWO_RANKS.index(title) :: 4 * len(TWO_RANKS)]
    jobs = [(name, title, plans(2)[title]) for name in names]
    assert [line for rank in two.run(run_cases, jobs, 2) for line in rank] == []
