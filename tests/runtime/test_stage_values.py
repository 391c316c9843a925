"""What crosses a stage and what it keeps: containers, inputs that are passed on, held bytes, ops out of order."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")
from split_backward import close, parameters_of, random_batches  # noqa: E402
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.runtime.stages.activation_bytes import held_bytes  # noqa: E402
from octopipe.runtime.stages.stage import Stage  # noqa: E402
from octopipe.runtime.values import flatten, rebuild  # noqa: E402


class Several(nn.Module):
    """Takes and gives several values: a float pair, a view of an input, ids, and one without a gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y, ids):
        return self.a(x) + self.b(y), self.b(y)[:, :1].transpose(0, 1), ids


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(4, 4)

    def forward(self, value):
        x, y, ids = value
        return {"z": self.c(x) + y.transpose(0, 1) * ids[..., None], "none": ids.double()}


def test_tuples_dicts_views_and_integers_cross_stages():
    torch.manual_seed(0)
    first, last = Several().double(), Joined().double()
    x, y, ids = random_batches(2, 3, 4)[0], random_batches(2, 3, 4)[1], torch.tensor([[1, 2, 3], [4, 5, 6]])
    xr, yr = x.clone().requires_grad_(), y.clone().requires_grad_()
    out = last(first(xr, yr, ids))
    (out["z"] ** 2).sum().backward()
    want = [p.grad.clone() for p in parameters_of([first, last])]
    for p in parameters_of([first, last]):
        p.grad = None

    one, two = Stage([first]), Stage([last])
    run1 = one.forward((x, y, ids))
    assert run1.outputs_need_grad == [True, True, False] and run1.outputs[1].shape == (1, 2, 4)
    run2 = two.forward(run1.outputs)
    assert run2.outputs_need_grad == [True, False] and set(run2.outputs) == {"z", "none"}
    grads = run2.backward_input({"z": 2 * run2.outputs["z"], "none": None})
    assert grads[2] is None
    grads = run1.backward_input(grads)
    run1.backward_weight()
    run2.backward_weight()
    got = [p.grad for p in parameters_of([first, last])]
    assert all(close(a, b) for a, b in zip(got, want, strict=True))
    assert close(grads[0], xr.grad) and close(grads[1], yr.grad)


def test_an_input_passed_straight_through_gets_its_gradient_and_one_not_used_none():
    class Through(nn.Module):
        def forward(self, x, y):
            return x

    run = Stage([Through()]).forward((torch.ones(3), torch.ones(2)))
    grads = run.backward_input([torch.full((3,), 7.0)])
    assert torch.equal(grads[0], torch.full((3,), 7.0)) and grads[1] is None


def test_a_loss_needs_no_gradient_and_a_missing_one_is_dropped():
    layer = nn.Linear(4, 2).double()
    x = random_batches(2, 3, 4)[0]
    run = Stage([layer]).forward(x, then=lambda y: y.square().mean())
    run.backward_input()
    run.backward_weight()
    want = torch.autograd.grad(layer(x).square().mean(), layer.weight)[0]
    assert close(layer.weight.grad, want)
    run = Stage([layer]).forward(x)
    assert run.backward_full([None]) == [None]


def test_only_what_the_next_op_needs_stays_alive():
    kept = {}

    class Watch(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            up = self.up(x)
            act = up.exp()
            kept.update(up=weakref.ref(up), act=weakref.ref(act))
            kept["act_storage"] = act.untyped_storage().data_ptr()
            return self.down(act).exp()

    stage = Stage([Watch()])
    gc.collect()
    gc.disable()  # memory must go by reference count, not when a collection happens by
    try:
        run = stage.forward(torch.randn(4, 8))
        out = weakref.ref(run.outputs)
        run.backward_input(run.outputs.clone())
        assert out() is None and kept["up"]() is None
        operands = run._queue.tensors()
        assert len(operands) == 4 and run.weight_bytes() == 4 * (4 * 8 + 4 * 16) * 2
        assert kept["act_storage"] in {t.untyped_storage().data_ptr() for t in operands}
        refs = [weakref.ref(t) for t in operands]
        del operands
        run.backward_weight()
        assert len(run._queue) == 0 and not any(r() is not None for r in refs)
    finally:
        gc.enable()


def test_recompute_holds_only_the_inputs_between_F_and_R():
    seen = []
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    layer[0].register_forward_hook(lambda m, i, o: seen.append(weakref.ref(o)))
    run = Stage([layer]).forward(torch.randn(4, 8), recompute=True)
    assert seen[0]() is None and run._edges is None
    run.recompute()
    run.backward_full(torch.ones(4, 8))


def test_held_bytes_counts_shared_storage_once_and_no_parameters():
    layer = nn.Linear(8, 16)
    held = held_bytes(Stage([layer, nn.ReLU()]), torch.randn(4, 8))
    assert held.until_input == 4 * (4 * 8 + 4 * 16)
    assert held.until_weight == 4 * (4 * 8 + 4 * 16)
    assert layer.weight.grad is None


def test_ops_out_of_order_are_named():
    stage = Stage([nn.Linear(2, 2)])
    run = stage.forward(torch.ones(1, 2))
    with pytest.raises(OctoPipeError, match="W before I"):
        run.backward_weight()
    with pytest.raises(OctoPipeError, match="kept its graph"):
        run.recompute()
    with pytest.raises(OctoPipeError, match="scalar loss"):
        run.backward_input()
    run.backward_full(torch.ones(1, 2))
    with pytest.raises(OctoPipeError, match="only once"):
        run.backward_full(torch.ones(1, 2))


def test_values_flatten_and_rebuild():
    value = {"a": 1, "b": (2, [3, {"c": 4}])}
    leaves = []
    flatten(value, leaves)
    assert leaves == [1, 2, 3, 4] and rebuild(value, iter(leaves)) == value
