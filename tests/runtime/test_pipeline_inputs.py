"""What goes into a Pipeline and comes out: containers, partial batches, side inputs, outputs; and the self-check."""

from __future__ import annotations

import dataclasses
from collections import UserDict

import pytest
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Op, Plan, Stage  # noqa: E402
from octopipe.runtime import verify  # noqa: E402
from octopipe.runtime.batches import split_batch  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.world import World  # noqa: E402
from octopipe.runtime.stages import wgrad_ops  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

WIDTH, COUNT = 4, 4
torch.set_num_threads(1)


def alone(count=COUNT, *, recompute=False, layers=4):
    stage = Stage(first=0, stop=layers, rank=0, recompute=recompute)
    ops = [Op(0, kind, m) for m in range(count) for kind in ("FRB" if recompute else "FIW")]
    return Plan(num_layers=layers, num_ranks=1, num_micro_batches=count, stages=(stage,), orders=(tuple(ops),)).check()


def linears():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]


def data(rows, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=g)


def square(output, target):
    return (output - target).square().mean()


# -- batches --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    ids: torch.Tensor
    more: dict
    name: str = "x"


class Encoding(UserDict):
    """Like a tokenizer's: a mapping that is no dict."""


@pytest.mark.parametrize("kind", ["dataclass", "mapping", "nested"])
def test_containers_split_by_rows(kind):
    ids, mask = torch.arange(6), torch.arange(12).view(6, 2)
    batch = {
        "dataclass": Sample(ids, {"mask": mask}),
        "mapping": Encoding(ids=ids, mask=mask),
        "nested": {"a": (ids, {"mask": mask}), "n": 3},
    }[kind]
    parts = split_batch(batch, 3, "batch")
    assert [type(p) for p in parts] == [type(batch)] * 3
    get = {
        "dataclass": lambda p: (p.ids, p.more["mask"]),
        "mapping": lambda p: (p["ids"], p["mask"]),
        "nested": lambda p: (p["a"][0], p["a"][1]["mask"]),
    }[kind]
    for m, part in enumerate(parts):
        assert get(part)[0].tolist() == [2 * m, 2 * m + 1]
        assert torch.equal(get(part)[1], mask[2 * m : 2 * m + 2])


def test_batch_encodings_of_tokenizers_split_by_rows():
    transformers = pytest.importorskip("transformers")
    parts = split_batch(transformers.BatchEncoding({"input_ids": torch.arange(4)}), 2, "batch")
    assert [p["input_ids"].tolist() for p in parts] == [[0, 1], [2, 3]]


class Opaque:
    def __init__(self, x):
        self.x = x


def test_what_cannot_be_taken_apart_is_refused():
    with pytest.raises(OctoPipeError, match="batch holds a Opaque"):
        split_batch(Opaque(torch.ones(4)), 2, "batch")
    with pytest.raises(OctoPipeError, match="sparse_coo"):
        split_batch(torch.eye(4).to_sparse(), 2, "batch")

    class Gives(nn.Linear):
        def forward(self, x):
            return Opaque(super().forward(x))

    plan = Plan(
        num_layers=2,
        num_ranks=1,
        num_micro_batches=1,
        stages=(Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=0)),
        orders=((Op(0, "F", 0), Op(1, "F", 0), Op(1, "B", 0), Op(0, "B", 0)),),
    ).check()
    pipe = Pipeline([Gives(WIDTH, WIDTH), nn.Identity()], plan, square)
    with pytest.raises(OctoPipeError, match=r"layer 0 \(Gives\) returned a Opaque"):
        pipe.step(torch.ones(2, WIDTH), torch.ones(2, WIDTH))


def partial(world, plan, rows, with_batch):
    x, y, layers = data(rows), data(rows, 2), linears()
    square(nn.Sequential(*layers)(x), y).backward()
    want = {f"{k}.{n}": p.grad.clone() for k, m in enumerate(layers) for n, p in m.named_parameters()}
    loss = square(nn.Sequential(*layers)(x), y).item()
    for layer in layers:
        layer.zero_grad()
    with Pipeline(layers, plan, square, group=world, timeout_s=PATIENCE_S) as pipe:
        got = float(pipe.step(x, y)), float(pipe.evaluate(x, y))
        worst = max(float((p.grad - want[n]).abs().max()) for n, p in pipe.named_parameters())
        out = pipe.predict(x if with_batch or pipe.rank == 0 else None, to="all")
    plain = nn.Sequential(*layers)(x).detach()
    return abs(got[0] - loss), abs(got[1] - loss), worst, float((out - plain).abs().max()), out.shape == plain.shape


@pytest.mark.parametrize("rows", [8, 7, 3])
def test_a_partial_batch_gives_the_mean_over_its_rows(rows, two):
    plan = build_plan("zb-h1", CostTable.uniform(num_layers=4), 2, COUNT)
    for results in ([partial(World(None), alone(), rows, True)], two.run(partial, plan, rows, False)):
        for *errors, same in results:
            assert max(errors) < 1e-12 and same


def unknown_rows(world, plan):
    with Pipeline(linears(), plan, lambda o: o.square().mean(), group=world, timeout_s=PATIENCE_S) as pipe:
        try:
            pipe.step(data(7) if pipe.rank == 0 else None)
        except OctoPipeError as error:
            return str(error)
    return ""


def test_a_loss_that_does_not_know_the_rows_is_refused(two):
    plan = build_plan("1f1b", CostTable.uniform(num_layers=4), 2, COUNT)
    assert all("do not know how many rows" in text for text in two.run(unknown_rows, plan))


# -- side inputs ----------------------------------------------------------------------------------------


class Masked(nn.Linear):
    def forward(self, x, mask, positions=None):
        y = super().forward(x) * mask
        return y if positions is None else y + positions


def side(world, plan):
    torch.manual_seed(0)
    layers = [
        m.double() for m in (nn.Linear(WIDTH, WIDTH), Masked(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Masked(4, 4))
    ]
    x, y, mask, where = data(8), data(8, 2), data(8, 3) > 0, data(1, 4)
    out = layers[3](layers[2](layers[1](layers[0](x), mask, where)), mask, where)
    square(out, y).backward()
    want = {f"{k}.{n}": p.grad.clone() for k, m in enumerate(layers) for n, p in m.named_parameters()}
    for layer in layers:
        layer.zero_grad()
    with Pipeline(
        layers, plan, square, group=world, side_inputs=("mask", "positions"), verify=True, timeout_s=PATIENCE_S
    ) as pipe:
        pipe.step(x, y, side={"mask": mask, "positions": [where] * COUNT})
        worst = max(float((p.grad - want[n]).abs().max()) for n, p in pipe.named_parameters())
        found = pipe.forward(x, side={"mask": mask, "positions": [where] * COUNT}, to="all")
    return worst, float((found - out.detach()).abs().max())


def test_side_inputs_reach_the_layers_that_name_them(two):
    plan = build_plan("1f1b", CostTable.uniform(num_layers=4), 2, COUNT)
    results = [*two.run(side, plan), side(World(None), alone()), side(World(None), alone(recompute=True))]
    assert max(max(r) for r in results) < 1e-12


def test_side_inputs_that_are_missing_or_unknown_are_named():
    layers = [nn.Linear(4, 4), Masked(4, 4), nn.Identity(), nn.Identity()]
    with pytest.raises(OctoPipeError, match="no layer has an argument 'masks'"):
        Pipeline(layers, alone(), square, side_inputs=("masks",))
    pipe = Pipeline(layers, alone(), square, side_inputs=("mask",))
    with pytest.raises(OctoPipeError, match="layers that take 'mask'"):
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))
    with pytest.raises(OctoPipeError, match="'other' is not known"):
        pipe.step(torch.ones(4, 4), torch.ones(4, 4), side={"mask": torch.ones(4, 4), "other": 1})


# -- inference mode ---------------------------------------------------------------------------------------


def after_inference(world, plan):
    with Pipeline(linears(), plan, square, group=world, timeout_s=PATIENCE_S) as pipe:
        with torch.inference_mode():
            x, y = data(8), data(8, 2)
            first = float(pipe.evaluate(x, y))
            pipe.predict(x)
        loss = float(pipe.step(x, y))
        grads = sum(p.grad is None for p in pipe.parameters())
        with torch.inference_mode(), pytest.raises(OctoPipeError, match="outside"):
            pipe.step(x, y)
    return abs(first - loss), grads


def test_training_goes_on_after_evaluation_in_inference_mode(two):
    plan = build_plan("1f1b", CostTable.uniform(num_layers=4), 2, COUNT)
    for error, missing in [*two.run(after_inference, plan), after_inference(World(None), alone())]:
        assert error < 1e-12 and missing == 0


# -- the self-check ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_verify_names_a_parameter_whose_gradient_is_lost(recompute, monkeypatch):
    plan = alone(recompute=recompute)
    layers = linears()
    Pipeline(layers, plan, square, verify=True).step(data(8), data(8, 2))
    add = wgrad_ops.add_product
    lost = layers[2].weight
    monkeypatch.setattr(wgrad_ops, "add_product", lambda p, *rest: None if p is lost else add(p, *rest))
    for layer in layers:
        layer.zero_grad()
    with pytest.raises(OctoPipeError, match=r"2\.weight got no gradient"):
        Pipeline(layers, plan, square, verify=True).step(data(8), data(8, 2))
    monkeypatch.setattr(wgrad_ops, "add_product", lambda p, lay, a, b: add(p, lay, a, b * (2 if p is lost else 1)))
    with pytest.raises(OctoPipeError, match=r"gradient of parameter 2\.weight differs"):
        Pipeline(layers, plan, square, verify=True).step(data(8), data(8, 2))


def test_a_parameter_without_gradient_is_told_in_the_first_step():
    class Unused(nn.Linear):
        def forward(self, x):
            return x

    pipe = Pipeline([nn.Linear(4, 4), Unused(4, 4), nn.Identity(), nn.Identity()], alone(), square)
    with pytest.warns(UserWarning, match=r"1\.weight and 1 more got no gradient"):
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))


def test_verify_watches_the_weight_gradients_of_a_split_plan() -> None:
    """In this process: what stands in for a stage's run while it is watched takes every call that the run takes."""
    plan = build_plan("zb-h1", CostTable.uniform(num_layers=3), 1, 2)
    assert any(op.kind == "W" for op in plan.orders[0])
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    x = torch.randn(4, 4)
    with Pipeline(layers, plan, lambda out, y: (out - y).square().mean(), verify=True) as pipe:
        loss = float(pipe.step(x, x))
    assert loss == pytest.approx(float((nn.Sequential(*layers)(x) - x).square().mean().detach()), rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_that_fits_does_not_fail_because_it_is_verified(recompute, monkeypatch) -> None:
    """A device without memory for the second run: the stage is named, the step counts."""

    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    expected = Pipeline(linears(), alone(recompute=recompute), square).step(data(8), data(8, 2))
    monkeypatch.setattr(verify, "_gradients", full)
    with pytest.warns(UserWarning, match="layers up to .* not verified: the device has too little memory"):
        loss = Pipeline(linears(), alone(recompute=recompute), square, verify=True).step(data(8), data(8, 2))
    assert float(loss) == float(expected)


def test_gradients_are_compared_in_pieces_as_a_whole(monkeypatch) -> None:
    monkeypatch.setattr(verify, "PIECE", 7)
    a, b = torch.randn(5, 9, dtype=torch.complex64), torch.randn(9, 5).t()
    assert verify._norm(b) == pytest.approx(float(b.double().norm()))
    assert verify._norm(b, a) == pytest.approx(float((b - a).abs().double().norm()))
    assert verify._norm(torch.zeros(0)) == 0.0
    assert verify._far(a, torch.randn(9, 5), 1e9, 1e9)
    assert not verify._far(b + 1e-4, b, 1e-2, 0.0)
    changed = b.clone()
    changed[4, 8] += 100.0
    assert verify._far(changed, b, 1e-2, 0.0)
    assert verify._far(b * float("nan"), b, 1e-2, 0.0)
