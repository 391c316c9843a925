"""PyTorch's runtime with our plans: equal to our executor and to one process; what it cannot run says so."""

from __future__ import annotations

import random
import warnings

import pytest
from effort import draws

torch = pytest.importorskip("torch")

from executor_models import NUM_LAYERS, make  # noqa: E402
from random_plans import random_plan  # noqa: E402
from ranks import PATIENCE_S, shared_ranks  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe import torch_engine  # noqa: E402
from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Op, Plan, Stage  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

TOLERANCE = 1e-12


def _plans(size: int, count: int, seed: int) -> list[Plan]:
    """Random plans with a stage on every rank: what PyTorch's runtime takes."""
    rng = random.Random(seed)
    out: list[Plan] = []
    while len(out) < count:
        plan = random_plan(rng, num_ranks=size, num_layers=NUM_LAYERS, num_micro_batches=rng.randint(1, 5), routes=1)
        if all(plan.orders):
            out.append(plan)
    return out


# -- jobs: run on every rank ---------------------------------------------------------------------------


def _torch_step(world, plan, case, steps=1):
    """(gradients by layer.name, losses) of PyTorch's runtime on this rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stages = torch_engine.make_stages(plan, case.layers, group=world.group)
        engine = torch_engine.schedule(plan, stages, case.loss_fn)
    losses: list[torch.Tensor] = []
    for _ in range(steps):
        engine.step(torch.cat(case.inputs), target=torch.cat(case.targets), losses=losses)
    grads = {name.removeprefix("layers."): p.grad for s in stages for name, p in s.submod.named_parameters()}
    return grads, [float(x.detach()) for x in losses]


def _worst(grads, expected, times=1):
    worst = 0.0
    for name, grad in grads.items():
        want = expected[name]
        if want is None or grad is None:
            worst = max(worst, 0.0 if want is None and grad is None else 1.0)
            continue
        worst = max(worst, float((grad - times * want).abs().max() / want.abs().max().clamp_min(1e-30)))
    return worst


def compare(world, jobs):
    """[(kind, plan)] -> per plan: (torch's gradient error, its loss error, our executor's gradient error)."""
    out = []
    for kind, plan in jobs:
        case = make(kind, plan.num_micro_batches)
        expected, losses = plain_gradients(*case)
        grads, found = _torch_step(world, plan, case)
        loss_error = max((abs(a - b) for a, b in zip(found, losses)), default=0.0)
        if found:
            assert len(found) == len(losses)
        error = _worst(grads, expected)
        for layer in case.layers:
            layer.zero_grad(set_to_none=True)
        with Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            pipe.step(case.inputs, case.targets)
        out.append((error, loss_error, worst_error(pipe, expected)))
    return out


def accumulate(world, plan, kind):
    case = make(kind, plan.num_micro_batches)
    expected, _ = plain_gradients(*case)
    grads, _ = _torch_step(world, plan, case, steps=3)
    return _worst(grads, expected, times=3)


def evaluate(world, plan, steps_before):
    """Losses of `eval` after some training steps, and whether gradients are what they were before it."""
    case = make("plain", plan.num_micro_batches)
    _, expected = plain_gradients(*case)
    stages = torch_engine.make_stages(plan, case.layers, group=world.group)
    engine = torch_engine.schedule(plan, stages, case.loss_fn)
    batch, target = torch.cat(case.inputs), torch.cat(case.targets)
    for _ in range(steps_before):
        engine.step(batch, target=target)
    before = [None if p.grad is None else p.grad.clone() for s in stages for p in s.submod.parameters()]
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        engine.eval(batch, target=target, losses=losses)
    after = [p.grad for s in stages for p in s.submod.parameters()]
    same = all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(before, after))
    return same, max((abs(float(a) - b) for a, b in zip(losses, expected)), default=0.0), len(losses)


def renaming_warns(world, plan):
    case = make("plain", plan.num_micro_batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stages = torch_engine.make_stages(plan, case.layers, group=world.group)
        engine = torch_engine.schedule(plan, stages, case.loss_fn)
    return [str(w.message) for w in caught], engine.renamed


def stage_zero_puts_weights_off(world, plan):
    """How many weight gradients of stage 0 exist between I and W: PyTorch's own split computes none in I."""
    case = make("plain", plan.num_micro_batches)
    stages = torch_engine.make_stages(plan, case.layers, group=world.group)
    engine = torch_engine.schedule(plan, stages, case.loss_fn)
    seen = []
    if stages[0].is_first:
        weight = stages[0].backward_weight_one_chunk

        def watched(chunk, last_backward=False):
            seen.append(len(stages[0]._queues[chunk]))
            weight(chunk, last_backward)

        stages[0].backward_weight_one_chunk = watched
    engine.step(torch.cat(case.inputs), target=torch.cat(case.targets))
    return seen


def refused(world, plan, what):
    case = make("plain", plan.num_micro_batches, num_layers=plan.num_layers)
    try:
        stages = torch_engine.make_stages(plan, case.layers, group=world.group)
        if what == "other stages":
            plan = Plan(
                num_layers=plan.num_layers,
                num_ranks=plan.num_ranks,
                num_micro_batches=plan.num_micro_batches,
                stages=tuple(Stage(first=s.first, stop=s.stop, rank=1 - s.rank) for s in plan.stages),
                orders=plan.orders[::-1],
            )
        torch_engine.schedule(plan, stages, case.loss_fn)
    except OctoPipeError as error:
        return str(error)
    return None


# -- equal to our executor and to one process ----------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "count"),
    [
        pytest.param(2, draws(20), marks=pytest.mark.slow),
        pytest.param(3, draws(15), marks=pytest.mark.slow),
        (4, draws(15, least=5)),
    ],
)
def test_random_plans_equal_our_executor_and_one_process(size, count):
    kinds = ("plain", "moe", "tied", "frozen", "pair")
    jobs = [(kinds[k % len(kinds)], plan) for k, plan in enumerate(_plans(size, count, seed=size))]
    assert any(plan.splits_backward for _, plan in jobs)
    for per_rank in shared_ranks(size).run(compare, jobs):
        for (kind, plan), errors in zip(jobs, per_rank):
            assert max(errors) <= TOLERANCE, (kind, plan.orders, errors)


@pytest.mark.parametrize("system", ["1f1b", "interleaved", "zb-v", "zb-h1"])
def test_published_systems_run_in_pytorchs_runtime(system, two):
    plan = build_plan(system, CostTable.uniform(num_layers=NUM_LAYERS, p2p_ms=0.1), 2, 4)
    for per_rank in two.run(compare, [("plain", plan), ("tied", plan)]):
        assert max(max(errors) for errors in per_rank) <= TOLERANCE


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_gradients_of_several_steps_add_up(kind, two):
    plan = build_plan("zb-h1", CostTable.uniform(num_layers=NUM_LAYERS), 2, 4)
    assert max(two.run(accumulate, plan, kind)) <= TOLERANCE


@pytest.mark.parametrize("steps_before", [0, 2])
def test_eval_gives_the_losses_and_leaves_gradients_alone(steps_before, two):
    plan = build_plan("interleaved", CostTable.uniform(num_layers=NUM_LAYERS), 2, 4)
    found = two.run(evaluate, plan, steps_before)
    assert all(same and error <= TOLERANCE for same, error, _ in found)
    assert [count for _, _, count in found] == [0, 4]


def test_micro_batches_are_renamed_where_upstream_would_mix_up_losses(two):
    order = (0, 2, 1, 3)
    first = [Op(0, "F", m) for m in order]
    stages = (Stage(first=0, stop=4, rank=0), Stage(first=4, stop=NUM_LAYERS, rank=1))
    orders = (
        (*first, *(Op(0, "B", m) for m in order)),
        tuple(op for m in order for op in (Op(1, "F", m), Op(1, "B", m))),
    )
    plan = Plan(num_layers=NUM_LAYERS, num_ranks=2, num_micro_batches=4, stages=stages, orders=orders).check()
    for said, renamed in two.run(renaming_warns, plan):
        assert any("renamed" in line and "0, 2, 1, 3" in line for line in said)
        assert renamed == (0, 2, 1, 3)
    for per_rank in two.run(compare, [("plain", plan)]):
        assert max(max(errors) for errors in per_rank) <= TOLERANCE


def test_the_first_stage_leaves_only_weight_gradients_to_w(two):
    plan = build_plan("zb-h1", CostTable.uniform(num_layers=NUM_LAYERS), 2, 4)
    counts = two.run(stage_zero_puts_weights_off, plan)[0]
    assert len(counts) == 4
    assert min(counts) > 0


# -- what it cannot run --------------------------------------------------------------------------------


def test_plans_pytorch_cannot_express_are_refused_in_one_line(two):
    costs = CostTable.uniform(num_layers=NUM_LAYERS)
    assert all("routes" in said for said in two.run(refused, build_plan("chimera", costs, 2, 4), ""))
    plan = build_plan("1f1b", costs, 2, 4)
    assert all("stages" in said for said in two.run(refused, plan, "other stages"))
    lone = Plan(
        num_layers=NUM_LAYERS,
        num_ranks=2,
        num_micro_batches=1,
        stages=(Stage(first=0, stop=NUM_LAYERS, rank=0),),
        orders=((Op(0, "F", 0), Op(0, "B", 0)), ()),
    ).check()
    assert all("holds no stage" in said for said in two.run(refused, lone, ""))
