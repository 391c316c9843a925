"""Experts over several ranks whose routers have a loss of their own, in the ways in which people write it, against one
process: loss and gradients agree, or the way is refused by name."""

from __future__ import annotations

import pytest
from effort import some
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from injected_loss import InjectedLoss  # noqa: E402
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Plan, Stage, parse_orders  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

WIDTH, COUNT, LAYERS, EXPERTS, WEIGHT = 6, 4, 6, 2, 0.3
TOLERANCE = 1e-12


class Routed(nn.Module):
    """Top-1 routing with Switch's balance loss; with a group, one of the experts is here and tokens travel to it."""

    def __init__(self, way, bag, group=None):
        super().__init__()
        self.way, self.bag, self.group, self.scale = way, bag, group, 1.0
        self.gate = nn.Linear(WIDTH, EXPERTS, dtype=torch.float64)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64) * 0.5)
        if way == "attribute":
            self.aux = torch.zeros((), dtype=torch.float64)

    def forward(self, x):
        x, before = x if isinstance(x, tuple) else (x, 0.0)
        flat = x.reshape(-1, WIDTH)
        share = self.gate(flat).softmax(-1)
        choice = share.argmax(-1)
        aux = WEIGHT * EXPERTS * (share.mean(0) * F.one_hot(choice, EXPERTS).double().mean(0)).sum()
        order = torch.argsort(choice, stable=True)
        done = self._experts(flat[order], torch.bincount(choice, minlength=EXPERTS))[torch.argsort(order)]
        out = x + torch.tanh(done * share.gather(1, choice[:, None])).view_as(x)
        if self.way == "injected":
            return InjectedLoss.apply(out, aux, self.scale)
        if self.way == "returned":
            return out, before + aux
        if self.way == "attribute":
            self.aux = aux
        elif self.way == "list":
            self.bag.append(aux)
        return out

    def _experts(self, tokens, counts):
        from torch.distributed.nn.functional import all_to_all_single

        if self.group is None:
            return torch.cat([part @ w for part, w in zip(tokens.split(counts.tolist()), self.experts)])
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        here = tokens.new_empty(int(theirs.sum()), WIDTH)
        here = all_to_all_single(here, tokens, theirs.tolist(), counts.tolist(), group=self.group)
        back = torch.empty_like(tokens)
        return all_to_all_single(back, here @ self.experts[0], counts.tolist(), theirs.tolist(), group=self.group)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        if isinstance(x, tuple):
            return torch.tanh(self.linear(x[0])), x[1]
        return torch.tanh(self.linear(x))


def build(way, routers=(0, 2, 4), group=None):
    """Layers and their loss; weights are those of one seed."""
    torch.manual_seed(5)
    bag = []
    layers = [Routed(way, bag, group) if k in routers else Dense() for k in range(LAYERS)]

    def loss_fn(output, target):
        own = 0.0
        if isinstance(output, tuple):
            output, own = output
        elif way == "attribute":
            own = sum(layers[k].aux for k in routers)
        elif way == "list":
            own = sum(bag)
            bag.clear()
        return F.mse_loss(output, target) + own

    return layers, loss_fn


def plain(way, data, routers=(0, 2, 4)):
    """One process over all micro-batches: losses and gradients."""
    layers, loss_fn = build(way, routers)
    losses = []
    for x in data:
        value = x
        for layer in layers:
            layer.scale = 1 / len(data)
            value = layer(value)
        loss = loss_fn(value, x)
        losses.append(float(loss.detach()))
        (loss / len(data)).backward()
    return losses, {f"{k}.{n}": p.grad for k, layer in enumerate(layers) for n, p in layer.named_parameters()}


def batches(count):
    torch.manual_seed(9)
    return [torch.randn(2, 5, WIDTH, dtype=torch.float64) for _ in range(count)]


def parallel(world, way, plan, shape, names):
    """Loss and largest difference of a gradient from one process's, with experts over `ep`."""
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    group, place = mesh.get_group("ep"), mesh.get_local_rank("ep")
    layers, loss_fn = build(way, group=group)
    for layer in layers:
        if isinstance(layer, Routed):
            layer.experts = nn.Parameter(layer.experts.detach()[place : place + 1].clone())
            layer.scale = 1 / COUNT
    replicas = world.size // plan.num_ranks
    data = batches(replicas * COUNT)
    losses, expected = plain(way, data)
    with Pipeline(layers, plan, loss_fn, mesh=mesh, sharded={"ep": ["*.experts"]}, timeout_s=PATIENCE_S) as pipe:
        mine = data[pipe.world.replica * COUNT :][:COUNT]
        loss = float(pipe.step(mine, mine))
        worst = 0.0
        for name, p in pipe.named_parameters():
            want = expected[name][place : place + 1] if name.endswith("experts") else expected[name]
            worst = max(worst, float((p.grad - want).abs().max()))
    return loss - sum(losses) / len(losses), worst


def made(system, num_ranks):
    return build_plan(system, CostTable.uniform(num_layers=LAYERS), num_ranks, COUNT)


@pytest.mark.parametrize("way", ["returned", "injected"])
@pytest.mark.parametrize("system", some(["zb-v", "1f1b", "interleaved"]))
def test_what_travels_with_the_output_or_the_graph_is_as_in_one_process(way, system, four):
    for loss, worst in four.run(parallel, way, made(system, 2), (2, 2), ("ep", "pp")):
        assert abs(loss) <= TOLERANCE
        assert worst <= TOLERANCE


@pytest.mark.parametrize("way", some(["returned", "injected", "attribute", "list"], quick=["injected", "list"]))
def test_data_and_expert_ranks_without_a_cut_take_every_way(way, four):
    """One stage: the loss follows its layers at once, wherever they leave theirs."""
    for loss, worst in four.run(parallel, way, made("gpipe", 1), (2, 2, 1), ("dp", "ep", "pp")):
        assert abs(loss) <= TOLERANCE
        assert worst <= TOLERANCE


def refused(world, way, system):
    layers, loss_fn = build(way)
    data = batches(COUNT)
    with Pipeline(layers, made(system, 2), loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        try:
            return f"loss {float(pipe.step(data, data))}"
        except OctoPipeError as error:
            return str(error)


@pytest.mark.parametrize("way", ["attribute", "list"])
@pytest.mark.parametrize("system", ["1f1b", "zb-v", "interleaved"])
def test_what_the_loss_would_pick_up_elsewhere_is_refused_by_name(way, system, two):
    place = "0.aux" if way == "attribute" else "0.bag"
    texts = two.run(refused, way, system)
    assert any(f"leaves a value in {place}" in t and "loss_fn can reach it" in t for t in texts)
    assert all("leaves a value in" in t for t in texts)  # the other rank hears of it


def last_stage(world, way):
    layers, loss_fn = build(way, routers=(4,))
    data = batches(COUNT)
    losses, expected = plain(way, data, routers=(4,))
    with Pipeline(layers, made("1f1b", 2), loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        loss = float(pipe.step(data, data))
        worst = max(float((p.grad - expected[n]).abs().max()) for n, p in pipe.named_parameters())
    return loss - sum(losses) / COUNT, worst


@pytest.mark.parametrize("way", ["attribute", "list"])
def test_in_the_stage_of_the_loss_they_are_as_in_one_process(way, two):
    for loss, worst in two.run(last_stage, way):
        assert abs(loss) <= TOLERANCE
        assert worst <= TOLERANCE


def test_on_one_rank_with_several_stages_they_are_refused_too():
    """Other micro-batches run between a layer and its loss: the attribute has another one's value then."""
    layers, loss_fn = build("attribute")
    stages = (Stage(first=0, stop=3, rank=0), Stage(first=3, stop=LAYERS, rank=0))
    orders = [["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]]
    plan = Plan(num_layers=LAYERS, num_ranks=1, num_micro_batches=2, stages=stages, orders=parse_orders(orders)).check()
    data = batches(2)
    with Pipeline(layers, plan, loss_fn) as pipe, pytest.raises(OctoPipeError, match=r"leaves a value in 0\.aux"):
        pipe.step(data, data)


def test_a_balance_loss_is_each_micro_batchs_own():
    """Of two explanations for a loss unlike one process's: Switch's balance loss is no mean over tokens, so that of a
    joined batch is another number than the mean over its micro-batches. The pipeline's is the latter."""
    data = batches(COUNT)
    losses, _ = plain("returned", data)
    (joined,), _ = plain("returned", [torch.cat(data)])
    layers, loss_fn = build("returned")
    with Pipeline(layers, made("gpipe", 1), loss_fn) as pipe:
        loss = float(pipe.step(data, data))
    assert abs(loss - sum(losses) / COUNT) <= TOLERANCE
    assert abs(loss - joined) > 1e-4


class Counts(nn.Module):
    def __init__(self, keeps):
        super().__init__()
        self.linear, self.keeps, self.calls = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), keeps, 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.seen += 1
        self.calls += self.keeps
        return self.linear(x)


def copies_that_count(world, system, keeps):
    import warnings

    plan = build_plan(system, CostTable.uniform(num_layers=4), 2, COUNT)
    layers = [Counts(keeps) for _ in range(4)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Pipeline(layers, plan, F.mse_loss, group=world, timeout_s=PATIENCE_S) as pipe:
            pipe.step(batches(COUNT), batches(COUNT))
    return [str(w.message) for w in said if "hold a copy of its layer" in str(w.message)]


@pytest.mark.parametrize(("system", "keeps", "told"), [("chimera", 1, True), ("chimera", 0, False), ("zb-v", 1, False)])
def test_a_layer_that_counts_and_is_held_twice_is_told(system, keeps, told, two):
    """Each copy sees its own micro-batches; buffers are averaged, a counter in an attribute is not."""
    for texts in two.run(copies_that_count, system, keeps):
        assert bool(texts) == told
