"""One step of a plan on Megatron's chunks: executes a rank's instructions one after another.

Knows: what F, R, I, W and B mean for a chunk, that Megatron's own `forward_step` runs every forward, how each
micro-batch gets its data in any order, and how random state is restored when a forward runs again. Does not know: how a
plan is prepared (`driver.py`), how weight gradients are deferred (`weights.py`), how tensors are transferred
(`runtime/wire/transports`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.megatron.reduction import start_reduction
from octopipe.megatron.ties import local_ties
from octopipe.megatron.weights import Split
from octopipe.plans.plan import F, I, Plan, R, W
from octopipe.runtime.measured import Recorder
from octopipe.runtime.slots import RECEIVE, SEND, Cell, RankProgram
from octopipe.runtime.stages.weight_queue import WeightQueue
from octopipe.runtime.torch_private import run_engine
from octopipe.runtime.transfers import transfer
from octopipe.runtime.wire.transports import Transport


class Walk:
    """One step: the program's instructions, one after another."""

    def __init__(
        self,
        plan: Plan,
        mine: RankProgram,
        transport: Transport,
        models: list[Any],
        splits: dict[int, Split],
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        config: Any,
        *,
        cp_size: int,
        device: torch.device,
        collect_non_loss_data: bool,
        first_val_step: bool | None,
        force_all_reduce: bool,
        recorder: Recorder | None = None,
    ):
        """`recorder` receives the start and the end of every op."""
        from megatron.core.pipeline_parallel import schedules

        self.plan, self.mine, self.transport = plan, mine, transport
        self.config, self.schedules, self.func = config, schedules, forward_step_func
        self.collect, self.first_val_step = collect_non_loss_data, first_val_step
        self.cp_size = cp_size
        self.splits = splits
        stages = plan.stages_of_rank(mine.rank)
        self.chunk = {number: k for k, number in enumerate(stages)}
        self.models = models
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(self.models)
        if len(iterators) != len(self.models):
            raise OctoPipeError(f"{len(iterators)} data iterators for {len(self.models)} chunks; give one per chunk")
        shared = not isinstance(data_iterator, list) and len(self.models) > 1
        self.data = _Data(plan, mine, self.chunk, iterators, shared)
        self.losses: dict[int, Any] = {}
        self.num_tokens = torch.zeros([], dtype=torch.int, device=device)
        self.started: set[int] = set()
        self.tied = {id(p) for tie in local_ties(plan, mine.rank, models) for p in tie}
        self.force_all_reduce = force_all_reduce
        self._recorder = recorder

    def train(self) -> None:
        transport = self.transport
        last = {ins.cell.stage: k for k, ins in enumerate(self.mine.steps) if ins.code < SEND}
        done = {k: self.models[self.chunk[stage]] for stage, k in last.items()}
        transport.begin_step()
        if self._recorder is not None:
            self._recorder.begin_step()
        for number, ins in enumerate(self.mine.steps):
            code, cell, slot = ins.code, ins.cell, ins.slot
            if code >= SEND:
                transfer(ins, transport)
            elif code == F:
                value = self._input(cell, slot)
                for sent in ins.release:
                    transport.release(sent)
                with self._timed(ins.number):
                    self._forward(cell, value)
            elif code == R:
                for sent in ins.release:
                    transport.release(sent)
                with self._timed(ins.number):
                    self._again(cell)
            elif code == W:
                for sent in ins.release:
                    transport.release(sent)
                run, cell.runs = cell.runs, None
                with self._timed(ins.number):
                    self.splits[cell.stage].weight(run.queue)
            else:
                gradient = self._gradient(cell, slot)
                for sent in ins.release:
                    transport.release(sent)
                with self._timed(ins.number):
                    self._backward(cell, gradient, code == I)
            model = done.get(number)
            if model is not None and not any(id(p) in self.tied for p in model.parameters()):
                start_reduction(model, self.force_all_reduce)  # overlaps with the other chunks' ops
        transport.end_step()
        if self._recorder is not None:
            self._recorder.end_step()
        for cell in self.mine.cells:
            cell.clear()

    @contextlib.contextmanager
    def _timed(self, op: int) -> Iterator[None]:
        """A context that records the times of the op at this position of the rank's order."""
        recorder = self._recorder
        if recorder is None:
            yield
            return
        recorder.started[op] = time.perf_counter()
        if recorder.mark is not None:
            recorder.mark(op, 0)
        yield
        if recorder.mark is not None:
            recorder.mark(op, 1)
        recorder.ended[op] = time.perf_counter()

    def forward_only(self) -> None:
        """Run the forwards of the plan in its order, without keeping anything for a backward."""
        transport, sent = self.transport, []
        transport.begin_step()
        for ins in self.mine.steps:
            cell, slot = ins.cell, ins.slot
            if ins.code == RECEIVE and slot is not None and slot.forward:
                transport.post(slot)
            elif ins.code == SEND and slot is not None and slot.forward:
                transport.send_forward(slot, cell.value, [False])
                cell.value = None
                sent.append(slot)
            elif ins.code == F:
                out = self._call(cell, self._input(cell, slot))
                if not cell.computes_loss:
                    cell.value = out.detach()
        for slot in sent:
            transport.release(slot)
        transport.end_step()
        for cell in self.mine.cells:
            cell.clear()

    # -- ops -------------------------------------------------------------------------------------------

    def _input(self, cell: Cell, slot: Any) -> Tensor | None:
        if slot is not None:
            value = self.transport.take_forward(slot)[0]
            slot.ended = time.perf_counter()
            return value
        if cell.before is None:
            return None
        value, cell.before.value = cell.before.value, None
        return value

    def _gradient(self, cell: Cell, slot: Any) -> Tensor | None:
        if slot is not None:
            gradient = self.transport.take_gradient(slot)[0]
            slot.ended = time.perf_counter()
            cell.output_message = None
            return gradient
        if cell.after is None:
            return None
        gradients, cell.after.gradients = cell.after.gradients, None
        return gradients[0]

    def _forward(self, cell: Cell, value: Tensor | None) -> None:
        run = cell.runs = _Run(value)
        if cell.recomputes:
            run.random = _random_state()
            with torch.no_grad():
                out = self._call(cell, value)
        else:
            run.input = None if value is None else value.detach().requires_grad_()
            out = run.output = self._call(cell, run.input)
        if cell.computes_loss:
            return
        cell.value, cell.needs = out.detach(), [True]
        if run.output is not None:
            run.free_output(self.config.deallocate_pipeline_outputs)

    def _again(self, cell: Cell) -> None:
        """Run R: the forward once more, with the same data and random numbers, keeping the graph."""
        run = cell.runs
        run.input = None if run.value is None else run.value.detach().requires_grad_()
        with _random(run.random):
            run.output = self._call(cell, run.input, again=True)
        if not cell.computes_loss:
            run.free_output(self.config.deallocate_pipeline_outputs)

    def _backward(self, cell: Cell, gradient: Tensor | None, waits: bool) -> None:
        run, config, split = cell.runs, self.config, self.splits.get(cell.stage)
        if config.timers is not None:
            config.timers("backward-compute", log_level=2).start()
        if split is not None:
            split.queue = run.queue
            run.queue.defer = waits
        output = run.output
        if cell.computes_loss and config.grad_scale_func is not None:
            output = config.grad_scale_func(output)
        if output.requires_grad:
            seed = torch.ones_like(output) if gradient is None else gradient
            # Autograd's engine is called directly: torch's own function compares shapes, which a freed output has lost.
            run_engine((output,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        run.output = None
        if not cell.takes_batch:
            own = run.input.grad
            cell.gradients = [torch.zeros_like(run.input) if own is None else own]
        run.input = run.value = None
        if not waits:
            if split is not None:
                split.weight(run.queue)
            cell.runs = None
        if config.timers is not None:
            config.timers("backward-compute").stop()

    def _call(self, cell: Cell, value: Tensor | None, *, again: bool = False) -> Tensor:
        """Run Megatron's own forward step of one chunk and micro-batch."""
        k, m = self.chunk[cell.stage], cell.micro_batch
        store: list[Any] = []
        first = k not in self.started
        self.started.add(k)
        if self.first_val_step is not None and not torch.is_grad_enabled():
            first = first and self.first_val_step
        out, tokens = self.schedules.forward_step(
            self.func,
            self.data.of(k, m),
            self.models[k],
            self.plan.num_micro_batches,
            value,
            store,
            self.config,
            self.cp_size,
            collect_non_loss_data=self.collect,
            is_first_microbatch=first and not again,
            current_microbatch=m,
            vp_stage=k if len(self.models) > 1 or self.config.virtual_pipeline_model_parallel_size else None,
            is_last_stage=cell.computes_loss,
        )
        if isinstance(out, list):
            out = out[0]
        if cell.computes_loss and not again:
            self.losses[m] = store[0] if store else None
            self.num_tokens += tokens.to(self.num_tokens.device)
        return out


class _Run:
    """The state of one micro-batch in one chunk between F and W."""

    __slots__ = ("input", "output", "queue", "random", "value")

    def __init__(self, value: Tensor | None):
        self.value = value
        self.input: Any = None
        self.output: Any = None
        self.random: Any = None
        self.queue = WeightQueue()

    def free_output(self, wanted: bool) -> None:
        """Free the output's memory but keep its place in the graph, as Megatron does if `wanted`."""
        out = self.output
        if wanted and out._base is None and out is not self.input and out.grad_fn is not None:
            out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


class _Data:
    """A chunk's data by micro-batch, in any order. Items are read ahead if the order is not the iterator's own."""

    def __init__(self, plan: Plan, mine: RankProgram, chunk: dict[int, int], iterators: Sequence[Any], shared: bool):
        self._iterators = iterators
        self._items: dict[int, list[Any]] = {}
        wanted = range(plan.num_micro_batches)
        common: list[Any] | None = None
        for number, k in chunk.items():
            order = [op.micro_batch for op in plan.orders[mine.rank] if op.stage == number and op.kind == "F"]
            again = bool(plan.stages[number].recompute)
            if iterators[k] is None or (order == list(wanted) and not shared and not again):
                continue
            if shared:  # one iterator for all chunks: every chunk sees every item
                common = common or [next(iterators[k]) for _ in wanted]
                self._items[k] = common
            else:
                self._items[k] = [next(iterators[k]) for _ in wanted]

    def of(self, k: int, m: int) -> Any:
        items = self._items.get(k)
        return self._iterators[k] if items is None else iter([items[m]])


def _random_state() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.get_rng_state(), device, get_cuda_rng_tracker().get_states()


def _set_random_state(state: Any) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
    get_cuda_rng_tracker().set_states(state[2])


@contextlib.contextmanager
def _random(state: Any) -> Iterator[None]:
    """A context with the random state of an earlier moment; the present state is restored afterwards."""
    now = _random_state()
    _set_random_state(state)
    try:
        yield
    finally:
        _set_random_state(now)
