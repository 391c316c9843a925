"""Plans and meshes for pipelines with other parallel dimensions, and the comparison of their gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

TOLERANCE = 1e-11


def plan_for(name="1f1b", num_layers=8, **options):
    return build_plan(name, CostTable.uniform(num_layers=num_layers), 2, 4, **options)


def mesh_of(shape, names):
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)


def whole_tensor(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def worst_error_of(pipe, expected, whole=whole_tensor):
    worst = 0.0
    for name, p in pipe.named_parameters():
        want = expected[name]
        assert p.grad is not None, name
        worst = max(worst, float((whole(p.grad) - want).abs().max() / want.abs().max()))
    return worst


def norm_of(expected):
    return sum(float(g.square().sum()) for g in expected.values()) ** 0.5
