"""The public functions of the package; each takes a model by name, as a file or as costs.

Knows: how a user's arguments (a preset, a config.json, a file of times, a profile, a CostTable; a system, a plan file,
a Plan) become costs and a plan, and that every plan made here stores what it was made for. Does not know: how plans
are built, timed or found (systems/, simulator.py, tuner/).

    plan = octopipe.build_plan("zb-h1", "nemotron-h-8b", 4, 8, tp=2)
    octopipe.simulate(plan).step_ms                   # the plan knows its set-up
    octopipe.simulate("1f1b", "profile.json", 4, 8)
    octopipe.tune("nemotron-h-8b", 4, 8, tp=2, budget_s=10).plan.save("plan.json")
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from octopipe.base.clock import seconds_of
from octopipe.base.errors import MAX_MICRO_BATCHES, OctoPipeError
from octopipe.costs.cluster.asking import keyword_fields, keywords
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.models.spec import ModelSpec
from octopipe.plans.file import load_plan
from octopipe.plans.plan import Plan
from octopipe.plans.setting import COST_TABLE, MODE, SETTING, SETUP, carried, costs_of_plan
from octopipe.simulation.lowering import Channel, Program
from octopipe.simulation.timeline import Timeline

if TYPE_CHECKING:
    from typing import Unpack

    from octopipe.costs.cluster.keywords import SetupKeywords
    from octopipe.search.comparison import Comparison
    from octopipe.search.comparison import Progress as CompareProgress
    from octopipe.search.result import Callback
    from octopipe.search.tuner import Method, TuneResult

BUDGET_S = 30.0
"""Default search time of `tune`."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
Model = str | os.PathLike[str] | ModelSpec | CostTable
"""A preset's name, the path of a config.json, a file of layer times or a profile, a ModelSpec, or costs."""


def _spelled_out(**defaults: Any) -> Callable[[_Function], _Function]:
    """Add the set-up's keywords, which a function takes as `**`, to the signature that `help()` and notebooks show.

    A default of None means that the value is derived from the model, the GPU or other keywords. `defaults`: those that
    differ from the defaults of `Setup`.
    """

    def with_signature(function: _Function) -> _Function:
        own = inspect.signature(function)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        default = {f.name: f.default for f in fields(Setup)} | defaults
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if how.follows else default[name],
                annotation=f"{how.kind.accepts} | None",
            )
            for name, how in keyword_fields().items()
        ]
        function.__signature__ = own.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
        return function

    return with_signature


@_spelled_out()
def build_plan(
    system: str,
    model: Model,
    num_ranks: int,
    num_micro_batches: int | None = None,
    *,
    split_backward: bool | None = None,
    chunks: int | None = None,
    options: Mapping[str, Any] | None = None,
    **setup: Unpack[SetupKeywords],
) -> Plan:
    """Build the plan of a published system (`octopipe systems` lists them) for a model on `num_ranks` ranks.

    `num_micro_batches` defaults to twice the number of ranks. `split_backward=True` splits B into I and W for systems
    that do not. `chunks` is the number of stages per rank, for systems with several; further `options` are specific to
    the system (`octopipe systems`).
    """
    from octopipe.search.systems.registry import build_plan as build

    count = _micro_batches(num_ranks, num_micro_batches)
    costs, made_for = _costs(model, num_ranks, count, setup)
    own = dict(options or {}) | ({} if chunks is None else {"chunks": chunks})
    return _storing(build(system, costs, num_ranks, count, split_backward=split_backward, **own), made_for)


@_spelled_out()
def simulate(
    plan: Plan | Program | str | os.PathLike[str],
    model: Model | None = None,
    num_ranks: int | None = None,
    num_micro_batches: int | None = None,
    *,
    channel: Channel = "directed",
    label: str = "",
    check: bool = True,
    split_backward: bool | None = None,
    chunks: int | None = None,
    options: Mapping[str, Any] | None = None,
    **setup: Unpack[SetupKeywords],
) -> Timeline:
    """Predict the timeline of a plan, a program, a plan file, or a system by name.

    A plan made by this package stores its set-up, so `model` may be omitted. A system needs `model` and `num_ranks`;
    `num_micro_batches`, `split_backward`, `chunks` and `options` apply to systems, as in `build_plan`. `channel`: which
    sends and receives share an in-order queue ("directed", "pair", "single" or "blocking"). `label` names the timeline
    in reports. `check=False` skips the validation of a plan that has been checked.
    """
    from octopipe.simulation.simulator import simulate as run

    if isinstance(plan, str | os.PathLike) and not _is_file(plan):
        if model is None or num_ranks is None:
            raise OctoPipeError(
                f"simulate({str(plan)[:60]!r}): a system needs a model and a number of ranks; give model and num_ranks"
            )
        costs, made_for = _costs(model, num_ranks, _micro_batches(num_ranks, num_micro_batches), setup)
        own = dict(options or {}) | ({} if chunks is None else {"chunks": chunks})
        built = build_plan(str(plan), costs, num_ranks, num_micro_batches, split_backward=split_backward, options=own)
        return _with_setting(run(built, costs, channel=channel, label=label, check=check), made_for)
    if split_backward is not None or options or chunks is not None:
        raise OctoPipeError(
            "a plan already contains these decisions; leave split_backward, chunks and options out, or name a system"
        )
    loaded = load_plan(plan) if isinstance(plan, str | os.PathLike) else plan
    if not isinstance(loaded, Plan | Program):
        raise OctoPipeError(f"plan is a {type(loaded).__name__}; give a system's name, a plan file or a Plan")
    inner = loaded.plan if isinstance(loaded, Program) else loaded
    for name, number in (("num_ranks", num_ranks), ("num_micro_batches", num_micro_batches)):
        if number is not None and number != getattr(inner, name):
            raise OctoPipeError(f"the plan has {name} {getattr(inner, name)}, not {number}; leave it out")
    if model is None and setup:
        raise OctoPipeError(f"{next(iter(setup))} has no effect without a model; give model, too")
    stored: Mapping[str, Any] = inner.extra
    if model is None:
        costs = costs_of_plan(inner, naming="model=")
    else:
        costs, stored = _costs(model, inner.num_ranks, inner.num_micro_batches, setup)
    return _with_setting(run(loaded, costs, channel=channel, label=label, check=check), stored)


@_spelled_out(recompute="auto")
def tune(
    model: Model,
    num_ranks: int,
    num_micro_batches: int | None = None,
    *,
    budget_s: float | str = BUDGET_S,
    seed: int = 0,
    method: Method = "best",
    start: Plan | str | os.PathLike[str] | None = None,
    robust: bool = False,
    workers: int | None = None,
    iterations: int | None = None,
    progress: Callback | None = None,
    copies: bool | None = None,
    cut_head: bool = False,
    offload: bool = False,
    phases: Sequence[str] = ("partition", "placement", "schedule"),
    target: Literal["octopipe", "torch", "megatron"] = "octopipe",
    **setup: Unpack[SetupKeywords],
) -> TuneResult:
    """Search for the fastest plan for a model within `budget_s` seconds; the result always fits in memory.

    The plan of the result stores the set-up or the costs it was found for. `budget` is an alias of `budget_s`.

    `method`: "best" (the default search), "octopipe" (the paper's Algorithm 1; `phases` selects its phases), "random"
    (its moves in random order) or "exact" (CP-SAT, for small cases). `target`: search only plans that this runtime can
    run. `start`: a plan or a plan file to start from. `copies`: whether a layer may be on more than one rank (default:
    if the costs include weights). `cut_head`: also split the head by vocabulary. `offload`: also move activations to
    host memory. `recompute="none"` (or "full", "selective") fixes that decision instead of searching it. `robust`:
    select by the mean step time over jittered layer times. `workers`: number of threads (default: all cores).
    `iterations`: moves per thread instead of a budget, so that the result is the same on every machine. `progress` is
    called with the state of the search; if it returns True, the search ends with its best plan.
    """
    from octopipe.search.tuner import tune as search

    remaining: dict[str, Any] = dict(setup)
    if "budget" in remaining:
        if budget_s != BUDGET_S:
            raise OctoPipeError("budget_s and budget are the same keyword; give one of them")
        budget_s = remaining.pop("budget")
    budget_s = seconds_of(budget_s)
    # "auto" lets the search decide. True, False and "none" are passed to the search, other modes to the set-up.
    recompute: Any = remaining.pop("recompute", "auto")
    if recompute not in ("auto", "none", True, False):
        remaining["recompute"] = recompute
    count = _micro_batches(num_ranks, num_micro_batches)
    costs, made_for = _costs(model, num_ranks, count, remaining, _parameter_names(tune))
    result = search(
        costs,
        num_ranks,
        count,
        budget_s=budget_s,
        seed=seed,
        method=method,
        start=load_plan(start) if isinstance(start, str | os.PathLike) else start,
        robust=robust,
        workers=workers,
        iterations=iterations,
        progress=progress,
        copies=copies,
        cut_head=cut_head,
        offload=offload,
        phases=phases,
        target=target,
        recompute=recompute in ("auto", True),
    )
    return replace(result, plan=_storing(result.plan, made_for))


@_spelled_out()
def compare(
    model: Model,
    num_ranks: int,
    num_micro_batches: int | None = None,
    *,
    systems: Sequence[str] | str | None = None,
    names: Sequence[str] | str | None = None,
    split_backward: bool = False,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    channel: Channel = "directed",
    processes: int | None = None,
    progress: CompareProgress | None = None,
    **setup: Unpack[SetupKeywords],
) -> Comparison:
    """Simulate every published system (or those in `systems`) on one model; results are best first, each with its plan.

    `systems` is a list, or a string like "1f1b,zb-h1"; `names` is its former name. `recompute="auto"` recomputes as
    many layers as each system needs to fit. `options`: by system, its own options (`octopipe systems`).
    `split_backward=True` splits B into I and W everywhere. `processes`: number of processes (default: by the number of
    cores). `progress(system, done, all)` is called after each system.
    """
    from octopipe.search.comparison import compare as run

    if systems is not None and names is not None:
        raise OctoPipeError("names is the former name of systems; give one of them")
    chosen = names if systems is None else systems
    chosen = [name.strip() for name in chosen.split(",")] if isinstance(chosen, str) else chosen
    count = _micro_batches(num_ranks, num_micro_batches)
    auto = setup.get("recompute") == "auto" and not isinstance(model, CostTable)
    first = {**setup, "recompute": "none"} if auto else setup
    costs, made_for = _costs(model, num_ranks, count, first)
    comparison = run(
        costs,
        num_ranks,
        count,
        names=chosen,
        recompute="auto" if auto else "none",
        price=_PriceOf(model, num_ranks, count, first) if auto else None,
        split_backward=split_backward,
        options=options,
        channel=channel,
        processes=processes,
        progress=progress,
    )
    rows = (r if r.plan is None else replace(r, plan=_storing(r.plan, made_for)) for r in comparison.results)
    return replace(comparison, results=tuple(rows))


@dataclass(frozen=True, slots=True)
class _PriceOf:
    """A function that returns the costs of a model under any mode of recomputation."""

    model: Model
    num_ranks: int
    num_micro_batches: int
    setup: Mapping[str, Any]

    def __call__(self, mode: str, layers: int | None = None, /) -> CostTable:
        setup = {**self.setup, "recompute": mode, "recompute_layers": layers}
        return _costs(self.model, self.num_ranks, self.num_micro_batches, setup)[0]


def _costs(
    model: Model, num_ranks: int, num_micro_batches: int, setup: Mapping[str, Any], others: Iterable[str] = ()
) -> tuple[CostTable, dict[str, Any]]:
    """Return the costs of `model`, and what a plan made with them must store. `others`: the caller's keywords besides
    those of the set-up, used to suggest the closest one in an error."""
    setup = keywords(setup, others=others)
    if isinstance(model, CostTable):
        if setup:
            name = next(iter(setup))
            raise OctoPipeError(f"{name} has no effect on a CostTable; pass the name of the model, or change the table")
        return model, carried(model)
    if not isinstance(model, str | os.PathLike | ModelSpec):
        raise OctoPipeError(
            f"model is a {type(model).__name__}; give a preset's name, a file, a ModelSpec or a CostTable"
        )
    named = model if isinstance(model, ModelSpec) else str(os.fspath(model))
    costs = resolve_costs(named, pp=num_ranks, micro_batches=num_micro_batches, **setup)
    if isinstance(named, ModelSpec):  # a ModelSpec has no name by which the model could be loaded again
        return costs, carried(costs)
    setting = {"model": named} | {k: v for k, v in setup.items() if v is not None}
    return costs, carried(costs, setting)


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    """Return the parameter names in a function's displayed signature."""
    return list(inspect.signature(function).parameters)


def _with_setting(timeline: Timeline, stored: Mapping[str, Any]) -> Timeline:
    """Return the timeline with the set-up it was predicted for."""
    setting = stored.get(SETTING)
    return replace(timeline, setting=dict(setting)) if isinstance(setting, Mapping) else timeline


def _storing(plan: Plan, made_for: Mapping[str, Any]) -> Plan:
    """Return the plan with the entries that say what it was made for; they replace entries of the same kind."""
    extra = {k: v for k, v in plan.extra.items() if k not in (SETTING, COST_TABLE, SETUP, MODE)}
    return replace(plan, extra=extra | dict(made_for))


def _micro_batches(num_ranks: int, num_micro_batches: int | None) -> int:
    count = 2 * num_ranks if num_micro_batches is None else num_micro_batches
    if count > MAX_MICRO_BATCHES:
        raise OctoPipeError(f"{count} micro-batches are too many; give at most {MAX_MICRO_BATCHES}")
    return count


def _is_file(path: str | os.PathLike[str]) -> bool:
    text = os.fspath(path)
    return not isinstance(path, str) or text.endswith(".json") or os.sep in text or os.path.isfile(text)


__all__ = ["Model", "Setup", "build_plan", "compare", "simulate", "tune"]
