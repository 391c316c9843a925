"""Hardware queues: lanes that share one never stop a program, and streams are chosen so that they need not."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
from executor_models import make  # noqa: E402
from plans import random_costs, random_plan  # noqa: E402
from ranks import Ranks, shared_ranks  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe._graph import find_cycle  # noqa: E402
from octopipe.cost import CostTable  # noqa: E402
from octopipe.errors import OctoPipeError  # noqa: E402
from octopipe.lowering import CHANNELS, lower  # noqa: E402
from octopipe.runtime import reduce as reduction  # noqa: E402
from octopipe.runtime import world as worlds  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.transports.cuda_ipc import IpcTransport  # noqa: E402
from octopipe.runtime.transports.queues import (  # noqa: E402
    SHARINGS,
    independent,
    issue_order,
    lane_plan,
    lanes_of,
    waits,
)
from octopipe.systems import build_plan  # noqa: E402


@pytest.fixture
def two() -> Ranks:
    return shared_ranks(2)


# -- choosing streams -----------------------------------------------------------------------------------


class Device:
    """Streams dealt out to queues; stream 0, the computation, is in queue 0."""

    def __init__(self, deal):
        self.deal, self.queue, self.alive = deal, {0: 0}, {0}

    def create(self):
        stream = len(self.queue)
        self.queue[stream] = self.deal(stream)
        self.alive.add(stream)
        return stream

    def destroy(self, stream):
        self.alive.remove(stream)

    def holds_up(self, stream, others):
        return any(self.queue[stream] == self.queue[o] for o in (0, *others))


@pytest.mark.parametrize("queues", [1, 2, 3, 8, 16])
def test_streams_never_share_a_queue_with_each_other_or_the_computation(queues):
    # Round robin as a driver may do it, every fourth (torch's pool makes streams of four priorities), and by lot.
    for deal in (lambda k: k % queues, lambda k: 4 * k % queues, lambda k: random.Random(k).randrange(queues)):
        device = Device(deal)
        chosen = independent(device.create, device.destroy, device.holds_up, 6)
        used = [device.queue[s] for s in (0, *chosen)]
        assert len(set(used)) == len(used)
        reachable = {deal(k) for k in range(1, 70)} - {0}
        assert len(chosen) == min(6, len(reachable))
        assert device.alive == {0, *chosen}


# -- sharing queues -------------------------------------------------------------------------------------


def finishes(program, maps):
    """Run the issued work with plain queues: an independent look at whether it ends."""
    plan = program.plan
    ranks = range(plan.num_ranks)
    t = plan.table()
    computes, queues, before = {r: [] for r in ranks}, {}, {}
    for r in ranks:
        for kind, number in issue_order(program, r):
            if kind == 0:
                computes[r].append(number)
                continue
            peer = int(t.rank[program.target[number] if kind == 1 else program.source[number]])
            queues.setdefault((r, maps[r][peer, kind == 1]), []).append((number, kind))
            before[r, number] = set(computes[r])
    done, moved = set(), set()
    while True:
        progress = False
        for r in ranks:
            while computes[r]:
                op = computes[r][0]
                needs = zip(plan.predecessor_table()[op], program.transfer_of[op])
                if not all(p < 0 or (n in moved if n >= 0 else p in done) for p, n in needs):
                    break
                done.add(computes[r].pop(0))
                progress = True
        heads = [(key[0], *entries[0]) for key, entries in queues.items() if entries]
        for number in {n for _, n, _ in heads}:
            ends = [(r, kind) for r, n, kind in heads if n == number]
            made = int(program.source[number]) in done
            if len(ends) == 2 and made and all(before[r, number] <= done for r, _ in ends):
                moved.add(number)
                for entries in queues.values():
                    if entries and entries[0][0] == number:
                        entries.pop(0)
                progress = True
        if not progress:
            return not any(computes.values()) and not any(queues.values())


def maps_of(program, sharing):
    out = []
    for r in range(program.plan.num_ranks):
        names = sorted({sharing(lane) for lane in lanes_of(program, r)}, key=str)
        out.append({lane: names.index(sharing(lane)) for lane in lanes_of(program, r)})
    return out


def test_the_proof_of_sharing_agrees_with_running_the_queues():
    rng = random.Random(5)
    seen = set()
    for _ in range(60):
        plan = random_plan(rng, routes=rng.randint(1, 2))
        program = lower(plan, random_costs(rng, plan), channel=rng.choice(CHANNELS))
        for k, sharing in enumerate(SHARINGS):
            maps = maps_of(program, sharing)
            safe = not find_cycle(waits(program, maps))
            assert safe == finishes(program, maps)
            seen.add((k, safe))
            assert safe or k > 0  # a queue per lane is what lowering has proven
    assert {(1, False), (3, False), (3, True)} <= seen


@pytest.mark.parametrize("name", ["chimera", "dualpipe", "1f1b", "interleaved"])
def test_a_single_queue_serves_what_was_lowered_for_one(name):
    costs = CostTable.uniform(num_layers=16, p2p_ms=0.1)
    program = lower(build_plan(name, costs, 4, 8), costs, channel="single")
    for place in lane_plan(program, [1] * 4):
        assert set(place.values()) <= {0}
    for place in lane_plan(program, [6] * 4):
        assert len(set(place.values())) == len(place)


def test_too_few_queues_are_refused_in_one_line():
    costs = CostTable.uniform(num_layers=16, p2p_ms=0.1)
    program = lower(build_plan("dualpipe", costs, 4, 8), costs)
    with pytest.raises(OctoPipeError, match=r"rank \d has \d lanes .*CUDA_DEVICE_MAX_CONNECTIONS"):
        lane_plan(program, [1] * 4)


def shared_lanes(world, plan, channel, queues):
    case = make("plain", plan.num_micro_batches)
    expected, _ = plain_gradients(*case)
    ring = IpcTransport(world, torch.device("cpu"), timeout_s=20, chunk_bytes=256, chunks=2, queues=queues)
    try:
        with Pipeline(
            case.layers, plan, case.loss_fn, group=world, channel=channel, transport=ring, timeout_s=20
        ) as pipe:
            for _ in range(3):
                pipe.zero_grad()
                pipe.step(case.inputs, case.targets)
        return len(set(map(id, ring._lanes))) or queues, worst_error(pipe, expected)
    except OctoPipeError as error:
        return 0, str(error)


def test_pipelines_run_or_are_refused_whatever_the_queues(two):
    costs = CostTable.uniform(num_layers=8)
    refused = 0
    for name in ("1f1b", "chimera", "dualpipe", "interleaved"):
        plan = build_plan(name, costs, 2, 4)
        for channel, queues in (("directed", 2), ("single", 1), ("directed", 1)):
            for lanes, error in two.run(shared_lanes, plan, channel, queues):
                if lanes:
                    assert error <= 1e-12
                else:
                    assert (channel, queues) == ("directed", 1) and "hardware queues" in error
                    refused += 1
    assert refused


# -- reductions that go through the host ----------------------------------------------------------------


def through_host(world, plan):
    """As if the tensors were a GPU's and the group gloo's: when does a reduction start?"""
    case = make("plain", plan.num_micro_batches)
    expected, _ = plain_gradients(*case)
    order = []
    put = worlds.HostWork.wait
    with (
        pytest.MonkeyPatch.context() as patch,
        Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=20) as pipe,
    ):
        patch.setattr(worlds, "needs_host", lambda group, tensor: True)
        patch.setattr(reduction, "needs_host", lambda group, tensor: True)
        patch.setattr(worlds.HostWork, "wait", lambda *args: (order.append(pipe.executor.at is None), put(*args))[1])
        pipe.step(case.inputs, case.targets)
    return worst_error(pipe, expected), len(order), all(order)


def test_gloo_reduces_a_devices_gradients_on_the_host_after_the_step_is_issued(two):
    """Given a CUDA tensor, gloo would let a stream of torch's pool wait in the middle of the step."""
    for error, reductions, after in two.run(through_host, build_plan("chimera", CostTable.uniform(num_layers=8), 2, 4)):
        assert error <= 1e-12
        assert reductions >= 2 and after
