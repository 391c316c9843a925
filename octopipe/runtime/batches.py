"""Splitting a batch into micro-batches, and joining outputs.

Knows: any container that `values` supports; rows that do not divide evenly. Does not know: plans, ranks or losses.

`rows` rows become `count` micro-batches of rows // count rows or one more. If there are fewer rows than micro-batches,
the empty ones get a copy of the first row with weight 0: they run but do not contribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.values import ATOMS, build, flatten


def sizes(rows: int, count: int) -> list[int]:
    """Rows of each micro-batch.

    >>> sizes(7, 3), sizes(2, 3)
    ([3, 2, 2], [1, 1, 0])
    """
    return [rows // count + (m < rows % count) for m in range(count)]


def weights(rows: int | None, count: int) -> list[float] | None:
    """Return the weights of the micro-batches' losses with which their sum divided by `count` is the mean over rows;
    None if all weights are 1."""
    if not rows or rows % count == 0:
        return None
    return [count * size / rows for size in sizes(rows, count)]


def rows_of(batch: Any) -> int | None:
    """Return the number of rows of a batch that has not been split yet; None for a list of micro-batches or a batch
    without tensors."""
    if batch is None or isinstance(batch, list):
        return None
    leaves: list[Any] = []
    flatten(batch, leaves)
    return next((t.shape[0] for t in leaves if (isinstance(t, Tensor) or _is_array(t)) and t.ndim), None)


def split_batch(batch: Any, count: int, name: str) -> list[Any] | None:
    """A batch as a list of micro-batches; a list is one already.

    >>> [t.tolist() for t in split_batch(torch.arange(5), 2, "batch")]
    [[0, 1, 2], [3, 4]]
    """
    if batch is None:
        return None
    if isinstance(batch, list):
        if len(batch) != count:
            raise OctoPipeError(
                f"{name} is a list of {len(batch)} micro-batches, and the plan has {count}; make them equal"
            )
        return [_usable(part) for part in batch]
    if isinstance(batch, Tensor):
        return _cut(batch, count, name)
    leaves: list[Any] = []
    form = flatten(batch, leaves)
    whole = {t.shape[0] for t in leaves if (isinstance(t, Tensor) or _is_array(t)) and t.ndim}
    if len(whole) > 1 and any(rows % count for rows in whole):
        raise OctoPipeError(
            f"{name} holds tensors of {' and '.join(map(str, sorted(whole)))} rows, which do not split into {count} "
            "micro-batches in the same way; give a list of micro-batches"
        )
    if isinstance(batch, PackedSequence):
        raise OctoPipeError(f"{name} is a PackedSequence, whose rows are not samples; give a list of micro-batches")
    columns = [_cut(leaf, count, name) for leaf in leaves]
    return [build(form, iter([column[m] for column in columns])) for m in range(count)]


def _cut(leaf: Any, count: int, name: str) -> list[Any]:
    """Return the part of one leaf that belongs to each micro-batch."""
    if type(leaf) in ATOMS:
        return [leaf] * count
    if not isinstance(leaf, Tensor) and not _is_array(leaf):
        raise OctoPipeError(
            f"{name} holds a {type(leaf).__name__}, which cannot be split into micro-batches; "
            "give tensors, tuples, dicts or dataclasses of them, or a list of micro-batches"
        )
    if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
        raise OctoPipeError(
            f"{name} holds a tensor of layout {str(leaf.layout)[6:]}, which does not split; "
            "give a list of micro-batches"
        )
    if leaf.ndim == 0:
        raise OctoPipeError(f"{name} holds a tensor without rows, which does not split; give a list of micro-batches")
    if isinstance(leaf, Tensor) and leaf.is_inference():
        leaf = leaf.clone()  # autograd could not save it
    parts, at = [], 0
    for size in sizes(leaf.shape[0], count):
        parts.append(leaf[at : at + size] if size or not leaf.shape[0] else leaf[:1])
        at += size
    return parts


def _is_array(leaf: Any) -> bool:
    return type(leaf).__module__ == "numpy" and getattr(leaf, "ndim", 0) > 0


def _usable(part: Any) -> Any:
    """Return the micro-batch with tensors created in inference mode replaced by ordinary copies."""
    leaves: list[Any] = []
    form = flatten(part, leaves)
    if any(isinstance(t, Tensor) and t.is_inference() for t in leaves):
        return build(form, iter([t.clone() if isinstance(t, Tensor) and t.is_inference() else t for t in leaves]))
    return part


def join(outputs: Sequence[Any]) -> Any:
    """Outputs of micro-batches as one: tensors row by row, scalars stacked, constants those of the first.

    >>> join([(torch.ones(2), 3), (torch.zeros(1), 3)])
    (tensor([1., 1., 0.]), 3)
    """
    flat: list[list[Any]] = []
    form: Any = None
    for value in outputs:
        flat.append([])
        form = flatten(value, flat[-1])
    if len({len(leaves) for leaves in flat}) != 1:
        raise OctoPipeError("outputs of micro-batches have different forms; give the batch as a list to get a list")
    joined = []
    for column in zip(*flat):
        if not isinstance(column[0], Tensor):
            joined.append(column[0])
        else:
            joined.append(torch.cat(column) if column[0].ndim else torch.stack(column))
    return build(form, iter(joined))


def to_device(value: Any, device: torch.device) -> Any:
    """Return the value with all its tensors on this device."""
    leaves: list[Any] = []
    form = flatten(value, leaves)
    return build(form, iter([t.to(device) if isinstance(t, Tensor) else t for t in leaves]))
