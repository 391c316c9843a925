"""A candidate of the iterative tuners: a structure with op priorities, and the desk on which it is judged.

Knows: how to call the list scheduler, how to see a candidate as a plan with its timeline, and how to keep plans
inside memory. Does not know: phases or moves.

The order O of Algorithm 1 is kept as a priority per op. The list scheduler turns priorities into orders: F and I
run as early as their priority and the memory allow, W fills what is left, and where an F lacks memory, W's that
free it are run first (the paper's advance of F and B, delay of W, and selective advance of W). So an order
survives a change of partition or placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octopipe.cost import CostTable
from octopipe.plan import Plan
from octopipe.simulator import simulate
from octopipe.systems.shapes import even_sizes
from octopipe.timeline import Timeline
from octopipe.tuner.anneal import State, judge, make_state, remove_boundary
from octopipe.tuner.encode import plan_of
from octopipe.tuner.kernels import make_problem, make_scratch
from octopipe.tuner.memory import explain_misfit
from octopipe.tuner.starts import key_presets, neutral_keys, shaped_state, shapes, state_from_plan, usable

Floats = NDArray[np.float64]
_KEYS = 5
"""The first globals are the priorities proper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A state that runs and fits, with everything the next decision reads."""

    state: State
    plan: Plan
    timeline: Timeline
    step_ms: float
    loads_ms: Floats
    """Work of every rank in a step."""

    @property
    def without_imbalance_ms(self) -> float:
        """The step time less what balancing the ranks could win: what placement is judged by."""
        return self.step_ms - excess_ms(self.loads_ms)


def excess_ms(loads_ms: Floats) -> float:
    """How much more than the mean the busiest rank works."""
    return float(loads_ms.max() - loads_ms.mean())


class Desk:
    """Judges states of one setting."""

    def __init__(self, costs: CostTable, num_ranks: int, num_micro_batches: int, max_stages: int) -> None:
        self.costs = costs
        self.problem = make_problem(costs, num_ranks, num_micro_batches)
        self.max_stages = max_stages
        self.margin = np.zeros(num_ranks)
        self.scratch = make_scratch(self.problem, max_stages)
        self.judged = 0

    def copy(self, st: State) -> State:
        return State(*(np.copy(a) for a in st))

    def judge(self, st: State, cutoff_ms: float = np.inf) -> float:
        """Step time; infinite where the state exceeds the cutoff, does not fit or deadlocks."""
        self.judged += 1
        return float(judge(self.problem, st, self.margin, cutoff_ms, self.scratch))

    def stage_loads(self, st: State) -> Floats:
        """Work of every stage in a step, on its rank."""
        p, n = self.problem, int(st.size[0])
        work = np.diff(p.total[st.bounds[: n + 1]])
        if st.recompute[: n - 1].any():
            work[:-1] += np.where(st.recompute[: n - 1], np.diff(p.again[st.bounds[:n]]), 0.0)
        return np.asarray(work * p.slow[st.rank[:n]])

    def loads(self, st: State) -> Floats:
        """Work of every rank in a step."""
        ranks = st.rank[: int(st.size[0])]
        return np.bincount(ranks, self.stage_loads(st), self.problem.num_ranks).astype(np.float64)

    def heads(self, st: State) -> Floats:
        """When the first micro-batch can reach every rank (0 for ranks without stages)."""
        p, n = self.problem, int(st.size[0])
        rank, first = st.rank[:n].tolist(), st.bounds[:n]
        took = (p.fastest[st.bounds[1 : n + 1]] - p.fastest[first]) * p.slow[rank]
        head, at = np.full(p.num_ranks, np.inf), 0.0
        for s in range(n):
            if s and rank[s] != rank[s - 1]:
                at += float(p.latency[rank[s - 1], rank[s]])
            head[rank[s]] = min(head[rank[s]], at)
            at += float(took[s])
        return np.where(np.isfinite(head), head, 0.0)

    def view(self, st: State) -> Candidate | None:
        """The state as the simulator sees it; None where it cannot be made to fit.

        The scheduler's memory model leaves out part of the transfers' buffers; where a peak exceeds a rank's
        memory, that much is kept free from then on.
        """
        for _ in range(4):
            if self.judge(st) == np.inf:
                return None
            plan = plan_of(self.problem, self.costs, st, self.scratch)
            timeline = simulate(plan, self.costs, check=False)
            if timeline.fits:
                return Candidate(
                    state=st, plan=plan, timeline=timeline, step_ms=timeline.step_ms, loads_ms=self.loads(st)
                )
            over = timeline.peak_bytes - np.array(timeline.capacity_bytes)
            self.margin = self.margin + np.where(over > 0, over * 1.01, 0.0)
        return None

    # -- where the search begins -----------------------------------------------------------------------

    def first(self, start: Plan | None, may_recompute: bool) -> Candidate:
        """The given plan, or one stage a rank of as many layers each; mended where it does not fit."""
        if start is not None and usable(start) and len(start.stages) <= self.max_stages:
            found = self.view(state_from_plan(self.problem, self.max_stages, start))
            if found is not None:
                return found
        found = self._keyed(self._even())
        for again in (False, True) if may_recompute else (False,):
            for stages, wave in shapes(self.problem, self.max_stages):
                if found is not None:
                    return found
                st = shaped_state(self.problem, self.max_stages, stages, wave, 0)
                st.recompute[: int(st.size[0])] = again
                found = self._keyed(st)
        if found is None:
            raise explain_misfit(self.costs, self.problem, may_recompute)
        return found

    def _even(self) -> State:
        st = make_state(self.problem, self.max_stages)
        ranks = self.problem.num_ranks
        st.size[0] = ranks
        st.bounds[: ranks + 1] = np.concatenate(([0], np.cumsum(even_sizes(self.costs, ranks))))
        st.rank[:ranks] = range(ranks)
        neutral_keys(st)
        return st

    def _keyed(self, st: State) -> Candidate | None:
        """The state under the best of a few simple priorities."""
        best_ms, best = np.inf, None
        for keys in key_presets(self.problem):
            st.glob[:_KEYS] = keys
            ms = self.judge(st, best_ms)
            if ms < best_ms:
                best_ms, best = ms, keys
        if best is None:
            return None
        st.glob[:_KEYS] = best
        return self.view(st)


def merge_neighbours(st: State) -> None:
    """Join stages that follow each other on one rank: no transfer lies between them."""
    s = 1
    while s < int(st.size[0]):
        if st.rank[s] == st.rank[s - 1] and st.recompute[s] == st.recompute[s - 1]:
            remove_boundary(st, s, s - 1)
        else:
            s += 1
