"""Transports: every form of message, deadlocks that show, and programs that never block."""

from __future__ import annotations

import random

import pytest
from effort import draws, some

torch = pytest.importorskip("torch")
from executor_models import KINDS, NUM_LAYERS, make  # noqa: E402
from random_plans import random_plan  # noqa: E402
from ranks import PATIENCE_S, Ranks, shared_ranks  # noqa: E402
from torch import nn  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.base.errors import DeadlockError, OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Plan, Stage, parse_orders  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.slots import rank_program  # noqa: E402
from octopipe.runtime.wire.buffers import BufferPool, Lent  # noqa: E402
from octopipe.runtime.wire.messages import ALIGNED, HEAD_BYTES, Specs  # noqa: E402
from octopipe.runtime.wire.transports.cuda_ipc import IpcTransport  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402
from octopipe.simulation.lowering import CHANNELS, lower, prove_deadlock_free  # noqa: E402


def _loss(output, target):
    return (output - target).square().mean()


# -- the strict transport ------------------------------------------------------------------------------

DEADLOCK_S = 3.0
"""How long ranks wait for each other that never answer: each must have come to its wait by then, on a busy machine."""


def run_strictly(world, jobs, naive, timeout_s):
    """[(seed, plan, channel)] with layers of one number each -> losses, or the error's text."""
    out = []
    for seed, plan, channel in jobs:
        torch.manual_seed(seed)
        layers = [nn.Linear(2, 2) for _ in range(plan.num_layers)]
        data = [torch.randn(1, 2) for _ in range(plan.num_micro_batches)]
        costs = CostTable.uniform(num_layers=plan.num_layers, p2p_ms=0.1)
        program = lower(plan, costs, channel=channel, naive=naive, check=not naive)
        with Pipeline(layers, program, _loss, group=world, transport="strict", timeout_s=timeout_s) as pipe:
            try:
                out.append(float(pipe.step(data, data)))
            except OctoPipeError as error:
                out.append(str(error))
    return out


def _crossing_plan() -> Plan:
    """Two micro-batches in opposite directions: both ranks naively send before they receive."""
    stages = tuple(Stage(first=k, stop=k + 1, rank=r) for k, r in ((0, 0), (1, 1), (0, 1), (1, 0)))
    orders = parse_orders([["0F0", "3F1", "3B1", "0B0"], ["2F1", "1F0", "1B0", "2B1"]])
    return Plan(
        num_layers=2,
        num_ranks=2,
        num_micro_batches=2,
        stages=stages,
        orders=orders,
        routes=((0, 1), (2, 3)),
        route_of_micro_batch=(0, 1),
    ).check()


@pytest.mark.parametrize("channel", ["blocking", "single", "pair"])
def test_naive_order_deadlocks_and_every_rank_names_all_pending_ops(channel, two):
    plan = _crossing_plan()
    naive = lower(plan, CostTable.uniform(num_layers=2), channel=channel, naive=True, check=False)
    with pytest.raises(DeadlockError):
        prove_deadlock_free(naive)
    for (error,) in two.run(run_strictly, [(0, plan, channel)], True, DEADLOCK_S):
        assert f"within {DEADLOCK_S:g} s" in error
        assert "rank 0: waits for the" in error
        assert "rank 1: waits for the" in error
        assert "0F0" in error and "2F1" in error
        assert "micro-batch" in error


def test_lowered_order_of_the_same_plan_finishes(two):
    jobs = [(0, _crossing_plan(), channel) for channel in CHANNELS]
    for losses in two.run(run_strictly, jobs, False, PATIENCE_S):
        assert len(set(losses)) == 1
        assert isinstance(losses[0], float)


def test_mismatched_directed_queue_deadlocks_naively(two):
    """The receiver uses two tensors in another order than they were sent in."""
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    plan = Plan(
        num_layers=2,
        num_ranks=2,
        num_micro_batches=2,
        stages=stages,
        orders=parse_orders([["0F0", "0F1", "0B0", "0B1"], ["1F1", "1F0", "1B0", "1B1"]]),
    ).check()
    for (error,) in two.run(run_strictly, [(0, plan, "directed")], True, DEADLOCK_S):
        assert isinstance(error, str)
    for (loss,) in two.run(run_strictly, [(0, plan, "directed")], False, PATIENCE_S):
        assert isinstance(loss, float)


@pytest.mark.parametrize("size", some([2, 4]))
def test_random_plans_finish_on_the_strict_transport(size):
    jobs = []
    for seed in range(draws(200 // size)):
        rng = random.Random(7000 * size + seed)
        plan = random_plan(rng, num_ranks=size, num_layers=5, num_micro_batches=rng.randint(1, 4), recompute=False)
        jobs.append((seed, plan, CHANNELS[seed % len(CHANNELS)]))
    for results in shared_ranks(size).run(run_strictly, jobs, False, PATIENCE_S):
        assert all(isinstance(loss, float) for loss in results), results


# -- rings in shared memory (what ranks on one GPU use, here on the host) --------------------------------


class OneQueue(IpcTransport):
    """All lanes of a rank are one in-order queue: what a device with a single hardware queue would do to them."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        one = self._arenas.lane()
        self._arenas.lane = lambda: one


def run_rings(world, jobs, chunk_bytes, chunks, kind_of_ring=IpcTransport):
    """Three steps each: the first sends everything late, the next ones expect it."""
    worst = []
    for seed, kind, plan, channel in jobs:
        case = make(kind, plan.num_micro_batches)
        expected, _ = plain_gradients(*case)
        ring = kind_of_ring(world, torch.device("cpu"), timeout_s=PATIENCE_S, chunk_bytes=chunk_bytes, chunks=chunks)
        with Pipeline(
            case.layers, plan, case.loss_fn, group=world, channel=channel, transport=ring, timeout_s=PATIENCE_S
        ) as pipe:
            for _ in range(3):
                pipe.zero_grad()
                pipe.step(case.inputs, case.targets)
                worst.append((worst_error(pipe, expected), seed))
        pipe.zero_grad()
    return max(worst)


@pytest.mark.parametrize("ring", some([(4, 100, 3), (2, 64, 1), (4, 1 << 20, 4)]), ids=str)
def test_rings_carry_every_message_of_random_plans(ring):
    size, chunk_bytes, chunks = ring
    jobs = []
    for seed in range(draws(16)):
        rng = random.Random(90 * size + chunks + seed)
        plan = random_plan(rng, num_ranks=size, num_layers=NUM_LAYERS, num_micro_batches=rng.randint(2, 4))
        jobs.append((seed, KINDS[seed % len(KINDS)], plan, CHANNELS[seed % len(CHANNELS)]))
    for error in shared_ranks(size).run(run_rings, jobs, chunk_bytes, chunks):
        assert error[0] <= 1e-12, error


@pytest.mark.parametrize("chunks", some([1, 4]))
def test_no_plan_hangs_where_every_lane_shares_one_queue(chunks, four):
    jobs = []
    for seed in range(draws(6, least=2)):
        rng = random.Random(500 + seed)
        plan = random_plan(rng, num_ranks=4, num_layers=NUM_LAYERS, num_micro_batches=rng.randint(2, 6))
        jobs.append((seed, KINDS[seed % len(KINDS)], plan, "directed"))
    for name in ("chimera", "dualpipe"):
        plan = build_plan(name, CostTable.uniform(num_layers=NUM_LAYERS, p2p_ms=0.1), 4, 8)
        jobs.append((name, KINDS[0], plan, "directed"))
    for error in four.run(run_rings, jobs, 256, chunks, OneQueue):
        assert error[0] <= 1e-12, error


def changing_rows(world, chunk_bytes):
    """Guesses that fail: other sizes, other nestings, nothing at all."""
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    orders = parse_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B1", "1B0"]])
    plan = Plan(num_layers=2, num_ranks=2, num_micro_batches=2, stages=stages, orders=orders).check()
    torch.manual_seed(2)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    ring = IpcTransport(world, torch.device("cpu"), timeout_s=PATIENCE_S, chunk_bytes=chunk_bytes, chunks=2)
    losses = []
    with Pipeline(layers, plan, _loss, group=world, transport=ring, timeout_s=PATIENCE_S) as pipe:
        for rows in ((2, 2), (2, 2), (5, 2), (5, 9), (5, 9), (1, 1)):
            data = [torch.ones(n, 4) * (k + 1) for k, n in enumerate(rows)]
            loss = float(pipe.step(data, data))
            with torch.no_grad():
                want = sum(float(_loss(layers[1](layers[0](x)), x)) for x in data) / 2
            losses.append(abs(loss - want))
    return max(losses)


def test_rings_survive_wrong_guesses(two):
    assert max(two.run(changing_rows, 48)) <= 1e-6


# -- small tensors, which stay in the memory they arrived in -----------------------------------------------


class Gate(nn.Module):
    """Two outputs of one input; `mode` says which of them its successor lets gradients through for."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.mode = nn.Linear(4, 4), nn.Linear(4, 4), "both"

    def forward(self, value):
        if isinstance(value, tuple):
            left, right = value
            value = (left if self.mode in ("left", "both") else left.detach()) + (
                right if self.mode == "both" else right.detach()
            )
        return self.left(value), self.right(value)


MODES = ("none", "left", "none", "both", "both", "left", "both", "none")


def gating_layers(world, kind, modes):
    """Per mode: which parameters of this rank have a gradient, and the largest of each."""
    torch.manual_seed(0)
    layers = [Gate() for _ in range(4)]
    plan = build_plan("zb-h1", CostTable.uniform(num_layers=4), 2, 4)
    data = list(torch.ones(4, 2, 4))
    transport = kind if isinstance(kind, str) else kind(world, torch.device("cpu"), timeout_s=PATIENCE_S)
    out = []
    with Pipeline(
        layers, plan, lambda out, _: out[0].square().mean(), group=world, transport=transport, timeout_s=PATIENCE_S
    ) as pipe:
        for mode in modes:
            layers[2].mode = mode
            for p in pipe.parameters():
                p.grad = None
            pipe.step(data, data)
            out.append({name: None if p.grad is None else float(p.grad.norm()) for name, p in pipe.named_parameters()})
    return out


def gating_plainly(modes):
    """The same in one process."""
    torch.manual_seed(0)
    layers = [Gate() for _ in range(4)]
    out = []
    for mode in modes:
        layers[2].mode = mode
        model = nn.Sequential(*layers)
        model.zero_grad()
        for part in torch.ones(4, 2, 4):
            (model(part)[0].square().mean() / 4).backward()
        named = {f"{k}.{n}": p for k in (0, 1) for n, p in layers[k].named_parameters()}
        out.append({name: None if p.grad is None else float(p.grad.norm()) for name, p in named.items()})
    return out


@pytest.mark.parametrize("kind", ["gloo", "strict"])
def test_a_gradient_that_does_not_exist_is_none_at_every_step(kind, two):
    first, _ = two.run(gating_layers, kind, MODES)
    for ours, plain in zip(first, gating_plainly(MODES), strict=True):
        assert ours.keys() == plain.keys()
        for name, value in plain.items():
            assert ours[name] == (None if value is None else pytest.approx(value, rel=1e-5)), name


def test_on_a_device_a_gradient_that_goes_missing_is_an_error_where_it_is_sent():
    ranks = Ranks(2)
    try:
        ranks.start(gating_layers, IpcTransport, MODES[:6])
        ((_, text),) = ranks.results(of=[1])
    finally:
        ranks.kill()  # the other rank may wait for the gradient still
    assert "lacks a gradient that it contained in the step before" in text


@pytest.mark.parametrize("kind", [IpcTransport])
def test_a_gradient_that_does_not_exist_arrives_as_none(kind, two):
    first, _ = two.run(gating_layers, kind, MODES[:5])
    assert all(value is None for value in first[0].values()) and all(value is None for value in first[2].values())
    assert {name for name, value in first[1].items() if value is None} == {"1.right.weight", "1.right.bias"}
    assert min(value for name, value in first[3].items() if name.startswith("1")) > 0
    assert first[3] == first[4]


class Pair(nn.Module):
    """Two tensors to the next layer: one to multiply, one to write to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return x * self.scale, x.long()


class Keeper(nn.Module):
    """Keeps what it was given beyond the step, and overwrites half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([5.0, 7.0]))
        self.seen: list = []

    def forward(self, x, count):
        self.seen.append((x, count))
        y = x * self.scale  # saves x: writing to its neighbour must not count as writing to it
        return y + count.add_(1)


def keeping_layers(world):
    """Three steps of other data -> on the last rank: what was kept, and each step's gradients of both layers."""
    plan = build_plan("1f1b", CostTable.uniform(num_layers=2), 2, 2)
    first, last = Pair(), Keeper()
    grads = []
    with Pipeline([first, last], plan, _loss, group=world) as pipe:
        for step in range(3):
            data = [torch.full((1, 2), float(2 * step + m)) for m in range(2)]
            pipe.step(data, [torch.zeros(1, 2)] * 2)
            grads.append([p.grad.tolist() for p in pipe.parameters()])
            pipe.zero_grad()
    return [(x.tolist(), count.tolist()) for x, count in last.seen], grads


def test_received_tensors_outlive_their_step_and_are_written_to_one_by_one(two):
    (_, of_first), (kept, of_last) = two.run(keeping_layers)
    assert kept == [([[2.0 * k, 3.0 * k]], [[k + 1, k + 1]]) for k in range(6)]
    for step in range(3):
        first, last = Pair(), Keeper()
        for m in range(2):
            x = torch.full((1, 2), float(2 * step + m))
            (_loss(last(*first(x)), torch.zeros(1, 2)) / 2).backward()
        assert of_first[step] == [first.scale.grad.tolist()] and of_last[step] == [last.scale.grad.tolist()]


class Shift(nn.Module):
    """Its parameter's gradient is the very gradient that arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(1, 2))

    def forward(self, x):
        return x + self.by


def shifting_layers(world):
    """Gradients of two steps, never cleared in between, read after the second."""
    plan = build_plan("1f1b", CostTable.uniform(num_layers=2), 2, 1)
    with Pipeline([Shift(), Shift()], plan, _loss, group=world) as pipe:
        steps = []
        for value in (1.0, 5.0):
            pipe.step([torch.full((1, 2), value)], [torch.zeros(1, 2)])
            steps.append([p.grad for p in pipe.parameters()])
            pipe.zero_grad()
    return [[g.tolist() for g in step] for step in steps]


def test_gradients_that_became_a_parameters_are_not_overwritten(two):
    assert two.run(shifting_layers) == [[[[[1.0, 1.0]]], [[[5.0, 5.0]]]]] * 2


# -- the parts ------------------------------------------------------------------------------------------


def test_tensors_inside_a_header_lie_where_the_sender_put_them():
    leaves = [torch.arange(3.0), torch.tensor(True), torch.zeros(0, 4), torch.arange(5, dtype=torch.int16)]
    spec, tensors = Specs().of(leaves, None)
    head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
    for part, tensor in zip(spec.inside(memoryview(head.numpy())), tensors, strict=True):
        assert part.shape == tensor.shape and part.dtype is tensor.dtype
        part.copy_(tensor)
        assert not part.numel() or (part.data_ptr() - head.data_ptr()) % ALIGNED == 0
    again = spec.inside(memoryview(head.numpy()))
    assert all(torch.equal(a, b) for a, b in zip(again, tensors, strict=True))
    assert again[0]._version == 0


def test_lent_memory_is_free_once_all_that_share_it_are_gone():
    lent = Lent(torch.zeros(6).view(2, 3))
    assert lent.is_free()
    held = lent.tensor.detach()[1:]
    assert not lent.is_free()
    del held
    assert lent.is_free()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_forms_are_described_and_read_back():
    sender, receiver = Specs(), Specs()
    values = [
        torch.zeros(2, 3),
        (torch.zeros(1, dtype=torch.int64), [torch.ones(2), None, 3], {"a": torch.zeros(0)}),
        {"x": torch.zeros(5000), "flag": True},
    ]
    for value in values:
        spec, tensors = sender.of(value, None)
        assert sender.of(value, None)[0] is spec
        read = receiver.read(spec.header)
        assert receiver.read(spec.header) is read
        assert read.leaves == spec.leaves and read.wanted == spec.wanted
        again = read.value(tensors)
        assert type(again) is type(value)
        assert sender.of(again, None)[0] is spec
    assert [leaf.wanted for leaf in sender.of(values[1], None)[0].leaves] == [False, True, True]
    assert not sender.of(values[0], [False])[0].asking
    with pytest.raises(OctoPipeError, match="cannot be sent"):
        sender.of((torch.zeros(1), lambda: 0), None)
    with pytest.raises(OctoPipeError, match="nested tensor, which cannot be sent"):
        sender.of(torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), None)


def test_buffers_are_used_again_once_nobody_holds_them():
    pool = BufferPool(torch.device("cpu"), small_bytes=0)
    first = pool.take((4, 4), torch.float32)
    held = first.T[1:]  # any view keeps it
    address = first.data_ptr()
    del first
    second = pool.take((16,), torch.float32)
    assert second.data_ptr() != address
    del held
    assert pool.take((2, 8), torch.float32).data_ptr() == address
    assert pool.held_bytes == 2 * 64
    pool.end_step()
    pool.take((1,), torch.float32)
    pool.end_step()
    assert pool.held_bytes == 4


def test_sends_are_released_by_the_first_op_that_proves_their_arrival():
    """1F1B on two ranks: the backward of a micro-batch proves that its forward arrived."""
    plan = build_plan("1f1b", CostTable.uniform(num_layers=2), 2, 3)
    program = rank_program(lower(plan, CostTable.uniform(num_layers=2)), 0)
    released = {str(step.op): [str(s.op) for s in step.release] for step in program.steps if step.release}
    assert released == {"0B0": ["0F0"], "0B1": ["0F1"], "0B2": ["0F2"]}
    last = rank_program(lower(plan, CostTable.uniform(num_layers=2)), 1)
    assert [str(s.op) for s in last.last_releases] == ["1B1", "1B2"]
    assert {str(step.op): [str(s.op) for s in step.release] for step in last.steps if step.release} == {"1F2": ["1B0"]}
