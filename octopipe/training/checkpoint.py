"""Checkpoints: one file per layer, so that a run resumes under another plan and another number of ranks.

Knows: a pipeline's parameters, buffers and optimizer state by layer and name; how a checkpoint appears whole or not
at all. Does not know: what is trained or on what.

    DIR/step-00000050/run.json        step and what the trainer wants to know again
    DIR/step-00000050/layer-0003.pt   {"state": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, ...}}}

A layer's file is written by the lowest rank that holds it, into a folder that gets its final name once all ranks
have written: whatever is killed when, a folder named `step-...` is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octopipe.errors import OctoPipeError
from octopipe.files import read_json_object, shown
from octopipe.runtime.pipeline import Pipeline

FORMAT = "octopipe.checkpoint/1"
RUN = "run.json"


def save_checkpoint(
    folder: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    about: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write `folder/step-...` (collective over the pipeline and its data-parallel twins; twins of the first write
    nothing). `keep`: how many checkpoints to leave, the newest ones."""
    home = Path(folder)
    target, partial = home / f"step-{step:08d}", home / f"step-{step:08d}.partial"
    world = pipe.world
    leads = world.rank == 0 and world.replica == 0
    if leads:
        problem = _attempt(lambda: _fresh(partial), home)
    else:
        problem = ""
    _agree(pipe, problem)
    if world.replica == 0:
        problem = _attempt(lambda: _write_layers(partial, pipe, optimizer), partial)
    _agree(pipe, problem)
    if leads:
        record = {
            **(about or {}),
            "format": FORMAT,
            "step": step,
            "num_layers": pipe.plan.num_layers,
            "optimizer": None if optimizer is None else type(optimizer).__name__,
        }
        problem = _attempt(lambda: _publish(partial, target, record, keep), target)
    _agree(pipe, problem)
    return target


def load_checkpoint(
    path: str | os.PathLike[str], pipe: Pipeline, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load this rank's layers from a checkpoint of any plan; returns what was saved beside them."""
    home = Path(path)
    record = read_record(home)
    if record["num_layers"] != pipe.plan.num_layers:
        raise OctoPipeError(
            f"{shown(home)} has {record['num_layers']} layers, the plan {pipe.plan.num_layers}; use the same model"
        )
    if optimizer is not None and record["optimizer"] != type(optimizer).__name__:
        raise OctoPipeError(
            f"{shown(home)} holds the state of {record['optimizer']}, not of {type(optimizer).__name__}; "
            "use the same optimizer"
        )
    files: dict[int, dict[str, Any]] = {}

    def layer(k: int) -> dict[str, Any]:
        if k not in files:
            files[k] = _read_layer(home / _name(k))
        return files[k]

    pipe.load_state_dict({f"{k}.{n}": v for k in pipe.modules() for n, v in layer(k)["state"].items()})
    if optimizer is not None:
        # A tied parameter's state is kept with its first name: its layer may be another rank's.
        for shared in pipe.layers.shared():
            number, name = shared.key.split(".", 1)
            saved = layer(int(number))["optimizer"].get(name)
            if saved is None:
                raise OctoPipeError(f"{shown(home)}: no optimizer state of {shared.key}; use the same model")
            optimizer.state[shared.parameter] = {
                key: value.to(shared.parameter.device, copy=True) if _moves(key, value) else value
                for key, value in saved.items()
            }
    return record


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What stands in a checkpoint's run.json."""
    record: dict[str, Any] = read_json_object(Path(path) / RUN)
    if record.get("format") != FORMAT or not isinstance(record.get("step"), int):
        raise OctoPipeError(f"{shown(path)}: format is {record.get('format')!r}; expected {FORMAT!r}")
    return record


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Complete checkpoints, oldest first."""
    try:
        found = [p for p in Path(folder).iterdir() if p.name.startswith("step-") and not p.name.endswith(".partial")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise OctoPipeError(f"{shown(folder)}: cannot be read ({error.strerror}); check the folder") from None
    return sorted(p for p in found if (p / RUN).is_file())


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint."""
    found = checkpoints(folder)
    return found[-1] if found else None


# -- writing -------------------------------------------------------------------------------------------


def _name(layer: int) -> str:
    return f"layer-{layer:04d}.pt"


def _fresh(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_layers(folder: Path, pipe: Pipeline, optimizer: torch.optim.Optimizer | None) -> None:
    writer: dict[int, int] = {}
    for stage in pipe.plan.stages:
        for k in range(stage.first, stage.stop):
            writer[k] = min(stage.rank, writer.get(k, stage.rank))
    moments: dict[int, dict[str, Any]] = {}
    if optimizer is not None:
        for shared in pipe.layers.shared():
            number, name = shared.key.split(".", 1)
            moments.setdefault(int(number), {})[name] = _compact(optimizer.state.get(shared.parameter, {}))
    for k, module in pipe.modules().items():
        if writer[k] == pipe.rank:
            content = {"state": _compact(module.state_dict()), "optimizer": moments.get(k, {})}
            with open(folder / _name(k), "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())


def _publish(partial: Path, target: Path, record: Mapping[str, Any], keep: int | None) -> None:
    with open(partial / RUN, "w") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    if keep is not None:
        for old in checkpoints(target.parent)[: -max(1, keep)]:
            # Out of the way first: a half deleted folder must not look complete.
            gone = old.with_name(old.name + ".partial")
            old.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _compact(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies on the host whose storage is their own size: a view would drag its whole base into the file."""
    return {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in values.items()}


def _attempt(act: Any, place: Path) -> str:
    try:
        act()
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"{shown(place)}: the checkpoint cannot be written ({' '.join(why.split())[:120]}); check the folder"
    return ""


def _agree(pipe: Pipeline, problem: str) -> None:
    """Go on together or fail together; twins of the first pipeline follow its ranks."""
    said = pipe.world.gather(problem)
    problem = next((text for text in said if text), "")
    if pipe.world.dp_group is not None:
        box = [problem]
        torch.distributed.broadcast_object_list(
            box, src=torch.distributed.get_process_group_ranks(pipe.world.dp_group)[0], group=pipe.world.dp_group
        )
        problem = box[0]
    if problem:
        raise OctoPipeError(problem)


# -- reading -------------------------------------------------------------------------------------------


def _read_layer(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if not {"state", "optimizer"} <= content.keys():
            raise OctoPipeError(f"{shown(path)}: not a layer of a checkpoint; the file is damaged")
        return content
    except FileNotFoundError:
        raise OctoPipeError(f"{shown(path)}: no such file; the checkpoint is damaged") from None
    except OctoPipeError:
        raise
    except Exception as error:  # torch.load raises a dozen kinds of errors on damaged files
        reason = " ".join(str(error).split())[:120]
        raise OctoPipeError(f"{shown(path)}: cannot be loaded ({reason}); take an older checkpoint") from None


def _moves(key: str, value: Any) -> bool:
    """Optimizers keep their step count on the host unless they are capturable."""
    return isinstance(value, Tensor) and not (key == "step" and value.ndim == 0)
