"""The executor of plans whose paths fork and join.

Knows: how a stage's inputs are combined at a join and its gradients are added at a fork, and that a shard of the head
computes a part of the loss. Does not know: how stages run (`stages/`), how tensors are transferred (`wire/`).

A stage after a join receives its inputs as one tuple, in the order of the path's edges, so a first layer whose forward
takes several arguments receives them one by one. Outputs of the shards of one layer are added instead. A stage without
predecessors takes the batch: all of it, or, if the batch is a dictionary and the first layer's forward names only some
of its keys, those.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import B, F, R, W
from octopipe.runtime.executor import Executor
from octopipe.runtime.graph_pairs import GraphPairs
from octopipe.runtime.graph_program import GraphCell, graph_program
from octopipe.runtime.paired_ops import PairedOps, StepArguments
from octopipe.runtime.path_losses import PathLosses
from octopipe.runtime.slots import RECEIVE, SEND, Step, rank_program
from octopipe.runtime.stages.chain import StageChain
from octopipe.runtime.stages.shards import CutLoss, JoinedShards, cut_loss
from octopipe.runtime.stages.stage import Loss, Stage
from octopipe.runtime.transfers import transfer
from octopipe.runtime.values import flatten
from octopipe.runtime.wire.messages import takes_gradient
from octopipe.simulation.lowering import Program


class GraphExecutor(Executor):
    """Runs a `graph_program`."""

    pairs_of: type[PairedOps] = GraphPairs

    def __init__(self, program: Any, layers: dict[int, nn.Module], loss_fn: Any, *args: Any, **options: Any):
        if options.get("cuda_graphs") is not None:
            raise OctoPipeError(
                "CUDA graphs replay stages that take one input and serve one consumer, and the plan's paths fork or "
                "join; leave cuda_graphs out"
            )
        if isinstance(loss_fn, PathLosses):
            loss_fn.check(program.plan)
        self._cut: dict[int, CutLoss] = {
            layer: cut_loss(loss_fn.of_layer(layer) if isinstance(loss_fn, PathLosses) else loss_fn)
            for layer in program.plan.cut_heads
        }
        self._picks: dict[int, Any] = {}
        super().__init__(program, layers, loss_fn, *args, **options)

    def _chain(self, number: int, layers: dict[int, nn.Module], *, first: bool, side: Sequence[str]) -> StageChain:
        stage = self.program.plan.stages[number]
        if stage.first == stage.stop:
            return StageChain([(Stage([JoinedShards()], first_layer=stage.first), False)])
        return super()._chain(number, layers, first=first, side=side)

    # -- what an op is given -------------------------------------------------------------------------------

    def inputs(self, cell: GraphCell, micro_batches: Sequence[Any] | None) -> tuple[Any, list[bool] | None]:
        """Return the input of F, and which of its leaves require a gradient (None: those that can)."""
        if cell.takes_batch:
            value, needs = self.own_input(cell, micro_batches)
            return self._picked(cell.stage, value), needs
        values, needed = [], []
        for port in cell.sources:
            if port.receive is None:
                producer = port.producer
                assert producer is not None
                value, need = producer.value, producer.needs
                self._taken(producer)
            else:
                value, port.input_message = self.transport.take_forward(port.receive)
                port.receive.ended = time.perf_counter()
                need = port.input_message.wanted
            values.append(value)
            needed.append(need)
        if len(values) == 1:
            cell.counts = []
            return values[0], needed[0]
        leaves = [_leaves(value) for value in values]
        cell.counts = [len(found) for found in leaves]
        wants = [
            [isinstance(t, Tensor) and takes_gradient(t) for t in found] if need is None else list(need)
            for found, need in zip(leaves, needed, strict=True)
        ]
        if not cell.adds:
            return tuple(values), [flag for row in wants for flag in row]
        if any(len(found) != 1 or not isinstance(found[0], Tensor) for found in leaves):
            raise OctoPipeError(
                f"stage {cell.stage} adds up the outputs of a layer's shards, which must be one tensor each"
            )
        total = leaves[0][0] + leaves[1][0]
        for found in leaves[2:]:
            total += found[0]
        return total, [any(row[0] for row in wants)]

    def _picked(self, stage: int, batch: Any) -> Any:
        """Return the entries of a dictionary that the first layer of the stage takes by name."""
        if not isinstance(batch, Mapping):
            return batch
        if stage not in self._picks:
            module = self.chains[stage].parts[0][0].modules[0]
            names = inspect.signature(getattr(module, "_orig_mod", module).forward).parameters
            open_ended = any(p.kind is p.VAR_KEYWORD for p in names.values())
            known = [name for name in names if name in batch]
            self._picks[stage] = None if open_ended or not known else known
        known = self._picks[stage]
        return batch if known is None else {name: batch[name] for name in known if name in batch}

    def _taken(self, producer: GraphCell) -> None:
        """Record that one of a cell's consumers has received its output."""
        now = [t._version for t in _leaves(producer.value) if isinstance(t, Tensor)]
        if producer.versions and now != producer.versions:
            raise OctoPipeError(
                f"a stage modified in place the tensor that it received from stage {producer.stage}, which other "
                "stages take, too; let its first layer work on a copy (`.clone()`)"
            )
        producer.left -= 1
        if producer.left == 0:
            producer.value = None

    def made(self, cell: GraphCell, out: Any, losses: dict[int, Tensor]) -> None:
        """Add a loss to that of its micro-batch; keep another output of F until all its consumers have received it."""
        if cell.computes_loss:
            before = losses.get(cell.micro_batch)
            losses[cell.micro_batch] = out if before is None else before + out
            return
        cell.value, cell.left = out, len(cell.consumers)
        several = cell.left > 1
        cell.versions = [t._version for t in _leaves(out) if isinstance(t, Tensor)] if several else []

    def then(self, cell: GraphCell, targets: Sequence[Any] | None) -> Any:
        """Return what follows a stage's layers inside its forward: the loss, or a shard's part of it; None if nothing
        does."""
        if not cell.is_shard and not cell.computes_loss:
            return None
        layer = self.program.plan.stages[cell.stage].stop - 1
        cut = self._cut.get(layer)
        if cut is not None and targets is None:
            raise OctoPipeError("a split head needs the target of every micro-batch: step(batch, target)")
        if cut is not None and targets is not None:
            part = self.chains[cell.stage].parts[-1][0]
            made = cut.of_tokens if cell.computes_loss else cut.partial(part.modules[layer - part.first_layer])
            return Loss(made, targets[cell.micro_batch])
        if isinstance(self.loss_fn, PathLosses):
            function = self.loss_fn.of_layer(layer)
            return function if targets is None else Loss(function, targets[cell.micro_batch])
        return self.loss(targets, cell.micro_batch)

    def gradients(self, cell: GraphCell, losses: Mapping[int, Tensor], scales: Sequence[float]) -> list[Any]:
        """Return the gradient of a cell's output, summed over its consumers."""
        if cell.computes_loss:
            return [self.seed_gradient(losses[cell.micro_batch], scales[cell.micro_batch])]
        found = []
        for port in cell.consumers:
            if port.gradient_slot is None:
                found.append(port.gradients)
                port.gradients = None
            else:
                found.append(self.transport.take_gradient(port.gradient_slot))
                port.gradient_slot.ended = time.perf_counter()
                port.output_message = None
        return found[0] if len(found) == 1 else [_added(row) for row in zip(*found, strict=True)]

    def hand_back(self, cell: GraphCell, gradients: list[Any], micro_batches: Sequence[Any] | None) -> None:
        """Send the gradient of every input back along the edge on which the input arrived."""
        if cell.takes_batch:
            if gradients and micro_batches is not None:
                batch = self._picked(cell.stage, micro_batches[cell.micro_batch])
                self.outside.keep(batch, gradients)
        elif not cell.counts:
            cell.sources[0].gradients = gradients
        elif cell.adds:
            for port in cell.sources:
                port.gradients = gradients
        else:
            at = 0
            for port, count in zip(cell.sources, cell.counts, strict=True):
                port.gradients = gradients[at : at + count]
                at += count

    # -- a step --------------------------------------------------------------------------------------------

    def _walk(
        self,
        micro_batches: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        scales: Sequence[float],
        losses: dict[int, Tensor],
        sides: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        transport, ops, recorder = self.transport, self.ops, self.recorder
        started, ended, clock, mark = recorder.started, recorder.ended, time.perf_counter, recorder.mark
        for ins in self.program.steps:
            if ins.is_second:
                continue
            self.at = ins
            if ins.beside is not None:
                self.pairs.run(ins, ins.beside, StepArguments(micro_batches, targets, scales, losses, sides))
                continue
            code, cell, k = ins.code, cast(GraphCell, ins.cell), ins.number
            if code in (SEND, RECEIVE):
                transfer(ins, transport, self._output)
                continue
            value = needs = None
            given: Any = None
            if ops.host is not None and ops.host.leaving:
                ops.host.depart(transport.sent())
            if ins.moves is not None:
                ops.move(ins.moves, self._device)
            if code == F:
                value, needs = self.inputs(cell, micro_batches)
                given = self.then(cell, targets)
            elif code not in (R, W):
                given = self.gradients(cell, losses, scales)
            if ins.moves is not None:
                ops.fetch(ins.moves.fetch_with_op, self._device)
            for sent in ins.release:
                transport.release(sent)
            started[k] = clock()
            if mark is not None:
                mark(k, 0)
            out: Any = None
            if code == F:
                seed = self.micro_batch_seeds[cell.micro_batch]
                side = None if sides is None else sides[cell.micro_batch]
                cell.runs, out, cell.needs = ops.forward(cell, value, needs, given, seed, side)
            elif code == R:
                ops.recompute(cell)
            elif code == W:
                ops.weight(cell)
            else:
                out = ops.backward(cell, given, fused=code == B)
            if mark is not None:
                mark(k, 1)
            ended[k] = clock()
            del value, given
            if code == F:
                self.made(cell, out, losses)
            elif code not in (R, W):
                self.hand_back(cell, out, micro_batches)
            del out
            if ins.layers_done and self.layers_done is not None:
                self.layers_done(ins.layers_done)
            elif self.between_ops is not None:
                self.between_ops()

    def _output(self, port: Any) -> tuple[Any, Any]:
        """Return the value that is sent along an edge. The stage keeps its output until it has been sent along every
        edge."""
        producer = port.producer
        value = producer.value
        self._taken(producer)
        return value, producer.needs

    def evaluate(
        self,
        micro_batches: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        *,
        step: int,
        side: Sequence[Mapping[str, Any]] | None = None,
        loss: bool = True,
    ) -> dict[int, Any]:
        if not loss and self._cut:
            raise OctoPipeError(
                "the head is split, so no rank has complete logits; use a plan with an unsplit head for them"
            )
        return super().evaluate(micro_batches, targets, step=step, side=side, loss=loss)

    def _evaluate_op(
        self, ins: Step, micro_batches: Sequence[Any] | None, targets: Sequence[Any] | None,
        side: Mapping[str, Any] | None, losses: dict[int, Any], *, with_loss: bool,
    ) -> None:  # fmt: skip
        cell = cast(GraphCell, ins.cell)
        value, needs = self.inputs(cell, micro_batches)
        then = self.then(cell, targets) if with_loss else (_same if cell.computes_loss else None)
        seed = self.micro_batch_seeds[cell.micro_batch]
        with (self._autocast or nullcontext)():
            _, out, cell.needs = self.chains[cell.stage].forward(
                value, needs, then, seed, again=False, keep=False, side=side
            )
        if cell.computes_loss and not with_loss:
            losses[cell.micro_batch] = out
        else:
            self.made(cell, out, losses)

    def _transfer_output(self, ins: Step, sent: list[Any]) -> None:
        slot, producer = ins.slot, cast(Any, ins.cell).producer
        assert slot is not None
        if ins.code == RECEIVE:
            self.transport.post(slot)
        else:
            self.transport.send_forward(slot, producer.value, producer.needs)
            self._taken(producer)
            sent.append(slot)


def make_executor(program: Program, rank: int, *args: Any, **options: Any) -> Executor:
    """Return the executor that a plan needs."""
    if program.plan.forks:
        return GraphExecutor(graph_program(program, rank), *args, **options)
    return Executor(rank_program(program, rank), *args, **options)


def _same(value: Any) -> Any:
    return value


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [value]
    found: list[Any] = []
    flatten(value, found)
    return found


def _added(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the gradients in the order of the edges, or None if there are none; the gradients are not
    modified."""
    there = [g for g in gradients if g is not None]
    if len(there) < 2:
        return there[0] if there else None
    total = there[0] + there[1]
    for g in there[2:]:
        total += g
    return total
