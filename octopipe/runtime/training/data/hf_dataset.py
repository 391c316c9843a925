"""A Hugging Face dataset on disk: the folder that `Dataset.save_to_disk` writes.

Knows: which columns are read (`input_ids` with maybe `labels`, or text as in `records.py`). Does not know: the format
of the folder, which is the `datasets` library's own. Imports no torch; nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import shown
from octopipe.runtime.training.data.corpus import Corpus
from octopipe.runtime.training.data.records import PAIR, documents_of, fields_of, notes_of, texts_of
from octopipe.runtime.training.data.source import IGNORED
from octopipe.runtime.training.data.token_cache import Document, Tell, kept_corpus
from octopipe.runtime.training.data.tokenizer import INSTALL, Tokenizer

ROWS = 1000
"""The number of rows that are read from the dataset at a time."""


def is_dataset(path: str | os.PathLike[str]) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def look(path: str | os.PathLike[str], key: str) -> tuple[str, ...]:
    """Return the columns to read; raises an error for a folder that is not a dataset. Reads no rows."""
    home, where = Path(path), shown(path)
    if (home / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in home.iterdir() if p.is_dir())
        named = ", ".join(str(home / name) for name in splits[:4])
        raise OctoPipeError(f"{where} holds several splits; name one of them: {shown(named)}")
    if not (home / "dataset_info.json").is_file() or not (home / "state.json").is_file():
        raise OctoPipeError(
            f"{where} is a folder without a saved dataset; give what datasets' save_to_disk wrote, or a file"
        )
    columns = dict.fromkeys(_loaded(path).column_names)
    if "input_ids" in columns:
        return ("input_ids", "labels") if "labels" in columns else ("input_ids",)
    return fields_of(columns, key, f"{where}: its columns have")


def read_dataset(path: str | os.PathLike[str], tokenizer: Tokenizer | None, *, key: str, tell: Tell) -> Corpus:
    """Return the rows of the dataset as documents; a tokenizer is needed if it contains only text."""
    fields, where = look(path, key), shown(path)
    rows = _loaded(path)
    by_ids = fields[0] == "input_ids"
    if not by_ids and tokenizer is None:
        raise OctoPipeError(f"{where} holds text; name its tokenizer: --tokenizer PATH")
    identity = [os.path.realpath(path), rows._fingerprint, len(rows), list(fields)]
    if not by_ids and tokenizer is not None:
        identity.append(tokenizer.fingerprint)

    def documents() -> Iterator[Document]:
        tell(f"reading {where}")
        if by_ids or tokenizer is None:
            yield from _ready(rows, fields, where)
        else:
            yield from documents_of(_texts(rows, fields, where), tokenizer)

    return kept_corpus(
        identity,
        documents,
        where=where,
        kind="dataset",
        whole=fields == PAIR or "labels" in fields,
        tell=tell,
        notes=() if by_ids or tokenizer is None else notes_of(tokenizer, where),
    )


def _ready(rows: Any, fields: tuple[str, ...], where: str) -> Iterator[Document]:
    """Yield rows that already contain ids; labels of -100 do not count."""
    for number, row in _numbered(rows, fields):
        ids = row["input_ids"]
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise OctoPipeError(f"{where} row {number}: input_ids is not a list of integers; tokenize it again")
        if len(fields) == 1:
            yield Document(ids)
            continue
        labels = row["labels"]
        if not isinstance(labels, list) or len(labels) != len(ids):
            raise OctoPipeError(f"{where} row {number}: labels are not as many as input_ids; give one label per token")
        if any(label not in (i, IGNORED) for i, label in zip(ids, labels)):
            raise OctoPipeError(
                f"{where} row {number}: a label is neither {IGNORED} nor the token at its place; do not shift labels, "
                "training does that"
            )
        yield Document(ids, [label != IGNORED for label in labels])


def _texts(rows: Any, fields: tuple[str, ...], where: str) -> Iterator[tuple[str, ...]]:
    for number, row in _numbered(rows, fields):
        yield texts_of(row, fields, f"{where} row {number}")


def _numbered(rows: Any, fields: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    plain = rows.with_format(None).select_columns(list(fields))
    for first in range(0, len(plain), ROWS):
        piece = plain[first : first + ROWS]
        for k in range(len(piece[fields[0]])):
            yield first + k, {name: piece[name][k] for name in fields}


def _loaded(path: str | os.PathLike[str]) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise OctoPipeError(f"{shown(path)}: reading it needs the datasets library: {INSTALL}") from None
    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:  # the library and Arrow have exceptions of their own
        why = " ".join(str(error).split())[:160]
        raise OctoPipeError(f"{shown(path)}: datasets cannot load it ({why}); save it again") from None
