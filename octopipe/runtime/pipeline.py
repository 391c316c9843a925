"""Pipeline: train any list of layers under any plan.

Knows: how a user's layers, plan, loss and process groups become an executor, and what a training script asks of
it. Does not know: how a step runs (`executor`), what a plan should be.

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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.lowering import Channel, Program, lower
from octopipe.plan import Plan
from octopipe.runtime.board import Board, Watchdog, board_name
from octopipe.runtime.executor import Executor
from octopipe.runtime.layers import Layers
from octopipe.runtime.measured import Recorder, measured_timeline
from octopipe.runtime.reduce import Reducer, wait_for
from octopipe.runtime.slots import rank_program
from octopipe.runtime.stage import flatten, rebuild
from octopipe.runtime.transports import Transport, make_transport
from octopipe.runtime.world import World, all_reduce
from octopipe.timeline import Timeline

Autocast = torch.dtype | Callable[[], AbstractContextManager[Any]] | None


class Pipeline:
    """One rank's part of a pipeline, with the face of a whole model.

    Collective calls (every rank of the pipeline makes them together): the constructor, `step`, `evaluate`,
    `clip_grad_norm_`, `timeline`.
    """

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
        tied: Sequence[Sequence[str]] = (),
        autocast: Autocast = None,
        seed: int | None = 0,
        transport: str | Transport | None = None,
        timeout_s: float = 300.0,
    ):
        """`layers` has one entry per layer of the plan; factories are called on the ranks that need them only,
        under a seed of their own. `loss_fn(output, target)` gives the scalar loss of one micro-batch.

        `costs` times the lowering (default: equal layers). `mesh` has a dimension "pp" and maybe "dp"; or give
        the groups. `tied` lists parameters that are one, as `layer.name`: `[("0.weight", "9.weight")]`; modules
        may say so themselves (`tied_to`), and shared Parameter objects in `layers` are found. `autocast`: a dtype
        or a context for forwards. `seed=None` leaves random numbers to the global generators. `transport`:
        "gloo", "nccl", "cuda_ipc" or "strict" (default: by backend). `timeout_s` bounds every wait.
        """
        if timeout_s <= 0:
            raise OctoPipeError(f"timeout_s is {timeout_s}; give a number of seconds > 0")
        self.world = world = World.make(group, dp_group, mesh)
        program = plan if isinstance(plan, Program) else None
        self.plan = plan = plan.plan if isinstance(plan, Program) else plan.check()
        if plan.num_ranks != world.size:
            raise OctoPipeError(f"the plan has {plan.num_ranks} ranks, the process group {world.size}; use as many")
        if len(layers) != plan.num_layers:
            raise OctoPipeError(f"{len(layers)} layers for a plan of {plan.num_layers}; use the plan's own model")
        self.costs = costs
        if program is None:
            times = costs or CostTable.uniform(num_layers=plan.num_layers, p2p_ms=0.05)
            program = lower(plan, times, channel=channel, check=False)
        self.program = program
        self.rank = world.rank
        self.device = torch.device(device) if device is not None else world.default_device()
        self.timeout_s = timeout_s
        self.loss_scale = 1.0
        """Multiplies the loss's gradient (for float16); divide it out of the gradients before the optimizer."""
        self.step_number = 0
        """Steps made; random numbers depend on it. Set it when resuming."""
        self.losses: Tensor | None = None
        """The last step's losses, one per micro-batch, on every rank."""
        mine = rank_program(program, self.rank)
        self.layers = Layers(layers, plan, world, self.device, tied=tied, seed=seed)
        self.layers.synchronise()
        groups = {h: world.subgroup(h) for h in self.layers.holder_sets()}
        self.reducer = Reducer(plan, self.rank, self.layers.shared(), groups, world.dp_group, timeout_s=timeout_s)
        self.board = Board(world.store(), board_name(world), self.rank, world.size)
        self.recorder = Recorder(len(plan.orders[self.rank]), self.device)
        self.transport = make_transport(transport, world, program, self.device, timeout_s)
        self.executor = Executor(
            mine,
            self.layers.modules,
            loss_fn,
            self.transport,
            board=self.board,
            recorder=self.recorder,
            seed=seed,
            replica=world.replica,
            autocast=_autocast(autocast, self.device),
            timeout_s=timeout_s,
            layers_done=self.reducer.layers_done if self.reducer.buckets else None,
        )
        self._watchdog: Watchdog | None = None
        if world.size > 1:
            self._watchdog = Watchdog(
                self.board,
                self.executor.pending,
                timeout_s=timeout_s,
                device_busy=self._device_busy if self.device.type == "cuda" else None,
                dead=self.transport.dead,
            )

    # -- training --------------------------------------------------------------------------------------

    def step(self, batch: Any = None, target: Any = None, *, reduce_loss: bool = True) -> Tensor | None:
        """Forward and backward of all micro-batches; gradients are added into `.grad`.

        `batch`: a tensor (or tuple or dict of tensors) split along dimension 0 into the plan's micro-batches, or
        a list of one value per micro-batch, of any shapes; only ranks with a first stage look at it. `target`:
        the same for the loss; only ranks with a last stage look at it. Returns the mean loss (float64, on every
        rank; the micro-batches' own are in `losses`), or None with `reduce_loss=False`.
        """
        inputs, targets = self._split(batch, target)
        if self.reducer.buckets:
            self.reducer.begin_step()
        losses = self.executor.run(inputs, targets, step=self.step_number, loss_scale=self.loss_scale)
        self.step_number += 1
        if self.reducer.buckets:
            begin = self.recorder.now()
            self.reducer.finish()
            self.recorder.extras.append(("reduce", begin, self.recorder.now()))
        return self._mean_loss(losses) if reduce_loss else None

    def evaluate(self, batch: Any = None, target: Any = None) -> Tensor:
        """The mean loss of the same micro-batches without gradients (`eval()` switches dropout off first)."""
        inputs, targets = self._split(batch, target)
        return self._mean_loss(self.executor.evaluate(inputs, targets, step=self.step_number))

    def _split(self, batch: Any, target: Any) -> tuple[list[Any] | None, list[Any] | None]:
        mine, count = self.executor.program, self.plan.num_micro_batches
        inputs = split_batch(batch, count, "batch") if mine.needs_batch else None
        targets = split_batch(target, count, "target") if mine.needs_target else None
        if inputs is None and mine.needs_batch:
            raise OctoPipeError(f"rank {self.rank} holds a first stage: give it the batch")
        return inputs, targets

    def _mean_loss(self, losses: Mapping[int, Tensor]) -> Tensor:
        values = torch.zeros(self.plan.num_micro_batches, dtype=torch.float64, device=self.device)
        for m, loss in losses.items():
            values[m] = loss
        # Every loss has one maker and the sum of a number and zeros is that number: no rounding, whatever the plan.
        if self.world.group is not None:
            work = all_reduce(self.world.group, values)
            wait_for(work, self.timeout_s, "the exchange of losses")
        if self.world.dp_group is not None:
            values /= self.world.num_replicas
            work = all_reduce(self.world.dp_group, values)
            wait_for(work, self.timeout_s, "the data-parallel exchange of losses")
        self.losses = values
        return values.mean()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all ranks' gradients so that their global norm is at most `max_norm`; returns the norm before.

        A parameter that several ranks hold counts once. The sum runs in layer order: no plan changes it.
        """
        total = self.grad_norm(norm_type)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return total

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The global norm of all ranks' gradients; a parameter that several ranks hold counts once."""
        norms = self.layers.norms(norm_type)
        group = self.world.group
        if group is not None:
            op = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
            wait_for(all_reduce(group, norms, op), self.timeout_s, "the gradient norm")
        return norms.max() if norm_type == float("inf") else norms.sum() ** (1.0 / norm_type)

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def _device_busy(self) -> bool:
        """Whether a step is being issued or still runs on the GPU."""
        return self.executor.at is not None or not self.recorder.finished()

    # -- the model -------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        return (p for _, p in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters as `layer.name`, each once, in layer order."""
        return iter(self.layers.named.items())

    def modules(self) -> dict[int, nn.Module]:
        """This rank's layers by number."""
        return self.layers.modules

    def train(self, mode: bool = True) -> Pipeline:
        for module in self.layers.modules.values():
            module.train(mode)
        return self

    def eval(self) -> Pipeline:
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """This rank's parameters and buffers as `layer.name`: the same keys under every plan."""
        return self.layers.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's layers; entries of other layers are ignored, missing ones are an error."""
        self.layers.load_state_dict(state)

    def timeline(self, label: str = "") -> Timeline:
        """What the last step did on every rank, on one clock."""
        label = label or str(self.plan.extra.get("system", "")) or "measured"
        return measured_timeline(self.executor.program, self.recorder, self.world.control, self.costs, label)

    def close(self) -> None:
        """Stop the watchdog and give shared buffers back."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        self.transport.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def split_batch(batch: Any, count: int, name: str) -> list[Any] | None:
    """A batch as a list of micro-batches; a list is one already.

    >>> [t.tolist() for t in split_batch(torch.arange(4), 2, "batch")]
    [[0, 1], [2, 3]]
    """
    if batch is None:
        return None
    if isinstance(batch, list):
        if len(batch) != count:
            raise OctoPipeError(f"{name} is a list of {len(batch)} micro-batches; the plan has {count}")
        return batch
    leaves: list[Any] = []
    flatten(batch, leaves)
    columns = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            columns.append([leaf] * count)
            continue
        if leaf.ndim == 0 or leaf.shape[0] % count:
            raise OctoPipeError(
                f"{name} of shape {tuple(leaf.shape)} does not split into {count} equal micro-batches; "
                "give a list of micro-batches"
            )
        columns.append(list(leaf.chunk(count)) if leaf.shape[0] else [leaf] * count)
    if isinstance(batch, Tensor):
        return columns[0]
    return [rebuild(batch, iter([column[m] for column in columns])) for m in range(count)]


def _autocast(wanted: Autocast, device: torch.device) -> Callable[[], AbstractContextManager[Any]] | None:
    if isinstance(wanted, torch.dtype):
        return partial(torch.autocast, device.type, dtype=wanted)
    return wanted
