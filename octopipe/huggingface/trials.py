"""Whether a model's forward takes a made-up batch, and how many tokens its images or recordings occupy in a sequence.

Knows: how a forward runs around placeholder layers, and the calls with which models of transformers put features in the
place of tokens. Does not know: which inputs a model may take (`media.py`), or how models are split.

Placeholder layers return their hidden state. What else layers return is guessed, list by list: a guess that is wrong
fails right behind the list, and the next one is tried.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octopipe.huggingface.sections import RETURNS, quiet, said_returns
from octopipe.huggingface.shell import PlaceholderLayer, Stop, Unpacked, hidden_leaf, leaves_of, shell_of_zeros
from octopipe.runtime.torch_private import WithoutFunctionModes

FEATURES = ("get_image_features", "get_audio_features", "get_video_features")
MASK = "get_placeholder_mask"
MISMATCH = re.compile(r"tokens: \d+, features:? (\d+)")
"""The error of transformers models if the number of placeholder tokens is not that of the features."""


class Trials:
    """A model without its layers, whose forward is run on one made-up batch after another."""

    def __init__(self, model: nn.Module, lists: Sequence[str]):
        """`lists`: the lists whose layers are placeholders; the layers of other lists run, without their weights."""
        self._model = model
        self._paths = [name for name, _ in model.named_modules() if name in lists]
        self._path_of = [k for k, path in enumerate(self._paths) for _ in model.get_submodule(path).children()]
        self._returns = [said_returns(model, path)[0] for path in self._paths]
        self._shell, self._answers = shell_of_zeros(model, self._paths)
        self._shell.eval()
        self._last: int | None = None
        """The list whose layer was called last."""
        self._called: set[int] = set()
        """The lists of which the latest run called a layer."""
        self.visits = 0
        self._counting = False
        self._rows: dict[str, int] = {}
        """The number of rows of features, by the kind of call that reported it."""
        self._watch_features()

    @property
    def last(self) -> str:
        """The list whose layers the latest run called last; empty if it called none."""
        return "" if self._last is None else self._paths[self._last]

    @property
    def idle(self) -> frozenset[str]:
        """The lists of which the latest run called no layer."""
        return frozenset(path for number, path in enumerate(self._paths) if number not in self._called)

    def places(self, inputs: Mapping[str, Any]) -> int:
        """The number of rows of features that a batch's items become if features replace tokens; 0 if they do not. The
        batch has one token per item."""
        self._counting = True
        try:
            self._run(inputs)
        finally:
            self._counting = False
        return next((self._rows[kind] for kind in ("mask", "said", "put", "features") if kind in self._rows), 0)

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Raise the error that the model's forward raises on the batch."""
        self._run(inputs)

    def _run(self, inputs: Mapping[str, Any]) -> None:
        start = self._returns
        tried = {tuple(start)}
        problem: Exception | None = None
        while True:
            self._last, self._rows, before, self.visits = None, {}, self.visits if problem else -1, 0
            self._called = set()
            try:
                with torch.no_grad(), self._answers.given_by(self._visit), Unpacked(inputs), _Puts(self._count):
                    self._shell(**inputs, **quiet(self._model))
                return
            except Stop:
                return
            except Exception as error:  # a wrong guess of what layers return, or a batch that the model does not take
                self._read_error(str(error))
                if self._rows:
                    return
                # The error of the guess that came furthest is the best one; wrong guesses of tuples raise odd errors.
                if self.visits > before or (
                    self.visits == before and isinstance(problem, AttributeError | IndexError | TypeError)
                ):
                    problem = error
                self.visits = max(self.visits, before)
                if not self._guess_again(tried):
                    self._returns = start
                    assert problem is not None
                    raise problem from None

    def _read_error(self, error: str) -> None:
        """Read the number of features from the error of models that compare it with the number of placeholder tokens
        before any call that is watched."""
        said = MISMATCH.search(error)
        if said is not None and self._counting:
            self._rows["said"] = int(said[1])

    def _guess_again(self, tried: set[tuple[int, ...]]) -> bool:
        """Assume that the layers which were called last return something else."""
        if self._last is None:
            return False
        for count in RETURNS:
            other = [*self._returns[: self._last], count, *self._returns[self._last + 1 :]]
            if tuple(other) not in tried:
                self._returns = other
                tried.add(tuple(other))
                return True
        return False

    def _visit(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._last = self._path_of[layer]
        self._called.add(self._last)
        self.visits += 1
        leaves, _ = leaves_of(args, kwargs)
        hidden = leaves[hidden_leaf(leaves)]
        returns = abs(self._returns[self._last])
        return (hidden, *[None] * (returns - 1)) if returns else hidden

    def _count(self, kind: str, rows: int) -> None:
        if self._counting:
            self._rows[kind] = rows
            if kind == "mask":
                raise Stop

    def _watch_features(self) -> None:
        """Record which features the forward has, and stop once only logits are left to compute."""
        head = self._shell.get_output_embeddings() if hasattr(self._shell, "get_output_embeddings") else None  # type: ignore[operator]
        if isinstance(head, nn.Module):
            head.register_forward_pre_hook(_stop)
        for module in list(self._shell.modules()):
            if type(module) is PlaceholderLayer:
                continue
            for name in (*FEATURES, MASK):
                if callable(call := getattr(type(module), name, None)):
                    watched = _mask if name == MASK else _features
                    object.__setattr__(module, name, watched(call.__get__(module), self._count))


def _stop(*_: Any) -> None:
    raise Stop


def _features(call: Callable[..., Any], tell: Callable[[str, int], None]) -> Callable[..., Any]:
    """Wraps the model's own function that computes features: it reports how many rows its result has."""

    def features(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        found = getattr(out, "pooler_output", out)
        found = found if isinstance(found, tuple | list) else [found]
        if found and all(isinstance(t, Tensor) for t in found):
            tell("features", sum(t.shape[:-1].numel() for t in found))
        return out

    return features


def _mask(call: Callable[..., Any], tell: Callable[[str, int], None]) -> Callable[..., Any]:
    """Wraps the model's own function that finds the tokens which features replace: it reports how many rows it is
    given."""
    signature = inspect.signature(call)

    def mask(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for name, value in given.items():
            if name.endswith("_features") and isinstance(value, Tensor):
                tell("mask", value.shape[:-1].numel())
        return call(*args, **kwargs)

    return mask


class _Puts(TorchFunctionMode):
    """Reports how many rows a call has that inserts rows into a sequence of embeddings."""

    def __init__(self, tell: Callable[[str, int], None]):
        super().__init__()
        self._report = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "").strip("_") in ("masked_scatter", "index_put", "setitem"):
            with WithoutFunctionModes():
                self._note(args[0], args[2] if len(args) > 2 else kwargs.get("values", kwargs.get("source")))
        return func(*args, **kwargs)

    def _note(self, into: Tensor, rows: Any) -> None:
        floating = isinstance(rows, Tensor) and rows.is_floating_point() and rows.ndim > 1
        if floating and into.ndim == 3 and rows.shape[-1] == into.shape[-1]:
            self._report("put", rows.shape[:-1].numel())
