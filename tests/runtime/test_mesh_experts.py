"""Expert parallelism beside a pipeline: gradients of experts and of routers' losses are those of one process."""

from __future__ import annotations

import pytest
from effort import some
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from executor_models import WIDTH, Block  # noqa: E402
from injected_loss import InjectedLoss  # noqa: E402
from mesh_checks import TOLERANCE, mesh_of, norm_of, plan_for, worst_error_of  # noqa: E402
from torch import nn  # noqa: E402
from twins import plain_gradients  # noqa: E402

from octopipe.runtime.pipeline import Pipeline  # noqa: E402

# -- expert parallelism ---------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two experts a token may go to (by its sum); with a group, one of them is here and tokens travel to it."""

    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH, dtype=torch.float64) * 0.5)

    def forward(self, x):
        from torch.distributed.nn.functional import all_to_all_single

        flat = self.norm(x).reshape(-1, WIDTH)
        choice = (flat[:, 0] > 0).long()
        order = torch.argsort(choice, stable=True)
        tokens, counts = flat[order], torch.bincount(choice, minlength=2)
        if self.group is None:
            parts = tokens.split(counts.tolist())
            done = torch.cat([part @ w for part, w in zip(parts, self.experts)])
        else:
            own = self.experts.to_local() if hasattr(self.experts, "to_local") else self.experts
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts, group=self.group)
            here = tokens.new_empty(int(theirs.sum()), WIDTH)
            here = all_to_all_single(here, tokens, theirs.tolist(), counts.tolist(), group=self.group)
            done = all_to_all_single(
                torch.empty_like(tokens), here @ own[0], counts.tolist(), theirs.tolist(), group=self.group
            )
        return x + torch.tanh(done[torch.argsort(order)]).view_as(x)


def expert_parallel(world, plan, how):
    mesh = mesh_of((2, 2), ("ep", "pp"))
    group, place = mesh.get_group("ep"), mesh.get_local_rank("ep")
    torch.manual_seed(3)
    whole = [Block().double() if k % 2 else Experts() for k in range(6)]
    mine = [Block().double() if k % 2 else Experts(group) for k in range(6)]
    for a, b in zip(whole, mine):
        state = a.state_dict()
        if isinstance(a, Experts):
            b.experts = nn.Parameter(a.experts.detach()[place : place + 1].clone())
            state["experts"] = b.experts.detach()
        b.load_state_dict(state)
        if isinstance(a, Experts) and how == "DTensor":
            from torch.distributed.tensor import DTensor, Shard

            b.experts = nn.Parameter(DTensor.from_local(b.experts.detach(), mesh["ep"], [Shard(0)]))
    count = plan.num_micro_batches
    data = [torch.randn(2, 5, WIDTH, dtype=torch.float64) for _ in range(2 * count)]
    loss_fn = lambda o, t: F.mse_loss(o, t)  # noqa: E731
    expected, losses = plain_gradients(whole, data, data, loss_fn)
    sharded = {"ep": ["*.experts"]} if how == "plain" else None
    with Pipeline(mine, plan, loss_fn, mesh=mesh, sharded=sharded, timeout_s=PATIENCE_S) as pipe:
        part = slice(pipe.world.replica * count, (pipe.world.replica + 1) * count)
        loss = float(pipe.step(data[part], data[part]))
        cut = how == "plain"
        here = {n: g[place : place + 1] if cut and n.endswith("experts") else g for n, g in expected.items()}
        worst = worst_error_of(pipe, here)
        norm = float(pipe.clip_grad_norm_(1e9))
    return worst, abs(loss - sum(losses) / len(losses)), abs(norm / norm_of(expected) - 1)


@pytest.mark.parametrize(("name", "how"), [("1f1b", "plain"), ("zb-h1", "plain"), ("1f1b", "DTensor")])
def test_experts_over_ep_give_the_gradients_of_one_process(name, how, four):
    for errors in four.run(expert_parallel, plan_for(name, num_layers=6), how):
        assert max(errors) <= TOLERANCE


class BalancedExperts(Experts):
    """Experts whose router has a loss of its own."""

    scale = 1.0

    def forward(self, x):
        out = super().forward(x)
        return InjectedLoss.apply(out, (self.norm(x) ** 2).mean() + (self.experts**2).mean(), self.scale)


def balanced(world, plan):
    mesh = mesh_of((2, 2), ("ep", "pp"))
    group, place = mesh.get_group("ep"), mesh.get_local_rank("ep")
    torch.manual_seed(3)
    whole = [Block().double() if k % 2 else BalancedExperts() for k in range(6)]
    mine = [Block().double() if k % 2 else BalancedExperts(group) for k in range(6)]
    count = plan.num_micro_batches
    for a, b in zip(whole, mine):
        state = a.state_dict()
        if isinstance(a, Experts):
            b.experts = nn.Parameter(a.experts.detach()[place : place + 1].clone())
            state["experts"] = b.experts.detach()
            # A loss that a layer adds by itself counts as it is: its share of the mean is the layer's to give. Half of
            # the experts are here, and the mean over the expert ranks is taken of all gradients.
            a.scale, b.scale = 1 / (2 * count), 1 / count
        b.load_state_dict(state)
    data = [torch.randn(2, 5, WIDTH, dtype=torch.float64) for _ in range(2 * count)]
    loss_fn = lambda o, t: F.mse_loss(o, t)  # noqa: E731
    expected, _ = plain_gradients(whole, data, data, loss_fn)
    with Pipeline(mine, plan, loss_fn, mesh=mesh, sharded={"ep": ["*.experts"]}, timeout_s=PATIENCE_S) as pipe:
        part = slice(pipe.world.replica * count, (pipe.world.replica + 1) * count)
        pipe.step(data[part], data[part])
        here = {n: g[place : place + 1] if n.endswith("experts") else g for n, g in expected.items()}
        return worst_error_of(pipe, here)


@pytest.mark.parametrize("name", some(["zb-h1", "1f1b", "interleaved"]))
def test_losses_of_expert_layers_count_as_they_are(name, four):
    """The mean over micro-batches is the layer's own to take; over expert ranks all gradients are averaged."""
    assert max(four.run(balanced, plan_for(name, num_layers=6))) <= TOLERANCE
