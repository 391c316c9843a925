"""Questions that a performance lead asks of a planner, each beside the split that an expert would name.

python benchmarks/bench_questions.py                 every question; the table, and the worst ratio
python benchmarks/bench_questions.py --only 3,7      some of them
python benchmarks/bench_questions.py --today         every published run's own split given as --today instead
python benchmarks/bench_questions.py --withheld      the same runs, the search told nothing of what published runs used

Either can be run in pieces (--only 1-10); what was asked before is kept in results/questions.json.

A ratio of 1.05 means: by the same model the answer is 5 % faster than the expert's (or published) split. The expert's
split is not told to the search. `--budget` is CPU time of the search, so that a busy machine answers the same; `--wall`
makes it wall-clock time. Every answer's commands are counted; OCTOPIPE_MEGATRON_LM=<checkout> puts Megatron-LM's
through its own parser (tests/helpers/megatron_parser.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from one_line import start

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.file import count_gpus, nodes_from_object
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.runs import Run, published_runs
from octopipe.models.spec import ModelSpec
from octopipe.models.zoo import preset
from octopipe.search.planner.commands import command_lines
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import RUNTIMES
from octopipe.search.planner.search import search
from octopipe.search.planner.splits import parse_split
from octopipe.search.planner.today import split_of_today

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "questions.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A cluster and a model, and what an expert would run there."""

    about: str
    model: str
    gpus: int
    kind: str
    batch: int
    expert: str
    why: str
    """Where the expert's split comes from."""
    seq: int = 8192
    runtime: str = "any"
    more: dict[str, Any] = field(default_factory=dict)
    """Other fields of the set-up."""


MIXED = [{"gpu": "h100", "count": 2}, {"gpu": "a100", "count": 2}]
QUESTIONS: tuple[Question, ...] = (
    Question(
        about="small dense model, one node", model="llama3-8b", gpus=8, kind="h100", batch=128,
        expert="zero=2", why="plain sharded data parallelism",
    ),
    Question(
        about="dense 70B, a few nodes", model="llama3-70b", gpus=64, kind="h100", batch=1024,
        expert="tp=4,pp=4,vp=5", why="tensor parallelism in the node, interleaved pipeline across",
    ),
    Question(
        about="dense 70B in fp8", model="llama3-70b", gpus=64, kind="h100", batch=128,
        expert="tp=4,pp=8,vp=5", why="NVIDIA's recipe (Megatron-Bridge 25.11)", more={"precision": "fp8"},
    ),
    Question(
        about="few GPUs for the model", model="llama3-70b", gpus=24, kind="h100", batch=96,
        expert="tp=8,pp=3", why="whole nodes for tensor parallelism, one stage each",
    ),
    Question(
        about="405B, small batch on GB200", model="llama3.1-405b", gpus=256, kind="gb200", batch=128,
        expert="tp=4,pp=16,vp=8", why="NVIDIA's recipe (tp 4, pp 16, vp 8)", more={"precision": "fp8"},
    ),
    Question(
        about="405B on 16,384 GPUs", model="llama3.1-405b", gpus=16384, kind="h100", batch=2048,
        expert="tp=8,pp=16,vp=8", why="Llama 3's own run",
    ),
    Question(
        about="MoE, many micro-batches", model="deepseek-v3", gpus=256, kind="h800", batch=4096, seq=4096,
        expert="pp=16,ep=16,vp=4", why="deep pipeline, experts within two nodes",
    ),
    Question(
        about="DeepSeek-V3's own cluster", model="deepseek-v3", gpus=2048, kind="h800", batch=15360, seq=4096,
        expert="pp=16,ep=64", why="DeepSeek-V3's report: pp 16, ep 64, ZeRO-1", more={"precision": "fp8"},
    ),
    Question(
        about="small MoE, one node", model="qwen3-30b-a3b", gpus=8, kind="h100", batch=512, seq=4096,
        expert="ep=8", why="experts over the node, nothing else divided", more={"gradients": "bf16"},
    ),
    Question(
        about="middle MoE", model="qwen3-235b-a22b", gpus=256, kind="h100", batch=2048, seq=4096,
        expert="tp=2,pp=8,vp=4,ep=32", why="NVIDIA's recipe",
    ),
    Question(
        about="sparse MoE with wide vocabulary", model="gpt-oss-120b", gpus=64, kind="h100", batch=512, seq=4096,
        expert="pp=4,ep=8,mbs=4", why="NVIDIA's recipe (Megatron-Bridge 25.11)", more={"gradients": "bf16"},
    ),
    Question(
        about="1 T parameters, MoE", model="kimi-k2", gpus=256, kind="h100", batch=512, seq=4096,
        expert="pp=8,ep=32,vp=4", why="Automodel 26.02, its optimizer's moments alone and in bf16",
        more={"gradients": "bf16", "states": "bf16"},
    ),
    Question(
        about="long context", model="llama3-8b", gpus=64, kind="h100", batch=64, seq=131072,
        expert="tp=2,cp=8", why="context parallelism over nodes, tensor parallelism inside",
    ),
    Question(
        about="fewer sequences than GPUs", model="llama3-8b", gpus=16, kind="h100", batch=4,
        expert="cp=4", why="context parallelism instead of idle replicas",
    ),
    Question(
        about="hybrid (Mamba, attention, MLP)", model="nemotron-h-56b", gpus=64, kind="h100", batch=128,
        expert="tp=8,pp=2", why="NVIDIA trains it with tp 8 and a short pipeline",
    ),
    Question(
        about="hybrid MoE, one node", model="nemotron-3-nano-30b", gpus=8, kind="h100", batch=512, seq=4096,
        expert="ep=8,mbs=2", why="Automodel 26.02", more={"gradients": "bf16"},
    ),
    Question(
        about="huge vocabulary", model="gemma-3-27b", gpus=32, kind="h100", batch=256,
        expert="tp=4,pp=2,vp=2", why="tensor parallelism divides the head",
    ),
    Question(
        about="mixed nodes", model="llama3-8b", gpus=32, kind="", batch=128, seq=4096,
        expert="tp=2,pp=4", why="slow cards in their own stages", runtime="megatron", more={"nodes": MIXED},
    ),
    Question(
        about="older cards", model="gpt3-175b", gpus=512, kind="a100", batch=1536, seq=2048,
        expert="tp=8,pp=8,vp=4", why="Megatron-LM's published rows for 175B",
    ),
    Question(
        about="torchtitan alone", model="llama3-70b", gpus=256, kind="h100", batch=512,
        expert="tp=8,zero=3", why="torchtitan's own recipe: FSDP with tensor parallelism", runtime="torchtitan",
    ),
)  # fmt: skip


def setup_of(question: Question) -> tuple[Setup, int]:
    more = dict(question.more)
    if "nodes" in more:
        more["nodes"] = nodes_from_object({"nodes": more["nodes"]})
        names = [gpu(name) for name, _, _ in more["nodes"]]
        kind = max(names, key=lambda card: card.bf16_tflops * card.clock)
        return Setup(gpu=kind, seq=question.seq, zero=1, **more), count_gpus(more["nodes"])
    return Setup(gpu=gpu(question.kind), seq=question.seq, zero=1, **more), question.gpus


def expert_split(question: Question) -> Candidate:
    """The expert's split, simulated under the same model with as much recomputation as it takes: (interleaved) 1F1B, or
    the best of the published zero-bubble and overlapping schedules where the question leaves the runtime open."""
    base, gpus = setup_of(question)
    pricer = Pricer(preset(question.model), base, question.batch)
    found = split_of_today(pricer, gpus, parse_split(question.expert), "auto", RUNTIMES[question.runtime])
    if found.split.pp == 1 or not RUNTIMES[question.runtime].any_order:
        return found
    others = [pricer.scheduled(found.split, system) for system in ("zb-h1", "zb-v", "dualpipev")]
    return min((c for c in (found, *others) if c is not None), key=lambda c: (not c.fits, c.step_ms))


def asked(question: Question, budget_s: float, wall: bool) -> dict[str, Any]:
    """The answer beside the expert's split."""
    base, gpus = setup_of(question)
    spec = preset(question.model)
    expert = expert_split(question)
    began = time.monotonic(), time.process_time()
    found = search(
        spec,
        base,
        gpus=gpus,
        global_batch=question.batch,
        runtime=RUNTIMES[question.runtime],
        budget_s=budget_s,
        clock=time.monotonic if wall else time.process_time,
    )
    took = time.monotonic() - began[0], time.process_time() - began[1]
    best = found.best
    lines = command_lines(best, spec=spec, model=question.model, plan_file="plan.json", runtime=question.runtime)
    return {
        "about": question.about,
        "setting": f"{question.model}, {best.setup.num_gpus} x {question.kind or 'h100 and a100'}, "
        f"batch {question.batch}, {question.seq} tokens",
        "expert": f"{expert.split.words()} ({expert.how})",
        "expert_from": question.why,
        "expert_tokens": expert.tokens_per_gpu_per_second,
        "expert_fits": expert.fits,
        "answer": best.split.words(),
        "how": best.how,
        "answer_tokens": best.tokens_per_gpu_per_second,
        "ratio": expert.step_ms / best.step_ms,
        "fits": best.fits,
        "runs_on": [name for name, line in lines.items() if not line.startswith("none: ")],
        "no_line": {name: line.removeprefix("none: ") for name, line in lines.items() if line.startswith("none: ")},
        "megatron": megatron_takes(best, spec, lines),
        "seconds": took[0],
        "cpu_seconds": took[1],
        "skipped": list(found.skipped),
    }


def megatron_takes(best: Candidate, spec: ModelSpec, lines: dict[str, str]) -> str:
    """What Megatron-LM's own parser says to the line, where there is one and a checkout to ask."""
    from octopipe.search.planner.megatron_line import megatron_line

    if lines.get("megatron", "none: ").startswith("none: "):
        return "no line"
    if "OCTOPIPE_MEGATRON_LM" not in os.environ:
        return "not asked"
    try:
        line = megatron_line(best, spec)
    except OctoPipeError as error:
        return str(error)
    given = [(best.setup.num_gpus, line.environment, shlex.split(line.flags), best.split.dp)]
    parser = HERE.parent / "tests" / "helpers" / "megatron_parser.py"
    done = subprocess.run([sys.executable, str(parser)], input=json.dumps(given), capture_output=True, text=True)
    return "taken" if done.returncode == 0 else (done.stdout + done.stderr)[-300:]


def show(row: dict[str, Any]) -> None:
    unfit = "" if row["expert_fits"] else " (does not fit)"
    print(
        f"{row['ratio']:6.3f}  {row['about']}: {row['setting']}\n"
        f"        expert {row['expert_tokens']:7.0f} tok/s/GPU  {row['expert']}{unfit}\n"
        f"        answer {row['answer_tokens']:7.0f} tok/s/GPU  {row['answer']} ({row['how']}); "
        f"runs on {', '.join(row['runs_on']) or 'none'}; Megatron-LM's parser: {row['megatron']}; "
        f"{row['seconds']:.0f} s",
        flush=True,
    )


def published_questions(only: list[int] | None = None) -> Iterator[tuple[int, Run, Setup, dict[str, int]]]:
    """Every published run as a question, by its number: the run, the set-up without sizes, and its split. Another
    release of the same stack with the same split is the same question."""
    seen: set[tuple[object, ...]] = set()
    for row in published_runs():
        setup = row.setup
        base = replace(
            setup,
            tp=1,
            cp=1,
            ep=1,
            etp=None,
            pp=1,
            dp=1,
            micro_batch_size=1,
            zero=1,
            micro_batches=None,
            recompute="none",
        )
        today = {"tp": setup.tp, "cp": setup.cp, "ep": setup.ep, "pp": setup.pp, "vp": row.chunks, "zero": setup.zero}
        today |= {"micro_batch_size": setup.micro_batch_size} | ({"etp": setup.etp} if setup.etp else {})
        question = (row.spec, base, setup.num_gpus, setup.global_batch, tuple(today.values()))
        if question in seen:
            continue
        seen.add(question)
        if only is None or len(seen) in only:
            yield len(seen), row, base, today


def with_today(
    budget_s: float, wall: bool, only: list[int] | None, withheld: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every published run's split beside the answer, by its number.

    It is given as --today, so the answer is never behind it; `alone` compares the best split that the search found by
    itself, which looks at what published runs of the model used. `withheld`: it may not look at them, and today's
    split is simulated beside the search."""
    for number, row, base, today in published_questions(only):
        gpus, batch = row.setup.num_gpus, row.setup.global_batch or 1
        try:
            found = search(
                row.spec,
                base,
                gpus=gpus,
                global_batch=batch,
                today=None if withheld else today,
                published=not withheld,
                budget_s=budget_s,
                clock=time.monotonic if wall else time.process_time,
            )
        except OctoPipeError as error:
            print(f"   ---  {row.name}: {error}", flush=True)
            yield number, {"row": row.name, "ratio": None, "fits": False, "answer": str(error)}
            continue
        pricer = Pricer(row.spec, base, batch, overlaps=RUNTIMES["any"].overlaps)
        present = found.today or split_of_today(pricer, gpus, today, "auto", RUNTIMES["any"])
        own = min((c.step_ms for c in found.ranked if c.fits and c.how != "estimated"), default=math.inf)
        ratio, alone = present.step_ms / found.best.step_ms, present.step_ms / own
        fits = "" if present.fits else " (today's does not fit)"
        words = f"{present.split.words()} -> {found.best.split.words()}{fits}"
        print(f"{number:4} {ratio:6.3f} {alone:6.3f}  {row.name}: {words}", flush=True)
        yield (
            number,
            {
                "row": row.name,
                "ratio": ratio,
                "alone": alone,
                "fits": present.fits,
                "today": present.split.words(),
                "answer": found.best.split.words(),
                "budget_s": budget_s,
            },
        )


def show_published(kept: dict[str, Any], withheld: bool) -> None:
    """How often answers were behind what was published."""
    fitting = [row for row in kept.values() if row["fits"]]
    refused = sum(row["ratio"] is None for row in kept.values())
    unfit = sum(not row["fits"] for row in kept.values()) - refused
    name = "ratio" if withheld else "alone"
    short = sorted(row[name] for row in fitting if row[name] < 0.99)
    worst = "".join(f", worst {short[0]:.3f}" for _ in short[:1])
    told = "" if withheld else f"; the search without being told: behind by more than 1 % in {len(short)}{worst}"
    behind = sum(row["ratio"] < (0.99 if withheld else 1.0 - 1e-9) for row in fitting)
    print(
        f"{len(kept)} published splits {'withheld' if withheld else 'as --today'}: worst ratio "
        f"{min(row['ratio'] for row in fitting):.4f}, median {statistics.median(row['ratio'] for row in fitting):.3f}, "
        f"behind: {behind}{told}; today's does not fit: {unfit}, no answer: {refused}"
    )


def numbers_of(text: str, most: int) -> list[int]:
    """`3,7` and `10-15` as numbers between 1 and the most."""
    out: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            found = range(int(first), int(last or first) + 1)
        except ValueError:
            found = range(0)
        if not found or not 1 <= found[0] <= found[-1] <= most:
            raise OctoPipeError(f"--only {part}: give numbers from 1 to {most}, such as 3,7 or 10-15")
        out += found
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=10.0, metavar="S", help="of every search (default: 10)")
    parser.add_argument("--wall", action="store_true", help="the budget is wall-clock time")
    parser.add_argument(
        "--only",
        metavar="N,N",
        help="numbers of questions (of published runs with --today or --withheld), from 1: 3,7 or 10-15",
    )
    parser.add_argument("--today", action="store_true", help="published splits as --today")
    parser.add_argument("--withheld", action="store_true", help="published splits that the search does not know of")
    args = parser.parse_args()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if args.today or args.withheld:
        kept = before.setdefault("withheld" if args.withheld else "today", {})
        only = None if args.only is None else numbers_of(args.only, sum(1 for _ in published_questions()))
        for number, result in with_today(args.budget, args.wall, only, args.withheld):
            kept[str(number)] = result
            RESULTS.write_text(json.dumps(before, indent=1) + "\n")
        before["withheld" if args.withheld else "today"] = dict(sorted(kept.items(), key=lambda item: int(item[0])))
        show_published(kept, args.withheld)
    else:
        numbers = numbers_of(args.only, len(QUESTIONS)) if args.only else list(range(1, len(QUESTIONS) + 1))
        kept = before.get("questions", {})
        for number in numbers:
            row = asked(QUESTIONS[number - 1], args.budget, args.wall)
            show(row)
            kept[str(number)] = {**row, "budget_s": args.budget}
            before["questions"] = dict(sorted(kept.items(), key=lambda item: int(item[0])))
            RESULTS.write_text(json.dumps(before, indent=1) + "\n")
        fitting = [row for row in kept.values() if row["expert_fits"]]
        print(
            f"{len(kept)} questions: worst ratio {min(row['ratio'] for row in fitting):.3f}, "
            f"behind by more than 1 %: {sum(row['ratio'] < 0.99 for row in fitting)}, "
            f"without a command: {sum(not row['runs_on'] for row in kept.values())}"
        )
    RESULTS.write_text(json.dumps(before, indent=1) + "\n")


if __name__ == "__main__":
    start(main)
