"""Flags that several verbs share: a model, and one flag for every field of the set-up.

Knows: argparse, and how a field of `Setup` becomes a flag. Does not know: which fields there are
(costs/cluster/setup.py) or any verb. A flag that is not given is None, never a default value.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octopipe.costs.cluster.fields import Kind, SetupField

OWN_DEFAULTS: Mapping[str, str] = MappingProxyType({})
"""Of a verb whose flags all have the defaults of their fields."""


def of_kind(kind: Kind) -> Callable[[str], Any]:
    """Return an argparse type that parses a value of this kind."""
    from octopipe.base.errors import OctoPipeError

    def value_of(text: str) -> Any:
        try:
            return kind.of_text(text)
        except OctoPipeError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value_of


def whole_number(text: str) -> int:
    """Parse a whole number of at least 1 (an argparse type)."""
    from octopipe.costs.cluster.fields import Whole

    return int(of_kind(Whole())(text))


def non_negative(text: str) -> float:
    """Parse a finite number of at least 0 (an argparse type)."""
    from octopipe.costs.cluster.fields import Number

    return float(of_kind(Number())(text))


def width_factor(text: str) -> float:
    """Parse a number above 0 and at most 1 (an argparse type)."""
    value = non_negative(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]} is out of range; give a number above 0 and at most 1")
    return value


def number_list(text: str) -> list[float]:
    """Parse numbers above 0, separated by commas (an argparse type)."""
    from octopipe.costs.cluster.fields import Numbers

    return list(of_kind(Numbers())(text))


def seed_number(text: str) -> int:
    """Parse a random seed (an argparse type)."""
    from octopipe.base.limits import MAX_SEED

    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= MAX_SEED):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a seed; give a whole number from 0 to {MAX_SEED}")
    return int(text)


def flag_of(name: str) -> str:
    """Return a flag as users write it."""
    return "--" + name.replace("_", "-")


# -- the set-up -------------------------------------------------------------------------------------------------------


def add_field(parser: Any, name: str, *, says_default: bool = True, default: str | None = None) -> None:
    """Add the flag of one field. `says_default`: whether its help states the value used if the flag is not given.
    `default`: that value, for a verb whose default is not the field's own."""
    from octopipe.costs.cluster.asking import flag_fields
    from octopipe.costs.cluster.fields import Choice, Lengths, NodeGroups, Whole, YesNo

    how = flag_fields()[name]
    assert not isinstance(how.kind, Lengths), "lists of lengths come from a file"
    value = default or how.unless_given
    words = how.words + (f" (default: {value})" if says_default and value else "")
    more: dict[str, Any] = {"dest": destination(name, how), "help": words.replace("%", "%%"), "default": None}
    if isinstance(how.kind, YesNo):
        more["action"] = argparse.BooleanOptionalAction
    elif isinstance(how.kind, Choice):
        more |= {"type": type(how.kind.of[0]), "choices": how.kind.of}
    else:
        more["type"] = of_kind(how.kind)
    if isinstance(how.kind, NodeGroups):
        more["metavar"] = "FILE"
    elif isinstance(how.kind, Whole):
        more["metavar"] = "N"
    names = dict.fromkeys([destination(name, how), name, *how.also])
    parser.add_argument(*(flag_of(n) for n in names if n != "distributed_optimizer"), **more)


def destination(name: str, how: SetupField) -> str:
    """Return the attribute in which argparse stores a field's flag."""
    return how.flag or name


def add_fields(
    parser: Any,
    *parts: Any,
    without: tuple[str, ...] = (),
    says_default: bool = True,
    defaults: Mapping[str, str] = OWN_DEFAULTS,
) -> None:
    """Add the flags of all fields in the named parts of the set-up, or in all parts. `defaults`: by field, what a verb
    does if the flag is not given, where that is not the field's own default."""
    from octopipe.costs.cluster.asking import flag_fields

    for name in flag_fields(*parts):
        if name not in without:
            add_field(parser, name, says_default=says_default, default=defaults.get(name))


def setting_from(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags as provenance for `plan.extra["setting"]`, sufficient to compute the plan's costs again."""
    from octopipe.costs.cluster.asking import keyword_fields

    out: dict[str, Any] = {"model": args.model}
    for name, how in keyword_fields().items():
        value = getattr(args, destination(name, how), None)
        if value is not None:
            # A file may be gone when the plan's costs are computed again, so its content is stored.
            out[name] = how.kind.as_json(how.kind.read(name, value)) if name in ("nodes", "gpu", "stack") else value
    return out


# -- other flags ------------------------------------------------------------------------------------------------------


def add_model_arguments(parser: argparse.ArgumentParser, *, or_profile: bool = False, runs: bool = False) -> None:
    """Add MODEL: a preset, a layer-times file, a profile or a Hugging Face config.json. With `runs`, a model that can
    be run: a file of times is not enough."""
    what = "a preset (`octopipe models`), a layer-times or config.json file"
    if runs:
        what = "a preset (`octopipe models`), a Hugging Face config.json, or the folder of such a model"
    if not or_profile:
        parser.add_argument("model", metavar="MODEL", help=what)
        return
    parser.add_argument("model", metavar="MODEL", nargs="?", help=what + ", or a profile")
    parser.add_argument("--profile", metavar="FILE", help="a profile written by `octopipe profile`, instead of MODEL")


def add_hardware_arguments(parser: Any) -> None:
    """Add the flags for the GPUs: a kind and a number, or a file of unequal nodes."""
    add_fields(parser, "hardware")
    parser.add_argument(
        "--gpus",
        type=whole_number,
        metavar="N",
        help="total number of GPUs; sizes that are not given are derived from it",
    )


def add_batch_arguments(parser: Any, *, micro_batches: bool = True) -> None:
    """Add the flags for what is trained per step."""
    parser.add_argument("--global-batch", type=whole_number, metavar="N", help="sequences per step over all pipelines")
    add_fields(parser, "batch", without=() if micro_batches else ("micro_batches", "micro_batch_size"))


def add_length_arguments(parser: Any) -> None:
    """Add the flags for sequences of different lengths, and for how they are grouped into micro-batches."""
    parser.add_argument(
        "--lengths", metavar="FILE", help="sequence lengths of one step, one per line or as a JSON list"
    )
    how = parser.add_mutually_exclusive_group()
    for name, words in (
        ("pad", "with --lengths: --micro-batch-size sequences per micro-batch, padded to the longest (default)"),
        ("pack", "with --lengths: concatenate sequences into micro-batches of --seq tokens"),
        ("dynamic", "with --lengths: group sequences with DynaPipe's algorithm (default for the system dynapipe)"),
    ):
        how.add_argument(f"--{name}", dest="batching", action="store_const", const=name, help=words)


def add_training_arguments(parser: Any, defaults: Mapping[str, str] = OWN_DEFAULTS) -> None:
    """Add the flags for optimizer state, precision and activations. `defaults`: see `add_fields`."""
    add_fields(parser, "training", defaults=defaults)


def add_setting_arguments(
    parser: argparse.ArgumentParser, *, split_backward: bool = True, defaults: Mapping[str, str] = OWN_DEFAULTS
) -> None:
    """Add the flags for ranks, micro-batches, hardware and memory; --pp may follow from --gpus, so it is not required.

    `split_backward`: whether users of the verb choose how the backward runs; otherwise the flag is hidden. `defaults`:
    see `add_fields`.
    """
    group = parser.add_argument_group("set-up")
    add_fields(group, "size")
    add_hardware_arguments(group)
    add_batch_arguments(group)
    add_length_arguments(group)
    add_training_arguments(group, defaults)
    add_fields(group, "ranks")
    words = "split the backward into I and W (default: as the system was published)"
    parser.add_argument(
        "--split-backward",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=words if split_backward else argparse.SUPPRESS,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
