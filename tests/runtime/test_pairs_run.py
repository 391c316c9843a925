"""Plans with pairs on ep 2 x pp 2: the gradients of one process, whatever the plan, the exchange and the precision; a
rank that fails or hangs inside a pair is told on all ranks."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from effort import WHOLE

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from executor_models import WIDTH, Block  # noqa: E402
from mesh_checks import mesh_of  # noqa: E402
from random_plans import random_plan  # noqa: E402
from ranks import PATIENCE_S, Ranks  # noqa: E402
from test_pairs import with_pairs  # noqa: E402
from torch import nn  # noqa: E402
from twins import plain_gradients  # noqa: E402

import octopipe  # noqa: E402
from octopipe import OctoPipeError, Pipeline  # noqa: E402
from octopipe.plans.plan import Plan  # noqa: E402
from octopipe.runtime import turns  # noqa: E402
from octopipe.runtime.token_exchange import TokenExchange  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

NUM_LAYERS = 6
TOLERANCE = 1e-12
WAYS = ("all_to_all_single", "functional", "marked", "asynchronous", "rings")


class _Marked(torch.autograd.Function):
    """What a user's own exchange looks like: issued inside the block, waited for after it."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group, out = group, torch.empty_like(rows)
        with octopipe.exchange():
            work = group.alltoall_base(out, rows.contiguous(), [], [])
        work.wait()
        return out

    @staticmethod
    def backward(ctx, gradient):
        return _Marked.apply(gradient, ctx.group), None


class _Asynchronous(torch.autograd.Function):
    """An exchange whose `Work` the layer waits for itself."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group, out = group, torch.empty_like(rows)
        dist.all_to_all_single(out, rows.contiguous(), group=group, async_op=True).wait()
        return out

    @staticmethod
    def backward(ctx, gradient):
        return _Asynchronous.apply(gradient, ctx.group), None


def exchanged(rows, how, group, moved):
    """As many rows to each of two ranks."""
    if how == "rings":
        return moved(rows)
    if how == "functional":
        from torch.distributed import _functional_collectives as functional

        half = [rows.shape[0] // 2] * 2
        return functional.all_to_all_single_autograd(rows, half, half, group)
    if how == "marked":
        return _Marked.apply(rows, group)
    if how == "asynchronous":
        return _Asynchronous.apply(rows, group)
    return dist.nn.functional.all_to_all_single(torch.empty_like(rows), rows, group=group)


class Experts(nn.Module):
    """Two experts, each of which takes one half of the tokens; with an exchange, one of them is here."""

    def __init__(self, dtype=torch.float64, exchange=None):
        super().__init__()
        self.exchange = exchange
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH, dtype=dtype) * 0.5)

    def forward(self, x):
        rows = self.norm(x).reshape(-1, WIDTH)
        if self.exchange is None:
            done = torch.bmm(rows.unflatten(0, (2, -1)), self.experts).flatten(0, 1)
        else:
            there = self.exchange(rows)
            done = self.exchange(there @ self.experts[0])
        return x + torch.tanh(done).view_as(x)


def made(dtype, exchange, place):
    """The whole model, and this rank's part of it."""
    torch.manual_seed(3)
    whole = [Block().to(dtype) if k % 3 == 2 else Experts(dtype) for k in range(NUM_LAYERS)]
    mine = [Block().to(dtype) if k % 3 == 2 else Experts(dtype, exchange) for k in range(NUM_LAYERS)]
    for a, b in zip(whole, mine, strict=True):
        state = dict(a.state_dict())
        if isinstance(a, Experts):
            b.experts = nn.Parameter(a.experts.detach()[place : place + 1].clone())
            state["experts"] = b.experts.detach()
        b.load_state_dict(state)
    return whole, mine


def gradients(pipe):
    return {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}


def run_plans(world, plans, ways):
    """The worst relative error of every plan's gradients and losses in float64, and how often turns changed."""
    mesh = mesh_of((2, 2), ("ep", "pp"))
    group, place = mesh.get_group("ep"), mesh.get_local_rank("ep")
    moved = TokenExchange(group, "cpu", timeout_s=PATIENCE_S, chunk_bytes=512, chunks=3)
    handed = [0]
    before = turns._Pair.hand_over

    def counted(pair):
        handed[0] += 1
        before(pair)

    turns._Pair.hand_over = counted
    found = []
    try:
        for plan, how in zip(plans, ways, strict=True):
            whole, mine = made(torch.float64, lambda rows, how=how: exchanged(rows, how, group, moved), place)
            count = plan.num_micro_batches
            data = [torch.randn(2, 4, WIDTH, dtype=torch.float64) for _ in range(2 * count)]
            expected, losses = plain_gradients(whole, data, data, F.mse_loss)
            handed[0], worst = 0, 0.0
            with Pipeline(
                mine, plan, F.mse_loss, mesh=mesh, sharded={"ep": ["*.experts"]}, timeout_s=PATIENCE_S
            ) as pipe:
                part = slice(pipe.world.replica * count, (pipe.world.replica + 1) * count)
                for _ in range(2):
                    for p in pipe.parameters():
                        p.grad = None
                    loss = float(pipe.step(data[part], data[part]))
                    worst = max(worst, abs(loss - sum(losses) / len(losses)))
                    for name, p in pipe.named_parameters():
                        want = expected[name]
                        want = want[place : place + 1] if name.endswith("experts") else want
                        worst = max(worst, float((p.grad - want).abs().max() / want.abs().max()))
            found.append((worst, handed[0]))
    finally:
        turns._Pair.hand_over = before
        moved.close()
    return found


def paired_plans(seeds) -> list[Plan]:
    """Random plans (recomputation, copies, W held back) with as many random pairs as they take."""
    out = []
    for seed in seeds:
        rng = random.Random(seed)
        while True:
            plan = random_plan(rng, num_ranks=2, num_layers=NUM_LAYERS, num_micro_batches=rng.randint(2, 4))
            plan = with_pairs(rng, plan, share=rng.choice((0.5, 1.0)))
            if plan.pairs:
                break
        out.append(plan)
    return out


def check(ranks: Ranks, seeds) -> None:
    plans = paired_plans(seeds)
    ways = [WAYS[seed % len(WAYS)] for seed in seeds]
    results = ranks.run(run_plans, plans, ways)
    for k, seed in enumerate(seeds):
        assert max(rank[k][0] for rank in results) <= TOLERANCE, (seed, ways[k])
    assert sum(rank[k][1] for rank in results for k in range(len(plans))) > len(plans), "hardly any exchange was found"


def test_random_plans_with_pairs_give_the_gradients_of_one_process(four) -> None:
    check(four, range(len(WAYS)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(5, 55, 10))
def test_fifty_more_random_plans_with_pairs(first: int, four) -> None:
    check(four, range(first, first + 10))


# -- precision ------------------------------------------------------------------------------------------


def both_ways(world, plan, dtype, options):
    """Gradients with pairs and without, same data and weights: the worst difference, and their dtypes."""
    mesh = mesh_of((2, 2), ("ep", "pp"))
    group, place = mesh.get_group("ep"), mesh.get_local_rank("ep")
    found = []
    for each in (plan, replace(plan, pairs=frozenset())):
        _, mine = made(dtype, lambda rows: exchanged(rows, "all_to_all_single", group, None), place)
        torch.manual_seed(11)
        data = [torch.randn(2, 4, WIDTH, dtype=dtype) for _ in range(plan.num_micro_batches)]
        with Pipeline(
            mine, each, F.mse_loss, mesh=mesh, sharded={"ep": ["*.experts"]}, timeout_s=PATIENCE_S, **options
        ) as pipe:
            loss = float(pipe.step(data, data))
            found.append((loss, gradients(pipe)))
    (loss, paired), (plain_loss, plain) = found
    assert paired.keys() == plain.keys() and all(g is not None for g in paired.values())
    worst = max(float((paired[k].float() - plain[k].float()).abs().max()) for k in plain)
    return worst + abs(loss - plain_loss), sorted({str(g.dtype) for g in paired.values()})


@pytest.mark.parametrize(
    ("dtype", "options", "kept"),
    [
        (torch.float32, {"autocast": torch.bfloat16}, "torch.float32"),
        (torch.bfloat16, {"main_grads": True}, "torch.float32"),
        (torch.bfloat16, {}, "torch.bfloat16"),
    ],
)
def test_precision_is_the_same_with_pairs_as_without(dtype, options, kept, four) -> None:
    plan = with_pairs(random.Random(2), build_plan("zb-v", octopipe.CostTable.uniform(num_layers=6), 2, 4), share=1.0)
    assert plan.pairs
    for worst, dtypes in four.run(both_ways, plan, dtype, options):
        assert worst == 0.0 and dtypes == [kept]


def test_recomputed_stages_take_part_in_pairs(four) -> None:
    """Stages that recompute, with R ops of their own beside and inside pairs."""
    rng, plans = random.Random(77), []
    while len(plans) < (3 if WHOLE else 2):
        plan = random_plan(rng, num_ranks=2, num_layers=NUM_LAYERS, num_micro_batches=3)
        plan = with_pairs(rng, plan, share=1.0)
        recomputes = {s for s, stage in enumerate(plan.stages) if stage.recompute}
        if any(op.stage in recomputes for pair in plan.pairs for op in pair):
            plans.append(plan)
    for rank in four.run(run_plans, plans, ["all_to_all_single"] * len(plans)):
        assert max(error for error, _ in rank) <= TOLERANCE


# -- failures -------------------------------------------------------------------------------------------

TIMEOUT_S = 30.0


def misbehaving(world, plan, behaviour, how):
    """The last rank misbehaves inside a pair; returns what this rank says, and when."""
    mesh = mesh_of((2, 2), ("ep", "pp"))
    group, place = mesh.get_group("ep"), mesh.get_local_rank("ep")
    moved = TokenExchange(group, "cpu", timeout_s=PATIENCE_S) if how == "rings" else None
    calls = [0]

    def exchange(rows):
        if turns._running is not None and world.rank == 3:
            calls[0] += 1
            if calls[0] == 9:
                if behaviour == "raises":
                    raise ValueError("no such expert")
                time.sleep(PATIENCE_S)
        return exchanged(rows, how, group, moved)

    _, mine = made(torch.float64, exchange, place)
    data = [torch.randn(2, 4, WIDTH, dtype=torch.float64) for _ in range(plan.num_micro_batches)]
    timeout_s = TIMEOUT_S if behaviour == "hangs" else PATIENCE_S
    pipe = Pipeline(mine, plan, F.mse_loss, mesh=mesh, sharded={"ep": ["*.experts"]}, timeout_s=timeout_s)
    began = time.monotonic()
    try:
        for _ in range(4):
            began = time.monotonic()
            pipe.step(data, data)
    except (OctoPipeError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "none", "", 0.0


def misbehaved(behaviour: str, how: str, ranks_asked: range) -> list[tuple[bool, object]]:
    """What these ranks say."""
    plan = build_plan("1f1b", octopipe.CostTable.uniform(num_layers=NUM_LAYERS), 2, 4)
    plan = with_pairs(random.Random(1), plan, share=1.0)
    ranks = Ranks(4)
    try:
        ranks.start(misbehaving, plan, behaviour, how)
        return ranks.results(of=ranks_asked)
    finally:
        ranks.kill()


@pytest.mark.parametrize("how", ["all_to_all_single", "rings"])
def test_an_error_inside_a_pair_is_told_on_all_ranks_in_its_words(how: str) -> None:
    said = misbehaved("raises", how, range(4))
    assert said[3] == (True, ("ValueError", "no such expert", said[3][1][2])), said
    for worked, (name, text, seconds) in said[:3]:
        assert worked and name == "PeerError" and "no such expert" in text, said
        assert seconds < PATIENCE_S


def test_a_rank_that_hangs_inside_a_pair_is_told_in_time() -> None:
    said = misbehaved("hangs", "all_to_all_single", range(3))
    for worked, (name, text, seconds) in said:
        assert worked and name == "PeerError" and seconds < PATIENCE_S, said
        assert "exchange of tokens" in text or "did not" in text, said
