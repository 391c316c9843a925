"""Synchronisation of buffers that several ranks hold: after a step, changes of one copy are applied to all of them.

Knows: buffers by name, which ranks hold a copy, how a change is detected, and how copies are combined. Does not know:
what buffers mean (batch-norm statistics, counters, running maxima).

Copies of a layer within a pipeline and its data-parallel replicas process different micro-batches, so their statistics
diverge. After every step, a changed floating-point buffer becomes the mean over the copies that changed, and a changed
integer or boolean buffer becomes the maximum. All copies are then equal again, and a checkpoint holds the values of all
ranks. (A single process would have updated one buffer with all micro-batches in turn; the mean of the copies
corresponds to averaging the statistics of replicas.) A buffer that is one object in layers on different ranks has no
such mean: changing it is an error. Copies of different shape (a buffer that grows) have none either, and a buffer that
a forward makes itself is not known to all ranks: such copies stay apart, with a warning.

Constants (masks, position tables) are never modified, and nothing is sent for them. A change is detected by the
tensor's version, and for small buffers by their values, because batch norm changes its statistics without a new
version. On a CPU, ranks exchange after every step which buffers changed. On a GPU this exchange would make the host
wait, so it takes place in the first steps and then every `EVERY` steps; buffers that are known to change are averaged
in every step.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.ranks.reduce import local, wait_for
from octopipe.runtime.ranks.world import World, all_reduce

SMALL_BYTES = 1 << 20
"""Buffers up to this size are compared by value."""
FIRST, EVERY = 4, 16
"""On a device, ranks exchange which buffers changed after each of the first steps and then after every 16th step."""


class SharedBuffers:
    """The buffers of one rank's layers that other ranks also hold."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        holders: Mapping[int, tuple[int, ...]],
        axes: Mapping[str, Sequence[str]],
        one: Mapping[str, str] | None,
        world: World,
        *,
        timeout_s: float,
    ):
        """`holders`: by layer, the ranks that have it. `axes`: by a buffer's name, the data dimensions along which its
        copies are equal. `one`: by name, the name of a buffer of a layer on another rank that was the same object; None
        if layers on different ranks share nothing."""
        self._world, self._timeout_s, self._one = world, timeout_s, one or {}
        self._asks = one is not None
        self._groups: dict[tuple[tuple[int, ...], tuple[str, ...]], list[_Buffer]] = {}
        self._alone: list[_Buffer] = []
        self._steps = 0
        known: set[str] = set()
        for buffer in _buffers_of(modules):
            known.add(buffer.name)
            where = (holders[buffer.layer], tuple(axes.get(buffer.name, ())))
            if len(where[0]) > 1 or where[1]:
                self._groups.setdefault(where, []).append(buffer)
            elif buffer.name in self._one:
                self._alone.append(buffer)
        copied = {k: m for k, m in modules.items() if len(holders[k]) > 1 or world.axes}
        self._late: _Late | None = _Late(copied, known) if copied else None
        self._warned: set[str] = set()

    def keep_alike(self) -> None:
        """Make the copies of every buffer equal after a step (collective over the copies)."""
        problem = ""
        self._steps += 1
        if self._late is not None and self._late.seen_all():
            self._late = None
        looks = self._steps <= FIRST or self._steps % EVERY == 0
        for buffer in self._alone + [b for some in self._groups.values() for b in some]:
            if buffer.name in self._one and buffer.changed(look=looks or not buffer.on_device()):
                problem = (
                    f"buffer {buffer.name} is the same tensor as {self._one[buffer.name]}, of a layer on another "
                    "rank, and forwards change it, so every rank would have its own copy; put these layers on one "
                    "rank, or give each its own buffer"
                )
        if self._asks and self._steps <= FIRST:
            problem = next((text for text in self._world.gather(problem) if text), "")
        if problem:
            raise OctoPipeError(problem)
        for (holders, axes), buffers in sorted(self._groups.items()):
            groups = [self._world.subgroup(holders)] if len(holders) > 1 else []
            self._exchange(groups + [self._world.axes[axis] for axis in axes], buffers, looks)

    def begin_again(self) -> None:
        """After an interrupted step, which ranks have left at different places: the next step is the first again, on
        all of them, in which they exchange everything."""
        self._steps = 0

    def _exchange(self, groups: list[Any], buffers: list[_Buffer], looks: bool) -> None:
        device = next((t.device for b in buffers if (t := b.tensor()) is not None), torch.device("cpu"))
        looks = looks or device.type == "cpu"
        changed = [float(b.changed(look=looks) or (b.moves and not looks)) for b in buffers]
        if looks:
            forms = [b.form() for b in buffers]
            flags = torch.tensor([changed, forms, [-x for x in forms]], dtype=torch.float64, device=device)
            self._reduced(groups, flags, dist.ReduceOp.MAX)
            for buffer, flag, most, least in zip(buffers, *flags.tolist(), strict=True):
                buffer.moves |= flag > 0
                buffer.apart = most != -least
                if buffer.apart and flag > 0:
                    self._warn(buffer)
        moving = [
            (b, t, c) for b, c in zip(buffers, changed) if b.moves and not b.apart and (t := b.tensor()) is not None
        ]
        for op, mine in (
            (dist.ReduceOp.SUM, [x for x in moving if _is_number(x[1])]),
            (dist.ReduceOp.MAX, [x for x in moving if not _is_number(x[1])]),
        ):
            if mine:
                self._made_alike(groups, mine, op, mean=op == dist.ReduceOp.SUM)

    def _warn(self, buffer: _Buffer) -> None:
        if buffer.name not in self._warned:
            self._warned.add(buffer.name)
            warnings.warn(
                f"buffer {buffer.name} has another shape or dtype on another rank that holds a copy of its layer: the "
                "copies stay apart, and each sees its own micro-batches only; plan without copies (--no-copies) where "
                "they must be one",
                stacklevel=6,
            )

    def _made_alike(
        self, groups: list[Any], mine: Sequence[tuple[_Buffer, Tensor, float]], op: Any, *, mean: bool
    ) -> None:
        with torch.no_grad():
            rows = [_row(t, mean=mean) for _, t, _ in mine]
            if mean:
                rows = [row if c else torch.zeros_like(row) for row, (*_, c) in zip(rows, mine)]
            counts = torch.tensor([c for *_, c in mine], dtype=rows[0].dtype, device=rows[0].device)
            flat = torch.cat([*rows, counts])
            self._reduced(groups, flat, op)
            counts, at = flat[-len(mine) :], 0
            for k, (buffer, tensor, _) in enumerate(mine):
                row = flat[at : at + rows[k].numel()]
                at += rows[k].numel()
                if mean:  # without a change on any rank the value stays
                    row = torch.where(counts[k] > 0, row / counts[k].clamp(min=1), _row(tensor, mean=True))
                _fill(tensor, row)
                buffer.note()

    def _reduced(self, groups: list[Any], values: Tensor, op: Any) -> None:
        for group in groups:
            wait_for(all_reduce(group, values, op), self._timeout_s, "the exchange of buffers")


def _buffers_of(modules: Mapping[int, nn.Module]) -> list[_Buffer]:
    """All registered buffers, in the same order on all ranks."""
    return [
        _Buffer(k, f"{k}.{prefix}.{key}" if prefix else f"{k}.{key}", inner, key)
        for k, module in modules.items()
        for prefix, inner in module.named_modules()
        for key, value in inner._buffers.items()
        if value is not None
    ]


class _Late:
    """Warns of buffers that forwards of the first step created and later ones change (statistics, not tables)."""

    def __init__(self, modules: Mapping[int, nn.Module], known: set[str]):
        self._modules, self._known = modules, known
        self._found: list[_Buffer] = []
        self._steps = 0

    def seen_all(self) -> bool:
        """Inspect the buffers after a step, and warn of one that changes. Returns whether that was the last time."""
        self._steps += 1
        if self._steps == 1:
            self._found = [b for b in _buffers_of(self._modules) if b.name not in self._known]
            return not self._found
        moving = next((b for b in self._found if b.changed(look=True)), None)
        if moving is not None:
            warnings.warn(
                f"buffer {moving.name} was made by a forward and changes from forward to forward, and several ranks "
                "hold a copy of its layer: the copies stay apart, and each sees its own micro-batches only; give it a "
                "first value in __init__, and they are averaged",
                stacklevel=5,
            )
        return True


class _Buffer:
    """One buffer, looked up by its name, whichever tensor is registered there."""

    __slots__ = ("_copy", "_key", "_module", "_seen", "_version", "apart", "layer", "moves", "name")

    def __init__(self, layer: int, name: str, module: nn.Module, key: str):
        self.layer, self.name, self._module, self._key = layer, name, module, key
        self.moves = False
        """Whether any copy of it is known to change."""
        self.apart = False
        """Whether the copies have different forms."""
        self.note()

    def tensor(self) -> Tensor | None:
        now = self._module._buffers.get(self._key)
        return None if now is None else local(now)

    def on_device(self) -> bool:
        now = self.tensor()
        return now is not None and now.device.type != "cpu"

    def form(self) -> float:
        """A number for its shape and dtype: copies of different numbers cannot be averaged."""
        now = self.tensor()
        return 0.0 if now is None else float(zlib.crc32(f"{list(now.shape)} {now.dtype}".encode()))

    def note(self) -> None:
        """Record the present value as the one that all copies have."""
        self._seen, now = self._module._buffers.get(self._key), self.tensor()
        self._version = -1 if self._seen is None else self._seen._version
        self._copy = now.clone() if now is not None and now.nbytes <= SMALL_BYTES else None

    def changed(self, *, look: bool) -> bool:
        """Whether the buffer has changed since `note`. `look` also compares the values, for which the host waits for
        the device."""
        now = self._module._buffers.get(self._key)
        if now is not self._seen or (now is not None and now._version != self._version):
            return True
        values = self.tensor()
        return look and self._copy is not None and values is not None and not torch.equal(values, self._copy)


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _row(tensor: Tensor, *, mean: bool) -> Tensor:
    """The values as a flat tensor of a dtype that every backend can reduce."""
    if not mean:
        return tensor.reshape(-1).to(torch.int64)
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return values.reshape(-1).to(torch.float64)


def _fill(tensor: Tensor, row: Tensor) -> None:
    if tensor.is_complex():
        tensor.copy_(torch.view_as_complex(row.view(*tensor.shape, 2).contiguous()).to(tensor.dtype))
    else:
        tensor.copy_(row.view(tensor.shape))
