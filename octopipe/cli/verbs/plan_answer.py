"""The output of `octopipe plan`: the table, the selected split, why it was selected, the commands; and JSON.

Knows: what is printed. Does not know: flags (plan.py) or how splits are found (octopipe/search/planner/).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octopipe.base.display import milliseconds
from octopipe.cli.verbs.common import console
from octopipe.cli.verbs.numbers import exchange_words, uneven_words

if TYPE_CHECKING:
    from octopipe.costs.cluster.setup import Setup
    from octopipe.models.spec import ModelSpec
    from octopipe.search.planner.pricing import Candidate
    from octopipe.search.planner.search import Found
    from octopipe.search.planner.why import Why

    Reasons = dict[str, Why | None]


BY = {"estimated": "est.", "interleaved": "inter", "interleaved-overlap": "inter+ep"}
"""Short names of how a row was found; +ep: with the experts' exchange hidden behind computation."""


def numbers_of(args: argparse.Namespace, found: Found, lines: dict[str, str], reasons: Reasons) -> dict[str, Any]:
    """Return the answer as one JSON object."""
    from octopipe.search.planner.errors import expected_error
    from octopipe.search.planner.predictions import placement

    return {
        "model": args.model,
        "gpus": found.best.setup.num_gpus,
        "global_batch": args.global_batch,
        "best": found.best.as_dict(),
        "why": {name: None if why is None else why.as_dict() for name, why in reasons.items()},
        "setup": found.best.setup.as_dict(),
        "tokens_per_gpu_per_second": found.best.tokens_per_gpu_per_second,
        "mfu": found.best.mfu,
        "fits": found.best.fits,
        "expected_error": expected_error(found.best.setup),
        "today": None if found.today is None else found.today.as_dict(),
        "speedup_over_today": None if found.today is None else found.today.step_ms / found.best.step_ms,
        "changes": [*changes(found), *why_words(reasons), *economy_words(args, found)],
        "economy": economy_of(args, found),
        "multi_token_prediction": placement(found.best),
        "commands": lines,
        "candidates": [c.as_dict() for c in found.ranked[: args.rows]],
        "splits": found.splits,
        "judged": found.judged,
        "cut_short": found.cut_short,
        "skipped": list(found.skipped),
        "margin": found.margin,
        "fastest": None if found.fastest is None else found.fastest.as_dict(),
        "seconds": found.seconds,
        "interrupted": found.interrupted,
    }


def show(args: argparse.Namespace, spec: ModelSpec, found: Found, lines: dict[str, str], reasons: Reasons) -> None:
    """Print the answer."""
    out, best = console(), found.best
    out.print(f"[bold]{spec.name}[/] on {best.setup.words()}")
    show_table(args, found)
    for sentence in (*changes(found), *why_words(reasons), *economy_words(args, found)):
        out.print(sentence)
    if args.why is not None:
        show_why(reasons)
    if found.interrupted:
        out.print("interrupted: this is the best split so far")
    for name, line in lines.items():
        out.print(f"[bold]{name}[/]:", end=" ")
        out.print(line, markup=False, soft_wrap=True)
    if args.page:
        out.print(f"page written to {args.page}")
    if args.output:
        out.print(f"plan written to {args.output}; next: octopipe report {args.output}")


def economy_of(args: argparse.Namespace, found: Found) -> dict[str, Any]:
    """Return effects of failures, cost and energy for the selected split, as far as the flags ask for them."""
    from octopipe.search.planner.economy import Economy

    best = found.best
    asked = Economy(
        mtbf_hours=args.mtbf, checkpoint_s=args.checkpoint_s, restart_s=args.restart_s, price=args.price_per_gpu_hour
    )
    watts = None if best.setup.gpu is None else best.setup.gpu.watts
    speed = best.tokens_per_gpu_per_second
    return asked.numbers(gpus=best.setup.num_gpus, tokens_per_gpu_per_second=speed, watts=watts)


def economy_words(args: argparse.Namespace, found: Found) -> list[str]:
    from octopipe.search.planner.economy import words_of

    return words_of(economy_of(args, found)) if (args.mtbf, args.price_per_gpu_hour) != (None, None) else []


def reasons_of(found: Found, spec: ModelSpec) -> Reasons:
    """Return where the time of a step goes, for the selected split and today's."""
    from octopipe.search.planner.why import why

    found_today = {} if found.today is None else {"today": why(found.today, spec)}
    return {"best": why(found.best, spec), **found_today}


def why_words(reasons: Reasons) -> list[str]:
    """Return sentences on where the time of a step goes, and what the selected split saves."""
    from octopipe.search.planner.why import difference_words

    best, today = reasons.get("best"), reasons.get("today")
    out = [] if best is None else [f"why: of every GPU's time {best.words()}."]
    if best is not None and today is not None:
        out.append(f"{difference_words(best, today)}.")
    return out


def show_why(reasons: Reasons) -> None:
    """Print the parts of a step as a table, the selected split beside today's."""
    from rich.table import Table

    known = {name: why for name, why in reasons.items() if why is not None}
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("where the time goes")
    for name in known:
        for title in (name, "%", "hidden"):
            table.add_column(title, justify="right", no_wrap=True)
    first = next(iter(known.values()), None)
    for share in () if first is None else first.shares:
        row = [share.title]
        for why in known.values():
            part = why.of(share.name)
            hidden = f"{part.hidden_ms:.1f}" if part.hidden_ms > 0.05 else ""
            row += [f"{part.ms:.1f} ms", f"{100 * part.ms / why.step_ms:.1f}", hidden]
        table.add_row(*row)
    if first is not None:
        table.add_row("a step", *(text for why in known.values() for text in (f"{why.step_ms:.1f} ms", "100.0", "")))
    console().print(table)


def _with(size: int, by: int) -> str:
    return str(size) if by == 1 else f"{size}x{by}"


def show_table(args: argparse.Namespace, found: Found) -> None:
    """Print the splits, best first, and how many of them were evaluated."""
    from rich.table import Table

    from octopipe.search.planner.errors import errors_in_words, expected_error

    out, best = console(), found.best
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    sizes = ("tp", "cp", "ep", "pp", "vp", "dp", "mb", "Z", "recompute")
    titles = (*sizes, "tok/s", "±", "MFU%", "bub%", "GiB", "fits", "by")
    for title in titles:
        left = title in ("recompute", "by")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    rows = [*([found.today] if found.today else []), *found.ranked[: args.rows]]
    error = expected_error(best.setup)
    for c in rows:
        s = c.split
        style = "bold green" if c is best else "yellow" if c is found.today else None
        table.add_row(
            *map(str, (s.tp, s.cp, _with(s.ep, s.etp), s.pp, s.vp, s.dp, s.micro_batch_size, _with(s.zero, s.hsdp))),
            c.recompute,
            f"{c.tokens_per_gpu_per_second:.0f}",
            "?" if error is None else f"{error * c.tokens_per_gpu_per_second:.0f}",
            "" if c.mfu is None else f"{100 * c.mfu:.1f}",
            f"{100 * c.bubble:.1f}",
            f"{c.peak_gib:.0f}/{c.limit_gib:.0f}",
            "yes" if c.fits else "no",
            "today" if c is found.today else BY.get(c.how, c.how),
            style=style,
        )
    out.print(table)
    out.print("mb micro-batch, Z ZeRO, tok/s per GPU; by: how the row was found (est.: not simulated)", style="dim")
    if any(c.split.etp > 1 for c in rows):
        out.print("ep 8x2: eight expert ranks of two GPUs, which divide every expert (etp 2)", style="dim")
    if any(c.split.hsdp > 1 for c in rows):
        out.print("Z 3x4: four copies of the sharded state (hsdp 4)", style="dim")
    out.print(errors_in_words(best.setup), style="dim")
    rest = "no time for the others; give a longer --budget" if found.cut_short else "the others' bounds are worse"
    seen = f"{found.splits} splits, {found.judged} evaluated, {rest}; {found.seconds:.1f} s"
    out.print(seen, style="dim")
    for sentence in found.skipped:
        out.print(sentence, style="dim")


def experts_words(best: Candidate) -> list[str]:
    """Return words on how much of the experts' exchange the selected split hides, and what uneven routing costs it."""
    from octopipe.search.planner.pricing import evenly_routed_ms

    words = "" if best.timeline is None else exchange_words(best.timeline)
    return [w for w in (words, uneven_words(evenly_routed_ms(best), best.step_ms)) if w]


def rates_words(setup: Setup) -> str:
    """Return a sentence on which stack's rates the numbers assume, and on their errors against measured runs."""
    from octopipe.costs.analytic.calibration import is_calibrated, stack_named, stacks_on

    stack = stack_named(setup.stack)
    assert setup.gpu is not None
    if is_calibrated(setup.gpu, setup.precision, setup.stack):
        errors = "" if stack.errors is None else f" ({stack.errors.words()})"
        return f"Efficiency rates of the stack {stack.name}{errors}; --stack selects another."
    others = stacks_on(setup.gpu, setup.precision)
    instead = f" Stacks fitted on it: {', '.join(others)} (--stack)." if others else ""
    return (
        f"Efficiency rates of the stack {stack.name}, which has no calibration runs on {setup.gpu.name} in "
        f"{setup.precision}: rates of other GPUs, precisions or single kernels are used instead, so "
        f"absolute numbers may "
        f"be far off; the ranking of splits is more certain.{instead}"
    )


def changes(found: Found) -> list[str]:
    """Return sentences about the selected split, and its comparison with the split that runs today."""
    from octopipe.search.planner.predictions import placement_words

    best, today = found.best, found.today
    speed = f"{best.tokens_per_gpu_per_second:.0f} tokens/GPU/s"
    share = "" if best.mfu is None else f" ({100 * best.mfu:.1f} % MFU)"
    step = f"{milliseconds(best.step_ms)} a step, {100 * best.bubble:.1f} % bubble"
    out = [f"best: {best.split.words()}: {speed}{share}, {step}."]
    out.append(rates_words(best.setup))
    out += placement_words(best)
    out += experts_words(best)
    if found.fastest is not None:
        gain = 100 * (best.step_ms / found.fastest.step_ms - 1.0)
        out.append(
            f"{found.fastest.split.words()} ({found.fastest.how}) is predicted to be {gain:.1f} % "
            f"faster, which is less "
            "than the error of the prediction; the simpler split with memory to spare is selected (--margin 0 selects "
            "the fastest)."
        )
    if today is None:
        return out
    fits = "" if today.fits else f", and needs {today.peak_gib:.0f} of {today.limit_gib:.0f} GiB: it does not fit"
    gain = today.step_ms / best.step_ms - 1.0
    verdict = f"{100 * gain:.1f} % faster than today's" if gain > 0.0005 else "no faster than today's"
    if gain < -0.0005:  # if sizes are fixed to values that differ from today's split
        verdict = f"{100 * (best.step_ms / today.step_ms - 1.0):.1f} % slower than today's"
    unrun = f"; {found.unrun_today}, so it cannot be the answer" if found.unrun_today else ""
    pace = f"{today.tokens_per_gpu_per_second:.0f} tokens/GPU/s"
    out.append(f"{verdict} {today.split.words()} ({pace}{fits}){unrun}.")
    names = {"tp": "tensor parallelism", "cp": "context parallelism", "ep": "expert parallelism"}
    names |= {"pp": "pipeline ranks", "vp": "stages per rank", "dp": "data parallelism"}
    names |= {"micro_batch_size": "micro-batch size", "zero": "ZeRO"}
    names |= {"etp": "GPUs that share an expert", "hsdp": "copies of the sharded state"}
    moved = [
        f"{words} {getattr(today.split, name)} -> {getattr(best.split, name)}"
        for name, words in names.items()
        if getattr(today.split, name) != getattr(best.split, name)
    ]
    if today.recompute != best.recompute:
        moved.append(f"recomputation {today.recompute} -> {best.recompute}")
    if best.how == "tuned":
        moved.append("partition, placement and order tuned")
    out.append("what changed: " + (", ".join(moved) if moved else "nothing") + ".")
    return out


def provenance_of(args: argparse.Namespace, best: Candidate) -> dict[str, Any]:
    """Return the plan's set-up, and the keywords from which its costs can be computed again."""
    from octopipe.costs.cluster.asking import keyword_fields
    from octopipe.plans.setting import carried

    known = best.setup.as_dict()
    setting = {"model": args.model, **{k: known[k] for k in keyword_fields() if known.get(k) is not None}}
    if "nodes" in setting:
        del setting["gpu"]
    known_by = {"setting": setting} if best.costs is None else carried(best.costs, setting)
    return {**known_by, "setup": known, "step_ms": best.step_ms}
