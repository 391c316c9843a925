"""Text into token ids, by a tokenizer of the `tokenizers` library or one that transformers can load.

Knows: where a tokenizer lies (`tokenizer.json`, or a model's folder) and which token ends a document. Does not know:
files of text (`text.py`). Imports no torch; the libraries are loaded when they are used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import read_bytes, read_json_object, shown

MOST_BYTES = 1 << 28
"""The largest tokenizer.json that is read."""
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")
"""Names of the token that ends a document, tried if no file beside the tokenizer states which it is."""
INSTALL = 'pip install "octopipe[train]"'


class Tokenizer:
    """A tokenizer with the token that ends a document."""

    def __init__(self, path: str | os.PathLike[str]):
        self.where = shown(path)
        given = Path(path)
        try:
            file = given / "tokenizer.json" if given.is_dir() else given
            there = file.is_file()
        except (OSError, ValueError) as error:
            raise OctoPipeError(f"{self.where}: cannot be read ({error}); check --tokenizer") from None
        self._fast: Any = None
        self._slow: Any = None
        if there:
            data = read_bytes(file, most_bytes=MOST_BYTES)
            self._fast = _parsed(data, shown(file))
            self._fast.no_padding()
            self._fast.no_truncation()
            self.size = int(self._fast.get_vocab_size(with_added_tokens=True))
            identity = data
        elif given.is_dir() and (given / "tokenizer_config.json").is_file():
            self._slow = _of_transformers(given, self.where)
            self.size = len(self._slow)
            identity = b"".join(p.read_bytes() for p in sorted(given.glob("*token*")) if p.is_file())
        else:
            raise OctoPipeError(f"{self.where}: no tokenizer.json there; give one, or a model's folder that holds one")
        self.end = self._end(given if given.is_dir() else given.parent)
        self.fingerprint = hashlib.sha256(identity + f" end {self.end}".encode()).hexdigest()

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Return the ids of every text; `special`: with the tokens that the tokenizer itself adds around a text (a
        first token, for example)."""
        if self._fast is not None:
            return [found.ids for found in self._fast.encode_batch_fast(list(texts), add_special_tokens=special)]
        return [list(self._slow.encode(text, add_special_tokens=special)) for text in texts]

    def _id(self, token: object) -> int | None:
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str):
            return None
        if self._fast is not None:
            found = self._fast.token_to_id(token)
            return None if found is None else int(found)
        return self._slow.get_vocab().get(token)

    def _end(self, folder: Path) -> int | None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            found = self._id(_value(folder / name, "eos_token"))
            if found is not None:
                return found
        for name in ("generation_config.json", "config.json"):
            number = _value(folder / name, "eos_token_id")
            number = number[0] if isinstance(number, list) and number else number
            if isinstance(number, int) and 0 <= number < self.size:
                return number
        return next((found for found in map(self._id, ENDS) if found is not None), None)


def _value(path: Path, key: str) -> Any:
    try:
        return read_json_object(path).get(key) if path.is_file() else None
    except (OSError, ValueError, OctoPipeError):
        return None


def _parsed(data: bytes, where: str) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise OctoPipeError(f"text needs the tokenizers library, which is not installed: {INSTALL}") from None
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises a bare Exception
        why = " ".join(str(error).split())[:120]
        raise OctoPipeError(
            f"{where}: not a tokenizer of the tokenizers library ({why}); write it with save_pretrained"
        ) from None


def _of_transformers(folder: Path, where: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise OctoPipeError(
            f'{where} has no tokenizer.json; its older tokenizer needs transformers: pip install "octopipe[hf]"'
        ) from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        why = " ".join(str(error).split())[:160]
        raise OctoPipeError(
            f"{where}: transformers cannot load its tokenizer ({why}); give another --tokenizer"
        ) from None
