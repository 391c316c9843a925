"""Layers that are sharded, tensor-parallel or compiled themselves pass through a Pipeline untouched."""

from __future__ import annotations

import pytest
from effort import some
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from executor_models import make  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

TOLERANCE = 1e-12


# -- layers that are parallel themselves ------------------------------------------------------------------


def sharded(world, plan):
    """Two pipelines whose layers FSDP2 shards between them; nothing is told to the Pipeline about it."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "pp"))
    case = make("plain", 2 * plan.num_micro_batches)
    expected, _ = plain_gradients(*case)
    for layer in case.layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    with Pipeline(case.layers, plan, case.loss_fn, group=mesh.get_group("pp"), timeout_s=PATIENCE_S) as pipe:
        replica, count = mesh.get_local_rank("fsdp"), plan.num_micro_batches
        mine = slice(replica * count, (replica + 1) * count)
        pipe.step(case.inputs[mine], case.targets[mine])
        worst = 0.0
        for name, p in pipe.named_parameters():
            full = p.grad.full_tensor()
            worst = max(worst, float((full - expected[name]).abs().max() / expected[name].abs().max()))
        norm = float(pipe.clip_grad_norm_(1e9))
    want = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    return max(worst, abs(norm / want - 1))


@pytest.mark.parametrize("split", some([True, False]))
def test_fsdp_layers_pass_through_untouched(split, four):
    plan = build_plan("1f1b", CostTable.uniform(num_layers=8), 2, 4, split_backward=split)
    assert max(four.run(sharded, plan)) <= 1e-11


def tensor_parallel(world, plan):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    case = make("plain", plan.num_micro_batches)
    expected, _ = plain_gradients(*case)
    for layer in case.layers[1:-1]:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with Pipeline(case.layers, plan, case.loss_fn, group=mesh.get_group("pp"), timeout_s=PATIENCE_S) as pipe:
        pipe.step(case.inputs, case.targets)
        worst = 0.0
        for name, p in pipe.named_parameters():
            full = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            worst = max(worst, float((full - expected[name]).abs().max() / expected[name].abs().max()))
        norm = float(pipe.clip_grad_norm_(1e9))
    want = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    return max(worst, abs(norm / want - 1))


def test_tensor_parallel_layers_pass_through_untouched(four):
    assert max(four.run(tensor_parallel, build_plan("zb-h1", CostTable.uniform(num_layers=8), 2, 4))) <= 1e-11


# -- compiled layers ------------------------------------------------------------------------------------


def compiled(world, plan):
    from torch._inductor.exc import InductorError

    case = make("plain", plan.num_micro_batches, num_layers=4)
    expected, _ = plain_gradients(*case)
    layers = [*case.layers[:2], torch.compile(case.layers[2], dynamic=False), case.layers[3]]
    if world.rank == 1:  # it holds layer 2; compiling twice would only take time
        try:
            layers[2](torch.randn(2, 4, 6, dtype=torch.float64))
        except InductorError as error:
            world.gather(str(error))
            return str(error)
    if any(world.gather("")):
        return "rank 1 cannot compile"
    with Pipeline(layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        pipe.step(case.inputs, case.targets)
    grads = {name.replace("_orig_mod.", ""): g for name, g in expected.items()}
    return worst_error(pipe, {n: grads[n.replace("_orig_mod.", "")] for n, _ in pipe.named_parameters()})


@pytest.mark.slow
def test_compiled_layers_pass_through(two):
    results = two.run(compiled, build_plan("1f1b", CostTable.uniform(num_layers=4), 2, 4, split_backward=True))
    if any(isinstance(r, str) for r in results):
        pytest.skip(f"inductor does not work here: {results}")
    assert max(results) <= TOLERANCE
