"""What belongs together across ranks: trained losses, hidden and shared weights, statistics, overflow, wrappers.

Every case against plain torch in one process, or refused by name.
"""

from __future__ import annotations

import copy

import pytest
from effort import some

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from ranks import PATIENCE_S, Ranks, shared_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.loss_parts import loss_module  # noqa: E402
from octopipe.runtime.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

WIDTH, LAYERS, COUNT = 5, 4, 4
EXACT = 1e-11


@pytest.fixture(scope="module")
def two():
    return shared_ranks(2)


@pytest.fixture(scope="module")
def four():
    return shared_ranks(4)


def plan_of(name, count=COUNT):
    return build_plan(name, CostTable.uniform(num_layers=LAYERS), 2, count)


def linears(seed=0):
    torch.manual_seed(seed)
    return [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)]


def data(count=COUNT):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, WIDTH, dtype=torch.float64, generator=generator) for _ in range(count)]


def square(output, target):
    return (output - target).square().mean()


def plainly(layers, loss_fn, batches, steps=1, optimizer=None, between=None):
    """One process: the mean over micro-batches, step by step; returns the losses."""
    losses = []
    for step in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        total = 0.0
        for x in batches:
            out = x
            for layer in layers:
                out = layer(out)
            loss = loss_fn(out, x)
            (loss / len(batches)).backward()
            total += float(loss.detach())
        losses.append(total / len(batches))
        if optimizer is not None:
            optimizer.step()
        if between is not None:
            between(step)
    return losses


def worst(pairs):
    apart = 0.0
    for name, ours, theirs in pairs:
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            apart = max(apart, float((ours - theirs).abs().max()))
    return apart


def mesh_of(shape, names):
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)


# -- a loss with parameters -----------------------------------------------------------------------------


class Weighted(nn.Module):
    """A loss that learns what every column counts."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, output, target):
        return ((output - target) * self.scale).square().mean() - self.scale.log().mean()


def make_loss(kind, layers):
    """The loss as a module, a function that closes over one, and one tied to the first layer."""
    module = Weighted()
    if kind == "module":
        return module, lambda m: m
    if kind == "closure":
        return (lambda output, target: module(output, target)), lambda m: module
    if kind == "method":
        return module.forward, lambda m: module

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = layers[0].weight

        def forward(self, output, target):
            return (output @ self.weight - target).square().mean()

    return Tied(), lambda m: m


def _apart(ours, keep, name):
    """A closure names the module it holds."""
    return float((ours - keep[name.replace("module.", "")]).detach().abs().max())


def loss_trained(world, kind, name, dp, folder):
    mesh = mesh_of((2, 2), ("dp", "pp")) if dp else None
    total = COUNT * (2 if dp else 1)
    twin = linears()
    plain_loss, inner = make_loss(kind, twin)
    module = inner(plain_loss)
    every = list(dict.fromkeys([*(p for m in twin for p in m.parameters()), *module.parameters()]))
    norms = []
    optimizer = torch.optim.AdamW(every, lr=0.05)
    batches = data(total)
    for _ in range(3):
        optimizer.zero_grad()
        expected = plainly(twin, plain_loss, batches)
        norms.append(float(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in every]))))
        torch.nn.utils.clip_grad_norm_(every, 0.5)
        optimizer.step()
    layers = linears()
    loss_fn, inner = make_loss(kind, layers)
    options = {"mesh": mesh} if dp else {"group": world}
    out = []
    with Pipeline(layers, plan_of(name), loss_fn, timeout_s=PATIENCE_S, **options) as pipe:
        mine = batches[COUNT * pipe.world.replica :][:COUNT]
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            loss = float(pipe.step(mine, mine))
            out.append(abs(float(pipe.clip_grad_norm_(0.5)) - norms[step]))
            optimizer.step()
            if step == 1:
                save_checkpoint(folder, pipe, optimizer, step=2)
        out.append(abs(loss - expected[0]))
        keep = {f"{k}.{n}": p for k, m in enumerate([*twin, module]) for n, p in m.named_parameters()}
        for number, part in pipe.modules().items():
            out += [_apart(p, keep, f"{number}.{n}") for n, p in part.named_parameters()]
        has = LAYERS in pipe.modules()
    # The same from the checkpoint, under another plan.
    layers = linears(seed=7)
    loss_fn, _ = make_loss(kind, layers)
    other = "1f1b" if name != "1f1b" else "zb-h1"
    with Pipeline(layers, plan_of(other), loss_fn, timeout_s=PATIENCE_S, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        load_checkpoint(checkpoints(folder)[-1], pipe, optimizer)
        loss = float(pipe.step(mine, mine))
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        out.append(abs(loss - expected[0]))
        for number, part in pipe.modules().items():
            out += [_apart(p, keep, f"{number}.{n}") for n, p in part.named_parameters()]
    return has, max(out)


@pytest.mark.parametrize("kind", ["module", "closure", "method", "tied"])
@pytest.mark.parametrize("plan", some([("chimera", False), ("1f1b", True), ("1f1b", False), ("zb-v", False)], quick=2))
def test_a_loss_with_parameters_is_trained_like_a_layer(kind, plan, two, four, tmp_path):
    name, dp = plan
    results = (four if dp else two).run(loss_trained, kind, name, dp, tmp_path)
    assert any(has for has, _ in results)
    for _, apart in results:
        assert apart <= EXACT


def test_what_a_loss_only_refers_to_is_not_its_own():
    layers = linears()
    model = nn.Sequential(*layers)
    teacher = nn.Linear(2, 2).requires_grad_(False)
    assert loss_module(lambda o, t: model.training and square(o, t), layers) is None
    assert loss_module(lambda o, t: teacher(o).sum(), layers) is None
    assert loss_module(square, layers) is None
    assert loss_module(nn.MSELoss(), layers) is None

    def again(output, target):
        return again if target is None else square(output, target)

    assert loss_module(again, layers) is None


def without_loss(world, folder):
    texts = []
    for kind, saves in (("module", True), (None, False)):
        layers = linears()
        loss_fn = square if kind is None else make_loss(kind, layers)[0]
        with Pipeline(layers, plan_of("1f1b"), loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            try:
                if saves:
                    save_checkpoint(folder, pipe, step=1)
                else:
                    load_checkpoint(checkpoints(folder)[0], pipe)
            except OctoPipeError as error:
                texts.append(str(error))
    return texts


def test_a_checkpoint_of_another_loss_is_refused(two, tmp_path):
    for texts in two.run(without_loss, tmp_path):
        assert len(texts) == 1 and "use the same loss_fn" in texts[0]


# -- weights that nobody registers ----------------------------------------------------------------------


class Hides(nn.Module):
    """Multiplies by another layer's weight without registering it."""

    def __init__(self, other, how):
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        if how == "list":
            self.held = [other]
        elif how == "closure":
            self.held = lambda: other
        else:
            self.held = {"deep": (None, [other])}
        self.how = how

    def forward(self, x):
        held = {"list": lambda: self.held[0], "closure": self.held, "dict": lambda: self.held["deep"][1][0]}[self.how]()
        return torch.tanh(self.own(x)) @ held.weight


def hidden(world, how, at, source, name, dp):
    layers = linears()
    layers[at] = Hides(layers[source], how)
    twin = copy.deepcopy(layers)
    total = COUNT * (2 if dp else 1)
    plainly(twin, square, data(total))
    options = {"mesh": mesh_of((2, 2), ("dp", "pp"))} if dp else {"group": world}
    with Pipeline(layers, plan_of(name), square, timeout_s=PATIENCE_S, **options) as pipe:
        mine = data(total)[COUNT * pipe.world.replica :][:COUNT]
        try:
            pipe.step(mine, mine)
        except OctoPipeError as error:
            return str(error)
        named = {f"{k}.{n}": p for k, m in enumerate(twin) for n, p in m.named_parameters()}
        return worst((n, p.grad, named[n].grad) for n, p in pipe.named_parameters())


@pytest.mark.parametrize("how", ["list", "closure", "dict"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_weight_that_is_used_on_another_rank_in_secret_is_refused(how, name):
    ranks = Ranks(2)
    try:
        texts = ranks.run(hidden, how, 3, 0, name, False)
    finally:
        ranks.close()
    for text in texts:
        assert "uses parameter 0.weight" in text and "register it" in text


@pytest.mark.parametrize(("at", "source"), [(1, 0), (0, 1), (3, 2)])
@pytest.mark.parametrize("name", some(["chimera", "zb-h1", "1f1b"]))
@pytest.mark.parametrize("dp", [False, True])
def test_on_one_rank_a_hidden_weight_gets_the_gradient_of_all_its_uses(at, source, name, dp, two, four):
    for apart in (four if dp else two).run(hidden, "list", at, source, name, dp):
        assert isinstance(apart, float) and apart <= EXACT


class Inner(nn.Module):
    """Cuts its input off and differentiates it again: leaves of its own making."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        cut = x.detach().requires_grad_()
        return self.linear(x) + cut * 0.5


def leaves_of_its_own(world):
    layers = [Inner() for _ in range(LAYERS)]
    with Pipeline(layers, plan_of("1f1b"), square, group=world, timeout_s=PATIENCE_S) as pipe:
        return [float(pipe.step(data(), data())) for _ in range(3)]


def test_leaves_that_a_forward_makes_for_itself_are_its_own_business(two):
    assert len({tuple(losses) for losses in two.run(leaves_of_its_own)}) == 1


def from_factories(world, name):
    """Factories that hold one weight and give it to two layers on different ranks."""

    def build():
        torch.manual_seed(3)
        shared = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

        class Uses(nn.Module):
            def __init__(self, weight):
                super().__init__()
                self.weight = weight

            def forward(self, x):
                return torch.tanh(x @ self.weight)

        return [lambda: Uses(shared), *(lambda m=m: m for m in linears()[1:3]), lambda: Uses(shared)]

    twin = [make() for make in build()]
    plainly(twin, square, data())
    with Pipeline(build(), plan_of(name), square, group=world, timeout_s=PATIENCE_S) as pipe:
        pipe.step(data(), data())
        named = {f"{k}.{n}": p for k, m in enumerate(twin) for n, p in m.named_parameters()}
        return worst((n, p.grad, named[n].grad) for n, p in pipe.named_parameters())


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_a_weight_that_factories_hold_together_is_tied(name, two):
    for apart in two.run(from_factories, name):
        assert apart <= EXACT


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
            assert "is one with" in text and "put these layers on one rank" in text
    finally:
        ranks.close()


def test_a_constant_that_layers_share_across_ranks_is_fine(two):
    assert two.run(one_block, "block", False) == ["", ""]


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


# -- parameters that are replaced -----------------------------------------------------------------------


def replaced(world, name, dp):
    layers, twin = linears(), linears()
    total = COUNT * (2 if dp else 1)
    options = {"mesh": mesh_of((2, 2), ("dp", "pp"))} if dp else {"group": world}
    with Pipeline(layers, plan_of(name), square, timeout_s=PATIENCE_S, **options) as pipe:
        mine = data(total)[COUNT * pipe.world.replica :][:COUNT]
        pipe.step(mine, mine)
        pipe.zero_grad()
        torch.manual_seed(world.rank)  # every rank draws another one
        for module in pipe.modules().values():
            module.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        pipe.step(mine, mine)
        everywhere = {}
        for part in pipe.world.gather({n: p.detach() for n, p in pipe.named_parameters()}):
            everywhere |= part
        for k, module in enumerate(twin):
            module.weight.data.copy_(everywhere[f"{k}.weight"])
        plainly(twin, square, data(total))
        named = {f"{k}.{n}": p for k, m in enumerate(twin) for n, p in m.named_parameters()}
        apart = worst((n, p.grad, named[n].grad) for n, p in pipe.named_parameters())
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in named.values()]))
        return apart, abs(float(pipe.clip_grad_norm_(1e9)) - float(norm))


@pytest.mark.parametrize(("name", "dp"), [("1f1b", False), ("chimera", False), ("1f1b", True)])
def test_a_parameter_that_was_replaced_counts(name, dp, two, four):
    for errors in (four if dp else two).run(replaced, name, dp):
        assert max(errors) <= EXACT


def test_a_new_parameter_is_refused_by_name():
    plan = build_plan("1f1b", CostTable.uniform(num_layers=LAYERS), 1, 2)
    with Pipeline(linears(), plan, square, timeout_s=PATIENCE_S) as pipe:
        pipe.modules()[2].extra = nn.Parameter(torch.zeros(1))
        with pytest.raises(OctoPipeError, match=r"2\.extra is new since the Pipeline was made"):
            list(pipe.parameters())


# -- wrapped layers -------------------------------------------------------------------------------------


def wrapped(world, whose):
    mesh = mesh_of((2, 2), ("dp", "pp"))
    layers, twin = linears(), linears()
    group = mesh.get_group("dp") if whose == "ours" else mesh.get_group("pp")
    layers[mesh.get_local_rank("pp") * 2] = DistributedDataParallel(
        layers[mesh.get_local_rank("pp") * 2], process_group=group
    )
    batches = data(2 * COUNT)
    plainly(twin, square, batches)
    try:
        with Pipeline(layers, plan_of("1f1b"), square, mesh=mesh, timeout_s=PATIENCE_S) as pipe:
            mine = batches[COUNT * pipe.world.replica :][:COUNT]
            pipe.step(mine, mine)
            named = {f"{k}.{n}": p for k, m in enumerate(twin) for n, p in m.named_parameters()}
            return worst((n, p.grad, named[n.replace("module.", "")].grad) for n, p in pipe.named_parameters())
    except OctoPipeError as error:
        return str(error)


def test_ddp_over_the_pipelines_own_data_ranks_leaves_the_reduction_to_it(four):
    for apart in four.run(wrapped, "ours"):
        assert apart <= EXACT


def test_ddp_over_other_ranks_is_refused():
    ranks = Ranks(4)
    try:
        for text in ranks.run(wrapped, "others"):
            assert "is wrapped in DistributedDataParallel over ranks" in text and "dp_group=" in text
    finally:
        ranks.close()
