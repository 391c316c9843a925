"""Pipeline: train any list of layers under any plan.

Knows: how a user's layers, plan, loss and process groups become an executor, and the interface for training scripts.
Does not know: how a step runs (`executor`), or how plans are chosen.

    pipe = octopipe.Pipeline(layers, plan, loss_fn)        # under torchrun; layers: modules or factories
    optimizer = torch.optim.AdamW(pipe.parameters())
    for batch, target in data:
        loss = pipe.step(batch, target)                    # the mean loss, on every rank
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

The gradients are those of one device running the same micro-batches: of the mean of `loss_fn` over micro-batches
(and over data-parallel pipelines).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.runtime.agreement import agreed_program, program_of
from octopipe.runtime.arguments import check_arguments, check_options, device_of
from octopipe.runtime.batches import join, rows_of, sizes, to_device, weights
from octopipe.runtime.failures import Failures, check_steps, warn_of_gradients
from octopipe.runtime.graph_executor import make_executor
from octopipe.runtime.mean_losses import mean_losses
from octopipe.runtime.measured import REDUCE, Recorder, measured_timeline
from octopipe.runtime.precision import Autocast, autocast_context, keep_main_gradients
from octopipe.runtime.ranks.layers import Layers
from octopipe.runtime.ranks.leaves import LeafWatch, names_by_id
from octopipe.runtime.ranks.overflow import PipelineGradScaler, computes_in_half, share_overflow
from octopipe.runtime.ranks.pending_board import Board, Watchdog, board_name
from octopipe.runtime.ranks.reduce import Reducer, Shared
from octopipe.runtime.ranks.replicas import Replicas
from octopipe.runtime.ranks.ring_group import summing
from octopipe.runtime.ranks.world import World
from octopipe.runtime.stages.crossing import keep_apart, known_layers, warn_of_copies
from octopipe.runtime.step_inputs import StepInputs
from octopipe.runtime.verify import Verifier
from octopipe.runtime.wire.telling import naming_lost_peers
from octopipe.runtime.wire.transports import Transport, make_transport
from octopipe.simulation.lowering import Channel, Program
from octopipe.simulation.timeline import Timeline


class Pipeline:
    """One rank's part of a pipeline, with the interface of a whole model.

    Collective methods, which every rank of the pipeline must call: the constructor, `step`, `evaluate`, `forward`,
    `predict`, `clip_grad_norm_`, `timeline`.
    """

    @naming_lost_peers()
    def __init__(
        self,
        layers: Sequence[nn.Module | Callable[[], nn.Module]],
        plan: Plan | Program,
        loss_fn: Callable[..., Tensor],
        *,
        costs: CostTable | None = None,
        channel: Channel = "directed",
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | World | None = None,
        dp_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        pp_dim: str = "pp",
        dp_dims: Sequence[str] | None = None,
        model_dims: Sequence[str] | None = None,
        sharded: Mapping[str, Sequence[str]] | None = None,
        tied: Sequence[Sequence[str]] = (),
        autocast: Autocast = None,
        main_grads: bool = False,
        seed: int | None = 0,
        transport: str | Transport | None = None,
        timeout_s: float = 300.0,
        side_inputs: Sequence[str] = (),
        verify: bool | Literal["first-step"] = False,
        cuda_graphs: bool = False,
    ):
        """`layers` has one entry per layer of the plan: a module, or a factory, which is called only on the ranks that
        need it, with its own seed. `loss_fn(output, target)` returns the scalar loss of one micro-batch.

        `costs` determine the order of sends and receives (default: those stored in the plan, or equal layers). `mesh`
        contains the pipeline dimension (`pp_dim`), dimensions whose ranks take different batches (`dp_dims`; dp,
        dp_replicate, dp_shard, cp and ep are recognised) and dimensions whose ranks share a batch (`model_dims`; tp is
        recognised); alternatively pass the groups. Gradients and losses are averaged over `dp_dims`, except for what
        `fully_shard` averages itself. `sharded` names parameters whose values differ along such a dimension:
        `{"ep": ["*.experts.*"]}`. `tied` lists tied parameters as `layer.name`: `[("0.weight", "9.weight")]`; modules
        may also declare them (`tied_to`), and shared Parameter objects in `layers` are detected. `autocast`: a dtype or
        a context for forwards. `main_grads`: gradients of bfloat16 and float16 parameters are accumulated in float32,
        over micro-batches, copies and pipelines (for `MixedPrecisionOptimizer`). `seed=None` uses the global random
        generators. `transport`: "gloo", "nccl", "cuda_ipc" or "strict" (default: by backend). `timeout_s` limits every
        wait.

        `side_inputs` names arguments of layers' forwards (masks, positions) that `step(side=...)` passes to every layer
        with an argument of that name. `verify` compares, in the first step and on every rank, the gradients and loss of
        one micro-batch with plain autograd on the same layers, and raises an error that names a differing parameter.
        Recomputed layers are compared with their first forward in the first two steps (and rarely afterwards), with
        `verify=True` in all, which takes time in every step; `verify="first-step"` leaves that out.

        `cuda_graphs`: on a GPU, ops that support it are replayed from the fifth step on (log `octopipe.graphs`).
        """
        check_arguments(layers, plan, loss_fn)
        tied, side_inputs, sharded = check_options(timeout_s, seed, tied, side_inputs, sharded, transport, costs)
        whole_world = World.make(group, dp_group, mesh, pp_dim=pp_dim, dp_dims=dp_dims, model_dims=model_dims)
        self.device = device_of(device) if device is not None else whole_world.default_device()
        if cuda_graphs and self.device.type != "cuda":
            raise OctoPipeError(f"cuda_graphs on {self.device}; leave it out, or use a GPU")
        lowered_here = not isinstance(plan, Program)
        program = program_of(plan, costs, channel, num_ranks=whole_world.size, layers=layers)
        self.plan = plan = program.plan
        self.costs = costs
        self.world = world = whole_world.for_steps(on_host=self.device.type != "cuda")
        # The strict transport exists to show what deadlocks do.
        self.program = program = agreed_program(world, program, lowered_here=lowered_here, prove=transport != "strict")
        self.rank = world.rank
        self.timeout_s = timeout_s
        self._before_the_first_step()
        self.layers = Layers(layers, plan, world, self.device, tied=tied, seed=seed, loss_fn=loss_fn)
        self._main_grads = main_grads
        if main_grads:
            keep_main_gradients(self.layers.named.values())
        self.replicas = Replicas(self.layers, plan, world, sharded=sharded or {}, timeout_s=timeout_s)
        self.replicas.make_equal()
        self._buffers = self.replicas.shared_buffers()
        self._names_elsewhere, self._given_layers = names_by_id(layers), known_layers(layers)
        self._transport_wanted, self._loss_fn, self._seed = transport, loss_fn, seed
        self._autocast = autocast_context(autocast, self.device)
        self._half = computes_in_half(self._autocast, self.device, self.layers.named.values())
        self.side_inputs, self._verify = tuple(side_inputs), verify
        self._cuda_graphs = cuda_graphs
        self._assemble()
        self._inputs.check_side(self.world)

    def _before_the_first_step(self) -> None:
        """Initialise the state that steps change."""
        self.failures = Failures()
        self.loss_scale = 1.0
        """Factor on the gradient of the loss (for float16); divide the gradients by it before the optimizer."""
        self.step_number = 0
        """Number of completed steps; random numbers depend on it. `load_checkpoint` restores it."""
        self.resumed_from: tuple[Path, int] | None = None
        """Folder and step of the loaded checkpoint, until one is saved: later ones belong to another branch."""
        self.losses: Tensor | None = None
        """The losses of the last step, one per micro-batch, on every rank."""
        self._replaced: list[Shared] = []
        self._watchdog: Watchdog | None = None
        self._first_step = self._watches_copies = True

    def _assemble(self) -> None:
        """Create everything that a step needs besides the layers (collective over the pipeline's ranks)."""
        world, timeout_s = self.world, self.timeout_s
        self.transport = make_transport(self._transport_wanted, world, self.program, self.device, timeout_s)
        self.board = board = Board(world.store(), board_name(world), self.rank, world.size)
        failed, sets = lambda: bool(board.failed_elsewhere()), self.layers.holder_sets()
        groups = {h: summing(world.subgroup(h), self.transport, self.device, timeout_s, failed) for h in sets}
        self.reducer = Reducer(
            self.plan, self.rank, self.layers.shared(), groups, world.axes, self.replicas.reaches, timeout_s=timeout_s
        )
        self.recorder = Recorder(len(self.plan.orders[self.rank]), self.device)
        self.executor = make_executor(
            self.program,
            self.rank,
            self.layers.modules,
            self._loss_fn,
            self.transport,
            board=self.board,
            recorder=self.recorder,
            seed=self._seed,
            replica=world.replica,
            autocast=self._autocast,
            timeout_s=timeout_s,
            layers_done=None if self.reducer.idle else self.reducer.layers_done,
            between_ops=self.reducer.advance if self.reducer.needs_turns else None,
            side_inputs=self.side_inputs,
            cuda_graphs=self.device if self._cuda_graphs else None,
        )
        self._inputs = StepInputs(self.plan, self.executor, self.side_inputs)
        alone = self.plan.num_micro_batches == 1 and self.reducer.idle
        for chain in self.executor.chains.values():
            for stage, recomputes in chain.parts:
                stage.always_check, stage.may_step_inside = self._verify is True, alone
                stage.watches_weights = True
                stage.in_step_with_others = world.store() is not None and dist.get_world_size() > world.size
                if recomputes:
                    stage.check_repeatable()
        keep_apart(
            self.plan, self.executor.chains, self._given_layers | known_layers(self.layers.modules), self._loss_fn
        )
        self._leaves: LeafWatch | None = None
        if world.size > 1 or world.num_replicas > 1:
            own = {id(p): name for name, p in self.layers.named.items()}
            self._leaves = LeafWatch(self.executor, own, self._names_elsewhere, self.reducer.also_used_by)
        if world.size > 1:
            self._watchdog = Watchdog(
                self.board,
                self.executor.pending,
                timeout_s=timeout_s,
                device_busy=self._device_busy if self.device.type == "cuda" else None,
                dead=self.transport.dead,
            )

    # -- training --------------------------------------------------------------------------------------

    def step(
        self, batch: Any = None, target: Any = None, *, side: Mapping[str, Any] | None = None, reduce_loss: bool = True
    ) -> Tensor | None:
        """Forward and backward of all micro-batches; gradients are added into `.grad`.

        `batch`: a tensor (or any container of tensors) that is split along dimension 0 into the plan's micro-batches,
        or a list with one value per micro-batch, of any shapes; ranks with a first stage use it. `target`: the same for
        the loss; ranks with a last stage use it. `side`: the side inputs by name, split like the batch (`[x] * M`
        passes the same value to all); ranks whose layers take one need it. Returns the mean loss (float64, on every
        rank; the losses of the micro-batches are in `losses`), or None with `reduce_loss=False`.

        If the rows do not divide evenly (a partial last batch), micro-batches are unequal and weighted by their rows,
        so the loss is the mean over rows if `loss_fn` is a mean. Ranks with a last stage take the number of rows from
        `target`, or from `batch` if there is no target. Micro-batches given as a list have equal weights.

        A batch that requires grad receives its gradient on the ranks with a first stage (of the micro-batches that they
        ran, if there are several), as does the module that computed it: average over data-parallel pipelines yourself.
        """
        if torch.is_inference_mode_enabled():
            raise OctoPipeError("step inside torch.inference_mode() cannot make gradients; call it outside")
        self.failures.check()
        inputs, targets = self._inputs.split(batch, target)
        shares, sides = self._inputs.shares(batch, target), self._inputs.split_side(side)
        if not self.layers.untouched():
            self._take_replaced()
        if self._main_grads:
            keep_main_gradients(self.layers.named.values())  # of parameters that are no longer frozen
        if self._replaced:
            self.replicas.make_equal_again(self._replaced)
            self._replaced = []
        with self._interruptible():
            verifier = Verifier(self.executor, self.layers.named) if self._first_step and self._verify else None
            if not self.reducer.idle:
                self.reducer.begin_step()
            scale, number = self.loss_scale, self.step_number
            losses = self.executor.run(inputs, targets, step=number, loss_scale=scale, side=sides, weights=shares)
            if verifier is not None:
                verifier.finish(self.world)
            first, self._first_step = self._first_step, False
            if not self.reducer.idle:
                with self.recorder.extra(REDUCE):
                    self.reducer.finish()
            self._finish_step()
            if first and verifier is None:  # after the reduction: a tied parameter's gradient may be of another rank
                warn_of_gradients(self.rank, self.named_parameters(), self.layers.shared())
            if self._watches_copies:  # also in the second step: a rank may run a layer only once per step
                warned = warn_of_copies(self.executor.chains, self.layers.ranks_of)
                self._watches_copies = self.executor.steps_run < 2 and not warned
            mean = self._mean_loss(losses, shares, batch) if reduce_loss else None
            self.step_number += 1  # last: where another rank's failure is noticed in the above, the step has not run
            return mean

    def _mean_loss(self, losses: Mapping[int, Tensor], shares: list[float] | None, batch: Any) -> Tensor:
        needs_batch, count = self.executor.program.needs_batch, self.plan.num_micro_batches
        cuts = needs_batch and weights(rows_of(batch), count) is not None
        self.losses = mean_losses(losses, shares, count, self.world, self.device, self.timeout_s, cuts_unevenly=cuts)
        return self.losses.mean()

    def _finish_step(self) -> None:
        """Synchronise everything besides gradients that ranks share."""
        if self._leaves is not None and self._leaves.finish(self.world):
            self._leaves = None
        self._buffers.keep_alike()
        if self._scales_loss():
            share_overflow(self.layers.named.values(), self.world, self.device, self.timeout_s)

    def _scales_loss(self) -> bool:
        """Return whether gradients may overflow: with a scaled loss or float16."""
        if self.world.size == 1 and not self.world.axes and not self.world.model_axes:
            return False
        return self.loss_scale != 1.0 or self._half

    def _take_replaced(self) -> None:
        """Take over parameters that have been replaced since the last check."""
        replaced = self.layers.refresh()
        if replaced:
            if self._main_grads:
                keep_main_gradients(s.parameter for s in replaced)
            self.reducer.renew(self.layers.shared())
            self._replaced += replaced

    def evaluate(self, batch: Any = None, target: Any = None, *, side: Mapping[str, Any] | None = None) -> Tensor:
        """Return the mean loss of the same micro-batches without gradients (`eval()` switches dropout off first)."""
        # Tensors created here are used again in training, so they must not be inference tensors.
        self.failures.check()
        with self._interruptible(), torch.inference_mode(False), torch.no_grad():
            inputs, targets = self._inputs.split(batch, target)
            sides = self._inputs.split_side(side)
            losses = self.executor.evaluate(inputs, targets, step=self.step_number, side=sides)
            return self._mean_loss(losses, self._inputs.shares(batch, target), batch)

    def forward(self, batch: Any = None, *, side: Mapping[str, Any] | None = None, to: str = "last") -> Any:
        """Return the last layer's outputs without gradients, all micro-batches joined row by row (a list for a list).

        `to="last"`: ranks with a last stage get them, the others None; `to="all"`: every rank does. Collective.
        """
        if to not in ("last", "all"):
            raise OctoPipeError(f"to is {to!r}; use 'last' or 'all'")
        self.failures.check()
        with self._interruptible(), torch.inference_mode(False), torch.no_grad():
            inputs, _ = self._inputs.split(batch, None, with_loss=False)
            sides = self._inputs.split_side(side)
            outputs = self.executor.evaluate(inputs, None, step=self.step_number, side=sides, loss=False)
            count = self.plan.num_micro_batches
            rows = rows_of(batch) if self.executor.program.needs_batch else None
            listed = isinstance(batch, list)
            of_ranks = self.world.gather((rows, listed, bool(outputs)))
            rows = next((r for r, *_ in of_ranks if r is not None), None)
            listed = any(flag for _, flag, _ in of_ranks)
            if self.world.size > 1 and (to == "all" or sum(has for *_, has in of_ranks) > 1):
                moved = {m: to_device(value, torch.device("cpu")) for m, value in outputs.items()}
                of_all: dict[int, Any] = {}
                for part in self.world.gather(moved):
                    of_all |= part
                outputs = {m: to_device(v, self.device) for m, v in of_all.items()} if to == "all" or outputs else {}
            if not outputs:
                return None
            with_rows = [m for m in range(count) if rows is None or rows == 0 or sizes(rows, count)[m]]
            values = [outputs[m] for m in with_rows]
            return values if listed else join(values)

    def predict(self, batch: Any = None, *, side: Mapping[str, Any] | None = None, to: str = "last") -> Any:
        """Run `forward` with all layers in eval mode; their previous mode is restored."""
        flags = [(m, m.training) for module in self.layers.modules.values() for m in module.modules()]
        try:
            return self.eval().forward(batch, side=side, to=to)
        finally:
            for module, training in flags:
                module.training = training

    # -- when a step breaks off ------------------------------------------------------------------------

    def _interruptible(self) -> AbstractContextManager[None]:  # an error of one rank ends the step on all
        begun = lambda: self.executor.begun  # noqa: E731
        give_up = self.reducer.give_up, self.transport.abandon, self.world.break_off
        return self.failures.watched(self.step_number, begun, self.executor.last_words, self.timeout_s, *give_up)

    @naming_lost_peers()
    def recover(self) -> None:
        """Make the pipeline usable again after a step that raised (collective over all pipelines' ranks).

        Parameters and optimizer are unchanged; call `zero_grad`, because the gradients of the failed step are partial.
        """
        if self.device.type == "cuda":  # it may wait forever for a tensor that was never sent
            raise OctoPipeError("recovery from a failed step is not supported on a GPU; restart the ranks")
        self.close()
        self.world.renew(self.timeout_s)
        check_steps(self.step_number, self.world, self.timeout_s)
        self._buffers.begin_again()
        self._assemble()
        self.failures.forget()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all ranks' gradients so that their global norm (`grad_norm`) is at most `max_norm`; returns it."""
        total = self.grad_norm(norm_type)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return total

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all ranks' gradients, summed in layer order; a parameter on several ranks counts once."""
        self._take_replaced()
        return self.replicas.norm(norm_type)

    def grad_scaler(self, **options: Any) -> PipelineGradScaler:
        """Return a `torch.amp.GradScaler` that skips a step on all ranks or none, and sets `loss_scale`.

        torch's own works as well, with `loss_scale = scaler.get_scale()` before every step (see `ranks/overflow.py`).
        """
        return PipelineGradScaler(self, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.parameters():
            p.grad = None if set_to_none or p.grad is None else torch.zeros_like(p.grad)

    def _device_busy(self) -> bool:
        """Whether a step is being issued or still runs on the GPU."""
        return self.executor.at is not None or not self.recorder.finished()

    # -- the model -------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parameters, each once."""
        return (p for _, p in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters as `layer.name`, each once, in layer order; those of the loss form a last layer."""
        self._take_replaced()
        return iter(self.layers.named.items())

    def modules(self) -> dict[int, nn.Module]:
        """Return this rank's layers by number; a loss with parameters has the number after the last layer."""
        return self.layers.modules

    def train(self, mode: bool = True) -> Pipeline:
        for module in self.layers.modules.values():
            module.train(mode)
        return self

    def eval(self) -> Pipeline:
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parameters and buffers as `layer.name`: the same keys under every plan."""
        return self.layers.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's layers; entries of other layers are ignored, missing and unknown ones are an error."""
        self.layers.load_state_dict(state)

    def timeline(self, label: str = "") -> Timeline:
        """Return the measured timeline of the last step on all ranks, with a common clock."""
        name = label or str(self.plan.extra.get("system", "")) or "measured"
        return measured_timeline(self.executor.program, self.recorder, self.world.control, self.costs, name)

    def close(self) -> None:
        """Stop the watchdog and release shared buffers; there are no steps afterwards."""
        self.failures.closed = True
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._leaves is not None:
            self._leaves.stop()
        self.executor.ops.close()
        self.executor.pairs.close()
        self.transport.close()
        self.reducer.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
