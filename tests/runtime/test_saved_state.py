"""What layers and optimizers remember: it survives a checkpoint and a switch of plans, whatever groups a rank makes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
from ranks import PATIENCE_S, Ranks, shared_ranks  # noqa: E402
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Plan, Stage, parse_orders  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.world import World  # noqa: E402
from octopipe.runtime.training.adapt import switch  # noqa: E402
from octopipe.runtime.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

WIDTH, LAYERS, COUNT = 5, 6, 4


@pytest.fixture(scope="module")
def two():
    return shared_ranks(2)


class Layer(nn.Module):
    """A linear whose output is scaled by a counter that no state dict holds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("seen", torch.ones((), dtype=torch.float64), persistent=False)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.seen


def layers():
    torch.manual_seed(1)
    return [Layer() for _ in range(LAYERS)]


def data():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, WIDTH, dtype=torch.float64, generator=generator) for _ in range(COUNT)]


def loss_fn(output, target):
    return (output - target).square().mean()


def plan(name):
    """Two placements: the first rank's layers of one are the last rank's of the other."""
    if name == "there":
        return build_plan("1f1b", CostTable.uniform(num_layers=LAYERS), 2, COUNT)
    stages = (Stage(first=0, stop=2, rank=1), Stage(first=2, stop=LAYERS, rank=0))
    m = range(COUNT)
    orders = [[f"1{kind}{k}" for k in m for kind in "FB"], [f"0{kind}{k}" for kind in "FB" for k in m]]
    return Plan(
        num_layers=LAYERS, num_ranks=2, num_micro_batches=COUNT, stages=stages, orders=parse_orders(orders)
    ).check()


def rate(name):
    """Every layer has a learning rate of its own, and biases another."""
    return 0.01 * (1 + int(name.split(".")[0])) * (3 if name.endswith("bias") else 1)


def optimizer_of(named):
    """One group per learning rate that there is on this rank, the largest first: other groups under every plan."""
    by_rate = {}
    for name, p in named:
        by_rate.setdefault(rate(name), []).append(p)
    groups = [{"params": params, "lr": lr} for lr, params in sorted(by_rate.items(), reverse=True)]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def plainly(steps, decay_at):
    """One process: losses, with every rate halved after one step."""
    model = layers()
    optimizer = optimizer_of((f"{k}.{n}", p) for k, m in enumerate(model) for n, p in m.named_parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for x in data():
            out = x
            for layer in model:
                out = layer(out)
            loss = loss_fn(out, x)
            (loss / COUNT).backward()
            total += float(loss.detach())
        losses.append(total / COUNT)
        optimizer.step()
        if step == decay_at:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            for layer in model:
                layer.seen.add_(0.25)
    return losses


def stepped(pipe, optimizer, losses):
    optimizer.zero_grad()
    losses.append(float(pipe.step(data(), data())))
    optimizer.step()


def halve(pipe, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    for module in pipe.modules().values():
        module.seen.add_(0.25)


def with_switches(world):
    losses = []
    make_pipe = lambda plan: Pipeline(layers(), plan, loss_fn, group=world, timeout_s=PATIENCE_S)  # noqa: E731
    pipe = make_pipe(plan("there"))
    optimizer = optimizer_of(pipe.named_parameters())
    for step in range(6):
        stepped(pipe, optimizer, losses)
        if step == 1:
            halve(pipe, optimizer)
        optimizer.zero_grad()
        if step % 2:
            pipe, optimizer = switch(
                pipe, optimizer, plan("here" if step % 4 == 1 else "there"), make_pipe=make_pipe,
                make_optimizer=lambda pipe: optimizer_of(pipe.named_parameters()),
            )  # fmt: skip
    pipe.close()
    return losses


def test_a_switch_keeps_every_parameters_rate_and_every_buffer(two):
    for losses in two.run(with_switches):
        assert losses == pytest.approx(plainly(6, 1), rel=1e-11)


def with_checkpoint(world, folder):
    losses = []
    for name, load in (("there", False), ("here", True)):
        with Pipeline(layers(), plan(name), loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            optimizer = optimizer_of(pipe.named_parameters())
            if load:
                load_checkpoint(checkpoints(folder)[-1], pipe, optimizer)
                for module in pipe.modules().values():
                    module.seen.add_(0.25)  # as in plain torch, what no state dict holds is the caller's
            for step in range(3):
                stepped(pipe, optimizer, losses)
                if not load and step == 1:
                    halve(pipe, optimizer)
            save_checkpoint(folder, pipe, optimizer, step=3)
    return losses


def test_a_decayed_rate_goes_on_where_it_was_under_another_plan(two, tmp_path):
    for losses in two.run(with_checkpoint, tmp_path):
        assert losses == pytest.approx(plainly(6, 1), rel=1e-11)


def lost_gradient(world):
    make_pipe = lambda plan: Pipeline(layers(), plan, loss_fn, group=world, timeout_s=PATIENCE_S)  # noqa: E731
    pipe = make_pipe(plan("there"))
    pipe.step(data(), data())
    with pytest.raises(OctoPipeError, match="has a gradient, which switching plans would lose"):
        switch(pipe, None, plan("here"), make_pipe=make_pipe)
    pipe.close()


def test_gradients_are_never_lost_in_a_switch(two):
    two.run(lost_gradient)


# -- one rank ------------------------------------------------------------------------------------------


def alone(model):
    single = build_plan("1f1b", CostTable.uniform(num_layers=len(model)), 1, 2)
    return Pipeline(model, single, loss_fn, group=World(None), timeout_s=PATIENCE_S)


def test_groups_that_mix_what_had_different_rates_are_refused(tmp_path):
    with alone(layers()[:2]) as pipe:
        optimizer = optimizer_of(pipe.named_parameters())
        pipe.step(data()[:2], data()[:2])
        optimizer.step()
        save_checkpoint(tmp_path, pipe, optimizer, step=1)
        mixed = torch.optim.AdamW(pipe.parameters(), lr=0.5)
        with pytest.raises(OctoPipeError, match=r"0.linear.weight and 0.linear.bias .* lr 0.01 and 0.03"):
            load_checkpoint(checkpoints(tmp_path)[0], pipe, mixed)
        assert mixed.param_groups[0]["lr"] == 0.5


class MadeLate(nn.Module):
    """Has a buffer only after its first forward, and another one that is None until then."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("seen", None)

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", 1 + x.detach().abs().mean())
        self.scale = self.scale * 1.01
        self.seen = torch.zeros_like(self.scale) if self.seen is None else self.seen + 1
        return torch.tanh(self.inner(x)) * self.scale + self.seen


def late_layers():
    torch.manual_seed(0)
    return [MadeLate() for _ in range(2)]


@pytest.mark.parametrize("way", ["switch", "checkpoint"])
def test_buffers_that_a_forward_has_made_go_on_with_their_values(way, tmp_path):
    batch = [torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))] * 2
    with alone(late_layers()) as pipe:
        wanted = [float(pipe.step(batch, batch)) for _ in range(4)]
    pipe = alone(late_layers())
    losses = [float(pipe.step(batch, batch)) for _ in range(2)]
    pipe.zero_grad()
    if way == "switch":
        pipe, _ = switch(pipe, None, pipe.plan, make_pipe=lambda plan: alone(late_layers()))
    else:
        save_checkpoint(tmp_path, pipe, step=2)
        pipe.close()
        pipe = alone(late_layers())
        load_checkpoint(checkpoints(tmp_path)[0], pipe)
    with pipe:
        assert losses + [float(pipe.step(batch, batch)) for _ in range(2)] == wanted


def test_an_entry_that_no_layer_has_a_place_for_is_named():
    with alone(late_layers()) as pipe:
        state = pipe.state_dict()
        pipe.load_state_dict({**state, "7.weight": torch.zeros(1)})
        with pytest.raises(OctoPipeError, match=r"an entry 1\.inner\.wait, which layer 1 does not"):
            pipe.load_state_dict({**state, "1.inner.wait": torch.zeros(1)})


class Nested(torch.optim.SGD):
    """Keeps lists and dicts of tensors, and a number in its groups, as Shampoo, Prodigy and schedule-free do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("factors", [torch.zeros(2, dtype=p.dtype), {"inner": torch.zeros(1, dtype=p.dtype)}])
                state["factors"][0] += p.grad.norm()
                state["factors"][1]["inner"] += 1
                p.data.sub_(group["lr"] * p.grad / group["k"] / (1 + state["factors"][0][0]))


def test_state_in_lists_and_numbers_in_groups_come_back(tmp_path):
    losses = {}
    for saves in (False, True):
        pipe = alone(layers()[:2])
        optimizer = Nested(pipe.parameters(), lr=0.5)
        out = losses[saves] = []
        for step in range(4):
            if saves and step == 2:
                save_checkpoint(tmp_path, pipe, optimizer, step=2)
                pipe.close()
                pipe = alone(layers()[:2])
                optimizer = Nested(pipe.parameters(), lr=0.25)
                load_checkpoint(checkpoints(tmp_path)[0], pipe, optimizer)
                assert optimizer.param_groups[0]["k"] == 2 and optimizer.param_groups[0]["lr"] == 0.5
            optimizer.zero_grad()
            out.append(float(pipe.step(data()[:2], data()[:2])))
            optimizer.step()
        pipe.close()
    assert losses[False] == losses[True]


@dataclass
class Recipe:
    scale: float
    amax: torch.Tensor


class Remembers(Layer):
    """Extra state that is an object."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


@pytest.mark.parametrize(
    "kept", [{"a": 1, "b": torch.ones(2)}, Recipe(2.0, torch.ones(3)), [Recipe(1.0, torch.zeros(1))], (None, "text")]
)
def test_extra_state_of_plain_values_and_dataclasses_comes_back(kept, tmp_path):
    with alone([Remembers(kept)]) as pipe:
        save_checkpoint(tmp_path, pipe, step=1)
    with alone([Remembers(None)]) as pipe:
        load_checkpoint(checkpoints(tmp_path)[0], pipe)
        found = pipe.modules()[0].kept
    assert type(found) is type(kept) and str(found) == str(kept)


class Opaque:
    pass


def test_extra_state_that_could_never_be_loaded_is_refused_before_anything_is_written(tmp_path):
    why = pytest.raises(OctoPipeError, match=r"no checkpoint was written: 1\._extra_state holds a Opaque")
    with alone([Layer(), Remembers(Opaque())]) as pipe, why:
        save_checkpoint(tmp_path, pipe, step=1)
    assert not list(tmp_path.iterdir())


def refused_together(world, folder):
    model = [*layers()[:5], Remembers(Opaque())]
    with Pipeline(model, plan("there"), loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        try:
            save_checkpoint(folder, pipe, step=1)
        except OctoPipeError as error:
            return str(error)


def test_every_rank_refuses_what_one_cannot_save(tmp_path):
    ranks = Ranks(2)
    try:
        texts = ranks.run(refused_together, tmp_path)
    finally:
        ranks.close()
    assert all("5._extra_state holds a Opaque" in text for text in texts)
