"""`octopipe check plan.json ...`: lists everything that is wrong with plan files, one line each.

Knows: how findings are shown. Does not know: the rules (plan.py) or the deadlock proof (lowering.py).
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from octopipe.cli.verbs.common import print_json

if TYPE_CHECKING:
    from octopipe.plans.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plans", nargs="+", metavar="PLAN", help="plan files (octopipe.plan/1 or /2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from octopipe.base.errors import OctoPipeError, PlanError
    from octopipe.cli.verbs.screen import printable
    from octopipe.plans.file import load_plan

    found: dict[str, list[str]] = {}
    for path in args.plans:
        try:
            plan = load_plan(path)
        except PlanError as error:
            found[path] = list(error.problems)
            continue
        except OctoPipeError as error:
            found[path] = [str(error)]
            continue
        found[path] = _deadlocks(plan, path)
        if not found[path] and not args.json:
            routes = f", {len(plan.routes)} routes" if len(plan.routes) > 1 else ""
            print(
                f"{printable(path)}: can run: {len(plan.stages)} stages on {plan.num_ranks} ranks, "
                f"{plan.num_micro_batches} micro-batches, {sum(map(len, plan.orders))} ops{routes}; "
                "no deadlock under any channel model"
            )
    if args.json:
        print_json({"plans": [{"plan": p, "runs": not e, "problems": e} for p, e in found.items()]})
    else:
        for problems in found.values():
            for problem in problems:
                print(f"octopipe: {printable(problem)}", file=sys.stderr)
    return 2 if any(found.values()) else 0


def _deadlocks(plan: Plan, path: str) -> list[str]:
    """Return the deadlocks of the plan under every channel model; unit costs are sufficient to find them."""
    from octopipe.base.errors import DeadlockError
    from octopipe.costs.cluster.hardware import Link
    from octopipe.costs.table import CostTable
    from octopipe.simulation.lowering import CHANNELS, lower

    problems = []
    costs = CostTable.uniform(num_layers=plan.num_layers, p2p_ms=0.1).replace(host_link=Link(latency_ms=0.1))
    for channel in CHANNELS:
        try:
            lower(plan, costs, channel=channel, check=True)
        except DeadlockError as error:
            problems.append(f"{path}: {error}")
    return problems
