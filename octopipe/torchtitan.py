"""Running plans in torchtitan: `pipelining_fn(plan)` is a value for the field of that name in a ModelSpec.

Knows: the arguments and results of torchtitan's `pipelining_fn` (schedule, model parts, whether this rank has the first
and the last stage), and how its models are split by module names. Does not know: torchtitan itself, which is never
imported: the hook's arguments are sufficient.

    spec = dataclasses.replace(spec, pipelining_fn=octopipe.torchtitan.pipelining_fn(load_plan("tuned.json")))

Plans that torchtitan can run without the hook: `settings(plan)`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.torch_engine import PlanStage, schedule
from octopipe.torch_engine.torch_private import mesh_argument
from octopipe.views.export.pytorch import torch_order
from octopipe.views.export.torchtitan import TitanSettings, module_names, titan_settings

_HEADS = ("lm_head", "output")
"""The names of the output projection in torchtitan's models, newest first."""

Result = tuple[Any, list[nn.Module], bool, bool]


def settings(plan: Plan) -> TitanSettings:
    """Return `module_fqns_per_model_part` and a schedule CSV, with which torchtitan runs the plan without the hook.

    A plan that torchtitan cannot run in this way raises a one-line error that says why.
    """
    return titan_settings(plan)


def pipelining_fn(plan: Plan, *, costs: CostTable | None = None) -> Callable[..., Result]:
    """Return a `pipelining_fn` for torchtitan's ModelSpec that runs this plan.

    Arguments of torchtitan that are not named in `pipeline` below are passed on to the model's own `parallelize_fn`.
    """
    order = torch_order(plan)

    def pipeline(
        model: nn.Module,
        *,
        parallel_dims: Any,
        training: Any,
        parallelism: Any,
        device: torch.device,
        parallelize_fn: Callable[..., nn.Module],
        loss_fn: Callable[..., Any],
        model_config: Any = None,
        **more: Any,
    ) -> Result:
        mesh = parallel_dims.get_mesh("pp")
        if mesh.size() != plan.num_ranks:
            raise OctoPipeError(
                f"the plan has {plan.num_ranks} ranks, and pipeline_parallel_degree is {mesh.size()}; set it to "
                f"{plan.num_ranks}"
            )
        _check_micro_batches(plan, training, parallelism)
        parts = module_names(order.plan, head=_head(model, plan))
        group, rank = mesh.get_group(), mesh.get_local_rank()
        mine = order.plan.stages_of_rank(rank)
        if not mine:
            raise OctoPipeError(f"rank {rank} holds no stage; torchtitan needs one on every rank: use fewer ranks")
        stages, models = [], []
        for number in mine:
            part = parallelize_fn(
                model_part(model, parts[number]),
                parallel_dims=parallel_dims,
                training=training,
                parallelism=parallelism,
                **more,
            )
            models.append(part)
            mesh_finder = mesh_argument(_mesh_finder(parallel_dims))
            stages.append(PlanStage(part, number, len(parts), device, group=group, **mesh_finder))
        made = schedule(plan, stages, _scalar(loss_fn), costs=costs, scale_grads=False)
        return made, models, mine[0] == 0, mine[-1] == len(parts) - 1

    return pipeline


def _check_micro_batches(plan: Plan, training: Any, parallelism: Any) -> None:
    """Raise unless torchtitan makes as many micro-batches as the plan has.

    Releases up to 0.3 configure the number of sequences per micro-batch instead of `num_pp_microbatches`.
    """
    given = getattr(parallelism, "num_pp_microbatches", None)
    if given is not None:
        if given != plan.num_micro_batches:
            raise OctoPipeError(
                f"num_pp_microbatches is {given}, the plan has {plan.num_micro_batches} micro-batches; set it to that"
            )
        return
    size = parallelism.pipeline_parallel_microbatch_size
    if training.local_batch_size != size * plan.num_micro_batches:
        raise OctoPipeError(
            f"local_batch_size {training.local_batch_size} in micro-batches of {size}; the plan has "
            f"{plan.num_micro_batches}: set local_batch_size to {size * plan.num_micro_batches}"
        )


def _head(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """Return the names of the modules after the blocks; raise OctoPipeError unless the model has the plan's layers."""
    children = dict(model.named_children())
    blocks = children.get("layers")
    head = next((name for name in _HEADS if name in children), None)
    if blocks is None or head is None or "tok_embeddings" not in children or "norm" not in children:
        raise OctoPipeError(
            f"the model has modules {', '.join(children)}; a plan cuts torchtitan's tok_embeddings, layers, norm and "
            f"{' or '.join(_HEADS)}"
        )
    other = sorted(set(children) - {"tok_embeddings", "layers", "norm", head})
    if other and any(p.requires_grad for name in other for p in children[name].parameters()):
        raise OctoPipeError(f"the model trains {', '.join(other)} too, which no layer of the plan is; it cannot be cut")
    if len(blocks) != plan.num_layers - 2:  # type: ignore[arg-type]
        raise OctoPipeError(
            f"the model has {len(blocks)} blocks, the plan {plan.num_layers - 2} between embedding and head; "  # type: ignore[arg-type]
            "use the plan's own model"
        )
    return ("norm", head)


def model_part(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return a copy of the model with only these modules. Other children with parameters are None, other blocks are
    left out of their container; the blocks of a ModuleDict keep their names."""
    keep = set(names)
    memo: dict[int, Any] = {}
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            for key, block in child.named_children():
                if f"{name}.{key}" not in keep:
                    memo[id(block)] = None  # deepcopy then takes None for this block instead of copying it
        elif name not in keep and any(True for _ in child.parameters()):
            memo[id(child)] = None
    part = copy.deepcopy(model, memo)
    for name, child in list(part.named_children()):
        if isinstance(child, nn.ModuleDict):
            for key in [k for k, block in child.items() if block is None]:
                del child[key]
        elif isinstance(child, nn.ModuleList):
            setattr(part, name, type(child)([block for block in child if block is not None]))
    return part


def _scalar(loss_fn: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return only the loss of a loss function that, as some of torchtitan's, returns it with metrics."""

    def loss(*args: Any, **more: Any) -> Tensor:
        out = loss_fn(*args, **more)
        return out[0] if isinstance(out, tuple) else out

    return loss


def _mesh_finder(parallel_dims: Any) -> Callable[..., Any]:
    """Return the function with which a stage looks up the device mesh of a DTensor that was sent as a plain tensor."""

    def find(names: tuple[str, ...], layout: Any = None) -> Any:
        mesh = parallel_dims.get_mesh(list(names))
        return None if layout is not None and mesh._layout != layout else mesh

    return find
