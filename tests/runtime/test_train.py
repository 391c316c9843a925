"""Training runs: equal losses under every plan, resuming under another plan, ranks that die, data that is wrong."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import runpy
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import WHOLE
from ranks import PATIENCE_S, free_port

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.profile_file import Profile
from octopipe.costs.table import CostTable
from octopipe.models.spec import Attention, Embedding, Head, Mamba2, Mlp, ModelSpec, Moe
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.search.systems import build_plan

torch = pytest.importorskip("torch")
from octopipe.runtime.ranks import launch  # noqa: E402
from octopipe.runtime.training import step_batches  # noqa: E402
from octopipe.runtime.training import train as trainer  # noqa: E402
from octopipe.runtime.training.checkpoint import checkpoints, latest, read_record  # noqa: E402
from octopipe.runtime.training.data.batches import micro_batches  # noqa: E402
from octopipe.runtime.training.data.source import shuffled  # noqa: E402
from octopipe.runtime.training.data.synthetic import SyntheticTokens  # noqa: E402
from octopipe.runtime.training.data.token_file import TokenFile  # noqa: E402
from octopipe.runtime.training.job import StepReport, TrainJob, TrainResult  # noqa: E402
from octopipe.runtime.training.run_parts import _faster  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
H, VOCAB = 16, 64


def tiny(*, tied: bool = False) -> ModelSpec:
    """Eight layers of five kinds."""
    mlp = Mlp(hidden=H, ffn=32)
    return ModelSpec(
        name="tiny",
        layers=(
            Embedding(hidden=H, vocab=VOCAB),
            Attention(hidden=H, heads=2, kv_heads=1, head_dim=8),
            mlp,
            Mamba2(hidden=H, heads=2, head_dim=16, state=8, groups=1, conv=4, chunk=8),
            mlp,
            Moe(hidden=H, ffn=16, experts=4, top_k=2),
            mlp,
            Head(hidden=H, vocab=VOCAB, tied=tied),
        ),
    )


def job(**changes: Any) -> TrainJob:
    base = {"spec": tiny(), "steps": 4, "seq": 16, "lr": 0.01, "micro_batches": 4}
    return TrainJob(**{**base, "measure": False, "threads": 1, "timeout_s": 30.0, **changes})


def several(seat: launch.Seat, jobs: list[TrainJob]) -> list[TrainResult | None]:
    """Many runs in one set of processes: starting them is the slow part."""
    return [trainer.train_rank(seat, j) for j in jobs]


def run_all(*jobs: TrainJob) -> list[TrainResult]:
    return launch.run_ranks(several, jobs[0].nproc, list(jobs), threads=1)[0]  # type: ignore[no-any-return]


def irregular() -> Plan:
    """Uneven stages that jump between the ranks; weight gradients held back and run in reverse."""
    stages = tuple(
        Stage(first=a, stop=b, rank=r, recompute=again)
        for a, b, r, again in ((0, 1, 1, False), (1, 4, 0, True), (4, 5, 1, False), (5, 8, 0, False))
    )
    m = range(4)
    rank0 = [Op(s, "F", k) for k in m for s in (1, 3)]
    rank0 += [op for k in m for op in (Op(3, "I", k), Op(1, "R", k), Op(1, "I", k))]
    rank0 += [Op(s, "W", k) for k in reversed(m) for s in (3, 1)]
    rank1 = [Op(s, "F", k) for k in m for s in (0, 2)] + [Op(s, "I", k) for k in m for s in (2, 0)]
    rank1 += [Op(s, "W", k) for k in reversed(m) for s in (0, 2)]
    orders = (tuple(rank0), tuple(rank1))
    return Plan(num_layers=8, num_ranks=2, num_micro_batches=4, stages=stages, orders=orders).check()


# -- runs ----------------------------------------------------------------------------------------------


def test_losses_do_not_depend_on_the_plan() -> None:
    names = ("1f1b", "interleaved", "zb-h1", "gpipe") if WHOLE else ("interleaved", "zb-h1")
    runs = run_all(*(job(system=name) for name in names), job(plan=irregular()))
    alone = run_all(job(nproc=1))[0]
    first = runs[0].losses
    assert first[-1] < first[0] - 0.2 and first[0] == pytest.approx(math.log(VOCAB), abs=0.2)
    # Weight gradients in micro-batch order: bitwise equal, whatever the partition and placement.
    for name, run in zip(names, runs):
        assert run.losses == first, name
    assert alone.losses == first
    # Another order of summation: equal up to float32 rounding.
    assert runs[-1].losses[0] == first[0]
    assert runs[-1].losses == pytest.approx(first, rel=1e-5)


def test_a_tuned_plan_has_the_same_losses_and_a_prediction() -> None:
    plain = job(measure=True, dtype="float64")
    runs = trainer.train_in_turns([plain, replace(plain, tune_s=1.0, timeline=True)])
    assert runs is not None
    first, tuned = runs
    assert first.profile is not None and tuned.profile is not None
    # Which of the two is predicted to be faster depends on what this machine's profile measured.
    assert tuned.plan.extra["system"] in ("octopipe", plain.system)
    assert tuned.profile.to_json() == first.profile.to_json()
    assert tuned.losses == pytest.approx(first.losses, rel=1e-10)
    assert all(r.predicted_ms is not None and r.predicted_ms > 0 for r in runs)
    assert tuned.measured is not None and tuned.measured.measured and first.measured is None
    assert tuned.measured.spans.rank.size == sum(map(len, tuned.plan.orders))
    assert all(0 <= r.bubble_ratio < 1 and r.pipeline_ms > 0 for r in tuned.reports)


def test_the_usual_system_is_run_where_it_is_predicted_to_be_faster() -> None:
    """The search may not know what slows its plan down: a plan that does one micro-batch after the other loses."""
    costs = CostTable.uniform(num_layers=8)
    usual = build_plan("1f1b", costs, 2, 4)
    slow = tuple(tuple(sorted(order, key=lambda op: op.micro_batch)) for order in usual.orders)
    said: list[str] = []
    chosen = [
        _faster(plan, job(), Profile(costs=costs), lambda phase: said.append(phase.text))
        for plan in (replace(usual, orders=slow).check(), usual.with_extra(system="octopipe"))
    ]
    assert [plan.extra["system"] for plan in chosen] == ["1f1b", "octopipe"]
    assert said == ["1f1b is predicted to be faster than the tuned plan; using 1f1b"]


def test_data_parallel_pipelines_train_as_one_with_their_batch() -> None:
    double = job(dtype="float64", steps=3)
    two = run_all(replace(double, dp=2, micro_batches=2))[0]
    one = run_all(replace(double, nproc=1))[0]
    assert two.losses == pytest.approx(one.losses, rel=1e-10)


def test_a_run_resumes_under_another_plan_and_number_of_ranks(tmp_path: Path) -> None:
    runs = [
        job(spec=tiny(tied=tied), dtype="float64", steps=10, checkpoint=str(tmp_path / f"tied {tied}"))
        for tied in ((False, True) if WHOLE else (False,))  # whose losses are the same to the last bit
    ]
    whole = run_all(*(replace(r, nproc=1, checkpoint=None) for r in runs))
    first = run_all(*(replace(r, nproc=2, steps=5) for r in runs))
    second = run_all(*(replace(r, nproc=3, steps=7, resume=True, system="zb-h1") for r in runs))
    third = run_all(*(replace(r, nproc=1, resume=True) for r in runs))
    for k, once in enumerate(whole):
        assert (second[k].first_step, third[k].first_step) == (6, 8)
        losses = first[k].losses + second[k].losses + third[k].losses
        assert losses == pytest.approx(once.losses, rel=1e-10)
        # Tied gradients of two ranks are summed after the micro-batches, on one rank in between.
        assert k == 1 or losses == once.losses
    with pytest.raises(OctoPipeError, match="add --resume"):
        trainer.train(runs[0])
    with pytest.raises(OctoPipeError, match="same MODEL"):
        trainer.train(replace(runs[0], nproc=1, resume=True, spec=tiny().scaled(0.5)))


def test_only_the_newest_checkpoints_stay_and_a_half_written_one_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trainer.train(job(nproc=1, steps=5, checkpoint=str(folder), save_every=1, keep=2))
    assert [p.name for p in checkpoints(folder)][-2:] == ["step-00000004", "step-00000005"]
    assert len(checkpoints(folder)) == 3  # and an older good one
    (folder / "step-00000009.partial").mkdir()
    (folder / "step-00000008").mkdir()
    last = latest(folder)
    assert last is not None and read_record(last)["step"] == 5
    (last / "layer-0003.pt").write_bytes(b"not a layer")
    rest = trainer.train(job(nproc=1, steps=6, checkpoint=str(folder), resume=True))
    assert rest is not None and rest.first_step == 5  # from step 4, the newest that is good


# -- ranks that fail -----------------------------------------------------------------------------------


def _dies_in_step_3(seat: launch.Seat, asked: TrainJob) -> Any:
    if seat.rank == 1:

        def deadly(source: Any, first: int, count: int, size: int, *share: Any) -> Any:
            if first >= 2 * count * size:
                os.kill(os.getpid(), signal.SIGKILL)
            return micro_batches(source, first, count, size, *share)

        step_batches.micro_batches = deadly
    from octopipe.runtime.training.train import train_rank

    return train_rank(seat, asked)


def test_a_killed_rank_ends_the_run_with_what_the_others_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    # Long enough for a checkpoint on a busy machine: ranks that wait for each other's files are not lost.
    asked = job(steps=9, checkpoint=str(folder), save_every=2, timeout_s=PATIENCE_S)
    before = {p.pid for p in multiprocessing.active_children()}  # other tests' ranks
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_rank", _dies_in_step_3)
        with pytest.raises(launch.RankError) as caught:
            trainer.train(asked)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert text.startswith("rank 1 was killed by SIGKILL; rank 0 did not get the input gradient of 1B0 (micro-batch 0)")
    assert "from rank 1" in text and "step-00000002 is valid: --resume continues from it" in text and "\n" not in text
    assert not {p.pid for p in multiprocessing.active_children()} - before
    whole = trainer.train(replace(asked, nproc=1, checkpoint=None, steps=4))
    rest = trainer.train(replace(asked, nproc=1, resume=True, steps=4))
    assert whole is not None and rest is not None
    assert rest.losses == whole.losses[2:]


def _hangs(seat: launch.Seat, pids: Path) -> None:
    (pids / str(os.getpid())).touch()
    torch.distributed.barrier()
    if seat.rank == 0:
        raise ValueError("no tea\nleft")
    signal.pause()


def test_the_first_failing_rank_is_named_once_and_nobody_is_left(tmp_path: Path) -> None:
    with pytest.raises(launch.RankError, match=r"^rank 0: ValueError: no tea left \(test_train.py:\d+\)$"):
        launch.run_ranks(_hangs, 2, tmp_path)
    pids = [int(p.name) for p in tmp_path.iterdir()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# -- the command line ----------------------------------------------------------------------------------

SMALL = ("nemotron-h-8b", "--scale", "0.005", "--layers", "6", "--seq", "16", "--micro-batches", "4")


def test_train_prints_one_json_object_and_writes_what_was_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from octopipe.plans.file import load_plan
    from octopipe.simulation.timeline import load_timeline

    plan, timeline = tmp_path / "plan.json", tmp_path / "timeline.json"
    words = ("--system", "zb-h1", "--nproc", "2", "--steps", "4", "-o", str(plan), "--timeline", str(timeline))
    assert main(["train", *SMALL, *words, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["system"] == "zb-h1" and out["steps"] == 4 and len(out["losses"]) == 4
    assert out["losses"][-1] < out["losses"][0]
    assert out["predicted_ms"] > 0 and out["pipeline_ms"] > 0 and len(out["memory_gib"]) == 2
    assert load_plan(plan).num_layers == 6
    assert load_timeline(timeline).measured
    assert main(["train", *SMALL[:-2], "--plan", str(plan), "--steps", "2", "--no-measure"]) == 0
    assert f"loss {out['losses'][0]:.4f} -> {out['losses'][1]:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("no-such-model",),
        (*SMALL, "--plan", "/no/such/plan.json"),
        (*SMALL, "--system", "1f2b"),
        (*SMALL, "--tune", "1s", "--no-measure"),
        (*SMALL, "--nproc", "3", "--dp", "2"),
        (*SMALL, "--nproc", "7"),
        (*SMALL, "--scale", "3"),
        (*SMALL, "--resume"),
        (*SMALL, "--resume", "--checkpoint", "/no/such/run"),
        (*SMALL, "--data", "/no/such/tokens.bin", "--nproc", "1", "--no-measure"),
        (*SMALL, "-o", "/no/such/folder/plan.json"),
        (*SMALL, "--profile", "/no/such/profile.json"),
        ("deepseek-v3", "--scale", "nan"),
    ],
)
def test_mistakes_give_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    try:
        code = main(["train", *words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and "Traceback" not in captured.err
    assert captured.err.strip().splitlines()[-1].startswith("octopipe")


def test_a_plan_of_another_shape_is_refused_before_anything_starts() -> None:
    plan = build_plan("1f1b", CostTable.uniform(num_layers=8), 2, 4)
    for changes, remedy in (
        ({"nproc": 3}, "--nproc 2"),
        ({"micro_batches": 8}, "--micro-batches"),
        ({"spec": ModelSpec(name="short", layers=(tiny().layers[0], tiny().layers[-1]))}, "2"),
        ({"dtype": "int8"}, "float32"),
    ):
        with pytest.raises(OctoPipeError, match=remedy):
            job(plan=plan, **changes)


def _as_rank(rank: int, port: int, folder: Path, words: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT), number)
    if words[0].endswith(".py"):
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.exit(main(words))


def under_torchrun(folder: Path, *words: str) -> tuple[str, str]:
    """What both ranks of a command print, in processes that look as if torchrun had started them."""
    port = free_port()
    context = launch.warm_up()
    ranks = [context.Process(target=_as_rank, args=(r, port, folder, list(words))) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE_S)
    launch.stop(ranks)
    said = [(folder / f"err{r}").read_text() for r in range(2)]
    assert [p.exitcode for p in ranks] == [0, 0], said
    return (folder / "out0").read_text(), (folder / "out1").read_text()


def test_under_torchrun_the_command_joins_instead_of_spawning(tmp_path: Path) -> None:
    first, second = under_torchrun(tmp_path, "train", *SMALL, "--steps", "2", "--no-measure", "--json")
    assert json.loads(first)["num_ranks"] == 2 and second == ""


@pytest.mark.slow  # test_examples.py runs the script, and the test above a command under torchrun
def test_the_example_script_trains_under_torchrun(tmp_path: Path) -> None:
    first, second = under_torchrun(tmp_path, str(ROOT / "examples" / "train_script.py"))
    losses = [float(line.split()[-1]) for line in first.splitlines()]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.3 and second == ""


# -- data ----------------------------------------------------------------------------------------------


def test_a_sample_is_the_same_whoever_asks_and_mostly_predictable() -> None:
    a, b = (SyntheticTokens(vocab=1000, seq=400, seed=3) for _ in range(2))
    assert np.array_equal(a.sample(7), b.sample(7)) and not np.array_equal(a.sample(7), a.sample(8))
    tokens = np.concatenate([a.sample(k) for k in range(20)])
    assert tokens.min() >= 0 and tokens.max() < 64
    kept = np.mean([np.mean(a.successor[s[:-1]] == s[1:]) for s in (a.sample(k) for k in range(20))])
    assert 0.87 < kept < 0.94


def test_micro_batches_of_one_pipeline_are_those_of_two_half_as_long() -> None:
    source = SyntheticTokens(vocab=64, seq=8, seed=0)
    whole, targets = micro_batches(source, 100, 4, 3)
    halves = micro_batches(source, 100, 2, 3)[0] + micro_batches(source, 106, 2, 3)[0]
    assert all(torch.equal(x, y) for x, y in zip(whole, halves))
    assert all(torch.equal(x[:, 1:], y[:, :-1]) for x, y in zip(whole, targets))


@pytest.mark.parametrize("count", [1, 2, 5, 64, 1000])
def test_shuffling_visits_everything_once(count: int) -> None:
    order = [shuffled(i, count, seed=5) for i in range(count)]
    assert sorted(order) == list(range(count))
    if count == 1000:
        assert order != [shuffled(i, count, seed=6) for i in range(count)]
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 0.1


@pytest.mark.parametrize("name", ["t.bin", "t.uint32.bin", "t.npy"])
def test_a_token_file_gives_every_window_once_per_pass(tmp_path: Path, name: str) -> None:
    tokens = np.arange(101) % 60
    path = tmp_path / name
    if name.endswith("npy"):
        np.save(path, tokens)
    else:
        tokens.astype("<u4" if "32" in name else "<u2").tofile(path)
    file = TokenFile(path, vocab=64, seq=10, seed=1)
    samples = [file.sample(k) for k in range(20)]
    for lap in (samples[:10], samples[10:]):
        assert sorted(int(s[0]) for s in lap) == sorted(int(t) for t in tokens[:100:10])
    assert all(np.array_equal(s, np.arange(s[0], s[0] + 11) % 60) for s in samples)


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("t.bin", b"", "no whole number"),
        ("t.bin", b"abc", "no whole number"),
        ("t.bin", b"\x01\x00", "smaller --seq"),
        ("t.bin", b"\xff" * 64, "outside the model's vocabulary"),
        ("t.npy", b"garbage", "cannot be read"),
        ("t.txt", b"hello", "token files end in"),
    ],
)
def test_bad_token_files_give_one_line(tmp_path: Path, name: str, content: bytes, remedy: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OctoPipeError, match=remedy) as caught:
        TokenFile(tmp_path / name, vocab=64, seq=8, seed=0).sample(0)
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("warm_up", "middle"), [(2, 4.5), (4, 3.0), (9, 7.0)])
def test_medians_leave_out_the_first_steps_where_others_are_left(warm_up: int, middle: float) -> None:
    times = (100.0, 9.0, 8.0, 6.0, 3.0, 3.0)  # two eager steps, one observed, one captured, two replayed
    reports = tuple(
        StepReport(
            step=k,
            loss=1.0,
            step_ms=ms,
            pipeline_ms=ms,
            reduced_ms=ms,
            bubble_ratio=ms,
            memory_bytes=(),
            tokens_per_s=1.0,
        )
        for k, ms in enumerate(times, 1)
    )
    plan = build_plan("1f1b", CostTable.uniform(num_layers=2), 2, 2)
    result = TrainResult(plan=plan, reports=reports, first_step=1, parameters=1, warm_up=warm_up)
    assert (result.step_ms, result.pipeline_ms, result.bubble_ratio) == (middle,) * 3
