"""Activations in host memory on one GPU that four ranks share, against the best plan that recomputes instead.

    python benchmarks/bench_offload_gpu.py --out out/offload.json
    python benchmarks/bench_offload_gpu.py --small --device cpu         # the whole course on a CPU, with a tiny model

On ranks under MPS: a profile with the link to host memory as it is while all ranks compute and use it; fast plans that
keep everything (tuned without a limit, interleaved, ZB-V, V-Half, 1F1B) and what their peaks become with their
activations in host memory; and for ranks that have just so much memory the fastest plan without it, recomputation
allowed. Two cases are run: the one with the largest predicted gain over a plan that recomputes and, if there is one, a
plan for so little memory that no other was found. The allocators' peaks are reported beside the times. If a plan that
offloads takes more than 3 % longer than predicted, it runs once more with its moves placed for a link half as fast.

All ranks share one link to the host, as they share the GPU. The smaller their share of its multiprocessors, the longer
a layer takes in relation to its copy: `--share 4` gives the relation of long contexts or of a faster link.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from one_line import needs_device, start, write_json
from op_times import by_kind

from octopipe.models.spec import ModelSpec
from octopipe.models.zoo import llama

if TYPE_CHECKING:
    from octopipe.costs.cluster.hardware import Link
    from octopipe.costs.profile import Profile
    from octopipe.costs.table import CostTable
    from octopipe.plans.plan import Plan
    from octopipe.runtime.measure.workload import Workload
    from octopipe.runtime.ranks.rank_process import Seat
    from octopipe.runtime.ranks.world import World

RANKS = 4
GIB = float(1 << 30)
MOST_RAISES, RAISE = 9, 1.02
"""Where no plan without host memory fits, the limit is raised so often, by this factor, until one does."""


def model(small: bool, blocks: int) -> ModelSpec:
    """Blocks of Llama 3 8B, fewer of them."""
    if small:
        return llama("llama-like", blocks=8, hidden=64, ffn=160, heads=4, kv_heads=2, vocab=128)
    return llama("llama-like", blocks=blocks, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32768)


def task(seat: Seat, args: argparse.Namespace) -> dict[str, Any]:
    """Everything, on every rank; rank 0's answer counts."""
    from octopipe.runtime.measure.trial import Workload, profile_workload
    from octopipe.runtime.ranks.world import World

    world = World.make(None, None, None)
    began = time.perf_counter()
    on_gpu = args.device == "cuda"
    work = Workload(
        spec=model(args.small, args.blocks),
        tokens=args.tokens,
        device=args.device,
        precision=args.precision if on_gpu else "fp32",
    )
    profile = profile_workload(work, world, repeats=args.repeats, state_factor=0.0)
    costs = profile.costs
    link = costs.host_link
    assert link is not None
    rate = 1e-6 / max(link.ms_per_byte, 1e-12)
    seat.tell(f"profile: {time.perf_counter() - began:.0f} s; host link {rate:.1f} GB/s each way; a block "
              f"{costs.layer_ms[1]:.2f} ms, {costs.activation_bytes[1] / 2**20:.0f} MiB")  # fmt: skip
    rows = world.gather(searched(costs, world.size, args, seat) if world.rank == 0 else None)[0]
    out: dict[str, Any] = {
        "model": work.spec.name,
        "host_gb_per_s": rate,
        "limits": [{k: v for k, v in row.items() if not k.startswith("plan")} for row in rows],
    }
    able = [row for row in rows if row["without_ms"] is not None]
    alone = [row for row in rows if row["without_ms"] is None]
    plans = {}
    if able:
        best = max(able, key=lambda r: r["without_ms"] / r["with_ms"])
        plans = {"offloading": best["plan_with"], "recomputing": best["plan_without"]}
        out["limit_gib"] = best["limit_gib"]
    if alone:
        plans["offloading where nothing else fits"] = alone[0]["plan_with"]
        out["alone_limit_gib"] = alone[0]["limit_gib"]
    careful = profile.with_costs(costs.replace(host_link=slower(link, 2.0)))
    out["run"] = {}
    for name, plan in plans.items():
        ran = out["run"][name] = measured(work, plan, world, profile, args)
        told = f"{name}: {ran['measured_ms']:.1f} ms, predicted {ran['predicted_ms']:.1f}"
        seat.tell(f"{told}, {time.perf_counter() - began:.0f} s")
        late = ran["measured_ms"] > 1.03 * ran["predicted_ms"] and time.perf_counter() - began < args.most_s
        if "offloading" in name and world.gather(late)[0]:  # rank 0's word: all must agree
            again = out["run"][f"{name}, moves for half the link"] = measured(work, plan, world, careful, args)
            seat.tell(f"  half the link: {again['measured_ms']:.1f} ms, predicted {again['predicted_ms']:.1f}")
    if "recomputing" in out["run"]:
        found = [row["measured_ms"] for name, row in out["run"].items() if name.split(",")[0] == "offloading"]
        out["gain"] = out["run"]["recomputing"]["measured_ms"] / min(found)
    out["seconds"] = time.perf_counter() - began
    return out


def slower(link: Link, factor: float) -> Link:
    """The link with so many times less bandwidth."""
    return replace(link, ms_per_byte=factor * link.ms_per_byte)


def measured(work: Workload, plan: Plan, world: World, profile: Profile, args: argparse.Namespace) -> dict[str, Any]:
    """A plan's times and peaks, predicted and measured. One plan at a time: the allocator's peak is to be its own."""
    from octopipe.runtime.measure.timed_run import TimedRun
    from octopipe.simulation.contention import predict

    with closing(TimedRun(work, plan, world, profile)) as run:
        for k in range(args.warm_up + args.turns):
            run.step(timed=k >= args.warm_up)
        trial = run.trial()
        store = run.pipe.executor.ops.host
        moved = world.gather((0, 0) if store is None else (store.moved_bytes, store.buffer_bytes))
    steps = args.warm_up + args.turns
    expected = predict(plan, profile)
    return {
        "measured_ms": trial.step_ms,
        "steps_ms": list(trial.steps_ms),
        "predicted_ms": expected.makespan_ms,
        "peak_gib": [b / GIB for b in trial.peak_bytes],
        "predicted_gib": list(expected.peak_gib),
        "to_host_gib_a_step": [b / GIB / steps for b, _ in moved],
        "pinned_gib": [b / GIB for _, b in moved],
        "loss": trial.loss,
        "ops": by_kind(plan, expected, trial.timeline),
    }


def searched(costs: CostTable, ranks: int, args: argparse.Namespace, seat: Seat) -> list[dict[str, Any]]:
    """Fast plans that keep everything, what host memory leaves of their peaks, and the best plan without host memory
    (recomputation allowed) for ranks that have just that."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.search.offload import finer, offloading
    from octopipe.search.systems import build_plan
    from octopipe.search.tuner import tune
    from octopipe.simulation.simulator import simulate

    count = args.micro_batches
    free = costs.replace(rank_memory_bytes=())
    keeping = {"tuned": tune(free, ranks, count, budget_s=args.tune, copies=False, recompute=False).plan}
    for name in args.systems.split(","):
        with suppress(OctoPipeError):
            keeping[name] = build_plan(name, free, ranks, count)
    rows = []
    for name, plan in keeping.items():
        cuts = [offloading(cut, range(len(cut.stages))) for cut in (plan, finer(plan, 1), finer(plan, 2))]
        made = min(cuts, key=lambda cut: simulate(cut, free).peak_bytes.max())
        after, before = simulate(made, free), simulate(plan, free)
        limited = costs.replace(rank_memory_bytes=(1.001 * float(after.peak_bytes.max()),))
        row: dict[str, Any] = {
            "name": name,
            "kept_gib": float(before.peak_bytes.max()) / GIB,
            "limit_gib": limited.rank_memory_bytes[0] / GIB,
            "with_ms": after.step_ms,
            "host_gib": float(after.host_peak_bytes.max()) / GIB,
            "plan_with": made,
            "without_ms": None,
            "plan_without": None,
        }
        for more in range(MOST_RAISES):
            try:
                found = tune(limited, ranks, count, budget_s=args.tune, copies=False)
                row = {**row, "without_ms": found.step_ms, "plan_without": found.plan}
            except OctoPipeError as error:
                row["error"] = str(error)
            seat.tell(str({k: v for k, v in row.items() if not k.startswith("plan")}))
            if row["without_ms"] is not None or more == 0:
                rows.append(row)
            if row["without_ms"] is not None:
                break
            # Nothing else fits: at which limit does something, and how much slower is it then?
            limited = limited.replace(rank_memory_bytes=(RAISE * limited.rank_memory_bytes[0],))
            row = {**row, "limit_gib": limited.rank_memory_bytes[0] / GIB}
    return rows


def tell(found: dict[str, Any]) -> None:
    for name, row in found.get("run", {}).items():
        error = 100 * (row["predicted_ms"] / row["measured_ms"] - 1)
        print(
            f"{name}: measured {row['measured_ms']:.2f} ms, predicted {row['predicted_ms']:.2f} ({error:+.1f} %), "
            f"peak GiB {np.round(row['peak_gib'], 2).tolist()} predicted {np.round(row['predicted_gib'], 2).tolist()}, "
            f"to host {np.round(row['to_host_gib_a_step'], 2).tolist()} GiB a step, loss {row['loss']:.6f}"
        )
    print(f"offloading over recomputing: {found.get('gain', float('nan')):.3f}x; {found['seconds']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--nproc", type=int, default=RANKS)
    parser.add_argument("--systems", default="interleaved,zb-v,v-half,1f1b", help="published plans to offload")
    parser.add_argument("--share", type=float, default=4.0, help="per cent of the GPU's multiprocessors a rank")
    parser.add_argument("--tune", type=float, default=4.0, help="seconds of each search")
    parser.add_argument("--turns", type=int, default=3, help="timed steps of each plan")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each plan before")
    parser.add_argument("--most-s", type=float, default=200.0, help="no plan runs once more after so many seconds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", default="bf16-main-fp32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try it on a CPU")
    parser.add_argument("--out", default="out/offload.json")
    args = parser.parse_args()
    if args.small:
        args.tokens = min(args.tokens, 64)
    needs_device(args.device)
    from octopipe.runtime.measure.mps import Mps
    from octopipe.runtime.ranks.launch import run_ranks

    listen = lambda line: print(f"  {line}", flush=True)  # noqa: E731
    options: dict[str, Any] = {"timeout_s": 265, "listen": listen}
    if args.device == "cpu":
        found = run_ranks(task, args.nproc, args, **options)[0]
    else:
        with Mps.start(num_ranks=args.nproc, share_percent=args.share) as mps:
            found = run_ranks(task, args.nproc, args, environment=mps.environment, **options)[0]
    write_json(found, args.out)
    tell(found)


if __name__ == "__main__":
    start(main)
