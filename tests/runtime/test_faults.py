"""Faults on real processes: whatever happens to a rank is told with rank, op and remedy, and costs no checkpoint.

One harness: a run of two ranks in which one rank does something to itself at a moment that is named, not timed.
"""

from __future__ import annotations

import contextlib
import glob
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from effort import some
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
from test_train import job  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.runtime.ranks import launch  # noqa: E402
from octopipe.runtime.ranks.rendezvous import local_store  # noqa: E402
from octopipe.runtime.training import train as trainer  # noqa: E402
from octopipe.runtime.training.checkpoint import checkpoints  # noqa: E402
from octopipe.runtime.training.checkpoint_folder import damage  # noqa: E402
from octopipe.runtime.training.job import TrainJob, TrainResult  # noqa: E402

TIMEOUT_S = 30.0
"""Of runs whose fault nobody can tell from a slow rank; it is waited out. All others must be noticed long before
`PATIENCE_S`, which is far below the 1800 s that torch would wait."""
REAL_TRAIN_RANK = trainer.train_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a rank does to itself, and when: at "start", in "step" 4, while "saving" step 4, or "midway" in that."""

    act: str
    when: str
    rank: int = 1
    folder: str = ""


def train_with_fault(fault: Fault, seat: launch.Seat, asked: TrainJob) -> TrainResult | None:
    """A rank's run; leaves its process number in the folder."""
    Path(fault.folder, f"pid-{seat.rank}").write_text(str(os.getpid()))
    if seat.rank == fault.rank:
        _prepare(fault)
    return REAL_TRAIN_RANK(seat, asked)


def _prepare(fault: Fault) -> None:
    act = partial(ACTS[fault.act])
    if fault.when == "start":
        act()
    elif fault.when in ("saving", "midway"):
        import octopipe.runtime.training.checkpoint as saving

        real = saving._write_layers

        def write(folder: Path, contents: Any) -> Any:
            if folder.name.startswith("step-00000004"):
                if fault.when == "midway":
                    real(folder, [next(iter(contents))])
                act()
            return real(folder, contents)

        saving._write_layers = write
    else:
        _in_step_4(fault.when, act)


def _in_step_4(when: str, act: Any) -> None:
    """In the second micro-batch's F, I or W of step 4."""
    from octopipe.runtime.executor import Executor
    from octopipe.runtime.stages.stage import Stage, StageRun
    from octopipe.runtime.stages.wgrad import WeightQueue

    state = {"step": 0, "calls": 0}
    begin = Executor._begin

    def count(self: Executor, step: int) -> None:
        state["step"], state["calls"] = state["step"] + 1, 0
        begin(self, step)

    Executor._begin = count  # type: ignore[method-assign]

    def wrapped(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            state["calls"] += 1
            if state["step"] == 4 and state["calls"] == 2:
                act()
            return real(*args, **more)

        return call

    if when == "I":
        StageRun.backward_input = wrapped(StageRun.backward_input)  # type: ignore[method-assign]
    elif when == "W":
        WeightQueue.run = wrapped(WeightQueue.run)  # type: ignore[method-assign]
    else:
        made = Stage.__init__

        def init(self: Stage, *args: Any, **more: Any) -> None:
            made(self, *args, **more)
            self.modules[-1].register_forward_pre_hook(wrapped(lambda *_: None))

        Stage.__init__ = init  # type: ignore[method-assign]


def _raise(error: BaseException) -> None:
    raise error


def _fill_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))


ACTS: dict[str, Any] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "raise": lambda: _raise(ValueError("a bad layer")),
    "gpu memory": lambda: _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
    "host memory": lambda: _raise(MemoryError("no room")),
    "slow": lambda: time.sleep(1.0),
    "hang": lambda: time.sleep(PATIENCE_S),
    "full disk": _fill_the_disk,
}


def run(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> TrainResult:
    """The run with its fault. Ends in time, leaves no process, no shared memory and only good checkpoints."""
    here = replace(fault, folder=str(folder))
    timeout_s = TIMEOUT_S if fault.act in ("hang", "stop") else PATIENCE_S
    asked = job(nproc=2, steps=6, checkpoint=str(folder / "run"), save_every=2, timeout_s=timeout_s, **changes)
    monkeypatch.setattr(trainer, "train_rank", partial(train_with_fault, here))
    began = time.monotonic()
    try:
        result = trainer.train(asked)
        assert result is not None
        return result
    finally:
        assert time.monotonic() - began < PATIENCE_S
        pids = [int(p.read_text()) for p in folder.glob("pid-*")]
        assert len(pids) == 2
        for pid in pids:
            assert not _lives(pid), f"process {pid} is left"
            assert glob.glob(f"/dev/shm/*_{pid}_*") == []
        for path in checkpoints(folder / "run"):
            assert damage(path) == ""


def slow(*values: str) -> Any:
    """A fault that the slow tier tries: one of its kind, or at its place, is among the quick ones."""
    return pytest.param(*values, marks=pytest.mark.slow)


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("act", "when", "said"),
    [
        slow("kill", "start", r"^rank 1 was killed by SIGKILL; rank 0: while [^,]+, a rank was lost"),
        ("kill", "F", r"^rank 1 was killed by SIGKILL; rank 0 did not get the input gradient of 1\w+ "),
        ("kill", "saving", r"^rank 1 was killed by SIGKILL; rank 0: while step 4 was saved, a rank was lost"),
        slow("stop", "start", r"^rank 1 is stopped \(SIGSTOP\).*SIGCONT"),
        ("stop", "F", r"^rank 1 is stopped \(SIGSTOP\).*SIGCONT.*within 30 s"),
        slow("stop", "saving", r"^rank 1 is stopped \(SIGSTOP\).*while step 4 was saved, not every rank answered"),
        slow("terminate", "start", r"^rank 1 was killed by SIGTERM"),
        ("hang", "F", r"did not get the .* within 30 s; pending ops: .*rank 1: runs 1F1"),
        ("raise", "F", r"^rank 1: ValueError: a bad layer .*in 1F1: forward of .* 1 in stage 1 on rank 1, layer 7 \("),
        slow("raise", "saving", r"^rank 1: ValueError: a bad layer"),
        slow(
            "gpu memory", "F", r"^rank 1: OutOfMemoryError: CUDA out of memory.*in 1F1: .*; use smaller micro-batches"
        ),
        ("gpu memory", "I", r"^rank 1: OutOfMemoryError: .*in 1I1: input gradient of .* layers 4 to 7; use smaller"),
        slow("host memory", "W", r"^rank 1: MemoryError: no room .*in 1W1: weight gradient of .* layers 4 to 7; use "),
        ("full disk", "saving", r"the checkpoint cannot be written \(File too large\); check the folder"),
    ],
)
def test_a_fault_is_told_with_rank_op_and_remedy(
    act: str, when: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = "zb-h1" if when in "IW" else "1f1b"
    with pytest.raises(OctoPipeError, match=said) as caught:
        run(Fault(act=act, when=when), tmp_path, monkeypatch, system=system)
    assert "gloo" not in str(caught.value) and "\n" not in str(caught.value)
    if when != "start":
        assert "step-00000002 is valid: --resume continues from it" in str(caught.value)


@pytest.mark.parametrize("when", some(["saving", "F"]))
def test_a_rank_that_is_asked_to_end_makes_all_save_and_end(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(Fault(act="terminate", when=when), tmp_path, monkeypatch)
    assert result.stopped_by == signal.SIGTERM
    assert [r.step for r in result.reports][-1] in (4, 5)
    assert result.checkpoint == str(checkpoints(tmp_path / "run")[-1])


def test_a_slow_rank_changes_nothing_and_a_broken_run_goes_on_as_if_it_had_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow").mkdir()
    whole = run(Fault(act="slow", when="F"), tmp_path / "slow", monkeypatch)
    with pytest.raises(OctoPipeError):
        run(Fault(act="raise", when="F"), tmp_path, monkeypatch)
    monkeypatch.setattr(trainer, "train_rank", REAL_TRAIN_RANK)
    rest = trainer.train(job(nproc=2, steps=6, checkpoint=str(tmp_path / "run"), save_every=2, resume=True))
    assert rest is not None and rest.losses == whole.losses[2:]


@pytest.mark.parametrize("rank", some([1, 0]))
def test_a_save_that_is_killed_behind_a_step_never_was_and_the_next_run_goes_on_from_the_one_before(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = rf"^rank {rank} was killed by SIGKILL.*step-00000002 is valid: --resume continues from it"
    with pytest.raises(OctoPipeError, match=said):
        run(Fault(act="kill", when="midway", rank=rank), tmp_path, monkeypatch, async_save=True)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000002"]
    half = tmp_path / "run" / "step-00000004.partial"
    assert len(list(half.glob("layer-*.pt"))) >= 1
    monkeypatch.setattr(trainer, "train_rank", REAL_TRAIN_RANK)
    asked = job(nproc=2, steps=3, checkpoint=str(tmp_path / "run"), resume=True, async_save=True)
    rest, whole = trainer.train(asked), trainer.train(job(nproc=1, steps=3))
    assert rest is not None and whole is not None
    assert rest.first_step == 3 and rest.losses == pytest.approx(whole.losses[2:], rel=1e-5)
    assert not list((tmp_path / "run").glob("*.partial"))


def another_model_on_rank_1(seat: launch.Seat, asked: TrainJob) -> TrainResult | None:
    if seat.rank == 1:
        import test_train

        test_train.H *= 2
        asked = replace(asked, spec=test_train.tiny())
    return REAL_TRAIN_RANK(seat, asked)


def test_a_peer_with_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "train_rank", another_model_on_rank_1)
    with pytest.raises(OctoPipeError, match=r"rank 1.*(shape|layer|size)"):
        trainer.train(job(nproc=2, steps=2, timeout_s=PATIENCE_S))


def stops_at_once(seat: launch.Seat, _: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_run_of_which_every_rank_is_stopped_is_given_up() -> None:
    with pytest.raises(launch.RankError, match=r"^rank \d is stopped \(SIGSTOP\) for 4 s: resume it with SIGCONT"):
        launch.run_ranks(stops_at_once, 2, hang_s=2.0, grace_s=2.0)


def listening_sockets(seat: launch.Seat, _: Any) -> list[str]:
    import torch.distributed as dist

    dist.barrier()
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_socket(fd)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.append(words[1].partition(":")[0])
    return found


def _is_socket(fd: str) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return False


def test_nothing_listens_outside_this_host() -> None:
    every = launch.run_ranks(listening_sockets, 2)
    assert all(every), "a rank listens for its peers"
    assert {address for found in every for address in found} == {"0100007F"}
    store = local_store()
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [row[1] for row in rows if row[1].endswith(f":{store.port:04X}") and row[3] == "0A"] == [
        f"0100007F:{store.port:04X}"
    ]
    six = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    assert not [row for row in six if row[1].endswith(f":{store.port:04X}") and row[3] == "0A"]


@pytest.mark.slow
def test_a_port_in_use_is_told_with_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        seat = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = ["train", "nemotron-h-8b", "--scale", "0.005", "--layers", "6", "--no-measure", "--timeout", "5s"]
        done = subprocess.run(
            [sys.executable, "-m", "octopipe", *words],
            env={**os.environ, **seat},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("octopipe:")]
    assert f"127.0.0.1:{port}: the port is in use; set another MASTER_PORT" in lines[-1]
