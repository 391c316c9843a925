"""A plan as Megatron-Core's forward-backward function: the same keyword arguments, any partition, placement, order.

Knows: Megatron's signature, the conditions between a plan and its model chunks, how a step ends (ties, reduction,
finalization). Does not know: how a step executes the program (`walk.py`), how weight gradients are deferred
(`weights.py`), where stages are placed (`placing.py`).

Visible differences from Megatron's schedules: losses are returned by micro-batch, whatever the order; sends and
receives follow our proven order over our own transports; a stage that the plan recomputes keeps only its input and runs
its forward again at R, in addition to the effect of Megatron's own recomputation flags.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.costs.mode import mode_from_object
from octopipe.costs.table import CostTable
from octopipe.megatron.placing import for_megatron
from octopipe.megatron.profiling import precision_of_chunks
from octopipe.megatron.reduction import megatron_groups, no_sync, start_reduction
from octopipe.megatron.ties import add_up, local_ties
from octopipe.megatron.walk import Walk
from octopipe.megatron.weights import Split
from octopipe.plans.plan import Plan
from octopipe.plans.setting import MODE, checkpointed_by_prices, lowering_costs, priced_recomputation
from octopipe.runtime.measured import Recorder, measured_timeline
from octopipe.runtime.ranks.world import World
from octopipe.runtime.slots import RankProgram, rank_program
from octopipe.runtime.wire.transports import Transport, make_transport
from octopipe.simulation.lowering import Channel, lower
from octopipe.simulation.timeline import Timeline

_log = logging.getLogger("octopipe.megatron")


def forward_backward_func(
    plan: Plan,
    *,
    costs: CostTable | None = None,
    channel: Channel = "directed",
    transport: str | Transport | None = None,
    timeout_s: float = 600.0,
    record: bool = False,
) -> ForwardBackward:
    """Return the counterpart of `get_forward_backward_func()` for this plan.

    `costs` determine the order of sends and receives (default: those stored in the plan). `transport`: "nccl", "gloo",
    "cuda_ipc" (ranks that share a GPU); default: by the pipeline group's backend. The model chunks must be those of
    `build_chunks(plan, ...)`: a rank's stages along the chain, with ranks numbered as by `for_megatron`. `record`: time
    every op of a training step; the function's `timeline()` then returns the last step as a `Timeline` (all ranks of
    the pipeline call it), to be saved, drawn or compared with the prediction.
    """
    driver = PlanDriver(
        for_megatron(plan), costs=costs, channel=channel, transport=transport, timeout_s=timeout_s, record=record
    )
    return ForwardBackward(driver)


class ForwardBackward:
    """A plan in the place of Megatron's own schedules: called with the same arguments, it returns the same values."""

    def __init__(self, driver: PlanDriver):
        self._driver = driver
        self.plan = driver.plan

    def __call__(
        self,
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
        return self._driver.step(
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

    def timeline(self, label: str = "") -> Timeline:
        """Return the measured timeline of the last training step on all ranks (collective over the pipeline)."""
        return self._driver.timeline(label)

    def close(self) -> None:
        """Release the resources that the transport holds outside this process."""
        self._driver.close()


class PlanDriver:
    """Runs one rank's program on Megatron's chunks. It is prepared in the first step, when the process groups are
    known."""

    def __init__(
        self,
        plan: Plan,
        *,
        costs: CostTable | None,
        channel: Channel,
        transport: str | Transport | None,
        timeout_s: float,
        record: bool = False,
    ):
        self.plan = plan
        self.program = lower(plan, lowering_costs(plan) if costs is None else costs, channel=channel)
        self._costs, self._record = costs, record
        self._recorder: Recorder | None = None
        self._wanted, self._timeout_s = transport, timeout_s
        self._mine: RankProgram | None = None
        self._transport: Transport | None = None
        self._splits: dict[int, Split] = {}
        """The weight-gradient split of each stage that has I ops, by stage."""
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
            raise OctoPipeError(
                f"the plan has {self.plan.num_ranks} ranks, Megatron's pipeline {group.size()}; use as many"
            )
        self._check_models(models, rank)
        world = World(group if group.size() > 1 else None)
        parameter = next((p for m in models for p in m.parameters()), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        self._mine = rank_program(self.program, rank)
        self._transport = make_transport(self._wanted, world, self.program, device, self._timeout_s)
        self._transport.open(self._mine)
        self._world, self._device = world, device
        if self._record:
            self._recorder = Recorder(len(self.plan.orders[rank]), device)

    def _check_models(self, models: Sequence[Any], rank: int) -> None:
        stages = self.plan.stages_of_rank(rank)
        if len(models) != len(stages):
            raise OctoPipeError(
                f"rank {rank} holds {len(stages)} stages of the plan but {len(models)} model chunks; make them with "
                "octopipe.megatron.build_chunks"
            )
        self._check_recomputation(models)
        self._report_other_precision(models, rank)
        self._models = list(models)
        self._splits = {}
        for number, model in zip(stages, models):
            if any(op.stage == number and op.kind == "I" for op in self.plan.orders[rank]):
                self._splits[number] = split = Split(model)
                self._check_engine(split, number, rank)

    def _check_recomputation(self, models: Sequence[Any]) -> None:
        """Raise an error unless Megatron's flags recompute what the plan's costs assume: without them a run needs more
        memory than was planned."""
        from megatron.core.utils import get_model_config

        wanted = priced_recomputation(self.plan)
        if wanted == "none" or not models:
            return
        config = get_model_config(models[0])
        found = getattr(config, "recompute_granularity", None)
        again = set(checkpointed_by_prices(self.plan))
        most = max(len(again & set(range(stage.first, stage.stop))) for stage in self.plan.stages)
        in_blocks = found == "full" and getattr(config, "recompute_method", None) == "block"
        layers = getattr(config, "recompute_num_layers", None) or 0
        if in_blocks and layers < most:
            said = f"recompute_num_layers is {layers} for chunks with up to {most} recomputed layers"
        elif found in ("full", wanted):
            return
        else:
            said = f"recompute_granularity is {found}"
        flags = {
            "full": "recompute_granularity='full', recompute_method='uniform', recompute_num_layers=1",
            "selective": "recompute_granularity='selective'",
        }[wanted]
        raise OctoPipeError(
            f"the plan was priced with --recompute {wanted}, and this model's {said}, so it needs more memory than the "
            f"plan says: set {flags} (`octopipe export PLAN --to megatron` prints the flags), or tune with --recompute "
            "none"
        )

    def _report_other_precision(self, models: Sequence[Any], rank: int) -> None:
        """Warn once if the plan was made from times in another precision, because its predictions are not for this
        run."""
        from megatron.core.utils import get_model_config

        measured = mode_from_object(self.plan.extra.get(MODE), "the plan")
        if measured is None or rank != 0 or not models:
            return
        running = precision_of_chunks(get_model_config(models[0]), models)
        if measured.precision != running:
            _log.warning(
                "the plan was made from times measured in %s, and these chunks compute in %s: its predicted times do "
                "not apply to this run; measure these chunks with octopipe.megatron.profile and tune again",
                measured.precision,
                running,
            )

    def _check_engine(self, split: Split, number: int, rank: int) -> None:
        """Raise an error if W would run in another order than I: Transformer Engine computes deferred weight gradients
        first in, first out."""
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
        groups = pg_collection or megatron_groups()
        if self._mine is None:
            self._open(models, groups.pp)
        elif len(models) != len(self._models) or any(a is not b for a, b in zip(models, self._models)):
            self._check_models(models, self._mine.rank)
        assert self._mine is not None and self._transport is not None
        config = get_model_config(models[0])
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        walk = Walk(
            self.plan,
            self._mine,
            self._transport,
            self._models,
            self._splits,
            forward_step_func,
            data_iterator,
            config,
            cp_size=groups.cp.size(),
            device=self._device,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            force_all_reduce=force_all_reduce,
            recorder=None if forward_only else self._recorder,
        )
        if forward_only:
            with torch.no_grad():
                walk.forward_only()
        else:
            for split in self._splits.values():
                split.take_over()  # a profile, or another plan's driver, may have taken over the layers since
            with no_sync(config, models):
                walk.train()
            self._finish(config, groups, walk.num_tokens, force_all_reduce)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return [item for _, item in sorted(walk.losses.items())]

    def _finish(self, config: Any, groups: Any, num_tokens: Tensor, force_all_reduce: bool) -> None:
        """Add the gradients of tied embeddings, reduce over data-parallel ranks, and call Megatron's own
        finalization."""
        assert self._mine is not None
        add_up(local_ties(self.plan, self._mine.rank, self._models))
        for model in self._models:
            start_reduction(model, force_all_reduce)
        if config.finalize_model_grads_func is None:
            return
        tokens = None
        if config.calculate_per_token_loss:
            tokens = num_tokens
            last = self.plan.stages[-1].rank
            if groups.pp.size() > 1 and last != groups.pp.size() - 1:  # Megatron takes it from its last rank
                root = torch.distributed.get_global_rank(groups.pp, last)
                torch.distributed.broadcast(tokens, src=root, group=groups.pp)
        more = {"pg_collection": groups, "force_all_reduce": force_all_reduce}
        known = inspect.signature(config.finalize_model_grads_func).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            more = {name: value for name, value in more.items() if name in known}
        config.finalize_model_grads_func(self._models, tokens, **more)

    def timeline(self, label: str = "") -> Timeline:
        """Return the measured timeline of the last training step on all ranks, with a common clock (collective over the
        pipeline)."""
        if not self._record:
            raise OctoPipeError("ops were not timed; make the function with forward_backward_func(plan, record=True)")
        if self._mine is None or self._recorder is None:
            raise OctoPipeError("no step was run yet; call timeline() after a training step")
        label = label or str(self.plan.extra.get("system", "")) or "measured"
        return measured_timeline(self._mine, self._recorder, self._world.control, self._costs, label)

    def close(self) -> None:
        """Release the resources that the transport holds outside this process."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._mine = None
