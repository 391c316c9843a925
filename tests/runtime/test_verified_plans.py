"""Verifying the first step of plans that offload, of plans with pairs and of losses with parameters: the gradients stay
those of one process, and what is wrong is found all the same."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from ranks import PATIENCE_S  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import octopipe  # noqa: E402
from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.cluster.hardware import Link  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Op, Plan, Stage  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402

WIDTH, COUNT, LAYERS, EXACT = 5, 3, 4, 1e-12
COSTS = CostTable.uniform(num_layers=LAYERS).replace(host_link=Link(latency_ms=0.01))


class Turn(torch.autograd.Function):
    """Where the other op of a pair has its turn."""

    @staticmethod
    def forward(ctx, x):
        with octopipe.exchange():
            return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with octopipe.exchange():
            return gradient.clone()


class Wrong(torch.autograd.Function):
    """Another gradient in the first backward than in every later one."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Wrong.calls += 1
        return gradient * (2.0 if Wrong.calls == 1 else 1.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.wrong = False

    def forward(self, x):
        x = Turn.apply(torch.tanh(self.inner(self.norm(x))))
        return Wrong.apply(x) if self.wrong else x


def whole_plan(split):
    """All forwards before all backwards, two stages on one rank."""
    stages = (Stage(first=0, stop=2, rank=0), Stage(first=2, stop=LAYERS, rank=0))
    ops = [Op(s, "F", m) for m in range(COUNT) for s in range(2)]
    if not split:
        ops += [Op(s, "B", m) for m in range(COUNT) for s in (1, 0)]
        return Plan(num_layers=LAYERS, num_ranks=1, num_micro_batches=COUNT, stages=stages, orders=(tuple(ops),))
    for m in range(COUNT):  # the W of every micro-batch beside the I of the next one
        ops += [Op(1, "I", m), *([Op(0, "W", m - 1)] if m else []), Op(0, "I", m), Op(1, "W", m)]
    ops.append(Op(0, "W", COUNT - 1))
    return Plan(num_layers=LAYERS, num_ranks=1, num_micro_batches=COUNT, stages=stages, orders=(tuple(ops),))


def paired(plan):
    for first, second in itertools.pairwise(plan.orders[0]):
        more = replace(plan, pairs=plan.pairs | {(first, second)})
        plan = plan if more.problems() else more
    return plan.check()


def offloading(plan):
    return replace(plan, stages=tuple(replace(s, offload=True) for s in plan.stages)).check()


PLANS = {
    "offload": offloading(whole_plan(split=False)),
    "offload, split": offloading(whole_plan(split=True)),
    "pairs": paired(whole_plan(split=False)),
    "pairs, split": paired(whole_plan(split=True)),
}


def blocks():
    torch.manual_seed(1)
    return [Block().double() for _ in range(LAYERS)]


def square(output, target):
    return (output - target).square().mean()


@pytest.mark.parametrize("name", PLANS)
def test_a_verified_step_has_the_gradients_of_one_process(name):
    assert bool(PLANS[name].pairs) == name.startswith("pairs")
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(COUNT * 2, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    plain, layers = blocks(), blocks()
    square(nn.Sequential(*plain)(x), y).backward()
    with Pipeline(layers, PLANS[name], square, costs=COSTS, timeout_s=PATIENCE_S, verify=True) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            pipe.step(x, y)
        assert not pipe.executor.pairs.apart
    for ours, theirs in zip(nn.Sequential(*layers).parameters(), nn.Sequential(*plain).parameters(), strict=True):
        assert ours.grad is not None and float((ours.grad - theirs.grad).abs().max()) <= EXACT


@pytest.mark.parametrize("name", PLANS)
def test_a_wrong_gradient_is_found_by_name(name):
    layers = blocks()
    layers[1].wrong, Wrong.calls = True, 0
    x = torch.ones(COUNT, WIDTH, dtype=torch.float64)
    with (
        Pipeline(layers, PLANS[name], square, costs=COSTS, timeout_s=PATIENCE_S, verify=True) as pipe,
        pytest.raises(OctoPipeError, match=r"verify: the gradient of parameter [01]\."),
    ):
        pipe.step(x, torch.zeros_like(x))


class Again(nn.Module):
    """A checkpoint whose backward is one of its own: its gradients exist in `.grad` only."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=True)


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self, *, wrong=False):
        super().__init__()
        self.scale, self.wrong = nn.Parameter(torch.tensor(0.5, dtype=torch.float64)), wrong

    def forward(self, output, target):
        scale = Wrong.apply(self.scale) if self.wrong else self.scale
        return square(output * scale, target)


def test_verifying_leaves_the_gradient_of_a_losss_parameter_as_it_is():
    torch.manual_seed(1)
    layers, loss = [*blocks()[:-1], Again().double()], Scaled()
    x = torch.randn(COUNT, WIDTH, dtype=torch.float64)
    with Pipeline(layers, whole_plan(split=False), loss, timeout_s=PATIENCE_S, verify=True) as pipe:
        pipe.step(x, -x)
    found = loss.scale.grad.clone()
    loss.scale.grad = None
    loss(nn.Sequential(*layers)(x), -x).backward()
    assert abs(float(found - loss.scale.grad)) <= EXACT


def test_a_wrong_gradient_of_a_losss_parameter_is_found_by_name():
    x, Wrong.calls = torch.ones(COUNT, WIDTH, dtype=torch.float64), 0
    with (
        Pipeline(blocks(), whole_plan(split=False), Scaled(wrong=True), timeout_s=PATIENCE_S, verify=True) as pipe,
        pytest.raises(OctoPipeError, match=rf"verify: the gradient of parameter {LAYERS}\.scale"),
    ):
        pipe.step(x, torch.zeros_like(x))


@pytest.mark.slow
def test_compiled_layers_are_verified():
    torch.manual_seed(1)
    plain = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double() for _ in range(LAYERS))
    )
    layers = [torch.compile(copy.deepcopy(layer), backend="aot_eager") for layer in plain]
    x = torch.randn(COUNT * 2, WIDTH, dtype=torch.float64)
    square(plain(x), -x).backward()
    with Pipeline(layers, whole_plan(split=True), square, timeout_s=PATIENCE_S, verify=True) as pipe:
        pipe.step(x, -x)
        for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and float((ours.grad - theirs.grad).abs().max()) <= EXACT
