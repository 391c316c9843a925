"""Predicted against measured on one GPU that several ranks share.

    python benchmarks/bench_gpu.py --phases profile,plan,run
    python benchmarks/bench_gpu.py --phases smoke,profile,plan,run --small --device cpu     # a rehearsal on a CPU

Phases, each with its own processes under MPS and its own JSON file in --out:
  smoke    gradients of a small model under three systems against one process, and the links
  profile  every model's profile, with one to all ranks at work
  plan     a plan of every system and a tuned one for these profiles, in --plans (MODEL.M.NAME.json; needs no GPU)
  run      profile again, then every plan of --plans: predicted and measured step time and memory, steps written as
           they come
  tables   Markdown from the JSON of `run` (needs no GPU)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from one_line import known, needs_device, place_for, start

from octopipe.base.errors import OctoPipeError
from octopipe.models.spec import ModelSpec
from octopipe.models.zoo import jamba, llama, nemotron_h

if TYPE_CHECKING:
    from octopipe.costs.profile import Profile
    from octopipe.plans.plan import Plan
    from octopipe.runtime.measure.workload import Workload
    from octopipe.simulation.lowering import Channel

RANKS = 4
MODELS = ("nemotron", "llama", "jamba")
SYSTEMS = ("1f1b", "interleaved", "zb-v", "mist")


def models(small: bool = False) -> dict[str, ModelSpec]:
    """The three families at a size whose quarter of a GPU is kept busy; `small` for trying things out."""
    if small:
        return {
            name: spec.scaled(0.0625)
            for name, spec in {
                "nemotron": nemotron_h(
                    "nemotron-h-like", pattern="M-M-M*-M-", hidden=2048, ffn=4096, heads=16, mamba_heads=64
                ),
                "llama": llama("llama-like", blocks=8, hidden=2048, ffn=4096, heads=16),
            }.items()
        }
    from dataclasses import replace

    from octopipe.models.spec import Mamba1, Mamba2

    nemotron = nemotron_h(
        "nemotron-h-like",
        pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-",
        hidden=2048,
        ffn=8192,
        heads=16,
        mamba_heads=64,
    )
    attention = llama("llama-like", blocks=24, hidden=2048, ffn=8192, heads=16)
    # Jamba v0.1 at half its width: two of its units, 16 experts top 2, feed-forward 3.5 times the width, its own
    # vocabulary of 65536; `jamba-128k` has the 128k words of the paper's Table II.
    own, wide = (
        jamba(name, units=2, hidden=2048, ffn=7168, heads=16, experts=16, vocab=vocab)
        for name, vocab in (("jamba-like", 65536), ("jamba-128k", 131072))
    )
    # The Mamba-2 mixer with Jamba's width and state: Mamba-1's scan without a fused kernel is bound by launches.
    mixer = Mamba2(hidden=2048, heads=64, head_dim=64, state=16)

    def mixed(spec: ModelSpec) -> ModelSpec:
        return replace(spec, layers=tuple(mixer if isinstance(x, Mamba1) else x for x in spec.layers))

    return {"nemotron": nemotron, "llama": attention, "jamba": mixed(own), "jamba-128k": mixed(wide)}


def workload(spec: ModelSpec, args: argparse.Namespace) -> Workload:
    from octopipe.runtime.measure.trial import Workload

    dtype = "bfloat16" if args.device == "cuda" else "float32"
    return Workload(spec=spec, tokens=args.tokens, device=args.device, dtype=dtype, compile_scans=not args.eager_scans)


# --- what every rank does --------------------------------------------------------------------------------


def smoke_task(rank: int, nproc: int, args: argparse.Namespace) -> dict[str, Any]:
    """Gradients of every rank's layers under several systems against one process, in float32."""
    import torch

    from octopipe.costs.table import CostTable
    from octopipe.runtime.measure.links import measure_links
    from octopipe.runtime.measure.trial import Workload
    from octopipe.runtime.nn import cross_entropy
    from octopipe.runtime.pipeline import Pipeline
    from octopipe.runtime.ranks.world import World
    from octopipe.search.systems import build_plan
    from octopipe.simulation.lowering import lower

    world = World.make(None, None, None)
    torch.backends.cuda.matmul.allow_tf32 = False
    work = Workload(spec=models(small=True)["nemotron"], tokens=256, device=args.device)
    device = work.place(rank)
    batch, target = work.batch(device, 8), work.targets(device, 8)
    whole = [factory() for factory in work.layers(device)]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for x, y in zip(batch, target):
        value: Any = x
        for module in whole:
            value = module(value)
        loss = cross_entropy(value, y) / 8
        loss.backward()
        total += loss.detach()
    out: dict[str, Any] = {"loss": float(total), "systems": {}}
    costs = CostTable.uniform(num_layers=len(whole), p2p_ms=0.01)
    for name in ("1f1b", "interleaved", "zb-v"):
        plan = build_plan(name, costs, nproc, 8)
        pipe = Pipeline(
            work.layers(device), lower(plan, costs), cross_entropy, device=device, group=world,
            transport=work.transport(world), seed=None, timeout_s=12.0,
        )  # fmt: skip
        loss_value = 0.0
        for _ in range(2):
            pipe.zero_grad()
            found = pipe.step(batch, target)
            assert found is not None
            loss_value = float(found)
        worst = 0.0
        for number, module in pipe.modules().items():
            for p, q in zip(module.parameters(), whole[number].parameters()):
                assert p.grad is not None and q.grad is not None
                worst = max(worst, float((p.grad - q.grad).norm() / (q.grad.norm() + 1e-12)))
        out["systems"][name] = {"loss": loss_value, "worst_gradient": max(world.gather(worst))}
        pipe.close()
    links = measure_links(world, device, transport=work.transport(world), sizes=(1 << 12, 1 << 20, 1 << 24))
    out["links"] = {f"{a}-{b}": [link.latency_ms, link.ms_per_byte] for (a, b), link in links.items()}
    if device.type == "cuda":
        out["multiprocessors"] = torch.cuda.get_device_properties(device).multi_processor_count
    return out


def profile_task(rank: int, nproc: int, args: argparse.Namespace) -> dict[str, bytes]:
    from octopipe.runtime.measure.trial import profile_workload
    from octopipe.runtime.ranks.world import World

    world = World.make(None, None, None)
    out = {}
    for name, spec in models(args.small).items():
        if name in args.models:
            profile = profile_workload(
                workload(spec, args), world, repeats=args.repeats, state_factor=0.0,
                levels=range(1, nproc), links=not args.no_links,
            )  # fmt: skip
            out[name] = profile.to_json()
            if rank == 0:
                Path(args.out, f"profile.{name}.json").write_bytes(out[name])
                show_profile(profile)
    return out


def show_profile(profile: Profile) -> None:
    about = profile.about
    print(
        f"{profile.costs.model}: {about['total_seconds']} s, rehearsal {about.get('rehearsal')}, "
        f"host share {about['host_share']:.2f}, "
        f"resident {about['resident_mib']:.0f} MiB, slowdown {[round(x, 3) for x in profile.costs.rank_slowdown]}"
    )
    c = profile.costs
    for symbol in dict.fromkeys(c.symbols):
        at = c.symbols.index(symbol)
        levels = {k: round(float(t.layer_ms[at] / c.layer_ms[at]), 3) for k, t in profile.partial.items()}
        print(
            f"  {symbol} all {[round(float(x[at]), 3) for x in (c.forward_ms, c.input_ms, c.weight_ms)]} part {levels} "
            f"spread {[about['spread'][k][at] for k in ('forward', 'input', 'weight')]} MiB act "
            f"{c.activation_bytes[at] / 2**20:.0f} stash {c.stash_bytes[at] / 2**20:.0f} work "
            f"{c.workspace_bytes[at] / 2**20:.0f} out {c.boundary_bytes[at] / 2**20:.0f} static "
            f"{c.static_bytes[at] / 2**20:.0f}",
            flush=True,
        )


def run_task(rank: int, nproc: int, args: argparse.Namespace) -> int:
    """Profile each model, then run its plans; rank 0 writes a line of JSON per plan."""
    import torch.distributed as dist

    from octopipe.plans.file import plan_from_json
    from octopipe.runtime.measure.trial import fidelity, profile_workload, run_plan
    from octopipe.runtime.ranks.world import World

    world = World.make(None, None, None)
    sink = Path(args.out, "results.jsonl")
    count = 0

    def stop() -> bool:
        flag = [time.time() > args.end]
        dist.broadcast_object_list(flag, src=0)
        return bool(flag[0])

    for model, jobs in args.jobs.items():
        if stop():
            break
        work = workload(models(args.small)[model], args)
        profile = profile_workload(
            work, world, repeats=args.repeats, state_factor=0.0, links=not args.no_links, levels=range(1, nproc)
        )
        if rank == 0:
            Path(args.out, f"profile.{model}.json").write_bytes(profile.to_json())
            show_profile(profile)
        for job in jobs:
            if stop():
                break
            plan = plan_from_json(job["plan"])
            row: dict[str, Any] = {"model": model, "name": job["name"], "micro_batches": plan.num_micro_batches}
            try:
                trial = run_plan(
                    work, plan, world, profile, steps=args.steps, warm_up=args.warm_up, channel=job["channel"],
                    timeout_s=30.0,
                )  # fmt: skip
            except OctoPipeError as error:
                row["error"] = str(error)
                if rank == 0:
                    with sink.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                raise
            count += 1
            if rank == 0:
                found = fidelity(plan, profile, trial, channel=job["channel"])
                row |= found.summary()
                row |= {
                    "channel": job["channel"],
                    "steps_ms": trial.steps_ms,
                    "wall_ms": trial.wall_ms,
                    "spread": trial.spread,
                    "loss": trial.loss,
                    "plain_ms": _full_load_ms(plan, profile, job["channel"]),
                    "measured_busy_ms": trial.timeline.busy_ms.tolist(),
                    "measured_bubble": trial.timeline.bubble_ratio,
                }
                with sink.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                if job.get("keep"):
                    stem = f"timeline.{model}.{plan.num_micro_batches}.{job['name']}"
                    trial.timeline.save(Path(args.out, stem + ".measured.json"))
                print(
                    f"{model:9} M={plan.num_micro_batches:2} {job['name']:12} measured {row['measured_ms']:8.2f} "
                    f"predicted {row['predicted_ms']:8.2f} ({100 * row['step_error']:+.1f} %) "
                    f"full load {row['plain_ms']:8.2f} spread {100 * trial.spread:.1f} % "
                    f"memory {100 * (row['mean_memory_error'] or 0):.1f} % "
                    f"overlap {' / '.join(f'{x:.2f}' for x in found.measured_overlap)} "
                    f"kinds { ({k: round(100 * v, 1) for k, v in row['kind_error'].items()}) } loss {trial.loss:.4f}",
                    flush=True,
                )
    return count


def _full_load_ms(plan: Plan, profile: Profile, channel: Channel) -> float:
    """What the simulator says when every op takes its time under full load."""
    from octopipe.simulation.lowering import lower
    from octopipe.simulation.simulator import simulate

    return simulate(lower(plan, profile.costs, channel=channel), profile.costs).makespan_ms


# --- the phases ------------------------------------------------------------------------------------------


def in_ranks(
    task: Callable[[int, int, argparse.Namespace], object], args: argparse.Namespace, timeout_s: float
) -> list[Any]:
    from octopipe.runtime.measure.mps import Mps
    from octopipe.runtime.ranks.launch import by_rank, run_ranks

    if args.device == "cpu":
        return run_ranks(by_rank(task), args.nproc, args, timeout_s=timeout_s)
    with Mps.start(num_ranks=args.nproc, share_percent=args.share or None) as mps:
        return run_ranks(by_rank(task), args.nproc, args, environment=mps.environment, timeout_s=timeout_s)


def tuned_plan(profile: Profile, args: argparse.Namespace, micro_batches: int) -> Plan:
    """Of some searches on the times with all ranks at work, as predicted with the ranks' real coupling: within 1 % of
    the best the plan that hides most of its transfers. Every layer on one rank: copies would have their gradients
    reduced through the host here."""
    from octopipe.search.tuner import tune
    from octopipe.simulation.contention import predict
    from octopipe.simulation.fidelity import hidden
    from octopipe.simulation.hide_transfers import hide_transfers

    found = []
    for seed in range(args.seeds):
        plan = tune(
            profile.costs, args.nproc, micro_batches, budget_s=args.tune_s, recompute=False, copies=False, seed=seed,
            workers=1,
        ).plan  # fmt: skip
        plan = hide_transfers(plan, profile.costs, budget_s=args.tune_s / 2, slack=0.002)
        timeline = predict(plan, profile)
        found.append((timeline.makespan_ms, hidden(timeline).time, plan))
        print(f"  seed {seed}: {found[-1][0]:.2f} ms, {100 * found[-1][1]:.0f} % of their time hidden", flush=True)
    best = min(ms for ms, *_ in found)
    return max((f for f in found if f[0] <= 1.01 * best), key=lambda f: f[1])[2]


def make_plans(args: argparse.Namespace) -> None:
    """Plans of every system and the tuner for the profiles in --out, before anything of them is measured."""
    from octopipe.costs.profile_file import load_profile
    from octopipe.plans.file import save_plan
    from octopipe.search.systems import build_plan
    from octopipe.simulation.contention import predict
    from octopipe.simulation.simulator import simulate

    for model in args.models:
        profile = load_profile(Path(args.out, f"profile.{model}.json"))
        costs = profile.costs
        for m in args.micro_batches:
            for name in (*SYSTEMS, "tuned"):
                try:
                    if name == "tuned":
                        plan = tuned_plan(profile, args, m)
                    else:
                        plan = build_plan(name, costs, args.nproc, m)
                except OctoPipeError as error:
                    print(f"{model} {m} {name}: {error}")
                    continue
                timeline, full = predict(plan, profile), simulate(plan, costs).makespan_ms
                print(
                    f"{model:9} M={m:2} {name:12} {timeline.makespan_ms:8.2f} ms ({full:.2f} at full load), "
                    f"peak {max(timeline.peak_gib):.1f} GiB, {len(plan.stages)} stages",
                    flush=True,
                )
                save_plan(plan, place_for(Path(args.plans, f"{model}.{m}.{name}.json")))


def jobs_of(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Plan files by model: the systems of each micro-batch count together, so that rows compare."""
    order = {name: i for i, name in enumerate((*SYSTEMS, "tuned"))}
    out: dict[str, list[dict[str, Any]]] = {}
    for model in args.models:
        found = []
        for path in sorted(Path(args.plans).glob(f"{model}.*.json")):
            _, m, name = path.stem.split(".", 2)
            if int(m) not in args.micro_batches or (args.only and name not in args.only):
                continue
            channel = "blocking" if name.endswith("-blocking") else "directed"
            keep = name == "tuned"
            found.append((channel == "blocking", int(m), order.get(name, 99), {
                "name": name, "plan": path.read_bytes(), "channel": channel, "keep": keep,
            }))  # fmt: skip
        out[model] = [job for *_, job in sorted(found, key=lambda f: f[:3])]
    return out


def tables(rows: list[dict[str, Any]]) -> str:
    """The Markdown of `docs/benchmarks.md`."""
    lines = []
    errors, memory = [], []
    for model in dict.fromkeys(r["model"] for r in rows):
        lines += [
            f"\n**{model}**\n",
            "| micro-batches | plan | measured ms | predicted ms | error | memory error, mean (worst rank) "
            "| overlap: wholly / partly / time | against 1F1B |",
            "|--:|:--|--:|--:|--:|--:|--:|--:|",
        ]
        base: dict[int, float] = {}
        for r in [r for r in rows if r["model"] == model and "error" not in r]:
            m = r["micro_batches"]
            if r["name"] == "1f1b":
                base[m] = r["measured_ms"]
            gain = f"{base[m] / r['measured_ms']:.2f}x" if m in base else ""
            errors.append(abs(r["step_error"]))
            if r["mean_memory_error"] is not None:
                memory.append(r["mean_memory_error"])
            share, o = "", r["measured_overlap"]
            if r["mean_memory_error"] is not None:
                share = f"{100 * r['mean_memory_error']:.1f} % ({100 * max(map(abs, r['memory_error'])):.1f} %)"
            lines.append(
                f"| {m} | {r['name']} | {r['measured_ms']:.1f} | {r['predicted_ms']:.1f} | "
                f"{100 * r['step_error']:+.1f} % | {share} | {100 * o['wholly']:.0f} / {100 * o['partly']:.0f} / "
                f"{100 * o['time']:.0f} % | {gain} |"
            )
    if errors:
        lines.append(
            f"\nStep time: mean error {100 * sum(errors) / len(errors):.2f} %, largest {100 * max(errors):.2f} %"
            + (f"; peak memory: mean error {100 * sum(memory) / len(memory):.2f} %." if memory else ".")
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", default="smoke")
    parser.add_argument("--out", default="out")
    parser.add_argument("--plans", default="out/plans")
    parser.add_argument("--models", default="", help=f"default: {','.join(MODELS)}; with --small, the first two")
    parser.add_argument("--micro-batches", default="8,16")
    parser.add_argument("--only", default="", help="names of plans to run, separated by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nproc", type=int, default=RANKS)
    parser.add_argument("--share", type=float, default=12.5, help="percent of the multiprocessors of a rank")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--tune-s", type=float, default=30.0)
    parser.add_argument("--limit-s", type=float, default=480.0, help="no plan starts later than this")
    parser.add_argument("--no-links", action="store_true")
    parser.add_argument("--eager-scans", action="store_true", help="Mamba-2's scan without torch.compile")
    parser.add_argument("--seeds", type=int, default=6, help="searches per tuned plan")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    phases = known(args.phases.split(","), ("smoke", "profile", "plan", "run", "tables"), "phase")
    names = list(models(args.small))
    args.models = known(args.models.split(","), names, "model") if args.models else [m for m in MODELS if m in names]
    args.micro_batches = [int(m) for m in args.micro_batches.split(",")]
    args.only = [n for n in args.only.split(",") if n]
    args.end = time.time() + args.limit_s
    if {"smoke", "profile", "run"} & set(phases):
        needs_device(args.device)
    results = place_for(Path(args.out, "results.jsonl"))
    for phase in phases:
        began = time.time()
        if phase == "smoke":
            found = in_ranks(smoke_task, args, 180.0)[0]
            Path(args.out, "smoke.json").write_text(json.dumps(found, indent=1))
            print(json.dumps(found), flush=True)
        elif phase == "profile":
            for name, data in in_ranks(profile_task, args, 400.0)[0].items():
                print(f"profile of {name}: {len(data)} bytes", flush=True)
        elif phase == "plan":
            make_plans(args)
        elif phase == "run":
            args.jobs = jobs_of(args)
            if not any(args.jobs.values()):
                raise OctoPipeError(
                    f"{args.plans}: no plans of these models here; make them with --phases profile,plan"
                )
            in_ranks(run_task, args, args.limit_s + 90.0)
        if phase in ("run", "tables"):
            if not results.exists():
                raise OctoPipeError(f"{results}: no such file; --phases run writes it")
            rows = [json.loads(line) for line in results.read_text().splitlines()]
            text = tables(rows)
            Path(args.out, "benchmarks.md").write_text(text)
            print(text, flush=True)
        print(f"phase {phase}: {time.time() - began:.1f} s", flush=True)


if __name__ == "__main__":
    start(main)
