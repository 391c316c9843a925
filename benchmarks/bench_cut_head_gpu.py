"""A cut head on one GPU that four ranks share, against the best plan with a whole head.

    python benchmarks/bench_cut_head_gpu.py --out out/cut_head.json
    python benchmarks/bench_cut_head_gpu.py --small --device cpu        # the whole course on a CPU, with a tiny model

The model has the sizes of Gemma 3 270M (18 blocks of width 640) or, with `--model 1b`, of Gemma 3 1B (26 blocks of
width 1152); five of six blocks have a window of 512, and the tied vocabulary has 262,144 words. On ranks under MPS: a
profile, then the loop of `octopipe tune --measure --cut-head` (published
systems, tuned, tuned with copies, tuned with a cut head; costs corrected by what ran), and in the end the fastest plan
with a whole head and the fastest with a cut one step by step in turns. Ops run call by call, because plans that fork
are not captured as CUDA graphs.
"""

from __future__ import annotations

import argparse
import math
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from one_line import needs_device, start, write_json

from octopipe.models.layers import Block, Embedding, Head, Mlp
from octopipe.models.mixers import Attention
from octopipe.models.spec import ModelSpec

if TYPE_CHECKING:
    from octopipe.costs.profile import Profile
    from octopipe.runtime.ranks.rank_process import Seat
    from octopipe.search.measured_tuning import Row

RANKS = 4


SIZES = {
    "270m": (18, 640, 2048, 4, 256, 262144),
    "1b": (26, 1152, 6912, 4, 256, 262144),
    "small": (6, 64, 128, 2, 32, 32768),
}
"""Blocks, width, feed-forward width, heads, their size and words: config.json of google/gemma-3-270m and -1b-pt, and a
model as small as a test."""


def gemma_3(size: str) -> ModelSpec:
    """The text model of Gemma 3."""
    blocks, width, ffn, heads, head_dim, vocab = SIZES[size]

    def block(number: int) -> Block:
        full = (number + 1) % 6 == 0
        attention = Attention(
            hidden=width, heads=heads, kv_heads=1, head_dim=head_dim, window=None if full else 512,
            rope_theta=1e6 if full else 1e4, qk_norm=True, post_norm=True,
        )  # fmt: skip
        return Block(mixer=attention, ffn=Mlp(hidden=width, ffn=ffn, activation="geglu", post_norm=True))

    return ModelSpec(
        name=f"gemma-3-{size}-like",
        layers=(
            Embedding(hidden=width, vocab=vocab, multiplier=math.sqrt(width)),
            *(block(k) for k in range(blocks)),
            Head(hidden=width, vocab=vocab, tied=True),
        ),
        norm_eps=1e-6,
    )


def task(seat: Seat, args: argparse.Namespace) -> dict[str, Any]:
    """Everything, on every rank; rank 0's answer counts."""
    from octopipe.runtime.measure.timed_run import TimedRun
    from octopipe.runtime.measure.trial import Workload, profile_workload
    from octopipe.runtime.measure.tuned_run import MeasuredTuneJob, tune_on_ranks
    from octopipe.runtime.ranks.world import World
    from octopipe.simulation.contention import predict

    world = World.make(None, None, None)
    began = time.perf_counter()
    on_gpu = args.device == "cuda"
    work = Workload(
        spec=gemma_3(args.model),
        tokens=args.tokens,
        device=args.device,
        precision=args.precision if on_gpu else "fp32",
    )
    profile = profile_workload(work, world, repeats=args.repeats, state_factor=0.0, levels=range(1, world.size))
    seat.tell(f"profile: {time.perf_counter() - began:.0f} s, head {profile.costs.layer_ms[-1]:.2f} ms of "
              f"{profile.costs.layer_ms.sum():.2f} ms a micro-batch")  # fmt: skip
    job = MeasuredTuneJob(
        work=work,
        profile=profile,
        num_micro_batches=args.micro_batches,
        tune_s=args.tune,
        budget_s=args.budget,
        rounds=args.rounds,
        steps=args.steps,
        systems=tuple(filter(None, args.systems.split(","))),
        copies=(False,) if args.no_copies else (False, True),
        recompute=False,
        cut_head=True,
    )
    outcome = tune_on_ranks(world, job, tell=seat.tell)
    rows = sorted(outcome.rows, key=lambda row: row.ran.step_ms)
    best = {
        "whole head": next(row for row in rows if not row.plan.forks),
        "cut head": next((row for row in rows if row.plan.forks), None),
    }
    out: dict[str, Any] = {"model": work.spec.name, "seconds": time.perf_counter() - began, **outcome.as_dict()}
    if best["cut head"] is None:
        return out | {"answer": "no plan with a cut head was found faster"}
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(closing(TimedRun(work, row.plan, world, outcome.profile)))
            for name, row in best.items()
            if row is not None
        }
        warm_up = max(2, *(run.pipe.executor.ops.warm_up_steps for run in runs.values()))
        for k in range(warm_up + args.turns):
            for run in runs.values():
                run.step(timed=k >= warm_up)
        trials = {name: run.trial() for name, run in runs.items()}
    out["ops"] = {row.name: op_ratios(row, outcome.profile) for row in best.values() if row is not None}
    out["shard_times"] = [one.record() for one in outcome.profile.costs.shard_times]
    out["turns"] = {}
    for name, trial in trials.items():
        row = best.get(name) or best["whole head"]
        assert row is not None
        corrected = predict(row.plan, outcome.profile)
        out["turns"][name] = {
            "plan": row.name,
            "measured_ms": trial.step_ms,
            "steps_ms": list(trial.steps_ms),
            "predicted_ms": row.predicted_ms,
            "predicted_after_ms": corrected.makespan_ms,
            "loss": trial.loss,
            "shards": len(row.plan.shards().get(row.plan.num_layers - 1, ())),
        }
    out["gain"] = trials["whole head"].step_ms / trials["cut head"].step_ms
    out["seconds"] = time.perf_counter() - began
    return out


def op_ratios(row: Row, profile: Profile) -> dict[str, tuple[float, float]]:
    """Measured and predicted time of all ops of a kind, in ms: those of the body, of shards of the head and of the
    embedding, and of the loss."""
    from octopipe.plans.pair_price import op_durations
    from octopipe.plans.plan import KINDS

    plan, table = row.plan, row.plan.table()
    predicted = op_durations(plan, profile.costs)
    sums: dict[str, list[float]] = {}
    for k in range(table.kind.size):
        stage = plan.stages[int(table.stage[k])]
        shard = "loss" if stage.first == stage.stop else "head shard" if stage.shard and stage.first else "body"
        shard = "embedding shard" if stage.shard and not stage.first else shard
        at = sums.setdefault(f"{shard} {KINDS[int(table.kind[k])]}", [0.0, 0.0])
        at[0] += float(row.ran.op_ms[k])
        at[1] += float(predicted[k])
    return {name: (round(took, 3), round(said, 3)) for name, (took, said) in sums.items()}


def tell(found: dict[str, Any]) -> None:
    for name, ops in found.get("ops", {}).items():
        print(f"{name}: measured and predicted ms of ops, {ops}")
    print(f"shards: {found.get('shard_times')}")
    for name, row in found.get("turns", {}).items():
        error = 100 * (row["predicted_after_ms"] / row["measured_ms"] - 1)
        first = 100 * (row["predicted_ms"] / row["measured_ms"] - 1)
        print(
            f"{name} ({row['plan']}, {row['shards']} shards): measured {row['measured_ms']:.2f} ms, predicted before "
            f"it ran {row['predicted_ms']:.2f} ({first:+.1f} %), corrected {row['predicted_after_ms']:.2f} "
            f"({error:+.1f} %), loss {row['loss']:.6f}"
        )
    answer = found.get("answer") or f"cut head over whole head: {found['gain']:.3f}x"
    print(f"{answer}; {found['seconds']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("270m", "1b", "small"), default="270m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--nproc", type=int, default=RANKS)
    parser.add_argument("--tune", type=float, default=8.0, help="seconds of each search")
    parser.add_argument("--budget", type=float, default=100.0, help="seconds of the loop")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8, help="steps of both plans in turns, in the end")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", default="bf16-main-fp32")
    parser.add_argument("--systems", default="1f1b,zb-v", help="published systems to run first")
    parser.add_argument("--share", type=float, default=12.5, help="of the multiprocessors, per rank, in percent")
    parser.add_argument("--no-copies", action="store_true", help="hold every layer once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try it on a CPU")
    parser.add_argument("--out", default="out/cut_head.json")
    args = parser.parse_args()
    if args.small:
        args.model, args.tokens = "small", min(args.tokens, 64)
    needs_device(args.device)
    from octopipe.runtime.measure.trial import on_ranks

    listen = lambda line: print(f"  {line}", flush=True)  # noqa: E731
    share = args.share if args.device == "cuda" else None
    found = on_ranks(task, args.nproc, args, device=args.device, timeout_s=280, listen=listen, share_percent=share)[0]
    write_json(found, args.out)
    tell(found)


if __name__ == "__main__":
    start(main)
