"""Text in a `.jsonl` file (also `.jsonl.gz`): one JSON object per line.

Knows: lines, and what may be wrong with one. Does not know: which fields are read and how they become tokens
(`records.py`). Imports no torch.
"""

from __future__ import annotations

import codecs
import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import shown
from octopipe.runtime.training.data.corpus import Corpus
from octopipe.runtime.training.data.records import PAIR, documents_of, fields_of, notes_of, texts_of
from octopipe.runtime.training.data.token_cache import Tell, kept_corpus
from octopipe.runtime.training.data.tokenizer import Tokenizer

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson")


def is_text(path: str | os.PathLike[str]) -> bool:
    return str(path).endswith(SUFFIXES)


def look(path: str | os.PathLike[str], key: str) -> tuple[str, ...]:
    """Return the fields to read, according to the first record; raises an error if it is not valid. Reads nothing
    else."""
    for number, record in _records(path):
        where = f"{shown(path)} line {number}"
        if not isinstance(record, dict):
            raise OctoPipeError(f"{where}: this JSON value is not an object; write one object per line")
        found = fields_of(record, key, where)
        texts_of(record, found, where)
        return found
    raise OctoPipeError(f"{shown(path)}: no record in it; give one JSON object per line")


def read_text(path: str | os.PathLike[str], tokenizer: Tokenizer, *, key: str, tell: Tell) -> Corpus:
    """Return the documents of the file as tokens, which are computed once and kept in the cache folder."""
    fields, where = look(path, key), shown(path)
    info = os.stat(path)
    identity = [os.path.realpath(path), info.st_size, info.st_mtime_ns, tokenizer.fingerprint, list(fields)]

    def texts() -> Iterator[tuple[str, ...]]:
        tell(f"tokenizing {where}")
        for number, record in _records(path):
            yield texts_of(record, fields, f"{where} line {number}")

    return kept_corpus(
        identity,
        lambda: documents_of(texts(), tokenizer),
        where=where,
        kind="jsonl",
        whole=fields == PAIR,
        tell=tell,
        notes=notes_of(tokenizer, where),
    )


def _records(path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of every line that is not blank."""
    where = shown(path)
    decode = msgspec.json.Decoder().decode
    try:
        if not Path(path).is_file():
            found = "not a regular file" if os.path.exists(path) else "no such file"
            raise OctoPipeError(f"{where}: {found}; check --data")
        with gzip.open(path, "rb") if str(path).endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)  # editors on Windows write one
                if not line.strip():
                    continue
                try:
                    yield number, decode(line)
                except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
                    raise OctoPipeError(f"{where} line {number}: {_fault(line, error)}") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise OctoPipeError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _fault(line: bytes, error: Exception) -> str:
    """Describe what is wrong with a line that is not a JSON value, and how to fix it."""
    try:
        line.decode()
    except UnicodeError:
        return "not UTF-8; save the file as UTF-8"
    if b"\0" in line:
        return "zero bytes in it, as in UTF-16; save the file as UTF-8"
    return f"not valid JSON ({' '.join(str(error).split())[:120]}); write one JSON object per line"
