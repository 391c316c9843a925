"""Profiles from other tools: converts torch.profiler traces, Nsight Systems exports and two-line CSVs to profiles.

Knows: how to recognise such a file by its contents, and how times of F and B become F, I and W: by the analytic ratio
of a model's layers if a model is given, otherwise as for linear layers (I and W equal, an embedding all W). The
profile's `about["notes"]` records the source of each value. Does not know: the file formats (`readers/`).
"""

from __future__ import annotations

import codecs
import csv
import functools
import gzip
import io
import logging
import os
import zlib
from collections.abc import Sequence

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import decode_text, read_bytes, shown, stem_of
from octopipe.base.limits import MAX_TIME_MS, MAX_TIMELINE_BYTES
from octopipe.costs.profile import Profile
from octopipe.costs.readers.kineto import looks_like_trace, read_trace
from octopipe.costs.readers.nsight import SQLITE_MAGIC, looks_like_stats, read_nsight_csv, read_nsight_sqlite
from octopipe.costs.readers.spans import LayerTimes, layer_times
from octopipe.costs.readers.times_csv import looks_like_times, read_times_csv
from octopipe.costs.table import Array, CostTable

log = logging.getLogger("octopipe.profile")
HEAD_BYTES = 1 << 16
"""How many bytes at the beginning of a file are read to recognise its kind."""
GZIP_MAGIC = b"\x1f\x8b"
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
KINDS = {"trace": "a trace of torch.profiler", "sqlite": "an export of Nsight Systems",
         "stats": "a report of nsys stats", "times": "a CSV of layer times"}  # fmt: skip
_SYMBOLS = (("mamba", "M"), ("ssm", "M"), ("moe", "#"), ("attention", "*"), ("attn", "*"), ("mlp", "-"), ("ffn", "-"))


def kind_of_file(path: str | os.PathLike[str]) -> str | None:
    """Return which of `KINDS` a file is, by its content; None if it is none of them or cannot be read."""
    try:
        if not os.path.isfile(path):  # reading a pipe would block
            return None
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
        if head.startswith(GZIP_MAGIC):
            with gzip.open(path, "rb") as packed:
                head = packed.read(HEAD_BYTES)
    except (OSError, ValueError, EOFError, zlib.error):
        return None
    if head.startswith(SQLITE_MAGIC):
        return "sqlite"
    text = head.decode("utf-16" if head.startswith(UTF_16) else "utf-8-sig", "replace")
    if text.lstrip()[:1] in ("{", "["):
        return "trace" if looks_like_trace(head) else None
    if looks_like_stats(text):
        return "stats"
    return "times" if "\0" not in text and looks_like_times(text) else None


def load_foreign_profile(path: str | os.PathLike[str], costs: CostTable | None = None) -> Profile | None:
    """Return the profile in a file of another tool, or None if the file is of no known tool.

    `costs`: the analytic costs of the model that was recorded. They then determine how B is split into I and W, and
    supply symbols and bytes.
    """
    kind = kind_of_file(path)
    if kind is None:
        return None
    times = _read(os.fspath(path), kind, _stamp(path))
    return _profile(times, stem_of(path).removesuffix(".json"), kind, costs, shown(path))


def foreign_costs(path: str | os.PathLike[str]) -> CostTable | None:
    """Return the costs in a file of another tool, and log how they were derived; None if the tool is not known."""
    profile = load_foreign_profile(path)
    if profile is None:
        return None
    _tell(shown(path), tuple(profile.about["notes"]))
    return profile.costs


@functools.cache
def _tell(where: str, notes: tuple[str, ...]) -> None:
    for note in notes:
        log.warning("%s: %s", where, note)


def _stamp(path: str | os.PathLike[str]) -> tuple[int, int]:
    info = os.stat(path)
    return info.st_mtime_ns, info.st_size


@functools.lru_cache(maxsize=2)
def _read(path: str, kind: str, stamp: tuple[int, int]) -> LayerTimes:
    """Read a file. Results are cached, because files are large; another `stamp` means that the file has changed."""
    where = shown(path)
    if kind == "sqlite":
        if stamp[1] > MAX_TIMELINE_BYTES:
            raise OctoPipeError(
                f"{where} has {stamp[1]} bytes; a file of this kind may have at most {MAX_TIMELINE_BYTES}"
            )
        return layer_times(read_nsight_sqlite(path, where), where)
    data = read_bytes(path, most_bytes=MAX_TIMELINE_BYTES)
    if data.startswith(GZIP_MAGIC):
        data = _unpacked(data, where)
    if kind == "trace":
        return layer_times(read_trace(data.removeprefix(b"\xef\xbb\xbf"), where), where)
    text = decode_text(data, where)
    try:
        return read_nsight_csv(text, where) if kind == "stats" else read_times_csv(text, where)
    except csv.Error as error:  # a cell larger than the module's limit
        raise OctoPipeError(f"{where}: not a table with commas ({error})") from None


def _unpacked(data: bytes, where: str) -> bytes:
    try:
        with gzip.open(io.BytesIO(data)) as packed:
            out = packed.read(MAX_TIMELINE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise OctoPipeError(f"{where}: cannot be unpacked ({' '.join(str(error).split())}); export it again") from None
    if len(out) > MAX_TIMELINE_BYTES:
        raise OctoPipeError(f"{where}: unpacked it has more than {MAX_TIMELINE_BYTES} bytes; record fewer steps")
    return out


# -- F, I and W ----------------------------------------------------------------------------------------


def _profile(times: LayerTimes, name: str, kind: str, model: CostTable | None, where: str) -> Profile:
    if model is not None and model.num_layers != len(times.names):
        raise OctoPipeError(
            f"{where}: times of {len(times.names)} layers ({times.names[0]} ... {times.names[-1]}), {model.model} has "
            f"{model.num_layers} with embedding and head; record all of its layers, or leave --model out"
        )
    symbols = model.symbols if model is not None else _symbols(times.names)
    forward, input_, weight, notes = _split(times, symbols, model)
    if max((forward + input_ + weight).tolist()) > MAX_TIME_MS:
        raise OctoPipeError(f"{where}: a layer takes more than {MAX_TIME_MS:g} ms; export it again")
    if not (forward + input_ + weight).any():
        raise OctoPipeError(f"{where}: all times are zero; record a training step")
    if model is not None:
        costs = model.replace(model=name, forward_ms=forward, input_ms=input_, weight_ms=weight)
        notes.append(f"memory sizes are the analytic ones of {model.model}; only the times are from the file")
    else:
        costs = CostTable(model=name, symbols=symbols, forward_ms=forward, input_ms=input_, weight_ms=weight)
        notes.append("memory sizes are not known: memory is not limited and transfers cost nothing unless given")
    about = {"source": KINDS[kind], "layers": list(times.names), "notes": [*times.notes, *notes]}
    return Profile(costs=costs, about=about)


def _split(times: LayerTimes, symbols: str, model: CostTable | None) -> tuple[Array, Array, Array, list[str]]:
    """Return F, I and W of every layer, and notes on how they were derived."""
    forward = np.array(times.forward_ms)
    if times.input_ms:
        return forward, np.array(times.input_ms), np.array(times.weight_ms), []
    share = _input_shares(symbols, model)
    whose = (
        f"as in the layers of {model.model}" if model else ("half and half (an embedding: all W), as in linear layers")
    )
    notes = [f"I and W were not timed separately: B is split by the analytic ratio, {whose}"]
    if times.backward_ms:
        backward = np.array(times.backward_ms)
    else:
        ratio = _backward_ratios(model, len(symbols))
        if times.total_ms:
            forward = np.array(times.total_ms) / (1.0 + ratio)
            notes.insert(0, "the row is taken as F plus B: F is separated by the analytic ratio")
        else:
            notes.insert(0, "only F is known: B is derived from it by the analytic ratio")
        notes[0] += f", that of {model.model}" if model else " of linear layers (B is twice F)"
        backward = forward * ratio
    return forward, backward * share, backward * (1.0 - share), notes


def _input_shares(symbols: str, model: CostTable | None) -> Array:
    """Return I as a share of I plus W, per layer."""
    if model is None:
        return np.array([0.0 if symbol == "E" else 0.5 for symbol in symbols])
    whole = model.input_ms + model.weight_ms
    return np.divide(model.input_ms, whole, out=np.full_like(whole, 0.5), where=whole > 0)


def _backward_ratios(model: CostTable | None, count: int) -> Array:
    if model is None:
        return np.full(count, 2.0)
    whole = model.input_ms + model.weight_ms
    return np.divide(whole, model.forward_ms, out=np.full_like(whole, 2.0), where=model.forward_ms > 0)


def _symbols(names: Sequence[str]) -> str:
    """Return a symbol per layer, from its name: E and L for an embedding and a head at the ends, otherwise that of the
    kind of layer that the name states (T if it states none)."""
    out = []
    for k, name in enumerate(names):
        low = name.lower()
        if k == 0 and any(word in low for word in ("embed", "wte", "tok")):
            out.append("E")
        elif k == len(names) - 1 and any(word in low for word in ("head", "loss", "output", "logits")):
            out.append("L")
        else:
            out.append(next((symbol for word, symbol in _SYMBOLS if word in low), "T"))
    return "".join(out)
