"""Training models with a tower for images and one for recordings: made-up batches, data folders, and two ranks."""

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
from octopipe.models.readers.hf_config import from_config  # noqa: E402
from octopipe.runtime.measure.layer_sizes import planned_spec  # noqa: E402
from octopipe.runtime.training.data.opening import open_source  # noqa: E402
from octopipe.runtime.training.data.samples import Samples  # noqa: E402
from octopipe.runtime.training.job import TrainJob  # noqa: E402
from octopipe.runtime.training.run_parts import handed_factor, item_factor  # noqa: E402
from octopipe.runtime.training.step_batches import step_batches  # noqa: E402
from octopipe.runtime.training.train import train  # noqa: E402

IMAGES, RECORDINGS = (2.0, 0.0, 1.0, 0.0), (1.0, 2.0, 0.0, 0.0)
PATCHES, EACH, HEARD = 64, 16, 8
"""Patches of an image, the tokens that they become, and the tokens of a recording of 32 frames."""


@functools.cache
def model(**asked: Any) -> HfModel:
    return describe(tiny_tower("qwen2_5_omni_thinker").to_dict(), **{"seq": 64, "encoder_seq": PATCHES, **asked})


def job(**more: Any) -> TrainJob:
    spec = more.pop("spec", None) or model(images=IMAGES, recordings=RECORDINGS)
    return TrainJob(spec=spec, nproc=2, seq=64, micro_batches=4, measure=False, steps=2, precision="fp32", **more)


def batches_of(a_job: TrainJob) -> tuple[list[Any], list[Any]]:
    sizes = {"vocab": a_job.spec.vocab, "seq": a_job.seq, "seed": a_job.seed, "form": a_job.inputs}
    return step_batches(a_job, open_source(a_job.data, **sizes), 0, 0, [])  # type: ignore[arg-type]


def loss_in_one_process(a_job: TrainJob) -> float:
    """The mean over the step's counted targets, by the pieces one after another and torch's own cross-entropy."""
    inputs, targets = batches_of(a_job)
    assert isinstance(a_job.spec, HfModel)
    modules = [make() for make in a_job.spec.layers(dtype=torch.float32, device="cpu", seed=a_job.seed)]  # type: ignore[operator]
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


def test_images_and_recordings_take_places_of_their_own_and_are_not_predicted() -> None:
    form = model(images=IMAGES, recordings=RECORDINGS).inputs
    assert form is not None and form.beside is not None
    inputs, targets = batches_of(job())
    for value, target, seen, heard in zip(inputs, targets, IMAGES, RECORDINGS, strict=True):
        ids = value["input_ids"]
        assert int((ids == form.token).sum()) == seen * EACH
        assert int((ids == form.beside.token).sum()) == heard * HEARD
        assert ("pixel_values" in value) == (seen > 0) and ("input_features" in value) == (heard > 0)
        if seen:
            assert value["image_grid_thw"].tolist() == [[1, 8, 8]] * int(seen)
        if heard:
            assert value["input_features"].shape[0] == len(value["feature_attention_mask"]) == heard
        taken = int(seen * EACH + heard * HEARD)
        assert (target["labels"][0, : max(taken - 1, 0)] == -100).all()
        assert (target["labels"][0, max(taken - 1, 0) :] != -100).all()
    counted = sum(int((t["labels"] != -100).sum()) for t in targets)
    assert float(targets[0]["items"]) * 4 == counted


def test_times_measured_with_the_mean_follow_each_kind_in_its_own_tower() -> None:
    spec = from_config(tiny_tower("qwen2_5_omni_thinker").to_dict())
    a_job = job()
    factor = item_factor(a_job)
    for column, symbol in enumerate(spec.pattern):
        of_kind = {"a": RECORDINGS, "A": RECORDINGS, "v": IMAGES, "w": IMAGES, "V": IMAGES}.get(symbol, (1.0,) * 4)
        assert factor[:, column] == pytest.approx(of_kind, abs=1e-5)
    # What is handed over is never taken for less than either kind makes it.
    assert handed_factor(a_job, factor)[:, 3] == pytest.approx((2.0, 2.0, 1.0, 0.0), abs=1e-5)


def test_all_layers_of_both_towers_are_frozen_and_the_planner_knows_the_layers() -> None:
    spec = model(images=IMAGES, recordings=RECORDINGS)
    assert frozen_layers(spec, "towers") == tuple(range(9))
    known = planned_spec(spec)
    assert known is not None and [s.items for s in known.sources] == [0.75, 0.75]
    assert known.sources[1].positions == PATCHES


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"images": (3.0,), "recordings": (3.0,)},
            "3 images of 16 tokens and 3 recordings of 8 do not fit in a sequence",
        ),
        ({"images": (1.0, 1.0), "recordings": (1.0,) * 3}, "images of 2 sequences and recordings of 3"),
        ({"recordings": (0.5, 1.0)}, "--recordings of single sequences are whole numbers"),
    ],
)
def test_what_cannot_be_is_refused_before_a_rank_starts(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(OctoPipeError, match=said):
        model(**asked)


def test_both_words_name_the_items_of_a_model_with_one_tower() -> None:
    config = tiny_tower("llava").to_dict()
    assert describe(config, seq=64, recordings=(2.0,)).inputs == describe(config, seq=64, images=(2.0,)).inputs
    with pytest.raises(OctoPipeError, match="one tower, for which --images and --recordings are the same"):
        describe(config, seq=64, images=(1.0,), recordings=(1.0,))


def written(folder: Path) -> Path:
    """Four samples: an image and a recording, an image alone, a recording alone, words alone."""
    folder.mkdir()
    form = model().inputs
    assert form is not None and form.beside is not None
    generator = np.random.default_rng(0)
    for number, (seen, heard) in enumerate(((1, 1), (1, 0), (0, 1), (0, 0))):
        places = [form.token] * 4 * seen + [form.beside.token] * 4 * heard
        ids = np.array([[7, 8, *places, *generator.integers(3, 400, 6 + number)]])
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        if seen:
            given |= {"pixel_values": generator.normal(size=(16, 96)), "image_grid_thw": np.array([[1, 4, 4]])}
        if heard:
            given["input_features"] = generator.normal(size=(1, 8, 16))
            given["feature_attention_mask"] = np.ones((1, 16), np.int64)
        np.savez(folder / f"{number}.npz", **given)
    return folder


def test_placeholders_of_both_kinds_are_no_targets(tmp_path: Path) -> None:
    form = model().inputs
    assert form is not None
    source = Samples(str(written(tmp_path / "samples")), vocab=512, seed=0, form=form, shuffle=False)
    # Of 2 words, the places and 6 or more words, the first word and the places do not count.
    assert [source.counted(k) for k in range(4)] == [7, 8, 9, 10]


def test_tokens_alone_ask_for_no_images_and_no_recordings(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(2000) % 400)
    with pytest.raises(OctoPipeError, match="or --images 0 and --recordings 0 to train on text"):
        batches_of(job(spec=model(images=(0.0,)), data=str(tmp_path / "tokens.npy")))
    text = model(images=(0.0,), recordings=(0.0,))
    assert all(set(v) == {"input_ids"} for v in batches_of(job(spec=text, data=str(tmp_path / "tokens.npy")))[0])


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["", "towers"])
def test_two_ranks_train_what_one_process_computes(frozen: str) -> None:
    spec = model(images=IMAGES, recordings=RECORDINGS)
    a_job = job(frozen=frozen_layers(spec, frozen))
    result = train(a_job)
    assert result is not None
    assert result.losses[0] == pytest.approx(loss_in_one_process(a_job), rel=1e-4)
    assert np.isfinite(result.losses).all()


@pytest.mark.slow
def test_two_ranks_train_on_a_folder_of_both_kinds(tmp_path: Path) -> None:
    a_job = job(data=str(written(tmp_path / "samples")))
    result = train(a_job)
    assert result is not None
    assert result.losses[0] == pytest.approx(loss_in_one_process(a_job), rel=1e-4)
