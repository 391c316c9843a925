"""A plan inside PyTorch's pipeline runtime.

Knows: how a plan's orders and our deadlock-free sends and receives become the actions that PyTorch's runtime executes
(of those, the ones that the installed version has), and how to work around that runtime's limits: micro-batches are
numbered in the order of the last stage (`views/export/pytorch.py`), the mean over micro-batches is taken at the loss
(its own division after the step would also divide what earlier steps left in `.grad`, and a tied parameter once per
stage), and gradients of tied parameters are added up. Does not know: what runs inside a stage, or PyTorch's private
names (`torch_private.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.torch_engine.ties import TIES, OneSum
from octopipe.torch_engine.torch_private import PipelineRuntime, known_actions, load_actions, repair_first_contact
from octopipe.views.export.pytorch import communicating_rows, rows_with, torch_order


class PlanSchedule(PipelineRuntime):
    """PyTorch's runtime with a plan loaded; `step`, `eval` and all other methods are PyTorch's own."""

    notes: tuple[str, ...] = ()
    """The differences from the plan as it was given, one line each."""
    renamed: tuple[int, ...] = ()
    """renamed[m]: the slice of the batch that is used as the plan's micro-batch m."""
    mean: bool = True

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any:
        loss = super()._maybe_get_loss(stage, mb_index)  # type: ignore[no-untyped-call]
        return loss / self._n_microbatches if self.mean and isinstance(loss, Tensor) else loss

    def _step_microbatches(self, *args: Any, **more: Any) -> None:
        sums = OneSum(getattr(self._stages[0], TIES, ()))
        training = self._has_backward
        if training:
            sums.begin()
        super()._step_microbatches(*args, **more)
        if training:
            sums.end(self.rank, self._stages[0].group)


def schedule(
    plan: Plan,
    stages: PipelineStage | Sequence[PipelineStage],
    loss_fn: Callable[..., Tensor] | None,
    *,
    costs: CostTable | None = None,
    scale_grads: bool = True,
    **more: Any,
) -> PlanSchedule:
    """Return the plan as a schedule of torch.distributed.pipelining.

    `stages`: the stages of this rank, from `make_stages` or your own: one per stage of the plan on this rank, numbered
    along the chain. `loss_fn(output, target)`; None: forward only, through `eval`. `costs` determine the order of sends
    and receives (default: the costs that the plan carries). `scale_grads`: whether gradients are those of the mean over
    micro-batches (True) or of the sum. `more` goes to PyTorch's runtime (`args_chunk_spec`, `output_merge_spec`, ...).

    A batch is split into the plan's number of micro-batches along dimension 0, as by any schedule of PyTorch's.
    """
    order = torch_order(plan)
    mine = [stages] if isinstance(stages, PipelineStage) else sorted(stages, key=lambda s: s.stage_index)
    if not mine:
        raise OctoPipeError("no stages; PyTorch's runtime needs at least one on every rank: use fewer ranks")
    _check_stages(order.plan, mine)
    rows = communicating_rows(order.plan, costs)
    out = PlanSchedule(  # type: ignore[no-untyped-call]
        mine, order.plan.num_micro_batches, loss_fn=loss_fn, scale_grads=False, **more
    )
    out.mean, out.notes, out.renamed = scale_grads, order.notes, order.renamed
    for stage in mine:
        repair_first_contact(stage)
    load_actions(out, rows_with(rows, known_actions()))
    for note in order.notes:
        if "renamed" in note:
            warnings.warn(f"octopipe: {note}", stacklevel=2)
    return out


def _check_stages(plan: Plan, stages: Sequence[PipelineStage]) -> None:
    rank, size = stages[0].group_rank, stages[0].group_size
    if size != plan.num_ranks:
        raise OctoPipeError(f"the plan has {plan.num_ranks} ranks, the stages' group {size}; use as many")
    wanted = list(plan.stages_of_rank(rank))
    given = [s.stage_index for s in stages]
    if given != wanted:
        raise OctoPipeError(f"rank {rank} holds stages {wanted} of the plan but was given {given}; make those")
    wrong = next((s for s in stages if s.num_stages != len(plan.stages)), None)
    if wrong is not None:
        raise OctoPipeError(
            f"stage {wrong.stage_index} was made for {wrong.num_stages} stages, the plan has {len(plan.stages)}; make "
            "it for this plan (torch_engine.make_stages)"
        )
