"""Reductions: when they start, and what goes through the host."""

from __future__ import annotations

import pytest
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
from executor_models import make  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks import reduce as reduction  # noqa: E402
from octopipe.runtime.ranks import world as worlds  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402


def through_host(world, plan):
    """As if the tensors were a GPU's and the group gloo's: when does a reduction start?"""
    case = make("plain", plan.num_micro_batches)
    expected, _ = plain_gradients(*case)
    order = []
    put = worlds.HostWork.wait
    with (
        pytest.MonkeyPatch.context() as patch,
        Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe,
    ):
        patch.setattr(worlds, "needs_host", lambda group, tensor: True)
        patch.setattr(reduction, "needs_host", lambda group, tensor: True)
        patch.setattr(worlds.HostWork, "wait", lambda *args: (order.append(pipe.executor.at is None), put(*args))[1])
        pipe.step(case.inputs, case.targets)
    return worst_error(pipe, expected), len(order), all(order)


def test_gloo_reduces_a_devices_gradients_on_the_host_after_the_step_is_issued(two):
    """Given a CUDA tensor, gloo would take streams and pinned memory in the middle of the step."""
    for error, reductions, after in two.run(through_host, build_plan("chimera", CostTable.uniform(num_layers=8), 2, 4)):
        assert error <= 1e-12
        assert reductions >= 2 and after
