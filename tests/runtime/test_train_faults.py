"""Runs that are asked to stop, go wrong or find their checkpoints damaged: nothing good is ever lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
from test_train import job  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.cli import main  # noqa: E402
from octopipe.runtime.training import train as trainer  # noqa: E402
from octopipe.runtime.training.checkpoint import checkpoints, latest  # noqa: E402
from octopipe.runtime.training.checkpoint_folder import damage, locked  # noqa: E402
from octopipe.runtime.training.guard import FiniteWatch  # noqa: E402

COMMAND = (
    *("nemotron-h-8b", "--scale", "0.005", "--layers", "6", "--seq", "16", "--micro-batches", "2"),
    *("--no-measure", "--steps", "100000", "--save-every", "2", "--timeout", "300s"),
)


def started(folder: Path, *more: str) -> subprocess.Popen[str]:
    """A run on two ranks that has saved something."""
    words = [sys.executable, "-m", "octopipe", "train", *COMMAND, "--checkpoint", str(folder), *more]
    # Where tests run in the background, a shell has told them to ignore Ctrl-C.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hears)
    end = time.monotonic() + PATIENCE_S
    while latest(folder) is None and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    assert latest(folder) is not None and process.poll() is None, process.communicate()
    return process


def assert_stopped(number: signal.Signals, name: str, folder: Path, code: int, errors: str) -> None:
    """It ended as it was asked to, with a whole checkpoint of its last step."""
    assert code == 128 + number, errors
    last = latest(folder)
    assert last is not None and damage(last) == ""
    line = errors.strip().splitlines()[-1]
    assert line.startswith(f"octopipe: {name} after step {int(last.name[5:])}; saved ")
    assert "--resume continues from it" in line and "Traceback" not in errors


def test_a_run_that_is_asked_to_stop_saves_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, over = tmp_path / "run", threading.Event()

    def ask() -> None:
        while latest(folder) is None and not over.wait(0.1):
            pass
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        code = main(["train", *COMMAND, "--checkpoint", str(folder)])
    finally:
        over.set()
        asking.join()
    assert_stopped(signal.SIGTERM, "SIGTERM", folder, code, capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_process_that_is_asked_to_stop_saves_and_says_so(number: signal.Signals, name: str, tmp_path: Path) -> None:
    process = started(tmp_path / "run")
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert_stopped(number, name, tmp_path / "run", process.returncode, errors)


def test_a_second_run_into_one_folder_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(OctoPipeError, match="writes its checkpoints there"):
        trainer.train(job(nproc=1, checkpoint=str(tmp_path / "run")))


def test_a_folder_that_takes_nothing_is_noticed_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OctoPipeError, match="cannot be written there"):
        trainer.train(job(nproc=1, checkpoint=str(tmp_path / "file" / "run")))


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_that_breaks_keeps_every_good_checkpoint(nproc: int, tmp_path: Path) -> None:
    asked = job(nproc=nproc, steps=30, lr=1e30, clip=None, optimizer="sgd", checkpoint=str(tmp_path), save_every=1)
    with pytest.raises(OctoPipeError, match=r"(loss|gradient norm) is \S+ at step \d+") as caught:
        trainer.train(asked)
    for path in checkpoints(tmp_path):
        assert damage(path) == ""
        for file in path.glob("layer-*.pt"):
            state = torch.load(file, weights_only=True)["state"]
            assert all(bool(torch.isfinite(v).all()) for v in state.values())
    if checkpoints(tmp_path):
        assert "is valid: --resume continues from it" in str(caught.value)


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    asked = job(nproc=1, steps=4, checkpoint=str(tmp_path), save_every=2)
    whole = trainer.train(asked)
    assert whole is not None
    (tmp_path / "step-00000004" / "layer-0001.pt").write_bytes(b"gone")
    heard: list[str] = []
    rest = trainer.train(replace(asked, resume=True), lambda word: heard.append(getattr(word, "text", "")))
    assert rest is not None and rest.losses == whole.losses[2:]
    assert any("layer-0001.pt" in text for text in heard)
    assert any("step-00000002, the newest valid" in text for text in heard)


def test_a_run_goes_on_from_the_step_that_is_named(tmp_path: Path) -> None:
    asked = job(nproc=1, steps=6, checkpoint=str(tmp_path), save_every=2)
    whole = trainer.train(asked)
    rest = trainer.train(replace(asked, resume=True, resume_step=2))
    assert whole is not None and rest is not None
    assert rest.losses == whole.losses[2:]
    with pytest.raises(OctoPipeError, match="no checkpoint of step 3"):
        trainer.train(replace(asked, resume=True, resume_step=3))
    with pytest.raises(OctoPipeError, match="add --resume"):
        replace(asked, resume_step=2)


def test_a_run_that_goes_back_to_an_earlier_step_goes_on_with_its_new_branch(tmp_path: Path) -> None:
    asked = job(nproc=1, steps=6, checkpoint=str(tmp_path), save_every=1, keep=2)
    trainer.train(asked)
    start = checkpoints(tmp_path)[0]  # the older one that stays
    back = int(start.name[5:])
    assert back < 4
    shutil.copytree(start, tmp_path / "twin" / start.name)
    # Another learning rate: the new branch is another run from here on.
    again = replace(asked, resume=True, resume_step=back, steps=back + 2, lr=0.02)
    first = trainer.train(again)
    assert first is not None and first.checkpoint is not None and Path(first.checkpoint).is_dir()
    assert any("branch-1" in text for text in first.notices)
    rest = trainer.train(replace(again, resume_step=None, steps=back + 4))
    assert rest is not None and rest.first_step == back + 3
    twin = trainer.train(replace(again, checkpoint=str(tmp_path / "twin"), resume_step=None, steps=back + 4))
    assert twin is not None and twin.losses == [*first.losses, *rest.losses]
    old = trainer.train(replace(asked, checkpoint=str(tmp_path / "branch-1"), resume=True, steps=8))
    assert old is not None and old.first_step == 7


def test_a_damaged_checkpoint_is_told_on_a_pipe_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", *COMMAND[:9], "--no-measure", "--nproc", "1", "--save-every", "1", "--checkpoint", str(tmp_path)]
    assert main([*words, "--steps", "3"]) == 0
    capsys.readouterr()
    (tmp_path / "step-00000003" / "layer-0001.pt").write_bytes(b"gone")
    assert main([*words, "--resume", "--steps", "2"]) == 0  # nothing to do, and yet it is said
    assert "step-00000003/layer-0001.pt" in capsys.readouterr().err
    assert main([*words, "--resume", "--steps", "4", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "step-00000003/layer-0001.pt" in err and "step-00000002, the newest valid" in err
    told = json.loads(out)
    assert told["first_step"] == 3 and any("layer-0001.pt" in text for text in told["notices"])


def test_another_seed_does_not_go_on_with_a_run(tmp_path: Path) -> None:
    asked = job(nproc=1, steps=2, checkpoint=str(tmp_path))
    trainer.train(asked)
    with pytest.raises(OctoPipeError, match="use --seed 0"):
        trainer.train(replace(asked, resume=True, seed=5, steps=4))
    with pytest.raises(OctoPipeError, match="seed is -1"):
        job(seed=-1)


def test_a_gradient_norm_that_is_not_finite_is_told(tmp_path: Path) -> None:
    watch = FiniteWatch(torch.device("cpu"))
    watch.look(1, torch.tensor(1.0), torch.tensor(2.0))
    with pytest.raises(OctoPipeError, match="the gradient norm is inf at step 2"):
        watch.look(2, torch.tensor(1.0), torch.tensor(float("inf")))


@pytest.mark.slow
def test_stopping_leaves_no_process_behind(tmp_path: Path) -> None:
    process = started(tmp_path / "run")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in children):
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    with locked(tmp_path / "run"):  # a lock ends with its process
        pass
    found = checkpoints(tmp_path / "run")
    assert found and all(damage(path) == "" for path in found)
    assert os.path.exists(tmp_path / "run")
