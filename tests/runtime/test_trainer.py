"""The trainer around the steps: schedules, decay, evaluations, documents kept apart, memory, logs, resumed data."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.cli import main
from octopipe.runtime.measure import host_memory
from octopipe.runtime.training import memory_check
from octopipe.runtime.training.job import StepReport, TrainJob
from octopipe.runtime.training.schedule import Schedule

torch = pytest.importorskip("torch")
from test_train import SMALL, VOCAB, job, run_all, tiny  # noqa: E402

from octopipe.runtime.training import train as trainer  # noqa: E402
from octopipe.runtime.training.checkpoint import checkpoints, read_record  # noqa: E402
from octopipe.runtime.training.data.batches import micro_batches  # noqa: E402
from octopipe.runtime.training.data.opening import Reading, open_source  # noqa: E402
from octopipe.runtime.training.run_parts import decays  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A folder with a tokenizer and prompts with completions of many lengths."""
    tokenizers = pytest.importorskip("tokenizers")
    known = {"<eos>": 0, **{f"w{i}": i + 1 for i in range(VOCAB - 1)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    rng = np.random.default_rng(0)

    def text(most: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(0, VOCAB - 1, rng.integers(1, most)))

    pairs = [{"prompt": text(6), "completion": text(5)} for _ in range(120)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text(12)}) + "\n" for _ in range(120)))
    return tmp_path


# -- optimizer and schedule ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_schedules_are_those_of_transformers_after_the_warm_up(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    steps, warmup = 50, 7
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    theirs = {
        "constant": lambda: transformers.get_constant_schedule_with_warmup(optimizer, warmup),
        "linear": lambda: transformers.get_linear_schedule_with_warmup(optimizer, warmup, steps),
        "cosine": lambda: transformers.get_cosine_schedule_with_warmup(optimizer, warmup, steps),
        "wsd": lambda: transformers.get_wsd_schedule(
            optimizer, warmup, 10, num_stable_steps=steps - warmup - 10, decay_type="linear"
        ),
    }[kind]()
    ours = Schedule(kind=kind, rate=2.0, warmup=warmup, steps=steps, decay=10 if kind == "wsd" else None)
    for step in range(1, steps + 1):
        if step > warmup:
            assert ours.at(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step
        else:
            assert ours.at(step) == pytest.approx(2.0 * step / warmup)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "step"},
        {"kind": "cosine", "warmup": 10, "steps": 10},
        {"kind": "wsd", "warmup": 5, "decay": 6, "steps": 10},
        {"kind": "linear", "decay": 3, "steps": 10},
        {"rate": 1e-3, "least": 1e-2},
        {"rate": math.nan},
    ],
)
def test_schedules_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OctoPipeError):
        Schedule(**wrong)


def test_norms_biases_and_vectors_do_not_decay() -> None:
    matrix, vector = torch.zeros(3, 3), torch.zeros(3)
    assert decays("1.proj.weight", matrix, torch.nn.Linear(3, 3)) and decays("0.weight", matrix)
    assert not decays("1.proj.bias", vector) and not decays("1.experts.gate_up_proj_bias", matrix)
    assert not decays("1.A_log", vector) and not decays("1.norm.weight", matrix, torch.nn.RMSNorm(3))


def test_the_rate_of_every_step_is_reported_and_a_resumed_run_says_that_it_changed(tmp_path: Path) -> None:
    asked = job(nproc=1, steps=6, schedule="linear", warmup=2, checkpoint=str(tmp_path / "run"))
    first = trainer.train(replace(asked, steps=3, schedule_steps=6))
    rest = trainer.train(replace(asked, resume=True))
    assert first is not None and rest is not None
    assert [r.lr for r in (*first.reports, *rest.reports)] == pytest.approx([0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025])
    assert rest.notices == () and all(r.grad_norm > 0 for r in rest.reports)
    longer = trainer.train(replace(asked, resume=True, steps=8))
    assert longer is not None and longer.notices == (
        "the learning rate continues with a different schedule: schedule_steps 6 -> 8",
    )


# -- data in a run -------------------------------------------------------------------------------------


def test_the_mean_is_over_targets_that_count_however_they_are_spread(words: Path) -> None:
    reading = Reading(tokenizer=str(words / "tokenizer.json"))
    base = job(dtype="float64", steps=3, data=str(words / "pairs.jsonl"), reading=reading)
    one = run_all(replace(base, nproc=1, micro_batches=4))[0]
    (two,) = run_all(replace(base, dp=2, micro_batches=2))
    (fewer,) = run_all(replace(base, micro_batches=2, micro_batch_size=2, system="zb-h1"))
    assert two.losses == pytest.approx(one.losses, rel=1e-10)
    assert fewer.losses == pytest.approx(one.losses, rel=1e-10)
    # The first step's loss by hand: all tokens' losses of an untrained model, over those that count.
    source = open_source(base.data, reading, vocab=VOCAB, seq=base.seq, seed=base.seed)
    _, targets = micro_batches(source, 0, 4, 1, 1.0)
    counted = sum(int((t["labels"] != -100).sum()) for t in targets)
    assert 0 < counted < 4 * base.seq


def test_an_evaluation_counts_every_token_once_whatever_the_batch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "t.npy", rng.integers(0, VOCAB, 16 * 11 + 1))
    base = job(dtype="float64", steps=2, lr=0.0, eval_data=str(tmp_path / "t.npy"), eval_every=1)
    runs = run_all(replace(base, nproc=1), replace(base, nproc=1, micro_batches=3, micro_batch_size=2))
    (spread,) = run_all(replace(base, dp=2, micro_batches=3))
    for run in (*runs, spread):
        assert [(e.step, e.samples, e.tokens) for e in run.evaluations] == [(1, 11, 176), (2, 11, 176)]
        assert [e.loss for e in run.evaluations] == pytest.approx([runs[0].evaluations[0].loss] * 2, rel=1e-9)
    assert runs[0].evaluations[0].perplexity == pytest.approx(math.exp(runs[0].evaluations[0].loss))
    # Trained on the same tokens in one step, without learning: the mean loss of all eleven samples.
    (trained,) = run_all(replace(base, nproc=1, steps=1, micro_batches=11, data=str(tmp_path / "t.npy")))
    assert trained.losses[0] == pytest.approx(runs[0].evaluations[0].loss, rel=1e-6)


def test_a_run_goes_on_with_its_own_data_only(words: Path) -> None:
    reading, folder = Reading(tokenizer=str(words / "tokenizer.json")), words / "run"
    base = job(nproc=1, steps=2, data=str(words / "text.jsonl"), reading=reading, checkpoint=str(folder))
    trainer.train(base)
    noted = read_record(checkpoints(folder)[-1])["data"]
    assert (noted["kind"], noted["epoch"], noted["position"], noted["begins"]) == ("jsonl", 0, 8, 0)
    (words / "copy.jsonl").write_bytes((words / "text.jsonl").read_bytes())
    again = replace(base, resume=True, steps=3)
    for changes in ({"data": str(words / "pairs.jsonl")}, {"seq": 8}, {"data": None}):
        with pytest.raises(OctoPipeError, match=r"was trained on text.jsonl .* at sample 8 of pass 1; .*--new-data"):
            trainer.train(replace(again, **changes))
    moved = trainer.train(replace(again, data=str(words / "copy.jsonl")))  # the same tokens under another name
    assert moved is not None and moved.first_step == 3
    other = trainer.train(replace(again, data=str(words / "pairs.jsonl"), new_data=True, steps=4))
    assert other is not None and other.reports[-1].epoch is not None
    noted = read_record(checkpoints(folder)[-1])["data"]
    assert (noted["position"], noted["begins"]) == (4, 12)


def test_the_order_is_the_same_after_an_interrupt_and_with_other_pipelines(words: Path) -> None:
    reading = Reading(tokenizer=str(words / "tokenizer.json"))
    base = job(dtype="float64", steps=6, data=str(words / "text.jsonl"), reading=reading)
    whole = run_all(replace(base, nproc=1))[0]
    parted = replace(base, checkpoint=str(words / "run"))
    first = run_all(replace(parted, nproc=1, steps=2))[0]
    (second,) = run_all(replace(parted, dp=2, micro_batches=2, steps=4, resume=True))
    (third,) = run_all(replace(parted, system="interleaved", resume=True))
    assert first.losses + second.losses + third.losses == pytest.approx(whole.losses, rel=1e-10)


# -- documents -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_documents_that_are_kept_apart_have_the_logits_of_each_alone(family: str) -> None:
    pytest.importorskip("transformers")
    from hf_families import tiny_config

    from octopipe.huggingface import layers
    from octopipe.huggingface.documents import cannot_keep_apart

    parts = layers(tiny_config(family), dtype=torch.float64)
    assert cannot_keep_apart(parts) == ""
    pieces = [factory().eval() for factory in parts]

    def logits(batch: Any) -> Any:
        with torch.no_grad():
            for piece in pieces:
                batch = piece(batch)
        return batch

    ids = torch.randint(3, parts.vocab, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    packed = logits({"input_ids": ids, "position_ids": positions})
    alone = torch.cat([logits(ids[:, :5]), logits(ids[:, 5:])], 1)
    assert torch.allclose(packed, alone, atol=1e-10)
    assert not torch.allclose(packed, logits(ids), atol=1e-3)


def test_layers_that_carry_a_state_are_said_not_to_keep_documents_apart(
    words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from hf_families import tiny_config

    from octopipe.huggingface import layers
    from octopipe.huggingface.documents import cannot_keep_apart

    assert "carries a state" in cannot_keep_apart(layers(tiny_config("nemotron_h")))
    flags = ["--data", str(words / "text.jsonl"), "--tokenizer", str(words), "--steps", "1", "--nproc", "1"]
    assert main(["train", *SMALL, *flags, "--no-measure"]) == 0
    assert "documents of one sample attend to each other: octopipe's own layers" in capsys.readouterr().err
    assert main(["train", *SMALL, *flags, "--no-measure", "--document-mask"]) == 2
    assert "leave --document-mask out" in capsys.readouterr().err


# -- memory --------------------------------------------------------------------------------------------


def test_a_run_that_cannot_fit_stops_before_its_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_check, "free_host_bytes", lambda: 4.0 * (1 << 30))
    assert main(["train", "llama3-8b", "--nproc", "2", "--no-measure"]) == 3
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1 and "4.0 GiB are free" in err and "--no-memory-check" in err
    # Eight thousand million parameters at sixteen bytes are 119.7 GiB, before any activation.
    needed = float(err.split("about ")[1].split(" GiB")[0])
    assert 119.7 < needed < 125
    memory_check.check_host(job(memory_check=False, spec=tiny()))
    with pytest.raises(DoesNotFitError):
        monkeypatch.setattr(memory_check, "free_host_bytes", lambda: 1.0)
        memory_check.check_host(job(spec=tiny()))


def test_every_place_is_asked_for_what_its_ranks_hold() -> None:
    asked = job(nproc=4, dp=2)
    plan = memory_check.stand_in_plan(asked)
    each = memory_check.predicted_bytes(asked, plan)
    seats = [{"pp_rank": k % 2, "place": f"GPU {k % 2}", "free": 2.1 * each[k % 2]} for k in range(4)]
    assert memory_check.check_places(asked, plan, None, seats) == ""
    seats[3]["free"] = seats[1]["free"] = 1.9 * each[1]
    assert "of GPU 1" in memory_check.check_places(asked, plan, None, seats)


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   8000 kB\n")
    assert host_memory.free_host_bytes(proc, groups) == 8000 * 1024
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    (groups / "a" / "b").mkdir(parents=True)
    for folder, most in ((groups / "a", "5000000"), (groups / "a" / "b", "max")):
        (folder / "memory.max").write_text(most + "\n")
        (folder / "memory.current").write_text("3000000\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")
    assert host_memory.free_host_bytes(proc, groups) == 3_000_000


# -- logs ----------------------------------------------------------------------------------------------


def test_logs_hold_what_was_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "t.npy", np.arange(400) % 20)
    flags = ["--eval-data", str(tmp_path / "t.npy"), "--eval-every", "2", "--steps", "3", "--nproc", "1", "--json"]
    assert main(["train", *SMALL, *flags, "--no-measure", "--log", str(tmp_path / "log.jsonl")]) == 0
    out = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "step", "step", "evaluation", "step", "evaluation"]
    assert [line["loss"] for line in lines if line["kind"] == "step"] == out["losses"]
    assert [line["perplexity"] for line in lines if line["kind"] == "evaluation"] == [
        e["perplexity"] for e in out["evaluations"]
    ]
    assert {"lr", "grad_norm", "tokens_per_s", "bubble_ratio", "memory_gib", "samples"} <= {*lines[1]}


def test_tensorboard_and_wandb_get_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octopipe.runtime.training.logs import Logs

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    report = StepReport(
        step=3, loss=1.5, step_ms=10.0, pipeline_ms=8.0, reduced_ms=9.0, bubble_ratio=0.25, memory_bytes=(1 << 30,),
        tokens_per_s=7.0, mfu=0.4,
    )  # fmt: skip
    with Logs(tensorboard=str(tmp_path), about={}) as logs:
        logs.show(report)
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert {name: found.Scalars(name)[0].value for name in ("train/loss", "train/mfu", "train/memory_gib/rank0")} == {
        "train/loss": 1.5,
        "train/mfu": pytest.approx(0.4),
        "train/memory_gib/rank0": 1.0,
    }


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from octopipe.runtime.training.logs import Logs

    for module, flag, extra in (("tensorboard", "tensorboard", "train"), ("wandb", "wandb", "wandb")):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        with pytest.raises(OctoPipeError, match=rf"octopipe\[{extra}\]"):
            Logs(**{flag: "x"}, about={})


def test_utilisation_is_model_flops_over_the_peak_of_known_gpus() -> None:
    from octopipe.runtime.training.progress import known_peak, step_flops

    assert known_peak("NVIDIA H100 80GB HBM3") == 989e12 and known_peak("NVIDIA H200") == 989e12
    assert known_peak("NVIDIA A100-SXM4-80GB") == 312e12 and known_peak("Tesla T4") is None
    asked = job()
    assert step_flops(replace(asked, micro_batches=8)) == pytest.approx(2 * step_flops(asked))
    assert isinstance(asked, TrainJob)


# -- the whole of it -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "family"), [("float32", "llama"), ("float64", "llama"), ("float32", "gpt2")])
def test_a_fine_tune_is_that_of_plain_torch_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, family: str
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from fine_tune import journey

    steps = 300 if dtype == "float32" and family == "llama" else 60
    found = journey(tmp_path, steps=steps, dtype=dtype, family=family)
    assert found["exit_when_interrupted"] == 130 and 0 < found["interrupted_after_step"] < steps
    assert found["every_step_once"] and found["last_loss"] < found["first_loss"] - 1.0
    assert found["largest_loss_difference"] < (1e-5 if dtype == "float32" else 1e-9)
    # Transformers' loss is of float32 in double precision, too; the plain evaluation's is not.
    assert found["largest_evaluation_difference"] < (1e-5 if dtype == "float32" else 1e-6)
    assert found["exported_loss"] == pytest.approx(found["evaluations"][steps], abs=1e-5)
