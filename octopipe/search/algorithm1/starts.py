"""Initial plans of Algorithm 1: 1F1B as in the paper, a user's plan, and the plans of published systems.

Knows: how to find a first plan that fits. Does not know: phases.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.algorithm1.candidate import Candidate, Evaluator
from octopipe.search.algorithm1.placement import balanced_stages
from octopipe.search.algorithm1.structure import derived, layer_times, retimed, rule_keys
from octopipe.search.does_not_fit import does_not_fit_error
from octopipe.search.systems.registry import build_plan, systems
from octopipe.simulation.simulator import simulate

SLOW_SYSTEMS = frozenset({"tessel", "optpipe", "pipe-offload"})
"""Systems that are not used as starts: their own search takes too long, or they have the order of another system."""
FIRST_SYSTEMS = ("1f1b", "mist", "zb-h1", "zb-v")
"""Systems that are always built: quick ones of each kind, and one that recomputes if memory is short."""
EARLY_SYSTEMS = ("zb-h2", "dualpipe", "dualpipev", "v-half", "chimera", "dapple")
"""Systems that are built next, as long as there is time."""
LATE_SYSTEMS = ("hanayo", "interleaved", "breadth-first", "tessel-fast", "adapipe")
"""Systems that are built last, because they take longest."""


def published(
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    until: float = float("inf"),
    recompute: bool = True,
    skip: frozenset[str] = frozenset(),
) -> Iterator[tuple[str, Plan]]:
    """Yield names and plans of published systems, with a split backward. After the time `until` on the monotonic clock,
    only those of `FIRST_SYSTEMS` are built."""
    known = (*FIRST_SYSTEMS, *EARLY_SYSTEMS, *LATE_SYSTEMS)
    others = (n for n in systems() if n not in known)
    for name in (*FIRST_SYSTEMS, *EARLY_SYSTEMS, *others, *LATE_SYSTEMS):
        if name in SLOW_SYSTEMS or name in skip or (time.monotonic() >= until and name not in FIRST_SYSTEMS):
            continue
        try:
            plan = build_plan(name, costs, num_ranks, num_micro_batches, split_backward=True)
        except (OctoPipeError, ImportError):
            continue
        if recompute or not any(s.recompute for s in plan.stages):
            yield name, plan


def one_f_one_b_plan(costs: CostTable, num_ranks: int, num_micro_batches: int) -> Plan:
    """1F1B with stages of equal numbers of layers and a split backward."""
    return build_plan("1f1b", costs, num_ranks, num_micro_batches, split_backward=True)


def one_f_one_b(evaluator: Evaluator) -> Candidate | None:
    """Return the paper's initial plan as a candidate; None if it does not fit."""
    plan = one_f_one_b_plan(evaluator.costs, evaluator.num_ranks, evaluator.num_micro_batches)
    return evaluator.view(evaluator.state(plan))


def something_that_fits(evaluator: Evaluator, may_recompute: bool) -> Candidate:
    """Return the fastest initial plan that fits if 1F1B does not: layers balanced by time or by bytes, with fewer
    micro-batches in flight and, only if necessary, recomputation. Raises DoesNotFitError if none fits."""
    costs, ranks = evaluator.costs, evaluator.num_ranks
    one = one_f_one_b_plan(costs, ranks, evaluator.num_micro_batches)
    st = evaluator.state(one)
    starts = layer_times(evaluator, st, simulate(one, costs, check=False).spans.start_ms)
    bytes_ = costs.static_bytes + costs.activation_bytes
    found: Candidate | None = None
    for again in (False, True) if may_recompute else (False,):
        for need in (evaluator.layer_ms, bytes_, costs.static_bytes + costs.boundary_bytes):
            for more in (1, 2, 3):
                for wave in (False, True) if more > 1 else (False,):
                    if not ranks * more <= evaluator.max_stages or not float(need.sum()) > 0:
                        continue
                    stages = balanced_stages(evaluator, ranks * more, wave, again, need)
                    moved, keys = retimed(evaluator, st, starts, stages)
                    for rule in (keys, *rule_keys(evaluator, stages)):
                        for order in derived(evaluator, moved, rule):
                            ms, order = evaluator.judge(order, np.inf if found is None else found.step_ms)
                            seen = evaluator.view(order) if ms < np.inf else None
                            if seen is not None and (found is None or seen.step_ms < found.step_ms):
                                found = seen
        if found is not None:
            return found
    raise does_not_fit_error(costs, ranks, may_recompute)
