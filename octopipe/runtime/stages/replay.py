"""State that the forwards of one stage change besides their outputs: isolated between micro-batches, restored for R.

Knows: which places (`state.py`) a stage's forwards write to, learned while they run; inputs that are modified in place;
random numbers that do not come from torch's global generators. Does not know: graphs or gradients.

This provides two guarantees. *Micro-batches do not share modified tensors*: if forwards modify a tensor in place (an
exponential mean, a counter), every forward works on a copy, and the original takes over its values afterwards. Data
that an earlier micro-batch's graph, its deferred W, the next stage or a message still uses is therefore never
overwritten. *R runs like F*: it sees every place, every generator and every input in the state that F saw, and
everything is restored afterwards, so that counters, statistics and lists advance once per micro-batch, as in plain
PyTorch.

The first forward (and the first after `train()` or `eval()`) inspects everything and copies all tensors. Forwards with
`checking` inspect everything; others inspect only the places that are known to change.

    start = replay.before(tensors, loss, again=True, checking=True)     # tensors: all that the forward is given
    ...                                                                 # F
    kept = replay.after(start)
    with kept.again(tensors) as tensors:                                # R
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.stages.calling import layers_text
from octopipe.runtime.stages.places import snapshot_of_boxes, snapshot_of_modules
from octopipe.runtime.stages.state import (
    Box,
    HeldTensor,
    Snapshot,
    Source,
    host_state,
    items_of,
    set_host_state,
)


class Start:
    """The state before a forward. Until `Replay.after` or `undo`, copies replace the tensors that it may modify."""

    __slots__ = (
        "again",
        "checking",
        "copies",
        "host",
        "snapshot",
        "sources",
        "standing",
        "tensors",
        "versions",
        "which",
    )

    def __init__(self, snapshot: Snapshot, tensors: list[Tensor], *, again: bool, checking: bool):
        self.snapshot, self.tensors, self.again, self.checking = snapshot, tensors, again, checking
        self.versions = [t._version for t in tensors]
        self.copies: dict[int, Tensor] = {}
        """Copies of inputs, by index in `tensors`."""
        self.standing: dict[int, Tensor] = {}
        """The copy that replaces a tensor, by the tensor's id."""
        self.which: list[HeldTensor] = []
        self.sources: list[Source] = []
        self.host: Any = None

    def stand(self, which: Iterable[HeldTensor]) -> None:
        """Replace each of these tensors by a copy."""
        self.which = list(which)
        self.stand_again()

    def stand_again(self) -> None:
        for held in self.which:
            if held.slots:
                self.standing[id(held.tensor)] = held.tensor.detach().clone()
        if self.standing:
            for box, contents in self.snapshot.boxes:
                _exchange(box, contents, self.standing)

    def undo(self) -> None:
        """Restore everything after a forward that failed."""
        if self.standing:
            for box, contents in self.snapshot.boxes:
                box.write(contents)
            self.standing = {}
        self.snapshot.put_back()
        with torch.no_grad():
            for k, copy in self.copies.items():
                if self.tensors[k]._version != self.versions[k]:
                    self.tensors[k].copy_(copy)
        for source in self.sources:
            source.put_back()
        set_host_state(self.host)


class Kept(NamedTuple):
    """The state from which R starts."""

    boxes: list[tuple[Box, Any]]
    copies: dict[int, Tensor]
    """Copies of tensors that F modified in place, by the tensor's id, with their values before F."""
    inputs: dict[int, Tensor]
    """The same for inputs, by position."""
    sources: list[Source]
    host: Any
    left: list[dict[Any, Tensor]]
    """For each box, the tensors with a graph that F stored there, by key."""

    @contextmanager
    def again(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """A context in which the tensors have the values that F received, and all other state is as F found it; at its
        end everything is as it was before.

        There is one exception: where F's own tensor is still the latest one that a forward stored in a place (an output
        that is kept for its gradient), the tensor of R replaces it, because backward goes through that one.
        """
        now = [(box, box.read()) for box, _ in self.boxes]
        sources, host = [Source(s.thing) for s in self.sources], host_state()
        fresh = {key: copy.clone() for key, copy in self.copies.items()}
        for box, contents in self.boxes:
            box.write(contents)
            _exchange(box, contents, fresh)
        for source in self.sources:
            source.put_back()
        set_host_state(self.host)
        try:
            yield [self.inputs[k].clone() if k in self.inputs else t for k, t in enumerate(tensors)]
        finally:
            for (box, contents), left in zip(now, self.left):
                made = _with_graph(box.read()) if left else {}
                for key, tensor in left.items():
                    if key in made and _at(contents, key) is tensor:
                        contents[key] = made[key]
                box.write(contents)
            for source in sources:
                source.put_back()
            set_host_state(host)


class Replay:
    """The state that the forwards of one stage change, learned while they run."""

    def __init__(self, modules: Sequence[nn.Module], first_layer: int):
        self._modules = tuple(modules)
        self._named = [(str(first_layer + k), m) for k, m in enumerate(modules)]
        self._place = layers_text(first_layer, first_layer + len(modules) - 1)
        self._training: list[bool] | None = None
        """The layers' `training` flags when the behaviour of the forwards was learned."""
        self._modes: list[bool] = []
        """The same of all modules in them."""
        self._losses: dict[int, Any] = {}
        """The losses that have been called after the layers so far."""
        self._watch: dict[tuple[int, str, tuple[str, ...]], Box] = {}
        """Places that forwards change."""
        self._in_place: set[tuple[int, Any]] = set()
        """Places, by their object and key, whose tensor forwards change in place."""
        self._own: dict[int, Tensor] = {}
        """Tensors that existed before the first forward; they keep their identity."""
        self._sources: list[Source] = []
        self._changed: set[int] = set()
        """Inputs that forwards change in place."""
        self.elsewhere: Callable[[Snapshot, list[Box]], None] | None = None
        """Checks what a forward has changed for values that would bypass the pipeline (`crossing.py`)."""
        self._changes_state = False
        self._times_changed: dict[tuple[int, str, tuple[str, ...]], int] = {}
        """How many forwards have changed each place of `_watch`."""
        self._changed_last: set[tuple[int, str, tuple[str, ...]]] = set()
        """Places that the latest forward changed."""

    def observe(self) -> None:
        """Start an observation: `changes_state` reports on the forwards from here on."""
        self._changes_state = False

    def changes_state(self) -> bool:
        """Whether a forward since `observe` changed known state. A cache that was filled once and is only read since
        (tables of positions, for example) does not count."""
        return self._changes_state

    def moving(self) -> bool:
        """Whether forwards are known to change anything besides their outputs."""
        return bool(self._watch)

    def settled(self) -> bool:
        """Whether the next forward is expected to change nothing besides its outputs: the latest one did not, and no
        forward has changed a tensor in place. Unlike `moving`, a cache that was filled once does not count."""
        return self.is_known() and not self._in_place and not self._changed_last

    def kept(self) -> list[str]:
        """Places other than buffers that changed in more than one forward. One change is a cache being filled."""
        buffers = {id(m._buffers) for top in self._modules for m in top.modules()}
        again = [box for key, box in self._watch.items() if self._times_changed.get(key, 0) > 1]
        return [box.label for box in again if id(box.thing) not in buffers]

    def begin_step(self) -> None:
        """Learn anew if a module inside a layer has changed its mode since (a batch norm that was frozen, say)."""
        if self._training is not None and self._modes != self._modes_now():
            self._training = None

    def _modes_now(self) -> list[bool]:
        return [m.training for top in self._modules for m in top.modules()]

    def is_known(self) -> bool:
        """Whether a forward has run in the current mode of the layers (`train()`, `eval()`)."""
        return self._training == [m.training for m in self._modules]

    def look(self, loss: Any = None) -> Snapshot:
        """A snapshot of all places of the stage and its loss."""
        return snapshot_of_modules(self._named, [] if loss is None else [("loss_fn", loss)])

    def look_at_all(self) -> Snapshot:
        """`look` with every loss that has been called after the layers so far, and without what our own objects note
        from step to step (the pieces of a transformers model: the arguments of the latest batch)."""
        return snapshot_of_modules(self._named, [("loss_fn", loss) for loss in self._losses.values()], ours=False)

    def generators(self) -> list[Source]:
        """The random generators that the layers hold, each with its state."""
        return [Source(source.thing) for source in self._sources]

    def before(self, tensors: list[Tensor], loss: Any, *, again: bool, checking: bool) -> Start | None:
        """The state to keep before a forward; None if nothing is needed."""
        first = not self.is_known() or (loss is not None and id(loss) not in self._losses)
        if not (first or again or self._watch):
            return None
        if first:
            snapshot = self._first(loss)
        elif checking:
            snapshot = self.look(loss)
        else:
            snapshot = snapshot_of_boxes(self._watch.values())
        start = Start(snapshot, tensors, again=again, checking=checking or first)
        if first or checking:
            self._sources = snapshot.sources
        which = [h for h in snapshot.tensors.values() if first or self._may_change(h, checking)]
        wanted = set(map(id, which))
        snapshot.copy_tensors(lambda h: id(h) in wanted)
        start.stand(_apart(which, snapshot))
        if again:
            start.host = host_state()
            start.sources = [Source(s.thing) for s in self._sources]
        if again or first:
            start.copies = {k: t.clone() for k, t in enumerate(tensors) if first or k in self._changed}
        return start

    def _first(self, loss: Any) -> Snapshot:
        self._training, self._modes = [m.training for m in self._modules], self._modes_now()
        snapshot = self.look(loss)
        if not self._own or (loss is not None and id(loss) not in self._losses):
            fresh = snapshot_of_modules([], [("loss_fn", loss)]) if self._own else snapshot
            self._own.update((key, held.tensor) for key, held in fresh.tensors.items())
        self._losses[id(loss)] = loss
        return snapshot

    def _may_change(self, held: HeldTensor, checking: bool) -> bool:
        return any((id(b.thing), k) in self._in_place or (checking and key_of(b) in self._watch) for b, k in held.slots)

    def after(self, start: Start | None) -> Kept | None:
        """Ends a forward and restores the real tensors; returns the state for R, if R will follow."""
        if start is None:
            return None
        snapshot = start.snapshot
        moved = self._settle(start)
        for held in snapshot.tensors.values():
            if held.moved():
                moved.append(held)
        for held in moved:
            if start.again and held.copy is None and held.copyable():
                raise OctoPipeError(
                    f"{held.label} changed for the first time after forwards that left it alone, so its layer cannot "
                    "be recomputed; change it in every forward, or plan without recomputation there"
                )
            for box, key in held.slots:
                self._in_place.add((id(box.thing), key))
                self._watch.setdefault(key_of(box), box)
        changed = [box for box, _ in snapshot.changes()]
        for box in changed:
            self._watch.setdefault(key_of(box), box)
        self._changed_last = {key_of(box) for box in changed} | {key_of(b) for held in moved for b, _ in held.slots}
        for key in self._changed_last:
            self._times_changed[key] = self._times_changed.get(key, 0) + 1
        self._changes_state = self._changes_state or bool(moved or changed)
        if changed and start.checking and self.elsewhere is not None:
            self.elsewhere(snapshot, changed)
        return self._kept(start, moved)

    def _settle(self, start: Start) -> list[HeldTensor]:
        """Put the real tensors back, with the values of their copies; returns which of them changed."""
        if not start.standing:
            return []
        moved, back = [], {}
        with torch.no_grad():
            for held in start.snapshot.tensors.values():
                stand_in = start.standing.get(id(held.tensor))
                if stand_in is None:
                    continue
                back[id(stand_in)] = held.tensor
                if stand_in._version or (held.copy is not None and not _same(stand_in, held.copy)):
                    moved.append(held)
                    if id(held.tensor) not in self._own or stand_in.grad_fn is not None:
                        del back[id(stand_in)]  # made by a forward: it may be part of what that forward returned
                    else:
                        _take_over(held.tensor, stand_in)
        for box, _ in start.snapshot.boxes:
            _exchange(box, box.read(), back)
        start.standing = {}
        return moved

    def _kept(self, start: Start, moved: Sequence[HeldTensor]) -> Kept | None:
        inputs = [k for k, (t, v) in enumerate(zip(start.tensors, start.versions)) if t._version != v]
        self._changed.update(inputs)
        if not start.again:
            return None
        for k in inputs:
            if k not in start.copies:
                raise OctoPipeError(
                    f"{self._place}: an input of shape {tuple(start.tensors[k].shape)} was changed in place for the "
                    "first time after forwards that left it alone, so it cannot be recomputed; change a copy"
                )
        boxes = [(box, contents) for box, contents in start.snapshot.boxes if key_of(box) in self._watch]
        return Kept(
            boxes,
            {id(held.tensor): held.copy for held in moved if held.copy is not None},
            {k: t for k, t in start.copies.items() if k in self._changed},
            start.sources,
            start.host,
            [_with_graph(box.read()) for box, _ in boxes],
        )


def everything_as(snapshot: Snapshot) -> Kept:
    """A snapshot with copies of its tensors, from which a forward can run again."""
    copies = {key: held.copy for key, held in snapshot.tensors.items() if held.copy is not None}
    return Kept(snapshot.boxes, copies, {}, snapshot.sources, host_state(), [{}] * len(snapshot.boxes))


def key_of(box: Box) -> tuple[int, str, tuple[str, ...]]:
    return id(box.thing), box.kind, box.names


def _with_graph(contents: Any) -> dict[Any, Tensor]:
    if not isinstance(contents, (dict, list)):
        return {}
    return {k: v for k, v in items_of(contents) if isinstance(v, Tensor) and v.grad_fn is not None}


def _at(contents: Any, key: Any) -> Any:
    if isinstance(contents, dict):
        return contents.get(key)
    return contents[key] if key < len(contents) else None


def _exchange(box: Box, contents: Any, by: dict[int, Tensor]) -> None:
    """Replace those tensors of a box whose ids are keys of `by`."""
    if box.kind in ("array", "set") or not any(id(v) in by for _, v in items_of(contents)):
        return
    if isinstance(contents, dict):
        box.write({k: by.get(id(v), v) if isinstance(v, Tensor) else v for k, v in contents.items()})
    else:
        box.write([by.get(id(v), v) if isinstance(v, Tensor) else v for v in contents])


def _apart(which: Sequence[HeldTensor], snapshot: Snapshot) -> Iterator[HeldTensor]:
    """Those of the tensors that share memory with no other tensor of the snapshot. Replaced by copies, tensors that do
    would no longer share it."""
    owners: dict[int, int] = {}
    for held in snapshot.tensors.values():
        if held.tensor.layout is torch.strided and type(held.tensor) is Tensor and held.tensor.numel():
            pointer = held.tensor.untyped_storage().data_ptr()
            owners[pointer] = owners.get(pointer, 0) + 1
    for held in which:
        if held.copyable() and (not held.tensor.numel() or owners[held.tensor.untyped_storage().data_ptr()] == 1):
            yield held


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta or b.is_meta:
        return a.shape == b.shape and a.dtype == b.dtype and a.is_meta and b.is_meta
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is the same as NaN


def _take_over(real: Tensor, stand_in: Tensor) -> None:
    """Give a tensor the values (and the form, if a forward changed it) of its copy."""
    if real.shape != stand_in.shape or real.dtype != stand_in.dtype:
        real.data = stand_in.detach().clone()
    else:
        real.copy_(stand_in)
