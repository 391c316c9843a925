"""A plan as Megatron-Core's forward-backward function: the same keyword arguments, any partition, placement, order.

Knows: how our program of ops, sends and receives walks Megatron's model chunks; Megatron's own `forward_step` (data,
loss, auxiliary losses, recomputation flags) is called for every forward. Does not know: how weight gradients are put
off (`weights.py`), where stages lie (`placing.py`), how tensors travel (`runtime/transports`).

Differences from Megatron's schedules that show: losses are returned by micro-batch whatever the order; sends and
receives follow our proven order over our own transports; a stage that the plan recomputes keeps its input only and
runs its forward again at R, beside whatever Megatron's own recomputation flags do inside.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.lowering import Channel, lower
from octopipe.megatron.placing import for_megatron
from octopipe.megatron.ties import add_up, local_ties
from octopipe.megatron.weights import Split
from octopipe.plan import F, I, Plan, R, W
from octopipe.runtime.slots import RECEIVE, SEND, Cell, RankProgram, rank_program
from octopipe.runtime.transports import Transport, make_transport
from octopipe.runtime.wgrad_ops import WeightQueue
from octopipe.runtime.world import World


def forward_backward_func(
    plan: Plan,
    *,
    costs: CostTable | None = None,
    channel: Channel = "directed",
    transport: str | Transport | None = None,
    timeout_s: float = 600.0,
) -> Callable[..., list[Any]]:
    """What `get_forward_backward_func()` returns, for this plan.

    `costs` time the order of sends and receives (default: equal layers). `transport`: "nccl", "gloo", "cuda_ipc"
    (ranks that share a GPU); default: by the pipeline group's backend. The model chunks are those of
    `build_chunks(plan, ...)`: a rank's stages along the chain, ranks named as by `for_megatron`.
    """
    driver = PlanDriver(for_megatron(plan), costs=costs, channel=channel, transport=transport, timeout_s=timeout_s)

    def forward_backward(
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        return driver.step(
            forward_step_func,
            data_iterator,
            model if isinstance(model, list) else [model],
            num_microbatches,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            pg_collection=pg_collection,
            force_all_reduce=bool(force_all_reduce),
        )

    forward_backward.plan = driver.plan  # type: ignore[attr-defined]
    forward_backward.close = driver.close  # type: ignore[attr-defined]
    return forward_backward


class PlanDriver:
    """Walks one rank's program over Megatron's chunks; made ready at the first step, when groups are known."""

    def __init__(
        self,
        plan: Plan,
        *,
        costs: CostTable | None,
        channel: Channel,
        transport: str | Transport | None,
        timeout_s: float,
    ):
        self.plan = plan
        times = costs or CostTable.uniform(num_layers=plan.num_layers, p2p_ms=0.05)
        self.program = lower(plan, times, channel=channel)
        self._wanted, self._timeout_s = transport, timeout_s
        self._mine: RankProgram | None = None
        self._transport: Transport | None = None
        self._splits: dict[int, Split] = {}
        """By stage."""
        self._models: list[Any] = []
        partial = next((s for s in plan.stages if not isinstance(s.recompute, bool)), None)
        if partial is not None:
            raise OctoPipeError(
                f"a stage recomputes layers {list(partial.recompute)} only; on Megatron-Core a plan recomputes whole "  # type: ignore[arg-type]
                "stages: tune with whole-stage recomputation or use Megatron's own recompute flags"
            )

    # -- before the first step -------------------------------------------------------------------------

    def _open(self, models: Sequence[Any], group: Any) -> None:
        rank = group.rank()
        if group.size() != self.plan.num_ranks:
            raise OctoPipeError(f"the plan has {self.plan.num_ranks} ranks, Megatron's pipeline {group.size()}")
        self._check_models(models, rank)
        world = World(group if group.size() > 1 else None)
        parameter = next((p for m in models for p in m.parameters()), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        self._mine = rank_program(self.program, rank)
        self._transport = make_transport(self._wanted, world, self.program, device, self._timeout_s)
        self._transport.open(self._mine)
        self._world, self._device = world, device

    def _check_models(self, models: Sequence[Any], rank: int) -> None:
        stages = self.plan.stages_of_rank(rank)
        if len(models) != len(stages):
            raise OctoPipeError(
                f"rank {rank} holds {len(stages)} stages of the plan but {len(models)} model chunks; make them with "
                "octopipe.megatron.build_chunks"
            )
        self._models = list(models)
        self._splits = {}
        for number, model in zip(stages, models):
            if any(op.stage == number and op.kind == "I" for op in self.plan.orders[rank]):
                self._splits[number] = split = Split(model)
                self._check_engine(split, number, rank)

    def _check_engine(self, split: Split, number: int, rank: int) -> None:
        """Transformer Engine lets weight gradients out in the order they went in."""
        order = [op for op in self.plan.orders[rank] if op.stage == number]
        inputs = [op.micro_batch for op in order if op.kind == "I"]
        weights = [op.micro_batch for op in order if op.kind == "W"]
        if split.engine and inputs != weights:
            raise OctoPipeError(
                f"stage {number} runs W in the order {weights[:8]} and I in the order {inputs[:8]}; Transformer Engine "
                "computes delayed weight gradients first in, first out: make the two orders equal"
            )

    # -- one step --------------------------------------------------------------------------------------

    def step(
        self,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        models: list[Any],
        num_micro_batches: int,
        *,
        forward_only: bool,
        collect_non_loss_data: bool,
        first_val_step: bool | None,
        pg_collection: Any,
        force_all_reduce: bool,
    ) -> list[Any]:
        from megatron.core.utils import get_model_config

        if num_micro_batches != self.plan.num_micro_batches:
            raise OctoPipeError(
                f"the plan has {self.plan.num_micro_batches} micro-batches, this step {num_micro_batches}; use as many "
                "(or tune a plan for this number)"
            )
        groups = pg_collection or _groups()
        if self._mine is None:
            self._open(models, groups.pp)
        elif len(models) != len(self._models) or any(a is not b for a, b in zip(models, self._models)):
            self._check_models(models, self._mine.rank)
        assert self._mine is not None and self._transport is not None
        config = get_model_config(models[0])
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        walk = _Walk(self, forward_step_func, data_iterator, config, groups, collect_non_loss_data, first_val_step)
        walk.force_all_reduce = force_all_reduce
        if forward_only:
            with torch.no_grad():
                walk.forward_only()
        else:
            with _no_sync(config, models):
                walk.train()
            self._finish(config, groups, walk.num_tokens, force_all_reduce)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return [item for _, item in sorted(walk.losses.items())]

    def _finish(self, config: Any, groups: Any, num_tokens: Tensor, force_all_reduce: bool) -> None:
        """Ties, data-parallel reduction, Megatron's own finalization."""
        assert self._mine is not None
        add_up(local_ties(self.plan, self._mine.rank, self._models))
        for model in self._models:
            _start_reduction(model, force_all_reduce)
        if config.finalize_model_grads_func is None:
            return
        tokens = None
        if config.calculate_per_token_loss:
            tokens = num_tokens
            last = self.plan.stages[-1].rank
            if groups.pp.size() > 1 and last != groups.pp.size() - 1:  # Megatron asks its last rank
                root = torch.distributed.get_global_rank(groups.pp, last)
                torch.distributed.broadcast(tokens, src=root, group=groups.pp)
        more = {"pg_collection": groups, "force_all_reduce": force_all_reduce}
        known = inspect.signature(config.finalize_model_grads_func).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            more = {name: value for name, value in more.items() if name in known}
        config.finalize_model_grads_func(self._models, tokens, **more)

    def close(self) -> None:
        """Give back what the transport holds outside this process."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._mine = None


class _Walk:
    """One step: the program's instructions, one after another."""

    def __init__(
        self,
        driver: PlanDriver,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        config: Any,
        groups: Any,
        collect_non_loss_data: bool,
        first_val_step: bool | None,
    ):
        from megatron.core.pipeline_parallel import schedules

        assert driver._mine is not None and driver._transport is not None
        self.plan, self.mine, self.transport = driver.plan, driver._mine, driver._transport
        self.config, self.schedules, self.func = config, schedules, forward_step_func
        self.collect, self.first_val_step = collect_non_loss_data, first_val_step
        self.cp_size = groups.cp.size()
        self.splits = driver._splits
        stages = driver.plan.stages_of_rank(self.mine.rank)
        self.chunk = {number: k for k, number in enumerate(stages)}
        self.models = driver._models
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(self.models)
        if len(iterators) != len(self.models):
            raise OctoPipeError(f"{len(iterators)} data iterators for {len(self.models)} chunks; give one per chunk")
        shared = not isinstance(data_iterator, list) and len(self.models) > 1
        self.data = _Data(driver.plan, self.mine, self.chunk, iterators, shared)
        self.losses: dict[int, Any] = {}
        self.num_tokens = torch.zeros([], dtype=torch.int, device=driver._device)
        self.started: set[int] = set()
        self.tied = {id(p) for tie in local_ties(driver.plan, self.mine.rank, self.models) for p in tie}
        self.force_all_reduce = False

    def train(self) -> None:
        transport = self.transport
        last = {ins.cell.stage: k for k, ins in enumerate(self.mine.steps) if ins.code < SEND}
        done = {k: self.models[self.chunk[stage]] for stage, k in last.items()}
        transport.begin_step()
        for number, ins in enumerate(self.mine.steps):
            code, cell, slot = ins.code, ins.cell, ins.slot
            if code == RECEIVE:
                assert slot is not None
                if slot.forward or cell.sent is not None or transport.ordered:
                    transport.post(slot)
                else:
                    slot.deferred = True
            elif code == SEND:
                assert slot is not None
                if slot.forward:
                    cell.sent = transport.send_forward(slot, cell.value, cell.needs)
                    cell.value = None
                    answer = cell.gradient_slot
                    if answer is not None and answer.deferred:
                        answer.deferred = False
                        transport.post(answer)
                else:
                    gradients, cell.gradients = cell.gradients, None
                    transport.send_gradient(slot, gradients)
            elif code == F:
                value = self._input(cell, slot)
                for sent in ins.release:
                    transport.release(sent)
                self._forward(cell, value)
            elif code == R:
                for sent in ins.release:
                    transport.release(sent)
                self._again(cell)
            elif code == W:
                for sent in ins.release:
                    transport.release(sent)
                run, cell.runs = cell.runs, None
                self.splits[cell.stage].weight(run.queue)
            else:
                gradient = self._gradient(cell, slot)
                for sent in ins.release:
                    transport.release(sent)
                self._backward(cell, gradient, code == I)
            model = done.get(number)
            if model is not None and not any(id(p) in self.tied for p in model.parameters()):
                _start_reduction(model, self.force_all_reduce)  # behind the other chunks' ops
        transport.end_step()
        for cell in self.mine.cells:
            cell.clear()

    def forward_only(self) -> None:
        """The forwards of the plan, in its order; nothing is kept."""
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
                if not cell.last:
                    cell.value = out.detach()
        for slot in sent:
            transport.release(slot)
        transport.end_step()
        for cell in self.mine.cells:
            cell.clear()

    # -- ops -------------------------------------------------------------------------------------------

    def _input(self, cell: Cell, slot: Any) -> Tensor | None:
        if slot is not None:
            return self.transport.take_forward(slot)[0]
        if cell.before is None:
            return None
        value, cell.before.value = cell.before.value, None
        return value

    def _gradient(self, cell: Cell, slot: Any) -> Tensor | None:
        if slot is not None:
            gradient = self.transport.take_gradient(slot)[0]
            cell.sent = None
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
        if cell.last:
            return
        cell.value, cell.needs = out.detach(), [True]
        if run.output is not None:
            run.free_output(self.config.deallocate_pipeline_outputs)

    def _again(self, cell: Cell) -> None:
        """R: the forward once more, with the same data and random numbers, keeping the graph."""
        run = cell.runs
        run.input = None if run.value is None else run.value.detach().requires_grad_()
        with _random(run.random):
            run.output = self._call(cell, run.input, again=True)
        if not cell.last:
            run.free_output(self.config.deallocate_pipeline_outputs)

    def _backward(self, cell: Cell, gradient: Tensor | None, waits: bool) -> None:
        run, config, split = cell.runs, self.config, self.splits.get(cell.stage)
        if run.output is None:  # the plan's backward follows its forward at once: nothing was let go
            self._again(cell)
        if config.timers is not None:
            config.timers("backward-compute", log_level=2).start()
        if split is not None:
            split.queue = run.queue
            run.queue.defer = waits
        output = run.output
        if cell.last and config.grad_scale_func is not None:
            output = config.grad_scale_func(output)
        if output.requires_grad:
            seed = torch.ones_like(output) if gradient is None else gradient
            # The engine itself: torch's own function compares shapes, and a freed output has lost its.
            torch.autograd.Variable._execution_engine.run_backward(
                (output,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        run.output = None
        if not cell.first:
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
        """Megatron's own forward step of one chunk and micro-batch."""
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
            is_last_stage=cell.last,
        )
        if isinstance(out, list):
            out = out[0]
        if cell.last and not again:
            self.losses[m] = store[0] if store else None
            self.num_tokens += tokens.to(self.num_tokens.device)
        return out


class _Run:
    """One micro-batch's passage through a chunk, from F to W."""

    __slots__ = ("input", "output", "queue", "random", "value")

    def __init__(self, value: Tensor | None):
        self.value = value
        self.input: Any = None
        self.output: Any = None
        self.random: Any = None
        self.queue = WeightQueue()

    def free_output(self, wanted: bool) -> None:
        """Keep the output's place in the graph without its memory, as Megatron does when asked."""
        out = self.output
        if wanted and out._base is None and out is not self.input and out.grad_fn is not None:
            out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


class _Data:
    """A chunk's data by micro-batch, whatever the order: where it is not the iterator's own, items are read ahead."""

    def __init__(
        self, plan: Plan, mine: RankProgram, chunk: dict[int, int], iterators: Sequence[Any], shared: bool
    ):
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


def _groups() -> Any:
    """Megatron's process groups, as its own schedules collect them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    out = ProcessGroupCollection()
    out.tp = parallel_state.get_tensor_model_parallel_group()
    out.cp = parallel_state.get_context_parallel_group()
    out.pp = parallel_state.get_pipeline_model_parallel_group()
    out.embd = parallel_state.get_embedding_group(check_initialized=False)
    out.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    out.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return out


@contextlib.contextmanager
def _no_sync(config: Any, models: Sequence[Any]) -> Iterator[None]:
    """No reduction while gradients are incomplete: what the config says, or the chunks' own way."""
    known = config.no_sync_func
    makers = known if isinstance(known, list) else [known] if known is not None else []
    if not makers:
        makers = [m.no_sync for m in models if hasattr(m, "no_sync")]
    with contextlib.ExitStack() as stack:
        for maker in makers:
            stack.enter_context(maker())
        yield


def _start_reduction(model: Any, force_all_reduce: bool) -> None:
    """Overlapped reduction: Megatron's hooks start a bucket when its last gradient comes; ours come all at once."""
    if not getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False):
        return
    for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
        if getattr(group, "grad_reduce_handle", None) is not None:
            continue
        group.is_first_batch = False  # else finish_grad_sync would start a second reduction
        more = {"force_all_reduce": force_all_reduce} if force_all_reduce else {}
        group.start_grad_sync(**more)


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
    """The random numbers of an earlier moment, and the present ones again afterwards."""
    now = _random_state()
    _set_random_state(state)
    try:
        yield
    finally:
        _set_random_state(now)
