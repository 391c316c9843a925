"""Queued weight gradients one by one: the same numbers as plain autograd, and no product that nobody asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from effort import draws

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from octopipe.runtime.stages.wgrad_ops import (  # noqa: E402
    Batched,
    Embedding,
    Grouped,
    LeftOut,
    Linear,
    LinearHook,
    WeightQueue,
    WeightSite,
    _add_grouped,
    _add_rows,
    _is_transpose,
    add_distributed,
    add_product,
    in_rows,
    is_distributed,
    times,
)


class Calls(TorchDispatchMode):
    """Names of everything torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    def products(self) -> int:
        return sum(name in ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm") for name in self.names)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


def layout(view: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(view.shape), view.stride(), view.storage_offset()


def same(a: Tensor | None, b: Tensor | None, tolerance: float = 1e-12) -> None:
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# -- the queue ---------------------------------------------------------------------------------------------


def test_a_queue_defers_nothing_unless_told_and_runs_the_oldest_first() -> None:
    queue, ran = WeightQueue(), list[int]()
    assert not queue.defer and not queue.reruns and not queue.shut
    queue.add(ran.append, 0)
    assert ran == [0] and len(queue) == 0
    queue.defer = True
    for k in (1, 2, 3):
        queue.add(ran.append, k)
    assert ran == [0] and len(queue) == 3
    queue.run()
    queue.run()
    assert ran == [0, 1, 2, 3] and len(queue) == 0


def test_a_queue_holds_operands_not_parameters() -> None:
    queue, weight = WeightQueue(), nn.Parameter(drawn(4, 5))
    queue.defer = True
    a, b = drawn(3, 4), drawn(3, 5)
    queue.add(add_product, weight, None, a, b)
    held = queue.tensors()
    assert len(held) == 2 and held[0] is a and held[1] is b


# -- adding into .grad -------------------------------------------------------------------------------------


def test_a_transpose_is_the_whole_parameter_with_its_last_two_dimensions_swapped() -> None:
    w, cube, flat = drawn(4, 5), drawn(2, 4, 5), drawn(20)
    assert _is_transpose(w, layout(w.mT)) and _is_transpose(cube, layout(cube.mT))
    assert _is_transpose(drawn(4, 4), ((4, 4), (1, 4), 0))
    assert not _is_transpose(w, None)
    assert not _is_transpose(drawn(4, 4), ((4, 4), (4, 1), 0))
    assert not _is_transpose(w, ((5, 4), (1, 5), 1))  # it begins elsewhere
    assert not _is_transpose(w, ((3, 4), (1, 5), 0))  # some of its rows
    assert not _is_transpose(w, ((5, 4), (4, 1), 0))  # the same shape, read otherwise
    assert not _is_transpose(cube, ((5, 4), (1, 5), 0)) and not _is_transpose(flat, ((5, 4), (4, 1), 0))


VIEWS: dict[str, tuple[tuple[int, ...], Any]] = {
    "whole": ((6, 5), None),
    "transposed": ((5, 6), lambda w: w.mT),
    "rows": ((9, 5), lambda w: w[2:8]),
    "columns": ((6, 9), lambda w: w[:, 3:8]),
    "a transposed slice": ((5, 9), lambda w: w[:, 1:7].mT),
    "one of several": ((3, 6, 5), lambda w: w[1]),
    "read as a matrix": ((30,), lambda w: w.view(6, 5)),
    "batches": ((2, 6, 5), None),
    "transposed batches": ((2, 5, 6), lambda w: w.mT),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("before", ["none", "same strides", "other strides", "part of a buffer", "sparse"])
def test_a_product_is_added_where_the_view_lies(name: str, before: str) -> None:
    shape, view = VIEWS[name]
    w = nn.Parameter(drawn(*shape))
    start = drawn(*shape, seed=5)
    if before == "sparse" and len(shape) != 2:
        return
    if before == "other strides":
        w.grad = start.clone().transpose(0, -1).contiguous().transpose(0, -1)
    elif before == "part of a buffer":
        buffer = torch.zeros(start.numel() + 11, dtype=start.dtype)
        buffer[7 : 7 + start.numel()] = start.reshape(-1)
        w.grad = buffer[7 : 7 + start.numel()].view(shape)
    elif before == "sparse":
        w.grad = start.to_sparse()
    elif before == "same strides":
        w.grad = start.clone()
    batched = name.endswith("batches")
    a, b = (drawn(2, 7, 6), drawn(2, 7, 5)) if batched else (drawn(3, 7, 6), drawn(3, 7, 5))
    want = torch.zeros_like(start) if before == "none" else start.clone()
    product = a.mT @ b if batched else a.reshape(-1, 6).mT @ b.reshape(-1, 5)
    (want if view is None else view(want)).add_(product)
    add_product(w, None if view is None else layout(view(w.detach())), a, b)
    same(w.grad, want)
    if before == "part of a buffer":
        assert float(buffer[:7].abs().sum() + buffer[-4:].abs().sum()) == 0.0


@pytest.mark.parametrize("name", ["whole", "transposed", "batches"])
def test_the_first_gradient_is_the_product_itself_and_later_ones_are_fused_into_it(name: str) -> None:
    shape, view = VIEWS[name]
    w = nn.Parameter(drawn(*shape))
    where = None if view is None else layout(view(w.detach()))
    a, b = (drawn(2, 7, 6), drawn(2, 7, 5)) if name == "batches" else (drawn(7, 6), drawn(7, 5))
    with Calls() as first, torch.no_grad():
        add_product(w, where, a, b)
    assert "zeros_like" not in first.names and first.products() == 1
    with Calls() as second, torch.no_grad():
        add_product(w, where, a, b)
    assert {"addmm_", "baddbmm_"} & set(second.names) and not {"mm", "bmm", "add_"} & set(second.names)


def test_operands_of_another_precision_are_added_in_the_parameters_own() -> None:
    w = nn.Parameter(drawn(6, 5, dtype=torch.float32))
    a, b = drawn(7, 6).bfloat16(), drawn(7, 5).bfloat16()
    for _ in range(2):
        add_product(w, None, a, b)
    assert w.grad is not None and w.grad.dtype is torch.float32
    same(w.grad, 2 * (a.float().mT @ b.float()), 3e-2)


def test_a_distributed_tensor_is_one_with_a_mesh() -> None:
    class Marked(Tensor):
        pass

    class Placed:
        device_mesh = None

    assert is_distributed(Placed())
    assert not is_distributed(torch.ones(2)) and not is_distributed(nn.Parameter(torch.ones(2)))
    assert not is_distributed(torch.ones(2).as_subclass(Marked)) and not is_distributed(None)


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import DeviceMesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


def test_gradients_of_distributed_tensors_are_placed_as_their_parameter(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    g, x = drawn(2, 3, 6), drawn(2, 3, 5)
    want = g.reshape(-1, 6).mT @ x.reshape(-1, 5)
    for placement in (Replicate(), Shard(0)):
        w = nn.Parameter(distribute_tensor(drawn(6, 5), mesh, [placement]))
        # Rows that lie on different ranks: the product is a sum over them.
        operands = [distribute_tensor(t, mesh, [Shard(0)]) for t in (g, x)]
        for times_ in (1, 2):
            add_distributed(w, None, *operands)
            assert w.grad.placements == w.placements
            same(w.grad.full_tensor(), times_ * want)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_gradients_are_products_of_their_own_rows(transposed: bool) -> None:
    w = nn.Parameter(drawn(3, 16, 8, dtype=torch.float32) if transposed else drawn(3, 8, 16, dtype=torch.float32))
    x, g = drawn(12, 8, dtype=torch.float32), drawn(12, 16, dtype=torch.float32)
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)
    want = torch.stack([x[:4].mT @ g[:4], torch.zeros(8, 16), x[4:].mT @ g[4:]])
    want = want.mT if transposed else want
    where = layout(w.detach().mT) if transposed else None
    with Calls() as seen, torch.no_grad():
        _add_grouped(w, where, x, g, ends)
    assert "zeros_like" not in seen.names
    same(w.grad, want, 1e-5)
    _add_grouped(w, where, x, g, ends)
    same(w.grad, 2 * want, 1e-5)


def test_rows_of_an_embedding_are_counted_as_often_as_they_are_used() -> None:
    w, ids, g = nn.Parameter(drawn(7, 4)), torch.tensor([[1, 2, 2], [6, 0, 2]]), drawn(2, 3, 4)
    want = torch.zeros(7, 4, dtype=torch.float64)
    for row, column in itertools.product(range(2), range(3)):
        if ids[row, column] != 0:
            want[ids[row, column]] += g[row, column]
    _add_rows(w, ids, g, 0)
    same(w.grad, want)
    _add_rows(w, ids, g, 0)
    same(w.grad, 2 * want)


# -- the functions -----------------------------------------------------------------------------------------


def backward(function: Any, arguments: tuple[Any, ...], inputs: list[Tensor], *, shut: bool, queue: WeightQueue) -> Any:
    queue.shut = shut
    out = function.apply(*arguments)
    g = drawn(*out.shape, seed=9, dtype=out.dtype)
    return out, g, torch.autograd.grad(out, inputs, g, allow_unused=True)


@pytest.mark.parametrize("shut", [False, True])
@pytest.mark.parametrize("bias_shape", [None, (5,), (1, 5)])
@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("rows", [(7,), (2, 3)])
def test_a_linear_gives_torchs_gradients_and_no_more_products_than_wanted(
    shut: bool, bias_shape: tuple[int, ...] | None, needs: bool, rows: tuple[int, ...]
) -> None:
    if bias_shape == (1, 5) and len(rows) > 1:
        return
    x, w = drawn(*rows, 6).requires_grad_(needs), nn.Parameter(drawn(5, 6))
    bias = None if bias_shape is None else nn.Parameter(drawn(*bias_shape))
    queue = WeightQueue()
    inputs = [t for t in (x, w, bias) if t is not None and t.requires_grad]
    with Calls() as seen:
        out, g, found = backward(Linear, (x, w, bias, WeightSite(queue, w, None), None), inputs, shut=shut, queue=queue)
    plain = x @ w.mT + (0 if bias is None else bias)
    same(out, plain)
    want = torch.autograd.grad(plain, inputs, g)
    for t, a, b in zip(inputs, found, want, strict=True):
        if t is w and not shut:
            assert a is None
            same(w.grad, b)
        else:
            same(a, b)
    assert seen.products() == (3 if needs else 2)


def test_a_linear_with_a_cast_weight_computes_with_it_and_adds_to_the_weights_own() -> None:
    x = drawn(2, 3, 6).bfloat16().requires_grad_()
    w, bias = nn.Parameter(drawn(5, 6, dtype=torch.float32)), nn.Parameter(drawn(5, dtype=torch.float32))
    other, queue = (w.detach() * 3).bfloat16(), WeightQueue()  # not the weight's own numbers, to tell them apart
    out = Linear.apply(x, w, bias, WeightSite(queue, w, None), other)
    assert out.dtype is torch.bfloat16
    same(out.float(), F.linear(x.float(), other.float(), bias), 6e-2)
    out.backward(torch.ones_like(out))
    same(x.grad.float(), torch.ones(2, 3, 5) @ other.float(), 6e-2)
    assert w.grad is not None and w.grad.dtype is torch.float32
    same(w.grad, torch.ones(6, 5).mT @ x.detach().reshape(-1, 6).float(), 6e-2)


def test_a_linear_left_out_is_zeros_with_the_gradients_of_the_product() -> None:
    x, w, queue = drawn(2, 3, 6).requires_grad_(), nn.Parameter(drawn(5, 6)), WeightQueue()
    for bias in (None, nn.Parameter(drawn(5))):
        w.grad = x.grad = None
        out = LeftOut.apply(x, w, bias, WeightSite(queue, w, None), None)
        assert out.shape == (2, 3, 5) and not out.any()
        g = drawn(2, 3, 5, seed=3)
        out.backward(g)
        same(x.grad, g @ w.detach())
        same(w.grad, g.reshape(-1, 5).mT @ x.detach().reshape(-1, 6))
        if bias is not None:
            same(bias.grad, g.sum((0, 1)))


@pytest.mark.parametrize("shut", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("needs", [True, False])
def test_a_product_with_a_weight_gives_torchs_gradients(
    shut: bool, left: bool, batch: tuple[int, ...], with_bias: bool, needs: bool
) -> None:
    a, b = drawn(*batch, 4, 6), drawn(*batch, 6, 5)
    weight, other = (a, b) if left else (b, a)
    weight = nn.Parameter(weight)
    other = other.requires_grad_(needs)
    a, b = (weight, other) if left else (other, weight)
    bias = nn.Parameter(drawn(5)) if with_bias else None
    queue = WeightQueue()
    inputs = [t for t in (weight, other, bias) if t is not None and t.requires_grad]
    with Calls() as seen:
        out, g, found = backward(
            Batched, (a, b, bias, WeightSite(queue, weight, None), left, None), inputs, shut=shut, queue=queue
        )
    plain = a @ b + (0 if bias is None else bias)
    same(out, plain)
    want = torch.autograd.grad(plain, inputs, g)
    same(weight.grad if not shut else found[0], want[0])
    assert shut or found[0] is None
    for x, y in zip(found[1:], want[1:], strict=True):
        same(x, y)
    assert seen.products() == (3 if needs else 2)


@pytest.mark.parametrize("left", [False, True])
def test_a_product_with_a_cast_weight_computes_with_it(left: bool) -> None:
    a, b = drawn(4, 6).requires_grad_(), drawn(6, 5).requires_grad_()
    weight, x = (a, b) if left else (b, a)
    computed, queue = (weight.detach() * 3), WeightQueue()
    out = Batched.apply(a, b, None, WeightSite(queue, weight, None), left, computed)
    same(out, computed @ b if left else a @ computed)
    out.backward(torch.ones_like(out))
    g = torch.ones(4, 5, dtype=torch.float64)
    same(x.grad, computed.mT @ g if left else g @ computed.mT)
    same(weight.grad, g @ b.detach().mT if left else a.detach().mT @ g)


@pytest.mark.parametrize("shut", [False, True])
@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("gradient", ["rows", "columns", "broadcast"])
def test_a_grouped_product_gives_each_experts_gradient(shut: bool, needs: bool, gradient: str) -> None:
    x = drawn(12, 8, dtype=torch.float32).requires_grad_(needs)
    w, ends = nn.Parameter(drawn(3, 8, 16, dtype=torch.float32)), torch.tensor([4, 4, 12], dtype=torch.int32)
    queue = WeightQueue()
    queue.shut = shut
    out = Grouped.apply(x, w, ends, WeightSite(queue, w, None))
    g = drawn(12, 16, dtype=torch.float32)
    g = {"rows": g, "columns": g.mT.contiguous().mT, "broadcast": g[:1].expand(12, 16)}[gradient]
    inputs = [x, w] if needs else [w]
    with Calls() as seen:
        found = torch.autograd.grad(out, inputs, g, allow_unused=True)
    plain = torch.cat([x[:4] @ w[0], x[4:] @ w[2]])
    same(out, plain, 1e-5)
    want = torch.autograd.grad(plain, inputs, g.contiguous())
    same(found[-1] if shut else w.grad, want[-1], 1e-5)
    assert shut or found[-1] is None
    if needs:
        same(found[0], want[0], 1e-5)
    assert seen.products() == (2 if needs else 1)
    assert ("clone" in seen.names) is (gradient == "broadcast")


@pytest.mark.parametrize("shut", [False, True])
def test_an_embedding_gives_torchs_gradient(shut: bool) -> None:
    w, ids, queue = nn.Parameter(drawn(7, 4)), torch.tensor([[1, 2, 2], [6, 0, 2]]), WeightQueue()
    out, g, found = backward(Embedding, (ids, w, 0, WeightSite(queue, w, None)), [w], shut=shut, queue=queue)
    plain = F.embedding(ids, w, padding_idx=0)
    same(out, plain)
    (want,) = torch.autograd.grad(plain, [w], g)
    same(found[0] if shut else w.grad, want)
    assert shut or found[0] is None


def test_a_hook_queues_its_linears_gradient_once_and_only_for_the_input_it_saw() -> None:
    queue, w, x = WeightQueue(), nn.Parameter(drawn(5, 6)), drawn(3, 6)
    hook = LinearHook(WeightSite(queue, w, None), x)
    g = drawn(3, 5)
    hook((g,))
    same(w.grad, g.mT @ x)
    with pytest.raises(RuntimeError, match="a second time"):
        hook((g,))
    w.grad, hook = None, LinearHook(WeightSite(queue, w, None), x)
    hook((None,))
    assert w.grad is None
    hook = LinearHook(WeightSite(queue, w, None), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(3, 6\), was changed in place"):
        hook((g,))


# -- rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(draws(40)))
def test_rows_of_any_tensor_follow_each_other_and_are_copied_only_where_they_do_not(seed: int) -> None:
    lot = torch.Generator().manual_seed(seed)
    dims = 2 + seed % 4
    shape = [int(n) for n in torch.randint(1, 4, (dims,), generator=lot)]
    order = [int(k) for k in torch.randperm(dims, generator=lot)]
    x = drawn(*(2 * n if seed % 3 == 0 and k == 0 else n for k, n in enumerate(shape))).permute(order)
    x = x[..., :: 2 if seed % 5 == 0 else 1]
    rows = in_rows(x)
    assert torch.equal(rows, x)
    rows.view(-1, x.shape[-1])  # fails where that would need a copy
    in_place = all(x.stride(k) == x.shape[k + 1] * x.stride(k + 1) for k in range(dims - 2))
    assert (rows is x) is (in_place or dims < 3)
    matrix = drawn(x.shape[-1], 5)
    with Calls() as seen:
        product = times(x, matrix)
    same(product, torch.einsum("...k,kn->...n", x, matrix))
    assert dims < 3 or "bmm" not in seen.names


def test_nothing_has_no_rows_to_lay_out() -> None:
    for x in (torch.empty(2, 3, 0).transpose(0, 1), torch.empty(0, 2, 3), torch.ones(4)):
        assert in_rows(x) is x
