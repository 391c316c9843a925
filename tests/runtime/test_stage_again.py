"""A stage's forward that runs again: what it learns from the first one, R, and gradients taken inside it."""

from __future__ import annotations

import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from stage_layers import Call, ones  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.runtime.stages.stage import Loss, Stage, StageRun  # noqa: E402


class Watch(nn.Module):
    """Notes how it is run, where nothing is ever put back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.notes, self.seen = nn.Linear(3, 3).double(), io.StringIO(), []

    def forward(self, x: Tensor) -> Tensor:
        self.notes.write(f"{torch.is_grad_enabled()} {x.requires_grad} {x.is_leaf} {x.data_ptr()}\n")
        self.seen.append(x)
        return self.inner(x)


def test_statistics_that_become_nan_stay_nan_as_in_plain_torch() -> None:
    plain, layer = (nn.BatchNorm1d(3).double() for _ in range(2))
    stage = Stage([layer])
    for number in range(4):
        x = ones(4, 3) * (number + 1.0)
        x[0, 0] = float("nan") if number == 2 else x[0, 0]
        plain(x)
        stage.forward(x)
        torch.testing.assert_close(layer.running_mean, plain.running_mean, equal_nan=True)


def test_a_forward_whose_graph_comes_later_runs_as_in_plain_torch_and_so_does_r() -> None:
    layer, x = Watch(), ones(2, 3)
    stage = Stage([layer])
    run = stage.forward(x, recompute=True)
    assert run.outputs_need_grad == [True] and len(layer.seen) == 1
    run.recompute()
    stage.forward(x)
    assert layer.notes.getvalue().splitlines() == [f"True True False {x.data_ptr()}"] * 3
    assert len(layer.seen) == 2, "what R appends is taken away again"


def popping(inner: nn.Module) -> Any:
    def forward(batch: Any, *, notes: Any = ()) -> Tensor:
        x = inner(batch.pop("x"))
        scales = batch["more"][0]
        scales.append(float(len(scales)))
        for note in notes:
            note["scale"] += 1.0  # seen by whoever gave it, once per micro-batch
        return x * sum(scales) * notes[0]["scale"] * batch["kinds"].pop()

    return forward


def taking(output: Tensor, target: Any) -> Tensor:
    return (output - target.pop("y")).square().sum() * len(target["rest"])


@pytest.mark.parametrize("checking", [True, False])
def test_a_forward_that_changes_its_containers_is_given_them_again_in_r(checking: bool) -> None:
    """Those of its inputs, of side inputs and of the loss's target, nested ones too; gradients are those of a stage
    that keeps its graph."""
    grads = []
    for again in (False, True):
        torch.manual_seed(0)
        layer = Call(None)
        layer.forward = popping(layer.inner)
        stage = Stage([layer], input_grad=False, side=["notes"])
        stage.always_check = checking
        stage._steps_checked = 0 if checking else 3
        notes = [{"scale": 1.0}]
        for number in range(2):
            batch = {"x": ones(2, 3) + number, "more": ([1.0, 2.0],), "kinds": {3}}
            loss = Loss(taking, {"y": ones(2, 3), "rest": [1, 2]})
            run = stage.forward(batch, then=loss, recompute=again, side={"notes": notes})
            if again:
                run.recompute()
            run.backward_full()
            assert sorted(batch) == ["kinds", "more", "x"] and notes == [{"scale": 2.0 + number}]
        grads.append([p.grad for p in layer.parameters()])
    for kept, made in zip(*grads, strict=True):
        torch.testing.assert_close(made, kept, rtol=0, atol=0)


def test_a_graph_is_built_also_where_gradients_are_off_around_it() -> None:
    stage = Stage([nn.Linear(3, 3).double()])
    for _ in range(2):
        with torch.no_grad():
            run = stage.forward(ones(2, 3))
        assert run.outputs_need_grad == [True] and run.backward_full([ones(2, 3)])[0] is not None


def test_r_is_for_runs_that_kept_no_graph_and_only_once() -> None:
    stage = Stage([nn.Linear(3, 3).double()])
    with pytest.raises(OctoPipeError, match="kept its graph"):
        stage.forward(ones(2, 3)).recompute()
    run = stage.forward(ones(2, 3), recompute=True)
    with pytest.raises(OctoPipeError, match="without a graph"):
        run.backward_full([ones(2, 3)])
    run.recompute()
    with pytest.raises(OctoPipeError, match="kept its graph"):
        run.recompute()
    assert run.outputs is None and run.backward_full([ones(2, 3)])[0] is not None


def test_r_draws_what_f_drew_with_and_without_a_seed() -> None:
    for seed in (None, 7):
        stage = Stage([nn.Linear(3, 3).double(), nn.Dropout(0.5)])
        for _ in range(2):
            run = stage.forward(ones(64, 3), recompute=True, seed=seed)
            kept = (run.outputs != 0).double()
            torch.rand(3)
            run.recompute()
            (grad,) = run.backward_full([ones(64, 3)])
            assert torch.allclose(grad, 2 * kept @ stage.modules[0].weight.detach())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("more", [(), (5,)])
def test_inputs_changed_in_place_are_copied_and_random_draws_not_repeated(
    recompute: bool, more: tuple[int, ...]
) -> None:
    def layer(x: Tensor, *rest: int) -> Tensor:
        y = torch.dropout(x, 0.5, True)
        return x.mul_(3) * y

    stage = Stage([Call(layer)])
    for _ in range(2):
        x = ones(64)
        torch.manual_seed(4)
        y = torch.dropout(ones(64), 0.5, True)
        torch.manual_seed(4)
        run = stage.forward((x, *more) if more else x, recompute=recompute)
        assert torch.equal(run.outputs, 3 * y)
        if recompute:
            run.recompute()
        grads = run.backward_full([ones(64)])
        assert torch.equal(grads[0], 6 * y) and len(grads) == 1 + len(more)


def test_an_error_that_stays_is_raised_and_not_tried_for_ever() -> None:
    for words in ("element 0 does not require grad", "other"):
        notes = io.StringIO()

        def layer(x: Tensor, notes: io.StringIO = notes, words: str = words) -> Tensor:
            notes.write(".")
            if len(notes.getvalue()) > 5:
                raise KeyError("for ever")
            raise RuntimeError(words)

        stage = Stage([Call(layer)])
        with pytest.raises(RuntimeError, match=words):
            stage.forward(ones(2))
        assert len(notes.getvalue()) == (1 if words == "other" else 2)
        assert stage.grad_inside is ("element" in words)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_inside_a_forward_are_those_of_plain_torch(recompute: bool) -> None:
    """Forces: the gradient of an energy in front of the layers that follow, which has gradients itself."""
    torch.manual_seed(0)
    energy, after = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forces(x: Tensor) -> Tensor:
        x = x.requires_grad_() if not x.requires_grad else x
        (force,) = torch.autograd.grad(torch.tanh(energy(x)).square().sum(), x, create_graph=True)
        return after(force)

    layer = Call(forces)
    layer.energy, layer.after = energy, after
    x = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    parameters = [energy.weight, energy.bias, after.weight, after.bias]
    want = torch.autograd.grad(forces(x).square().sum(), [x, *parameters])
    stage = Stage([layer])
    for _ in range(3):
        for p in parameters:
            p.grad = None
        run = stage.forward(x.detach().clone(), recompute=recompute)
        y = run.outputs
        if recompute:
            run.recompute()
        (grad,) = run.backward_input([2 * y])
        run.backward_weight()
        for a, b in zip([grad, *(p.grad for p in parameters)], want, strict=True):
            torch.testing.assert_close(a, b)


def test_a_loss_goes_with_its_target_into_r() -> None:
    layer, x, target = nn.Linear(3, 3).double(), ones(2, 3), torch.full((2, 3), 5.0, dtype=torch.float64)
    stage = Stage([layer])
    for recompute in (False, True):
        layer.zero_grad()
        run: StageRun = stage.forward(x, then=Loss(nn.functional.mse_loss, target), recompute=recompute)
        assert run.outputs.ndim == 0
        if recompute:
            run.recompute()
        run.backward_input()
        assert layer.weight.grad is None or not layer.weight.grad.any()
        assert run.weight_bytes() > 0
        run.backward_weight()
        (want,) = torch.autograd.grad(nn.functional.mse_loss(layer(x), target), layer.weight)
        torch.testing.assert_close(layer.weight.grad, want)
        assert run.weight_bytes() == 0


def test_w_waits_for_i_and_b_leaves_nothing_to_it() -> None:
    layer = nn.Linear(3, 3).double()
    run = Stage([layer]).forward(ones(2, 3))
    with pytest.raises(OctoPipeError, match="W before I"):
        run.backward_weight()
    run.backward_full([ones(2, 3)])
    done = layer.weight.grad.clone()
    run.backward_weight()
    assert torch.equal(done, layer.weight.grad)
    with pytest.raises(OctoPipeError, match="only once"):
        run.backward_input([ones(2, 3)])
    scalar = Stage([layer]).forward(ones(2, 3))
    with pytest.raises(OctoPipeError, match=r"needs a scalar loss, not shape \(2, 3\)"):
        scalar.backward_input()


def test_a_layer_that_changes_its_input_in_place_runs_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.notes, self.calls = io.StringIO(), 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.notes.write(".")
            self.calls += 1
            self.seen.add_(1)
            return x.mul_(3)

    layer = Counting()
    stage = Stage([layer])
    for k in (1, 2):
        run = stage.forward(ones(4))
        assert layer.seen == layer.calls == len(layer.notes.getvalue()) == k
        assert torch.equal(run.backward_full([ones(4)])[0], 3 * ones(4))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_backward_leaves_the_mode_as_it_was(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    inner = nn.Linear(3, 3).double()
    layer = Call(lambda x: checkpoint(inner, x, use_reentrant=reentrant))
    layer.used = inner
    stage = Stage([layer])
    for _ in range(2):
        inner.zero_grad()
        run = stage.forward(ones(2, 3))
        run.backward_input([ones(2, 3)])
        assert not stage.mode.in_backward and inner.weight.grad is None
        run.backward_weight()
        assert torch.allclose(inner.weight.grad, 2 * ones(3, 3))


def test_r_computes_a_product_that_only_another_output_reads() -> None:
    class Own(torch.autograd.Function):
        """Looks at no values in its forward; its backward does."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.reshape(x.shape)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * ctx.saved_tensors[0]

    inner = nn.Linear(3, 3).double()

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        y = inner(x)
        return x + y, Own.apply(y)

    layer = Call(two)
    layer.used = inner
    stage, x = Stage([layer]), ones(2, 3).requires_grad_()
    (want,) = torch.autograd.grad(sum(y.sum() for y in two(x)), x)
    for _ in range(3):
        run = stage.forward(x.detach(), recompute=True)
        run.recompute()
        (grad,) = run.backward_full([ones(2, 3), ones(2, 3)])
        torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("step", [1, 3])
def test_statistics_that_were_frozen_at_first_advance_once_per_micro_batch(step: int) -> None:
    def block() -> Call:
        torch.manual_seed(2)
        used = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
        layer = Call(lambda x: torch.tanh(used(x)))
        layer.used = used
        used[1].eval()
        return layer

    ours, plain = block(), block()
    stage = Stage([ours])
    for number in range(5):
        if number == step:
            for layer in (ours, plain):
                layer.used[1].train()
        x = torch.linspace(-1, 1, 12).double().view(4, 3) + number
        runs = [stage.forward(x + k, recompute=True) for k in range(2)]
        for k, run in enumerate(runs):
            run.recompute()
            run.backward_full([ones(4, 3)])
            plain(x + k)
        stage.end_step()
    for name, buffer in ours.used[1].named_buffers():
        assert torch.equal(buffer, plain.used[1].get_buffer(name)), name
