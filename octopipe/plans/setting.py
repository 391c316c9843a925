"""What a plan was made for: recovers the costs of a plan from the entries stored in it.

Knows: a plan's `extra`: "setting" (the model's name and the numbers that go with it), "cost_table" (the costs
themselves, if the setting names a file or there is no setting), "costs" (their digest), "setup" (the set-up of the
costs, with all its fields) and "mode" (the precision and the use of CUDA graphs when layers were measured). Does not
know: the command line, or how costs are resolved.

A file may be missing or different where the plan is read, so a plan made from a file stores the costs themselves. A
plan without any of these entries is never silently priced with default costs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.calibration import stack_names
from octopipe.costs.cluster.asking import keywords
from octopipe.costs.cluster.hardware import GPUS, Link
from octopipe.costs.cluster.sizes import checkpointed_layers
from octopipe.costs.table import CostTable
from octopipe.costs.table_file import costs_from_record
from octopipe.models.zoo import PRESETS
from octopipe.plans.plan import Plan

SETTING, COST_TABLE, COSTS, SETUP, MODE = "setting", "cost_table", "costs", "setup", "mode"
log = logging.getLogger("octopipe.plan")


def carried(costs: CostTable, setting: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the entries that the `extra` of a plan made with these costs must contain.

    `setting`: the model's name and the numbers that go with it, if there is a name. Presets can be priced again from it
    anywhere; costs that were read from a file, or of layers that fork, are stored in the plan.
    """
    out: dict[str, Any] = {COSTS: costs.digest()}
    if setting is not None:
        out[SETTING] = dict(setting)
    if setting is None or _names_files(setting) or costs.graph is not None:
        out[COST_TABLE] = costs
    if costs.setup is not None:
        out[SETUP] = costs.setup.as_dict()
    if costs.mode is not None:
        out[MODE] = costs.mode.record()
    return out


def priced_recomputation(plan: Plan) -> str:
    """Return the recomputation inside the backward that the plan's costs include in addition to its R ops: none,
    selective or full."""
    setting = plan.extra.get(SETTING)
    found = setting.get("recompute") if isinstance(setting, Mapping) else None
    return found if found in ("selective", "full") else "none"


def checkpointed_by_prices(plan: Plan) -> tuple[int, ...]:
    """Layers that the plan's costs recompute in the backward, one at a time (`--recompute full`).

    The plan has no op for this: the runtime must checkpoint these layers, or more memory is used than was priced.
    """
    if priced_recomputation(plan) != "full":
        return ()
    count = plan.extra[SETTING].get("recompute_layers")
    return checkpointed_layers(plan.num_layers, count if isinstance(count, int) else None)


def _names_files(setting: Mapping[str, Any]) -> bool:
    """Whether a setting refers to a file, so that it can only be priced where that file exists."""
    gpu, stack = setting.get("gpu"), setting.get("stack")
    own = isinstance(gpu, str) and gpu not in GPUS, isinstance(stack, str) and stack not in stack_names()
    files = any(own) or any(isinstance(setting.get(name), os.PathLike) for name in ("gpu", "stack", "nodes"))
    return files or isinstance(setting.get("nodes"), str) or str(setting.get("model")) not in PRESETS


def lowering_costs(plan: Plan) -> CostTable:
    """The costs used to order a plan's sends and receives if the caller gives none: those of the plan.

    They determine the order of instructions, so every rank must use the same ones: no file is read. A plan that stores
    no costs is ordered as if its layers took equally long; if its costs are in a file, a warning says so.
    """
    table, setting = plan.extra.get(COST_TABLE), plan.extra.get(SETTING)
    if table is not None or (isinstance(setting, Mapping) and not _names_files({"model": plan.model, **setting})):
        try:
            return costs_of_plan(plan)
        except OctoPipeError as error:
            log.warning("%s: sends and receives are ordered as if all layers took equally long", error)
    elif isinstance(setting, Mapping):
        log.warning(
            "the plan's costs are in the file %s, which is not read here: sends and receives are ordered as if all "
            "layers took equally long; give costs=, or make the plan again, which then carries them",
            setting.get("model"),
        )
    return CostTable.uniform(num_layers=plan.num_layers, p2p_ms=0.05).replace(host_link=Link(latency_ms=0.05))


def costs_of_plan(
    plan: Plan, given: Mapping[str, Any] | None = None, where: str = "plan", *, naming: str = "--model"
) -> CostTable:
    """The costs of a plan: its own, or its setting overridden by `given` (None: not given).

    `naming`: how the user can name a model, for the error if the plan names none.
    """
    asked = {key: value for key, value in (given or {}).items() if value is not None}
    table = plan.extra.get(COST_TABLE)
    if table is not None and not asked:
        costs = table if isinstance(table, CostTable) else costs_from_record(_object(table, where), where)
        return _fitting(plan, costs, where)
    own = plan.extra.get(SETTING)
    if not isinstance(own, Mapping) and not asked.get("model"):
        raise OctoPipeError(
            f"{where}: does not state for which model and set-up it was made; give {naming} (and the "
            f"GPU, the sizes, ...)"
        )
    own = own if isinstance(own, Mapping) else {}
    model = asked.get("model") or own.get("model") or plan.model
    if not model:
        raise OctoPipeError(f"{where}: does not state its model; give {naming}")
    try:
        costs = _fitting(plan, _resolved(str(model), plan, own, asked, where), where)
    except OctoPipeError as error:
        if table is None or asked.get("model"):
            raise
        raise OctoPipeError(f"{error}; the plan stores its costs: leave {', '.join(asked)} out to use them") from None
    made_with = plan.extra.get(COSTS)
    if not asked and isinstance(made_with, str) and made_with != costs.digest():
        log.warning(
            "%s: %s has different costs now than when the plan was made; the numbers use today's costs",
            where,
            model,
        )
    return costs


def _resolved(model: str, plan: Plan, own: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> CostTable:
    """The costs of a plan's own setting, overridden by the given values; unknown keys are ignored."""
    from octopipe.costs.resolve import resolve_costs

    try:
        numbers = {**keywords(own, lenient=True), **keywords(asked, lenient=True)}
        if numbers.get("recompute") == "auto":
            del numbers["recompute"]  # the plan itself states which layers are recomputed
        return resolve_costs(model, pp=plan.num_ranks, micro_batches=plan.num_micro_batches, **numbers)
    except OctoPipeError as error:
        raise OctoPipeError(f"{where}: {error}") from None
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise OctoPipeError(f'{where}: "setting" cannot be used ({why}); correct it, or name the model') from None


def _fitting(plan: Plan, costs: CostTable, where: str) -> CostTable:
    if costs.num_layers != plan.num_layers:
        raise OctoPipeError(
            f"{where}: the plan has {plan.num_layers} layers, {costs.model} has {costs.num_layers}; "
            "name the plan's own model"
        )
    return costs


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise OctoPipeError(f'{where}: "{COST_TABLE}" is not a JSON object; write the plan again, or name the model')
    return value
