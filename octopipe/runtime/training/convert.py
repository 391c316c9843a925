"""Checkpoints for other tools: safetensors under a family's own names, and torch.distributed.checkpoint's format.

Knows: which of our files' tensors is which parameter of a transformers model, and how both formats are written. Does
not know: how checkpoints of ours are made (`checkpoint.py`) or chosen (`shelf.py`).

Keys in a DCP folder are the same under every plan and number of ranks:

    model.3.attention.query.weight            layer 3; with a model's config: that model's own names after `model.`
    optimizer.3.attention.query.weight.exp_avg

Folders of torch.distributed.checkpoint are written and not read: their metadata is a pickle, and unpickling what
somebody else has written runs what they have put in it. Our own files are read without unpickling objects.
"""

from __future__ import annotations

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
from octopipe.base.files import shown
from octopipe.huggingface.cut import LayerList, layers
from octopipe.runtime.training.checkpoint import read_layer, read_record

SHARD = "5GB"
"""Of safetensors, as transformers writes them."""
DCP_ABOUT = "octopipe.json"
COMPANIONS = ("tokenizer", "special_tokens", "vocab", "merges", "generation_config", "chat_template")


def to_huggingface(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str],
    dtype: str | None = None,
) -> int:
    """Write the weights as `from_pretrained` reads them; returns the number of tensors.

    `source`: the config.json or folder the run was trained from. A folder's tokenizer and generation files come along.
    `dtype`: torch's name of one; default the checkpoint's own.
    """
    home, out = Path(checkpoint), _fresh(target)
    kind = None if dtype is None else getattr(torch, dtype)
    record = read_record(home)
    parts = _parts(source, record, home)
    model: Any = parts._cut.model
    seen: dict[str, Tensor] = {}
    for k, name, value in _named(home, record, parts):
        old = seen.get(name)
        if old is not None and not torch.equal(old, value):
            raise OctoPipeError(f"{shown(home)}: {name} has another value in layer {k} than before; it was not tied")
        seen[name] = value if kind is None or not value.is_floating_point() else value.to(kind)
    missing = [name for name, _ in model.named_parameters() if name not in seen]
    if missing:
        raise OctoPipeError(f"{shown(home)}: no weights of {missing[0]}; give the config the run was trained from")
    kinds = {value.dtype for value in seen.values() if value.is_floating_point()}
    if len(kinds) == 1:
        model.config.dtype = next(iter(kinds))
    _put(model, seen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(out, max_shard_size=SHARD)
    _companions(Path(source), out)
    return len(seen)


def to_dcp(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
) -> int:
    """Write weights and optimizer state through torch.distributed.checkpoint; returns the number of tensors.

    Without a process group `torch.distributed.checkpoint.load(state_dict, checkpoint_id=target)` reads it, and with one
    every rank takes what it asks for. `source` as in `to_huggingface`: names are then the family's.
    """
    import torch.distributed.checkpoint as dcp

    home, out = Path(checkpoint), _fresh(target)
    record = read_record(home)
    parts = None if source is None else _parts(source, record, home)
    state: dict[str, Tensor] = {}
    for _, name, value in _named(home, record, parts):
        state[f"model.{name}"] = value
    for name, value in _moments(home, record, parts):
        state[f"optimizer.{name}"] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves without a group is the intention
        dcp.save(state, storage_writer=dcp.FileSystemWriter(out), no_dist=True)
    about = {key: value for key, value in record.items() if key != "layers"}
    (out / DCP_ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    return len(state)


# -- names ---------------------------------------------------------------------------------------------


def _parts(source: str | os.PathLike[str], record: dict[str, Any], home: Path) -> LayerList:
    """The model of a config, on meta, if the checkpoint is one of it."""
    short = int(record["num_layers"])
    parts = layers(source, pretrained=False)
    if len(parts) != short:
        raise OctoPipeError(
            f"{shown(home)} has {short} layers, {shown(source)} {len(parts)} with embedding and head; give the "
            "config the run was trained from"
        )
    trained = str(record.get("model") or "").rsplit(" ", 1)[-1]
    if record.get("model") and trained != parts.class_name:
        raise OctoPipeError(
            f"{shown(home)} is of {str(record['model'])[:80]}, not of {parts.class_name}; only runs of transformers' "
            "models have a family's names"
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
    """Our tensors in the places of a model on meta: nothing is held twice."""
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


def _fresh(target: str | os.PathLike[str]) -> Path:
    out = Path(target)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OctoPipeError(f"{shown(out)} is there already; name a folder that is new or empty")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OctoPipeError(f"{shown(out)}: cannot be written ({error.strerror}); name another folder") from None
    return out


def _companions(source: Path, out: Path) -> None:
    """A tokenizer and what else lies beside a model's weights; never code."""
    if not source.is_dir():
        return
    for path in sorted(source.iterdir()):
        known = path.name.startswith(COMPANIONS) and path.suffix in (".json", ".txt", ".model", ".jinja")
        if known and path.is_file() and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)
