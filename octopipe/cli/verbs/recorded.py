"""The layers that a profile was measured on, to be run again.

Knows: how a profile's recipe becomes a workload, what a recipe that was edited by hand may get wrong, and whether the
model it names is still the one that was measured. Does not know: what is run with the layers (`validate`, `tune
--measure`), or flags of a training run (`train_sizes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.cli.verbs.runnable import settings_of

if TYPE_CHECKING:
    from octopipe.costs.profile_file import Profile
    from octopipe.runtime.measure.workload import Workload


def recorded_workload(profile: Profile, where: str, *, precision: str | None = None, remedy: str = "") -> Workload:
    """Return the layers of a profile, as they were measured, or in another `precision`. Raise an error if the profile
    does not state them, or if they are no longer those that were measured. `remedy`: what to do about it."""
    from octopipe.cli.verbs.profile import workload_of

    remedy = remedy or "write it with `octopipe profile`"
    recipe = profile.about.get("recipe")
    if not isinstance(recipe, dict) or "extrapolated" in profile.about:
        raise OctoPipeError(f"{where}: does not state which layers were measured; {remedy}")
    _check_values(recipe, where)
    work = workload_of({**recipe, "dtype": None, "precision": precision} if precision else recipe)
    measured = profile.costs.tokens_per_micro_batch
    if measured is not None and measured != work.tokens * work.micro_batch_size:
        raise OctoPipeError(
            f"{where} has the times of micro-batches of {measured} tokens, and its recipe says "
            f"{work.micro_batch_size} x {work.tokens}: one of the two was edited; profile this size"
        )
    stated = profile.mode
    if stated is not None and precision is None and stated.precision != work.precision:
        raise OctoPipeError(
            f"{where} has times in {stated.precision}, and its recipe says {work.precision}: one was edited; "
            "profile this precision"
        )
    check_layers(profile, work.spec, where)
    return work


def check_layers(profile: Profile, spec: Any, where: str) -> None:
    """Raise an error if a profile was measured on layers other than those of a model."""
    from octopipe.runtime.measure.layer_sizes import layer_parameters

    if profile.costs.num_layers != spec.num_layers:
        raise OctoPipeError(
            f"{where} has {profile.costs.num_layers} layers, {spec.name} has {spec.num_layers}; profile this model"
        )
    measured = profile.about.get("parameters")
    if isinstance(measured, list) and len(measured) == spec.num_layers:
        for layer, (theirs, ours) in enumerate(zip(measured, layer_parameters(spec))):
            if theirs != ours:
                count = f"{theirs:,}" if isinstance(theirs, int) else brief(theirs)
                raise OctoPipeError(
                    f"{where} was measured on another model: layer {layer} has {count} parameters there and "
                    f"{ours:,} in {spec.name}; profile this model"
                )
    settings, mine = profile.about.get("settings"), settings_of(spec)
    if isinstance(settings, dict):
        for key in (*settings, *(k for k in mine if k not in settings)):
            if settings.get(key) != mine.get(key):
                raise OctoPipeError(
                    f"{where} was measured on another model: {key} is {brief(settings.get(key))} there and "
                    f"{brief(mine.get(key))} in {spec.name}; profile this model"
                )


def _check_values(recipe: dict[str, Any], where: str) -> None:
    for name, (takes, words) in _VALUES.items():
        value = recipe.get(name)
        if not takes(value):
            raise OctoPipeError(
                f'{where}: "recipe" has {name} {brief(value)}, and it takes {words}; correct it, or write the profile '
                "again"
            )


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _or_none(takes: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or takes(value)


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _switch(value: object) -> bool:
    return isinstance(value, bool)


_VALUES: dict[str, tuple[Callable[[object], bool], str]] = {
    "model": (_text, "a model's name or path"),
    "tokens": (_count, "a whole number from 1 on"),
    "micro_batch_size": (_or_none(_count), "a whole number from 1 on"),
    "num_layers": (_or_none(_count), "a whole number from 1 on, or null"),
    "scale": (_or_none(lambda value: _number(value) and value != 0), "a number above 0, or null"),
    "device": (lambda value: value in (None, "cpu", "cuda"), "cpu or cuda"),
    "precision": (_or_none(_text), "a precision, or null"),
    "dtype": (_or_none(_text), "a dtype, or null"),
    "kernels": (_or_none(_texts), "a list of names"),
    "compile_scans": (_or_none(_switch), "true, false or null"),
    "own_layers": (_or_none(_switch), "true or false"),
    "graphs": (_or_none(_switch), "true or false"),
    "encoder_seq": (_or_none(_count), "a whole number from 1 on, or null"),
    "mtp": (_or_none(_number), "a number from 0 on, or null"),
    "images": (_or_none(_number), "a number from 0 on, or null"),
    "recordings": (_or_none(_number), "a number from 0 on, or null"),
    "frozen": (_or_none(lambda value: isinstance(value, str | list)), "layers such as 0-3,7, or null"),
}
"""For every key of a recipe, which values it takes, as a test and in words."""
