"""Linear layers in float8: the arithmetic against its definition, the split of backward, and losses near bfloat16's."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.cli import main  # noqa: E402
from octopipe.costs.mode import Mode, refuse_other_precision  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.models.spec import Attention, Embedding, Head, Mlp, ModelSpec, Moe  # noqa: E402
from octopipe.runtime import fp8  # noqa: E402
from octopipe.runtime.fp8 import (  # noqa: E402
    ScaledLinear,
    compute_in_float8,
    float8_copies,
    product,
    require_float8,
    rounded,
    scaled_linears,
)
from octopipe.runtime.nn import build_layers, cross_entropy  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.precision import MixedPrecisionOptimizer  # noqa: E402
from octopipe.runtime.stages.stage import Stage  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs torch 2.10")
needs_float8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < fp8.NEEDS, reason="needs a GPU with float8"
)
H, VOCAB = 64, 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def spec(layers: int = 2) -> ModelSpec:
    middle = [Attention(hidden=H, heads=2, kv_heads=2, head_dim=32), Mlp(hidden=H, ffn=128)] * layers
    return ModelSpec(name="small", layers=(Embedding(hidden=H, vocab=VOCAB), *middle, Head(hidden=H, vocab=VOCAB)))


def linear(bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    made = nn.Linear(H, 128, bias=bias, dtype=torch.bfloat16)
    assert compute_in_float8(made) == 1
    return made


def test_every_finite_float8_number_is_kept_and_the_largest_element_is_not_rounded() -> None:
    for dtype in (E4M3, E5M2):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        exact = codes[codes.isfinite()].bfloat16()
        values, scale = rounded(exact, dtype)
        assert float(scale) == 1.0 and torch.equal(values.float(), exact.float())
        for factor in (3.0e-5, 1.0, 7.1e8):
            x = torch.randn(1000, generator=torch.Generator().manual_seed(1)).mul(factor).bfloat16()
            values, scale = rounded(x, dtype)
            back = values.float() * scale
            assert float(back.abs().max()) == pytest.approx(float(x.abs().max()), rel=1e-6)
            # Half a step of the mantissa (3 or 2 bits), and the rounding to bfloat16 before it.
            step = 2.0 ** -(4 if dtype is E4M3 else 3) + 2.0**-8
            normal = x.float().abs() > float(x.abs().max()) * 2.0**-10
            assert bool(((back - x).abs() <= step * x.float().abs())[normal].all())


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    values, scale = rounded(torch.zeros(4, 16, dtype=torch.bfloat16), E4M3)
    assert not values.float().any() and float(scale) > 0
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    x[1, 2] = float("inf")
    values, scale = rounded(x, E4M3)
    assert not bool((values.float() * scale).isfinite().all())


def by_definition(x: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and weight gradient in float64, of the rounded operands where float8 is used."""

    def wide(t: Tensor, dtype: Any) -> Tensor:
        values, scale = rounded(t, dtype)
        return values.double() * scale.double()

    return (
        wide(x, E4M3) @ wide(weight, E4M3).t(),
        wide(g, E5M2) @ wide(weight, E4M3),
        g.double().t() @ x.double(),
    )


@pytest.mark.parametrize("deferred", [False, True])
def test_forward_input_gradient_and_weight_gradient_are_those_of_the_definition(deferred: bool) -> None:
    made = linear()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(24, H, generator=generator).bfloat16()
    g = torch.randn(24, 128, generator=generator).bfloat16() * 1e-3
    out, gx, gw = by_definition(x, made.weight.detach(), g)
    if deferred:
        run = Stage([made]).forward(x)
        found, gradient = run.outputs, run.backward_input([g])[0]
        assert made.weight.grad is None
        run.backward_weight()
    else:
        leaf = x.clone().requires_grad_()
        found = made(leaf)
        found.backward(g)
        gradient = leaf.grad
    for got, want in ((found, out), (gradient, gx), (made.weight.grad, gw)):
        assert got is not None and got.dtype is torch.bfloat16
        assert torch.allclose(got.double(), want, rtol=2.0**-7, atol=float(want.abs().max()) * 2.0**-9)


def test_a_bias_is_added_and_takes_its_gradient() -> None:
    made, plain = linear(bias=True), linear(bias=False)
    plain.load_state_dict({"weight": made.weight})
    x = torch.randn(2, 8, H).bfloat16()
    out = made(x)
    assert torch.equal(out, plain(x) + made.bias)
    out.sum().backward()
    assert made.bias is not None and torch.equal(made.bias.grad, torch.full((128,), 16.0, dtype=torch.bfloat16))


def test_an_output_may_be_changed_in_place() -> None:
    """Of three dimensions: as a view that a function made, torch would refuse that."""
    made = linear()
    x = torch.randn(2, 8, H).bfloat16().requires_grad_()
    twin = x.detach().clone().requires_grad_()
    made(x).mul_(2.0).relu_().sum().backward()
    torch.relu(made(twin) * 2.0).sum().backward()
    assert x.grad is not None and twin.grad is not None and torch.equal(x.grad, twin.grad)


def test_copies_follow_the_weight_at_their_addresses() -> None:
    made = linear()
    x = torch.randn(4, H).bfloat16()
    before = made(x)
    places = [t.data_ptr() for t in float8_copies([made])]
    with torch.no_grad():
        made.weight.mul_(-2.0)
    assert torch.equal(made(x), -2.0 * before)
    assert [t.data_ptr() for t in float8_copies([made])] == places
    made.weight.data = torch.zeros_like(made.weight)
    assert not made(x).any()
    rows, columns, _ = float8_copies([made])
    assert torch.equal(rows.float(), columns.float().t())


def test_an_input_that_changed_in_place_is_rounded_again_and_an_equal_one_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def counted(x: Tensor, dtype: Any) -> Any:
        calls.append(1)
        return rounded(x, dtype)

    one, two = linear(), linear(seed=1)
    one.scaled.follow(one.weight)  # type: ignore[union-attr]
    two.scaled.follow(two.weight)  # type: ignore[union-attr]
    monkeypatch.setattr(fp8, "rounded", counted)
    x = torch.randn(4, H).bfloat16()
    first = one(x)
    two(x)
    assert len(calls) == 1
    x.mul_(2.0)
    assert torch.equal(one(x), 2.0 * first)
    assert len(calls) == 2


def test_heads_routers_small_and_uneven_layers_stay_in_bfloat16() -> None:
    model = ModelSpec(
        name="experts",
        layers=(
            Embedding(hidden=H, vocab=VOCAB),
            Moe(hidden=H, ffn=64, experts=64, top_k=2, shared_ffn=64),
            Head(hidden=H, vocab=VOCAB),
        ),
    )
    moe = build_layers(model, dtype=torch.bfloat16)[1]()
    compute_in_float8(moe)
    assert {n for n, m in moe.named_modules() if isinstance(m, ScaledLinear)} == {"shared_up", "shared_down"}
    for sizes, dtype in (((H, 72), torch.bfloat16), ((H, 32), torch.bfloat16), ((H, H), torch.float32)):
        assert compute_in_float8(nn.Linear(*sizes, dtype=dtype)) == 0
    assert compute_in_float8(nn.ModuleDict({"gate": nn.Linear(H, H, dtype=torch.bfloat16)})) == 0


def test_the_head_of_a_transformers_model_stays_in_bfloat16_in_whichever_piece_it_is_held() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.words = (nn.Linear(H, H, dtype=torch.bfloat16) for _ in range(2))

        def get_output_embeddings(self) -> nn.Module:
            return self.words

    piece = nn.ModuleDict({"model": Model()})
    assert compute_in_float8(piece) == 1
    assert [n for n, m in piece.named_modules() if isinstance(m, ScaledLinear)] == ["model.inner"]


def test_state_names_and_copies_of_layers_are_those_of_the_linear_layer() -> None:
    made = linear(bias=True)
    assert sorted(made.state_dict()) == ["bias", "weight"]
    made(torch.ones(2, H, dtype=torch.bfloat16))
    twin = copy.deepcopy(made)
    assert not float8_copies([twin])
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    assert not twin(torch.ones(2, H, dtype=torch.bfloat16)).any()
    assert made(torch.ones(2, H, dtype=torch.bfloat16)).any()


def pipe_of(mode: str, system: str = "zb-h1", **more: Any) -> Pipeline:
    model = spec()
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    layers = [make() for make in build_layers(model, dtype=torch.float32)]
    layers = [module.to(dtype) for module in layers]
    if mode == "fp8":
        for module in layers[:-1]:
            compute_in_float8(module)
    plan = build_plan(system, CostTable.uniform(num_layers=model.num_layers), 1, 4)
    return Pipeline(layers, plan, cross_entropy, main_grads=mode != "fp32", seed=None, **more)


def data(step: int) -> tuple[Tensor, Tensor]:
    """Tokens of which each but the first of a row follows from the one before it."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCAB, (8, 1), generator=generator)
    tokens = (first + 5 * torch.arange(17)) % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def trained(mode: str, steps: int, **more: Any) -> list[float]:
    pipe = pipe_of(mode, **more)
    assert bool(list(scaled_linears(pipe.modules().values()))) == (mode == "fp8")
    optimizer = MixedPrecisionOptimizer(lambda p: torch.optim.AdamW(p, lr=2e-3), pipe)
    losses = []
    for step in range(steps):
        losses.append(float(pipe.step(*data(step))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("system", ["1f1b", "zb-h1"])
def test_a_pipeline_with_deferred_weight_gradients_has_the_gradients_of_one_device(system: str) -> None:
    pipe = pipe_of("fp8", system, verify=True)  # compares with plain autograd on the same layers
    assert len(list(scaled_linears(pipe.modules().values()))) == 8
    pipe.step(*data(0))
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in pipe.parameters())


def test_a_pipelines_copies_are_made_again_before_the_ops_of_a_step() -> None:
    """Replayed graphs read the copies and do not make them."""
    pipe = pipe_of("fp8")
    pipe.step(*data(0))
    (first, *_) = scaled_linears(pipe.modules().values())
    with torch.no_grad():
        first.weight.mul_(2.0)
    seen: list[float] = []
    begin = pipe.executor.ops.begin_step

    def look() -> None:
        seen.append(float(first.scaled.scale))  # type: ignore[arg-type]
        begin()

    before = float(first.scaled.scale)  # type: ignore[arg-type]
    pipe.executor.ops.begin_step = look  # type: ignore[method-assign]
    pipe.step(*data(1))
    assert seen == [2.0 * before]


@pytest.mark.slow
def test_two_hundred_steps_have_the_losses_of_float32() -> None:
    exact, narrow = (trained(mode, 200) for mode in ("fp32", "fp8"))
    ends = [sum(losses[-20:]) / 20 for losses in (exact, narrow)]
    assert ends[0] < 0.1 * exact[0]
    assert ends[1] == pytest.approx(ends[0], rel=0.02)
    # The whole way: the mean distance in parts of what float32 has gained.
    apart = sum(abs(a - b) for a, b in zip(narrow, exact)) / sum(exact[0] - loss for loss in exact)
    assert apart < 0.002


def test_a_cpu_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--scale", "0.02", "--layers", "4", "--seq", "16", "--precision", "fp8"]
    for verb in (["profile"], ["train", "--steps", "1"]):
        assert main([verb[0], "llama3-8b", *verb[1:], *small]) == 2
        words = capsys.readouterr().err.strip()
        assert "fp8 on a CPU" in words and "--precision bf16-main-fp32" in words and "\n" not in words


def test_an_older_gpu_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(OctoPipeError, match=r"A100 \(compute capability 8.0\)"):
        require_float8(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    require_float8(torch.device("cuda", 0))


def test_a_profile_of_another_precision_is_refused() -> None:
    with pytest.raises(OctoPipeError, match="was measured in bf16-main-fp32, and this run computes in fp8"):
        refuse_other_precision(Mode(precision="bf16-main-fp32"), "fp8", "the profile")
    assert Mode(precision="fp8").bytes_per_parameter(state_factor=2) == 20.0


def test_a_profile_counts_the_copies_of_weights_and_leaves_the_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from octopipe.runtime.measure import workload
    from octopipe.runtime.measure.one_layer import Layer, memory_of

    monkeypatch.setattr(workload, "refuse_on_cpu", lambda precision, device: None)
    work = workload.Workload(spec=spec(), tokens=8, precision="fp8")
    device = torch.device("cpu")
    made = [make() for make in work.layers(device)]  # type: ignore[operator]
    assert [len(list(scaled_linears([module]))) for module in made] == [0, 2, 2, 2, 2, 0]
    value = made[0](work.batch(device, 1)[0]).detach()
    layer = Layer(made[2], value, None, False, work.precision)
    weights = [m.weight.numel() for m in scaled_linears([made[2]])]
    plain = sum(p.nbytes for p in made[2].parameters())
    scales = 4 * len(weights)
    assert memory_of(layer, device).parameter_bytes == plain + 2 * sum(weights) + scales
    assert work.mode == Mode(precision="fp8")


@needs_float8
def test_the_products_of_a_gpu_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(48, 128, generator=generator).bfloat16()
    b = torch.randn(96, 128, generator=generator).bfloat16()
    for kind in (E4M3, E5M2):
        (x, xs), (w, ws) = rounded(a, kind), rounded(b, E4M3)
        want = (x.double() * xs.double()) @ (w.double() * ws.double()).t()
        here = [t.cuda() for t in (x, xs, w, ws)]
        for fast in (False, True):
            got = product(*here, torch.bfloat16, fast=fast).cpu().double()
            assert torch.allclose(got, want, rtol=2.0**-6, atol=float(want.abs().max()) * 2.0**-8)


@needs_float8
def test_graphs_in_float8_train_as_calls_do() -> None:
    found = []
    for graphs in (False, True):
        pipe = pipe_of("fp8", device="cuda", cuda_graphs=graphs)
        optimizer = MixedPrecisionOptimizer(lambda p: torch.optim.AdamW(p, lr=2e-3), pipe)
        losses = []
        for step in range(8):
            batch, target = data(step)
            losses.append(float(pipe.step(batch.cuda(), target.cuda())))
            optimizer.step()
            optimizer.zero_grad()
        assert (pipe.executor.ops.captured > 0) == graphs, getattr(pipe.executor.ops, "reasons", "")
        found.append(losses)
    assert found[0] == found[1]
