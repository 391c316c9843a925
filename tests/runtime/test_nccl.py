"""The executor over NCCL itself: real communicators, real streams, also where the ranks share one GPU.

NCCL refuses two ranks on one GPU of one host. Ranks that name different hosts (`NCCL_HOSTID`) pass, and talk over
sockets of the loopback; under MPS they compute side by side. Slow, but every call is NCCL's. Skipped where there is
no GPU.
"""

from __future__ import annotations

import os
import random
import time

import pytest

torch = pytest.importorskip("torch")

from executor_models import KINDS, NUM_LAYERS, Case, make  # noqa: E402
from random_plans import random_plan  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch import nn  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.base.errors import NotApplicableError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Plan, Stage, parse_orders  # noqa: E402
from octopipe.runtime.measure.mps import Mps  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.search.systems import build_plan, systems  # noqa: E402
from octopipe.simulation.lowering import CHANNELS  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("NCCL needs a GPU", allow_module_level=True)

TOLERANCE = 1e-12
TIMEOUT_S = 30.0
PLANS = 24


@pytest.fixture(scope="module", params=[2, 4])
def world(request):
    """Ranks whose default process group is NCCL's, as under torchrun."""
    with Mps.start(num_ranks=request.param) as mps:
        ranks = Ranks(request.param, "nccl", lambda rank: environment(mps, rank))
        yield ranks
        ranks.close()


def environment(mps: Mps, rank: int) -> dict[str, str]:
    alone = torch.cuda.device_count() == 1
    one_gpu = {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if alone else {}
    early = {"CUDA_MODULE_LOADING": "EAGER"}  # as octopipe.runtime sets it under torchrun
    return {**mps.environment, **one_gpu, **early, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def on_device(world) -> torch.device:
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def moved(case: Case, device) -> Case:
    for layer in case.layers:
        layer.to(device)
    return case._replace(inputs=[x.to(device) for x in case.inputs], targets=[x.to(device) for x in case.targets])


def run_plans(world, jobs):
    """[(name, kind, plan, channel)] -> [(name, transport, worst gradient error, loss error)] of this rank."""
    device = on_device(world)
    out = []
    for name, kind, plan, channel in jobs:
        case = moved(make(kind, plan.num_micro_batches), device)
        expected, losses = plain_gradients(*case)
        with Pipeline(case.layers, plan, case.loss_fn, group=world, channel=channel, timeout_s=TIMEOUT_S) as pipe:
            for _ in range(3):  # the first step learns the shapes, the others guess them
                pipe.zero_grad()
                loss = pipe.step(case.inputs, case.targets)
            torch.cuda.synchronize()
        error = abs(float(loss) - sum(losses) / len(losses))
        out.append((name, pipe.transport.name, worst_error(pipe, expected), error))
        pipe.zero_grad()
    return out


def assert_equal(results):
    for per_rank in results:
        for name, transport, gradient, loss in per_rank:
            assert transport == "nccl"
            assert gradient <= TOLERANCE, name
            assert loss <= TOLERANCE, name


def test_every_system_gives_the_gradients_of_one_device(world):
    """Replicated stages among them: their gradients are reduced over NCCL too."""
    costs = CostTable.uniform(num_layers=NUM_LAYERS, p2p_ms=0.1)
    jobs = []
    for i, name in enumerate(systems()):
        try:
            plan = build_plan(name, costs, world.size, 8)
        except NotApplicableError:
            continue
        jobs.append((name, KINDS[i % len(KINDS)], plan, "directed"))
    assert len(jobs) > 10
    assert_equal(world.run(run_plans, jobs))


def test_random_irregular_plans_give_the_gradients_of_one_device(world):
    jobs = []
    for seed in range(PLANS):
        rng = random.Random(9000 * world.size + seed)
        plan = random_plan(rng, num_ranks=world.size, num_layers=NUM_LAYERS, num_micro_batches=rng.choice((3, 4, 5)))
        jobs.append((f"seed {seed}", KINDS[seed % len(KINDS)], plan, CHANNELS[seed // len(KINDS) % len(CHANNELS)]))
    assert_equal(world.run(run_plans, jobs))


def graphed_and_called(world, plan):
    """The losses and weights after some steps with CUDA graphs and without, and how many ops were replayed."""
    device = on_device(world)
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64, device=device, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
        with Pipeline(
            layers, plan, lambda y, t: (y - t).float().square().mean(), group=world, timeout_s=TIMEOUT_S,
            main_grads=True, cuda_graphs=graphs,
        ) as pipe:  # fmt: skip
            losses = []
            for step in range(8):
                torch.manual_seed(step)
                data = [torch.randn(16, 64, device=device, dtype=torch.bfloat16) for _ in range(2 * world.size)]
                losses.append(float(pipe.step(data, data)))
                with torch.no_grad():
                    for p in pipe.parameters():
                        p.sub_(p.grad.to(p.dtype), alpha=0.1)
                pipe.zero_grad()
            captured = pipe.executor.ops.captured
            found.append((losses, [p.detach().float().cpu() for p in pipe.parameters()], captured))
    (losses, weights, none), (replayed, others, captured) = found
    same = losses == replayed and all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    return same, none, captured


@pytest.mark.parametrize("system", ["1f1b", "zb-h1"])
def test_ops_replayed_from_graphs_take_what_nccl_brings(world, system):
    """Received tensors lie at addresses of the allocator's choice, which the graphs' copies follow."""
    plan = build_plan(system, CostTable.uniform(num_layers=NUM_LAYERS), world.size, 2 * world.size)
    for same, none, captured in world.run(graphed_and_called, plan):
        assert same and none == 0 and captured > 0


def averaged(world, dtype):
    """Gradients of data-parallel pipelines of one rank each, and those of all their batches in one process."""
    from torch.distributed.device_mesh import init_device_mesh

    device = on_device(world)
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32, device=device, dtype=dtype) for _ in range(4)]
    data = [torch.randn(8, 32, device=device, dtype=dtype) for _ in range(2 * world.size)]
    loss_fn = lambda y, t: (y - t).square().mean()  # noqa: E731
    expected, _ = plain_gradients(layers, data, data, loss_fn)
    plan = build_plan("gpipe", CostTable.uniform(num_layers=4), 1, 2)
    mesh = init_device_mesh("cuda", (world.size, 1), mesh_dim_names=("dp", "pp"))
    with Pipeline(layers, plan, loss_fn, mesh=mesh, device=device, timeout_s=TIMEOUT_S) as pipe:
        pipe.step(data[2 * world.rank : 2 * world.rank + 2], data[2 * world.rank : 2 * world.rank + 2])
        torch.cuda.synchronize()
        return worst_error(pipe, expected)


def test_data_parallel_pipelines_average_their_gradients_over_nccl(world):
    assert all(error <= TOLERANCE for error in world.run(averaged, torch.float64))


class Slow(nn.Linear):
    """A layer that keeps its device busy for some milliseconds, and its host for none."""

    def forward(self, x):
        torch.cuda._sleep(10_000_000)
        return super().forward(x)


def host_ahead(world):
    """How much of the step's time the host spent issuing it, and whether the device was at work after that."""
    device = on_device(world)
    plan = build_plan("1f1b", CostTable.uniform(num_layers=4), world.size, 8)
    torch.manual_seed(0)
    layers = [Slow(64, 64, device=device) for _ in range(4)]
    data = [torch.randn(16, 64, device=device) for _ in range(8)]
    with Pipeline(layers, plan, lambda y, t: (y - t).square().mean(), group=world, timeout_s=TIMEOUT_S) as pipe:
        for _ in range(3):
            pipe.step(data, data, reduce_loss=False)
            torch.cuda.synchronize()
        world.gather(0)
        torch.cuda.set_sync_debug_mode("error")  # a call that waits for the device raises
        begin = time.perf_counter()
        pipe.step(data, data, reduce_loss=False)
        issued = time.perf_counter() - begin
        busy = not pipe.recorder.finished()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        whole = time.perf_counter() - begin
    return issued / whole, busy


def test_host_never_waits_for_the_device_inside_a_step(world):
    for share, busy in world.run(host_ahead):
        assert busy
        assert share < 0.5


# -- when something breaks ------------------------------------------------------------------------------


HANG_TIMEOUT_S = 20.0  # longer than NCCL takes to notice a dead peer: the words must be ours


class Stops(nn.Linear):
    """Rank 1's fifth micro-batch never ends on its device, or ends the process."""

    count = 0
    how = ""

    def forward(self, x):
        Stops.count += 1
        if Stops.count == 5:
            if Stops.how == "dies":
                time.sleep(1.0)  # the other waits already
                os._exit(7)
            for _ in range(60):
                torch.cuda._sleep(2_000_000_000)
        return super().forward(x)


def steps_until(world, how, log):
    device = on_device(world)
    os.dup2(os.open(f"{log}.{world.rank}", os.O_WRONLY | os.O_CREAT, 0o644), 2)
    orders = [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]
    stages = (Stage(first=0, stop=2, rank=0), Stage(first=2, stop=4, rank=1))
    plan = Plan(num_layers=4, num_ranks=2, num_micro_batches=3, stages=stages, orders=parse_orders(orders)).check()
    Stops.how = how
    layers = [(Stops if k == 2 and world.rank == 1 else nn.Linear)(4, 4, device=device) for k in range(4)]
    data = [torch.randn(2, 4, device=device) for _ in range(3)]
    with Pipeline(layers, plan, lambda y, t: (y - t).square().mean(), group=world, timeout_s=HANG_TIMEOUT_S) as pipe:
        for _ in range(3):
            pipe.step(data, data, reduce_loss=False)
            torch.cuda.synchronize()
    return "went through"


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_rank_that_stops_is_named_with_what_is_waited_for(how, tmp_path):
    log = tmp_path / "stderr"
    with Mps.start(num_ranks=2) as mps:
        ranks = Ranks(2, "nccl", lambda rank: environment(mps, rank))
        begin = time.monotonic()
        ranks.start(steps_until, how, str(log))
        (worked, said), _ = ranks.results()
        seconds = time.monotonic() - begin
        ranks.close()
    assert not worked
    text = said + (tmp_path / "stderr.0").read_text()
    assert "input gradient of 1B1 (micro-batch 1) from rank 1" in text
    assert ("rank 1 is gone" in text) == (how == "dies")
    assert "Warning: [PG" not in text
    assert text.splitlines()[-1].startswith("octopipe: rank 0")  # nothing else ended the process
    assert seconds < 300
    assert all(not p.is_alive() for p in ranks.processes)
