"""What a training run's profile and plan say about its model and its micro-batches.

Knows: which sizes a run takes from its profile or plan if no flag gives them, and which profile is not of this run: its
times would predict, and tune for, another one. Does not know: other flags of `train`, or what a profile contains.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, TypeGuard

from octopipe.base.errors import OctoPipeError
from octopipe.cli.verbs.runnable import OWN_LAYERS, code_words

if TYPE_CHECKING:
    from octopipe.costs.profile_file import Profile
    from octopipe.plans.plan import Plan

DEFAULT_SEQ = 128
"""Tokens per sequence if nothing gives a number."""


def loaded(args: argparse.Namespace) -> tuple[Plan | None, Profile | None]:
    """Return the plan and the profile that the flags name, and set the size of a micro-batch in `args`."""
    from octopipe.costs.profile_file import load_profile
    from octopipe.plans.file import load_plan

    plan = load_plan(args.plan) if args.plan else None
    profile = load_profile(args.profile) if args.profile else None
    take_sizes(args, profile, plan)
    return plan, profile


def take_sizes(args: argparse.Namespace, profile: Profile | None, plan: Plan | None) -> None:
    """Set the size of a micro-batch in `args` to that of the profile, or of the measured times that the plan was made
    from, if neither flags nor --lengths give one. Raise an error if flags and profile differ."""
    if args.lengths is not None or (plan is not None and _planned_lengths(plan)):
        return
    if profile is not None:
        recipe = profile.about.get("recipe")
        rows = recipe.get("micro_batch_size") if isinstance(recipe, dict) else None
        tokens, where = profile.costs.tokens_per_micro_batch, args.profile
    elif plan is not None and "cost_table" in plan.extra and "mode" in plan.extra:
        table, size, where = plan.extra["cost_table"], plan.extra.get("setup"), args.plan
        tokens = table.get("tokens_per_micro_batch") if isinstance(table, dict) else None
        rows = size.get("micro_batch_size") if isinstance(size, dict) else None
    else:
        return
    if not _is_count(tokens):
        return
    if args.micro_batch_size is None:
        args.micro_batch_size = rows if _is_count(rows) and tokens % rows == 0 else 1
    if args.seq is None and tokens % args.micro_batch_size == 0:
        args.seq = tokens // args.micro_batch_size
    same = args.micro_batch_size * (args.seq or 0) == tokens and (not _is_count(rows) or args.micro_batch_size == rows)
    if same:
        return
    measured = f"{rows} x {tokens // rows}" if _is_count(rows) else str(tokens)
    text = (
        f"{where} has the times of micro-batches of {measured} tokens, and this run has "
        f"{args.micro_batch_size} x {args.seq or DEFAULT_SEQ}"
    )
    if profile is not None:
        raise OctoPipeError(f"{text}; leave --seq and --micro-batch-size out, or profile this size")
    from octopipe.cli.verbs.common import console, named

    text += ": its own prediction does not hold here; leave --seq and --micro-batch-size out, or profile and tune again"
    console(stderr=True).print(named(text), style="yellow", soft_wrap=True)


def check_model(profile: Profile, spec: Any, where: str, device: str) -> None:
    """Raise an error if a profile was measured on another model, or on another kind of device."""
    if profile.costs.num_layers != spec.num_layers:
        raise OctoPipeError(
            f"{where} has {profile.costs.num_layers} layers, {spec.name} has {spec.num_layers}; profile this model"
        )
    from octopipe.runtime.measure.layer_sizes import layer_parameters

    measured = profile.about.get("parameters")
    if isinstance(measured, list) and len(measured) == spec.num_layers:
        for layer, (theirs, ours) in enumerate(zip(measured, layer_parameters(spec))):
            if theirs != ours:
                raise OctoPipeError(
                    f"{where} was measured on another model: layer {layer} has {theirs:,} parameters there and "
                    f"{ours:,} in {spec.name}; profile this model"
                )
    code, mine = profile.about.get("model_code"), code_words(spec)
    if isinstance(code, str) and (code == OWN_LAYERS) != (mine == OWN_LAYERS):
        raise OctoPipeError(f"{where} was measured on {code}, and this run has {mine}; profile these layers")
    recipe = profile.about.get("recipe")
    measured_on = recipe.get("device") if isinstance(recipe, dict) else None
    if measured_on in ("cpu", "cuda") and measured_on != device:
        raise OctoPipeError(
            f"{where} was measured with --device {measured_on}, and this run has --device {device}; profile this device"
        )


def _planned_lengths(plan: Plan) -> bool:
    setting = plan.extra.get("setting")
    return isinstance(setting, dict) and setting.get("micro_batch_lengths") is not None


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
