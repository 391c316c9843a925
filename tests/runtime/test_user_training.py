"""The benchmark of users' set-ups in training: its plans run in the loop of `octopipe train`, and none ends another."""

from __future__ import annotations

import importlib
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import PATIENCE_S

from octopipe.costs.profile_file import Profile
from octopipe.models.zoo import preset
from octopipe.plans.plan import Plan
from octopipe.runtime.measure.trial import Workload, profile_workload
from octopipe.runtime.ranks.rank_process import Seat
from octopipe.runtime.ranks.world import World
from octopipe.runtime.training.job import TrainJob
from octopipe.runtime.training.train import train
from octopipe.search.measured_tuning import Outcome, Ran, Row
from octopipe.search.systems import build_plan
from octopipe.simulation.contention import predict

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TABLE = """\
| in training | 1F1B | interleaved | ZB-V | tuned | tuned with copies | tuned layout by flags \
| whole step, best published | whole step, best | over the best published | promised | memory |
|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
| small | 200.0 (+5.0 %) |  |  | **100.0** (-10.0 %) |  |  | 210.0 | 120.0 | 2.00 | 2.33 | 15.0 % |

pipeline in training: mean error 7.5 %, worst 10.0 %
over the best published: mean 2.000, least 2.000
of the promise: mean 85.7 %, least 85.7 %
memory: mean error 15.0 %, worst 20.0 %
not trained: small, tuned 1 with copies: rank 2: no memory"""


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("user_training")


def work_and_profile() -> tuple[Workload, Profile]:
    work = Workload(spec=preset("llama3-8b").scaled(0.004, num_layers=4), tokens=8, device="cpu", precision="fp32")
    world = World(None)
    return work, profile_workload(work, world, repeats=1, warm_up=1, state_factor=0.0, links=False, rehearsal=False)


def row(name: str, number: int, plan: Plan, profile: Profile, *, slower: float = 1.0) -> Row:
    """A plan that took `slower` times as long as it was predicted to."""
    timeline = predict(plan, profile)
    took = slower * (timeline.spans.end_ms - timeline.spans.start_ms)
    ran = Ran(steps_ms=(slower * timeline.makespan_ms,), op_ms=np.asarray(took), gap_ms=0.0)
    return Row(name=name, round=number, plan=plan, predicted_ms=timeline.makespan_ms, ran=ran)


def test_plans_train_as_the_command_trains_and_one_that_fails_says_why(training: Any) -> None:
    work, profile = work_and_profile()
    count = 3
    plan, tuned = (build_plan(system, profile.costs, 1, count) for system in ("1f1b", "zb-h1"))
    for_two = build_plan("1f1b", profile.costs, 2, count)
    rows = (
        row("1f1b", 0, plan, profile, slower=2.0),
        row("tuned 1", 1, tuned, profile),
        row("tuned 1 with copies", 1, for_two, profile),
    )
    outcome = Outcome(rows=rows, best=rows[1], profile=profile, corrections=(), agreed=True, skipped=())
    seat = Seat(rank=0, size=1, local_rank=0)
    told: list[str] = []

    def trained(**more: Any) -> list[dict[str, Any]]:
        one = partial(training.train_workload, seat, work, steps=3, timeout_s=PATIENCE_S)
        known: dict[str, Any] = {"device": torch.device("cpu"), "timeout_s": PATIENCE_S, "tell": told.append, **more}
        return list(training.train_plans(World(None), outcome, profile, work.kinds, one, **known))

    published, ours, failed = trained(until=math.inf)
    same = train(TrainJob(spec=work.spec, nproc=1, steps=3, plan=plan, seq=8, profile=profile))
    assert same is not None
    assert published["losses"] == same.losses
    assert ours["losses"] == pytest.approx(same.losses, rel=1e-5)
    assert len(published["pipelines_ms"]) == len(published["steps_ms"]) == 3
    assert published["pipeline_ms"] == published["pipelines_ms"][2], "the first two steps do not count"
    # A published system is predicted by the profile, a tuned plan by the profile as the published ones corrected it.
    assert published["predicted_ms"] == predict(plan, profile).makespan_ms
    assert ours["predicted_ms"] == pytest.approx(2.0 * predict(tuned, profile).makespan_ms, rel=0.1)
    assert failed["name"] == "tuned 1 with copies" and "error" not in ours
    assert "the plan has 2 ranks" in failed["error"] and failed["error"] in told[-1]
    late = trained(until=time.time() - 1.0)
    assert [one["error"] for one in late] == ["no time left"] * 3


def test_memory_in_training_counts_the_state_of_the_optimizer(training: Any) -> None:
    work, profile = work_and_profile()
    counted = profile_workload(work, World(None), repeats=1, warm_up=1, state_factor=2.0, links=False, rehearsal=False)
    assert training.with_state(profile).costs.static_bytes == pytest.approx(counted.costs.static_bytes)


def test_the_table_of_training_leaves_out_what_failed(training: Any) -> None:
    tables = importlib.import_module("user_tables")
    memory = {"predicted_gib": [1.1, 1.2], "memory_gib": [1.0, 1.0]}
    plans = [
        {"name": "1f1b", "predicted_ms": 210.0, "pipeline_ms": 200.0, "step_ms": 210.0, **memory},
        {"name": "tuned 1", "predicted_ms": 90.0, "pipeline_ms": 100.0, "step_ms": 120.0, **memory},
        {"name": "tuned 1 with copies", "error": "rank 2: no memory"},
    ]
    assert tables.trained_table([{"setup": "small", "train": {"plans": plans}}]) == TABLE
    assert tables.trained_table([{"setup": "small"}]) == ""
    alone = tables.trained_table([{"setup": "small", "train": {"plans": plans[:1]}}]).splitlines()
    assert alone[2] == "| small | **200.0** (+5.0 %) |  |  |  |  |  |  | 210.0 |  |  | 15.0 % |"
    assert not any("published" in line for line in alone[3:]), "without a tuned plan there is no gain"


def test_chunks_are_updated_through_float32_master_weights(training: Any) -> None:
    start, step = torch.linspace(-1.0, 1.0, 9), torch.linspace(-3e-3, 5e-3, 9)
    parameter, exact = torch.nn.Parameter(start.to(torch.bfloat16)), start.to(torch.bfloat16).float()
    optimizer, plain = training.MasterAdamW([parameter]), torch.optim.AdamW([exact], lr=training.LEARNING_RATE)
    for k in range(40):
        parameter.main_grad = exact.grad = (k + 1) * step
        optimizer.step()
        plain.step()
    # An update is smaller than bfloat16 can add to a weight: only a master weight collects them.
    assert torch.equal(parameter.detach(), exact.to(torch.bfloat16))
    assert not torch.equal(parameter.detach(), start.to(torch.bfloat16))
    assert parameter.grad is None
