"""The split backward against plain autograd, in float64, for every way a weight is met."""

import pytest
from effort import some

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from split_backward import (  # noqa: E402
    TOLERANCE,
    check_split,
    close,
    count_deferred,
    parameters_of,
    plain_gradients,
    random_batches,
    split_gradients,
)
from torch import nn  # noqa: E402
from torch.overrides import _get_current_function_mode_stack  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from octopipe.runtime.stages.rng import rng_kept  # noqa: E402
from octopipe.runtime.stages.stage import Stage  # noqa: E402
from octopipe.runtime.stages.wgrad import SplitMode, WeightQueue  # noqa: E402
from octopipe.runtime.stages.wgrad_ops import in_rows, times  # noqa: E402


class Raw(nn.Module):
    """A parameter of `shape` and any expression of it."""

    def __init__(self, shape, expression):
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(2)) / 3)
        self.b = nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(3)))
        self.expression = expression

    def forward(self, x):
        return self.expression(x, self.w, self.b)


class Scaled(torch.autograd.Function):
    """A view with a gradient rule of its own: it must not be taken for a plain view."""

    @staticmethod
    def forward(ctx, w):
        return w.view_as(w)

    @staticmethod
    def backward(ctx, g):
        return 3 * g


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_split_exactly(bias):
    torch.manual_seed(0)
    mlp = [nn.Linear(4, 8, bias=bias), nn.GELU(), nn.Linear(8, 4, bias=bias), nn.LayerNorm(4)]
    check_split(mlp, random_batches(2, 3, 4), deferred=2)


WEIGHT_USES = {
    "matmul": ((4, 5), lambda x, w, b: x @ w, 1),
    "matmul of a transpose": ((5, 4), lambda x, w, b: x @ w.t(), 1),
    "torch.matmul, mT": ((5, 4), lambda x, w, b: torch.matmul(x, w.mT), 1),
    "weight on the left": ((5, 3), lambda x, w, b: w @ x[0], 1),
    "mm": ((4, 5), lambda x, w, b: torch.mm(x.view(-1, 4), w), 1),
    "vector": ((4, 5), lambda x, w, b: x[0, 0] @ w, 1),
    "addmm": ((4, 5), lambda x, w, b: torch.addmm(b, x.view(-1, 4), w), 1),
    "addmm, scaled (left alone)": ((4, 5), lambda x, w, b: torch.addmm(b, x.view(-1, 4), w, alpha=2), 0),
    "bmm": ((2, 4, 5), lambda x, w, b: torch.bmm(x, w), 1),
    "bmm, weight on the left": ((2, 5, 3), lambda x, w, b: torch.bmm(w, x), 1),
    "bmm of a transpose": ((2, 5, 4), lambda x, w, b: x @ w.transpose(1, 2), 1),
    "baddbmm": ((2, 4, 5), lambda x, w, b: torch.baddbmm(b, x, w), 1),
    "broadcast batch (left alone)": ((2, 4, 5), lambda x, w, b: x[None] @ w, 0),
    "slices": ((8, 4), lambda x, w, b: F.linear(x, w[:5]) * F.linear(x, w[3:]), 2),
    "column slice": ((5, 9), lambda x, w, b: F.linear(x, w[:, 2:6]), 1),
    "select": ((3, 5, 4), lambda x, w, b: F.linear(x, w[2], b) + F.linear(x, w[0]), 2),
    "chunk": ((10, 4), lambda x, w, b: F.linear(x, w.chunk(2)[1]), 1),
    "view": ((20,), lambda x, w, b: F.linear(x, w.view(5, 4)), 1),
    "cast": ((5, 4), lambda x, w, b: F.linear(x.float(), w.to(torch.float32).mT.mT), 1),
    "expanded (left alone)": ((1, 4), lambda x, w, b: F.linear(x, w.expand(5, 4)), 0),
    "computed (left alone)": ((5, 4), lambda x, w, b: F.linear(x, w * 2), 0),
    "own gradient rule (left alone)": ((5, 4), lambda x, w, b: F.linear(x, Scaled.apply(w)), 0),
    "two weights (left alone)": ((4, 4), lambda x, w, b: x * (w @ w).sum(), 0),
    "detached": ((5, 4), lambda x, w, b: F.linear(x, w.detach()) + b, 0),
    "used twice": ((4, 4), lambda x, w, b: F.linear(F.linear(x, w).relu(), w), 2),
    "split and ordinary use": ((5, 4), lambda x, w, b: F.linear(x, w) * w.sum(), 1),
    "keyword arguments": ((5, 4), lambda x, w, b: F.linear(input=x, weight=w, bias=b), 1),
    "no columns": ((5, 4), lambda x, w, b: F.linear(x[..., :0], w[:, :0]) + F.linear(x, w), 2),
    "no rows": ((5, 4), lambda x, w, b: F.linear(x[:0], w).sum() + F.linear(x, w), 2),
    "einsum (left alone)": ((5, 4), lambda x, w, b: torch.einsum("btk,nk->btn", x, w), 0),
}


@pytest.mark.parametrize("name", WEIGHT_USES)
def test_any_use_of_a_weight_gives_autograds_gradient(name):
    shape, expression, deferred = WEIGHT_USES[name]
    tolerant = 1e-5 if name == "cast" else TOLERANCE
    module, batches = Raw(shape, expression).double(), random_batches(2, 3, 4)
    want, want_inputs = plain_gradients([module], batches)
    for ops in ("B", "IW", "RIW"):
        got, got_inputs = split_gradients([module], batches, ops)
        assert all(close(a, b, tolerant) for a, b in zip(got + got_inputs, want + want_inputs, strict=True))
        assert all(p.grad is None or p.grad.dtype == p.dtype for p in module.parameters())
    assert count_deferred([module], batches[0]) == deferred


def test_views_of_a_weight_that_is_a_slice_of_a_larger_tensor_are_left_to_autograd():
    """Its elements have gaps between them, and those of its gradient have none."""
    module = Raw((5, 4), lambda x, w, b: F.linear(x, w[:2]).sum() + F.linear(x, w))
    module.w = nn.Parameter(torch.randn(5, 8, dtype=torch.float64)[:, ::2])
    check_split([module], random_batches(2, 3, 4), deferred=1)


class NoGradient(torch.autograd.Function):
    """Says that its input takes no gradient, which is not a gradient of zeros."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return None


USED_BEHIND = {
    "linear": ((4, 4), lambda x, w, b: F.linear(x, w)),
    "bmm": ((2, 4, 4), lambda x, w, b: torch.bmm(x, w)),
    "embedding": ((4, 4), lambda x, w, b: F.embedding(torch.tensor([[0, 1, 1]]), w)),
}


@pytest.mark.parametrize("name", USED_BEHIND)
def test_a_weight_behind_a_gradient_that_does_not_exist_has_none_instead_of_zeros(name):
    shape, use = USED_BEHIND[name]
    one = Raw(shape, lambda x, w, b: NoGradient.apply(use(x, w, b)) + b[:4]).double()
    check_split([nn.Linear(4, 4), one], random_batches(2, 3, 4))
    assert one.w.grad is None and one.b.grad is not None


def test_a_transposed_view_of_a_weight_gets_a_gradient_of_the_weights_own_strides():
    module = Raw((4, 5), lambda x, w, b: x @ w).double()
    split_gradients([module], random_batches(2, 3, 4), "IW")
    assert module.w.grad.stride() == module.w.stride()


def test_modules_that_share_a_parameter_add_their_gradients():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    check_split([a, nn.Tanh(), b], random_batches(2, 3, 4), deferred=2)


def test_tied_embedding_and_head_in_one_stage():
    table, head = nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    ids = [torch.tensor([[1, 2, 2], [6, 0, 1]]), torch.tensor([[3, 3, 3], [1, 5, 2]])]
    check_split([table, nn.Tanh(), head], ids, deferred=2)


def test_a_stage_of_frozen_layers_runs_without_the_mode():
    modes = []

    class Look(nn.Linear):
        def forward(self, x):
            modes.append(len(_get_current_function_mode_stack()))
            return super().forward(x)

    live, frozen = Look(3, 3), Look(3, 3).requires_grad_(False)
    for layer in (live, frozen):
        run = Stage([layer]).forward(torch.ones(2, 3))
        (grad,) = run.backward_input(torch.ones(2, 3))
        run.backward_weight()
        torch.testing.assert_close(grad, torch.ones(2, 3) @ layer.weight.detach())
    assert modes == [1, 0] and live.weight.grad is not None and frozen.weight.grad is None


def test_frozen_weights_stay_without_gradient():
    frozen, live = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    frozen.weight.requires_grad_(False)
    check_split([frozen, live], random_batches(2, 3, 4), deferred=1)
    assert frozen.weight.grad is None and frozen.bias.grad is not None


class MlpWith(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.drop, self.wrap = nn.Dropout(0.5), wrap

    def inner(self, x):
        return x + self.down(self.drop(F.silu(self.up(self.norm(x)))))

    def forward(self, x):
        return self.wrap(self.inner, x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_split_without_a_second_recompute(reentrant):
    calls = []

    def wrap(inner, x):
        def counted(x):
            calls.append(1)
            return inner(x)

        return checkpoint(counted, x, use_reentrant=reentrant)

    layer = MlpWith(wrap)
    check_split([layer], random_batches(2, 3, 4))
    calls.clear()
    run = Stage([layer]).forward(random_batches(2, 3, 4)[0])
    run.backward_input(torch.ones_like(run.outputs))
    assert len(run._queue) == 2
    run.backward_weight()
    assert len(calls) == 2


def test_recompute_draws_the_same_dropout_and_leaves_the_generator_alone():
    layer = MlpWith(lambda inner, x: inner(x)).double()
    check_split([layer], random_batches(2, 3, 4), deferred=2)
    run = Stage([layer]).forward(random_batches(2, 3, 4)[0], recompute=True)
    before = torch.get_rng_state()
    run.recompute()
    assert torch.equal(before, torch.get_rng_state())


def test_a_seed_makes_dropout_depend_on_layer_and_seed_alone():
    layers = [nn.Dropout(0.5), nn.Dropout(0.5)]
    x = torch.ones(64)
    whole = Stage(layers).forward(x, seed=5).outputs
    torch.manual_seed(99)
    before = torch.get_rng_state()
    with rng_kept():
        first = Stage(layers[:1]).forward(x, seed=5).outputs
        second = Stage(layers[1:], first_layer=1).forward(first, seed=5).outputs
        assert torch.equal(whole, second)
        assert not torch.equal(whole, Stage(layers).forward(x, seed=6).outputs)
    assert torch.equal(before, torch.get_rng_state())


def test_the_first_stage_does_its_chain_in_I_and_only_gemms_in_W():
    layers = [m.double() for m in (nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))]
    stage = Stage(layers, input_grad=False)
    run = stage.forward(random_batches(2, 3, 4)[0])
    assert run.backward_input(torch.ones_like(run.outputs)) == [None]
    assert layers[1].weight.grad is not None and layers[0].bias.grad is not None
    assert layers[0].weight.grad is None and len(run._queue) == 2
    run.backward_weight()
    got = [p.grad.clone() for p in parameters_of(layers)]
    want = torch.autograd.grad(nn.Sequential(*layers)(random_batches(2, 3, 4)[0]).sum(), parameters_of(layers))
    assert all(close(a, b) for a, b in zip(got, want, strict=True))


def test_I_and_W_give_bitwise_what_B_gives_in_float32():
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)]
    batches = [b.float() for b in random_batches(4, 8, 32)]
    fused, fused_inputs = split_gradients(layers, batches, "B")
    for ops in ("IW", "RIW"):
        parts, part_inputs = split_gradients(layers, batches, ops)
        assert all(torch.equal(a, b) for a, b in zip(fused + fused_inputs, parts + part_inputs))


def test_autocast_casts_each_weight_once_and_keeps_the_gradients_dtype():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)]
    batches = [b.float() for b in random_batches(2, 3, 16)]
    with torch.autocast("cpu", torch.bfloat16):
        want, want_inputs = plain_gradients(layers, batches)
    for ops in ("B", "IW", "RIW"):
        stage = Stage(layers)
        for p in parameters_of(layers):
            p.grad = None
        got_inputs = []
        for x in batches:
            with torch.autocast("cpu", torch.bfloat16):
                run = stage.forward(x, recompute="R" in ops)
            y = run.outputs
            if "R" in ops:
                with torch.autocast("cpu", torch.bfloat16):
                    run.recompute()
            assert y.dtype is torch.bfloat16
            got_inputs += run.backward_full(2 * y) if ops == "B" else run.backward_input(2 * y)
            run.backward_weight()
        got = [p.grad for p in parameters_of(layers)]
        assert all(g.dtype is torch.float32 for g in got)
        assert all(close(a, b, 2e-2) for a, b in zip(got + got_inputs, want + want_inputs))
        assert len(stage.mode._casts) == 2
        stage.end_step()
        assert not stage.mode._casts


def test_bf16_parameters_get_bf16_gradients():
    layers = [nn.Linear(8, 8).bfloat16()]
    got, _ = split_gradients(layers, [b.bfloat16() for b in random_batches(2, 3, 8)], "IW")
    want, _ = plain_gradients(layers, [b.bfloat16() for b in random_batches(2, 3, 8)])
    assert all(g.dtype is torch.bfloat16 and close(g, w, 0.05) for g, w in zip(got, want))


@pytest.mark.parametrize("transposed", [True, False])
def test_grouped_matmul_defers_its_expert_weights(transposed):
    offs = torch.tensor([3, 3, 8], dtype=torch.int32)
    shape = (3, 8, 16) if transposed else (3, 16, 8)

    def grouped(x, w, b):
        return torch._grouped_mm(x, w.transpose(1, 2) if transposed else w, offs=offs)

    module = Raw(shape, grouped)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))

    def reference(x, w, b):
        w = w.transpose(1, 2) if transposed else w
        return torch.cat([x[:3] @ w[0], x[3:8] @ w[2]])

    want, want_inputs = plain_gradients([Raw(shape, reference)], [x, x])
    for ops in ("B", "IW", "RIW"):
        got, got_inputs = split_gradients([module], [x, x], ops)
        assert close(got[0], want[0], 1e-5) and close(got_inputs[0], want_inputs[0], 1e-5)
    assert count_deferred([module], x) == 1


@pytest.mark.parametrize("backend", some(["aot_eager", "eager"]))
def test_compiled_layers_are_right_beside_split_ones(backend):
    torch._dynamo.reset()
    plain = [nn.Linear(4, 4).double(), MlpWith(lambda inner, x: inner(x)).double().eval()]
    compiled = [plain[0], torch.compile(plain[1], backend=backend, fullgraph=True)]
    want, want_inputs = plain_gradients(plain, random_batches(2, 3, 4))
    for ops in ("B", "IW", "RIW"):
        got, got_inputs = split_gradients(compiled, random_batches(2, 3, 4), ops)
        assert all(close(a, b) for a, b in zip(got + got_inputs, want + want_inputs, strict=True))
    if backend == "aot_eager":  # the eager backend replays torch calls, which are split like any other
        assert count_deferred(compiled, random_batches(2, 3, 4)[0]) == 1


def test_a_parameter_with_a_gradient_hook_is_left_to_autograd():
    layer = nn.Linear(4, 4).double()
    seen = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    assert count_deferred([layer], random_batches(2, 3, 4)[0]) == 0 and len(seen) == 1


def test_multihead_attention_and_vmap_fall_back_to_autograd():
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.linear = attention, nn.Linear(4, 4).double()

        def forward(self, x):
            x = self.attention(x, x, x, need_weights=False)[0]
            return torch.vmap(self.linear)(x)

    check_split([Wrapped()], random_batches(2, 3, 4))


def test_outside_a_stage_nothing_is_intercepted():
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    layer.weight.grad, queue = None, WeightQueue()
    queue.defer = True
    with SplitMode(layer.parameters(), queue):
        layer(x).sum().backward()
        assert layer.weight.grad is None and len(queue) == 1
        with torch.no_grad():
            assert layer(x).grad_fn is None


def test_a_linear_sees_the_gradient_that_hooks_on_its_output_leave():
    layer, queue = nn.Linear(2, 2), WeightQueue()
    x = torch.ones(1, 2, requires_grad=True)
    with SplitMode(layer.parameters(), queue):
        y = layer(x)
        y.register_hook(lambda g: 3 * g)
        y.sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((2, 2), 3.0))


def test_an_input_changed_in_place_behind_a_linear_is_an_error():
    layer, queue = nn.Linear(2, 2), WeightQueue()
    with SplitMode(layer.parameters(), queue):
        x = torch.ones(1, 2, requires_grad=True) * 1
        y = layer(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="in place"):
            y.sum().backward()


def test_an_output_changed_in_place_behind_a_linear_is_not():
    torch.manual_seed(0)
    layer, queue = nn.Linear(2, 2), WeightQueue()
    x = torch.randn(3, 2, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x).mul_(2).relu_().sum(), layer.weight)
    with SplitMode(layer.parameters(), queue):
        layer(x).mul_(2).relu_().sum().backward()
    assert torch.allclose(layer.weight.grad, want)


class Products(TorchDispatchMode):
    """Counts matrix products by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 6, 4), (6, 1, 4), (2, 3, 4)])
def test_rows_that_were_transposed_are_one_product_not_one_per_row(shape, bias, autocast):
    class Transposing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=bias)

        def forward(self, x):
            return self.inner(x.transpose(0, 1)).transpose(0, 1)

    stage = Stage([Transposing()])
    x = torch.randn(shape)
    for _ in range(2):  # the first forward of a stage runs another way
        with Products() as seen, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            run = stage.forward(x)
        grad = torch.randn(shape).to(run.outputs.dtype)
        with seen:
            run.backward_input([grad])
            run.backward_weight()
        assert "bmm" not in seen.names and "baddbmm" not in seen.names
        assert {"mm", "addmm"} & set(seen.names)


def test_times_and_in_rows_keep_values():
    matrix = torch.randn(6, 5)
    for x in (torch.randn(2, 7, 6).transpose(0, 1), torch.randn(7, 6), torch.randn(3, 1, 6).expand(3, 4, 6)):
        assert torch.allclose(times(x, matrix), x @ matrix, atol=1e-6)
        assert torch.equal(in_rows(x), x)
    assert in_rows(torch.empty(0, 2, 3)).shape == (0, 2, 3)
