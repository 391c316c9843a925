"""The NCCL transport's own code without GPUs: its communicators are gloo groups here that keep NCCL's one rule.

That rule: the operations of a communicator run one after the other, in the order in which they were issued, and one
that has no partner yet holds up all behind it. Not shown here: streams, and NCCL itself.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
from effort import draws, some

torch = pytest.importorskip("torch")

from executor_models import make, random_jobs  # noqa: E402
from ranks import PATIENCE_S, shared_ranks  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.world import World  # noqa: E402
from octopipe.runtime.wire.transports.nccl import NcclTransport  # noqa: E402

PLANS = 80


class Work:
    def __init__(self, done: Future[None]):
        self._done = done

    def wait(self) -> None:
        self._done.result()


class InOrder:
    """A communicator of two ranks."""

    def __init__(self, group: Any):
        self._group, self._thread = group, ThreadPoolExecutor(1)
        self.issued = 0

    def _issue(self, what: Any, *args: Any) -> Work:
        self.issued += 1
        return Work(self._thread.submit(lambda: what(*args).wait()))

    def send(self, tensors: list[Any], peer: int, tag: int) -> Work:
        return self._issue(self._group.send, tensors, peer, tag)

    def recv(self, tensors: list[Any], peer: int, tag: int) -> Work:
        return self._issue(self._group.recv, tensors, peer, tag)

    def eager_connect_single_device(self, device: Any) -> None:
        pass

    def shutdown(self) -> None:
        self._thread.shutdown()


class Stand(World):
    """A world whose NCCL groups are such communicators."""

    def new_group(self, ranks, backend, purpose="group", *, timeout_s=1800.0):  # type: ignore[no-untyped-def]
        group = super().new_group(ranks, "gloo", purpose, timeout_s=timeout_s)
        return InOrder(group) if backend == "nccl" else group


def run_plans(world, jobs):
    """[(name, kind, plan, channel)] -> [(name, worst gradient error, queues, messages)] of this rank."""
    out = []
    for name, kind, plan, channel in jobs:
        case = make(kind, plan.num_micro_batches)
        expected, _ = plain_gradients(*case)
        stand = Stand(world.group)
        with patch("torch.cuda.synchronize", lambda *_: None):
            transport = NcclTransport(stand, torch.device("cpu"), directed=channel == "directed", timeout_s=PATIENCE_S)
            with Pipeline(
                case.layers, plan, case.loss_fn, group=stand, channel=channel, transport=transport, timeout_s=PATIENCE_S
            ) as pipe:
                for _ in range(2):  # the second step guesses the shapes of the first
                    pipe.zero_grad()
                    pipe.step(case.inputs, case.targets)
                queues = dict(transport._groups)
        out.append((name, worst_error(pipe, expected), sorted(queues), sum(q.issued for q in queues.values())))
        pipe.zero_grad()
    return out


@pytest.mark.parametrize("size", some([4, 2]))
def test_random_plans_over_in_order_communicators(size: int) -> None:
    jobs = random_jobs(size, draws(PLANS // size), first_seed=7000 * size)
    assert len({job[3] for job in jobs}) > 1
    messages = 0
    for per_rank in shared_ranks(size).run(run_plans, jobs):
        for (name, error, queues, issued), (_, _, _, channel) in zip(per_rank, jobs, strict=True):
            assert error <= 1e-12, name
            messages += issued
            if channel != "directed":
                assert all(a < b for a, b in queues), name
    assert messages > 5 * len(jobs)
