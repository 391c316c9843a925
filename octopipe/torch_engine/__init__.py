"""PyTorch's own pipeline runtime as a second engine: it runs our plan, with our order of sends and receives, inside
`torch.distributed.pipelining`.

Knows: the two public functions. Does not know: how they work (`engine.py`, `stages.py`).

    stages = torch_engine.make_stages(plan, layers)                   # or your own PipelineStage objects
    schedule = torch_engine.schedule(plan, stages, loss_fn)
    schedule.step(batch, target=target, losses=losses)                # as with any schedule of PyTorch's
"""

from octopipe.torch_engine.engine import PlanSchedule, schedule
from octopipe.torch_engine.stages import PlanStage, make_stages

__all__ = ["PlanSchedule", "PlanStage", "make_stages", "schedule"]
