"""The tuner: partition, placement and order decided together, under a memory limit and a time budget.

    result = octopipe.tune(costs, num_ranks=8, num_micro_batches=16, budget_s=30)
    result.plan, result.step_ms, result.gap, result.explanation

Methods: `best` (the default), `octopipe` (Algorithm 1 of the paper), `random` (the same moves with phases chosen at
random) and `exact` (CP-SAT, small cases).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from octopipe.search.algorithm1 import PHASES, IterativeSearch, RandomSearch
from octopipe.simulation.bounds.bounds import PlanClass, lower_bound
from octopipe.costs.table import CostTable
from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.search.exact import Solved, solve
from octopipe.search.pairing.choose import with_pairs
from octopipe.search.explain import explain
from octopipe.search.offload import SearchMore, offload_words, with_offload
from octopipe.simulation.hide_transfers import hide_transfers
from octopipe.base.limits import checked_seed
from octopipe.plans.plan import Plan
from octopipe.search.recompute import recomputes, without_needless_recomputation
from octopipe.search.restricted import TARGETS, FixedSchedules, Target
from octopipe.search.systems.registry import check_sizes
from octopipe.search.result import Callback, Found, Progress, Step, TuneResult
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline
from octopipe.search.tuner.robust import mean_jittered_ms, most_robust
from octopipe.search.tuner.search import Search
from octopipe.search.tuner.mechanics import HIDE_MOVES, HIDE_OPS, HIDE_S, HIDE_SHARE
from octopipe.search.tuner.settings import SETTINGS
from octopipe.search.tuner.systems import COPYING
from octopipe.search.tuner.warm import compile_kernels

Method = Literal["best", "octopipe", "random", "exact"]
METHODS: tuple[Method, ...] = ("best", "octopipe", "random", "exact")

__all__ = [
    "METHODS", "PHASES", "TARGETS", "Method", "PlanClass", "Progress", "Step", "Target", "TuneResult", "tune",
]  # fmt: skip


def tune(
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    budget_s: float = 30.0,
    seed: int = 0,
    method: Method = "best",
    start: Plan | None = None,
    robust: bool = False,
    workers: int | None = None,
    iterations: int | None = None,
    progress: Callback | None = None,
    recompute: bool = True,
    copies: bool | None = None,
    cut_head: bool = False,
    offload: bool = False,
    phases: Sequence[str] = PHASES,
    target: Target = "octopipe",
) -> TuneResult:
    """The fastest plan found within the budget; it always fits in memory.

    `recompute` allows activations to be recomputed. `copies` allows several ranks to hold a layer (method "best"; by
    default if the costs contain weights, because copies would otherwise cost nothing). `cut_head` allows the head, and
    with it the embedding, to be split by vocabulary over several ranks (method "best"; docs/cut-head.md). `offload`
    allows activations to be moved to host memory (method "best"; docs/offload.md). `phases` are the phases of
    Algorithm 1 that are switched on (methods "octopipe" and "random"). `target` is the runtime that will run the plan;
    for another runtime than ours, only plans that it can run are searched (`search/restricted.py`, method "best").
    `TuneResult.plans` says for which plans the bound and `optimal` hold. With `iterations` (moves per lane; for method
    "exact", conflicts of the solver) instead of a time, the plan file depends on the seed alone, to its last byte, on
    any machine and with any number of workers.
    """
    _check(costs, num_ranks, num_micro_batches, budget_s, method, start)
    checked_seed(seed)
    _check_method(method, target, phases=tuple(phases), robust=robust, cut_head=cut_head)
    if offload:
        _check_offload(costs, method, target, combined=robust or cut_head)
    ours = target == "octopipe"
    recompute, copies, notes = _what_may_be(costs, method, start, recompute and ours, copies if ours else False)
    compile_kernels(method)
    setting = (costs, num_ranks, num_micro_batches)
    plans = PlanClass(recompute=recompute, copies=copies and method == "best", cuts_head=cut_head, offloads=offload)
    bound_name, bound = lower_bound(*setting, *plans)
    began = time.monotonic()
    options = _Options(
        method=method, target=target, phases=phases, robust=robust, copies=copies, cut_head=cut_head, offload=offload
    )
    common: dict[str, Any] = {"budget_s": budget_s, "seed": seed, "start": start, "recompute": recompute}
    common |= {"progress": progress, "iterations": iterations}
    found, solved, more = _searched(setting, options, common, workers=workers, lower_bound_ms=bound)
    notes += more
    hide = None if target == "megatron" else partial(_hide, costs=costs, budget_s=budget_s, iterations=iterations)
    found, chosen, timeline, mean_ms = _finished(found, costs, robust=robust, seed=seed, hide=hide)
    step_ms = timeline.step_ms
    plans, bound_name, bound = _bound_for(chosen, plans, setting, solved, (bound_name, bound))
    if not plans.copies and method == "best" and target == "octopipe":
        notes += _copies_would_help(found.systems, step_ms)
    log = [_row(step, counted=iterations is not None) for step in found.log]
    promise = {"system": "octopipe", "step_ms": step_ms, "lower_bound_ms": bound, "bound_of": plans.words}
    found_by = {"method": method, "seed": seed, "costs": costs.digest(), "search": log}
    return TuneResult(
        plan=chosen.with_extra(**promise, **found_by),
        step_ms=step_ms,
        lower_bound_ms=bound,
        bound_name=bound_name,
        method=method,
        seconds=time.monotonic() - began,
        iterations=found.iterations,
        log=tuple(found.log),
        explanation=explain(chosen, costs, timeline, bound, bound_name, plans),
        plans=plans,
        systems=dict(found.systems),
        notes=tuple(notes),
        interrupted=found.interrupted,
        optimal=solved is not None and solved.optimal and not costs.exchanges,
        mean_jittered_ms=mean_ms,
        phase_iterations=found.phase_iterations,
        hidden_share=timeline.overlap.rate,
        overlappable_share=timeline.overlap.overlappable_rate,
    )


def _check_method(method: str, target: str, *, phases: tuple[str, ...], robust: bool, cut_head: bool) -> None:
    """Reject options that the method or the runtime does not support."""
    if phases != PHASES and method not in ("octopipe", "random"):
        raise OctoPipeError(f"method {method} has no phases to switch; use --method octopipe with --phases")
    if cut_head and (method != "best" or target != "octopipe"):
        who = f"method {method}" if method != "best" else f"the runtime of --for {target}"
        raise OctoPipeError(
            f"{who} does not support a cut head; leave --cut-head out, or use --method best for octopipe"
        )
    if target != "octopipe" and (target not in TARGETS or method != "best" or robust):
        known = f"one of {', '.join(TARGETS)}"
        raise OctoPipeError(f"target {str(target)[:40]!r}: give {known}, with method best and without robust")


def _check_offload(costs: CostTable, method: str, target: str, *, combined: bool) -> None:
    """Reject `offload` for searches that do not support it, and if the bandwidth of the link to host memory is not
    known."""
    if method != "best" or target != "octopipe":
        raise OctoPipeError("offload needs --method best and octopipe's own runtime; leave --offload out")
    if combined:
        raise OctoPipeError("offload cannot be combined with a cut head or --robust; leave one of them out")
    if costs.host_link is None:
        raise OctoPipeError(
            f"{costs.model}: the speed of the link to host memory is not known; give --host-gb-per-s (host_gb_per_s), "
            "or leave --offload out"
        )


def _search_graph(
    setting: tuple[CostTable, int, int], options: _Options, common: dict[str, Any], *, workers: int | None,
    lower_bound_ms: float,
) -> tuple[Found, list[str]]:  # fmt: skip
    """A plan whose paths fork where the layers do (`graphs/branches.py`), and notes of the search for chains."""
    from octopipe.search.graphs.branches import check_graph, search_graph  # which uses parts of this package
    from octopipe.search.graphs.cut_branches import search_cut

    costs, num_ranks, num_micro_batches = setting
    check_graph(costs, options.target, common["start"])
    notes, plain = list[str](), options._replace(cut_head=False, offload=False)
    how = {"seed": common["seed"], "counted": common["iterations"] is not None}

    def search(prices: CostTable, seconds: float, *, bare: bool = False) -> Found:
        """`bare`: search only plans without copies and recomputation, since plans with a cut head have neither."""
        mine = plain._replace(copies=False) if bare else plain
        changed = common | ({"recompute": False} if bare else {})

        def search_chain(chain: CostTable, chain_s: float) -> Found:
            sizes, timed = (chain, num_ranks, num_micro_batches), changed | {"budget_s": chain_s}
            found, _, notes[:] = _searched(sizes, mine, timed, workers=workers, lower_bound_ms=lower_bound_ms)
            return found

        return search_graph(prices, num_ranks, budget_s=seconds, search_chain=search_chain, **how)

    if options.offload:
        found, words = _with_host_memory(setting, common, search)
        return found, [words]
    if options.cut_head:
        found, whole_ms = search_cut(
            costs, num_ranks, budget_s=common["budget_s"], search=search, search_bare=partial(search, bare=True), **how
        )
        return found, [_cut_words(found.plan, found.timeline.step_ms, whole_ms)]
    return search(costs, common["budget_s"]), notes


def _bound_for(
    chosen: Plan, plans: PlanClass, setting: tuple[CostTable, int, int], solved: Solved | None, bound: tuple[str, float]
) -> tuple[PlanClass, str, float]:
    """The class of plans that the lower bound holds for (it contains the chosen plan), the name of the bound, and the
    bound."""
    if (reached := _class_of(chosen, plans)) != plans:
        return reached, *lower_bound(*setting, *reached)
    if solved is not None and solved.lower_bound_ms > bound[1] and not plans.copies and not setting[0].exchanges:
        bound = "CP-SAT", solved.lower_bound_ms
    return plans, *bound


def _what_may_be(
    costs: CostTable, method: str, start: Plan | None, recompute: bool, copies: bool | None
) -> tuple[bool, bool, list[str]]:
    """Whether activations may be recomputed and whether several ranks may hold a layer, with notes on what was decided
    here."""
    notes = []
    if copies is None:
        copies = bool(costs.static_bytes.any())
        if not copies and method == "best":
            notes.append("no plan may hold layers twice, because the costs contain no weights; --copies allows it")
    unlike = costs.not_repeatable()
    if start is not None and any(k in stage.recomputed_layers for k in unlike for stage in start.stages):
        raise OctoPipeError(
            f"the plan to start from recomputes layer {unlike[0]}, which gave another result when it ran a second "
            "time in the profile; start from a plan that does not"
        )
    if recompute and unlike:
        # The other methods recompute every stage or none.
        recompute = method == "best" and len(unlike) < costs.num_layers
        which = f"layer {unlike[0]}" + (f" and {len(unlike) - 1} more" if len(unlike) > 1 else "")
        what = "no stage with them" if recompute and len(unlike) > 1 else "no stage with it" if recompute else "nothing"
        notes.append(f"{what} is recomputed: {which} gave another result when it ran a second time in the profile")
    return recompute, copies, notes


class _Options(NamedTuple):
    """The options of `tune` that select a search."""

    method: Method
    target: Target
    phases: Sequence[str]
    robust: bool
    copies: bool
    cut_head: bool
    offload: bool


def _searched(
    setting: tuple[CostTable, int, int], options: _Options, common: dict[str, Any], *, workers: int | None,
    lower_bound_ms: float,
) -> tuple[Found, Solved | None, list[str]]:  # fmt: skip
    """Run the selected search. Returns what it found, what the solver proved (if it ran), and notes for the user."""
    costs, notes = setting[0], list[str]()
    if costs.graph is not None:
        found, notes = _search_graph(setting, options, common, workers=workers, lower_bound_ms=lower_bound_ms)
        return found, None, notes
    if options.method == "exact":
        solved = solve(*setting, workers=workers, **common)
        if costs.exchanges:
            notes.append(
                "the exact method does not consider pairs: it proves nothing about plans that hide the experts' "
                "exchange"
            )
        return solved.found, solved, notes
    common = common | {"lower_bound_ms": lower_bound_ms}
    if options.target == "megatron":
        del common["recompute"]
        return FixedSchedules(*setting, **common).run(), None, notes
    if options.method == "best":
        pairs = costs.exchanges and options.target == "octopipe"
        common |= {"workers": workers, "copies": options.copies}
        jitter = SETTINGS.jitter if options.robust else 0.0
        if options.offload:
            found, words = _with_host_memory(
                setting, common, lambda prices, s: Search(prices, *setting[1:], **(common | {"budget_s": s})).run()
            )
            return found, None, [words]
        found, whole_ms = _search_best(setting, common, jitter=jitter, pairs=pairs, cut_head=options.cut_head)
        if whole_ms is not None:
            notes.append(_cut_words(found.plan, found.timeline.step_ms, whole_ms))
        return found, None, notes
    search = IterativeSearch if options.method == "octopipe" else RandomSearch
    return search(*setting, phases=options.phases, **common).run(), None, notes


def _with_host_memory(
    setting: tuple[CostTable, int, int], common: dict[str, Any], search: SearchMore
) -> tuple[Found, str]:
    """The fastest plan found with or without host memory, and a note on the difference. Pairs of ops are not searched,
    because the executor supports pairs or offload but not both."""
    costs, num_ranks, num_micro_batches = setting
    costs = costs.replace(segments=None)
    budget_s = common["budget_s"]
    unfit: OctoPipeError | None = None
    found: Found | None = None
    try:
        found = search(costs, budget_s * (1.0 - SETTINGS.special))
    except DoesNotFitError as error:
        unfit = error
    better = with_offload(
        found, costs, num_ranks, num_micro_batches, budget_s=budget_s * SETTINGS.special, search=search,
        stopped=lambda: found is not None and found.interrupted,
    )  # fmt: skip
    if better is None:
        assert unfit is not None
        raise unfit
    return better, offload_words(better.plan, better.timeline, None if found is None else found.timeline.step_ms)


def _search_best(
    setting: tuple[CostTable, int, int], common: dict[str, Any], *, jitter: float, pairs: bool, cut_head: bool
) -> tuple[Found, float | None]:
    """The default search. Searches pairs of ops if the costs contain exchanges to hide, and a split head if that was
    asked for; in the latter case it also returns the step time of the best plan with a whole head."""
    costs, num_ranks, num_micro_batches = setting
    budget_s, seed, iterations = common["budget_s"], common["seed"], common["iterations"]
    whole_s = budget_s * (1.0 - SETTINGS.special if cut_head else 1.0)
    plain = costs.replace(segments=None) if pairs else costs
    first = common | {"budget_s": whole_s * (1.0 - SETTINGS.special if pairs else 1.0)}
    found = Search(plain, num_ranks, num_micro_batches, jitter=jitter, **first).run()
    if pairs and not found.interrupted:
        found = with_pairs(
            found, *setting, budget_s=whole_s * SETTINGS.special, seed=seed, iterations=iterations,
            copies=common["copies"],
        )  # fmt: skip
    if not cut_head or found.interrupted:
        return found, None
    from octopipe.search.graphs.choose import with_cut_head  # which uses parts of this package

    def search_chain(chain: CostTable, seconds: float) -> Found:
        bound = lower_bound(chain, num_ranks, num_micro_batches, False).ms
        changed = {"budget_s": seconds, "copies": False, "recompute": False, "start": None, "lower_bound_ms": bound}
        return Search(chain, num_ranks, num_micro_batches, **(common | changed)).run()

    return with_cut_head(
        found, *setting, budget_s=budget_s * SETTINGS.special, seed=seed, iterations=iterations,
        lower_bound_ms=common["lower_bound_ms"], progress=common["progress"], search_chain=search_chain,
        workers=common["workers"],
    )  # fmt: skip


def _finished(
    found: Found, costs: CostTable, *, robust: bool, seed: int, hide: Callable[..., tuple[Plan, Timeline, bool]] | None
) -> tuple[Found, Plan, Timeline, float | None]:
    """What was found, the plan to return, its timeline and, if `robust`, its mean step time under jitter. The plan is
    the most robust finalist, or the best plan without needless recomputation; `hide` may hide its transfers."""
    chosen, mean_ms = found.plan, None
    if robust:
        chosen, mean_ms = most_robust(found.finalists or [chosen], costs, seed=seed)
        timeline = found.timeline if chosen is found.plan else simulate(chosen, costs)
    else:
        timeline = found.timeline
        try:
            chosen, timeline = without_needless_recomputation(chosen, costs, timeline)
        except KeyboardInterrupt:
            found = replace(found, interrupted=True)
    small = sum(map(len, chosen.orders)) <= HIDE_OPS and not (chosen.pairs or chosen.forks or chosen.offloads)
    if hide is None or found.interrupted or not small:  # Megatron-LM's orders are fixed
        return found, chosen, timeline, mean_ms
    # Also try the plan that a search without jitter would return: a robust search must not return a worse mean.
    tried = [(chosen, timeline)]
    if mean_ms is not None and chosen is not found.plan:
        tried.append((found.plan, found.timeline))
    for plan, before in tried:
        hidden, after, cut_short = hide(plan, before, seed=seed)
        found = replace(found, interrupted=found.interrupted or cut_short)
        hidden_ms = mean_jittered_ms(hidden, costs, seed=seed) if mean_ms is not None else None
        if mean_ms is None or (hidden_ms is not None and hidden_ms <= mean_ms):
            chosen, timeline, mean_ms = hidden, after, hidden_ms
    return found, chosen, timeline, mean_ms


def _hide(
    plan: Plan, before: Timeline, *, costs: CostTable, budget_s: float, iterations: int | None, seed: int
) -> tuple[Plan, Timeline, bool]:
    """The plan with its transfers moved behind computation if that does not lengthen the step, its timeline, and
    whether the user interrupted this."""
    timed: dict[str, Any] = {"budget_s": min(HIDE_S, HIDE_SHARE * budget_s)}
    try:
        better = hide_transfers(plan, costs, seed=seed, **(timed if iterations is None else {"moves": HIDE_MOVES}))
    except KeyboardInterrupt:
        return plan, before, True
    after = simulate(better, costs)
    good = after.fits >= before.fits and after.step_ms <= before.step_ms
    return (better, after, False) if good else (plan, before, False)


def _copies_would_help(systems: Mapping[str, float], step_ms: float) -> list[str]:
    """A note for the user if a published system that holds layers twice is faster, although copies were not allowed
    here."""
    faster = {name: ms for name, ms in systems.items() if name in COPYING and ms < step_ms * (1 - 1e-6)}
    if not faster:
        return []
    name = min(faster, key=lambda n: faster[n])
    return [
        f"{name}, which holds every layer on two ranks, takes {faster[name]:.2f} ms, {1 - faster[name] / step_ms:.1%} "
        "less; with --copies (copies=True) such plans are searched too"
    ]


def _cut_words(plan: Plan, step_ms: float, whole_ms: float) -> str:
    """A note for the user on what splitting the head has gained."""
    ranks = plan.shards().get(plan.num_layers - 1, ())
    if not ranks:
        return f"no plan with a cut head was faster than the one with a whole head ({whole_ms:.2f} ms)"
    heads = plan.cut_heads
    what = "head and embedding are" if 0 in plan.shards() else "the head is" if len(heads) == 1 else "the heads are"
    return (
        f"{what} cut into {len(ranks)} shards on ranks {', '.join(map(str, sorted(ranks)))}: "
        f"{whole_ms / step_ms:.3f}x the speed of the best plan found with a whole head ({whole_ms:.2f} ms)"
    )


def _row(step: Step, *, counted: bool) -> dict[str, Any]:
    """One improvement as the plan file stores it. If moves are counted instead of time, the time of the improvement is
    left out."""
    return {name: value for name, value in step.as_dict().items() if not (counted and name == "seconds")}


def _class_of(plan: Plan, plans: PlanClass) -> PlanClass:
    """The given class of plans, widened so that it contains this plan."""
    return PlanClass(
        recompute=plans.recompute or recomputes(plan),
        copies=plans.copies or bool(plan.replicas()),
        cuts_head=plans.cuts_head or bool(plan.shards()),
        offloads=plans.offloads or plan.offloads,
    )


def _check(
    costs: CostTable, num_ranks: int, num_micro_batches: int, budget_s: float, method: str, start: Plan | None
) -> None:
    if method not in METHODS:
        raise OctoPipeError(f"unknown method {str(method)[:40]!r}; one of {', '.join(METHODS)}")
    check_sizes(costs, num_ranks, num_micro_batches)
    if not budget_s > 0:
        raise OctoPipeError(f"budget {budget_s} s; give more than 0 seconds")
    for name, given in (("rank speeds", costs.rank_slowdown), ("memory sizes", costs.rank_memory_bytes)):
        if len(given) > (1 if name == "memory sizes" else 0) and len(given) < num_ranks:
            raise OctoPipeError(f"{len(given)} {name} for {num_ranks} ranks; give one per rank")
    factor = costs.micro_batch_factor
    if factor is not None and factor.shape[0] < num_micro_batches:
        raise OctoPipeError(f"sizes of {factor.shape[0]} micro-batches for {num_micro_batches}; give one each")
    if start is not None and (start.num_ranks, start.num_micro_batches, start.num_layers) != (
        num_ranks,
        num_micro_batches,
        costs.num_layers,
    ):
        raise OctoPipeError(
            f"the start has {start.num_layers} layers, {start.num_ranks} ranks, "
            f"{start.num_micro_batches} micro-batches; "
            f"this setting has {costs.num_layers}, {num_ranks}, {num_micro_batches}: give a plan for it"
        )
