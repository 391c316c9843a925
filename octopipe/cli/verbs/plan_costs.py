"""Flags that price plan files, shared by the verbs report and export.

Knows: that a plan file usually says itself what it is about (its "setting"), so every flag is optional and
overrules the file. Does not know: how costs are found (report/load.py).
"""

from __future__ import annotations

import argparse
from typing import Any

from octopipe.cli.verbs.common import add_training_arguments, non_negative, number_list, setting_from, whole_number


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("costs, where a plan file does not say them itself or others are wanted")
    group.add_argument("--model", help="a preset, a layer-times file or a Hugging Face config.json")
    group.add_argument("--tp", type=whole_number, help="tensor-parallel size")
    group.add_argument("--cp", type=whole_number, help="context-parallel size")
    group.add_argument("--ep", type=whole_number, help="expert-parallel size")
    group.add_argument("--dp", type=whole_number, help="pipelines side by side")
    group.add_argument("--gpu", help="GPU preset")
    group.add_argument("--cluster", metavar="FILE", help="unequal nodes: a TOML or JSON file of [[nodes]]")
    group.add_argument("--micro-batch-size", type=whole_number, help="sequences per micro-batch")
    group.add_argument("--seq", type=whole_number, help="tokens per sequence")
    add_training_arguments(group)
    group.add_argument("--p2p-ms", type=non_negative, help="time of every transfer")
    group.add_argument("--memory-gib", type=number_list, help="usable per rank: one number, or one per rank")
    group.add_argument("--speeds", type=number_list, help="relative speed per rank")


def setting_of(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given."""
    given = setting_from(args)
    return {name: value for name, value in given.items() if value is not None}
