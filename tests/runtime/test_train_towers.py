"""Training models with a tower or an encoder: what a step is made of, and that ranks compute what one process does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from hf_towers import tiny_tower  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.cli.verbs.runnable import frozen_layers  # noqa: E402
from octopipe.huggingface.described import HfModel, describe  # noqa: E402
from octopipe.runtime.training.data.opening import open_source  # noqa: E402
from octopipe.runtime.training.data.samples import Samples  # noqa: E402
from octopipe.runtime.training.job import TrainJob  # noqa: E402
from octopipe.runtime.training.step_batches import step_batches  # noqa: E402
from octopipe.runtime.training.train import train  # noqa: E402


@functools.cache
def model(family: str, **asked: Any) -> HfModel:
    return describe(tiny_tower(family).to_dict(), seq=64, **asked)


def job(spec: HfModel, **more: Any) -> TrainJob:
    return TrainJob(spec=spec, nproc=2, seq=64, micro_batches=4, measure=False, steps=2, precision="fp32", **more)


def batches_of(a_job: TrainJob) -> tuple[list[Any], list[Any]]:
    sizes = {"vocab": a_job.spec.vocab, "seq": a_job.seq, "seed": a_job.seed, "form": a_job.inputs}
    return step_batches(a_job, open_source(a_job.data, **sizes), 0, 0, [])  # type: ignore[arg-type]


def loss_in_one_process(a_job: TrainJob) -> float:
    """The mean over the step's counted targets, by the pieces one after another and torch's own cross-entropy."""
    inputs, targets = batches_of(a_job)
    assert isinstance(a_job.spec, HfModel)
    parts = a_job.spec.layers(dtype=torch.float32, device="cpu", seed=a_job.seed)
    modules = [make() for make in parts]  # type: ignore[operator]
    total, count = 0.0, 0
    for value, target in zip(inputs, targets, strict=True):
        out: Any = value
        with torch.no_grad():
            for module in modules:
                out = module(out)
        labels = target["labels"].reshape(-1)
        total += float(torch.nn.functional.cross_entropy(out.reshape(labels.numel(), -1), labels, reduction="sum"))
        count += int((labels != -100).sum())
    return total / count


def test_images_take_places_and_are_not_predicted() -> None:
    spec = model("qwen2_5_vl", images=(2.0, 0.0, 1.0, 3.0), encoder_seq=64)
    form = spec.inputs
    assert form is not None and form.num_tower_layers == 5
    inputs, targets = batches_of(job(spec))
    each = 64 // 4  # patches become tokens four by four
    for value, target, count in zip(inputs, targets, (2, 0, 1, 3), strict=True):
        marks = value["input_ids"] == form.token
        assert int(marks.sum()) == count * each and tuple(value["input_ids"].shape) == (1, 64)
        assert ("pixel_values" in value) == (count > 0)
        if count:
            assert value["pixel_values"].shape[0] == 64 * count
            assert value["image_grid_thw"].tolist() == [[1, 8, 8]] * count
        # Nothing is predicted where the next token stands for an image or begins one.
        after = target["labels"][value["input_ids"].roll(-1, 1) == form.token]
        assert (after[:-1] == -100).all()
    # All micro-batches together count every target once.
    counted = sum(int((t["labels"] != -100).sum()) for t in targets)
    assert float(targets[0]["items"]) * 4 == counted


def test_a_broken_number_of_images_is_spread_over_the_sequences() -> None:
    form = model("llava", images=(0.5,)).inputs
    assert form is not None
    assert form.items(8) == [0, 1] * 4 and form.typical(2) == [1, 0] and form.typical(1) == [1]


@pytest.mark.parametrize(
    ("family", "asked", "said"),
    [
        ("t5", {"images": (2.0,)}, "is an encoder-decoder"),
        ("llava", {"encoder_seq": 32}, "the model fixes the size"),
        ("llava", {"images": (9.0,)}, "do not fit in a sequence of 64"),
        ("qwen2_5_vl", {}, "1 images of 1025 tokens do not fit in a sequence of 64"),
        ("qwen2_5_vl", {"encoder_seq": 63}, "not a multiple of 4 patches"),
        ("llava", {"num_layers": 4}, "several stacks of layers"),
    ],
)
def test_what_cannot_be_is_refused_before_a_rank_starts(family: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(OctoPipeError, match=said):
        model(family, **asked)


def written(folder: Path, lengths: list[int], **more: Any) -> Path:
    """Samples as a processor returns them: sequences of different length with one image of four patches' tokens."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        ids = generator.integers(3, 400, (1, length))
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": np.ones_like(ids), **more}
        np.savez(folder / f"{number:03}.npz", **given)
    return folder


def test_samples_of_different_length_are_padded_and_masked(tmp_path: Path) -> None:
    folder = written(tmp_path / "samples", [9, 5, 7, 6])
    spec = model("llava")
    source = Samples(str(folder), vocab=spec.vocab, seed=0, form=spec.inputs, shuffle=False)  # type: ignore[arg-type]
    inputs, labels = source.micro_batch([0, 1], dtype=torch.float32)
    assert inputs["input_ids"].shape == (2, 9) and inputs["attention_mask"][1].tolist() == [1] * 5 + [0] * 4
    assert labels[0, :-1].tolist() == inputs["input_ids"][0, 1:].tolist() and labels[0, -1] == -100
    assert (labels[1, 4:] == -100).all()
    assert [source.counted(k) for k in range(4)] == [8, 4, 6, 5]


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"pixel_values": np.zeros((1, 3))}, "neither input_ids nor labels"),
        ({"input_ids": np.array([[1, 2, 10**6]])}, "the model a vocabulary of"),
        ({"input_ids": np.zeros((2, 3), int)}, "write one file for each sequence"),
        ({"input_ids": np.array([["a"]])}, "give numbers"),
        ({"input_ids": np.array([[1, 2]]), "labels": np.array([[1, 2, 3]])}, "3 labels for 2 tokens"),
    ],
)
def test_a_wrong_sample_is_one_line_that_names_its_file(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    np.savez(folder / "a.npz", **arrays)
    form = model("llava").inputs
    assert form is not None
    with pytest.raises(OctoPipeError, match=rf"a\.npz: .*{said}"):
        Samples(str(folder), vocab=500, seed=0, form=form).counted(0)


def test_tokens_alone_are_not_taken_for_a_model_that_sees(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(2000) % 400)
    spec = model("llava")
    with pytest.raises(OctoPipeError, match="or --images 0 to train on text"):
        batches_of(job(spec, data=str(tmp_path / "tokens.npy")))
    text = model("llava", images=(0.0,))
    inputs, _ = batches_of(job(text, data=str(tmp_path / "tokens.npy")))
    assert all("pixel_values" not in value for value in inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "asked", "frozen"),
    [
        ("llava", {"images": (2.0, 0.0, 1.0, 3.0)}, ""),
        ("qwen2_5_vl", {"encoder_seq": 16}, "towers"),
        ("t5", {"encoder_seq": 48}, ""),
        ("whisper", {}, ""),
    ],
)
def test_two_ranks_train_what_one_process_computes(family: str, asked: dict[str, Any], frozen: str) -> None:
    spec = model(family, **asked)
    a_job = job(spec, frozen=frozen_layers(spec, frozen))
    result = train(a_job)
    assert result is not None
    assert result.losses[0] == pytest.approx(loss_in_one_process(a_job), rel=1e-4)
    assert np.isfinite(result.losses).all()


@pytest.mark.slow
def test_samples_of_a_folder_are_trained_and_evaluated(tmp_path: Path) -> None:
    form = model("t5").inputs
    assert form is not None
    folder = tmp_path / "samples"
    folder.mkdir()
    for number in range(6):
        ids = np.arange(3, 9 + number)[None]
        np.savez(folder / f"{number}.npz", input_ids=ids, labels=ids[:, ::-1])
    a_job = job(model("t5"), data=str(folder), eval_data=str(folder), eval_samples=5)
    result = train(a_job)
    assert result is not None
    assert result.losses[0] == pytest.approx(loss_in_one_process(a_job), rel=1e-4)
    assert result.evaluations[-1].samples == 5 and result.evaluations[-1].tokens == sum(6 + k for k in range(5))


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("idefics3", {}),
        pytest.param("gemma4", {}, marks=pytest.mark.slow),
        pytest.param("kimi_k25", {"encoder_seq": 64}, marks=pytest.mark.slow),
        pytest.param("lfm2_vl", {}, marks=pytest.mark.slow),
        pytest.param("pix2struct", {}, marks=pytest.mark.slow),
        pytest.param("voxtral", {}, marks=pytest.mark.slow),
    ],
)
def test_made_up_batches_of_every_form_are_taken(family: str, asked: dict[str, Any]) -> None:
    spec = model(family, **asked)
    assert abs(loss_in_one_process(job(spec)) - np.log(512)) < 1  # an untrained model knows nothing of 512 tokens


def test_images_that_stand_row_by_row_are_one_for_every_sequence() -> None:
    form = model("idefics3").inputs
    assert form is not None and form.one_each and form.items(3) == [1, 1, 1]
    with pytest.raises(OctoPipeError, match=r"its images stand row by row, .*leave --images out"):
        model("idefics3", images=(2.0,))
