"""Flags that price plan files, shared by the verbs report and export.

Knows: that a plan file usually says itself what it is about (its "setting"), so every flag is optional and
overrules the file. Does not know: how costs are found (report/load.py).
"""

from __future__ import annotations

import argparse
from typing import Any

from octopipe.verbs.common import non_negative, number_list, whole_number


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("costs, where a plan file does not say them itself or others are wanted")
    group.add_argument("--model", help="a preset, a layer-times file or a Hugging Face config.json")
    group.add_argument("--gpu", help="GPU preset")
    group.add_argument("--tp", type=whole_number, help="tensor-parallel size")
    group.add_argument("--dp", type=whole_number, help="pipelines side by side")
    group.add_argument("--seq", type=whole_number, help="tokens per sequence")
    group.add_argument("--p2p-ms", type=non_negative, help="time of every transfer")
    group.add_argument("--memory-gib", type=number_list, help="capacity per rank: one number, or one per rank")
    group.add_argument("--speeds", type=number_list, help="relative speed per rank")


def setting_of(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given."""
    names = ("model", "gpu", "tp", "dp", "seq", "p2p_ms", "memory_gib", "speeds")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
