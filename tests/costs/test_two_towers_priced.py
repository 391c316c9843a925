"""Costs of models with a tower for images and one for recordings: each counts in its own tower, and at the join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.models.towers import Join, TowerLayer
from octopipe.models.zoo import preset
from octopipe.plans.price import boundary_bytes, hop_times
from octopipe.search.systems import build_plan

OMNI = preset("qwen2.5-omni-7b")
SET_UP: dict[str, Any] = {"gpu": "h100", "tp": 1, "seq": 8192}
KINDS = {
    kind: np.array([isinstance(layer, TowerLayer) and layer.source.kind == kind for layer in OMNI])
    for kind in ("audio", "image")
}
NAMES = ("images", "recordings")
JOIN = np.array([isinstance(layer, Join) for layer in OMNI])


def costs(**asked: Any) -> CostTable:
    return resolve_costs(OMNI, pp=4, **SET_UP, **asked)


@pytest.mark.parametrize(("name", "kind"), [("images", "image"), ("recordings", "audio")])
def test_items_of_a_kind_cost_time_in_their_own_tower_and_at_the_join(name: str, kind: str) -> None:
    one, two = costs(**{name: 1}), costs(**{name: 2})
    grown = two.layer_ms > one.layer_ms
    assert (grown == (KINDS[kind] | JOIN)).all()
    assert two.activation_bytes[KINDS[kind]][1:] == pytest.approx(2 * one.activation_bytes[KINDS[kind]][1:])
    none = costs(**{name: 0})
    assert not none.layer_ms[KINDS[kind]].any() and none.layer_ms[~KINDS[kind]].all()


def test_a_tower_hands_on_what_the_other_takes_or_gave() -> None:
    """Patches of images pass the audio tower, and its output passes the vision tower; 2 bytes a value."""
    table = costs(images=2, recordings=3)
    patches, heard, seen = 2 * 4096 * (3 * 2 * 14 * 14), 3 * 1500 * 1280, 2 * 4096 * 1280
    assert table.boundary_bytes[KINDS["audio"]] == pytest.approx(2.0 * (heard + patches))
    assert table.boundary_bytes[KINDS["image"]] == pytest.approx(2.0 * (seen + heard))
    assert table.boundary_bytes[66] == 2.0 * 8192 * 3584


def test_every_micro_batch_has_its_own_times_and_hands_on_its_own_bytes() -> None:
    images, recordings = [0, 2, 0, 1], [3, 0, 0, 1]
    table = costs(images=images, recordings=recordings)
    assert table.setup is not None and table.setup.micro_batches == 4
    assert table.micro_batch_factor is not None and table.handed_factor is not None
    alone = [costs(images=i, recordings=r) for i, r in zip(images, recordings, strict=True)]
    for m, one in enumerate(alone):
        ms, sent = table.layer_ms * table.factor(m), table.boundary_bytes * table.handed(m)
        assert ms == pytest.approx(one.layer_ms, rel=1e-9, abs=1e-4)
        assert sent == pytest.approx(one.boundary_bytes, rel=1e-9, abs=64)
        assert (table.activation_bytes * table.factor(m) >= 0.999 * one.activation_bytes).all()
    plan = build_plan("1f1b", table, 4, 4)
    sent, _ = boundary_bytes(plan, table)
    for k, stage in enumerate(plan.stages):
        wanted = [one.boundary_bytes[stage.stop - 1] for one in alone]
        assert sent[k] == pytest.approx(wanted, rel=1e-9, abs=64)
    forward, _ = hop_times(plan, table)
    inside = next(k for k, stage in enumerate(plan.stages) if KINDS["image"][stage.stop - 1] or JOIN[stage.stop])
    assert forward[inside, 0] > forward[inside, 2]  # no image, and three recordings that pass


def test_both_towers_are_frozen() -> None:
    free, still = costs(), costs(frozen="towers")
    towers = KINDS["audio"] | KINDS["image"]
    assert still.setup is not None and "layers 0-65 frozen" in still.setup.words()
    assert not (still.input_ms[towers].any() or still.weight_ms[towers].any() or still.activation_bytes[towers].any())
    assert (still.layer_ms[~towers] == free.layer_ms[~towers]).all()


def test_of_one_tower_both_words_are_names_of_the_same_number() -> None:
    for model in ("qwen2.5-vl-7b", "llava-1.5-7b"):
        images, recordings = (resolve_costs(model, pp=4, gpu="h100", tp=1, **{name: 2}) for name in NAMES)
        assert images.digest() == recordings.digest() and images.setup == recordings.setup
        assert images.boundary_factor is None
    with pytest.raises(OctoPipeError, match="has one tower, for which images and recordings are the same; give one"):
        resolve_costs("llava-1.5-7b", pp=4, gpu="h100", tp=1, images=1, recordings=1)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"images": 4, "recordings": 6},
            "6 recordings of 750 tokens and 4 images of 1024 tokens do not fit in a sequence",
        ),
        (
            {"images": [1, 2], "recordings": [1, 2, 3]},
            "images of 2 sequences and recordings of 3; give both for the same",
        ),
        ({"recordings": [1, 2], "micro_batches": 3}, "recordings of 2 sequences for 3 micro-batches"),
        ({"encoder_seq": 32768}, "1 images of 8192 tokens do not fit"),
        ({"recordings": -1}, "recordings: -1 is not a number of items"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(OctoPipeError, match=said):
        costs(**asked)


def test_a_text_model_reads_no_recordings() -> None:
    with pytest.raises(OctoPipeError, match="has no tower and no encoder; recordings has no effect"):
        resolve_costs("llama3-8b", pp=2, gpu="h100", tp=1, recordings=1)


@pytest.mark.parametrize("verb", ["simulate", "compare", "tune"])
def test_the_commands_take_both_counts(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heard.txt").write_text("2\n0\n1\n0\n")
    words = [verb, "qwen2.5-omni-7b", "--pp", "4", "--images", "0,1,2,0", "--recordings", str(tmp_path / "heard.txt")]
    words += {"simulate": ["--system", "1f1b"], "tune": ["--iterations", "50"], "compare": ["--systems", "1f1b,gpipe"]}[
        verb
    ]
    assert main([*words, "--json"]) in (0, 3)
    said = json.loads(capsys.readouterr().out)
    assert said["setup"]["recordings"] == [2, 0, 1, 0] and said["setup"]["images"] == [0, 1, 2, 0]
    assert said["setup"]["micro_batches"] == 4


def test_plan_uses_the_means_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "qwen2.5-omni-7b", "--gpus", "8", "--gpu", "h100", "--global-batch", "8", "--budget", "1s"]
    words += ["--images", "0,1", "--recordings", "3,0", "--freeze", "towers", "--json"]
    assert main(words) in (0, 3)
    said = json.dumps(json.loads(capsys.readouterr().out))
    assert '"recordings": [1.5]' in said and '"images": [0.5]' in said
