"""What copies of a layer share besides weights: statistics in buffers, and the overflow of a step."""

from __future__ import annotations

import warnings

import pytest
from effort import some

torch = pytest.importorskip("torch")
from mesh_checks import mesh_of  # noqa: E402
from ranks import PATIENCE_S, Ranks  # noqa: E402
from small_pipelines import COUNT, LAYERS, WIDTH, data, linears, plainly, plan_of, square  # noqa: E402
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402

# -- statistics -----------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.register_buffer("mask", torch.full((2,), float("-inf")))
        self.register_buffer("largest", torch.tensor(0))

    def forward(self, x):
        self.largest = torch.maximum(self.largest, (100 * x.detach().abs().max()).long())
        return torch.tanh(self.norm(self.linear(x)))


def norms():
    torch.manual_seed(0)
    return [Norm() for _ in range(LAYERS)]


def statistics(world, name, dp):
    count = COUNT
    batches = data(2 * count)
    options = {"mesh": mesh_of((2, 2), ("dp", "pp"))} if dp else {"group": world}
    plan = plan_of(name)
    with Pipeline(norms(), plan, square, timeout_s=PATIENCE_S, **options) as pipe:
        mine = batches[count * pipe.world.replica :][:count] if dp else batches[:count]
        for _ in range(3):
            pipe.step(mine, mine)
        state = {n: v.clone() for n, v in pipe.state_dict().items()}
    return state, plan


def test_replicas_have_the_mean_of_their_statistics(four):
    results = four.run(statistics, "1f1b", True)
    # Twins: every replica alone, and their statistics averaged after every step.
    twins, batches = [norms(), norms()], data(2 * COUNT)
    for _ in range(3):
        for r, twin in enumerate(twins):
            plainly(twin, square, batches[COUNT * r :][:COUNT])
        for a, b in zip(*twins):
            for (_, x), (_, y) in zip(a.named_buffers(), b.named_buffers()):
                mean = (x + y) / 2 if x.is_floating_point() and x is not a.mask else torch.maximum(x, y)
                x.copy_(mean), y.copy_(mean)
    expected = {f"{k}.{n}": b for k, m in enumerate(twins[0]) for n, b in m.named_buffers()}
    for state, _ in results:
        for name in state.keys() & expected.keys():
            assert torch.allclose(state[name].double(), expected[name].double(), rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_copies_of_a_stage_have_the_same_statistics(name, two):
    (first, _), (second, _) = two.run(statistics, name, False)
    common = first.keys() & second.keys()
    assert any("running_mean" in name for name in common)
    for name in common:
        assert torch.equal(first[name], second[name]), name
        if "running" in name:
            assert not torch.equal(first[name], torch.zeros_like(first[name]))
        if name.endswith("mask"):
            assert bool((first[name] == float("-inf")).all())


def one_block(world, how, trains):
    torch.manual_seed(0)
    if how == "block":
        block = Norm()
        layers = [block, *linears()[1:3], block]
    else:
        layers = norms()
        layers[3].norm.running_mean = layers[0].norm.running_mean
    with Pipeline(layers, plan_of("1f1b"), square, group=world, timeout_s=PATIENCE_S) as pipe:
        if not trains:
            for module in pipe.modules().values():
                for inner in module.modules():
                    if isinstance(inner, nn.BatchNorm1d):
                        inner.eval()
                if isinstance(module, Norm):
                    module.forward = lambda x, module=module: torch.tanh(module.norm(module.linear(x)))
        try:
            pipe.step(data(), data())
        except OctoPipeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("how", ["block", "buffer"])
def test_a_statistic_that_is_one_on_two_ranks_is_refused_when_it_changes(how):
    ranks = Ranks(2)
    try:
        for text in ranks.run(one_block, how, True):
            assert "is the same tensor as" in text and "put these layers on one rank" in text
    finally:
        ranks.close()


def test_a_constant_that_layers_share_across_ranks_is_fine(two):
    assert two.run(one_block, "block", False) == ["", ""]


class Queue(nn.Module):
    """Keeps rows in a buffer: as many on one rank as on the other, or one a forward, or in a buffer of its making."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), how
        self.register_buffer("rows", torch.zeros(1, WIDTH, dtype=torch.float64) if how != "late" else None)

    def forward(self, x):
        y = self.linear(x)
        if self.how == "late":
            self.rows = y.detach()[:1] if self.rows is None else 0.5 * (self.rows + y.detach()[:1])
        elif self.how == "alike" or torch.distributed.get_rank() == 0:
            self.rows = torch.cat([self.rows, y.detach()[:1]])
        return torch.tanh(y) + self.rows.mean(0)


def queues(world, how):
    torch.manual_seed(0)
    layers = [Queue(how) for _ in range(LAYERS)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Pipeline(layers, plan_of("chimera"), square, group=world, timeout_s=PATIENCE_S) as pipe:
            for _ in range(2):
                pipe.step(data(), data())
            return {n: v.clone() for n, v in pipe.state_dict().items()}, [str(w.message) for w in told]


def test_buffers_that_grow_alike_are_averaged(two):
    (one, told), (other, _) = two.run(queues, "alike")
    assert not told and len(one["0.rows"]) == 1 + COUNT and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize(("how", "words"), [("apart", "has another shape"), ("late", "was made by a forward")])
def test_buffers_that_cannot_be_averaged_stay_apart_with_a_warning(how, words, two):
    for state, told in two.run(queues, how):
        assert [words in text and "rows" in text for text in told if "buffer" in text].count(True) >= 1
        assert state["0.rows"].shape[1] == WIDTH


# -- overflow -------------------------------------------------------------------------------------------


class Explodes(nn.Linear):
    """Its gradient is infinite in some steps."""

    def forward(self, x):
        out = super().forward(x)
        if self.now:
            out.register_hook(lambda g: g * float("inf"))
        return out


def scaled(world, kind, at, dp):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    layers[at] = Explodes(WIDTH, WIDTH)
    options = {"mesh": mesh_of((2, 2), ("dp", "pp"))} if dp else {"group": world}
    moved = []
    with Pipeline(layers, plan_of("1f1b"), square, timeout_s=PATIENCE_S, **options) as pipe:
        batches = [x.float() for x in data()]
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        given = {"init_scale": 1024.0, "growth_interval": 1000}
        scaler = pipe.grad_scaler(**given) if kind == "ours" else torch.amp.GradScaler("cpu", **given)
        if kind == "torch":
            scaler.scale(torch.zeros(1))
        for step in range(4):
            layers[at].now = step in (1, 2) and pipe.world.replica == 0
            before = [p.detach().clone() for p in pipe.parameters()]
            optimizer.zero_grad()
            pipe.loss_scale = scaler.get_scale()
            pipe.step(batches, batches)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, pipe.parameters())))
        return moved, scaler.get_scale(), pipe.loss_scale


@pytest.mark.parametrize("kind", ["ours", "torch"])
@pytest.mark.parametrize("at", some([3, 0]))
@pytest.mark.parametrize("dp", [False, True])
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(kind, at, dp, two, four):
    for moved, scale, ours in (four if dp else two).run(scaled, kind, at, dp):
        assert moved == [True, False, False, True]
        assert scale == 256.0 and (kind == "torch" or ours == 256.0)


def touched(world):
    """A gradient that is spoiled after the step: our scaler hears of it."""
    with Pipeline(linears(), plan_of("1f1b"), square, group=world, timeout_s=PATIENCE_S) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scaler = pipe.grad_scaler(init_scale=8.0)
        pipe.step(data(), data())
        if world.rank == 1:
            next(pipe.parameters()).grad[0] = float("nan")
        before = [p.detach().clone() for p in pipe.parameters()]
        scaler.step(optimizer)
        scaler.update()
        return all(torch.equal(a, b) for a, b in zip(before, pipe.parameters())), pipe.loss_scale


def test_our_scaler_shares_what_was_spoiled_after_the_step(two):
    assert two.run(touched) == [(True, 4.0), (True, 4.0)]
