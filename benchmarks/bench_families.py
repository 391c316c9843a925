"""Every causal language model transformers has, at tiny size: cut into layers, is it still the model?

    python benchmarks/bench_families.py [--ranks] [FAMILY ...] [-o families.json]
    python benchmarks/bench_families.py --towers          # vision-language and audio models, encoder-decoders

One line per family: `equal` (largest difference of logits, loss and gradients from the unsplit model, plain and padded
batches), `refused` (why, in one line), `no config` (the tiny config this script makes is none the family takes),
`fails` (the pieces raise something else than a refusal), `different`, or `too long` (the script gave up). `--ranks`
also runs each in a pipeline of two ranks under 1F1B, ZB-V, interleaved, an irregular and a tuned plan.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

import torch
from hf_families import every_family, tiny_config
from hf_towers import UnsplitFails, every_tower, tower_difference
from hf_twins import chained, pipeline_differences
from one_line import known, place_for, start, write_json

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface import layers
from octopipe.huggingface.examples import takes_more_than_tokens
from octopipe.huggingface.source import build_on_meta

if TYPE_CHECKING:
    from ranks import Ranks

    from octopipe.plans.plan import Plan

LIMIT_S, PATIENCE_S, LARGEST = 120, 1200, 3e7
"""Seconds of this process's own time per family, seconds by the clock (for one that hangs), and the most parameters."""


class TooLong(BaseException):  # no handler of other exceptions swallows it
    pass


def _late(*_: object) -> None:
    raise TooLong


def judge(family: str, ranks: Ranks | None, plans: Callable[[int], dict[str, Plan]] | None) -> tuple[str, str]:
    """The verdict and what goes with it."""
    try:
        config = tiny_config(family)
    except Exception as error:
        return "no config", " ".join(str(error).split())[:160]
    try:
        if takes_more_than_tokens(build_on_meta(config, dtype=torch.float64, attention=None)):
            return judge_tower(family)
        parts = layers(config, dtype=torch.float64)
        if parts.parameters > LARGEST:
            return "no config", f"{parts.parameters / 1e6:.0f} M parameters: its sizes have other names"
        _ = parts.loss_fn
    except OctoPipeError as error:
        kind = "no config" if "cannot be built" in str(error) else "refused"
        return kind, str(error)
    try:
        off = chained(family)
    except OctoPipeError as error:
        return "refused", str(error)
    except TooLong:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        if not ("double" in words.lower() or "overflow" in words) or plans is not None:
            return "no config", f"the unsplit model fails too: {words[:140]}"
        # Some families make single-precision tensors whatever the precision of their weights.
        off = chained(family, dtype=torch.float32)
        return ("equal" if off < 1e-4 else "different"), f"{off:.1e} in single precision, it knows no double"
    note = f"{off:.1e}"
    if plans is not None and off < 1e-6:
        found = pipeline_differences(ranks, family, plans(len(parts)), padded=False)
        off = max(off, *found.values())
        note += " in ranks " + ", ".join(f"{name} {value:.1e}" for name, value in found.items())
    return ("equal" if off < 1e-6 else "different"), note


def judge_tower(family: str) -> tuple[str, str]:
    """The same for a model that takes more than tokens, on an example of its inputs."""
    single = ""
    try:
        try:
            off, parts = tower_difference(family)
        except (OctoPipeError, UnsplitFails) as error:
            if not ("double" in str(error).lower() or "overflow" in str(error)):
                raise
            # Some families make single-precision tensors whatever the precision of their weights.
            off, parts = tower_difference(family, torch.float32)
            off, single = off / 100, " in single precision, it knows no double"
    except OctoPipeError as error:
        return "no config" if "cannot be built" in str(error) else "refused", str(error)
    except UnsplitFails as error:
        return "no config", f"the unsplit model fails too: {str(error)[:140]}"
    except TooLong:
        raise
    except Exception as error:
        return "fails", f"{type(error).__name__}: {' '.join(str(error).split())[:140]}"
    stacks = ", ".join(dict.fromkeys(parts.stacks[1:-1]))
    said = f"{off * 100 if single else off:.1e}{single}"
    return ("equal" if off < 1e-6 else "different"), f"{said}, {len(parts)} pieces: {stacks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--towers", action="store_true", help="the families with a tower or an encoder instead")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    if args.output:
        place_for(args.output)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for late in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(late, _late)
    ranks = plans = None
    if args.ranks:
        from hf_twins import plans as make_plans
        from ranks import shared_ranks

        ranks, plans = shared_ranks(2), make_plans
    rows, counts = [], Counter[str]()
    families = every_tower() if args.towers else every_family()
    for family in known(args.families, families, "family") or families:
        began = time.perf_counter()
        # A busy machine must not change a verdict, so the limit is on the time that this process itself computes.
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        signal.alarm(PATIENCE_S)
        try:
            verdict, note = judge_tower(family) if args.towers else judge(family, ranks, plans)
        except TooLong:
            verdict, note = "too long", f"more than {LIMIT_S} s of CPU, or {PATIENCE_S} s by the clock, at this size"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
        counts[verdict] += 1
        rows.append({"family": family, "verdict": verdict, "note": note})
        print(f"{verdict:10} {family:26} {note} [{time.perf_counter() - began:.1f} s]", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    if args.output:
        write_json(rows, args.output)


if __name__ == "__main__":
    start(main)
