"""Full recomputation as a price and as R ops: the same work, and where they differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate


def with_r_ops(plan: Plan) -> Plan:
    """R of all layers but embedding and head right before every backward."""
    last = plan.num_layers - 1
    stages = tuple(
        replace(s, recompute=tuple(k for k in range(s.first, s.stop) if 0 < k < last) or False) for s in plan.stages
    )
    orders = []
    for order in plan.orders:
        out: list[Op] = []
        for op in order:
            if op.kind in "IB" and stages[op.stage].recompute:
                out.append(Op(op.stage, "R", op.micro_batch))
            out.append(op)
        orders.append(tuple(out))
    return replace(plan, stages=stages, orders=tuple(orders)).check("with R ops")


def tables(pp: int, **more: object) -> tuple[CostTable, CostTable]:
    keywords = {"pp": pp, "tp": 2, "gpu": "h100", **more}
    return tuple(  # type: ignore[return-value]
        resolve_costs("llama3-8b", recompute=mode, **keywords)  # type: ignore[arg-type]
        for mode in ("none", "full")
    )


@pytest.mark.parametrize("system", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("pp", [1, 4])
def test_the_price_of_full_recomputation_is_the_work_of_r_ops(system: str, pp: int) -> None:
    plain, full = tables(pp)
    plan = build_plan(system, plain, pp, 8)
    ops, price = simulate(with_r_ops(plan), plain), simulate(plan, full)
    np.testing.assert_allclose(ops.busy_ms, price.busy_ms, rtol=1e-12)
    # Inside the backward it begins when the gradient is there; an R op may run while that is on its way.
    assert ops.makespan_ms <= price.makespan_ms * (1 + 1e-12)
    if pp == 1:
        assert ops.step_ms == pytest.approx(price.step_ms, rel=1e-12)


def test_price_and_r_ops_take_equally_long_where_no_rank_waits_for_a_gradient() -> None:
    """One rank that holds two stages: every gradient is there when its turn comes."""
    plain, full = tables(1)
    plan = build_plan("interleaved", plain, 1, 4, chunks=2)
    assert simulate(with_r_ops(plan), plain).step_ms == pytest.approx(simulate(plan, full).step_ms, rel=1e-12)


def test_layer_by_layer_keeps_every_layers_input_and_restores_one_layer() -> None:
    """The price's memory: inputs of all layers per micro-batch in flight, one layer's activations while it runs."""
    plain, full = tables(4)
    inner = slice(1, -1)
    np.testing.assert_allclose(full.activation_bytes[inner], plain.boundary_bytes[:-2])
    np.testing.assert_allclose(
        full.workspace_bytes[inner] - plain.workspace_bytes[inner],
        plain.activation_bytes[inner] - plain.boundary_bytes[:-2],
    )
    np.testing.assert_allclose(full.input_ms[inner], plain.input_ms[inner] + plain.forward_ms[inner])
    assert full.forward_ms == pytest.approx(plain.forward_ms)
    for end in (0, -1):
        assert full.input_ms[end] == plain.input_ms[end]
