"""One stage: how layers are called, what is kept when, which ways its forward and backward may take."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from octopipe.errors import OctoPipeError  # noqa: E402
from octopipe.runtime import stage as module  # noqa: E402
from octopipe.runtime.stage import Loss, Stage, StageRun  # noqa: E402


class Call(nn.Module):
    """A layer with a linear in front of any function of its inputs."""

    def __init__(self, function: Any):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 3).double()
        self.forward = function  # its signature is the layer's


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)


# -- how layers are called ---------------------------------------------------------------------------------


def _one(x):
    return x[0] + x[1]


def _two(x, y):
    return x + y


def _any(*values):
    assert len(values) == 2
    return values[0] + values[1]


def _first_and_any(x, *rest):
    return x + rest[0]


def _default(x, y=None):
    return x + y


def _keyword_only(x, *, scale=1.0):
    return x[0] + x[1] * scale


def _positional_only(x, y, /):
    return x + y


@pytest.mark.parametrize("function", [_one, _two, _any, _first_and_any, _default, _keyword_only, _positional_only])
def test_a_tuple_is_unpacked_for_layers_that_take_more_than_one_argument(function: Any) -> None:
    run = Stage([Call(function)]).forward((ones(2), 2 * ones(2)))
    assert torch.equal(run.outputs, 3 * ones(2))
    grads = run.backward_full([ones(2)])
    assert len(grads) == 2 and all(torch.equal(g, ones(2)) for g in grads)


def test_a_layer_without_a_signature_gets_the_whole_value() -> None:
    run = Stage([Call(torch.stack)]).forward((ones(2), 2 * ones(2)))
    assert run.outputs.tolist() == [[1, 1], [2, 2]]


def test_a_tensor_is_one_argument_for_any_layer_and_a_dict_goes_by_names() -> None:
    stage = Stage([Call(lambda x, y=5: {"x": x, "y": x * y}), Call(lambda y, x: x - y)])
    assert torch.equal(stage.forward(ones(2)).outputs, -4 * ones(2))


def _masked(x, mask):
    return x * mask


def _perhaps_masked(x, *, mask=None):
    return x if mask is None else x * mask


def _rest(x, **mask):
    assert not mask
    return x


def _both(x, y, mask):
    return (x + y) * mask


@pytest.mark.parametrize(
    ("function", "named", "required"),
    [(_masked, ("mask",), {"mask"}), (_perhaps_masked, ("mask",), set()), (_rest, (), set()), (_two, (), set())],
)
def test_side_inputs_are_arguments_of_their_names(function: Any, named: tuple[str, ...], required: set[str]) -> None:
    stage = Stage([Call(function)], side=("mask", "other"))
    assert stage.side == named and stage.side_required == required
    value = (ones(2), ones(2)) if function is _two else ones(2)
    out = stage.forward(value, side={"mask": torch.tensor([3.0, 4.0]), "other": 1}).outputs
    assert out.tolist() == ([3, 4] if named else [2, 2] if function is _two else [1, 1])
    if not required:
        assert stage.forward(value).outputs is not None  # nothing was given beside
        assert stage.forward(value, side={"other": 1}).outputs is not None


def test_side_inputs_do_not_count_as_arguments() -> None:
    stage = Stage([Call(lambda x, mask: (x[0] + x[1]) * mask), Call(_both)], side=("mask",))
    with pytest.raises(TypeError):
        stage.forward((ones(2), ones(2)), side={"mask": 2})  # the second layer takes two values, and gets one
    stage = Stage([Call(lambda x, mask: (x[0] * mask, x[1])), Call(_both)], side=("mask",))
    assert stage.forward((ones(2), ones(2)), side={"mask": 2}).outputs.tolist() == [6, 6]


def test_layers_are_numbered_from_the_stages_first() -> None:
    layers = [nn.Dropout(0.5), nn.Dropout(0.5)]
    x = ones(64)
    assert torch.equal(
        Stage(layers).forward(x, seed=5).outputs, Stage(layers, first_layer=0).forward(x, seed=5).outputs
    )
    assert not torch.equal(
        Stage(layers).forward(x, seed=5).outputs, Stage(layers, first_layer=1).forward(x, seed=5).outputs
    )
    assert Stage(layers).place() == "layer 1 (Dropout)" and Stage(layers, first_layer=4).place() == "layer 5 (Dropout)"


def test_a_loss_that_draws_does_so_by_its_seed() -> None:
    drop = nn.Dropout(0.5)

    def value(seed: int | None) -> Tensor:
        return Stage([nn.Identity()]).forward(ones(64), then=drop, seed=seed).outputs

    torch.manual_seed(1)
    first = value(5)
    torch.manual_seed(2)
    assert torch.equal(first, value(5)) and not torch.equal(first, value(6))
    layer = Stage([drop]).forward(ones(64), seed=5).outputs
    assert not torch.equal(first, layer)  # not the draws of a layer


# -- which inputs and outputs take gradients ---------------------------------------------------------------


@pytest.mark.parametrize("input_grad", [True, False])
def test_floating_inputs_take_gradients_unless_the_stage_is_the_first(input_grad: bool) -> None:
    layer = Call(lambda x, n, words: x * n)
    stage = Stage([layer], input_grad=input_grad)
    if not input_grad:
        stage = Stage([Call(lambda x, n, words: layer.inner(x) * n)], input_grad=False)
        stage.modules[0].add_module("used", layer.inner)
    run = stage.forward((ones(3), torch.tensor(2), "text"))
    assert run._wanted == [input_grad, False, False]
    grads = run.backward_full([ones(3)])
    assert [g is not None for g in grads] == [input_grad, False, False]
    only = Stage([nn.Linear(3, 3).double()], input_grad=input_grad).forward(ones(2, 3))
    assert list(only._wanted) == [input_grad]
    assert (only._inputs is None) is (not input_grad)  # the graph holds what it needs
    ids = Stage([nn.Embedding(4, 3)], input_grad=input_grad).forward(torch.tensor([1, 2]))
    assert list(ids._wanted) == [False]


def test_inputs_may_be_told_one_by_one() -> None:
    stage = Stage([Call(_two)])
    grads = stage.forward((ones(2), ones(2)), input_grad=[False, True]).backward_full([ones(2)])
    assert grads[0] is None and grads[1] is not None
    linear = Stage([nn.Linear(3, 3).double()])
    assert linear.forward(ones(2, 3), input_grad=[False]).backward_full([ones(2, 3)]) == [None]


def test_outputs_that_are_no_tensors_or_take_no_gradient_are_passed_on() -> None:
    stage = Stage([Call(lambda x: (x * 2, 7, x.detach(), x * 3))])
    run = stage.forward(ones(2))
    assert run.outputs_need_grad == [True, False, False, True] and run.outputs[1] == 7
    (grad,) = run.backward_full([ones(2), None, ones(2), None])  # what is given for the third is not used
    assert grad.tolist() == [2, 2]
    nested = Stage([Call(lambda x: (x * 2, (x * 3, x * 5)))]).forward(ones(2))
    (grad,) = nested.backward_full([ones(2), (ones(2), 2 * ones(2))])
    assert grad.tolist() == [15, 15]
    named = Stage([Call(lambda x: {"z": x * 2})]).forward(ones(2))
    (grad,) = named.backward_full({"z": ones(2)})
    assert grad.tolist() == [2, 2]


def test_two_outputs_of_which_one_has_no_gradient() -> None:
    for grads, want in (([ones(2), None], 2.0), ([None, ones(2)], 3.0), ([ones(2), ones(2)], 5.0)):
        (grad,) = Stage([Call(lambda x: (x * 2, x * 3))]).forward(ones(2)).backward_full(grads)
        assert grad.tolist() == [want, want]
    run = Stage([Call(lambda x: (x * 2, x * 3))]).forward(ones(2))
    with pytest.raises(ValueError, match="shorter"):
        run.backward_full([ones(2)])


def test_an_output_without_a_graph_needs_no_gradient_but_a_loss_does() -> None:
    frozen = nn.Linear(3, 3).double().requires_grad_(False)
    run = Stage([frozen], input_grad=False).forward(ones(2, 3))
    assert run.outputs_need_grad == [False] and run.backward_full([ones(2, 3)]) == [None]
    run = Stage([frozen], input_grad=False).forward(ones(2, 3), then=torch.sum)
    with pytest.raises(OctoPipeError, match="depends on nothing that takes a gradient"):
        run.backward_full()
    both = Stage([frozen]).forward(ones(2, 3), then=lambda y: (y.sum(), y.detach().sum()))
    assert both.outputs_need_grad == [True, False] and both.backward_full()[0] is not None


def test_an_input_that_nothing_depends_on_has_no_gradient() -> None:
    grads = Stage([Call(lambda x, y: x * 2)]).forward((ones(2), ones(2))).backward_full([ones(2)])
    assert grads[0] is not None and grads[1] is None


# -- the ways of a backward --------------------------------------------------------------------------------


@pytest.mark.parametrize("known", ["host", "engine", "nothing"])
def test_backward_takes_the_shortest_way_that_torch_has(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *a, **k: (used.append(name), function(*a, **k))[1]

    monkeypatch.setattr(module, "_run_on_host", counted("host", module._run_on_host) if known == "host" else None)
    engine = counted("engine", module._run_backward) if known != "nothing" else None
    monkeypatch.setattr(module, "_run_backward", engine)
    layer = nn.Linear(3, 3).double()
    run = Stage([layer, nn.Tanh()]).forward(ones(2, 3))
    x = ones(2, 3).requires_grad_()
    (want,) = torch.autograd.grad(torch.tanh(layer(x)), x, ones(2, 3))
    (grad,) = run.backward_input([ones(2, 3)])
    assert torch.allclose(grad, want) and not grad.requires_grad and layer.bias.grad is not None
    assert used == ([] if known == "nothing" else [known])


@pytest.mark.parametrize("way", ["host", "engine"])
def test_what_backward_has_used_is_let_go_while_it_runs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[bool] = []
    saved: list[Any] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            gone.append(saved[0]() is None)
            return g

    def layer(x: Tensor) -> Tensor:
        late = Look.apply(x) + 1
        saved.append(weakref.ref(late.untyped_storage()))
        return late * late

    if way == "engine":
        monkeypatch.setattr(module, "_run_on_host", None)
    Stage([Call(layer)]).forward(ones(5)).backward_full([ones(5)])
    assert gone == [True]


def test_an_input_that_is_the_output_has_its_gradient() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g

    for function, want in ((lambda x: x, 1.0), (Own.apply, 2.0), (lambda x: x.exp().log(), 1.0)):
        (grad,) = Stage([Call(lambda x, f=function: f(x))]).forward(ones(2)).backward_full([ones(2)])
        assert grad.tolist() == pytest.approx([want, want])


# -- what the forward learns -------------------------------------------------------------------------------


class Watch(nn.Module):
    """Notes how it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3).double()
        self.seen: list[tuple[bool, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((torch.is_grad_enabled(), x.data_ptr()))
        return self.inner(x)


def test_a_forward_whose_graph_comes_later_runs_without_gradients_on_its_own_input() -> None:
    layer, x = Watch(), ones(2, 3)
    stage = Stage([layer])
    assert not stage.settled
    first = stage.forward(x, recompute=True)
    assert layer.seen == [(False, x.data_ptr())] and not stage.settled
    first.recompute()
    assert stage.settled and layer.seen[-1] == (True, x.data_ptr())
    stage.forward(x, recompute=True)
    assert layer.seen[-1] == (False, x.data_ptr())
    stage.forward(x)
    assert layer.seen[-1] == (True, x.data_ptr())


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
    for words in ("a leaf Variable that requires grad is being used", "element 0 does not require grad", "other"):
        calls: list[int] = []

        def layer(x: Tensor, calls: list[int] = calls, words: str = words) -> Tensor:
            calls.append(1)
            if len(calls) > 5:
                raise KeyError("for ever")
            raise RuntimeError(words)

        stage = Stage([Call(layer)])
        with pytest.raises(RuntimeError, match=words):
            stage.forward(ones(2))
        assert len(calls) == (1 if words == "other" else 2)
        assert stage.copies_inputs is ("leaf" in words) and stage.grad_inside is ("element" in words)


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
