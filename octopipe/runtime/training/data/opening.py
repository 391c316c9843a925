"""Opens the argument of `--data`: detects the kind of a path early, and opens it once the model is known.

Knows: the kinds and in which order they are tried. Does not know: any format. Imports no torch.

`look` quickly finds errors that can be detected without the model; `open_source` reads the data, tokenizes it if
necessary, and checks ids against the vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import shown
from octopipe.runtime.training.data import hf_dataset, megatron_file, text, token_file
from octopipe.runtime.training.data.corpus import Corpus, Windows
from octopipe.runtime.training.data.samples import Samples, is_samples
from octopipe.runtime.training.data.source import Source
from octopipe.runtime.training.data.synthetic import SyntheticTokens
from octopipe.runtime.training.data.token_cache import Tell
from octopipe.runtime.training.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octopipe.huggingface.inputs import InputForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The options for reading data files."""

    tokenizer: str | None = None
    """A tokenizer.json, or a model's folder with one."""
    dtype: str | None = None
    """The type of the ids in a `.bin`."""
    text_key: str = "text"
    """The field of a record that contains the text."""
    apart: bool | None = None
    """Whether documents of one sample are masked from each other; None: if that is possible."""


def _silent(_: str) -> None:
    """Ignore every report."""


def look(path: str, reading: Reading) -> None:
    """Raise an error for everything that is wrong with the data and can be found quickly, before anything else runs."""
    if not os.path.lexists(path) and megatron_file.paths_of(path) is None:
        raise OctoPipeError(f"{shown(path)}: no such file; give a .jsonl, .npy or .bin, or a saved dataset's folder")
    if text.is_text(path):
        _tokenizer(path, reading)
        text.look(path, reading.text_key)
    elif hf_dataset.is_dataset(path):
        if hf_dataset.look(path, reading.text_key)[0] != "input_ids":
            _tokenizer(path, reading)
    elif megatron_file.paths_of(path) is not None:
        megatron_file.read_megatron(path, dtype=reading.dtype)
    elif Path(path).suffix in (".npy", ".bin"):
        token_file.look(path, reading.dtype)
    elif is_samples(path):
        return
    else:
        raise OctoPipeError(
            f"{shown(path)}: not a supported kind of data; give a .jsonl (with --tokenizer), .npy or .bin, "
            "Megatron's .bin with its .idx, a folder of datasets' save_to_disk, or a folder of .npz samples"
        )


def read(path: str, reading: Reading, *, vocab: int, tell: Tell = _silent) -> Corpus:
    """Return the corpus at a path. The ids that are checked (`check_vocabulary`) are inside the vocabulary."""
    look(path, reading)
    if text.is_text(path):
        tokenizer = _tokenizer(path, reading)
        _fits(tokenizer, vocab)
        corpus = text.read_text(path, tokenizer, key=reading.text_key, tell=tell)
    elif hf_dataset.is_dataset(path):
        chosen = None if reading.tokenizer is None else Tokenizer(reading.tokenizer)
        corpus = hf_dataset.read_dataset(path, chosen, key=reading.text_key, tell=tell)
    elif megatron_file.paths_of(path) is not None:
        corpus = megatron_file.read_megatron(path, dtype=reading.dtype)
    else:
        corpus = token_file.read_tokens(path, vocab=vocab, dtype=reading.dtype)
    corpus.check_vocabulary(vocab)
    return corpus


def open_source(
    path: str | None,
    reading: Reading | None = None,
    *,
    vocab: int,
    seq: int,
    seed: int,
    apart: bool = False,
    shuffle: bool = True,
    tell: Tell = _silent,
    form: InputForm | None = None,
) -> Source:
    """Return the samples at a path, or synthetic samples without a path. `form`: the inputs of a model with a tower or
    an encoder."""
    if path is None:
        return SyntheticTokens(vocab=vocab, seq=seq, seed=seed)
    check_form(path, form)
    if form is not None and is_samples(path):
        return Samples(path, vocab=vocab, seed=seed, form=form, shuffle=shuffle)
    corpus = read(path, reading or Reading(), vocab=vocab, tell=tell)
    return Windows(corpus, vocab=vocab, seq=seq, seed=seed, apart=apart, shuffle=shuffle)


def check_form(path: str, form: InputForm | None) -> None:
    """Raise an error if the data is of another kind than the model's inputs."""
    if form is None and is_samples(path):
        raise OctoPipeError(f"{shown(path)} holds samples for models with a tower or an encoder; give tokens or text")
    if form is None or is_samples(path):
        return
    if form.decodes or any(any(kind.items(len(kind.images) or 1)) for kind in form.kinds):
        none = "--images 0" if form.beside is None else "--images 0 and --recordings 0"
        raise OctoPipeError(
            f"{shown(path)} holds tokens alone, and the model reads more; give a folder of .npz samples"
            + ("" if form.decodes else f", or {none} to train on text")
        )


def _tokenizer(path: str, reading: Reading) -> Tokenizer:
    if reading.tokenizer is None:
        raise OctoPipeError(f"{shown(path)} holds text; name its tokenizer: --tokenizer PATH")
    return Tokenizer(reading.tokenizer)


def _fits(tokenizer: Tokenizer, vocab: int) -> None:
    if tokenizer.size > vocab:
        raise OctoPipeError(
            f"{tokenizer.where} has {tokenizer.size} tokens, the model a vocabulary of {vocab}; use the model's own "
            "tokenizer"
        )
