"""What a training run's profile and plan say about its model and its micro-batches.

Knows: which sizes, encoder inputs and frozen layers a run takes from its profile or plan if no flag gives them, and
which profile is not of this run: its times would predict, and tune for, another one. Does not know: other flags of
`train`, or what a profile contains.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, TypeGuard

from octopipe.base.errors import OctoPipeError
from octopipe.cli.verbs.recorded import check_layers
from octopipe.cli.verbs.runnable import OWN_LAYERS, code_words, frozen_layers
from octopipe.costs.cluster.setup import Setup

if TYPE_CHECKING:
    from octopipe.costs.profile_file import Profile
    from octopipe.plans.plan import Plan

DEFAULT_SEQ = 128
"""Tokens per sequence if nothing gives a number."""
MEASURED_INPUTS = ("images", "recordings", "encoder_seq", "frozen")
"""What a profile measures besides tokens, by the names of flags."""


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
    rows = rows if _is_count(rows) and tokens % rows == 0 else None
    if args.micro_batch_size is None:
        args.micro_batch_size = rows or 1
    if args.seq is None and tokens % (rows or args.micro_batch_size) == 0:
        args.seq = tokens // (rows or args.micro_batch_size)
    same = args.micro_batch_size * (args.seq or 0) == tokens and (rows is None or args.micro_batch_size == rows)
    if same:
        return
    measured = str(tokens) if rows is None else f"{rows} x {tokens // rows}"
    text = (
        f"{where} has the times of micro-batches of {measured} tokens, and this run has "
        f"{args.micro_batch_size} x {args.seq or DEFAULT_SEQ}"
    )
    if profile is not None:
        raise OctoPipeError(f"{text}; leave --seq and --micro-batch-size out, or profile this size")
    from octopipe.cli.verbs.common import console, named

    text += (
        ": its prediction does not apply to this run; leave --seq and --micro-batch-size out, or profile and tune again"
    )
    console(stderr=True).print(named(text), style="yellow", soft_wrap=True)


def taken_inputs(args: argparse.Namespace, plan: Plan | None, profile: Profile | None) -> dict[str, Any]:
    """Set the encoder's input, frozen layers and offloaded optimizer state in `args`, by default as the profile or the
    plan has them.

    Returns the encoder's part.
    """
    from octopipe.cli.verbs.common import console, named
    from octopipe.costs.cluster.item_counts import ItemCounts

    told = {
        "frozen": "these layers are not trained",
        "offload_optimizer": "this share of the optimizer state is kept in host memory",
    }
    # With one tower, both flags count its items, so the one that is given replaces what the files state.
    replaced = (args.images is not None or args.recordings is not None) and not _has_two_towers(args.model)
    for where, stated in ((args.profile, _measured_inputs(profile)), (args.plan, _planned_inputs(plan))):
        for name in (*(() if replaced else ("images", "recordings")), "encoder_seq", *told):
            if getattr(args, name) is None and stated.get(name) is not None:
                setattr(args, name, stated[name])
                if name in told and stated[name]:
                    text = f"{where} was made with --{name.replace('_', '-')} {stated[name]}: {told[name]}"
                    console(stderr=True).print(named(text), soft_wrap=True)
    counts: dict[str, Any] = {}
    for name in ("images", "recordings"):
        value = getattr(args, name)
        counts[name] = () if value is None else ItemCounts().read(f"--{name}", value)
    return {**counts, "encoder_seq": args.encoder_seq}


def _has_two_towers(model: str) -> bool:
    from octopipe.costs.resolve import resolve_spec

    try:
        spec = resolve_spec(model)
    except OctoPipeError:  # a family that is run, but not planned
        return False
    return spec is not None and len(spec.sources) > 1


def _measured_inputs(profile: Profile | None) -> dict[str, Any]:
    """Return what a profile states of an encoder's input and of frozen layers, as flags give them."""
    setup = None if profile is None else profile.costs.setup
    return {} if setup is None else {name: setup.as_dict()[name] for name in MEASURED_INPUTS}


def _planned_inputs(plan: Plan | None) -> dict[str, Any]:
    """Return the same for a plan: as it was asked for, otherwise as it was measured."""
    if plan is None:
        return {}
    setting, setup = plan.extra.get("setting"), plan.extra.get("setup")
    asked = setting if isinstance(setting, dict) else {}
    measured = {name: setup.get(name) for name in MEASURED_INPUTS} if isinstance(setup, dict) else {}
    return {**measured, **{name: value for name, value in asked.items() if value is not None}}


def check_model(profile: Profile, spec: Any, where: str, device: str, *, frozen: tuple[int, ...] = ()) -> None:
    """Raise an error if a profile was measured on another model, with other input of its encoder or other frozen
    layers, or on another kind of device."""
    check_layers(profile, spec, where)
    code, mine = profile.about.get("model_code"), code_words(spec)
    if isinstance(code, str) and (code == OWN_LAYERS) != (mine == OWN_LAYERS):
        raise OctoPipeError(f"{where} was measured on {code}, and this run has {mine}; profile these layers")
    recipe = profile.about.get("recipe")
    if isinstance(recipe, dict):
        _check_inputs(profile, spec, where, frozen)
    measured_on = recipe.get("device") if isinstance(recipe, dict) else None
    if measured_on in ("cpu", "cuda") and measured_on != device:
        raise OctoPipeError(
            f"{where} was measured with --device {measured_on}, and this run has --device {device}; profile this device"
        )


def _check_inputs(profile: Profile, spec: Any, where: str, frozen: tuple[int, ...]) -> None:
    """Raise an error for other input of the encoder, or other frozen layers, than those of a profile's recipe. The
    number of images may be another one, unless there were none: times of a tower grow with it."""
    setup, form = profile.costs.setup or Setup(gpu=None), getattr(spec, "inputs", None)
    theirs = frozen_layers(spec, setup.frozen)
    if theirs != frozen:
        one = next(iter(sorted(set(theirs) ^ set(frozen))))
        text = f"{where} was measured with layer {one} {'frozen' if one in theirs else 'trained'}, and this run"
        raise OctoPipeError(f"{text} {'trains' if one in theirs else 'freezes'} it; give its --frozen, or profile this")
    if form is None:
        return
    if setup.encoder_seq is not None and form.positions and setup.encoder_seq != form.positions:
        raise OctoPipeError(
            f"{where} was measured with --encoder-seq {setup.encoder_seq}, and this run has {form.positions}; leave "
            "--encoder-seq out, or profile this size"
        )
    for kind in form.kinds if form.num_tower_layers else ():
        name = "recordings" if kind is form.beside else "images"
        stated = setup.images or setup.recordings if form.beside is None else getattr(setup, name)
        if stated and not any(stated) and any(kind.images or (1.0,)):
            raise OctoPipeError(f"{where} was measured without {name}, and this run has some; profile with --{name}")


def _planned_lengths(plan: Plan) -> bool:
    setting = plan.extra.get("setting")
    return isinstance(setting, dict) and setting.get("micro_batch_lengths") is not None


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
