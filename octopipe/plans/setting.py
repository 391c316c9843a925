"""What a plan was made for: the costs behind a plan, from what it carries beside itself.

Knows: a plan's `extra`: "setting" (a model's name and the numbers around it), "cost_table" (the costs themselves,
where they have no name), "costs" (their digest) and "mode" (how the layers ran when they were measured). Does not
know: the command line, or how costs are resolved.

A plan that carries none of these was made for nobody knows what: it is never priced with default costs in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.costs.table_file import costs_from_record
from octopipe.plans.plan import Plan

SETTING, COST_TABLE, COSTS, MODE = "setting", "cost_table", "costs", "mode"
KEYS = (
    "gpu", "tp", "cp", "ep", "dp", "seq", "micro_batch_size", "zero", "precision", "gradients", "recompute",
    "recompute_layers", "sequence_parallel", "vocab_parallel", "reserve_gib", "p2p_ms", "memory_gib", "speeds",
    "rank_speed", "gpus_per_node", "nodes", "micro_batch_tokens", "distributed_optimizer",
    "micro_batch_lengths", "packed", "tokens_per_pipeline",
)  # fmt: skip
"""Keys of a setting, beside its model, that price a plan; others are ignored."""
log = logging.getLogger("octopipe.plan")


def costs_of_plan(plan: Plan, given: Mapping[str, Any] | None = None, where: str = "plan") -> CostTable:
    """The costs behind a plan: its own, or its setting overruled by what `given` says (None says nothing)."""
    asked = {key: value for key, value in (given or {}).items() if value is not None}
    table = plan.extra.get(COST_TABLE)
    if table is not None and not asked:
        costs = table if isinstance(table, CostTable) else costs_from_record(_object(table, where), where)
        return _fitting(plan, costs, where)
    own = plan.extra.get(SETTING)
    if not isinstance(own, Mapping) and not asked.get("model"):
        raise OctoPipeError(
            f"{where}: does not say for which model and set-up it was made; give --model (and --gpu, --tp, --seq, ...)"
        )
    known = {**(own if isinstance(own, Mapping) else {}), **asked}
    model = known.get("model") or plan.model
    if not model:
        raise OctoPipeError(f"{where}: does not say which model it is about; give --model")
    costs = _fitting(plan, _resolved(str(model), plan, known, where), where)
    made_with = plan.extra.get(COSTS)
    if not asked and isinstance(made_with, str) and made_with != costs.digest():
        log.warning(
            "%s: %s costs something else now than when the plan was made; numbers are those of today's costs",
            where,
            model,
        )
    return costs


def _resolved(model: str, plan: Plan, known: Mapping[str, Any], where: str) -> CostTable:
    from octopipe.costs.resolve import resolve_costs

    numbers = {key: known[key] for key in KEYS if known.get(key) is not None}
    speeds = numbers.pop("speeds", None) or numbers.pop("rank_speed", None)
    if numbers.get("recompute") == "auto":
        del numbers["recompute"]  # which layers are computed again stands in the plan itself
    try:
        if speeds:
            numbers["rank_speed"] = tuple(float(s) for s in speeds)
        memory = numbers.get("memory_gib")
        if isinstance(memory, list | tuple):
            numbers["memory_gib"] = memory[0] if len(memory) == 1 else tuple(memory)
        return resolve_costs(model, pp=plan.num_ranks, micro_batches=plan.num_micro_batches, **numbers)
    except OctoPipeError as error:
        raise OctoPipeError(f"{where}: {error}") from None
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise OctoPipeError(f'{where}: "setting" cannot be used ({why}); mend it or give --model') from None


def _fitting(plan: Plan, costs: CostTable, where: str) -> CostTable:
    if costs.num_layers != plan.num_layers:
        raise OctoPipeError(
            f"{where}: the plan has {plan.num_layers} layers, {costs.model} has {costs.num_layers}; "
            "give the plan's own model with --model"
        )
    return costs


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise OctoPipeError(f'{where}: "{COST_TABLE}" is no object; write the plan again or give --model')
    return value
