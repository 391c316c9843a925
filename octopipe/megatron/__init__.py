"""Runs any plan on Megatron-Core, with its model chunks, losses, data and optimizer.

Knows: the public names, loaded on first use (Megatron-Core is imported only then). Does not know: anything else.

    plan = octopipe.megatron.for_megatron(load_plan("tuned.json"))          # ranks as Megatron wants them
    initialize_model_parallel(pipeline_model_parallel_size=plan.num_ranks,
                              virtual_pipeline_model_parallel_size=octopipe.megatron.virtual_size(plan),
                              get_embedding_ranks=octopipe.megatron.embedding_ranks(plan))
    config.pipeline_model_parallel_layout = octopipe.megatron.placement(plan)
    model = octopipe.megatron.build_chunks(plan, model_provider)
    step = octopipe.megatron.forward_backward_func(plan)                    # instead of get_forward_backward_func()
    losses = step(forward_step_func=..., data_iterator=..., model=model, num_microbatches=..., ...)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octopipe.megatron.driver import forward_backward_func
    from octopipe.megatron.on_cpu import use_cpu
    from octopipe.megatron.placing import build_chunks, embedding_ranks, for_megatron, layout, placement, virtual_size
    from octopipe.megatron.profiling import profile
    from octopipe.megatron.tuning import tune_measured

_HOME = {
    "forward_backward_func": "octopipe.megatron.driver",
    "use_cpu": "octopipe.megatron.on_cpu",
    "build_chunks": "octopipe.megatron.placing",
    "embedding_ranks": "octopipe.megatron.placing",
    "for_megatron": "octopipe.megatron.placing",
    "layout": "octopipe.megatron.placing",
    "placement": "octopipe.megatron.placing",
    "profile": "octopipe.megatron.profiling",
    "tune_measured": "octopipe.megatron.tuning",
    "virtual_size": "octopipe.megatron.placing",
}
__all__ = [
    "build_chunks",
    "embedding_ranks",
    "for_megatron",
    "forward_backward_func",
    "layout",
    "placement",
    "profile",
    "tune_measured",
    "use_cpu",
    "virtual_size",
]


if not TYPE_CHECKING:  # a checker reads the names above, and reports all others

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), name)
        raise AttributeError(f"module 'octopipe.megatron' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
