"""`octopipe serve`: serves a local page to tune a model and view the plans.

Knows: its flags. Does not know: the server (report/serve.py).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from octopipe.cli.verbs.common import console

if TYPE_CHECKING:
    from octopipe.costs.analytic.calibration import Stack
    from octopipe.costs.cluster.hardware import Gpu


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="additional models for the page: layer-times or config.json files"
    )
    parser.add_argument("--port", type=_port, default=8765, help="port (default: 8765; 0: any free port)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1; whoever can reach another address can use the page)",
    )
    parser.add_argument(
        "--hardware",
        metavar="FILE",
        help="GPU and network for which the page /plan plans (docs/cluster.md)",
    )
    parser.add_argument("--stack", metavar="NAME", help="stack whose efficiency rates the page /plan uses")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a port; give a number from 0 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from octopipe.costs.analytic.calibration import stack_named
    from octopipe.costs.cluster.hardware_file import read_hardware
    from octopipe.views.report.serve import make_server

    out = console(stderr=True)
    card = None if args.hardware is None else read_hardware(args.hardware)
    stack = None if args.stack is None else stack_named(args.stack)
    if card is not None:
        out.print(f"Whole clusters are planned for {card.name}, whatever GPU is selected on the page.", soft_wrap=True)
    with make_server(
        args.host, args.port, files=args.files, planner=partial(planned, card=card, stack=stack)
    ) as server:
        try:  # Ctrl-C is handled from before the line that mentions it
            out.print(f"OctoPipe is at {server.url} (stop it with Ctrl-C)", soft_wrap=True)
            if server.hosts is None:
                out.print(
                    "Listening beyond this machine: anyone who can reach this address can start searches.",
                    style="yellow",
                )
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:  # main sets the exit code for the signal
            out.print("stopped")
    return 0


def planned(
    asked: Mapping[str, Any],
    stop: Callable[[], bool] = lambda: False,
    *,
    card: Gpu | None = None,
    stack: Stack | None = None,
) -> dict[str, Any]:
    """Return the answer to the form of the page /plan: the same search as `octopipe plan`, with the plan file as text.

    `stop` returns whether to end the search early.
    """
    from octopipe.base.errors import OctoPipeError
    from octopipe.base.files import brief
    from octopipe.cli.verbs.common import whole_number
    from octopipe.cli.verbs.plan import stack_for
    from octopipe.cli.verbs.plan_answer import changes, provenance_of, reasons_of, why_words
    from octopipe.costs.cluster.asking import form_fields
    from octopipe.costs.cluster.fields import of_text
    from octopipe.costs.cluster.setup import Setup
    from octopipe.costs.resolve import default_seq, resolve_spec
    from octopipe.plans.file import plan_to_json
    from octopipe.search.planner.commands import command_lines
    from octopipe.search.planner.record import record_of, scaled
    from octopipe.search.planner.runtimes import RUNTIMES
    from octopipe.search.planner.search import search
    from octopipe.search.planner.splits import FIXABLE, parse_split

    def whole(name: str) -> int:
        try:
            return whole_number(str(asked.get(name) or ""))
        except argparse.ArgumentTypeError as error:
            raise OctoPipeError(f"{name.replace('_', ' ')}: {error}") from None

    try:
        budget_s = min(max(float(asked.get("budget_s") or 15.0), 1.0), 600.0)
        if math.isnan(budget_s):
            raise ValueError
    except (ValueError, OverflowError):
        raise OctoPipeError(f"seconds to search: {brief(asked['budget_s'])} is not a number; give 1 to 600") from None
    spec = resolve_spec(str(asked["model"]))
    if spec is None:
        raise OctoPipeError("this file contains times of one split only; choose a preset or a config.json")
    given = {name: str(asked[name]) for name in form_fields() if asked.get(name) not in (None, "")}
    read = {name: of_text(name, form_fields()[name], text) for name, text in given.items()}
    base = Setup(**{"seq": default_seq(spec), **read})
    runtime = str(asked.get("runtime") or "any")
    if runtime not in RUNTIMES:
        raise OctoPipeError(f"runtime: {brief(runtime)} is not one of {', '.join(RUNTIMES)}")
    base = replace(base, gpu=card or base.gpu)
    if base.gpu is None:
        raise OctoPipeError("no GPU is selected; choose one from the list")
    base = replace(base, stack=stack or base.stack or stack_for(None, runtime, base.gpu, base.precision))
    fixed = {name: getattr(base, name) for name in FIXABLE if name in given}
    fixed |= {name: whole(name) for name in ("pp", "vp") if asked.get(name) not in (None, "")}
    today = str(asked.get("today") or "").strip()
    gpus, batch = whole("gpus"), whole("global_batch")
    found = search(
        spec,
        base,
        gpus=gpus,
        global_batch=batch,
        fixed=fixed,
        today=parse_split(today) if today else None,
        runtime=RUNTIMES[runtime],
        recompute=given.get("recompute", "auto"),
        budget_s=budget_s,
        stop=stop,
    )
    points = []
    if not found.interrupted:
        points = scaled(spec, base, found, global_batch=batch, fixed=fixed, runtime=RUNTIMES[runtime])
    words = [*changes(found), *why_words(reasons_of(found, spec)), *found.skipped]
    lines = command_lines(found.best, spec=spec, model=str(asked["model"]), plan_file="plan.json", runtime=runtime)
    record = record_of(found, spec, words=words, scaling=points, commands=lines)
    if found.best.plan is None:
        return record
    about = provenance_of(argparse.Namespace(model=str(asked["model"])), found.best)
    plan = found.best.plan.with_extra(**about, cluster_plan=record)
    return {**record, "plan": plan_to_json(plan).decode()}
