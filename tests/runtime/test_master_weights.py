"""Main gradients and master weights beside what else a training script does: scaled losses, weights clipped or replaced
between steps, layers that are frozen at first."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from ranks import PATIENCE_S  # noqa: E402
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.precision import MixedPrecisionOptimizer, gradient_dtype  # noqa: E402
from octopipe.runtime.training.adapt import switch  # noqa: E402
from octopipe.runtime.training.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

WIDTH, COUNT, LAYERS = 4, 2, 2
LIMIT = 0.0625
"""A number that bfloat16 has."""


def low_layers(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).to(dtype) for _ in range(LAYERS)]


def square(output, target):
    return (output.float() - target.float()).square().mean()


def pipeline(layers, **more):
    plan = build_plan("gpipe", CostTable.uniform(num_layers=LAYERS), 1, COUNT)
    return Pipeline(layers, plan, square, timeout_s=PATIENCE_S, **more)


def rows(dtype=torch.bfloat16):
    return torch.randn(COUNT * 3, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def sgd(rate):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def adam(**more):
    return lambda parameters: torch.optim.Adam(parameters, lr=0.1, **more)


@pytest.mark.parametrize("make", [sgd(0.5), adam(fused=True)], ids=["sgd", "fused adam"])
@pytest.mark.parametrize(("dtype", "host"), [(torch.bfloat16, 0.0), (torch.float32, 1.0)])
def test_a_scaled_loss_gives_the_master_weights_of_one_that_is_not_scaled(make, dtype, host):
    def trained(scale):
        layers = low_layers(dtype)
        with pipeline(layers, main_grads=True) as pipe:
            optimizer = MixedPrecisionOptimizer(make, pipe, host=host)
            scaler = pipe.grad_scaler(init_scale=scale, enabled=scale != 1.0)
            for _ in range(2):
                pipe.step(rows(dtype), -rows(dtype))
                scaler.unscale_(optimizer)
                pipe.clip_grad_norm_(1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            return [optimizer.master(p).clone() for p in pipe.parameters()]

    for plain, scaled in zip(trained(1.0), trained(1024.0), strict=True):
        assert torch.allclose(plain, scaled, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [sgd(0.5), adam(fused=True)], ids=["sgd", "fused adam"])
def test_master_weights_skip_a_step_that_overflows(make):
    layers = low_layers()
    with pipeline(layers, main_grads=True) as pipe:
        optimizer = MixedPrecisionOptimizer(make, pipe)
        scaler = pipe.grad_scaler(init_scale=64.0)
        pipe.step(rows(), rows())
        next(pipe.parameters()).grad[0] = float("inf")
        before = [p.detach().clone() for p in pipe.parameters()]
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True))
        assert scaler.get_scale() == pipe.loss_scale == 32.0


@pytest.mark.parametrize("host", [0.0, 1.0])
def test_weights_that_are_clipped_through_data_stay_clipped(host):
    layers = low_layers()
    with pipeline(layers, main_grads=True) as pipe:
        optimizer = MixedPrecisionOptimizer(sgd(1e-6), pipe, host=host)
        for _ in range(7):  # a step whose number is no power of two, too
            pipe.step(rows(), rows())
            optimizer.step()
            optimizer.zero_grad()
        for parameter in pipe.parameters():
            parameter.data.clamp_(-LIMIT, LIMIT)
        pipe.step(rows(), rows())
        optimizer.step()
        assert max(float(p.detach().abs().max()) for p in pipe.parameters()) <= 1.01 * LIMIT


def test_a_parameter_that_is_no_longer_frozen_has_a_main_gradient_and_needs_a_new_optimizer():
    layers = low_layers()
    layers[0].weight.requires_grad_(False)
    with pipeline(layers, main_grads=True) as pipe:
        optimizer = MixedPrecisionOptimizer(sgd(0.5), pipe)
        pipe.step(rows(), -rows())
        optimizer.step()
        layers[0].weight.requires_grad_(True)
        pipe.zero_grad()
        pipe.step(rows(), -rows())
        assert layers[0].weight.grad.dtype is torch.float32
        before = layers[0].weight.detach().clone()
        with pytest.raises(OctoPipeError, match=r"parameter 0\.weight is trained now, but was frozen"):
            optimizer.step()
        optimizer = MixedPrecisionOptimizer(sgd(0.5), pipe)
        optimizer.step()
        assert not torch.equal(before, layers[0].weight)


def test_a_parameter_that_replaces_another_has_a_main_gradient():
    layers = low_layers()
    with pipeline(layers, main_grads=True) as pipe:
        pipe.step(rows(), rows())
        layers[1].weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16))
        pipe.step(rows(), rows())
        assert {gradient_dtype(p) for p in pipe.parameters()} == {torch.float32}
        assert layers[1].weight.grad.dtype is torch.float32


class Weighted(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))

    def forward(self, output, target):
        return square(output * self.weight, target)


def test_a_switch_keeps_the_master_weight_of_a_losss_parameter():
    plan = build_plan("gpipe", CostTable.uniform(num_layers=LAYERS), 1, COUNT)

    def make_pipe(plan):
        return Pipeline(low_layers(), plan, Weighted(), main_grads=True, timeout_s=PATIENCE_S)

    def make_optimizer(pipe):
        return MixedPrecisionOptimizer(adam(), pipe)

    def masters(switches):
        pipe = make_pipe(plan)
        optimizer = make_optimizer(pipe)
        for step in range(4):
            pipe.step(rows(), -rows())
            optimizer.step()
            optimizer.zero_grad()
            if switches and step == 1:
                pipe, optimizer = switch(pipe, optimizer, plan, make_pipe=make_pipe, make_optimizer=make_optimizer)
        with pipe:
            return {name: optimizer.master(p).clone() for name, p in pipe.named_parameters()}

    steady, switched = masters(False), masters(True)
    assert f"{LAYERS}.weight" in steady
    assert all(torch.equal(value, switched[name]) for name, value in steady.items())


def test_a_checkpoint_is_loaded_where_a_parameter_is_frozen_now(tmp_path):
    with pipeline(low_layers(), main_grads=True) as pipe:
        optimizer = MixedPrecisionOptimizer(adam(), pipe)
        pipe.step(rows(), -rows())
        optimizer.step()
        path = save_checkpoint(tmp_path, pipe, optimizer, step=1)
        saved = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    layers = low_layers()
    layers[0].weight.requires_grad_(False)
    with pipeline(layers, main_grads=True) as pipe:
        optimizer = MixedPrecisionOptimizer(adam(), pipe)
        load_checkpoint(path, pipe, optimizer)
        assert all(torch.equal(p, saved[name]) for name, p in pipe.named_parameters())
        assert layers[0].weight not in optimizer.state and layers[0].bias in optimizer.state
