"""One stage: how layers are called, which values take gradients, which way its backward takes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from stage_layers import Call, ones  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.runtime.stages import graph as module  # noqa: E402
from octopipe.runtime.stages.stage import Stage  # noqa: E402

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

    monkeypatch.setattr(module, "run_engine", counted("host", module.run_engine) if known == "host" else None)
    engine = counted("engine", module.engine_run_backward) if known != "nothing" else None
    monkeypatch.setattr(module, "engine_run_backward", engine)
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
        monkeypatch.setattr(module, "run_engine", None)
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
