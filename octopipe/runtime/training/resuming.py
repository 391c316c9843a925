"""Whether a run can resume from a checkpoint: the same model, seed and data, or an error that states the difference.

Knows: what a run stores about itself in addition to its layers. Does not know: how checkpoints are stored
(`checkpoint_folder.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import shown
from octopipe.costs.mode import FLOAT32_UPDATES
from octopipe.runtime.training.checkpoint_folder import choose
from octopipe.runtime.training.job import TrainJob
from octopipe.runtime.training.run_parts import identity

SAME = ("kind", "fingerprint", "seq", "samples", "documents_apart", "words")
"""The properties of data that determine its samples: if they are equal, sample i is the same as before."""


def check_resumable(job: TrainJob, path: Path, record: Mapping[str, Any], data: Mapping[str, Any]) -> int:
    """Raise an error if the run would not continue the checkpoint's; returns how many samples had been seen when its
    data began."""
    model, seed = record.get("model"), record.get("seed", job.seed)
    if model != identity(job.spec):
        raise OctoPipeError(
            f"{shown(path)} is a checkpoint of {str(model)[:200]}, this run trains {identity(job.spec)}; "
            "use the same MODEL, --scale and --layers"
        )
    if seed != job.seed:
        raise OctoPipeError(
            f"{shown(path)} was trained with --seed {seed}, this run has {job.seed}: its data and dropout "
            f"would differ; use --seed {seed}"
        )
    before = record.get("data")
    seen = int(record.get("samples", 0))
    if not isinstance(before, Mapping):  # written by a version that did not record the data
        return seen if job.new_data else 0
    differs = [key for key in SAME if before.get(key) != data.get(key)]
    if not differs:
        return seen if job.new_data else int(before.get("begins", 0))
    if job.new_data:
        return seen
    raise OctoPipeError(
        f"{shown(path)} was trained on {described(before)} and is at sample {before.get('position')} of pass "
        f"{int(before.get('epoch', 0)) + 1}; this run has {described(data)} ({', '.join(differs)} differ): use the "
        "same --data and --seq, or add --new-data to begin with the new one"
    )


def other_precision(job: TrainJob, record: Mapping[str, Any], path: Path) -> list[str]:
    """Return a note if a checkpoint has another precision; raises an error if training cannot continue from it.

    If the optimizer updates float32 weights, a checkpoint contains those, so a run may continue from them in any such
    precision. Other runs must keep their precision.
    """
    now = job.mode.precision
    saved = str(record.get("precision", now))
    if saved == now:
        return []
    if not {saved, now} <= FLOAT32_UPDATES:
        raise OctoPipeError(f"{shown(path)} was trained in {saved}, this run is in {now}; use --precision {saved}")
    return [f"{path.name} was trained in {saved}; continuing in {now} from its float32 weights"]


def described(data: Mapping[str, Any]) -> str:
    if data.get("kind") == "synthetic":
        return "made-up text"
    return f"{str(data.get('name'))[:80]} ({data.get('samples')} samples of {data.get('seq')} tokens)"


def schedule_words(before: Any, now: Mapping[str, Any]) -> str:
    """Return the differences between the learning-rate schedules of a checkpoint and of the run that continues it; ""
    if there are none."""
    if not isinstance(before, Mapping):
        return ""
    changed = [key for key in dict.fromkeys((*before, *now)) if before.get(key) != now.get(key)]
    return ", ".join(f"{key} {before.get(key)} -> {now.get(key)}" for key in changed)


def resumable_words(job: TrainJob) -> str:
    """Return a sentence that names the checkpoint from which a failed run can be resumed; "" if there is none."""
    if job.checkpoint is None:
        return ""
    try:
        path, _ = choose(job.checkpoint)
    except OctoPipeError:
        return ""
    return f"; {shown(path)} is valid: --resume continues from it"
