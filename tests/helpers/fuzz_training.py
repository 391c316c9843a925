"""Damaged files for the readers of training: tokens, checkpoints, weights of transformers.

Knows: valid files of each kind, and what `train` and `convert` do with them. Does not know: how files are damaged
(`fuzz_cases.py`). Needs torch, and for weights transformers.
"""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_cases import Reader

from octopipe.runtime.training.checkpoint import _write_layers, read_layer
from octopipe.runtime.training.checkpoint_folder import FORMAT, FORMAT_1, RUN, choose, layer_file, read_record
from octopipe.runtime.training.data.token_file import TokenFile

LAYERS, STEP, VOCAB = 3, 4, 64


def readers() -> tuple[Reader, ...]:
    """Every reader of files that a training run begins with."""
    found = [
        Reader(name="tokens.npy", suffix=".npy", valid=_arrays(), use=_use_tokens),
        Reader(name="tokens.bin", suffix=".bin", valid=(np.arange(99, dtype="<u2").tobytes(),), use=_use_tokens),
        Reader(name="checkpoint", suffix=".json", valid=_records(), use=_use_record),
        Reader(name="layer.pt", suffix=".pt", valid=(_layer(0),), use=_use_layer),
    ]
    if importlib.util.find_spec("safetensors") is not None and importlib.util.find_spec("transformers") is not None:
        found += [
            Reader(name="weights index", suffix=".json", valid=(_weights()[0],), use=_use_index),
            Reader(name="weights", suffix=".safetensors", valid=(_weights()[1],), use=_use_weights),
        ]
    return tuple(found)


# -- tokens --------------------------------------------------------------------------------------------


def _arrays() -> tuple[bytes, ...]:
    out = []
    for kind in ("<i4", "<u2", ">i8"):
        memory = io.BytesIO()
        np.save(memory, np.arange(99, dtype=kind) % VOCAB)
        out.append(memory.getvalue())
    return tuple(out)


def _use_tokens(path: Path) -> object:
    tokens = TokenFile(path, vocab=1 << 16, seq=8, seed=0)
    return [tokens.sample(number).tolist() for number in (0, 1, 10**6)]


# -- checkpoints ---------------------------------------------------------------------------------------


def _content(k: int) -> dict[str, Any]:
    weight = torch.arange(6.0).reshape(2, 3)
    moments = {"exp_avg": weight / 2, "step": torch.tensor(4.0)}
    return {"layer": k, "step": STEP, "state": {"weight": weight, "bias": weight[0]}, "optimizer": {"weight": moments}}


@cache
def _saved() -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The run.json of both formats and the layers' files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = _write_layers(folder, map(_content, range(LAYERS)))
        files = tuple((folder / layer_file(k)).read_bytes() for k in range(LAYERS))
    record = {"format": FORMAT, "step": STEP, "num_layers": LAYERS, "optimizer": "AdamW"}
    record |= {"model": "tiny E--L hidden 8 vocab 32", "samples": 64, "seed": 0}
    listed = {**record, "layers": list(written.values())}
    return tuple(json.dumps(x).encode() for x in (listed, {**record, "format": FORMAT_1})), files


def _records() -> tuple[bytes, ...]:
    return _saved()[0]


def _layer(k: int) -> bytes:
    return _saved()[1][k]


def _use_record(path: Path) -> object:
    """As `--resume` goes about it."""
    home = path.parent / "run"
    step = home / f"step-{STEP:08d}"
    step.mkdir(parents=True, exist_ok=True)
    for k in range(LAYERS):
        if not (step / layer_file(k)).exists():
            (step / layer_file(k)).write_bytes(_layer(k))
    shutil.copyfile(path, step / RUN)
    chosen, _ = choose(home)
    record = read_record(chosen)
    return int(record.get("samples", 0)), record["optimizer"], record["step"] + 1


def _use_layer(path: Path) -> object:
    """Without a checksum: as of format 1, or of somebody who has made a file and its checksum."""
    home = path.parent / "layer"
    home.mkdir(exist_ok=True)
    shutil.copyfile(path, home / layer_file(0))
    content = read_layer(home, 0, {"format": FORMAT_1, "step": STEP, "num_layers": 1})
    moments = [list(some.items()) for some in content["optimizer"].values()]
    return [f"0.{name}" for name in content["state"]], moments


# -- weights of transformers -------------------------------------------------------------------------------


@cache
def _weights() -> tuple[bytes, bytes]:
    """An index and its one file."""
    from safetensors.torch import save

    tensors = {f"model.layers.{k}.weight": torch.arange(6.0).reshape(2, 3) for k in range(3)}
    index = {"metadata": {"total_size": 72}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    return json.dumps(index).encode(), save(tensors)


def _use_index(path: Path) -> object:
    return _read_weights(path.parent, path.read_bytes(), _weights()[1])


def _use_weights(path: Path) -> object:
    return _read_weights(path.parent, None, path.read_bytes())


def _read_weights(folder: Path, index: bytes | None, data: bytes) -> object:
    from octopipe.huggingface.weights import INDEX, SINGLE, file_of_keys, open_tensors

    home = folder / "weights"
    home.mkdir(exist_ok=True)
    (home / SINGLE).write_bytes(data)
    (home / INDEX).unlink(missing_ok=True)
    if index is not None:
        (home / INDEX).write_bytes(index)
    found = file_of_keys(home)
    with open_tensors(found) as slices:
        return {key: part[:].shape for key, part in slices.items()}
