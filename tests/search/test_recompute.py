"""Full recomputation as a price and as R ops: the same work, and where they differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from effort import draws

from octopipe.costs.profile_file import Profile
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.plans.setting import checkpointed_by_prices
from octopipe.search.recompute import recomputes, recomputing, without_needless_recomputation
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
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


@pytest.mark.parametrize("count", [None, 1, 3, 7, 50])
def test_the_layers_that_a_run_checkpoints_are_those_that_were_priced(count: int | None) -> None:
    numbers = {"recompute": "full"} | ({} if count is None else {"recompute_layers": count})
    kept = resolve_costs("nemotron-h-4b", pp=2, micro_batches=4)
    costs = resolve_costs("nemotron-h-4b", pp=2, micro_batches=4, **numbers)
    plan = build_plan("zb-h1", costs, 2, 4).with_extra(setting={"model": "nemotron-h-4b", **numbers})
    assert checkpointed_by_prices(plan) == tuple(
        np.flatnonzero(costs.input_ms - kept.input_ms > 0.99 * kept.forward_ms)
    )
    profile = Profile(costs=kept, partial={1: kept}).checkpointing(checkpointed_by_prices(plan))
    for table in (profile.costs, profile.partial[1]):
        again = list(checkpointed_by_prices(plan))
        assert table.input_ms[again] == pytest.approx(costs.input_ms[again])
    for name in ("activation_bytes", "stash_bytes", "workspace_bytes"):
        assert getattr(profile.costs, name) == pytest.approx(getattr(costs, name)), name


def test_the_operands_of_w_are_held_from_i_to_w_whatever_was_recomputed() -> None:
    """All I's before all W's: when the first W begins, a rank holds W's operands of every micro-batch, kept or not."""
    peaks: dict[str, float] = {}
    stash = None
    for how, numbers in {"kept": {}, "recomputed": {"recompute": "full"}}.items():
        costs = resolve_costs("nemotron-h-4b", pp=1, micro_batches=4, **numbers)
        stage = Stage(first=0, stop=costs.num_layers, rank=0)
        order = [Op(0, kind, m) for kind in "FIW" for m in range(4)]
        plan = Plan(
            num_layers=costs.num_layers, num_ranks=1, num_micro_batches=4, stages=(stage,), orders=(tuple(order),)
        )
        timeline = simulate(plan, costs)
        (curve,) = timeline.memory
        first_w = curve.bytes[np.searchsorted(curve.times_ms, timeline.spans.end_ms[7], side="right") - 1]
        whole = stash if stash is not None else costs.stash_bytes.sum()
        stash = whole
        assert first_w == pytest.approx(curve.static_bytes + 4 * whole + costs.workspace_bytes.max()), how
        peaks[how] = float(curve.bytes.max())
    assert peaks["recomputed"] < peaks["kept"]


def test_checkpointed_layers_give_the_same_gradients_and_keep_their_input_alone() -> None:
    torch = pytest.importorskip("torch")
    from octopipe.models.zoo import PRESETS
    from octopipe.runtime.measure.workload import Workload

    spec = PRESETS["nemotron-h-4b"]().scaled(0.02)
    plain = Workload(spec=spec, tokens=16)
    again = Workload(spec=spec, tokens=16, checkpointed=(1, 2))
    assert len({g for k, g in enumerate(again.groups) if k in (1, 2)} & {again.groups[k] for k in (0, 3, 4)}) == 0
    found = []
    for work in (plain, again):
        saved = 0

        def pack(x: Any) -> Any:
            nonlocal saved
            saved += x.numel()
            return x

        modules = [make() if not isinstance(make, torch.nn.Module) else make for make in work.layers("cpu")[:3]]
        value = work.batch("cpu", 1)[0]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            for module in modules:
                value = module(value)
        value.square().sum().backward()
        names = [name for module in modules for name, _ in module.named_parameters()]
        found.append((saved, names, [p.grad for module in modules for p in module.parameters()]))
    (much, names, wanted), (little, same, got) = found
    assert names == same and little < 0.2 * much
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize("system", ["1f1b", "zb-v", "interleaved", "gpipe"])
@pytest.mark.parametrize("seed", range(4))
def test_no_stage_is_recomputed_whose_activations_could_be_kept(system: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_layers = 16
    costs = CostTable.uniform(num_layers=num_layers, activation_bytes=100.0, p2p_ms=0.05)
    costs = costs.replace(forward_ms=rng.uniform(0.5, 2.0, num_layers), boundary_bytes=np.full(num_layers, 1.0))
    plain = build_plan(system, costs, 4, 8)
    again = recomputing(plain, head=True)
    most, least = (max(simulate(plan, costs).peak_bytes) for plan in (plain, again))
    for memory in (None, most, (most + least) / 2, least):
        limited = costs if memory is None else costs.replace(rank_memory_bytes=(float(memory),))
        before = simulate(again, limited)
        plan, timeline = without_needless_recomputation(again, limited, before)
        plan.check()
        checked = simulate(plan, limited)
        assert (checked.step_ms, checked.fits) == (timeline.step_ms, timeline.fits)
        assert timeline.fits >= before.fits and timeline.step_ms <= before.step_ms
        for number, stage in enumerate(plan.stages):  # and each of those that are left is needed
            if stage.recompute:
                fewer = replace(
                    plan, stages=(*plan.stages[:number], replace(stage, recompute=False), *plan.stages[number + 1 :])
                )
                fewer = replace(
                    fewer, orders=tuple(tuple(o for o in r if (o.kind, o.stage) != ("R", number)) for r in plan.orders)
                )
                kept = simulate(fewer, limited, check=False)
                assert not kept.fits or kept.step_ms > timeline.step_ms
        if memory is None or memory == most:
            assert not recomputes(plan) and plan.orders == plain.orders


def test_large_plans_are_settled_by_few_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budgeted search does not overrun because many stages recompute: orders alone settle most of them."""
    costs = CostTable.uniform(num_layers=64, activation_bytes=100.0, p2p_ms=0.05)
    costs = costs.replace(forward_ms=np.random.default_rng(0).uniform(0.5, 2.0, 64), boundary_bytes=np.ones(64))
    plain = build_plan("interleaved", costs, 8, 16, chunks=4)
    again = recomputing(plain, head=True)
    most, least = (max(simulate(plan, costs).peak_bytes) for plan in (plain, again))
    limited = costs.replace(rank_memory_bytes=(float(most + least) / 2,))
    before, simulated = simulate(again, limited), []

    def counted(plan: Plan, *args: object, **more: object) -> object:
        simulated.append(plan)
        return simulate(plan, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("octopipe.search.recompute.simulate", counted)
    plan, timeline = without_needless_recomputation(again, limited, before)
    assert 0 < sum(bool(stage.recompute) for stage in plan.stages) < 32 and timeline.fits
    assert len(simulated) <= 8
    simulated.clear()
    monkeypatch.setattr("octopipe.search.recompute.SIMULATED_OPS", 1)
    assert without_needless_recomputation(again, limited, before)[1].fits and len(simulated) == 1


@pytest.mark.parametrize("seed", range(draws(6, least=2)))
def test_a_search_with_enough_memory_recomputes_nothing(seed: int) -> None:
    """Whatever its moves came through: cheap first and last layers, which ranks that wait can recompute for nothing."""
    costs = CostTable.uniform(num_layers=10, activation_bytes=100.0, p2p_ms=0.02)
    first_and_last = {"forward_ms": (0.05, 5.0), "input_ms": (0.002, 4.0), "weight_ms": (0.5, 2.0)}
    times = {name: np.array([a, *getattr(costs, name)[1:-1], b]) for name, (a, b) in first_and_last.items()}
    costs = costs.replace(**times, boundary_bytes=np.full(10, 1.0), rank_memory_bytes=(1e9,))
    assert not recomputes(tune(costs, 4, 8, iterations=300, seed=seed, copies=False).plan)
