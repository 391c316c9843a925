"""The placement of a plan's stages for Megatron-Core: its layout class with any placement, chunks, embedding ranks.

Knows: that Megatron's first stage is on pipeline rank 0 and, unless it is there too, its last one on the last
rank; that a rank's chunks are its stages along the chain (chunk k is `vp_stage` k); how to subclass its layout so
that layer numbers follow the plan instead of a round robin. Does not know: orders (`driver.py`).

Layer 0 of a plan is the embedding and its last layer head and loss, with multi-token prediction (P) before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.views.export.megatron import MegatronLayout, megatron_layout


def for_megatron(plan: Plan) -> Plan:
    """Return the plan with its ranks renumbered as Megatron requires: the first stage on rank 0, the last on the last
    rank if it is not on rank 0 too.

    Its stages are numbered along the chain. Renumbering changes nothing unless your ranks differ in speed.
    """
    plan.check()
    if plan.forks:
        raise OctoPipeError(
            "Megatron-Core's chunks form one chain; this plan's paths fork or join: use `octopipe train`"
        )
    if plan.offloads:
        raise OctoPipeError(
            "activations of Megatron-Core's chunks are not moved to host memory here, which this plan needs to fit; "
            "plan without --offload"
        )
    if len(plan.routes) > 1:
        raise OctoPipeError(
            f"Megatron-Core's chunks form one chain; this plan has {len(plan.routes)} routes: use `octopipe train`"
        )
    route = plan.routes[0]
    idle = [r for r in range(plan.num_ranks) if not plan.orders[r]]
    if idle:
        raise OctoPipeError(f"rank {idle[0]} holds no stage; Megatron-Core needs one on every rank: use fewer ranks")
    first, last = plan.stages[route[0]].rank, plan.stages[route[-1]].rank
    ends = {first, last}
    old = [first, *(r for r in range(plan.num_ranks) if r not in ends), *([last] if last != first else [])]
    new = {rank: k for k, rank in enumerate(old)}
    number = {stage: k for k, stage in enumerate(route)}
    stages = [plan.stages[s] for s in route]
    return Plan(
        model=plan.model,
        num_layers=plan.num_layers,
        num_ranks=plan.num_ranks,
        num_micro_batches=plan.num_micro_batches,
        stages=tuple(Stage(first=s.first, stop=s.stop, rank=new[s.rank], recompute=s.recompute) for s in stages),
        orders=tuple(tuple(Op(number[op.stage], op.kind, op.micro_batch) for op in plan.orders[rank]) for rank in old),
        pairs=frozenset((a._replace(stage=number[a.stage]), b._replace(stage=number[b.stage])) for a, b in plan.pairs),
        extra=plan.extra,
    )


def virtual_size(plan: Plan) -> int | None:
    """Return `virtual_pipeline_model_parallel_size`: the most chunks that any rank has, or None if that is one."""
    most = max(len(plan.stages_of_rank(r)) for r in range(plan.num_ranks))
    return most if most > 1 else None


def embedding_ranks(plan: Plan) -> Callable[..., list[int]]:
    """Return the function for `initialize_model_parallel(get_embedding_ranks=...)`: the ranks with the word embedding.

    If embedding and head lie on one rank (a V), this is only that rank: `forward_backward_func` adds their gradients.
    """
    plan = for_megatron(plan)
    apart = plan.stages[0].rank != plan.stages[-1].rank

    def ranks(pp_ranks: Sequence[int], *_: Any) -> list[int]:
        return [pp_ranks[0], pp_ranks[-1]] if apart else [pp_ranks[0]]

    return ranks


def symbols_of(plan: Plan) -> str:
    """Return one letter per layer: those of the preset that the plan was made for, or E, T, ..., T, L."""
    from octopipe.models.zoo import PRESETS

    if plan.model in PRESETS:
        pattern = PRESETS[plan.model]().pattern
        if len(pattern) == plan.num_layers:
            return pattern
    return "E" + "T" * (plan.num_layers - 2) + "L" if plan.num_layers > 1 else "L"


def layout(plan: Plan, symbols: str | None = None) -> MegatronLayout:
    """Return the plan as flags for Megatron's own schedules. Raises an error with the reason if no flags can express
    it."""
    return megatron_layout(plan, symbols or symbols_of(plan))


def placement(plan: Plan, *, mtp_layers: int = 0) -> Any:
    """Return the value of `config.pipeline_model_parallel_layout`: the layers of every chunk of this plan, under any
    placement.

    `mtp_layers`: how many of the plan's layers before the last are multi-token prediction.
    """
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    plan = for_megatron(plan)
    names = [LayerType.embedding, *[LayerType.decoder] * (plan.num_layers - 2 - mtp_layers)]
    names += [*[LayerType.mtp] * mtp_layers, LayerType.loss]
    if plan.num_layers < 2 + mtp_layers:
        raise OctoPipeError(f"a plan of {plan.num_layers} layers; Megatron's models have an embedding and a loss")
    homes = [plan.stages_of_rank(r) for r in range(plan.num_ranks)]
    depth = virtual_size(plan) or 1

    class PlanLayerLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
        """Megatron's layout with the plan's placement."""

        def __init__(self) -> None:
            self.input_data = "an OctoPipe plan"
            self.pipeline_model_parallel_size = plan.num_ranks
            self.virtual_pipeline_model_parallel_size = depth
            self.layout = [
                [
                    names[plan.stages[mine[k]].first : plan.stages[mine[k]].stop] if k < len(mine) else []
                    for k in range(depth)
                ]
                for mine in homes
            ]
            self.flatten_layout = list(names)

        def validate_layer_layout(self, num_layers: int, mtp_num_layers: int) -> bool:
            decoders = names.count(LayerType.decoder)
            if decoders != num_layers or (mtp_num_layers or 0) != mtp_layers:
                raise OctoPipeError(
                    f"the plan has {decoders} decoder and {mtp_layers} prediction layers, Megatron's config "
                    f"{num_layers} and {mtp_num_layers or 0}; use the plan's own model"
                )
            holders = [s for s in plan.stages if LayerType.mtp in names[s.first : s.stop]]
            if len(holders) > 1:
                raise OctoPipeError("prediction layers in two stages; Megatron-Core runs all of them in one")
            return bool(holders) and holders[0] is not plan.stages[-1]

        def get_layer_offset(
            self, layer_type: Any = LayerType.decoder, vp_stage: Any = None, pp_rank: Any = None
        ) -> int:
            from megatron.core import parallel_state

            rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
            chunk = vp_stage or 0
            if chunk >= len(homes[rank]):
                return names.count(layer_type)
            return names[: plan.stages[homes[rank][chunk]].first].count(layer_type)

        def pretty_repr(self) -> str:
            rows = enumerate(plan.stages)
            return "\n".join(f"stage {k}: rank {s.rank}, layers {s.first}-{s.stop - 1}" for k, s in rows)

    return PlanLayerLayout()


def build_chunks(plan: Plan, provider: Callable[..., Any], *, pp_rank: int | None = None) -> list[Any]:
    """Build this rank's model chunks by calling `provider(pre_process=, post_process=, vp_stage=)` once per stage.

    A provider with a parameter `layers` receives the stage's layers as a range (the embedding is 0); one with a
    parameter `stage` receives the `Stage`. If embedding and head lie on one rank, the head starts as a copy of the
    embedding it is tied to.
    """
    from megatron.core import parallel_state

    plan = for_megatron(plan)
    rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
    names = inspect.signature(provider).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in names.values())
    chunks = []
    for k, number in enumerate(plan.stages_of_rank(rank)):
        stage = plan.stages[number]
        more: dict[str, Any] = {
            "vp_stage": k if virtual_size(plan) else None,
            "layers": range(stage.first, stage.stop),
            "stage": stage,
        }
        more = {name: value for name, value in more.items() if name in names or (any_name and name == "vp_stage")}
        last = number == len(plan.stages) - 1
        chunks.append(provider(pre_process=number == 0, post_process=last, **more))
    from octopipe.megatron.ties import local_ties

    for tie in local_ties(plan, rank, chunks):
        for other in tie[1:]:
            other.data.copy_(tie[0].data)
    return chunks
