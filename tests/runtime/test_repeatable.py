"""What must not be recomputed is found, said and never planned; what is changed too early is refused by its name."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from effort import some

torch = pytest.importorskip("torch")
from stage_layers import Call, ones  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.profile_file import profile_from_object  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.costs.table_file import costs_from_record, record_of  # noqa: E402
from octopipe.models.zoo import preset  # noqa: E402
from octopipe.runtime.measure.profiler import assemble, gather, profile_layers  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.world import World  # noqa: E402
from octopipe.runtime.stages import stage as stage_module  # noqa: E402
from octopipe.runtime.stages.capturable import fixed_reason  # noqa: E402
from octopipe.runtime.stages.repeatable import LOOKS_AGAIN_AT, digest_of, first_difference, is_noise, sketch  # noqa: E402
from octopipe.runtime.stages.stage import Stage  # noqa: E402
from octopipe.runtime.training.job import TrainJob  # noqa: E402
from octopipe.runtime.training.train import train  # noqa: E402
from octopipe.search.recompute import recomputing  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402
from octopipe.search.tuner import tune  # noqa: E402
from octopipe.simulation.simulator import simulate  # noqa: E402


class Drawn(nn.Module):
    """Multiplies by what an iterator gives, which nobody can wind back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factors = nn.Linear(3, 3), itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * next(self.factors)


class Told(nn.Linear):
    repeatable = False


def limited(repeatable: tuple[bool, ...]) -> CostTable:
    """Four layers on two ranks whose activations do not fit unless some are recomputed."""
    costs = CostTable.uniform(num_layers=4, activation_bytes=100.0)
    return costs.replace(
        boundary_bytes=np.full(4, 1.0), rank_memory_bytes=(450.0,), repeatable=repeatable, symbols="TTTT"
    )


def test_a_profile_says_which_layers_do_the_same_twice() -> None:
    layers = [nn.Linear(3, 3), Drawn(), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), Told(3, 3), nn.Linear(3, 3)]
    mine = profile_layers(layers, torch.randn(2, 3), lambda y, t: y.mean(), torch.zeros(1), repeats=1, warm_up=0)
    profile = assemble(gather(mine, None), model="mine", symbols="EXDTL")
    assert profile.costs.repeatable == (True, False, True, False, True)
    import msgspec

    again = profile_from_object(msgspec.json.decode(profile.to_json()), name="mine")
    assert again.costs.repeatable == profile.costs.repeatable and again.costs.not_repeatable() == (1, 3)
    assert costs_from_record(record_of(again.costs)).digest() == again.costs.digest()
    with pytest.raises(OctoPipeError, match=r'"repeatable" is .*true or false'):
        profile_from_object({**msgspec.json.decode(profile.to_json()), "repeatable": [1]}, name="mine")


def test_no_search_recomputes_a_layer_that_did_something_else_the_second_time() -> None:
    known = tune(limited((True,) * 4), 2, 8, iterations=200)
    told = tune(limited((True, False, True, True)), 2, 8, iterations=200)
    assert any(s.recompute for s in build_plan("mario", limited(()), 2, 8).stages)
    assert not any(1 in s.recomputed_layers for s in told.plan.stages)
    assert "layer 1 gave another result" in " ".join(told.notes)
    assert not any("something else" in note for note in known.notes)
    with pytest.raises(OctoPipeError, match="mario: it recomputes layer 1"):
        build_plan("mario", limited((True, False, True, True)), 2, 8)
    start = recomputing(build_plan("1f1b", limited(()), 2, 8))
    with pytest.raises(OctoPipeError, match="start from recomputes layer 1"):
        tune(limited((True, False, True, True)), 2, 8, iterations=10, start=start)


@pytest.mark.parametrize("unlike", some([(2, 6), (0,), (5,)]))
def test_a_layer_that_cannot_be_recomputed_leaves_the_other_stages_theirs(unlike: tuple[int, ...]) -> None:
    """Twelve layers on two ranks: not even one micro-batch's activations fit unless some are recomputed."""
    costs = CostTable.uniform(num_layers=12, activation_bytes=100.0)
    costs = costs.replace(boundary_bytes=np.full(12, 1.0), rank_memory_bytes=(550.0,), symbols="T" * 12)
    with pytest.raises(OctoPipeError, match="fit"):
        tune(costs, 2, 6, iterations=200, recompute=False)
    told = tune(costs.replace(repeatable=tuple(k not in unlike for k in range(12))), 2, 6, iterations=1000)
    again = {k for stage in told.plan.stages for k in stage.recomputed_layers}
    assert again and not again & set(unlike)
    assert simulate(told.plan, costs).fits
    assert f"layer {unlike[0]}" in " ".join(told.notes)


def test_a_layer_that_says_it_is_not_repeatable_is_refused_before_the_first_step() -> None:
    plan = recomputing(build_plan("1f1b", CostTable.uniform(num_layers=2), 1, 2))
    with pytest.raises(OctoPipeError, match=r"layer 0 \(Told\) is recomputed .* `repeatable = False`"):
        Pipeline([Told(3, 3), nn.Linear(3, 3)], plan, lambda y, t: y.mean(), group=World(None))


class Late(nn.Module):
    """The same twice in two steps, then no more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factors = nn.Linear(3, 3), itertools.chain([1.0] * 12, itertools.count(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * next(self.factors)


@pytest.mark.parametrize("verify", [True, "first-step", False])
def test_a_difference_after_the_first_steps_is_found_under_verify_alone(verify: Any) -> None:
    plan = recomputing(build_plan("1f1b", CostTable.uniform(num_layers=2), 1, 1))
    with Pipeline([Late(), nn.Linear(3, 3)], plan, lambda y: y.mean(), group=World(None), verify=verify) as pipe:
        if verify is True:
            with pytest.raises(
                OctoPipeError, match=r"layer 0 \(Late\) gives another output when its forward runs again"
            ):
                for _ in range(8):
                    pipe.step([torch.ones(2, 3)])
        else:
            for _ in range(8):
                pipe.step([torch.ones(2, 3)])
        assert pipe.step_number > 2
        reasons = [fixed_reason(chain) for chain in pipe.executor.chains.values()]
        assert all(("R is compared with F in every step" in reason) == (verify is True) for reason in reasons)


def test_training_compares_recomputed_layers_in_its_first_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every step would be slower than the step that was predicted, and no stage that recomputes could be
    replayed from CUDA graphs."""
    seen: list[int] = []
    run = Pipeline.step

    def step(self: Pipeline, *args: Any, **more: Any) -> Any:
        seen.append(0)
        return run(self, *args, **more)

    def digest(value: Any) -> Any:
        seen[-1] += 1
        return digest_of(value)

    monkeypatch.setattr(Pipeline, "step", step)
    monkeypatch.setattr(stage_module, "digest_of", digest)
    spec = preset("llama3-8b").scaled(0.004, num_layers=4)
    plan = recomputing(build_plan("1f1b", CostTable.uniform(num_layers=len(spec.layers)), 1, 2))
    assert train(TrainJob(spec=spec, nproc=1, steps=5, plan=plan, seq=8, measure=False)) is not None
    assert len(seen) == 5 and seen[0] > 0 and seen[1] > 0 and seen[2:] == [0, 0, 0]


def test_an_operand_changed_between_i_and_w_is_refused_by_its_parameter() -> None:
    kept: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return inner(kept[-1])

    inner = nn.Linear(3, 3).double()
    module = Call(layer)
    module.used = inner
    run = Stage([module], first_layer=4).forward(ones(2, 3))
    run.backward_input([ones(2, 3)])
    with torch.no_grad():
        kept[0].add_(1)
    with pytest.raises(OctoPipeError, match=r"parameter 4.used.weight: .* of shape \(2, 3\), was changed in place"):
        run.backward_weight()


def test_an_output_that_a_later_forward_writes_to_is_refused() -> None:
    memory = {"out": torch.zeros(2, 3)}.__getitem__  # where nothing looks

    def layer(x: Tensor) -> Tensor:
        return memory("out").copy_(x)

    stage = Stage([Call(layer)], input_grad=False, first_layer=7)
    first = stage.forward(torch.ones(2, 3))
    with pytest.raises(OctoPipeError, match=r"^layer 7: a forward changed in place an output"):
        stage.forward(torch.ones(2, 3))
    assert first.outputs is not None


@pytest.mark.parametrize("layers, named", [(1, r"^layer 7: "), (2, r"^layers 7 to 8: ")])
def test_what_is_changed_before_its_backward_names_the_layers_of_the_stage(layers: int, named: str) -> None:
    kept: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        kept.append(torch.tanh(x))  # whose backward reads its result
        return kept[-1] * 1.0

    run = Stage([Call(layer)] * layers, first_layer=7).forward(ones(2, 3))
    with torch.no_grad():
        kept[0].add_(1)
    with pytest.raises(OctoPipeError, match=named + "something was changed in place after a forward"):
        run.backward_full([ones(2, 3)])


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_gradients_have_the_dtype_that_a_parameter_asks_for(dtype: Any) -> None:
    layer = nn.Linear(3, 3, dtype=torch.bfloat16)
    if not hasattr(layer.weight, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    layer.weight.grad_dtype = dtype
    stage = Stage([layer])
    for _ in range(2):
        run = stage.forward(torch.ones(2, 3, dtype=torch.bfloat16))
        run.backward_input([torch.ones(2, 3, dtype=torch.bfloat16)])
        run.backward_weight()
    assert layer.weight.grad.dtype == (dtype or torch.bfloat16)
    assert torch.equal(layer.weight.grad.float(), torch.full((3, 3), 4.0))


def test_sketches_are_linear_keep_the_norm_and_see_every_place() -> None:
    g = torch.Generator().manual_seed(0)
    norms = []
    for n in (5, 64, 1000):
        a, b = (torch.randn(n, dtype=torch.float64, generator=g) for _ in range(2))
        assert torch.allclose(sketch(a) - sketch(b), sketch(a - b), atol=1e-9)
        norms.append(float(sketch(a).norm() / a.norm()))
        one = torch.zeros(n, dtype=torch.float64)
        one[n // 2] = 1e-3
        assert float(sketch(one).norm()) == pytest.approx(1e-3)
    assert all(0.5 < ratio < 2 for ratio in norms)


def test_noise_is_what_runs_of_one_forward_differ_by_and_no_more() -> None:
    form = ((4,), torch.float32)

    def of(*values: float) -> tuple[Any, ...]:
        v = torch.tensor(values, dtype=torch.float64)
        return ((form, v, v.norm()),)

    base, near, far = of(1, 2, 3), of(1 + 1e-6, 2, 3), of(1.5, 2, 3)
    assert is_noise(base, near, of(1, 2, 3 + 1e-6)), "an order of additions"
    assert not is_noise(far, base, base), "the first run alone is another"
    assert not is_noise(far, base, near), "more than the noise"
    assert not is_noise(far, base, of(2, 2, 3)), "drawn anew each time: noise as large as the values"
    assert first_difference([digest_of(ones(2))], [digest_of(ones(2))]) is None
    assert first_difference([digest_of(ones(2)), digest_of((1, "x"))], [digest_of(ones(2)), digest_of((2, "x"))]) == 1


class Later(nn.Module):
    """Depends, from some step on, on a number that is hidden in an iterator."""

    def __init__(self, begins: int):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.hidden, self.left = itertools.count(1), itertools.chain([0] * begins, itertools.repeat(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1 + next(self.hidden) % 3 if next(self.left) else 1)


def test_a_forward_that_begins_to_differ_later_is_found_though_not_at_once() -> None:
    plan = recomputing(build_plan("1f1b", CostTable.uniform(num_layers=3), 1, 2))
    layers = [Later(2 * 2 * 5), nn.Linear(3, 3), nn.Linear(3, 3)]
    x = torch.randn(4, 3)
    with Pipeline(layers, plan, lambda y, t: y.mean(), group=World(None)) as pipe:
        for _ in range(LOOKS_AGAIN_AT):
            pipe.step(x, x)
        with pytest.raises(OctoPipeError, match=r"layer 0 \(Later\) gives another output when its forward runs again"):
            pipe.step(x, x)
