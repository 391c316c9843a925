"""Checkpoints for other tools: safetensors under a family's own names, and torch.distributed.checkpoint's format.

Knows: which of our files' tensors is which parameter of a transformers model, and how both formats are written. Does
not know: how checkpoints of ours are made (`checkpoint.py`) or chosen (`checkpoint_folder.py`).

Keys in a DCP folder are the same under every plan and number of ranks:

    model.3.attention.query.weight            layer 3; with a model's config: that model's own names after `model.`
    optimizer.3.attention.query.weight.exp_avg

Folders of torch.distributed.checkpoint are written but not read: their metadata is a pickle, and unpickling another
person's file can run arbitrary code. Our own files are read without unpickling objects.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import read_bytes, shown
from octopipe.base.memory import free_memory_bytes
from octopipe.huggingface.cut import LayerList, layers
from octopipe.huggingface.prediction_weights import save_with_predictions
from octopipe.huggingface.predictions import USUAL_WEIGHT, WithPredictions, prediction_layers
from octopipe.runtime.training.checkpoint import read_layer, read_record
from octopipe.runtime.training.checkpoint_folder import layer_file
from octopipe.runtime.training.layer_file import WrongFile, opened
from octopipe.simulation.timeline import GIB

SHARD = "5GB"
"""The size of a safetensors file, as transformers writes them."""
DCP_ABOUT = "octopipe.json"
LAYERS_OF_A_PREDICTION = 2
"""A prediction counts as two layers: its own and its head."""
MAX_COMPANION_BYTES = 256 << 20
"""The most bytes of a copied file. The largest tokenizers have some tens of megabytes."""
COMPANIONS = ("tokenizer", "special_tokens", "vocab", "merges", "generation_config", "chat_template")


def to_huggingface(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str],
    dtype: str | None = None,
) -> int:
    """Write the weights so that `from_pretrained` can read them; returns the number of tensors.

    `source`: the config.json or folder that the run was trained from. The tokenizer and the generation files of a
    folder are copied. `dtype`: torch's name of a dtype; by default the checkpoint's own.
    """
    _refuse_used(target)
    home = Path(checkpoint)
    kind = None if dtype is None else getattr(torch, dtype)
    record = read_record(home)
    _check_room(home, record)
    parts = _parts(source, record, home)
    model: Any = parts._cut.model
    seen: dict[str, Tensor] = {}
    for k, name, value in _named(home, record, parts):
        old = seen.get(name)
        if old is not None and not torch.equal(old, value):
            raise OctoPipeError(
                f"{shown(home)}: {name} has two values, one of them in layer {k}, and {parts.class_name} ties it; "
                "give the config the run was trained from"
            )
        seen[name] = value if kind is None or not value.is_floating_point() else value.to(kind)
    missing = [name for name, _ in model.named_parameters() if name not in seen]
    if missing:
        raise OctoPipeError(f"{shown(home)}: no weights of {missing[0]}; give the config the run was trained from")
    kinds = {value.dtype for value in seen.values() if value.is_floating_point()}
    if len(kinds) == 1:
        model.config.dtype = next(iter(kinds))
    _put(model, seen)
    with _written(target) as out:
        if isinstance(model, WithPredictions):
            save_with_predictions(model, out, max_shard_size=SHARD)
        else:
            model.save_pretrained(out, max_shard_size=SHARD)
        _companions(Path(source), out)
    return len(seen)


def to_dcp(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
) -> int:
    """Write weights and optimizer state with torch.distributed.checkpoint; returns the number of tensors.

    Without a process group, `torch.distributed.checkpoint.load(state_dict, checkpoint_id=target)` reads them; with one,
    every rank reads the tensors in its own state dict. `source` as in `to_huggingface`: the names are then those of the
    family.
    """
    import torch.distributed.checkpoint as dcp

    _refuse_used(target)
    home = Path(checkpoint)
    record = read_record(home)
    _check_room(home, record)
    parts = None if source is None else _parts(source, record, home)
    state: dict[str, Tensor] = {}
    for _, name, value in _named(home, record, parts):
        state[f"model.{name}"] = value
    for name, value in _moments(home, record, parts):
        state[f"optimizer.{name}"] = value
    about = {key: value for key, value in record.items() if key != "layers"}
    with _written(target) as out:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(out), no_dist=True)
        (out / DCP_ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    return len(state)


# -- names ---------------------------------------------------------------------------------------------


def _parts(source: str | os.PathLike[str], record: dict[str, Any], home: Path) -> LayerList:
    """Return the model of a config, on `meta`, if the checkpoint belongs to it; with its predictions if they were
    trained."""
    short = int(record["num_layers"])
    parts = layers(source, pretrained=False)
    more = prediction_layers(parts.config)
    if more and short == len(parts) + LAYERS_OF_A_PREDICTION * more:
        parts = layers(source, pretrained=False, predictions=USUAL_WEIGHT)  # the weight of the loss is not written
    if len(parts) != short:
        raise OctoPipeError(
            f"{shown(home)} has {short} layers, {shown(source)} {len(parts)} with embedding and head; give the "
            "config the run was trained from"
        )
    trained = str(record.get("model") or "").rsplit(" ", 1)[-1]
    if record.get("model") and trained != parts.class_name:
        raise OctoPipeError(
            f"{shown(home)} is of {str(record['model'])[:80]}, not of {parts.class_name}; --to huggingface is for "
            "runs of that model: give its config, or use --to dcp"
        )
    return parts


def _named(home: Path, record: dict[str, Any], parts: LayerList | None) -> Iterator[tuple[int, str, Tensor]]:
    for k in range(int(record["num_layers"])):
        for name, value in read_layer(home, k, record)["state"].items():
            yield k, f"{k}.{name}" if parts is None else parts.name_in_model(k, name), value


def _moments(home: Path, record: dict[str, Any], parts: LayerList | None) -> Iterator[tuple[str, Tensor]]:
    for k in range(int(record["num_layers"])):
        for name, moments in read_layer(home, k, record)["optimizer"].items():
            whole = f"{k}.{name}" if parts is None else parts.name_in_model(k, name)
            for key, value in moments.items():
                yield f"{whole}.{key}", value if isinstance(value, Tensor) else torch.tensor(value)


def _put(model: Any, values: dict[str, Tensor]) -> None:
    """Replace the parameters of a model on `meta` by our tensors, so that nothing is held twice."""
    first: dict[int, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        first.setdefault(id(parameter), name)
    made = {name: torch.nn.Parameter(values[name], requires_grad=False) for name in set(first.values())}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._parameters[attribute] = made[first[id(parameter)]]
    for name, _ in list(model.named_buffers()):
        if name in values:
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._buffers[attribute] = values[name]


# -- folders -------------------------------------------------------------------------------------------


def _check_room(home: Path, record: dict[str, Any]) -> None:
    """Check that all layers fit in memory together, as both formats need, and report it beforehand if they do not."""
    need, free = 0, free_memory_bytes()
    for k in range(int(record["num_layers"])):
        try:
            with opened(home / layer_file(k), free) as (_, size):
                need += size
        except WrongFile as why:
            raise OctoPipeError(f"{shown(home / layer_file(k))}: {why}; use another checkpoint") from None
    if need > free:
        raise OctoPipeError(
            f"{shown(home)} needs {need / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free; convert it on a "
            "machine with more"
        )


@contextlib.contextmanager
def _written(target: str | os.PathLike[str]) -> Iterator[Path]:
    """A context with a folder to write to. If writing fails, the error is one line and no incomplete folder remains."""
    _refuse_used(target)
    out = Path(target)
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OctoPipeError(f"{shown(out)}: cannot be written ({error.strerror}); name another folder") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns about saving without a process group, which is intended
            yield out
    except BaseException as error:  # DCP's own exception is not derived from Exception
        for path in out.iterdir() if existed else (out,):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        if isinstance(error, OctoPipeError | KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise OctoPipeError(f"{shown(out)}: cannot be written ({_reason(error)}); free space or name another") from None


def _reason(error: BaseException) -> str:
    """Return the cause of an error: DCP wraps the errors of its writers together with their tracebacks."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        first = next(iter(failures.values()))
        error = first[0] if isinstance(first, tuple) and isinstance(first[0], BaseException) else error
    text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:160]


def _refuse_used(target: str | os.PathLike[str]) -> None:
    """Raise an error if the target already exists, before anything is read."""
    out = Path(target)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OctoPipeError(f"{shown(out)} already exists; name a new or empty folder")
    except OSError as error:
        raise OctoPipeError(f"{shown(out)}: cannot be written ({error.strerror}); name another folder") from None


def _companions(source: Path, out: Path) -> None:
    """Copy the tokenizer and other files beside a model's weights, but never code."""
    if not source.is_dir():
        return
    for path in sorted(source.iterdir()):
        known = path.name.startswith(COMPANIONS) and path.suffix in (".json", ".txt", ".model", ".jinja")
        if known and path.is_file() and not (out / path.name).exists():
            (out / path.name).write_bytes(read_bytes(path, most_bytes=MAX_COMPANION_BYTES))
