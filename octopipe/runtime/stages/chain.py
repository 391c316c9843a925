"""A stage as the executor runs it: groups of layers with or without recomputation, and ops over all of them.

Knows: how one op of a stage becomes calls of its groups, in the right order. Does not know: which micro-batch it is
for, where tensors come from, or whether an op is replayed from a CUDA graph (`cuda_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from octopipe.plans.plan import Plan
from octopipe.runtime.slots import Cell, Moves
from octopipe.runtime.stages.offload import HostStore, Parcel
from octopipe.runtime.stages.run import StageRun
from octopipe.runtime.stages.stage import Stage
from octopipe.runtime.stages.weight_queue import Between

Autocast = Callable[[], AbstractContextManager[Any]] | None
Forward = tuple[Any, Any, list[bool] | None]
"""What F keeps for the other ops, its output, and for each leaf whether it takes a gradient (None: not known)."""


class StageChain:
    """The parts of one stage: usually one, several if only some of its layers are recomputed."""

    def __init__(self, parts: Sequence[tuple[Stage, bool]]):
        self.parts = list(parts)
        """Each part, and whether it is recomputed."""

    @classmethod
    def of_plan(
        cls, plan: Plan, number: int, layers: dict[int, nn.Module], *, first: bool, side_inputs: Sequence[str] = ()
    ) -> StageChain:
        stage = plan.stages[number]
        again = set(stage.recomputed_layers)
        parts: list[tuple[Stage, bool]] = []
        start = stage.first
        for layer in range(stage.first + 1, stage.stop + 1):
            if layer == stage.stop or (layer in again) != (start in again):
                modules = [layers[k] for k in range(start, layer)]
                wants = not (first and start == stage.first)
                parts.append((Stage(modules, input_grad=wants, first_layer=start, side=side_inputs), start in again))
                start = layer
        return cls(parts)

    def forward(
        self,
        value: Any,
        needs: Sequence[bool] | None,
        then: Callable[[Any], Any] | None,
        seed: int | None,
        *,
        again: bool,
        keep: bool = True,
        side: Mapping[str, Any] | None = None,
        parcel: Parcel | None = None,
    ) -> tuple[list[StageRun], Any, list[bool] | None]:
        """F: the runs, the output and, for each leaf, whether it takes a gradient (None: not known yet).

        `again`: R will follow for the parts that recompute. Without `keep` there will be no backward. `parcel`: saved
        tensors go to host memory (such a stage has one part).
        """
        runs = []
        last = self.parts[-1][0]
        for stage, recompute in self.parts:
            repeat = keep and recompute and again
            end = then if stage is last else None
            run = StageRun(stage, value, end, seed, needs, keep and not repeat, again=repeat, side=side, parcel=parcel)
            value, needs = run.outputs, run.outputs_need_grad or None
            run.outputs = None
            runs.append(run)
        return runs, value, needs  # type: ignore[return-value]

    def recompute(self, runs: list[StageRun]) -> None:
        """R: run the forward again for the parts that are recomputed."""
        for run, (_, recompute) in zip(runs, self.parts):
            if recompute:
                run.recompute()

    @staticmethod
    def backward(runs: list[StageRun], gradients: list[Any], *, fused: bool) -> list[Any]:
        """I, or B if `fused`; returns the gradients of the stage's inputs. B empties `runs`."""
        if fused:
            while runs:
                gradients = runs.pop().backward_full(gradients)
        else:
            for run in reversed(runs):
                gradients = run.backward_input(gradients)
        return gradients

    @staticmethod
    def weight(runs: list[StageRun], between: Between = None) -> None:
        """W; empties `runs`."""
        while runs:
            runs.pop().backward_weight(between)

    def end_step(self) -> None:
        for stage, _ in self.parts:
            stage.end_step()


class Ops:
    """Runs ops eagerly, one by one."""

    warm_up_steps = 1
    """Number of initial steps whose times are not representative of later ones."""
    peak_bytes = 0
    """Maximum memory of steps that torch's allocator statistics do not include."""
    captured = 0
    """Ops that are replayed from graphs."""

    def __init__(self, chains: dict[int, StageChain], autocast: Autocast, host: HostStore | None = None):
        self.chains, self._autocast, self.host = chains, autocast, host

    def on_device(self) -> AbstractContextManager[Any]:
        """The context in which a training step runs."""
        return nullcontext()

    def begin_step(self) -> None:
        """Called at the start of a training step, when `.grad` has its initial value."""

    def end_step(self, *, whole: bool) -> None:
        """Called when a step has been issued, completely (`whole`) or interrupted."""

    def close(self) -> None:
        """Called after the last step."""

    def forward(
        self,
        cell: Cell,
        value: Any,
        needs: Sequence[bool] | None,
        then: Callable[[Any], Any] | None,
        seed: int | None,
        side: Mapping[str, Any] | None,
    ) -> Forward:
        forward, again = self.chains[cell.stage].forward, cell.recomputes
        if cell.offloads:
            return self._offloading(cell, value, needs, then, seed, side)
        if self._autocast is None:
            return forward(value, needs, then, seed, again=again, side=side)
        with self._autocast():
            return forward(value, needs, then, seed, again=again, side=side)

    def _offloading(
        self,
        cell: Cell,
        value: Any,
        needs: Sequence[bool] | None,
        then: Callable[[Any], Any] | None,
        seed: int | None,
        side: Mapping[str, Any] | None,
    ) -> Forward:
        """F of a stage whose activations are copied to host memory once its output has been sent."""
        assert self.host is not None
        cell.parcel = self.host.parcel()
        with self._autocast() if self._autocast is not None else nullcontext():
            made = self.chains[cell.stage].forward(value, needs, then, seed, again=False, side=side, parcel=cell.parcel)
        self.host.leaving.append(cell.parcel)
        return made

    def move(self, moves: Moves, device: Any) -> None:
        """Release activations on the device and start to fetch others, before waiting for the input of an op."""
        assert self.host is not None
        for cell in moves.release:
            if cell.parcel is not None:
                self.host.release(cell.parcel)
        self.fetch(moves.fetch, device)

    def fetch(self, cells: Sequence[Cell], device: Any) -> None:
        """Start to copy the activations of these cells back."""
        for cell in cells:
            if cell.parcel is not None and self.host is not None:
                self.host.fetch(cell.parcel, device)

    def recompute(self, cell: Cell) -> None:
        if self._autocast is None:
            self.chains[cell.stage].recompute(cell.runs)
        else:
            with self._autocast():
                self.chains[cell.stage].recompute(cell.runs)

    def backward(self, cell: Cell, gradients: list[Any], *, fused: bool) -> list[Any]:
        runs = cell.runs
        if cell.parcel is not None and self.host is not None:
            self.host.ready(cell.parcel)
            cell.parcel = None
        if fused:
            cell.runs = None
        return StageChain.backward(runs, gradients, fused=fused)

    def weight(self, cell: Cell, between: Between = None) -> None:
        """W; `between` is called after each weight product if they are issued one by one (not from a graph)."""
        runs, cell.runs = cell.runs, None
        StageChain.weight(runs, between)

    def weight_so_far(self, cell: Cell) -> None:
        """Compute the weight products that the I in progress has deferred so far."""
        for run in cell.runs if isinstance(cell.runs, list) else ():
            run.weight_so_far()

    def weight_work(self, cell: Cell) -> int:
        """The number of multiplications that W would compute now; 0 if W is one graph."""
        return sum(run.weight_work() for run in cell.runs) if isinstance(cell.runs, list) else 0
