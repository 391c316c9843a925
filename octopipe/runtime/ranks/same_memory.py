"""Refuses weights that layers on different ranks share as memory, but not as one parameter.

Knows: which tensors of the given layers lie in the same memory. Does not know: ties of one object (`layers.py`), or
values that forwards read from elsewhere.

`head.weight.data = embedding.weight.data` and `register_buffer("table", embedding.weight.detach())` make two tensors
of one memory: in one process an update of the one is an update of the other. Every rank has its own memory, so there
they would silently diverge. Layers on the same ranks share the memory there, too, and are accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class _Held(NamedTuple):
    name: str
    tensor: Tensor
    ranks: frozenset[int]


def refuse_shared_memory(layers: Sequence[Any], ranks_of: Mapping[int, set[int]], tied: Mapping[str, str]) -> None:
    """Raise if a trainable parameter shares memory with another tensor of a layer that other ranks hold. `tied`: first
    names of ties, by name."""
    by_memory: dict[int, dict[int, _Held]] = {}
    for k, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            for name, tensor in _tensors(layer):
                held = _Held(f"{k}.{name}", tensor, frozenset(ranks_of[k]))
                if address := tensor.untyped_storage().data_ptr():
                    by_memory.setdefault(address, {}).setdefault(id(tensor), held)
    for memory in by_memory.values():
        for one, other in _overlapping(list(memory.values())):
            if tied.get(one.name, one.name) == tied.get(other.name, other.name):
                continue
            if one.ranks != other.ranks and (one.tensor.requires_grad or other.tensor.requires_grad):
                both = isinstance(one.tensor, nn.Parameter) and isinstance(other.tensor, nn.Parameter)
                remedy = f"tied=[({one.name!r}, {other.name!r})]" if both else "give it a copy"
                raise OctoPipeError(
                    f"{one.name} and {other.name} are two tensors that share memory, and their layers are on different "
                    "ranks, where each would have its own: an update of the one would not reach the other; make them "
                    f"one Parameter, or {remedy}"
                )


def _tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            yield name, tensor


def _overlapping(held: list[_Held]) -> Iterator[tuple[_Held, _Held]]:
    """Pairs of tensors of one storage that have an element in common. One storage may contain thousands of tensors
    (flat buffers of optimizers), so only tensors with overlapping ranges are compared."""
    ordered = sorted(held, key=lambda h: _reach(h.tensor)[0])
    for n, one in enumerate(ordered):
        end = _reach(one.tensor)[1]
        for other in itertools.islice(ordered, n + 1, None):
            if _reach(other.tensor)[0] >= end:
                break
            if _overlap(one.tensor, other.tensor):
                yield one, other


def _reach(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    size, begin = tensor.dtype.itemsize, int(tensor.storage_offset())
    last = begin + sum((n - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (last + 1) * size


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors with overlapping ranges have an element in common (columns of a fused weight have none)."""
    if one.dtype.itemsize != other.dtype.itemsize:
        return True
    size = one.dtype.itemsize
    begin = min(_reach(one)[0], _reach(other)[0]) // size
    taken = torch.zeros(max(_reach(one)[1], _reach(other)[1]) // size - begin, dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - begin).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - begin).any())
