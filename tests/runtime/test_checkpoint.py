"""Checkpoints by layer: whatever plan wrote them, whatever plan reads them."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from effort import some
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
from executor_models import NUM_LAYERS, make  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Op, Plan, Stage  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.world import World  # noqa: E402
from octopipe.runtime.training import checkpoint  # noqa: E402
from octopipe.runtime.training.checkpoint import (  # noqa: E402
    NotFinite,
    Saving,
    checkpoints,
    latest,
    load_checkpoint,
    read_record,
    save_checkpoint,
)
from octopipe.runtime.training.checkpoint_folder import (  # noqa: E402
    FORMAT_1,
    DamagedCheckpoint,
    choose,
    damage,
    locked,
    resolve,
    rotate,
)
from octopipe.search.systems import build_plan  # noqa: E402

torch.set_num_threads(1)


def _single() -> Plan:
    ops = tuple(Op(0, kind, m) for m in range(4) for kind in "FB")
    stage = Stage(first=0, stop=NUM_LAYERS, rank=0)
    return Plan(num_layers=NUM_LAYERS, num_ranks=1, num_micro_batches=4, stages=(stage,), orders=(ops,))


def train(world, plan, folder, load, kind, steps=2, seed=0, factor=1):
    """Load if asked, train some steps, save; returns the losses."""
    case = make(kind, 4, seed=seed)
    inputs, targets = make(kind, 4)[1:3]
    with Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        if load is not None:
            load_checkpoint(load, pipe, optimizer)
        losses = []
        for _ in range(steps):
            losses.append(float(pipe.step(inputs, targets)))
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(folder, pipe, optimizer, step=factor * pipe.step_number)
    return losses


@pytest.mark.parametrize("kind", some(["tied", "dropout"]))
@pytest.mark.parametrize("plans", some([("1f1b", "chimera"), ("chimera", "alone"), ("alone", "interleaved")], quick=2))
def test_a_run_goes_on_under_another_plan(kind, plans, tmp_path, two):
    first, second = plans
    costs = CostTable.uniform(num_layers=NUM_LAYERS)

    def run(name, load, seed):
        if name == "alone":
            return train(World(None), _single(), tmp_path, load, kind, seed=seed)
        return two.run(train, build_plan(name, costs, 2, 4), tmp_path, load, kind, 2, seed)[0]

    straight = train(World(None), _single(), tmp_path / "straight", None, kind, steps=4)
    assert run(first, None, 0) == pytest.approx(straight[:2], rel=1e-11)
    # Other starting weights: everything must come from the checkpoint.
    assert run(second, latest(tmp_path), 1) == pytest.approx(straight[2:], rel=1e-11)
    assert latest(tmp_path).name == "step-00000004"


@pytest.mark.parametrize("factor", [1, 10])
def test_random_numbers_go_on_where_the_saved_run_stood(factor, tmp_path, two):
    """Whatever number a script gives its checkpoints, and under another plan."""
    straight = train(World(None), _single(), tmp_path / "straight", None, "dropout", steps=6)
    first = train(World(None), _single(), tmp_path / "run", None, "dropout", 3, 0, factor)
    path = latest(tmp_path / "run")
    assert path.name == f"step-{3 * factor:08d}" and first == straight[:3]
    assert train(World(None), _single(), tmp_path / "alone", path, "dropout", 3, 1) == straight[3:]
    plan = build_plan("zb-h1", CostTable.uniform(num_layers=NUM_LAYERS), 2, 4)
    for losses in two.run(train, plan, tmp_path / "run", path, "dropout", 3, 1, factor):
        assert losses == pytest.approx(straight[3:], rel=1e-11)
    assert read_record(latest(tmp_path / "run"))["step_number"] == 6


def test_a_checkpoint_of_an_older_version_stands_at_its_step(tmp_path):
    path = saved(tmp_path, 3)
    record = json.loads((path / "run.json").read_text())
    del record["step_number"]
    (path / "run.json").write_text(json.dumps(record))
    case = make("plain", 4)
    with Pipeline(case.layers, _single(), case.loss_fn, group=World(None), timeout_s=PATIENCE_S) as pipe:
        load_checkpoint(path, pipe)
        assert pipe.step_number == 3


def test_the_folder_of_a_run_in_the_place_of_a_checkpoint_is_told_which_one_to_load(tmp_path):
    home = tmp_path / "ck"
    saved(home, 2)
    newest = saved(home, 3)
    shutil.copytree(newest, home / "step-00000009.partial")  # of a run that was killed
    with pytest.raises(OctoPipeError, match=rf"ck is a folder of checkpoints; load \S*ck/{newest.name}$"):
        train(World(None), _single(), tmp_path, home, "plain")
    with pytest.raises(OctoPipeError, match=r"run\.json: no such file"):
        read_record(tmp_path)
    with pytest.raises(OctoPipeError, match=rf"{newest.name} is one checkpoint; give its folder: --checkpoint {home}$"):
        choose(newest)
    with pytest.raises(OctoPipeError, match="no checkpoint to resume from"):
        choose(tmp_path)


def test_state_is_keyed_by_layer_whatever_the_plan(two):
    plans = [build_plan(name, CostTable.uniform(num_layers=NUM_LAYERS), 2, 4) for name in ("1f1b", "chimera")]
    alone = set(Pipeline(make("moe", 4).layers, _single(), make("moe", 4).loss_fn, group=World(None)).state_dict())
    for plan in plans:
        assert set().union(*two.run(keys, plan)) == alone


def keys(world, plan):
    case = make("moe", 4)
    with Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        state = pipe.state_dict()
        pipe.load_state_dict({**state, "99.weight": torch.zeros(1)})
    return set(state)


def test_damaged_layers_are_named(tmp_path):
    train(World(None), _single(), tmp_path, None, "plain")
    path = latest(tmp_path)
    (path / "layer-0003.pt").write_bytes(b"nonsense")
    with pytest.raises(OctoPipeError, match=r"layer-0003\.pt"):
        train(World(None), _single(), tmp_path, path, "plain")
    (path / "layer-0003.pt").unlink()
    with pytest.raises(OctoPipeError, match=r"layer-0003\.pt: no such file"):
        train(World(None), _single(), tmp_path, path, "plain")


def saved(tmp_path: Path, steps: int = 1) -> Path:
    train(World(None), _single(), tmp_path, None, "plain", steps=steps)
    path = latest(tmp_path)
    assert path is not None
    return path


def test_a_flipped_byte_is_noticed(tmp_path):
    path = saved(tmp_path)
    assert damage(path) == ""
    file = path / "layer-0002.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "layer-0002.pt" in damage(path)
    with pytest.raises(DamagedCheckpoint, match=r"layer-0002\.pt.*checksum"):
        train(World(None), _single(), tmp_path, path, "plain")


@pytest.mark.parametrize("listed", [True, False])
def test_a_layer_in_another_ones_place_is_noticed(listed, tmp_path):
    path = saved(tmp_path)
    shutil.copy(path / "layer-0001.pt", path / "layer-0002.pt")
    if listed:  # even where the list of checksums was made to fit
        record = json.loads((path / "run.json").read_text())
        record["layers"][2]["sha256"] = record["layers"][1]["sha256"]
        (path / "run.json").write_text(json.dumps(record))
    with pytest.raises(DamagedCheckpoint, match=r"layer-0002\.pt"):
        train(World(None), _single(), tmp_path, path, "plain")


def test_a_layer_of_another_step_is_noticed(tmp_path):
    first, second = saved(tmp_path, 1), saved(tmp_path, 2)
    shutil.copy(first / "layer-0001.pt", second / "layer-0001.pt")
    with pytest.raises(DamagedCheckpoint, match=r"layer-0001\.pt"):
        train(World(None), _single(), tmp_path, second, "plain")


def test_nothing_is_loaded_from_a_checkpoint_that_is_damaged_in_part(tmp_path):
    path = saved(tmp_path)
    (path / f"layer-{NUM_LAYERS - 1:04d}.pt").write_bytes(b"x")
    case = make("plain", 4, seed=5)
    with Pipeline(case.layers, _single(), case.loss_fn, group=World(None), timeout_s=PATIENCE_S) as pipe:
        before = {k: v.clone() for k, v in pipe.state_dict().items()}
        with pytest.raises(DamagedCheckpoint):
            load_checkpoint(path, pipe)
        assert all(torch.equal(before[k], v) for k, v in pipe.state_dict().items())


def test_checkpoints_without_checksums_stay_readable(tmp_path):
    path = saved(tmp_path)
    record = json.loads((path / "run.json").read_text())
    record["format"] = "octopipe.checkpoint/1"
    del record["layers"]
    (path / "run.json").write_text(json.dumps(record))
    for k in range(NUM_LAYERS):
        content = torch.load(path / f"layer-{k:04d}.pt", weights_only=True)
        torch.save({key: content[key] for key in ("state", "optimizer")}, path / f"layer-{k:04d}.pt")
    assert damage(path) == ""
    assert len(train(World(None), _single(), tmp_path, path, "plain")) == 2


@pytest.mark.parametrize("where", ["parameter", "moment"])
def test_values_that_are_not_finite_are_never_saved(where, tmp_path):
    good = saved(tmp_path)
    case = make("plain", 4)
    with Pipeline(case.layers, _single(), case.loss_fn, group=World(None), timeout_s=PATIENCE_S) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        pipe.step(case.inputs, case.targets)
        optimizer.step()
        p = next(pipe.parameters())
        with torch.no_grad():
            (p if where == "parameter" else optimizer.state[p]["exp_avg"]).view(-1)[0] = float("nan")
        with pytest.raises(NotFinite, match="not finite"):
            save_checkpoint(tmp_path, pipe, optimizer, step=9, keep=1)
    assert checkpoints(tmp_path) == [good]


def test_a_mask_of_infinities_may_be_saved(tmp_path):
    case = make("plain", 4)
    case.layers[1].register_buffer("mask", torch.full((2, 2), float("-inf")))
    with Pipeline(case.layers, _single(), case.loss_fn, group=World(None), timeout_s=PATIENCE_S) as pipe:
        path = save_checkpoint(tmp_path, pipe, step=1)
    assert damage(path) == ""


def test_one_verified_older_checkpoint_stays_beside_the_newest(tmp_path):
    path = saved(tmp_path / "elsewhere")
    for step in range(1, 12):
        shutil.copytree(path, tmp_path / f"step-{step:08d}")
        rotate(tmp_path, 2)
        steps = [int(p.name[5:]) for p in checkpoints(tmp_path)]
        assert steps[-2:] == [step - 1, step][-len(steps) :]
        assert len(steps) <= 3
        if step > 2:
            assert step - 5 <= steps[0] <= step - 2


def test_a_damaged_checkpoint_does_not_become_the_one_that_stays(tmp_path):
    path = saved(tmp_path)
    for step in (2, 3, 4):
        shutil.copytree(path, tmp_path / f"step-{step:08d}")
    (tmp_path / "step-00000002" / "layer-0000.pt").write_bytes(b"")
    rotate(tmp_path, 2)
    assert [int(p.name[5:]) for p in checkpoints(tmp_path)] == [1, 3, 4]


def test_a_run_goes_on_from_the_newest_good_checkpoint(tmp_path):
    first, second = saved(tmp_path, 1), saved(tmp_path, 2)
    assert choose(tmp_path) == (second, [])
    (second / "layer-0001.pt").write_bytes(b"")
    path, problems = choose(tmp_path)
    assert path == first
    assert "step-00000002" in problems[0]
    assert choose(tmp_path, 1)[0] == first
    with pytest.raises(OctoPipeError, match="there are 1, 2"):
        choose(tmp_path, 7)
    with pytest.raises(DamagedCheckpoint):
        choose(tmp_path, 2)
    (first / "run.json").write_text("{}")
    with pytest.raises(DamagedCheckpoint, match="none of the 2"):
        choose(tmp_path)


def locks(world, folder):
    """What a process hears that wants this folder for itself."""
    try:
        with locked(folder):
            return ""
    except OctoPipeError as error:
        return str(error)


def test_two_runs_never_share_a_folder(tmp_path, two):
    with locked(tmp_path / "new" / "run"):
        with pytest.raises(OctoPipeError, match="writes its checkpoints there"), locked(tmp_path / "new" / "run"):
            pass
        assert all("writes its checkpoints there" in said for said in two.run(locks, tmp_path / "new" / "run"))
    with locked(tmp_path / "new" / "run"):
        pass


def test_a_folder_that_takes_nothing_is_noticed_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OctoPipeError, match="cannot be written there"), locked(tmp_path / "file"):
        pass


def _saving(folder: Path, step: int, background: bool = True):
    case = make("plain", 4)
    pipe = Pipeline(case.layers, _single(), case.loss_fn, group=World(None), timeout_s=PATIENCE_S)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    pipe.step(*make("plain", 4)[1:3])
    optimizer.step()
    return pipe, Saving(folder, pipe, optimizer, step=step, background=background)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    gate = threading.Event()
    write = checkpoint._write_layers
    monkeypatch.setattr(checkpoint, "_write_layers", lambda *a: (gate.wait(PATIENCE_S), write(*a))[1])
    pipe, saving = _saving(tmp_path, 1)
    before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    assert saving.state() == Saving.WRITING and not checkpoints(tmp_path)
    with torch.no_grad():
        for p in pipe.parameters():
            p.add_(1.0)
    gate.set()
    path = saving.finish()
    assert saving.state() == Saving.WRITTEN and not damage(path)
    load_checkpoint(path, pipe)
    assert all(torch.equal(p, before[name]) for name, p in pipe.named_parameters())
    pipe.close()


def test_a_checkpoint_that_fails_in_the_background_is_told_and_never_appears(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_layers", full)
    pipe, saving = _saving(tmp_path, 1)
    saving.wait()
    assert saving.state() == Saving.FAILED
    with pytest.raises(OctoPipeError, match="No space left on device"):
        saving.finish()
    assert not checkpoints(tmp_path)
    pipe.close()


@pytest.mark.parametrize("error", some([MemoryError("no room"), TypeError("no such thing"), SystemExit(1)]))
def test_whatever_goes_wrong_in_the_background_is_told(error, tmp_path, monkeypatch):
    def wrong(*_):
        raise error

    monkeypatch.setattr(checkpoint, "_write_layers", wrong)
    pipe, saving = _saving(tmp_path, 1)
    with pytest.raises(OctoPipeError, match=rf"the checkpoint was not written \({type(error).__name__}: "):
        saving.finish()
    assert not checkpoints(tmp_path)
    pipe.close()


def test_a_checkpoint_that_lacks_a_layer_never_appears(tmp_path, monkeypatch):
    write = checkpoint._write_layers
    monkeypatch.setattr(checkpoint, "_write_layers", lambda folder, contents: write(folder, list(contents)[1:]))
    pipe, saving = _saving(tmp_path, 1, background=False)
    with pytest.raises(OctoPipeError, match="layer 0 was written by no rank"):
        saving.finish()
    assert not checkpoints(tmp_path)
    pipe.close()


def test_what_a_killed_run_has_left_is_removed_and_nothing_else(tmp_path):
    home, path = tmp_path / "run", saved(tmp_path / "elsewhere")
    for step in (1, 2, 3):
        shutil.copytree(path, home / f"step-{step:08d}")
    found = [path.name for path in checkpoints(home)]
    shutil.copytree(home / found[0], home / "step-00000009.partial")  # written, but never named
    shutil.copytree(home / found[0], home / f"{found[1]}.partial")  # half removed
    shutil.copytree(home / found[0], home / f"{found[2]}.before.partial")  # its successor is there
    (home / "older-good.partial").write_text("step")
    (home / ".probe-0a1b").mkdir()
    (home / "notes.partial").mkdir()
    (home / "step-00000011.partial").symlink_to(tmp_path)
    with locked(home):
        assert [path.name for path in checkpoints(home)] == found
        left = {path.name for path in home.iterdir()} - {".lock", "older-good", *found}
    assert left == {"notes.partial", "step-00000011.partial"}


def test_a_checkpoint_that_was_set_aside_for_one_that_never_came_gets_its_name_back(tmp_path):
    home, newest = tmp_path, saved(tmp_path)
    shutil.copytree(newest, home / f"{newest.name}.partial")
    newest.rename(home / f"{newest.name}.before.partial")
    assert latest(home) != newest
    with locked(home):
        assert latest(home) == newest and not damage(newest)
        assert not list(home.glob("*.partial"))


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": (1 << 31) - 1}, {"num_layers": True}, {"samples": "many"}, {"samples": -1}, {"seed": None},
        {"optimizer": ["Adam"]}, {"model": 7}, {"step_number": -1}, {"step_number": "3"},
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_meant_is_told_before_anything_of_its_size_is_made(change, tmp_path):
    path = saved(tmp_path)
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(DamagedCheckpoint, match=r"run\.json (has|does not list) "):
        read_record(path)


@pytest.mark.parametrize("content", [{"state": 5}, {"state": {1: 2}}, {"optimizer": {"weight": 3}}, {"optimizer": []}])
def test_a_layer_that_holds_something_else_is_named(content, tmp_path):
    torch.save({"layer": 0, "step": 1, "state": {}, "optimizer": {}, **content}, tmp_path / "layer-0000.pt")
    with pytest.raises(DamagedCheckpoint, match="not a layer of a checkpoint"):
        checkpoint.read_layer(tmp_path, 0, {"format": FORMAT_1, "step": 1, "num_layers": 1})


# -- branches ------------------------------------------------------------------------------------------


def steps_in(folder: Path) -> list[int]:
    return [read_record(path)["step"] for path in checkpoints(folder)]


@pytest.mark.parametrize("keep", some([1, None, 2]))
def test_a_run_that_goes_back_keeps_its_own_checkpoints_and_loses_none_of_the_others(keep, tmp_path):
    for step in (2, 4, 6, 8):
        saved(tmp_path, step)
    old = {p.name: (p / "run.json").read_text() for p in checkpoints(tmp_path)}
    pipe, saving = _saving(tmp_path / "elsewhere", 1, background=False)
    saving.finish()
    load_checkpoint(tmp_path / "step-00000004", pipe)
    for step in (5, 7):
        path = save_checkpoint(tmp_path, pipe, step=step, keep=keep)
        assert choose(tmp_path) == (path, [])
    pipe.close()
    assert steps_in(tmp_path)[-1] == 7 and not {6, 8} & set(steps_in(tmp_path))
    assert steps_in(tmp_path / "branch-1") == [6, 8]
    for step in (6, 8):
        name = f"step-{step:08d}"
        assert (tmp_path / "branch-1" / name / "run.json").read_text() == old[name]
        assert damage(tmp_path / "branch-1" / name) == ""


def test_a_second_branch_gets_a_folder_of_its_own(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step)
    pipe, saving = _saving(tmp_path / "elsewhere", 1, background=False)
    saving.finish()
    for _ in range(2):
        load_checkpoint(tmp_path / "step-00000001", pipe)
        save_checkpoint(tmp_path, pipe, step=2)
    pipe.close()
    assert (steps_in(tmp_path), steps_in(tmp_path / "branch-1"), steps_in(tmp_path / "branch-2")) == (
        [1, 2], [2, 3], [2],
    )  # fmt: skip


def test_a_branch_that_saves_nothing_leaves_the_folder_as_it_was(tmp_path):
    for step in (1, 2):
        saved(tmp_path, step)
    pipe, saving = _saving(tmp_path / "elsewhere", 1, background=False)
    saving.finish()
    load_checkpoint(tmp_path / "step-00000001", pipe)
    pipe.close()
    assert steps_in(tmp_path) == [1, 2] and not (tmp_path / "branch-1").exists()


def test_loading_from_another_folder_is_no_branch_of_this_one(tmp_path):
    saved(tmp_path / "a", 5)
    for step in (1, 2, 3):
        saved(tmp_path / "b", step)
    pipe, saving = _saving(tmp_path / "elsewhere", 1, background=False)
    saving.finish()
    load_checkpoint(tmp_path / "a" / "step-00000005", pipe)
    save_checkpoint(tmp_path / "b", pipe, step=6)
    pipe.close()
    assert steps_in(tmp_path / "b") == [1, 2, 3, 6]


def test_convert_says_which_checkpoint_it_passes_over(tmp_path, caplog):
    first, second = saved(tmp_path, 1), saved(tmp_path, 2)
    (second / "layer-0001.pt").write_bytes(b"")
    assert resolve(tmp_path) == first
    assert "step-00000002" in caplog.text and "step-00000001 is used" in caplog.text
