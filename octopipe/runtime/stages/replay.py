"""What a forward leaves behind besides its outputs, and what it must find to run a second time exactly as the first.

Knows: the buffers that layers change (batch norm's statistics, spectral norm's vectors, caches), inputs changed in
place, and random numbers drawn elsewhere than from torch's global generators. Does not know: graphs or gradients.

R gets copies of the buffers as F found them and puts the real ones back, so statistics move once, and F's own power
iteration is repeated from its own start. What a stage's forward changes is learned the first time, when everything is
copied; from then on only that is. A forward that changes something new later on is refused, since it was not copied.

    start = replay.before(tensors)       # F; tensors: all that it is given
    ...
    kept = replay.after(start)
    with kept.again() as tensors:        # R
        ...
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from octopipe.base.errors import OctoPipeError

Home = dict[str, Any]
"""A module's own buffers by name."""


class Found(NamedTuple):
    """A buffer before a forward."""

    home: Home
    name: str
    label: str
    tensor: Tensor | None
    version: int
    copy: Tensor | None
    """None where it is not known to change."""

    def moved(self) -> bool:
        """Whether it is another tensor now, or has other values."""
        now, was = self.home.get(self.name), self.tensor
        if now is not was:
            return True
        if was is None:
            return False
        # Batch norm's kernel changes its statistics without a word to the version.
        return was._version != self.version or (self.copy is not None and not torch.equal(was, self.copy))


class Buffers:
    """The buffers of some modules, and which of them forwards are known to change."""

    def __init__(self, modules: Sequence[nn.Module], first_layer: int = 0):
        self._modules = tuple(modules)
        self._named = [
            (f"{first_layer + k}.{path}." if path else f"{first_layer + k}.", module)
            for k, top in enumerate(self._modules)
            for path, module in top.named_modules()
        ]
        self._norms = {id(m._buffers) for _, m in self._named if isinstance(m, _NormBase)}
        self._training: list[bool] | None = None
        """What the modules' `training` was when the forwards' habits were learned."""
        self._known: list[tuple[Home, str, str, bool]] = []
        """Every buffer with its label, and whether forwards change it."""

    def learn(self) -> list[Found]:
        """All buffers with copies."""
        return [
            Found(m._buffers, name, label + name, t, 0 if t is None else t._version, None if t is None else t.clone())
            for label, m in self._named
            for name, t in m._buffers.items()
        ]

    def moving(self) -> bool:
        """Whether forwards change any."""
        return bool(self._norms) or any(moves for *_, moves in self._known)

    def before(self) -> list[Found]:
        """All buffers, with copies of those that the forward to come may change."""
        training = [m.training for m in self._modules]
        if training != self._training:
            self._training = training
            found = self.learn()
            self._known = [(f.home, f.name, f.label, False) for f in found]
            return found
        return [
            Found(
                home,
                name,
                label,
                (t := home.get(name)),
                0 if t is None else t._version,
                t.clone() if moves and t is not None else None,
            )
            for home, name, label, moves in self._known
        ]

    def after(self, found: Sequence[Found]) -> list[Found]:
        """Those that the forward changed (as they were), or that it always may."""
        kept, moves = [], []
        for f in found:
            moved = f.moved()
            if moved and f.copy is None and f.tensor is not None:
                if f.tensor._version != f.version:
                    raise OctoPipeError(
                        f"buffer {f.label} changed for the first time after forwards that left it alone, so its stage "
                        "cannot be recomputed; change it in every forward, or switch recomputation off there"
                    )
                f = f._replace(copy=f.tensor)  # another tensor took its place: the old one is as it was
            moves.append(moved or id(f.home) in self._norms)
            if moves[-1]:
                kept.append(f)
        self._known = [(h, name, label, was or now) for (h, name, label, was), now in zip(self._known, moves)]
        return kept


@contextmanager
def standing(found: Sequence[Found]) -> Iterator[None]:
    """Copies in the place of the real buffers, which nothing inside touches."""
    real = [(f.home, f.name, f.home.get(f.name)) for f in found]
    copies: dict[int, Tensor] = {}  # a buffer of two modules stays one
    for f in found:
        if f.copy is None:
            f.home[f.name] = None
        else:
            f.home[f.name] = copies.setdefault(id(f.tensor), f.copy.clone())
    try:
        yield
    finally:
        for home, name, tensor in real:
            home[name] = tensor


def undo(found: Sequence[Found]) -> None:
    """Buffers as they were found, after a forward that broke off."""
    with torch.no_grad():
        for f in found:
            if f.moved():
                if f.tensor is not None and f.copy is not None:
                    f.tensor.copy_(f.copy)
                f.home[f.name] = f.tensor


# --- everything a forward starts from ------------------------------------------------------------------------


class Start(NamedTuple):
    """What F found."""

    buffers: list[Found]
    tensors: list[Tensor]
    versions: list[int]
    copies: dict[int, Tensor]
    """By place in `tensors`."""
    generators: list[tuple[torch.Generator, Tensor]]
    host: Any


class Kept(NamedTuple):
    """What R starts from."""

    buffers: list[Found]
    copies: dict[int, Tensor]
    generators: list[tuple[torch.Generator, Tensor]]
    host: Any

    @contextmanager
    def again(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """The tensors as F got them, while all else is as F found it, too."""
        now = [(g, g.get_state()) for g, _ in self.generators]
        host = _host_state() if self.host is not None else None
        for generator, state in self.generators:
            generator.set_state(state)
        _set_host_state(self.host)
        try:
            with standing(self.buffers):
                yield [self.copies[k].clone() if k in self.copies else t for k, t in enumerate(tensors)]
        finally:
            for generator, state in now:
                generator.set_state(state)
            _set_host_state(host)


class Replay:
    """What one stage's forwards change, learned as they run."""

    def __init__(self, modules: Sequence[nn.Module], first_layer: int):
        self.buffers = Buffers(modules, first_layer)
        self._place = f"layers {first_layer} to {first_layer + len(modules) - 1}"
        held = [v for top in modules for m in top.modules() for v in vars(m).values() if isinstance(v, torch.Generator)]
        self._generators = list(dict.fromkeys(held))
        self._learned = self._draws = False
        self._changed: set[int] = set()
        """Places of inputs that forwards change in place."""

    def before(self, tensors: list[Tensor]) -> Start:
        learning = not self._learned
        return Start(
            self.buffers.before(),
            tensors,
            [t._version for t in tensors],
            {k: t.clone() for k, t in enumerate(tensors) if learning or k in self._changed},
            [(g, g.get_state()) for g in self._generators],
            _host_state() if learning or self._draws else None,
        )

    def after(self, start: Start) -> Kept:
        moved = [k for k, (t, v) in enumerate(zip(start.tensors, start.versions)) if t._version != v]
        for k in moved:
            if k not in start.copies:
                raise OctoPipeError(
                    f"{self._place}: an input of shape {tuple(start.tensors[k].shape)} was changed in place for the "
                    "first time after forwards that left it alone, so it cannot be recomputed; change a copy"
                )
        self._changed.update(moved)
        if not self._learned:
            self._learned, self._draws = True, _host_state() != start.host
        copies = {k: t for k, t in start.copies.items() if k in self._changed}
        return Kept(self.buffers.after(start.buffers), copies, start.generators, start.host if self._draws else None)


def _host_state() -> Any:
    """Python's and numpy's own random numbers."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)


def _set_host_state(state: Any) -> None:
    if state is None:
        return
    random.setstate(state[0])
    if state[1] is not None:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = state[1]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
