"""What a training script asks of a Pipeline beyond plain gradients."""

from __future__ import annotations

import contextlib
import warnings
import weakref

import numpy as np
import pytest
from effort import WHOLE
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from executor_models import Block, Head, make  # noqa: E402
from torch import nn  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.base.errors import NotApplicableError, OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Op, Plan, Stage  # noqa: E402
from octopipe.runtime.batches import split_batch  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.world import World  # noqa: E402
from octopipe.runtime.stages.rng import micro_batch_seed, mix  # noqa: E402
from octopipe.search.systems import build_plan, systems  # noqa: E402

TOLERANCE = 1e-12
torch.set_num_threads(1)


def _costs(num_layers=8):
    return CostTable.uniform(num_layers=num_layers)


def _single(num_layers, num_micro_batches, recompute=False):
    """Everything on one rank, in micro-batch order."""
    stage = Stage(first=0, stop=num_layers, rank=0, recompute=recompute)
    ops = [Op(0, kind, m) for m in range(num_micro_batches) for kind in "FB"]
    return Plan(
        num_layers=num_layers, num_ranks=1, num_micro_batches=num_micro_batches, stages=(stage,), orders=(tuple(ops),)
    ).check()


# -- bitwise and random numbers -------------------------------------------------------------------------


def float32_losses(world, plan):
    """Three SGD steps in float32."""
    case = make("plain", plan.num_micro_batches)
    layers = [layer.float() for layer in case.layers]
    with Pipeline(layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3)
        out = []
        for _ in range(3):
            out.append(float(pipe.step(case.inputs, case.targets)))
            optimizer.step()
            optimizer.zero_grad()
    return out


def float32_losses_alone(world, plan):
    return float32_losses(World(None), plan)


def test_float32_losses_are_bitwise_equal_across_plans_in_micro_batch_order(two):
    # In a process like the ranks': a bfloat16 product in a test before this one can make torch of this process change
    # its kernels for good.
    want = two.run(float32_losses_alone, _single(8, 4))[0]
    assert two.run(float32_losses_alone, _single(8, 4, recompute=True))[0] == want
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"):
        try:
            plan = build_plan(name, _costs(), 2, 4)
        except (NotApplicableError, OctoPipeError):
            continue
        for order in plan.orders:  # the claim holds where each stage's weight gradients run in micro-batch order
            for s in {op.stage for op in order}:
                of = [op.micro_batch for op in order if op.stage == s and op.kind in "WB"]
                assert of == sorted(of)
        for losses in two.run(float32_losses, plan):
            assert losses == want, name


def dropout_error(world, plan):
    case = make("dropout", plan.num_micro_batches)
    worst = 0.0
    with Pipeline(case.layers, plan, case.loss_fn, group=world, seed=7, timeout_s=PATIENCE_S) as pipe:
        for step in range(2):
            state = torch.get_rng_state()
            seed = lambda m, k: torch.manual_seed(mix(micro_batch_seed(7, step, 0, m), k))  # noqa: E731, B023
            expected, _ = plain_gradients(*case, before_layer=seed)
            torch.set_rng_state(state)
            pipe.step(case.inputs, case.targets)
            worst = max(worst, worst_error(pipe, expected))
            assert torch.equal(torch.get_rng_state(), state)
            pipe.zero_grad()
    return worst


def test_dropout_depends_on_layer_micro_batch_and_step_only(two):
    for name in ("1f1b", "interleaved"):
        assert max(two.run(dropout_error, build_plan(name, _costs(), 2, 4, split_backward=True))) <= TOLERANCE
    recomputing = build_plan("gpipe", _costs(), 2, 4)
    stages = tuple(Stage(first=s.first, stop=s.stop, rank=s.rank, recompute=True) for s in recomputing.stages)
    orders = tuple(
        tuple(o for op in order for o in ((Op(op.stage, "R", op.micro_batch), op) if op.kind == "B" else (op,)))
        for order in recomputing.orders
    )
    plan = Plan(num_layers=8, num_ranks=2, num_micro_batches=4, stages=stages, orders=orders).check()
    assert max(two.run(dropout_error, plan)) <= TOLERANCE


# -- composition ----------------------------------------------------------------------------------------


def clipped(world, plan, kind):
    case = make(kind, plan.num_micro_batches)
    out = []
    for norm_type in (2.0, 1.0, float("inf")):
        expected, _ = plain_gradients(*case)
        parameters = []
        for k, layer in enumerate(case.layers):
            for name, p in layer.named_parameters():
                if not any(p is q for q in parameters):
                    p.grad = expected[f"{k}.{name}"]
                    parameters.append(p)
        want = torch.nn.utils.clip_grad_norm_(parameters, 0.05, norm_type)
        expected = {f"{k}.{n}": p.grad.clone() for k, m in enumerate(case.layers) for n, p in m.named_parameters()}
        for p in parameters:
            p.grad = None
        with Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            pipe.step(case.inputs, case.targets)
            norm = pipe.clip_grad_norm_(0.05, norm_type)
        out += [worst_error(pipe, expected), abs(float(norm / want) - 1)]
        pipe.zero_grad()
    return max(out)


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_clipping_counts_shared_parameters_once(kind, two):
    for name in ("1f1b", "chimera", "dualpipe") if WHOLE else ("1f1b" if kind == "tied" else "chimera",):
        assert max(two.run(clipped, build_plan(name, _costs(), 2, 4), kind)) <= 1e-12


def accumulated(world, plan):
    """Two steps without zeroing: the sum of both steps' gradients, also for reduced parameters."""
    case = make("tied", plan.num_micro_batches)
    expected, _ = plain_gradients(*case)
    twice = {k: None if g is None else 2 * g for k, g in expected.items()}
    with Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        pipe.step(case.inputs, case.targets)
        pipe.step(case.inputs, case.targets)
    error = worst_error(pipe, twice)
    pipe.zero_grad()
    return error


def test_gradients_accumulate_over_steps(two):
    for name in ("1f1b", "chimera"):
        if name in systems():
            assert max(two.run(accumulated, build_plan(name, _costs(), 2, 4))) <= TOLERANCE


def factories(world, tied):
    """Only this rank's layers are built; ties are told by name, or by the modules themselves."""
    built = []

    def factory(k, make):
        def build():
            built.append(k)
            module = make().double()
            if not tied and k in (0, 5):
                module.tied_to = {"weight": "words"}
            return module

        return build

    kinds = [lambda: nn.Embedding(11, 6), *[Block] * 4, Head]
    plan = build_plan("1f1b", _costs(6), 2, 4)
    with Pipeline(
        [factory(k, kind) for k, kind in enumerate(kinds)],
        plan,
        make("plain", 1).loss_fn,
        group=world,
        tied=[("0.weight", "5.weight")] if tied else (),
        seed=3,
        timeout_s=PATIENCE_S,
    ) as pipe:
        case = make("plain", 4)
        loss = pipe.step(case.inputs, case.targets)
        names = {name: p.grad.clone() for name, p in pipe.named_parameters()}
        values = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return sorted(set(built)), float(loss), names, values


@pytest.mark.parametrize("tied", [True, False])
def test_factories_build_what_a_rank_holds_and_ties_join_ranks(tied, two):
    (mine, loss, grads, values), (theirs, other, more, also) = two.run(factories, tied)
    assert mine == [0, 1, 2] and theirs == [3, 4, 5]
    assert loss == other
    assert torch.equal(grads["0.weight"], more["5.weight"])
    assert torch.equal(values["0.weight"], also["5.weight"])
    alone = factories_alone({**also, **values})
    for name, want in alone.items():
        got = {**more, **grads}[name]
        assert float((got - want).abs().max()) <= TOLERANCE * float(want.abs().max())


def factories_alone(values):
    layers = [nn.Embedding(11, 6), *[Block() for _ in range(4)], Head()]
    for k, layer in enumerate(layers):
        layer.double().load_state_dict({n: values[f"{k}.{n}"] for n in layer.state_dict()})
    layers[5].weight = layers[0].weight
    case = make("plain", 4)
    grads, _ = plain_gradients(layers, case.inputs, case.targets, case.loss_fn)
    return grads


def data_parallel(world, plan, kind):
    """Four ranks as two pipelines of two: the gradients of all their micro-batches on one device."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    case = make(kind, 2 * plan.num_micro_batches)
    expected, losses = plain_gradients(*case)
    count = plan.num_micro_batches
    with Pipeline(case.layers, plan, case.loss_fn, mesh=mesh, timeout_s=PATIENCE_S) as pipe:
        mine = slice(pipe.world.replica * count, (pipe.world.replica + 1) * count)
        loss = pipe.step(case.inputs[mine], case.targets[mine])
        norm = pipe.clip_grad_norm_(1e9)
    error = worst_error(pipe, expected)
    pipe.zero_grad()
    return error, abs(float(loss) - sum(losses) / len(losses)), float(norm)


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_data_parallel_pipelines_average_their_gradients(kind, four):
    for name in ("1f1b", "chimera") if WHOLE else ("chimera" if kind == "tied" else "1f1b",):
        results = four.run(data_parallel, build_plan(name, _costs(), 2, 4), kind)
        assert max(error for error, _, _ in results) <= TOLERANCE
        assert max(error for _, error, _ in results) <= TOLERANCE
        assert max(norm for *_, norm in results) - min(norm for *_, norm in results) <= 1e-9


def autocast(world, plan):
    case = make("plain", plan.num_micro_batches)
    layers = [layer.float() for layer in case.layers]
    dtypes = set()
    layers[3].register_forward_hook(lambda m, i, o: dtypes.add(m.up(i[0]).dtype))
    expected, losses = plain_gradients(layers, case.inputs, case.targets, case.loss_fn)
    dtypes.clear()
    with Pipeline(layers, plan, case.loss_fn, group=world, autocast=torch.bfloat16, timeout_s=PATIENCE_S) as pipe:
        loss = pipe.step(case.inputs, case.targets)
    grads = {p.grad.dtype for p in pipe.parameters()}
    return float(loss), sum(losses) / len(losses), grads, dtypes, worst_error(pipe, expected)


def test_autocast_runs_forwards_in_low_precision(two):
    for loss, want, grads, dtypes, error in two.run(autocast, build_plan("1f1b", _costs(), 2, 4)):
        assert abs(loss - want) < 0.05
        assert grads == {torch.float32}
        assert dtypes <= {torch.bfloat16}
        assert error < 0.2


# -- the measured timeline ------------------------------------------------------------------------------


class Sleepy(nn.Linear):
    def forward(self, x):
        import time

        time.sleep(0.002)
        return super().forward(x)


def timeline(world, plan):
    layers = [Sleepy(4, 4) for _ in range(plan.num_layers)]
    data = [torch.randn(2, 4) for _ in range(plan.num_micro_batches)]
    with Pipeline(
        layers, plan, lambda o, t: (o - t).mean(), costs=_costs(4), group=world, timeout_s=PATIENCE_S
    ) as pipe:
        with contextlib.suppress(OctoPipeError):
            pipe.timeline()
            raise AssertionError("a timeline without a step")
        pipe.step(data, data)
        measured = pipe.timeline()
    return measured.to_json(), plan.orders


def test_measured_timeline_has_every_op_on_one_clock(two):
    from octopipe.simulation.timeline import timeline_from_json

    plan = build_plan("1f1b", _costs(4), 2, 4, split_backward=True)
    ours, theirs = (timeline_from_json(data) for data, _ in two.run(timeline, plan))
    assert np.array_equal(ours.spans.start_ms, theirs.spans.start_ms)
    assert ours.measured and ours.num_ranks == 2
    assert [str(ours.op(k)) for k in range(len(ours.spans.stage))] == [str(op) for row in plan.orders for op in row]
    t, preds = plan.table(), plan.predecessor_table()
    for number, row in enumerate(preds):
        for before in row[row >= 0]:
            assert ours.spans.end_ms[before] <= ours.spans.start_ms[number]
    forwards = t.kind == 0
    assert (ours.spans.end_ms - ours.spans.start_ms)[forwards].min() >= 2 * 2.0
    assert (ours.transfers.end_ms >= ours.transfers.start_ms).all()
    assert (ours.transfers.nbytes == 2 * 4 * 4).all()
    assert len(ours.memory) == 2
    parts = ours.bubbles
    total = parts.boundary_ms + parts.communication_ms + parts.imbalance_ms + parts.residual_ms
    assert np.allclose(total, parts.idle_ms)


# -- memory ----------------------------------------------------------------------------------------------


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        kept = x.clone()
        ctx.save_for_backward(kept)
        count[0] += 1
        count[1] = max(count[1], count[0])
        weakref.finalize(kept, lambda: count.__setitem__(0, count[0] - 1))
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2 + 0 * ctx.saved_tensors[0], None


class Counting(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count = count
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return Held.apply(self.inner(x), self.count)


def live_activations(world, plan):
    count = [0, 0]
    layers = [Counting(count) for _ in range(plan.num_layers)]
    data = [torch.randn(2, 4) for _ in range(plan.num_micro_batches)]
    with Pipeline(layers, plan, lambda o, t: (o - t).square().mean(), group=world, timeout_s=PATIENCE_S) as pipe:
        for _ in range(2):
            pipe.step(data, data)
    return count


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_activations_live_from_forward_to_input_gradient_and_no_longer(name, two):
    plan = build_plan(name, _costs(2), 2, 6)
    for rank, (left, peak) in enumerate(two.run(live_activations, plan)):
        live = most = 0
        for op in plan.orders[rank]:
            live += {"F": 1, "I": -1, "B": -1}.get(op.kind, 0)
            most = max(most, live)
        assert left == 0
        assert peak == most, name


def test_evaluation_runs_the_forwards_alone(two):
    for plain, loss, grads, again in two.run(evaluated, build_plan("interleaved", _costs(), 2, 4)):
        assert abs(loss - plain) <= TOLERANCE
        assert grads == 0
        assert abs(again - plain) <= TOLERANCE


def evaluated(world, plan):
    case = make("several", plan.num_micro_batches)
    _, losses = plain_gradients(*case)
    with Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        loss = float(pipe.eval().evaluate(case.inputs, case.targets))
        grads = sum(p.grad is not None for p in pipe.parameters())
        again = float(pipe.train().step(case.inputs, case.targets))
        pipe.evaluate(case.inputs, case.targets)
    pipe.zero_grad()
    return sum(losses) / len(losses), loss, grads, again


# -- mistakes -------------------------------------------------------------------------------------------


def test_mistakes_are_named():
    layers = [nn.Linear(2, 2) for _ in range(4)]
    loss = lambda o, t: (o - t).mean()  # noqa: E731
    with pytest.raises(OctoPipeError, match="2 ranks, the process group 1"):
        Pipeline(layers, build_plan("1f1b", _costs(4), 2, 2), loss)
    plan = _single(4, 2)
    with pytest.raises(OctoPipeError, match="3 layers for a plan of 4"):
        Pipeline(layers[:3], plan, loss)
    with pytest.raises(OctoPipeError, match=r"tied parameter '9\.weight'"):
        Pipeline(layers, plan, loss, tied=[("0.weight", "9.weight")])
    with pytest.raises(OctoPipeError, match="layer 0 has no parameter nothing"):
        Pipeline(layers, plan, loss, tied=[("0.nothing", "1.weight")])
    with pytest.raises(OctoPipeError, match="factory of layer 1 made a int"):
        Pipeline([layers[0], lambda: 3, *layers[2:]], plan, loss)
    pipe = Pipeline(layers, plan, loss)
    with pytest.raises(OctoPipeError, match="3 and 4 rows"):
        pipe.step((torch.randn(3, 2), torch.randn(4, 2)), torch.randn(3, 2))
    with pytest.raises(OctoPipeError, match="list of 3 micro-batches, and the plan has 2; make them equal"):
        pipe.step([torch.randn(3, 2)] * 3, torch.randn(4, 2))
    with pytest.raises(OctoPipeError, match="give it the batch"):
        pipe.step(None, torch.randn(4, 2))
    with pytest.raises(OctoPipeError, match="one scalar tensor per micro-batch"):
        Pipeline(layers, plan, lambda o, t: o - t).step(torch.randn(4, 2), torch.randn(4, 2))
    with pytest.raises(OctoPipeError, match="no entry"):
        pipe.load_state_dict({})


def test_batches_split_along_the_first_dimension():
    parts = split_batch({"a": torch.arange(6), "b": (torch.ones(2, 3), "same")}, 2, "batch")
    assert [p["a"].tolist() for p in parts] == [[0, 1, 2], [3, 4, 5]]
    assert parts[1]["b"][0].shape == (1, 3)
    assert parts[0]["b"][1] == "same"


def different_plans(world):
    plan = build_plan("1f1b" if world.rank else "gpipe", _costs(4), 2, 2)
    with contextlib.suppress(OctoPipeError):
        Pipeline([nn.Linear(2, 2) for _ in range(4)], plan, lambda o, t: o.mean(), group=world, timeout_s=PATIENCE_S)
        return ""
    return "refused"


def test_ranks_with_different_plans_are_refused(two):
    assert two.run(different_plans) == ["refused", "refused"]


class TwoNames(nn.Module):
    """Holds one parameter under two names, and uses the second."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 6))
        self.same = self.weight

    def forward(self, x):
        return x @ self.same.t()


def test_a_tied_parameter_is_one_under_all_of_its_names():
    stage = Stage(first=0, stop=3, rank=0)
    ops = tuple(Op(0, kind, 0) for kind in "FB")
    plan = Plan(num_layers=3, num_ranks=1, num_micro_batches=1, stages=(stage,), orders=(ops,))
    layers = [lambda: nn.Embedding(11, 6), lambda: nn.Linear(6, 6), TwoNames]
    loss_fn = lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())  # noqa: E731
    with Pipeline(
        layers, plan, loss_fn, group=World(None), tied=[("0.weight", "2.weight")], timeout_s=PATIENCE_S
    ) as pipe:
        modules = pipe.modules()
        assert modules[2].same is modules[2].weight is modules[0].weight


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_tied_parameter_is_warned_of_where_it_sees_parts_of_the_gradient(hook: str, cut: bool) -> None:
    stages = (
        (Stage(first=0, stop=2, rank=0), Stage(first=2, stop=3, rank=0)) if cut else (Stage(first=0, stop=3, rank=0),)
    )
    last = len(stages) - 1
    ops = tuple(
        Op(s, kind, 0) for kind, order in (("F", stages), ("B", stages[::-1])) for s in map(stages.index, order)
    )
    plan = Plan(num_layers=3, num_ranks=1, num_micro_batches=1, stages=stages, orders=(ops,))
    layers = [nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)]
    layers[2].weight = layers[0].weight
    seen: list[int] = []
    getattr(layers[0].weight, hook)(lambda given: seen.append(1))
    ids = torch.arange(6).reshape(1, 6)
    loss_fn = lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())  # noqa: E731
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Pipeline(layers, plan, loss_fn, group=World(None), timeout_s=PATIENCE_S) as pipe:
            pipe.step([ids], [ids])
    words = [str(w.message) for w in told if "is used in several stages" in str(w.message)]
    assert len(seen) == last + 1 and len(words) == last
    assert all("parameter 0.weight" in text for text in words)
