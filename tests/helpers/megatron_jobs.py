"""What ranks with Megatron-Core run for the tests, and the plans that they run.

Knows: Megatron-Core's own result without a pipeline, and how a plan's gradients and losses are compared with it. Does
not know: which plans are compared. Megatron-Core is imported by the functions that need it, on the ranks.
"""

from __future__ import annotations

import random
from functools import cache

import megatron_models as mm
import torch
from random_plans import random_plan
from ranks import PATIENCE_S

from octopipe import megatron
from octopipe.costs.table import CostTable
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune

LAYERS = mm.DECODERS + 2
PATTERN = "M-*M-*"
TOLERANCE = 1e-10
IMPORTS = (
    "megatron_jobs",
    "megatron_dispatchers",
    "octopipe.megatron.driver",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.mamba",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel.schedules",
)
"""Eight seconds of one core; ranks are forked from a process that has them."""


# -- jobs: run on every rank ---------------------------------------------------------------------------


def model_of(kind, config, tied, **flags):
    if kind == "hybrid":
        layers = flags.pop("layers", range(LAYERS))
        flags.pop("vp_stage", None)
        pattern = "".join(PATTERN[k - 1] for k in layers if 1 <= k <= mm.DECODERS)
        return mm.hybrid(config, pattern, tied=tied, **flags)
    flags.pop("layers", None)
    return mm.gpt(config, tied=tied, **flags)


_REFERENCES = {}


def reference(kind, count, tied, more):
    """Losses, gradients and weights of Megatron's own schedule without a pipeline."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    key = kind, count, tied, tuple(sorted(more.items()))
    if key not in _REFERENCES:
        mm.start(1)
        config = mm.gpt_config(1, None, None, kind=kind, **more)
        torch.manual_seed(3)
        model = model_of(kind, config, tied, pre_process=True, post_process=True)
        found = forward_backward_no_pipelining(
            forward_step_func=mm.forward_step,
            data_iterator=iter(mm.batches(count)),
            model=model,
            num_microbatches=count,
            seq_length=mm.LENGTH,
            micro_batch_size=2,
        )
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        _REFERENCES[key] = [float(x["loss"]) for x in found], grads, weights
    return _REFERENCES[key]


def expected(name, grads, weights):
    """The whole model's entry for a chunk's parameter: a tied head is the embedding."""
    if name == "output_layer.weight" and name not in weights:
        name = "embedding.word_embeddings.weight"
    return grads.get(name), weights[name]


def run_plan(world, plan, kind="gpt", tied=False, ddp=None, steps=1, **more):
    """(worst gradient error, worst loss error) of this rank under the drop-in."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    more = dict(more)
    mtp = more.get("mtp_num_layers", 0)
    losses, grads, weights = reference(kind, plan.num_micro_batches, tied, more)
    plan = megatron.for_megatron(plan)
    pp, virtual = plan.num_ranks, megatron.virtual_size(plan)
    mm.start(pp, virtual=virtual, embedding_ranks=megatron.embedding_ranks(plan))
    layout = None if kind == "hybrid" else megatron.placement(plan, mtp_layers=mtp)
    config = mm.gpt_config(pp, virtual, layout, kind=kind, **more)
    if kind == "hybrid":
        mm.alone()

    def provider(pre_process, post_process, vp_stage, layers):
        more = {"layers": layers} if kind == "hybrid" else {}
        return model_of(
            kind, config, tied, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage, **more
        )

    chunks = megatron.build_chunks(plan, provider)
    from megatron.core import parallel_state

    rank = parallel_state.get_pipeline_model_parallel_rank()
    firsts = [max(plan.stages[s].first - 1, 0) for s in plan.stages_of_rank(rank)]
    for chunk, first in zip(chunks, firsts):
        for name, p in chunk.named_parameters():
            p.data.copy_(expected(mm.global_name(name, first), grads, weights)[1])
    models = chunks
    if ddp is not None:
        options = DistributedDataParallelConfig(
            overlap_grad_reduce=ddp == "overlapped", use_distributed_optimizer=False, grad_reduce_in_fp32=False
        )
        models = [
            DistributedDataParallel(config=config, ddp_config=options, module=c, disable_bucketing=k > 0)
            for k, c in enumerate(chunks)
        ]
        config.finalize_model_grads_func = finalize_model_grads
    step = megatron.forward_backward_func(plan, timeout_s=PATIENCE_S)
    batches = mm.batches(plan.num_micro_batches)

    def losses_of(**more):
        return step(
            forward_step_func=mm.forward_step,
            data_iterator=[iter(batches) for _ in models],
            model=models,
            num_microbatches=plan.num_micro_batches,
            seq_length=mm.LENGTH,
            micro_batch_size=2,
            **more,
        )

    for _ in range(steps):
        for m in models if ddp is not None else []:
            m.zero_grad_buffer()
        for c in chunks if ddp is None else []:
            c.zero_grad(set_to_none=True)
        found = losses_of()
    only = losses_of(forward_only=True)
    step.close()
    loss_error = max((abs(float(a["loss"]) - b) for a, b in zip(found, losses)), default=0.0)
    loss_error = max([loss_error, *(abs(float(a["loss"]) - b) for a, b in zip(only, losses))])
    assert len(found) == len(only) == (plan.num_micro_batches if rank == plan.stages[-1].rank else 0)
    worst = 0.0
    for chunk, first in zip(chunks, firsts):
        for name, p in chunk.named_parameters():
            want = expected(mm.global_name(name, first), grads, weights)[0]
            own = p.grad if ddp is None else p.main_grad
            if want is None or own is None:
                worst = max(worst, 0.0 if want is None and (own is None or not own.any()) else 1.0)
                continue
            # Without finalize_model_grads copies on two ranks keep their own part; that is Megatron's to add.
            apart = plan.stages[0].rank != plan.stages[-1].rank
            if tied and ddp is None and apart and name.endswith(("word_embeddings.weight", "output_layer.weight")):
                continue
            worst = max(worst, float((own - want).abs().max() / want.abs().max().clamp_min(1e-30)))
    return worst, loss_error


def run_many(world, jobs):
    return [run_plan(world, plan, **more) for plan, more in jobs]


# -- plans ---------------------------------------------------------------------------------------------


def plan_of(name, ranks, micro_batches=4, **more):
    return build_plan(name, CostTable.uniform(num_layers=LAYERS, p2p_ms=0.1), ranks, micro_batches, **more)


def drawn(seed, ranks, **more):
    rng = random.Random(seed)
    while True:
        plan = random_plan(
            rng, num_ranks=ranks, num_layers=LAYERS, num_micro_batches=rng.randint(2, 4), routes=1, **more
        )
        if all(plan.orders) and all(isinstance(s.recompute, bool) for s in plan.stages):
            return plan


@cache
def tuned(ranks, micro_batches=4):
    """What tuning makes of layers as unequal as a hybrid's; moves instead of time: the same plan on any machine."""
    forward = [0.2, *(1.0 + 2.0 * (k % 3 == 1) for k in range(LAYERS - 2)), 2.0]
    weight = [0.2, *(0.5 + 1.5 * (k % 3 == 2) for k in range(LAYERS - 2)), 2.0]
    costs = CostTable.uniform(num_layers=LAYERS, p2p_ms=0.05)
    costs = costs.replace(forward_ms=forward, input_ms=forward, weight_ms=weight)
    return tune(costs, ranks, micro_batches, iterations=500, copies=False, recompute=False).plan


def has_blocks_in_every_stage(plan):
    """What Megatron's hybrid stack asks of a chunk: an embedding or a head alone is none."""
    return all(any(0 < k < LAYERS - 1 for k in range(s.first, s.stop)) for s in plan.stages)
