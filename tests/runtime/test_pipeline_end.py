"""What is left of a pipeline that was closed and dropped."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
from ranks import PATIENCE_S

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402


def given_up(world, steps, splits):
    """Whether a pipeline that is closed and dropped is released without Python's search for circles, and what it held:
    its groups' threads and sockets."""
    gc.collect()
    gc.disable()
    try:
        plan = build_plan("zb-h1" if splits else "1f1b", CostTable.uniform(num_layers=4), world.size, 4)
        with Pipeline([nn.Linear(4, 4) for _ in range(4)], plan, nn.functional.mse_loss, group=world) as pipe:
            for _ in range(steps):
                x = [torch.randn(2, 4) for _ in range(4)]
                pipe.step(x, x)
        kept = [weakref.ref(pipe), weakref.ref(pipe.executor)]
        del pipe
        end = time.monotonic() + PATIENCE_S
        while any(ref() is not None for ref in kept) and time.monotonic() < end:
            time.sleep(0.01)  # the watchdog's second thread ends by itself
        return [ref() is None for ref in kept]
    finally:
        gc.enable()


@pytest.mark.parametrize(("steps", "splits"), [(0, False), (1, False), (3, True)])
def test_a_pipeline_that_is_given_up_is_released_without_a_search_for_circles(steps, splits, two):
    assert two.run(given_up, steps, splits) == [[True, True]] * 2
