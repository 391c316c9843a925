"""Records of text as documents: `text` alone, or a prompt with its completion.

Knows: which of a record's fields are read, how they become tokens, what counts in the loss. Does not know: where
records come from (`text.py`, `hf_dataset.py`). Imports no torch.

A text becomes its tokens and the token that ends a document. A prompt and its completion become one document, of
which the completion's tokens and the end count in the loss; such documents are not cut over samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.training.data.token_cache import Document
from octopipe.runtime.training.data.tokenizer import Tokenizer

PAIR = ("prompt", "completion")
AT_ONCE = 512
"""The number of records that are tokenized in one call."""


def fields_of(record: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Return the fields to read, according to a first record: `key`, or prompt and completion."""
    if key in record:
        return (key,)
    if all(name in record for name in PAIR):
        return PAIR
    have = ", ".join(sorted(map(str, record))[:8]) or "nothing"
    remedy = "; render chats into prompt and completion" if "messages" in record else ""
    raise OctoPipeError(
        f"{where}: neither {key!r} nor 'prompt' and 'completion' in it, but {have}; name the text: --text-key{remedy}"
    )


def texts_of(record: Any, fields: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return the texts of a record; raises a one-line error that names the record."""
    if not isinstance(record, Mapping):
        raise OctoPipeError(f"{where}: not an object with {' and '.join(fields)}")
    for name in fields:
        if name not in record:
            have = ", ".join(sorted(map(str, record))[:8]) or "nothing"
            raise OctoPipeError(f"{where}: {name!r} is missing; this record has {have}")
        if not isinstance(record[name], str):
            found = "null" if record[name] is None else f"a value of type {type(record[name]).__name__}"
            raise OctoPipeError(f"{where}: {name!r} is {found}, not text; write a string")
    return tuple(record[name] for name in fields)


def documents_of(texts: Iterable[tuple[str, ...]], tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield the tokens of every record."""
    end = [] if tokenizer.end is None else [tokenizer.end]
    rows = iter(texts)
    while chunk := list(itertools.islice(rows, AT_ONCE)):
        firsts = tokenizer.encode([row[0] for row in chunk])
        if len(chunk[0]) == 1:
            for ids in firsts:
                yield Document(ids if ids[-1:] == end or not ids else ids + end)
            continue
        seconds = tokenizer.encode([row[1] for row in chunk], special=False)
        for prompt, completion in zip(firsts, seconds):
            if end and prompt[-1:] == end and len(prompt) > 1:
                prompt = prompt[:-1]  # the tokenizer ends every text, but this one continues with the completion
            completion = completion + end
            yield Document(prompt + completion, [False] * len(prompt) + [True] * len(completion))


def notes_of(tokenizer: Tokenizer, where: str) -> tuple[str, ...]:
    if tokenizer.end is not None:
        return ()
    return (f"{where}: the tokenizer has no end-of-document token; documents are concatenated without one",)
