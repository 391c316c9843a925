"""The executor: runs one rank's program, instruction by instruction, in the order given by lowering.

Knows: which method of a stage implements an op, where an op's input comes from and where its result goes, and when
tensors are released. Does not know: the meaning of plans, transports of devices, optimizers.

Gradients are those of the mean of `loss_fn` over micro-batches: the backward of every micro-batch starts from 1/M
(times `loss_scale`), and nothing is rescaled afterwards. Gradients accumulate in the order in which the plan runs W
(or B, and I for everything that is not a weight product). Two plans that run these ops in the same micro-batch order
therefore give bitwise equal results, whatever their partition and placement; other orders differ by rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import B, F, Plan, R, W
from octopipe.runtime.arguments import check_loss
from octopipe.runtime.batch_gradients import Outside, wants_gradient
from octopipe.runtime.failures import note_op
from octopipe.runtime.fp8 import scaled_linears
from octopipe.runtime.measured import Recorder
from octopipe.runtime.paired_ops import PairedOps, StepArguments
from octopipe.runtime.ranks.pending_board import FAILED, PATIENCE_S, Board, Place
from octopipe.runtime.slots import RECEIVE, SEND, Cell, RankProgram, Step
from octopipe.runtime.stages.calling import Loss, SplitLoss
from octopipe.runtime.stages.chain import Ops, StageChain
from octopipe.runtime.stages.cuda_graphs import GraphedOps
from octopipe.runtime.stages.offload import HostStore
from octopipe.runtime.stages.rng import rng_kept, step_seed, within_step
from octopipe.runtime.transfers import transfer
from octopipe.runtime.wire.telling import PeerError, peer_words
from octopipe.runtime.wire.transports.base import TransferError, Transport

PENDING = "pending ops: "
"""Precedes the lines of all ranks in an error message."""


class Executor:
    """Runs a `RankProgram`. Cells and slots are kept and reused across steps."""

    pairs_of: type[PairedOps] = PairedOps
    """The class that runs the pairs of a program."""

    def __init__(
        self,
        program: RankProgram,
        layers: dict[int, nn.Module],
        loss_fn: Callable[..., Tensor],
        transport: Transport,
        *,
        board: Board,
        recorder: Recorder,
        seed: int | None,
        replica: int,
        autocast: Callable[[], AbstractContextManager[Any]] | None,
        timeout_s: float,
        layers_done: Callable[[tuple[int, ...]], None] | None = None,
        between_ops: Callable[[], None] | None = None,
        side_inputs: Sequence[str] = (),
        cuda_graphs: torch.device | None = None,
    ):
        """`layers_done`: called with the layers whose gradients are complete. `between_ops`: called after all other
        ops, for reductions that advance only while the host attends to them. `cuda_graphs`: the GPU on which ops are
        captured and replayed; None: ops run eagerly."""
        self.program, self.transport, self.board, self.recorder = program, transport, board, recorder
        self.loss_fn, self._seed, self._replica, self._autocast = loss_fn, seed, replica, autocast
        self.timeout_s, self.layers_done, self.between_ops = timeout_s, layers_done, between_ops
        plan = program.plan
        firsts = first_stages(plan)
        mine = sorted({cell.stage for cell in program.cells} | set(plan.stages_of_rank(program.rank)))
        self.chains = {s: self._chain(s, layers, first=s in firsts, side=side_inputs) for s in mine}
        self._scaled = list(scaled_linears(m for c in self.chains.values() for s, _ in c.parts for m in s.modules))
        moves = any(step.moves is not None for step in program.steps)
        if moves and cuda_graphs is not None:
            raise OctoPipeError("CUDA graphs do not support plans that offload activations; leave cuda_graphs out")
        self._device = recorder.device
        host = HostStore(self._device) if moves else None
        if cuda_graphs is not None:
            paired = {op.stage for pair in plan.pairs for op in pair} & self.chains.keys()
            self.ops: Ops = GraphedOps(self.chains, autocast, cuda_graphs, paired)
        else:
            self.ops = Ops(self.chains, autocast, host)
        self.at: Step | None = None
        """The current instruction."""
        self.steps_run = 0
        self.target_was_split = False
        """Whether the targets of the step are rows of one target, rather than a list of the user's own."""
        self.outside = Outside()
        self.begun = 0
        """Number of steps and evaluations started, completed or not."""
        self.pairs = self.pairs_of(self)
        self._seeds: dict[Any, Tensor] = {}
        self.micro_batch_seeds: list[int | None] = [None] * plan.num_micro_batches
        transport.open(program)

    def _chain(self, number: int, layers: dict[int, nn.Module], *, first: bool, side: Sequence[str]) -> StageChain:
        return StageChain.of_plan(self.program.plan, number, layers, first=first, side_inputs=side)

    def run(
        self,
        micro_batches: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        *,
        step: int,
        loss_scale: float = 1.0,
        side: Sequence[Mapping[str, Any]] | None = None,
        weights: Sequence[float] | None = None,
    ) -> dict[int, Tensor]:
        """Run one training step: add gradients into `.grad`, return the losses of micro-batches that end on this rank.

        `side`: side inputs by micro-batch; `weights`: the weight of each micro-batch's loss (default 1).
        """
        losses: dict[int, Tensor] = {}
        self._begin(step)
        with self._reporting(), self.ops.on_device(), nullcontext() if self._seed is None else rng_kept():
            for linear in self._scaled:
                linear.follow()  # before the ops: CUDA graphs read the copies but do not update them
            self.ops.begin_step()
            self.transport.begin_step()
            self.recorder.begin_step()
            count = self.program.plan.num_micro_batches
            scales = [loss_scale / count * w for w in weights or [1.0] * count]
            self._walk(micro_batches, targets, scales, losses, side)
            self.outside.backward()
            for slot in self.program.last_releases:
                self.transport.release(slot)
            self.transport.end_step()
            self.recorder.end_step()
            self.ops.end_step(whole=True)
        self.steps_run += 1
        return losses

    def side_needed(self) -> tuple[str, ...]:
        """Return the side inputs that layers of this rank take."""
        return tuple(dict.fromkeys(n for chain in self.chains.values() for stage, _ in chain.parts for n in stage.side))

    def side_optional(self) -> set[str]:
        """Return the side inputs for which every layer of this rank has a default."""
        required = {n for chain in self.chains.values() for stage, _ in chain.parts for n in stage.side_required}
        return set(self.side_needed()) - required

    def evaluate(
        self,
        micro_batches: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        *,
        step: int,
        side: Sequence[Mapping[str, Any]] | None = None,
        loss: bool = True,
    ) -> dict[int, Any]:
        """Run only the forwards, in order; return losses (or outputs) of micro-batches that end on this rank."""
        losses: dict[int, Any] = {}
        sent: list[Any] = []
        self._begin(step)
        with self._reporting(), nullcontext() if self._seed is None else rng_kept():
            self.transport.begin_step()
            for ins in self.program.steps:
                self.at = ins
                if ins.code in (SEND, RECEIVE):
                    if ins.slot is not None and ins.slot.forward:
                        self._transfer_output(ins, sent)
                elif ins.code == F:
                    given = None if side is None else side[ins.cell.micro_batch]
                    self._evaluate_op(ins, micro_batches, targets, given, losses, with_loss=loss)
            for slot in sent:
                self.transport.release(slot)
            self.transport.end_step()
            for cell in self.program.cells:
                cell.clear()
        return losses

    def _transfer_output(self, ins: Step, sent: list[Any]) -> None:
        """Post the receive of a stage's output, or send one; slots to be released at the end are appended to `sent`."""
        slot, cell = ins.slot, ins.cell
        assert slot is not None
        if ins.code == RECEIVE:
            self.transport.post(slot)
            return
        self.transport.send_forward(slot, cell.value, cell.needs)
        cell.value = None
        sent.append(slot)

    def _evaluate_op(
        self, ins: Step, micro_batches: Sequence[Any] | None, targets: Sequence[Any] | None,
        side: Mapping[str, Any] | None, losses: dict[int, Any], *, with_loss: bool,
    ) -> None:  # fmt: skip
        """Run one forward of `evaluate`; the loss (or output) of a micro-batch that ends here is stored in `losses`."""
        cell = ins.cell
        if ins.slot is None:
            value, needs = self.own_input(cell, micro_batches)
        else:
            value, spec = self.transport.take_forward(ins.slot)
            needs = spec.wanted
        then = None
        if cell.computes_loss:
            then = self.loss(targets, cell.micro_batch) if with_loss else _output
        seed = self.micro_batch_seeds[cell.micro_batch]
        with (self._autocast or nullcontext)():
            _, out, _ = self.chains[cell.stage].forward(value, needs, then, seed, again=False, keep=False, side=side)
        if cell.computes_loss:
            if with_loss:
                check_loss(out)
            losses[cell.micro_batch] = out
        else:
            cell.value = out

    def own_input(self, cell: Cell, micro_batches: Sequence[Any] | None) -> tuple[Any, list[bool] | None]:
        """Return the input of an F that does not come from another rank, and which of its leaves require a gradient."""
        if cell.before is not None:
            before = cell.before
            value, before.value = before.value, None
            return value, before.needs
        assert micro_batches is not None
        value = micro_batches[cell.micro_batch]
        return value, wants_gradient(value)

    def _begin(self, step: int) -> None:
        self.begun += 1
        self.outside.clear()
        if self._seed is not None:
            # All at once: computed one by one between waits, each would find its code evicted from the CPU's caches.
            common = step_seed(self._seed, step, self._replica)
            self.micro_batch_seeds = [within_step(common, m) for m in range(self.program.plan.num_micro_batches)]

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turn errors into reports, and discard everything of an interrupted step."""
        try:
            yield
        except TransferError as error:
            self._give_up()
            raise PeerError(self._hang_report(error)) from None
        except PeerError as error:  # another rank's failure must not be reported as this rank's
            self.board.write(f"{self._place()}: {' '.join(str(error).split())[:200]}", last=True)
            self._give_up()
            raise
        except BaseException as error:
            if (lost := peer_words(error, self.timeout_s)) is not None:  # in a layer's own communication, say
                self._give_up()
                raise PeerError(self._lost_report(lost)) from error
            why = " ".join(str(error).split())[:200] or type(error).__name__
            note_op(error, self.program, self.at)
            self.board.write(f"{FAILED} in {self._place()}: {why}", last=True)
            self._give_up()
            raise
        finally:
            self.at = None
            for chain in self.chains.values():
                chain.end_step()

    def _walk(
        self,
        micro_batches: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        scales: Sequence[float],
        losses: dict[int, Tensor],
        sides: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        transport, ops, recorder = self.transport, self.ops, self.recorder
        take_forward, release = transport.take_forward, transport.release
        started, ended, clock = recorder.started, recorder.ended, time.perf_counter
        mark, seeds, host = recorder.mark, self.micro_batch_seeds, ops.host
        for ins in self.program.steps:
            if ins.is_second:
                continue
            self.at = ins
            code, cell, slot = ins.code, ins.cell, ins.slot
            if ins.beside is not None:
                self.pairs.run(ins, ins.beside, StepArguments(micro_batches, targets, scales, losses, sides))
                continue
            if code >= SEND:
                transfer(ins, transport)
                continue
            k = ins.number
            if host is not None and host.leaving:
                host.depart(transport.sent())
            if ins.moves is not None:
                ops.move(ins.moves, self._device)
            value: Any = None
            given: Any = None
            if code == F:
                if slot is None:
                    value, given = self.own_input(cell, micro_batches)
                else:
                    value, cell.input_message = take_forward(slot)
                    slot.ended = clock()
                    given = cell.input_message.wanted
            elif code != R and code != W:
                given = self.gradients_for(cell, slot, losses, scales)
            if ins.moves is not None:
                ops.fetch(ins.moves.fetch_with_op, self._device)
            for sent in ins.release:
                release(sent)
            then = self.loss(targets, cell.micro_batch) if code == F and cell.computes_loss else None
            started[k] = clock()
            if mark is not None:
                mark(k, 0)
            if code == F:
                side = None if sides is None else sides[cell.micro_batch]
                cell.runs, value, cell.needs = ops.forward(cell, value, given, then, seeds[cell.micro_batch], side)
            elif code == R:
                ops.recompute(cell)
            elif code == W:
                ops.weight(cell)
            else:
                value = ops.backward(cell, given, fused=code == B)
            if mark is not None:
                mark(k, 1)
            ended[k] = clock()
            del given
            if code == F and cell.computes_loss:
                losses[cell.micro_batch] = value
            elif code == F:
                cell.value = value
            elif code != R and code != W:
                if not cell.takes_batch:
                    cell.gradients = value
                elif value and micro_batches is not None:
                    self.outside.keep(micro_batches[cell.micro_batch], value)
            del value
            if ins.layers_done and self.layers_done is not None:
                self.layers_done(ins.layers_done)
            elif self.between_ops is not None:
                self.between_ops()

    def gradients_for(self, cell: Cell, slot: Any, losses: dict[int, Tensor], scales: Sequence[float]) -> list[Any]:
        """Return the gradients that a cell's backward starts from: the next stage's, or that of the loss itself."""
        if slot is not None:
            gradients = self.transport.take_gradient(slot)
            slot.ended = time.perf_counter()
            cell.output_message = None
        elif cell.after is not None:
            gradients, cell.after.gradients = cell.after.gradients, None
        else:
            gradients = [self.seed_gradient(losses[cell.micro_batch], scales[cell.micro_batch])]
        return gradients

    def loss(self, targets: Sequence[Any] | None, micro_batch: int) -> Callable[[Any], Tensor]:
        loss_fn = self.loss_fn
        if targets is None:
            return loss_fn
        return (SplitLoss if self.target_was_split else Loss)(loss_fn, targets[micro_batch])

    def seed_gradient(self, loss: Tensor, scale: float) -> Tensor:
        """Return the gradient with which a micro-batch's backward starts. It is created once, because nothing writes to
        it."""
        check_loss(loss if isinstance(loss, Tensor) else None)  # a number has no gradient
        key = (scale, loss.dtype, loss.shape, loss.device)
        seed = self._seeds.get(key)
        if seed is None:
            if len(self._seeds) > 64:  # the loss scale keeps changing
                self._seeds.clear()
            seed = self._seeds[key] = torch.full_like(loss, scale)
        return seed

    # -- when it breaks --------------------------------------------------------------------------------

    def _give_up(self) -> None:
        self.ops.end_step(whole=False)
        if self.ops.host is not None:
            self.ops.host.give_up()
        for cell in self.program.cells:
            cell.clear()
        for slot in self.program.slots:
            slot.deferred = slot.posted = False

    def _place(self) -> str:
        at = self.at
        if at is None:
            return "nothing"
        if at.code in (SEND, RECEIVE) and at.slot is not None:
            return f"{'send' if at.code == SEND else 'receive'} of the {at.slot.describe()}"
        return str(at.op)

    def pending(self) -> Place:
        """Return the executor's current position, with the line for the board while it waits.

        On a GPU the host runs far ahead, so this is the position of the device, not of the host.
        """
        slot, at = self.transport.waiting, self.at
        if slot is not None:
            return Place((self.steps_run, id(at)), f"waits for the {slot.describe()}")
        device_at = self.recorder.device_at()
        if device_at is not None:
            number, begun = device_at
            peer = None
            step = next(s for s in self.program.steps if s.number == number and s.code < SEND)
            if begun:
                line = f"runs {step.op} on its device"
            elif step.slot is not None:
                line = f"waits on its device for the {step.slot.describe()}"
                peer = step.slot.peer
            else:
                line = f"waits on its device before {step.op}"
            return Place((self.steps_run, id(at), device_at), line, peer)
        return Place((self.steps_run, id(at)), f"runs {at.op}" if at is not None and at.code < SEND else "")

    def last_words(self, error: BaseException) -> str:
        """Report an error outside this rank's program (in an exchange after it, or in a check) to the other ranks.

        Returns the reports of the others if another rank failed, or "" if the error already contains them.
        """
        if not isinstance(error, PeerError):
            why = " ".join(str(error).split())[:200] or type(error).__name__
            self.board.write(f"{FAILED}: {why}", last=True)
            return ""
        if PENDING in str(error):
            return ""
        self.board.write(" ".join(str(error).split())[:200], last=True)
        elsewhere = self.board.failed_elsewhere()
        lines = [elsewhere] if elsewhere else self.board.collect(patience_s=min(self.timeout_s, PATIENCE_S))
        return f"{PENDING}{'; '.join(lines)}"

    def _hang_report(self, error: TransferError) -> str:
        line = f"waits for the {error.slot.describe()} ({error.reason})"
        self.board.write(line, last=True)
        lines = self.board.collect(patience_s=min(self.timeout_s, PATIENCE_S))
        waited = f" within {self.timeout_s:g} s" if error.reason == "timed out" else f": {error.reason}"
        return f"rank {self.program.rank} did not get the {error.slot.describe()}{waited}; {PENDING}{'; '.join(lines)}"

    def _lost_report(self, words: str) -> str:
        """Report a peer that was lost outside a transfer: what this rank was doing, and what the others were doing."""
        place = self._place()
        self.board.write(f"{place}: {words}", last=True)
        lines = self.board.collect(patience_s=min(self.timeout_s, PATIENCE_S))
        return f"rank {self.program.rank}, in {place}: {words}; {PENDING}{'; '.join(lines)}"


def first_stages(plan: Plan) -> set[int]:
    """Return the stages that take the batch on some path."""
    if not plan.edges:
        return {route[0] for route in plan.routes}
    return {
        s
        for route, path_edges in zip(plan.routes, plan.edges, strict=True)
        for s in set(route) - {b for _, b in path_edges}
    }


def _output(value: Any) -> Any:
    """Return the output as the user expects it: logits, even if the last layer leaves their product to the loss."""
    logits = getattr(value, "logits", None)
    return logits() if callable(logits) else value
