"""Elastic restart under torchrun: a node is lost, and the rest goes on with fewer ranks where the checkpoint ends."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from ranks import free_port, start_server  # noqa: E402
from torchrun import torchrun  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.cli import main  # noqa: E402
from octopipe.runtime.training.checkpoint import checkpoints  # noqa: E402
from octopipe.runtime.training.checkpoint_folder import damage  # noqa: E402

STEPS, LOST_AT, SAVE_EVERY = 12, 8, 3
COMMAND = (
    *("train", "nemotron-h-8b", "--scale", "0.005", "--layers", "6", "--seq", "16", "--json", "--timeout", "60s"),
    *("--micro-batches", "4", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)),
)
LIMIT_S = 300.0
"""Far above what it takes: some twenty seconds, half of them patience with the node that is lost."""
LOSES_POWER = f"""
import os, signal, sys
from octopipe.cli import main
from octopipe.runtime.training import train as trainer

agent, step_of = int(sys.argv.pop(1)), trainer._Run._step

def step(self, number):
    if self.seat.rank == 1 and number == {LOST_AT}:
        os.kill(agent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return step_of(self, number)

trainer._Run._step = step
sys.exit(main())
"""
"""`octopipe` on a node that goes, with torchrun's agent and its rank, in the middle of a step."""


def node(port: int, script: Path, command: Sequence[str], folder: Path, hosts: bool) -> None:
    """One of torchrun's agents, with one rank; one of them hosts the store of all. Writes down what the rank says."""
    agent = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1", "--monitor-interval", "0.1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"]
    # A lost node is given up after six beats of a second; then the rest waits five more for one that comes late.
    conf = f"is_host={int(hosts)},keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout=5"
    words = [*agent, *meeting, "--rdzv-conf", conf, str(script), str(os.getpid()), *command]
    (folder / "said").write_text(torchrun(words, folder, folder / "logs"))


@pytest.mark.slow
def test_a_run_that_loses_a_node_goes_on_with_the_losses_of_one_that_did_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, script = tmp_path / "run", tmp_path / "loses_power.py"
    script.write_text(LOSES_POWER)
    words = (*COMMAND, "--tune", "1s", "--elastic", "--checkpoint", str(folder))
    port, homes = free_port(), (tmp_path / "stays", tmp_path / "goes")
    start_server()
    nodes = []
    for home in homes:  # Ranks are numbered by their agents' process numbers: the first of these has rank 0.
        home.mkdir()
        nodes.append(
            mp.get_context("forkserver").Process(target=node, args=(port, script, words, home, home is homes[0]))
        )
        nodes[-1].start()
    try:
        for process in nodes:
            process.join(timeout=LIMIT_S)
        assert [process.exitcode for process in nodes] == [0, -signal.SIGKILL]
    finally:
        for process in nodes:
            process.kill()
    out = (homes[0] / "said").read_text()
    told = json.loads(out[out.index("{") :])
    resumed = LOST_AT - 1 - (LOST_AT - 1) % SAVE_EVERY
    assert (told["num_ranks"], told["first_step"]) == (1, resumed + 1)
    assert main([*COMMAND, "--nproc", "1", "--no-measure"]) == 0
    whole = {h["step"]: h["loss"] for h in json.loads(capsys.readouterr().out)["history"]}
    assert [h["step"] for h in told["history"]] == list(range(resumed + 1, STEPS + 1))
    for h in told["history"]:
        assert h["loss"] == pytest.approx(whole[h["step"]], rel=1e-4)
    assert all(damage(path) == "" for path in checkpoints(folder))


def test_an_elastic_run_begins_goes_on_with_fewer_ranks_and_loses_no_digit(tmp_path: Path) -> None:
    from test_train import job

    from octopipe.runtime.training import train as trainer

    whole = trainer.train(job(nproc=1, steps=6))
    first = trainer.train(job(nproc=2, steps=4, elastic=True, checkpoint=str(tmp_path), save_every=2))
    rest = trainer.train(job(nproc=1, steps=6, elastic=True, checkpoint=str(tmp_path)))
    assert whole is not None and first is not None and rest is not None
    assert (first.first_step, rest.first_step, rest.plan.num_ranks) == (1, 5, 1)
    assert [*first.losses, *rest.losses] == pytest.approx(whole.losses, rel=1e-5)


def test_an_elastic_run_needs_a_folder_and_a_batch_that_does_not_depend_on_the_ranks() -> None:
    from test_train import job

    with pytest.raises(OctoPipeError, match="needs --checkpoint and --micro-batches"):
        job(elastic=True)
    with pytest.raises(OctoPipeError, match="depends on how many ranks are left"):
        job(elastic=True, checkpoint="x", micro_batches=None)
    with pytest.raises(OctoPipeError, match="leave --resume out"):
        job(elastic=True, checkpoint="x", resume=True)
