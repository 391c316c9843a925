"""The inputs of a step: the batch, the target and the side inputs, split into micro-batches for one rank.

Knows: which of them this rank's stages use, and the errors for invalid inputs. Does not know: how a step runs, or how a
value is split (`batches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan
from octopipe.runtime.arguments import takes_target
from octopipe.runtime.batches import rows_of, split_batch, weights
from octopipe.runtime.executor import Executor
from octopipe.runtime.ranks.world import World
from octopipe.runtime.values import flatten


class StepInputs:
    """Splits the inputs of one rank into micro-batches."""

    def __init__(self, plan: Plan, executor: Executor, side_inputs: Sequence[str]):
        self._count, self._executor, self._names = plan.num_micro_batches, executor, side_inputs

    def split(self, batch: Any, target: Any, *, with_loss: bool = True) -> tuple[list[Any] | None, list[Any] | None]:
        """Return the micro-batches of the batch and of the target, each None on ranks that do not use it."""
        mine = self._executor.program
        if with_loss and target is None and mine.needs_target and takes_target(self._executor.loss_fn):
            raise OctoPipeError(f"rank {mine.rank} holds a last stage, and loss_fn takes a target: give it the target")
        inputs = split_batch(batch, self._count, "batch") if mine.needs_batch else None
        targets = split_batch(target, self._count, "target") if mine.needs_target else None
        self._executor.target_was_split = self._count > 1 and not isinstance(target, list)
        if inputs is None and mine.needs_batch:
            raise OctoPipeError(f"rank {mine.rank} holds a first stage: give it the batch")
        return inputs, targets

    def shares(self, batch: Any, target: Any) -> list[float] | None:
        """Return the weights of the micro-batches' losses on this rank; None if all are equal."""
        rows = rows_of(target)
        return weights(rows_of(batch) if rows is None else rows, self._count)

    def split_side(self, side: Mapping[str, Any] | None) -> list[dict[str, Any]] | None:
        """Return the side inputs of every micro-batch by name; None if no layer of this rank takes one."""
        executor = self._executor
        needed = executor.side_needed()
        given = dict(side or {})
        for name in given:
            if name not in self._names:
                raise OctoPipeError(f"side input {name!r} is not known; name it in Pipeline(side_inputs=...)")
        missing = [name for name in needed if name not in given and name not in executor.side_optional()]
        if missing:
            raise OctoPipeError(
                f"rank {executor.program.rank} has layers that take {missing[0]!r}: give it step(side=...)"
            )
        given = {name: value for name, value in given.items() if name in needed}
        if not given:
            return None
        leaves: list[Any] = []
        flatten(tuple(given.values()), leaves)
        if any(isinstance(t, Tensor) and t.requires_grad for t in leaves):
            raise OctoPipeError("a side input takes a gradient, which it would not get; detach it or make it an output")
        parts = {name: split_batch(value, self._count, f"side input {name!r}") or [] for name, value in given.items()}
        return [{name: part[m] for name, part in parts.items()} for m in range(self._count)]

    def check_side(self, world: World) -> None:
        """Raise an error unless every name is an argument of some layer on some rank (collective over the pipeline)."""
        if self._names:
            taken = {name for names in world.gather(self._executor.side_needed()) for name in names}
            unknown = [name for name in self._names if name not in taken]
            if unknown:
                raise OctoPipeError(f"no layer has an argument {unknown[0]!r}; side_inputs are names of arguments")
