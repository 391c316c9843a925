"""A folder of samples of a model that takes more than tokens: the results of the model's own processor, one file each.

Knows: the files (`.npz`, the arrays named like the model's inputs), their order, and how samples of different lengths
form a micro-batch. Does not know: images, sounds or processors. Imports torch only when tensors are made.

Processors of transformers decide how an image is resized, how many tokens stand for it and which inputs come with it,
and each family does it differently. Therefore their results are stored, which every family has:

    inputs = processor(text=..., images=..., return_tensors="np")
    np.savez(f"samples/{number:06}.npz", **inputs, labels=labels)

`labels` may be left out for decoders: then every token but those of images is predicted. Sequences are padded at the
end to the longest of their micro-batch; other arrays are joined along their first dimension.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, shown
from octopipe.runtime.training.data.source import IGNORED, Marks, Tokens, shuffled

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octopipe.huggingface.inputs import InputForm

PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "decoder_input_ids", "labels")
"""Arrays with one value per token, which are padded. All others have rows of their own."""


def is_samples(path: str) -> bool:
    """Return whether this is a folder of .npz files."""
    folder = Path(path)
    return folder.is_dir() and any(folder.glob("*.npz"))


class Samples:
    """The samples of a folder, in a shuffled order that repeats."""

    def __init__(self, path: str, *, vocab: int, seed: int, form: InputForm, shuffle: bool = True):
        self.where, self._vocab, self._seed, self._form = shown(path), vocab, seed, form
        self._files = sorted(Path(path).glob("*.npz"))
        if not self._files:
            raise OctoPipeError(f"{self.where}: no .npz file in it; write one for each sample")
        self._shuffle = shuffle
        self._lengths: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._files)

    def sample(self, number: int) -> Tokens:
        raise OctoPipeError(f"{self.where} holds samples of a model with a tower or an encoder; train such a model")

    def marks(self, number: int) -> Marks | None:
        return None

    def about(self) -> dict[str, object]:
        return {"kind": "samples", "files": len(self._files), "first": self._files[0].name}

    def _file(self, number: int) -> int:
        lap, at = divmod(number, len(self._files))
        return shuffled(at, len(self._files), self._seed + lap) if self._shuffle else at

    def read(self, number: int) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays of one sample, rows included."""
        path = self._files[self._file(number)]
        where = shown(path)
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            why = " ".join(str(error).split())[:120]
            raise OctoPipeError(f"{where}: cannot be read as a sample ({why}); write it with numpy.savez") from None
        for name, value in found.items():
            if value.dtype.kind not in "biuf":
                raise OctoPipeError(f"{where}: {brief(name)} holds {value.dtype}; give numbers")
            if name in PER_TOKEN:
                found[name] = value = np.atleast_2d(value).astype(np.int64)
                if value.shape[0] != 1:
                    raise OctoPipeError(f"{where}: {name} has {value.shape[0]} rows; write one file for each sequence")
        if not {"input_ids", "decoder_input_ids", "labels"} & found.keys():
            have = ", ".join(sorted(found)) or "nothing"
            raise OctoPipeError(
                f"{where}: neither input_ids nor labels in it, but {have}; save the arrays that the processor returns"
            )
        for name in ("input_ids", "decoder_input_ids"):
            ids = found.get(name)
            if ids is not None and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab:
                raise OctoPipeError(
                    f"{where}: {name} has the id {int(ids.max())}, the model a vocabulary of {self._vocab}; use the "
                    "model's own processor"
                )
        return found

    def _labelled(self, number: int) -> dict[str, np.ndarray[Any, Any]]:
        """Return the sample with `labels` at the positions of their logits."""
        found = self.read(number)
        where = shown(self._files[self._file(number)])
        labels = found.get("labels")
        if self._form.decodes:
            if labels is None:
                raise OctoPipeError(f"{where}: labels are missing, which an encoder-decoder is trained with; add them")
            if "decoder_input_ids" not in found:
                before = np.where(labels == IGNORED, 0, labels)
                start = np.full_like(before[:, :1], self._form.start)
                found["decoder_input_ids"] = np.concatenate((start, before[:, :-1]), axis=1)
            return found
        ids = found["input_ids"]
        if labels is None:
            labels = ids
            for form in self._form.kinds:
                labels = np.where(ids == form.token, IGNORED, labels) if form.places else labels
            if "attention_mask" in found:
                labels = np.where(found["attention_mask"] == 0, IGNORED, labels)
        if labels.shape != ids.shape:
            raise OctoPipeError(f"{where}: {labels.shape[1]} labels for {ids.shape[1]} tokens; give one for each")
        found["labels"] = np.concatenate((labels[:, 1:], np.full_like(labels[:, :1], IGNORED)), axis=1)
        return found

    def counted(self, number: int) -> int:
        """Return the number of targets of a sample that count."""
        file = self._file(number)
        if file not in self._lengths:
            self._lengths[file] = int((self._labelled(number)["labels"] != IGNORED).sum())
        return self._lengths[file]

    def micro_batch(self, numbers: Sequence[int], *, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
        """Return the inputs of these samples together, and the next tokens at the positions where they count."""
        import torch

        found = [self._labelled(number) for number in numbers]
        names = dict.fromkeys(name for sample in found for name in sample)
        out: dict[str, Tensor] = {}
        for name in names:
            arrays = [sample[name] for sample in found if name in sample]
            if name in PER_TOKEN:
                if len(arrays) < len(found):
                    raise OctoPipeError(f"{self.where}: some samples have {name} and others do not; give it to all")
                longest = max(array.shape[1] for array in arrays)
                filler = IGNORED if name == "labels" else 0
                padded = [np.pad(a, ((0, 0), (0, longest - a.shape[1])), constant_values=filler) for a in arrays]
                out[name] = torch.from_numpy(np.concatenate(padded))
            else:
                joined = torch.from_numpy(np.concatenate(arrays))
                out[name] = joined.to(dtype) if joined.is_floating_point() else joined
        main = "input_ids" if "input_ids" in out else None
        lengths = [sample[main].shape[1] for sample in found] if main is not None else []
        if len(set(lengths)) > 1 and "attention_mask" not in out:
            mask = torch.zeros(len(found), max(lengths), dtype=torch.long)
            for row, length in enumerate(lengths):
                mask[row, :length] = 1
            out["attention_mask"] = mask
        elif "attention_mask" in out and bool(out["attention_mask"].all()):
            del out["attention_mask"]  # nothing is masked
        labels = out.pop("labels")
        return out, labels
