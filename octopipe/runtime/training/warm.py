"""Modules that every rank needs before its first step, loaded once: a fork server imports this module and forks ranks.

Knows: what is slow to load. Optimizers import torch's compiler, and lowering loads its compiled kernels: seconds of
work that every rank would repeat. No tensor is created here, because threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc

import octopipe.runtime.training.train  # noqa: F401
from octopipe.costs.table import CostTable
from octopipe.runtime.torch_private import load_compiler
from octopipe.search.systems import build_plan
from octopipe.simulation.lowering import lower

load_compiler()
with contextlib.suppress(Exception):  # a rank that then has to load them itself reports the error
    _costs = CostTable.uniform(num_layers=2, p2p_ms=0.1)
    lower(build_plan("1f1b", _costs, 2, 2), _costs)
# Loaded objects are never freed. A rank whose garbage collector searched them would take a third of a second each
# time, and would copy all the memory that it shares with the server.
gc.freeze()
