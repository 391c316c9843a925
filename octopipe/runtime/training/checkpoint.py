"""Checkpoints: one file per layer, so that a run resumes under another plan and another number of ranks.

Knows: a pipeline's parameters, buffers and optimizer state by layer and name; how a checkpoint is written atomically,
and how a damaged one is detected. Does not know: what is trained or on which data, or how many checkpoints are kept
(`checkpoint_folder.py`).

    DIR/step-00000050/run.json        step, the pipeline's step_number, checksums, and what the trainer stores
    DIR/step-00000050/layer-0003.pt   {"layer": 3, "step": 50, "state": {name: tensor},
                                       "optimizer": {name: {"exp_avg": tensor, ...}},
                                       "settings": {name: {"lr": 0.001, ...}}}

The settings are those of the parameter's group in the optimizer; files of older versions have none.

If the optimizer keeps float32 master weights, "state" contains those: a run resumes exactly in the same precision, and
from the same values in another one.

The file of a layer is written by the lowest rank that holds it, into a folder that gets its final name once all ranks
have written. Whatever process is killed at any time, a folder named `step-...` is complete. Values that are not finite
are never written. Loading checks every file against its checksum, layer and step; files are read without unpickling
objects. Checkpoints of format 1 have no checksums and are read without this check.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, shown
from octopipe.base.memory import free_memory_bytes
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.precision import MixedPrecisionOptimizer, optimizer_kind
from octopipe.runtime.training.checkpoint_folder import (
    ASIDE,
    FORMAT,
    PARTIAL,
    RUN,
    DamagedCheckpoint,
    checkpoints,
    latest,
    layer_file,
    read_record,
    rotate,
    set_aside,
    sync_folder,
    wrong_files,
)
from octopipe.runtime.training.layer_file import WrongFile, read_content
from octopipe.runtime.training.saved_state import (
    Kept,
    check_saveable,
    compact,
    layer_state,
    loadable,
    make_late_buffers,
    of_other_replicas,
    put_settings,
    put_state,
    settings_by_parameter,
)
from octopipe.runtime.training.shard_state import part_of, with_whole_layers
from octopipe.runtime.wire.telling import broadcast_value

__all__ = [
    "NotFinite",
    "Saving",
    "checkpoints",
    "latest",
    "load_checkpoint",
    "read_layer",
    "read_record",
    "save_checkpoint",
]


log = logging.getLogger("octopipe.checkpoint")


class NotFinite(OctoPipeError):
    """Raised for values that must not be saved because they are not finite."""


def save_checkpoint(
    folder: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    about: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write `folder/step-...` (collective over the pipeline and its data-parallel replicas; only the first replica
    writes).

    `keep`: how many of the newest checkpoints to keep; one older checkpoint that has been verified is kept as well.

    After `load_checkpoint` of an earlier step than the folder's newest, the later checkpoints belong to an abandoned
    branch: they are moved to `folder/branch-...` when the first new one is saved.
    """
    return Saving(folder, pipe, optimizer, step=step, about=about, keep=keep).finish()


class Saving:
    """A checkpoint that is being saved. With `background`, the layers are copied to the host at once, so that training
    can continue, and a thread writes them; `state` says how far it is and `finish` makes the checkpoint visible.

    All ranks create and finish it together; no message is sent in between. Only one can exist at a time: finish it
    before the next one is created.
    """

    WRITTEN, WRITING, FAILED = range(3)

    def __init__(
        self,
        folder: str | os.PathLike[str],
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int,
        about: Mapping[str, Any] | None = None,
        keep: int | None = None,
        background: bool = False,
    ):
        self._home, self._pipe, self._keep = Path(folder), pipe, keep
        self._target = self._home / f"step-{step:08d}"
        self._partial = self._home / f"step-{step:08d}{PARTIAL}"
        self._leads = pipe.world.rank == 0 and pipe.world.replica == 0
        self._record = {
            **(about or {}),
            "format": FORMAT,
            "step": step,
            "step_number": pipe.step_number,
            "num_layers": pipe.plan.num_layers,
            "optimizer": None if optimizer is None else optimizer_kind(optimizer),
        }
        self.set_aside: Path | None = None
        """Once finished, on the first rank: the folder to which the checkpoints of an abandoned branch were moved, if
        any."""
        self._written: dict[int, dict[str, Any]] = {}
        self._problem = ""
        self._thread: threading.Thread | None = None
        writes = pipe.world.replica == 0
        elsewhere = of_other_replicas(optimizer)
        # Before anything is written: the checkpoint of a diverged run must not replace a good one.
        _agree(pipe, _not_finite(pipe, optimizer, self._home, elsewhere) if writes else "", NotFinite)
        _agree(pipe, _not_loadable(pipe) if writes else "")
        _agree(pipe, _attempt(lambda: _fresh(self._partial), self._home) if self._leads else "")
        if not writes:
            return
        contents = with_whole_layers(pipe, _contents(pipe, optimizer, step, elsewhere))
        if not background:
            self._write(contents)
            return
        copied = list(contents)
        self._thread = threading.Thread(target=self._write_behind, args=(copied,), name="octopipe-save", daemon=True)
        self._thread.start()

    def state(self) -> int:
        """Return the state of this rank's part: WRITTEN, WRITING or FAILED."""
        if self._thread is not None and self._thread.is_alive():
            return self.WRITING
        return self.FAILED if self._problem else self.WRITTEN

    def wait(self) -> None:
        """Wait until this rank has written its part or has failed."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> Path:
        """Wait for the parts of all ranks, then make the complete checkpoint visible (collective)."""
        self.wait()
        pipe, target = self._pipe, self._target
        _agree(pipe, self._problem)
        everybody = pipe.world.gather(self._written)
        problem = ""
        if self._leads:
            files = {k: entry for some in everybody for k, entry in some.items()}
            record = {**self._record, "layers": [files[k] for k in sorted(files)]}
            missing = sorted(set(range(pipe.plan.num_layers)) - files.keys())
            problem = (
                f"{shown(target)}: layer {missing[0]} was written by no rank: no checkpoint was made; save again"
                if missing
                else _attempt(lambda: self._publish(record), target)
            )
        _agree(pipe, problem)
        pipe.resumed_from = None
        # Every rank reads its files again from the disk: only a verified checkpoint may displace older ones.
        _agree(pipe, wrong_files(target, self._written) if pipe.world.replica == 0 else "")
        keep = self._keep
        if self._leads and keep is not None:
            problem = _attempt(lambda: rotate(self._home, keep), self._home)
        _agree(pipe, problem)
        return target

    def _publish(self, record: Mapping[str, Any]) -> None:
        """Give the checkpoint its name, after moving away later checkpoints of an abandoned branch."""
        parent, step = self._pipe.resumed_from, int(record["step"])
        if parent is not None and parent[0].resolve() == self._home.resolve():
            step = min(step, parent[1])
        self.set_aside = set_aside(self._home, step)
        _publish(self._partial, self._target, record)
        if self.set_aside is not None:
            log.info("checkpoints after step %s were moved to %s", step, shown(self.set_aside))

    def _write(self, contents: Iterable[dict[str, Any]]) -> None:
        self._problem = _attempt(lambda: self._written.update(_write_layers(self._partial, contents)), self._partial)

    def _write_behind(self, contents: Iterable[dict[str, Any]]) -> None:
        """Write in a thread, and record errors, which would go unnoticed there."""
        try:
            self._write(contents)
        except BaseException as error:
            text = " ".join(str(error).split())[:200]
            self._problem = f"{shown(self._partial)}: the checkpoint was not written ({type(error).__name__}: {text})"


def load_checkpoint(
    path: str | os.PathLike[str], pipe: Pipeline, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load this rank's layers from a checkpoint of any plan, and `pipe.step_number`; returns what was saved with them.

    Nothing is loaded unless all of this rank's files are valid. For a new run from these weights, set step_number to 0.
    """
    home = Path(path)
    record = read_record(home)
    if record["num_layers"] != pipe.plan.num_layers:
        raise OctoPipeError(
            f"{shown(home)} has {record['num_layers']} layers, the plan {pipe.plan.num_layers}; use the same model"
        )
    if optimizer is not None and record["optimizer"] != optimizer_kind(optimizer):
        raise OctoPipeError(
            f"{shown(home)} holds the state of {record['optimizer']}, not of {optimizer_kind(optimizer)}; "
            "use the same optimizer"
        )
    listed = {x["layer"] for x in record.get("layers", [])}
    if (pipe.layers.loss_layer in listed) != pipe.layers.has_loss:
        has, lacks = ("the loss", "the checkpoint") if pipe.layers.has_loss else ("the checkpoint's loss", "loss_fn")
        raise OctoPipeError(f"{shown(home)}: {has} has parameters, {lacks} none of them; use the same loss_fn")
    files: dict[int, dict[str, Any]] = {}

    def layer(k: int) -> dict[str, Any]:
        if k not in files:
            files[k] = read_layer(home, k, record)
        return files[k]

    state = {f"{k}.{n}": v for k in pipe.modules() for n, v in loadable(layer(k)["state"]).items()}
    state = {name: part_of(pipe, name, value) for name, value in state.items()}
    moments: list[tuple[str, Tensor, dict[str, Any], dict[str, Any]]] = []
    if optimizer is not None:
        # A tied parameter's state is stored under its first name, whose layer may be on another rank.
        for shared in pipe.layers.shared():
            number, name = shared.key.split(".", 1)
            saved = layer(int(number))["optimizer"].get(name)
            if saved is None:
                raise OctoPipeError(f"{shown(home)}: no optimizer state of {shared.key}; use the same model")
            settings = layer(int(number)).get("settings", {}).get(name, {})
            moments.append((shared.key, shared.parameter, part_of(pipe, shared.key, saved), settings))
        put_settings(optimizer, ((key, p, settings) for key, p, _, settings in moments))
    for k, module in pipe.modules().items():
        parameters = layer(k)["optimizer"].keys()
        make_late_buffers(module, {n: v for n, v in loadable(layer(k)["state"]).items() if n not in parameters})
    pipe.load_state_dict(state)
    if isinstance(optimizer, MixedPrecisionOptimizer):
        for shared in pipe.layers.shared():  # the file contains the master weights, not the rounded ones
            number, name = shared.key.split(".", 1)
            value = part_of(pipe, shared.key, layer(int(number))["state"][name])
            optimizer.set_master(shared.parameter, value.to(shared.parameter.device))
    for _, parameter, saved, _ in moments:
        assert optimizer is not None
        put_state(optimizer, parameter, saved)
    pipe.resumed_from, pipe.step_number = (home.parent, record["step"]), record["step_number"]
    return record


# -- writing -------------------------------------------------------------------------------------------


def _fresh(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _not_finite(
    pipe: Pipeline, optimizer: torch.optim.Optimizer | None, home: Path, elsewhere: Mapping[nn.Parameter, Kept]
) -> str:
    for name, value in pipe.named_parameters():
        if not _finite(value):
            return _refused(name, home)
    for k, module in pipe.modules().items():
        for name, buffer in module.named_buffers():  # a mask may hold infinities by intention
            if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
                return _refused(f"{k}.{name}", home)
    if optimizer is not None:
        for shared in pipe.layers.shared():
            for key, value in _state_of(optimizer, shared.parameter, elsewhere).items():
                if isinstance(value, Tensor) and not _finite(value):
                    return _refused(f"{shared.key}'s {key}", home)
    return ""


def _finite(value: Tensor) -> bool:
    value = value.to_local() if hasattr(value, "to_local") else value
    return not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all())


def _refused(name: str, home: Path) -> str:
    good = latest(home)
    remedy = "" if good is None else f"; {shown(good)} is the newest valid one"
    return f"{name} holds values that are not finite: no checkpoint was written{remedy}; use a smaller learning rate"


def _state_of(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, elsewhere: Mapping[nn.Parameter, Kept]
) -> dict[str, Any]:
    state: dict[str, Any] = elsewhere[parameter].state if parameter in elsewhere else optimizer.state.get(parameter, {})
    return state


def _contents(
    pipe: Pipeline, optimizer: torch.optim.Optimizer | None, step: int, elsewhere: Mapping[nn.Parameter, Kept]
) -> Iterator[dict[str, Any]]:
    """Yield the values that this rank writes, one layer at a time, in copies on the host."""
    settings = {} if optimizer is None else settings_by_parameter(optimizer)
    settings.update((id(p), kept.settings) for p, kept in elsewhere.items())
    groups: dict[int, dict[str, Any]] = {}
    writer: dict[int, int] = {}
    for stage in pipe.plan.stages:
        for k in range(stage.first, stage.stop):
            writer[k] = min(stage.rank, writer.get(k, stage.rank))
    writer[pipe.layers.loss_layer] = writer[pipe.layers.loss_layer - 1]
    moments: dict[int, dict[str, Any]] = {}
    if optimizer is not None:
        for shared in pipe.layers.shared():
            number, name = shared.key.split(".", 1)
            moments.setdefault(int(number), {})[name] = compact(_state_of(optimizer, shared.parameter, elsewhere))
            groups.setdefault(int(number), {})[name] = settings.get(id(shared.parameter), {})
    cut = pipe.plan.shards()  # every rank with a shard sends its part to the writer
    for k, module in pipe.modules().items():
        if writer[k] == pipe.rank or k in cut:
            state, mine = layer_state(k, module, optimizer, elsewhere), moments.get(k, {})
            yield {"layer": k, "step": step, "state": state, "optimizer": mine, "settings": groups.get(k, {})}


def _write_layers(folder: Path, contents: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    written = {}
    for content in contents:
        k = content["layer"]
        memory = io.BytesIO()
        torch.save(content, memory)
        data = memory.getbuffer()
        with open(folder / layer_file(k), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sha256 = hashlib.sha256(data).hexdigest()
        written[k] = {"layer": k, "file": layer_file(k), "bytes": len(data), "sha256": sha256}
    return written


def _publish(partial: Path, target: Path, record: Mapping[str, Any]) -> None:
    with open(partial / RUN, "w") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    before = target.with_name(target.name + ASIDE)
    if target.exists():  # written by an earlier run to the same step
        shutil.rmtree(before, ignore_errors=True)
        target.rename(before)
    partial.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(before, ignore_errors=True)


def _not_loadable(pipe: Pipeline) -> str:
    """Describe, in one line, the first value that could be written but not read again. Such a checkpoint would lose the
    run's state."""
    for k, module in pipe.modules().items():
        try:
            for name, value in module.state_dict().items():
                check_saveable(value, f"{k}.{name}")
        except OctoPipeError as error:
            return f"no checkpoint was written: {error}"
    return ""


def _attempt(act: Any, place: Path) -> str:
    try:
        act()
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"{shown(place)}: the checkpoint cannot be written ({' '.join(why.split())[:120]}); check the folder"
    return ""


def _agree(pipe: Pipeline, problem: str, kind: type[OctoPipeError] = OctoPipeError) -> None:
    """Raise the first problem of any rank on all ranks of the pipeline. The other replicas follow the first one."""
    said = pipe.world.gather(problem)
    problem = next((text for text in said if text), "")
    if pipe.world.dp_group is not None:
        problem = broadcast_value(pipe.world.dp_group, problem, 0)
    if problem:
        raise kind(problem)


# -- reading -------------------------------------------------------------------------------------------


def read_layer(home: Path, k: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a layer's file, once its checksum has been verified; `record` is the result of
    `read_record`."""
    path = home / layer_file(k)
    expected: dict[str, Any] = next((x for x in record.get("layers", []) if x["layer"] == k), {})
    if record["format"] == FORMAT and not expected:
        raise DamagedCheckpoint(f"{shown(path)}: {RUN} does not list it; use another checkpoint")
    if why := wrong_files(home, {k: expected}, free_memory_bytes()):
        raise DamagedCheckpoint(f"{why}; use another checkpoint")
    try:
        content: dict[str, Any] = read_content(path)
    except WrongFile as error:
        raise DamagedCheckpoint(f"{shown(path)}: {error}; use another checkpoint") from None
    parts = ("state", "optimizer", *(["settings"] if isinstance(content, dict) and "settings" in content else []))
    if not isinstance(content, dict) or not all(_named_values(content, part) for part in parts):
        raise DamagedCheckpoint(f"{shown(path)}: not a layer of a checkpoint; use another checkpoint")
    for what, wanted in (("layer", k), ("step", record["step"])):
        if content.get(what, wanted) != wanted:
            raise DamagedCheckpoint(
                f"{shown(path)}: holds {what} {brief(content[what])}, not {wanted}; use another checkpoint"
            )
    return content


def _named_values(content: Mapping[str, Any], key: str) -> bool:
    """Return whether a part of a layer's file has the form that we write: values by name, or for the optimizer several
    for each name."""
    part = content.get(key)
    if not isinstance(part, dict) or not all(isinstance(name, str) for name in part):
        return False
    return key == "state" or all(isinstance(moments, dict) for moments in part.values())
