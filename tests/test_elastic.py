"""Elastic restart under torchrun: a node is lost, and the rest goes on with fewer ranks where the checkpoint ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from ranks import free_port  # noqa: E402

from octopipe.errors import OctoPipeError  # noqa: E402
from octopipe.training.checkpoint import checkpoints, latest  # noqa: E402
from octopipe.training.shelf import damage  # noqa: E402

STEPS = 60
COMMAND = (
    *("-m", "octopipe", "train", "nemotron-h-8b", "--scale", "0.005", "--layers", "6", "--seq", "16", "--json"),
    *("--micro-batches", "4", "--steps", str(STEPS), "--save-every", "5", "--timeout", "60s"),
)
LIMIT_S = 240.0


def node(port: int, *words: str, hosts: bool) -> subprocess.Popen[str]:
    """One of torchrun's agents, with one rank; one of them hosts the store of all."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"]
    conf = f"last_call_timeout=5,is_host={int(hosts)}"
    patience = ["--rdzv-conf", conf, "--max-restarts", "3", "--monitor-interval", "0.5"]
    return subprocess.Popen(
        [*agent, *meeting, *patience, *COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def kill_with_ranks(process: subprocess.Popen[str]) -> None:
    """A node that loses power: the agent and whatever it has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)


def test_a_run_that_loses_a_node_goes_on_with_the_losses_of_one_that_did_not(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--tune", "1s", "--elastic", "--checkpoint", str(folder))
    port = free_port()
    stays, goes = (node(port, *words, hosts=hosts) for hosts in (True, False))
    try:
        end = time.monotonic() + LIMIT_S
        while latest(folder) is None and time.monotonic() < end and stays.poll() is None:
            time.sleep(0.1)
        assert latest(folder) is not None, stays.communicate(timeout=5)
        kill_with_ranks(goes)
        out, errors = stays.communicate(timeout=LIMIT_S)
    finally:
        for process in (stays, goes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    assert stays.returncode == 0, errors[-2000:]
    told = json.loads(out[out.index("{") :])
    assert told["num_ranks"] == 1 and 1 < told["first_step"] <= STEPS
    alone = subprocess.run(
        [sys.executable, *COMMAND, "--nproc", "1", "--no-measure"], capture_output=True, text=True, timeout=LIMIT_S
    )
    whole = {h["step"]: h["loss"] for h in json.loads(alone.stdout)["history"]}
    assert [h["step"] for h in told["history"]] == list(range(told["first_step"], STEPS + 1))
    for h in told["history"]:
        assert h["loss"] == pytest.approx(whole[h["step"]], rel=1e-4)
    assert all(damage(path) == "" for path in checkpoints(folder))


def test_an_elastic_run_needs_a_folder_and_a_batch_that_does_not_depend_on_the_ranks() -> None:
    from test_train import job

    with pytest.raises(OctoPipeError, match="needs --checkpoint and --micro-batches"):
        job(elastic=True)
    with pytest.raises(OctoPipeError, match="depends on how many ranks are left"):
        job(elastic=True, checkpoint="x", micro_batches=None)
    with pytest.raises(OctoPipeError, match="leave --resume out"):
        job(elastic=True, checkpoint="x", resume=True)
