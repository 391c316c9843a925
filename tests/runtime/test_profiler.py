"""The profiler, against numbers known beforehand: bytes counted by hand, sleeping layers, exact links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import PATIENCE_S
from torch import nn

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.profile_file import Profile, load_profile, profile_from_object
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.models.zoo import preset
from octopipe.runtime.measure.links import fit
from octopipe.runtime.measure.mps import Mps
from octopipe.runtime.measure.profiler import LayerRing, assemble, groups_of_modules, profile_layers
from octopipe.runtime.measure.trial import (
    Workload,
    profile_workload,
    rehearsal_plan,
    rehearsed,
    run_plan,
    side_by_side,
)
from octopipe.runtime.measure.workload import groups_of_spec
from octopipe.runtime.ranks.launch import by_rank, run_ranks
from octopipe.runtime.ranks.world import World
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.contention import predict
from octopipe.simulation.lowering import lower
from octopipe.simulation.simulator import simulate


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


class Sleepy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        time.sleep(ctx.backward_s)
        return g, None, None


class Sleeper(nn.Module):
    def __init__(self, forward_s: float, backward_s: float):
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x):
        return Sleepy.apply(x, self.forward_s, self.backward_s)

    def extra_repr(self) -> str:
        return f"{self.forward_s}, {self.backward_s}"


def linears(count: int, width: int = 64) -> list[nn.Module]:
    return [nn.Linear(width, width, bias=False) for _ in range(count)]


def test_equal_layers_are_measured_once_and_the_last_one_apart() -> None:
    layers = [*linears(3), nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False), nn.Linear(64, 64, bias=False)]
    assert groups_of_modules(layers) == (0, 0, 0, 1, 2, 0)
    measured = profile_layers(layers, torch.randn(8, 64), mse, torch.randn(8, 64), repeats=2, warm_up=1)
    assert measured.group_of == (0, 0, 0, 1, 2, 3)  # the last runs with the loss
    assert measured.loaded_ms.shape == (4, 3)


def test_layers_of_a_spec_group_by_their_dimensions() -> None:
    spec = preset("nemotron-h-8b").scaled(0.05, num_layers=10)
    groups = groups_of_spec(spec)
    for i, a in enumerate(spec.layers):
        for j, b in enumerate(spec.layers):
            assert (groups[i] == groups[j]) == (a == b)


def test_known_durations_are_found(only_sleeping_takes_time: None) -> None:
    layers = [Sleeper(0.004, 0.008), Sleeper(0.012, 0.002)]
    measured = profile_layers(layers, torch.zeros(4, requires_grad=True), mse, torch.zeros(4), repeats=3, warm_up=1)
    assert measured.loaded_ms[:, 0] == pytest.approx([4, 12], abs=0.1)
    # The first layer takes no input gradient: it has nothing to do in I.
    assert measured.loaded_ms[:, 1] == pytest.approx([0, 2], abs=0.1)


def test_bytes_are_those_counted_by_hand() -> None:
    batch, width, hidden = 16, 64, 256
    layers = [nn.Linear(width, width, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width)]
    measured = profile_layers(layers, torch.randn(batch, width), mse, torch.randn(batch, width), repeats=1, warm_up=0)
    second = measured.memory[1]
    assert second.boundary_bytes == 4 * batch * hidden
    assert second.parameter_bytes == second.gradient_bytes == 4 * width * hidden
    assert second.stash_bytes == 4 * batch * (width + hidden)  # W needs its input and its output's gradient
    assert second.activation_bytes >= second.stash_bytes
    assert measured.memory[2].parameter_bytes == 4 * (hidden * width + width)


def test_profiling_leaves_gradients_as_they_were() -> None:
    """What was measured must not be trained with: the step after a profile begins as it would have without one."""
    layers = linears(2)
    kept = torch.randn_like(layers[1].weight)
    layers[1].weight.grad = kept.clone()
    profile_layers(layers, torch.randn(8, 64), mse, torch.randn(8, 64), repeats=1, warm_up=0)
    assert all(p.grad is None for p in layers[0].parameters())
    assert torch.equal(layers[1].weight.grad, kept)


def test_a_layer_that_does_not_fit_its_input_is_named() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(9, 8)]
    with pytest.raises(OctoPipeError, match=r"layer 1 \(Linear\)"):
        profile_layers(layers, torch.randn(2, 8), mse, torch.randn(2, 8))


def test_assembled_costs_and_their_file_say_the_same(tmp_path) -> None:
    layers = linears(4)
    mine = profile_layers(layers, torch.randn(8, 64), mse, torch.randn(8, 64), repeats=2, warm_up=0)
    links = {(0, 1): Link(latency_ms=0.02, ms_per_byte=1e-7), (1, 0): Link(latency_ms=0.02, ms_per_byte=1e-7)}
    profile = assemble([mine, mine], model="four", symbols="abcd", links=links, tokens=8, memory_bytes=2.0**30)
    profile = replace(profile, op_overhead_ms=0.25, fused_factor=0.9)
    path = tmp_path / "profile.json"
    profile.save(path)
    again = load_profile(path)
    assert (again.op_overhead_ms, again.fused_factor) == (profile.op_overhead_ms, profile.fused_factor)
    assert np.allclose(again.costs.forward_ms, profile.costs.forward_ms)
    assert np.allclose(again.costs.static_bytes, 4 * 64 * 64 * 4)  # weights, gradients, two AdamW moments
    resolved = resolve_costs(str(path), pp=2)
    assert resolved.network.transfer_ms(0, 1, 1e6) == pytest.approx(0.12)
    assert resolved.rank_slowdown == (1.0, 1.0)
    assert resolved.rank_memory_bytes == (2.0**30,)
    assert resolved.model == "four" and resolved.tokens_per_micro_batch == 8
    assert np.allclose(resolved.weight_ms, profile.costs.weight_ms)


class Rows(nn.Module):
    """A part of a layer that takes its time by rows, and some however few it has."""

    def __init__(self, rows: int, start: int, forward_s: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 4))
        self.shard_start, self.cut_parameters, self._forward_s = start, {"weight": 8}, forward_s

    def forward(self, x):
        time.sleep(self._forward_s)
        return x @ self.weight.t()

    def vocabulary_shard(self, number: int, count: int) -> nn.Module:
        return Rows(8 // count, number * 8 // count, 0.004 + 0.016 / count)


def test_shards_of_the_head_are_timed_as_they_run(only_sleeping_takes_time: None) -> None:
    layers = [Sleeper(0.01, 0.0), Sleeper(0.01, 0.0), Rows(8, 0, 0.02)]
    target = torch.zeros(3, dtype=torch.int64)
    ring = LayerRing(layers, torch.zeros(3, 4, requires_grad=True), nn.functional.cross_entropy, target)
    ring._ranks = 2  # one rank has nobody to share the head with
    measured = ring.measure(3, 0, ())
    assert list(measured.shards) == [2]  # the first layer cannot be cut
    assert [measured.shards[2][n][0] for n in (2, 4)] == pytest.approx([0.6, 0.4], abs=0.01)
    (found,) = assemble([measured], model="three", symbols="abc").costs.shard_times
    assert (found.fixed[0], found.share[0]) == pytest.approx((0.2, 0.8), abs=0.02)


def test_a_loss_that_shards_cannot_make_leaves_them_unmeasured() -> None:
    layers = [*linears(2, 4), Rows(8, 0, 0.0)]
    ring = LayerRing(layers, torch.zeros(3, 4), mse, torch.zeros(3, 8))
    ring._ranks = 2
    assert ring.measure(1, 0, ()).shards == {}


class Unshared(Rows):
    def vocabulary_shard(self, number: int, count: int) -> nn.Module:
        raise KeyError("a head of somebody else")


def test_a_head_that_cannot_be_cut_is_profiled_all_the_same() -> None:
    target = torch.zeros(3, dtype=torch.int64)
    ring = LayerRing([*linears(2, 4), Unshared(8, 0, 0.005)], torch.zeros(3, 4), nn.functional.cross_entropy, target)
    ring._ranks = 2
    measured = ring.measure(1, 0, ())
    assert measured.loaded_ms[-1, 0] >= 5 and measured.shards == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"links": 3}, "links"),
        ({"links": [{"source": -1, "destination": 1}]}, "source"),
        ({"links": [{"source": 0, "destination": 1, "gb_per_s": 0}]}, "gb_per_s"),
        ({"partial": {"x": {}}}, "partial"),
        ({"partial": {"1": {"forward_ms": [1]}}}, "partial"),
        ({"rank_slowdown": [0]}, "rank_slowdown"),
        ({"memory_gib": [-1]}, "memory_gib"),
        ({"fused_factor": 0}, "fused_factor"),
    ],
)
def test_a_bad_profile_is_one_line(change, words) -> None:
    file = {"pattern": "EL", "forward_ms": [1, 2], "backward_ms": [0, 2], "weight_ms": [1, 1]}
    with pytest.raises(OctoPipeError, match=words) as caught:
        profile_from_object({**file, **change}, name="bad", where="bad.json")
    assert str(caught.value).startswith("bad.json") and "\n" not in str(caught.value)


def test_alpha_beta_fit_recovers_a_link_and_never_goes_negative() -> None:
    link = fit([4096, 1 << 18, 1 << 24], [0.01 + s / 4e7 for s in (4096, 1 << 18, 1 << 24)])
    assert link.latency_ms == pytest.approx(0.01) and 1e-6 / link.ms_per_byte == pytest.approx(40.0)
    assert fit([1e3, 1e6], [0.5, 0.2]).ms_per_byte == 0.0


def test_mps_missing_is_one_clear_line(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with pytest.raises(OctoPipeError, match="nvidia-cuda-mps-control"):
        Mps.start(num_ranks=4)


def test_a_daemon_of_somebody_else_is_used_and_left_alone(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/theirs")
    with Mps.start(num_ranks=4) as mps:
        assert mps.environment == {
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
            "CUDA_DEVICE_MAX_CONNECTIONS": "16",
        }


# --- prediction with neighbours --------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("channel", ["directed", "single", "blocking"])
def test_without_contention_the_prediction_is_the_simulator(system, channel) -> None:
    costs = resolve_costs("nemotron-h-8b", pp=4, tp=4)
    plan = build_plan(system, costs, 4, 8)
    program = lower(plan, costs, channel=channel)
    ours, theirs = predict(program, Profile(costs=costs)), simulate(program, costs)
    assert np.allclose(ours.spans.start_ms, theirs.spans.start_ms)
    assert np.allclose(ours.transfers.end_ms, theirs.transfers.end_ms)
    assert np.allclose(ours.peak_bytes, theirs.peak_bytes)


def test_a_rank_alone_runs_at_its_speed_alone() -> None:
    costs = CostTable.uniform(num_layers=2, forward_ms=2.0, input_ms=2.0, weight_ms=2.0)
    quick = costs.replace(forward_ms=np.ones(2), input_ms=np.ones(2), weight_ms=np.ones(2))
    plan = build_plan("1f1b", costs, 2, 1)  # one micro-batch: never two ranks at work
    profile = Profile(costs=costs, partial={1: quick})
    assert predict(plan, profile).makespan_ms == pytest.approx(simulate(plan, quick).makespan_ms)


def test_speed_changes_in_the_middle_of_an_op() -> None:
    # Two ranks, no dependency in time: rank 1's op is half as long; alone, everything is twice as fast.
    costs = CostTable.uniform(num_layers=2, forward_ms=4.0, input_ms=4.0, weight_ms=4.0)
    quick = costs.replace(forward_ms=np.full(2, 2.0), input_ms=np.full(2, 2.0), weight_ms=np.full(2, 2.0))
    plan = build_plan("1f1b", costs, 2, 2)
    by_hand = 2.0  # 0F0 alone: half of 4
    by_hand += 4.0  # 0F1 beside 1F0: both slow
    by_hand += 4.0  # 1B0 alone: half of 8
    by_hand += 4.0  # 1F1 beside the first half of 0B0
    by_hand += 8.0 - 4.0 + 0.0  # second half of 0B0 beside the first half of 1B1
    by_hand += 2.0 + 4.0  # the rest of 1B1 alone, then 0B1 alone
    assert predict(plan, Profile(costs=costs, partial={1: quick})).makespan_ms == pytest.approx(by_hand)


def test_what_passes_between_ops_counts_once_per_op_and_is_no_work() -> None:
    costs = CostTable.uniform(num_layers=2, forward_ms=2.0, input_ms=2.0, weight_ms=2.0)
    plan = build_plan("1f1b", costs, 2, 1)  # one after the other: 0F0 1F0 1B0 0B0
    seen = predict(plan, Profile(costs=costs, op_overhead_ms=0.5))
    assert seen.makespan_ms == pytest.approx(2 + 2 + 4 + 4 + 3 * 0.5)
    assert seen.busy_ms == pytest.approx([6, 6])


def test_a_rehearsal_corrects_op_kinds_and_finds_the_gaps() -> None:
    costs = CostTable.uniform(num_layers=4, forward_ms=2.0, input_ms=2.0, weight_ms=2.0)
    plan = rehearsal_plan(Profile(costs=costs), 2)
    true = costs.replace(weight_ms=1.1 * costs.weight_ms, input_ms=0.9 * costs.input_ms)
    seen = replace(predict(plan, Profile(costs=true, op_overhead_ms=0.25, fused_factor=0.9)), measured=True)
    found = rehearsed(Profile(costs=costs), plan, [seen, seen, seen], World.make(None, None, None))
    assert found.op_overhead_ms == pytest.approx(0.25) and found.fused_factor == pytest.approx(0.9)
    assert np.allclose(found.costs.weight_ms, true.weight_ms) and np.allclose(found.costs.input_ms, true.input_ms)
    assert np.allclose(found.costs.forward_ms, true.forward_ms)


def test_a_rehearsal_finds_transfers_that_are_slower_beside_exchanges() -> None:
    row = [("compute", 1.0), ("exchange", 1.0)]
    costs = CostTable.uniform(num_layers=4, forward_ms=2.0, input_ms=2.0, weight_ms=2.0, p2p_ms=0.2)
    costs = costs.replace(segments=Segments.from_ms([row] * 4, [row] * 4))
    plan = rehearsal_plan(Profile(costs=costs), 2)
    seen = replace(predict(plan, Profile(costs=costs.replace(network=Network.constant(0.6)))), measured=True)
    world = World.make(None, None, None)
    found = rehearsed(Profile(costs=costs), plan, [seen] * 3, world, arrivals=True)
    assert found.costs.network.transfer_ms(0, 1, 1e6) == pytest.approx(0.6)
    for profile, arrivals in ((Profile(costs=costs), False), (Profile(costs=costs.replace(segments=None)), True)):
        kept = rehearsed(profile, plan, [seen] * 3, world, arrivals=arrivals)
        assert kept.costs.network.transfer_ms(0, 1, 1e6) == pytest.approx(0.2)


# --- real ranks ------------------------------------------------------------------------------------------


def _profile_and_run(rank: int, nproc: int, work: Workload):
    world = World.make(None, None, None)
    profile = profile_workload(work, world, repeats=2, warm_up=1, state_factor=0.0)
    assert set(profile.about["rehearsal"]) == {"F", "I", "W", "B"} and profile.about["overlap_slowdown"] > 0
    plan = tune(profile.costs, nproc, 4, iterations=200, recompute=False, workers=1).plan if rank == 0 else None
    plan = world.gather(plan)[0]
    trial = run_plan(work, plan, world, profile, steps=2, warm_up=1)
    fresh, trials = side_by_side(work, {"a": plan, "b": plan}, world, profile, rounds=3, warm_up=1)
    return profile, plan, trial, fresh, trials


@pytest.mark.slow
def test_two_ranks_profile_links_and_layers_and_the_tuner_takes_it() -> None:
    work = Workload(spec=preset("nemotron-h-8b").scaled(0.03, num_layers=6), tokens=32)
    results = run_ranks(by_rank(_profile_and_run), 2, work, threads=1, timeout_s=240)
    (profile, plan, trial, fresh, trials), (other, *_) = results
    assert set(profile.costs.network.pairs) == {(0, 1), (1, 0)}
    assert profile.to_json() == other.to_json() or np.allclose(profile.costs.forward_ms, other.costs.forward_ms)
    assert 1 in profile.partial and len(profile.costs.rank_slowdown) == 2
    assert np.all(profile.partial[1].forward_ms <= profile.costs.forward_ms)
    assert trial.timeline.spans.stage.size == plan.table().stage.size and trial.timeline.measured
    assert trial.step_ms > 0 and np.isfinite(trial.loss)
    # In turns with a second profile, nothing but times is new.
    assert [len(t.steps_ms) for t in trials.values()] == [3, 3] and trials["a"].loss == trial.loss
    assert fresh.costs.network.pairs == profile.costs.network.pairs and 1 in fresh.partial
    assert np.array_equal(fresh.costs.activation_bytes, profile.costs.activation_bytes)
    assert np.array_equal(fresh.costs.static_bytes, profile.costs.static_bytes)


def _fail(rank: int, nproc: int, payload: object) -> None:
    if rank == 1:
        raise ValueError("out of cheese")
    time.sleep(PATIENCE_S)


def test_a_failing_rank_ends_all_and_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(OctoPipeError, match="rank 1: ValueError: out of cheese"):
        run_ranks(by_rank(_fail), 2, threads=1)
    assert time.monotonic() - began < PATIENCE_S


@pytest.mark.slow
def test_a_process_ends_although_its_fork_server_still_loads(tmp_path) -> None:
    """A mistake was printed, and the prompt came back when all libraries had been loaded for ranks that never ran."""
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    code = 'from octopipe.runtime.ranks.launch import warm_up\nwarm_up("endless")\n'
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0


@pytest.mark.slow
def test_a_script_that_starts_ranks_while_it_is_imported_is_told_what_to_change(tmp_path) -> None:
    """Every rank imports the script: without the guard each would start ranks of its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "from octopipe.runtime.ranks.launch import run_ranks\n"
        "def work(seat, payload):\n    return seat.rank\n"
        "print(run_ranks(work, 2, threads=1))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode != 0 and 'under `if __name__ == "__main__":`' in done.stderr
    script.write_text(script.read_text().replace("print(", 'if __name__ == "__main__":\n    print('))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr


def test_no_rank_begins_before_all_have_met() -> None:
    """A rank whose work was done at once closed its connections while the other still made them: "a rank was lost"."""
    from octopipe.runtime.ranks.rank_process import all_here

    store, order = torch.distributed.HashStore(), []

    def first() -> None:
        all_here(store, 2)
        order.append("works")

    thread = threading.Thread(target=first)
    thread.start()
    while store.add("octopipe/here", 0) == 0:
        time.sleep(0.01)
    time.sleep(0.2)  # long enough to be wrong, if it does not wait
    order.append("the other comes")
    all_here(store, 2)
    thread.join()
    assert order == ["the other comes", "works"]


@pytest.mark.slow
def test_locks_that_libraries_make_on_ranks_are_no_warning_at_the_end(tmp_path) -> None:
    """`train --data` of a saved dataset ended with "There appear to be 2 leaked semaphore objects": its progress bars
    make locks, and ranks end at once."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "from octopipe.runtime.ranks.launch import run_ranks, warm_up\n"
        "kept = []\n"
        "def work(seat, payload):\n"
        "    kept.append(multiprocessing.RLock())\n"
        "    return seat.rank\n"
        'if __name__ == "__main__":\n    warm_up()\n    print(run_ranks(work, 2, threads=1))\n'
    )
    for known in (
        {"PYTHONWARNINGS": "default"},
        {},
    ):  # nothing is left; what is left by a rank that was killed is quiet
        done = subprocess.run(
            [sys.executable, str(script)],
            env={k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"} | known,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr
        assert "leaked" not in done.stderr


def test_measuring_tells_how_far_it_has_come():
    from octopipe.runtime.measure.profiler import LayerRing

    heard: list[tuple[str, float]] = []
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    x = torch.randn(2, 4)
    ring = LayerRing(layers, x, lambda out, y: (out - y).square().mean(), x, tell=lambda *word: heard.append(word))
    ring.measure(2, 1, ())
    shares = [share for _, share in heard]
    assert shares == sorted(shares) and shares[0] == 0 and max(shares) < 1
    assert [doing for doing, _ in heard] == [
        *(f"layer kind {k} of 3 ({name}), memory" for k, name in enumerate(("Linear", "Tanh", "Linear"), 1)),
        "3 layers measured",
    ]


@pytest.mark.slow
def test_measured_layers_stand_beside_their_analytic_price(tmp_path, capsys):
    """The priced columns are those of `resolve_costs`; a device without prices is asked about before it is compared."""
    flags = ["profile", "gemma-3-27b", "--scale", "0.02", "--layers", "9", "--seq", "32", "--repeats", "1"]
    flags += ["-o", str(tmp_path / "p.json")]
    assert main([*flags, "--against-analytic"]) == 2
    assert "name a GPU" in capsys.readouterr().err
    assert main([*flags, "--against-analytic", "h200", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["against_analytic"]
    spec = preset("gemma-3-27b").scaled(0.02, num_layers=9)
    priced = resolve_costs(spec, pp=1, tp=1, seq=32, gpu="h200", stack="octopipe")
    assert said["gpu"] == "h200" and sum(row["layers"] for row in said["rows"]) == 9
    total = sum(row["layers"] * row["analytic_ms"][op] for row in said["rows"] for op in "FIW")
    assert total == pytest.approx(float(priced.layer_ms.sum()))
    for row in said["rows"]:
        assert row["ratio"]["all"] == pytest.approx(sum(row["measured_ms"].values()) / sum(row["analytic_ms"].values()))
