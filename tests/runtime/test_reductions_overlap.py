"""Reductions of copies run beside the rest of the step: over when its last op ends, whatever carries them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from octopipe.costs.cluster.hardware import Link  # noqa: E402
from octopipe.costs.profile import Profile  # noqa: E402
from octopipe.costs.profile_file import profile_from_object  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Op, Plan, Stage  # noqa: E402
from octopipe.runtime.measure import links  # noqa: E402
from octopipe.runtime.measure.links import measure_sum  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks import reduce as reduction  # noqa: E402
from octopipe.runtime.ranks import world as worlds  # noqa: E402
from octopipe.runtime.wire.transports.lanes import HostLane  # noqa: E402
from octopipe.simulation.simulator import simulate  # noqa: E402

WIDTH = 8
SLOW_S, DELAY_S = 0.4, 0.02
TRIES = 20


class Slow(nn.Module):
    """A layer whose backward takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return _Pause.apply(self.inner(x))


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SLOW_S)
        return gradient


def plan() -> Plan:
    """Layer 1 is on both ranks and has all its gradients before rank 0 starts the backward passes of layer 0."""
    order = ("0F0", "2F0", "2B0", "0F1", "0B0", "0B1"), ("1F1", "1B1")
    return Plan(
        num_layers=2,
        num_ranks=2,
        num_micro_batches=2,
        stages=(Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1), Stage(first=1, stop=2, rank=0)),
        routes=((0, 1), (0, 2)),
        route_of_micro_batch=(1, 0),
        orders=tuple(tuple(Op.parse(text) for text in row) for row in order),
    )


def layers():
    torch.manual_seed(3)
    return [Slow(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)]


def batches():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(3, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)]


class LateWork:
    """A reduction of gloo's over a link that takes a while."""

    def __init__(self, work):
        self._work, self._until = work, time.monotonic() + 4 * DELAY_S

    def is_completed(self):
        return self._work.is_completed() and time.monotonic() > self._until

    def wait(self, timeout):
        time.sleep(max(0.0, self._until - time.monotonic()))
        return self._work.wait(timeout)


def over_at_the_end(world, transport):
    """Whether each reduction was over when this rank's last op was, and how far gradients are from one process's."""
    found = []
    copy, start, finish = HostLane.copy, worlds.all_reduce, reduction.Reducer.finish

    def late_copy(lane, target, source):
        lane._work.put(lambda: time.sleep(DELAY_S))
        copy(lane, target, source)

    def noted(reducer):
        found.extend(bool(b.works) and reduction._over(b.works[-1]) for b in reducer.buckets)
        finish(reducer)

    with (
        pytest.MonkeyPatch.context() as patch,
        Pipeline(
            layers(), plan(), nn.functional.mse_loss, group=world, transport=transport, timeout_s=PATIENCE_S
        ) as pipe,
    ):
        patch.setattr(HostLane, "copy", late_copy)
        patch.setattr(reduction, "all_reduce", lambda *args: LateWork(start(*args)))
        patch.setattr(reduction.Reducer, "finish", noted)
        pipe.step(batches(), batches())
        mine = {name: p.grad for name, p in pipe.named_parameters()}
        waited = [e.end_ms - e.start_ms for e in pipe.timeline().extras if e.name == "reduce" and e.rank == 0]
    model = nn.Sequential(*layers())
    sum(nn.functional.mse_loss(model(x), x) / 2 for x in batches()).backward()
    error = max(float((mine[name] - p.grad).abs().max()) for name, p in model.named_parameters() if name in mine)
    return found, waited, error


@pytest.mark.parametrize("transport", ["gloo", "cuda_ipc"])
def test_reductions_beside_the_ops_give_the_gradients_of_one_process(transport: str, two) -> None:
    assert all(error <= 1e-12 for _, _, error in two.run(over_at_the_end, transport))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "cuda_ipc"])
def test_a_reduction_is_over_when_the_last_op_is(transport: str, two) -> None:
    """In one of several steps: on a busy machine the other rank may not run at all while this one sleeps."""
    seen = []
    for _ in range(TRIES):
        found, waited, _ = two.run(over_at_the_end, transport)[0]
        seen.append((found, waited))
        if found == [True] and waited and all(ms < 1e3 * SLOW_S / 2 for ms in waited):
            return
    raise AssertionError(seen)


def failing(world):
    """Rank 0 fails in its last op, while its sum with rank 1 is under way."""
    bad = layers()

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, x):
            x = self.inner(x)
            x.register_hook(lambda g: (_ for _ in ()).throw(ValueError("a user's layer breaks")))
            return x

    if world.rank == 0:
        bad[0] = Fails()
    else:
        bad[0] = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    began = time.monotonic()
    told = ""
    with Pipeline(bad, plan(), nn.functional.mse_loss, group=world, transport="cuda_ipc", timeout_s=PATIENCE_S) as pipe:
        try:
            pipe.step(batches(), batches())
        except Exception as error:
            told = str(error)
    return told, time.monotonic() - began


def test_a_rank_that_fails_beside_a_reduction_ends_the_others_with_its_words(two) -> None:
    (own, _), (other, seconds) = two.run(failing)
    assert "a user's layer breaks" in own
    assert "a user's layer breaks" in other
    assert seconds < PATIENCE_S


def measured(world, transport):
    return measure_sum(world, torch.device("cpu"), sizes=(1 << 12, 1 << 20), repeats=2, transport=transport)


def test_a_profile_measures_sums_where_ranks_share_a_device(two) -> None:
    first, second = two.run(measured, "cuda_ipc")
    assert first == second and first.latency_ms + first.ms_per_byte > 0
    assert two.run(measured, "gloo") == [None, None]


def sums_at_once(world, calls: Path):
    """Measure sums, and note when a rank of this pair summed."""
    links.summing, kept = (lambda *a: Noting(kept(*a), world.rank, calls)), links.summing
    try:
        return measured(world, "cuda_ipc")
    finally:
        links.summing = kept


class Noting:
    """A group that writes down when its sums begin and end."""

    def __init__(self, group, rank: int, calls: Path):
        self._group, self._file = group, calls / f"{rank}.txt"

    def all_reduce(self, numbers):
        self._began = time.monotonic()
        self._work = self._group.all_reduce(numbers)
        return self

    def wait(self, timeout) -> None:
        time.sleep(DELAY_S)
        self._work.wait(timeout)
        with self._file.open("a") as file:
            file.write(f"{self._began} {time.monotonic()}\n")

    def close(self) -> None:
        self._group.close()


def test_all_pairs_of_ranks_sum_at_once_when_sums_are_measured(four, tmp_path) -> None:
    found = four.run(sums_at_once, tmp_path)
    assert found[0] is not None and found == [found[0]] * 4
    one, other = (np.loadtxt(tmp_path / f"{rank}.txt") for rank in (0, 2))
    assert len(one) == len(other) == 2 * (2 + 2)
    assert (np.maximum(one[:, 0], other[:, 0]) < np.minimum(one[:, 1], other[:, 1])).all(), "not at the same time"


def test_a_measured_sum_is_what_a_reduction_is_predicted_with() -> None:
    costs = CostTable.uniform(num_layers=2, p2p_ms=0.25).replace(gradient_bytes=np.array([0.0, 1e6]))
    link = Link(latency_ms=0.5, ms_per_byte=2e-6)
    known = costs.replace(copy_sum=link)
    took = [
        {e.end_ms - e.start_ms for e in simulate(plan(), table).extras if e.name.startswith("reduce")}
        for table in (costs, known)
    ]
    assert took == [{2 * 0.25}, {2 * 0.5 + 2.0}]
    assert costs.digest() != known.digest()
    profile = Profile(costs=known)
    again = profile_from_object(json.loads(profile.to_json()), name="again").costs
    assert (again.copy_sum.latency_ms, again.copy_sum.ms_per_byte) == pytest.approx((0.5, 2e-6))
