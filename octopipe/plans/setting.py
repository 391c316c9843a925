"""What a plan was made for: the costs behind a plan, from what it carries beside itself.

Knows: a plan's `extra`: "setting" (a model's name and the numbers around it), "cost_table" (the costs themselves,
where the setting names a file or there is no setting), "costs" (their digest) and "mode" (how the layers ran when
they were measured). Does not know: the command line, or how costs are resolved.

A file is not where the plan will be read, or holds something else by then: a plan made from one carries the costs.
A plan that carries none of these was made for nobody knows what: it is never priced with default costs in silence.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.calibration import stack_names
from octopipe.costs.cluster.hardware import GPUS, Link
from octopipe.costs.cluster.setup import checkpointed_layers, keywords
from octopipe.costs.table import CostTable
from octopipe.costs.table_file import costs_from_record
from octopipe.models.zoo import PRESETS
from octopipe.plans.plan import Plan

SETTING, COST_TABLE, COSTS, MODE = "setting", "cost_table", "costs", "mode"
log = logging.getLogger("octopipe.plan")


def carried(costs: CostTable, setting: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a plan made with these costs has to carry, as entries of its `extra`.

    `setting`: the model's name and the numbers around it, where there is a name. Presets are priced again from it
    anywhere; whatever was read from a file travels with the plan.
    """
    out: dict[str, Any] = {COSTS: costs.digest()}
    if setting is not None:
        out[SETTING] = dict(setting)
    if setting is None or _names_files(setting):
        out[COST_TABLE] = costs
    if costs.mode is not None:
        out[MODE] = costs.mode.record()
    return out


def checkpointed_by_prices(plan: Plan) -> tuple[int, ...]:
    """Layers that the plan's prices run again inside the backward, one at a time (`--recompute full`).

    No op of the plan says so: whoever runs it has to checkpoint these layers, or it holds more than was priced.
    """
    setting = plan.extra.get(SETTING)
    if not isinstance(setting, Mapping) or setting.get("recompute") != "full":
        return ()
    count = setting.get("recompute_layers")
    return checkpointed_layers(plan.num_layers, count if isinstance(count, int) else None)


def _names_files(setting: Mapping[str, Any]) -> bool:
    """Whether a setting can only be priced where some file is."""
    gpu, stack = setting.get("gpu"), setting.get("stack")
    own = isinstance(gpu, str) and gpu not in GPUS, isinstance(stack, str) and stack not in stack_names()
    files = any(own) or any(isinstance(setting.get(name), os.PathLike) for name in ("gpu", "stack", "nodes"))
    return files or isinstance(setting.get("nodes"), str) or str(setting.get("model")) not in PRESETS


def lowering_costs(plan: Plan) -> CostTable:
    """The costs that time a plan's sends and receives where the caller gives none: its own.

    They order the instructions, so every rank must find the same ones: no file is read for them. A plan that carries
    no costs is ordered as if its layers took equally long; one whose costs lie in a file says so.
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
    """The costs behind a plan: its own, or its setting overruled by what `given` says (None says nothing).

    `naming`: how the caller's user names a model, for the error where the plan names none.
    """
    asked = {key: value for key, value in (given or {}).items() if value is not None}
    table = plan.extra.get(COST_TABLE)
    if table is not None and not asked:
        costs = table if isinstance(table, CostTable) else costs_from_record(_object(table, where), where)
        return _fitting(plan, costs, where)
    own = plan.extra.get(SETTING)
    if not isinstance(own, Mapping) and not asked.get("model"):
        raise OctoPipeError(
            f"{where}: does not say for which model and set-up it was made; give {naming} (and the GPU, the sizes, ...)"
        )
    own = own if isinstance(own, Mapping) else {}
    model = asked.get("model") or own.get("model") or plan.model
    if not model:
        raise OctoPipeError(f"{where}: does not say which model it is about; give {naming}")
    try:
        costs = _fitting(plan, _resolved(str(model), plan, own, asked, where), where)
    except OctoPipeError as error:
        if table is None or asked.get("model"):
            raise
        raise OctoPipeError(f"{error}; the plan carries its costs: leave {', '.join(asked)} out to use them") from None
    made_with = plan.extra.get(COSTS)
    if not asked and isinstance(made_with, str) and made_with != costs.digest():
        log.warning(
            "%s: %s costs something else now than when the plan was made; numbers are those of today's costs",
            where,
            model,
        )
    return costs


def _resolved(model: str, plan: Plan, own: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> CostTable:
    """The costs of a plan's own setting, overruled by what is asked for; keys that are no field's are ignored."""
    from octopipe.costs.resolve import resolve_costs

    try:
        numbers = {**keywords(own, lenient=True), **keywords(asked, lenient=True)}
        if numbers.get("recompute") == "auto":
            del numbers["recompute"]  # which layers are computed again stands in the plan itself
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
