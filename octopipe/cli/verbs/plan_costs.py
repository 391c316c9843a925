"""Flags for the costs of plan files, shared by the verbs report and export.

Knows: that a plan file usually states its own setting (its "setting"), so every flag is optional and overrides the
file. Does not know: how costs are found (report/load.py).
"""

from __future__ import annotations

import argparse
from typing import Any

from octopipe.cli.verbs.flags import add_fields, setting_from


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("costs, if the plan file contains none or you want to use others")
    group.add_argument("--model", help="a preset, a layer-times file or a Hugging Face config.json")
    add_fields(group, without=("pp", "micro_batches"), says_default=False)


def setting_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that were given."""
    given = setting_from(args)
    return {name: value for name, value in given.items() if value is not None}
