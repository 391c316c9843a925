"""A hundred and more kinds of layers with state, hooks and reach, against plain torch: fused, split and recomputing
plans, on one rank and on two. Loss, gradients (None where plain torch has None), buffers and what a layer has counted
must agree, or the kind is refused by name."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402
import odd_layers  # noqa: E402
import odd_modules  # noqa: E402
import odd_reach  # noqa: E402
import odd_state  # noqa: E402
from test_odd_layers import COUNT, TOLERANCE, plans  # noqa: E402

from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.world import World  # noqa: E402
from octopipe.runtime.stages.rng import micro_batch_seed, mix  # noqa: E402

STEPS = 3
"""R is compared with F in the first two; in the third it leaves out what it may."""
KINDS: dict[str, odd_state.Kind] = {
    **odd_state.STATE, **odd_state.IN_PLACE, **odd_state.DRAWS, **odd_reach.LEFT, **odd_reach.HOOKS, **odd_reach.INSIDE,
    **odd_modules.MODULES, **odd_modules.LOSSES,
}  # fmt: skip
QUICK = (
    "a counter in an attribute", "a buffer of the first forward", "plain statistics of F.batch_norm", "an iterator",
    "looks at grad_enabled", "an auxiliary loss in a list", "a loss that counts in its meter", "a mean into a linear",
    "returns its buffer", "input changed in place and counted", "a fixed point solved in backward",
    "a forward hook that keeps", "a hook on the adding node", "the gradient of its input",
    "an optimizer inside backward", "an own Generator in a list", "a weight's data in every forward",
    "a weight's data clipped", "a weight's data normalised again",
)  # fmt: skip


def make(kind: odd_state.Kind) -> list[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = torch.nn.Linear(odd_layers.WIDTH, odd_layers.WIDTH)
        return [layer.double() for layer in (first, kind.build(), odd_layers.Unbox(), kind.build())]


def seed_hosts() -> None:
    random.seed(3)
    np.random.seed(3)


def observed(kind: odd_state.Kind, layers: dict[int, Any], loss: Any, has_loss: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for k in (1, 3):
        if kind.observe is not None and k in layers:
            found[f"layer {k}"] = copy.deepcopy(kind.observe(layers[k]))
    if has_loss and hasattr(loss, "observe"):
        found["loss"] = copy.deepcopy(loss.observe())
    return found


@functools.cache
def plain(name: str) -> tuple[list[float], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Losses, gradients, buffers and what was observed of `STEPS` steps on one device, in micro-batch order."""
    kind = KINDS[name]
    layers, (inputs, targets) = make(kind), odd_layers.batches(COUNT)
    loss_fn = kind.loss() if kind.loss else odd_layers.loss
    losses = []
    seed_hosts()
    for step in range(STEPS):
        for m, (x, y) in enumerate(zip(inputs, targets)):
            value, seed = x.clone(), micro_batch_seed(0, step, 0, m)
            for k, layer in enumerate(layers):
                torch.manual_seed(mix(seed, k))
                value = layer(value)
            torch.manual_seed(mix(seed, -1))
            loss = loss_fn(value, y)
            losses.append(float(loss.detach()))
            (loss / COUNT).backward()
    grads = {f"{k}.{n}": p.grad for k, layer in enumerate(layers) for n, p in layer.named_parameters()}
    kept = {f"{k}.{n}": b for k, layer in enumerate(layers) for n, b in layer.named_buffers()}
    return losses, grads, kept, observed(kind, dict(enumerate(layers)), loss_fn, True)


def differences(world: World, name: str, plan: Any) -> list[str]:
    """What a pipeline under the plan does otherwise than plain torch, on this rank, in words."""
    kind, (losses, grads, kept, seen) = KINDS[name], plain(name)
    layers, (inputs, targets) = make(kind), odd_layers.batches(COUNT)
    loss_fn = kind.loss() if kind.loss else odd_layers.loss
    seed_hosts()
    wrong = []
    with Pipeline(layers, plan, loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        for step in range(STEPS):
            loss = float(pipe.step([x.clone() for x in inputs], targets))
            want = sum(losses[COUNT * step : COUNT * (step + 1)]) / COUNT
            if not abs(loss - want) <= TOLERANCE * max(1, abs(want)):
                wrong.append(f"loss {loss} for {want} in step {step}")
        for key, p in pipe.named_parameters():
            got, want = p.grad, grads[key]
            if (got is None) != (want is None):
                wrong.append(f"{key} has {'no ' * (got is None)}gradient here, in plain torch it is otherwise")
            if got is not None and want is not None:
                got, want = got.to_dense(), want.to_dense()
                error = float((got - want).abs().max())
                if not error <= TOLERANCE * max(1e-3, float(want.abs().max())):
                    wrong.append(f"{key} off by {error} of {float(want.abs().max())}")
        mine = pipe.modules()
        now = {f"{k}.{n}": b for k, layer in mine.items() for n, b in layer.named_buffers()}
        for key, want in kept.items():
            if int(key.split(".")[0]) in mine and not torch.allclose(now[key], want, rtol=1e-9, atol=1e-9):
                wrong.append(f"buffer {key} is {now[key]} for {want}")
        for place, got in observed(kind, mine, loss_fn, pipe.executor.program.needs_target).items():
            if not alike(got, seen[place]):
                wrong.append(f"{place} observed {got} for {seen[place]}")
    return wrong


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return abs(a - b) <= 1e-8 * max(1, abs(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    return bool(a == b)


def outcome(world: World, name: str, title: str, plan: Any) -> str:
    """Empty where all is as it should be."""
    kind = KINDS[name]
    words = kind.refused_always or (kind.refused if "recomputing" in title else "")
    try:
        wrong = differences(world, name, plan)
    except Exception as error:
        if words and words in str(error):
            return ""
        return f"{name}, {title}: {type(error).__name__}: {error}"
    if words:
        return f"{name}, {title}: not refused"
    return f"{name}, {title}: {'; '.join(wrong)}" if wrong else ""


def outcomes(world: World, jobs: list[tuple[str, str, Any]]) -> list[str]:
    return [text for job in jobs if (text := outcome(world, *job))]


# What plain torch gives no gradient either is compared; that the pipeline warns of it is no news.
NO_GRADIENT = pytest.mark.filterwarnings("ignore:rank 0. .* got no gradient in the first step:UserWarning")


@NO_GRADIENT
@pytest.mark.parametrize("name", QUICK)
def test_layers_with_state_train_as_in_plain_torch(name):
    """Under two of the plans, in turn; the slow tier runs every kind of layer under all of them."""
    jobs = [(name, title, plan) for title, plan in plans(1).items()]
    assert outcomes(World(None), jobs[QUICK.index(name) % 2 :: 2]) == []


@NO_GRADIENT
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_trains_on_one_rank_as_in_plain_torch(name):
    assert outcomes(World(None), [(name, title, plan) for title, plan in plans(1).items()]) == []


@pytest.mark.slow
@pytest.mark.parametrize("title", plans(2))
def test_every_kind_trains_on_two_ranks_as_in_plain_torch(title, two):
    names = [n for n, k in KINDS.items() if k.in_order and not k.refused_always and not (k.refused and "rec" in title)]
    jobs = [(name, title, plans(2)[title]) for name in names]
    wrong = []
    for at in range(0, len(jobs), 5):  # one answer after the other: ranks that say nothing for long count as lost
        wrong += [line for rank in two.run(outcomes, jobs[at : at + 5]) for line in rank]
    assert wrong == []


def test_there_are_more_than_a_hundred_kinds():
    assert len(KINDS) >= 100
