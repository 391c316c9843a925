"""Pipelines on device meshes: whatever the other dimensions do, the gradients are those of one process."""

from __future__ import annotations

import pytest
from effort import some
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
from executor_models import WIDTH, Block, make  # noqa: E402
from mesh_checks import TOLERANCE, mesh_of, norm_of, plan_for, whole_tensor, worst_error_of  # noqa: E402
from torch import nn  # noqa: E402
from twins import plain_gradients  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.search.recompute import recomputing  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

# -- dimensions that split the batch --------------------------------------------------------------------


def data_parallel(world, shape, names, options, plan):
    mesh = mesh_of(shape, names)
    case = make("plain", 2 * plan.num_micro_batches)
    expected, losses = plain_gradients(*case)
    count = plan.num_micro_batches
    with Pipeline(case.layers, plan, case.loss_fn, mesh=mesh, timeout_s=PATIENCE_S, **options) as pipe:
        mine = slice(pipe.world.replica * count, (pipe.world.replica + 1) * count)
        loss = float(pipe.step(case.inputs[mine], case.targets[mine]))
    return worst_error_of(pipe, expected), abs(loss - sum(losses) / len(losses))


@pytest.mark.parametrize(
    ("shape", "names", "options"),
    [
        ((2, 2), ("dp", "pp"), {}),
        ((2, 2), ("replicate", "pp"), {}),
        ((2, 2), ("pp", "whatever"), {"dp_dims": ("whatever",)}),
        ((2, 2), ("stages", "data"), {"pp_dim": "stages"}),
        ((1, 2, 2), ("dp_replicate", "dp_shard", "pp"), {}),
        ((2, 1, 2), ("a", "b", "pp"), {"dp_dims": ("a", "b")}),
    ],
)
def test_every_name_of_a_data_dimension_is_averaged_over(shape, names, options, four):
    for gradient, loss in four.run(data_parallel, shape, names, options, plan_for("1f1b")):
        assert gradient <= TOLERANCE
        assert loss <= TOLERANCE


def two_data_dimensions(world):
    """One rank a pipeline, four pipelines in two dimensions."""
    mesh = mesh_of((1, 2, 2), ("pp", "dp_replicate", "dp_shard"))
    plan = build_plan("1f1b", CostTable.uniform(num_layers=8), 1, 2)
    case = make("plain", 8)
    expected, losses = plain_gradients(*case)
    with Pipeline(case.layers, plan, case.loss_fn, mesh=mesh, timeout_s=PATIENCE_S) as pipe:
        mine = slice(pipe.world.replica * 2, pipe.world.replica * 2 + 2)
        loss = float(pipe.step(case.inputs[mine], case.targets[mine]))
        norm = float(pipe.clip_grad_norm_(1e9))
    return worst_error_of(pipe, expected), abs(loss - sum(losses) / 8), abs(norm / norm_of(expected) - 1)


def test_two_data_dimensions_are_averaged_over_together(four):
    assert max(max(errors) for errors in four.run(two_data_dimensions)) <= TOLERANCE


def leftover(world, names, options):
    case = make("plain", 4)
    try:
        Pipeline(case.layers, plan_for(), case.loss_fn, mesh=mesh_of((2, 2), names), timeout_s=PATIENCE_S, **options)
    except OctoPipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (("foo", "pp"), {}, "mesh dimension 'foo' of 2 ranks is left over"),
        (("dp", "pp"), {"dp_dims": ()}, "mesh dimension 'dp' of 2 ranks is left over"),
        (("tp", "pp"), {"model_dims": ()}, "mesh dimension 'tp' of 2 ranks is left over"),
        (("dp", "stage"), {}, "name one of them 'pp', or say which"),
        (("dp", "pp"), {"dp_dims": ("data",)}, "dp_dims names 'data'"),
        (("dp", "pp"), {"dp_dims": ("dp",), "model_dims": ("dp",)}, "it can be only one"),
        (("ep", "pp"), {}, "no parameter is sharded over the mesh dimension 'ep'"),
        (("dp", "pp"), {"sharded": {"ep": ["*"]}}, "sharded names the mesh dimension 'ep'"),
    ],
)
def test_a_dimension_that_is_neither_is_refused(names, options, words, four):
    for text in four.run(leftover, names, options):
        assert words in text


class Counts(nn.Module):
    """Buffers of several dtypes, one of them not saved."""

    def __init__(self, seed):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("mean", torch.full((3,), float(seed)))
        self.register_buffer("flags", torch.tensor([seed % 2 == 0, True]))
        self.register_buffer("steps", torch.tensor(seed), persistent=False)
        self.register_buffer("wave", torch.full((2,), complex(seed, 1)))

    def forward(self, x):
        return torch.tanh(self.linear(x))


def buffers(world):
    layers = [Counts(10 + world.rank) for _ in range(4)]
    plan = plan_for("chimera", num_layers=4)
    with Pipeline(
        layers, plan, lambda o, t: o.square().mean(), mesh=mesh_of((2, 2), ("dp", "pp")), timeout_s=PATIENCE_S
    ) as pipe:
        return {
            f"{k}.{name}": b.tolist() for k, m in pipe.modules().items() for name, b in m.named_buffers()
        }  # the global rank that held a layer first is 0 or 1


def test_buffers_that_differ_at_the_start_are_made_equal(four):
    results = four.run(buffers)
    for other in results[1:]:
        assert other == results[0]
    assert results[0]["0.mean"] in ([10.0] * 3, [11.0] * 3)


# -- FSDP2 ----------------------------------------------------------------------------------------------


def fully_sharded(world, plan, replicate):
    from torch.distributed.fsdp import fully_shard

    names = ("dp_shard", "pp")
    mesh = mesh_of((2, 2), names)
    case = make("plain", 2 * plan.num_micro_batches)
    expected, losses = plain_gradients(*case)
    for k, layer in enumerate(case.layers):
        if not (replicate and k % 2):  # the others are averaged by the pipeline
            fully_shard(layer, mesh=mesh["dp_shard"])
    count = plan.num_micro_batches
    with Pipeline(case.layers, plan, case.loss_fn, mesh=mesh, timeout_s=PATIENCE_S) as pipe:
        mine = slice(pipe.world.replica * count, (pipe.world.replica + 1) * count)
        loss = float(pipe.step(case.inputs[mine], case.targets[mine]))
        worst = worst_error_of(pipe, expected)
        norm = float(pipe.clip_grad_norm_(1e9))
    return worst, abs(loss - sum(losses) / len(losses)), abs(norm / norm_of(expected) - 1)


@pytest.mark.parametrize("replicate", some([True, False]))
@pytest.mark.parametrize("name", some(["zb-h1", "1f1b"]))
def test_fsdp_beside_the_pipeline_gives_the_gradients_of_one_process(name, replicate, four):
    for errors in four.run(fully_sharded, plan_for(name), replicate):
        assert max(errors) <= TOLERANCE


def hybrid_sharded(world, both):
    """Four pipelines of one rank: FSDP2 shards over one dimension and replicates over the other, or we do."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((1, 2, 2), ("pp", "dp_replicate", "dp_shard"))
    plan = build_plan("1f1b", CostTable.uniform(num_layers=8), 1, 2)
    case = make("plain", 8)
    expected, _ = plain_gradients(*case)
    for layer in case.layers:
        fully_shard(layer, mesh=mesh["dp_replicate", "dp_shard"] if both else mesh["dp_shard"])
    with Pipeline(case.layers, plan, case.loss_fn, mesh=mesh, timeout_s=PATIENCE_S) as pipe:
        mine = slice(pipe.world.replica * 2, pipe.world.replica * 2 + 2)
        pipe.step(case.inputs[mine], case.targets[mine])
        return worst_error_of(pipe, expected)


@pytest.mark.parametrize("both", some([True, False]))
def test_what_fsdp_does_not_average_over_the_pipeline_does(both, four):
    assert max(four.run(hybrid_sharded, both)) <= TOLERANCE


# -- tensor and sequence parallelism --------------------------------------------------------------------


def tensor_parallel(world, plan, sequence):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = mesh_of((2, 2), ("tp", "pp"))
    case = make("plain", plan.num_micro_batches)
    expected, losses = plain_gradients(*case)
    for layer in case.layers[1:-1]:
        if sequence:
            styles = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
            parallelize_module(layer, mesh["tp"], styles)
            parallelize_module(
                layer,
                mesh["tp"],
                PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False),
            )
            parallelize_module(
                layer, mesh["tp"], PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
            )
        else:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with Pipeline(case.layers, plan, case.loss_fn, mesh=mesh, timeout_s=PATIENCE_S) as pipe:
        for _ in range(2):
            loss = float(pipe.step(case.inputs, case.targets))
        for p in pipe.parameters():
            p.grad = p.grad / 2
        worst = worst_error_of(pipe, expected)
        norm = float(pipe.clip_grad_norm_(1e9))
    return worst, abs(loss - sum(losses) / len(losses)), abs(norm / norm_of(expected) - 1)


@pytest.mark.parametrize("sequence", some([True, False]))
@pytest.mark.parametrize("name", some(["zb-h1", "1f1b"]))
def test_tensor_parallel_layers_give_the_gradients_of_one_process(name, sequence, four):
    for errors in four.run(tensor_parallel, plan_for(name), sequence):
        assert max(errors) <= TOLERANCE


def split_of_tensor_parallel(world):
    """What I leaves to W: the gradients of all DTensor weights of a block."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from octopipe.runtime.stages.stage import Stage

    torch.manual_seed(2)
    block = Block().double()
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    block(x).square().mean().backward()
    expected = {n: p.grad.clone() for n, p in block.named_parameters()}
    block.zero_grad()
    parallelize_module(block, mesh_of((2,), ("tp",)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    stage = Stage([block])
    worst = 0.0
    for count in (1, 2):
        run = stage.forward(x, then=lambda y: y.square().mean())
        run.backward_input([torch.ones((), dtype=torch.float64)])
        owed = len(run._queue)
        if count == 1:
            assert block.up.weight.grad is None and block.down.weight.grad is None
        run.backward_weight()
        for n, p in block.named_parameters():
            assert p.grad.placements == p.placements if hasattr(p, "placements") else True
            worst = max(worst, float((whole_tensor(p.grad) - count * expected[n]).abs().max()))
    return owed, worst


def test_tensor_parallel_linears_leave_their_weight_gradients_to_w(two):
    for owed, worst in two.run(split_of_tensor_parallel):
        assert owed == 2
        assert worst <= TOLERANCE


# -- what nobody has a gradient for ---------------------------------------------------------------------


class Half(nn.Module):
    """One weight is used, one only by odd pipelines' batches, one never."""

    def __init__(self):
        super().__init__()
        self.used, self.sometimes, self.never, self.frozen = (
            nn.Parameter(torch.full((WIDTH,), 1.0 + k, dtype=torch.float64)) for k in range(4)
        )
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = x * self.used * self.frozen
        return x * self.sometimes if bool((x[0, 0] > 0).any()) else x


def unused(world, names, plan):
    torch.manual_seed(0)
    layers = [Half() for _ in range(4)]
    options = {"mesh": mesh_of((2, 2), names)} if names else {"group": world}
    count = plan.num_micro_batches
    with Pipeline(layers, plan, lambda o, t: o.square().mean(), timeout_s=PATIENCE_S, **options) as pipe:
        optimizer = torch.optim.AdamW(list(pipe.parameters()), lr=0.0, weight_decay=0.0)
        for _ in range(2):
            sign = 1.0 if pipe.world.replica else -1.0
            data = [torch.full((1, 2, WIDTH), sign, dtype=torch.float64) for _ in range(count)]
            pipe.step(data, data)
            optimizer.step()
            got = {n: None if p.grad is None else float(p.grad.abs().sum()) for n, p in pipe.named_parameters()}
            pipe.zero_grad()
    return got


@pytest.mark.parametrize("names", [("dp", "pp"), None])
def test_what_nobody_has_a_gradient_for_keeps_none(names, two, four):
    """Also where replicas of a layer lie on both ranks of one pipeline (no mesh: two ranks, chimera)."""
    for got in (four if names else two).run(unused, names, plan_for("chimera", num_layers=4)):
        for name, size in got.items():
            kind = name.split(".")[1]
            assert (size is None) == (kind in ("never", "frozen") or (kind == "sometimes" and names is None)), name


def thawed(world):
    torch.manual_seed(0)
    layers = [Half() for _ in range(4)]
    plan, out = plan_for("chimera", num_layers=4), []
    data = [torch.ones(1, 2, WIDTH, dtype=torch.float64) for _ in range(4)]
    with Pipeline(layers, plan, lambda o, t: o.square().mean(), group=world, timeout_s=PATIENCE_S) as pipe:
        for trained in (False, True, False):
            for layer in pipe.modules().values():
                layer.frozen.requires_grad_(trained)
            pipe.step(data, data)
            out.append({n: p.grad is not None for n, p in pipe.named_parameters() if n.endswith("frozen")})
            pipe.zero_grad()
    return out


def test_parameters_may_be_frozen_and_thawed_between_steps(two):
    for first, second, third in two.run(thawed):
        assert not any(first.values()) and all(second.values()) and not any(third.values())


# -- a batch computed outside ---------------------------------------------------------------------------


def outside(world, plan, kind):
    torch.manual_seed(1)
    front = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    layers = [Block().double() for _ in range(4)]
    raw = torch.randn(8, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    loss_fn = lambda o, t: (o - t).square().mean()  # noqa: E731
    target = torch.zeros(8, 3, WIDTH, dtype=torch.float64)
    value = front(raw)
    for layer in layers:
        value = layer(value)
    loss_fn(value, target).backward()
    expected = [raw.grad.clone(), *(p.grad.clone() for p in front.parameters())]
    raw.grad = None
    front.zero_grad()
    for layer in layers:
        layer.zero_grad()
    with Pipeline(layers, plan, loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        made = front(raw)
        pipe.step(list(made.chunk(4)) if kind == "list" else made, target)
        got = [raw.grad, *(p.grad for p in front.parameters())]
        firsts = sum(plan.stages[route[0]].rank == world.rank for route in plan.routes)
    if not firsts:
        return got, None
    if len(plan.routes) > 1:  # every rank has its micro-batches' part
        return got, expected
    return max(float((a - b).abs().max()) for a, b in zip(got, expected)), None


@pytest.mark.parametrize("kind", ["list", "tensor"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_module_outside_gets_the_gradient_of_the_batch_it_computed(kind, recompute, two):
    plan = plan_for("1f1b", num_layers=4)
    if recompute:
        plan = recomputing(build_plan("1f1b", CostTable.uniform(num_layers=4), 2, 4), head=True).check()
    (error, _), (nothing, _) = two.run(outside, plan, kind)
    assert error <= TOLERANCE
    assert nothing == [None, None, None]


def test_two_first_ranks_share_the_gradient_of_the_batch(two):
    parts = two.run(outside, plan_for("chimera", num_layers=4), "tensor")
    for k, want in enumerate(parts[0][1]):
        assert float((parts[0][0][k] + parts[1][0][k] - want).abs().max()) <= TOLERANCE
