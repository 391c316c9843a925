"""Where one step's time goes on a GPU, op by op: `python benchmarks/bench_step.py MODEL --phases ops,kernels,drift`.

Phases, each with its own processes, results as JSON lines in --out:
  ops      a plan on ranks that share the GPU: the host's and the device's time of every op, by kind; the device's
           gaps between ops that wait for nothing; what the allocator did
  kernels  one stage alone on the GPU under torch's profiler: kernels per op, time in kernels, idle time inside ops
  host     a stage of layers 1 and 2 alone, its ops replayed from graphs: the host's time of every op kind with an idle
           device, and the share of the ops' time in which no kernel runs
  drift    steps with an optimizer, each op kind's time step by step, whether numbers stay finite, and the kernels
           whose time changed most
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from one_line import known, needs_device, start

from octopipe.base.errors import OctoPipeError
from octopipe.cli.verbs.runnable import model_of
from octopipe.costs.profile_file import Profile, load_profile
from octopipe.costs.table import CostTable
from octopipe.plans.file import load_plan
from octopipe.plans.plan import KINDS
from octopipe.runtime.measure.timed_run import TimedRun
from octopipe.runtime.measure.trial import Workload, on_ranks
from octopipe.runtime.nn.moe import Moe
from octopipe.runtime.ranks.rank_process import Seat
from octopipe.runtime.ranks.world import World
from octopipe.runtime.stages.captured import Captured
from octopipe.runtime.stages.cuda_graphs import GraphedOps
from octopipe.runtime.stages.stage import Stage
from octopipe.runtime.values import build, flatten
from octopipe.search.systems import build_plan


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a preset or a config.json")
    parser.add_argument("--phases", default="ops,kernels,drift")
    parser.add_argument("--scale", type=float)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--system", default="zb-v")
    parser.add_argument("--plan", help="a plan file instead of --system")
    parser.add_argument("--profile", help="its costs; else equal layers")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--graphs", action="store_true", help="ops as CUDA graphs")
    parser.add_argument("--optimizer", default="none", choices=("none", "adamw"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default="out/step.jsonl")
    return parser.parse_args()


def workload(args: argparse.Namespace) -> Workload:
    spec = model_of(args.model, scale=args.scale, num_layers=args.layers)
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    return Workload(spec=spec, tokens=args.tokens, device=args.device, dtype=dtype, graphs=args.graphs)


# --- ops ---------------------------------------------------------------------------------------------------


def ops_task(seat: Seat, args: argparse.Namespace) -> dict[str, Any]:
    world, work = World.make(None, None, None), workload(args)
    if args.profile:
        profile = load_profile(args.profile)
    else:
        profile = Profile(costs=CostTable.uniform(num_layers=work.spec.num_layers, p2p_ms=0.05))
    plan = load_plan(args.plan) if args.plan else build_plan(args.system, profile.costs, world.size, args.micro_batches)
    run = TimedRun(work, plan, world, profile, optimizer=args.optimizer)
    cuda = args.device == "cuda"
    rows: list[dict[str, Any]] = []
    for k in range(args.steps):
        before = torch.cuda.memory_stats() if cuda else {}
        run.step()
        after = torch.cuda.memory_stats() if cuda else {}
        recorder, order = run.pipe.recorder, plan.orders[world.rank]
        host = np.subtract(recorder.ended, recorder.started) * 1e3
        start, end = (np.array(x) for x in recorder.times())
        device = (end - start) * 1e3
        kinds = [op.kind for op in order]
        step = {
            "step": k,
            "makespan_ms": run.timelines[-1].makespan_ms,
            "allocations": after.get("allocation.all.allocated", 0) - before.get("allocation.all.allocated", 0),
            "segments": after.get("segment.all.allocated", 0) - before.get("segment.all.allocated", 0),
        }
        for kind in "FIWBR":
            mine = [i for i, c in enumerate(kinds) if c == kind]
            if mine:
                step[kind] = {
                    "ops": len(mine),
                    "host_us": float(1e3 * np.median(host[mine])),
                    "device_us": float(1e3 * np.median(device[mine])),
                    "host_bound": float(np.mean(host[mine] > 0.98 * device[mine])),
                }
        step["busy_ms"] = float(device.sum())
        rows.append(step)
    peak = run.trial().peak_bytes
    ops = run.pipe.executor.ops
    captured, reasons = ops.captured, ops.reasons if isinstance(ops, GraphedOps) else {}
    run.close()
    return {
        "captured": captured,
        "reasons": reasons,
        "peak_gib": [b / 2**30 for b in peak],
        "phase": "ops",
        "rank": world.rank,
        "plan": args.plan or args.system,
        "steps": rows[-2:],
    }


def built(layer: Callable[[], torch.nn.Module] | torch.nn.Module) -> torch.nn.Module:
    return layer if isinstance(layer, torch.nn.Module) else layer()


# --- kernels -----------------------------------------------------------------------------------------------


def kernels_task(seat: Seat, args: argparse.Namespace) -> dict[str, Any]:
    """F, I and W of layers 1 and 2 as one stage, alone, under the profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    work = workload(args)
    device = work.place(0)
    layers = work.layers(device)
    made = [built(layers[k]) for k in range(3)]
    with torch.no_grad():
        value = made[0](work.batch(device, 1)[0])
    stage = Stage(made[1:], first_layer=1)
    cuda = device.type == "cuda"

    def once() -> None:
        with record_function("op F"):
            run = stage.forward(value)
        leaves = run.outputs if isinstance(run.outputs, torch.Tensor) else run.outputs[0]
        grads = torch.full_like(leaves, 1e-3)
        with record_function("op I"):
            run.backward_input([grads])
        with record_function("op W"):
            run.backward_weight()

    for _ in range(3):
        once()
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        once()
    host_ms = 1e3 * (time.perf_counter() - began) / 5
    if cuda:
        torch.cuda.synchronize()
    wall_ms = 1e3 * (time.perf_counter() - began) / 5
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities) as seen:
        for _ in range(3):
            once()
        if cuda:
            torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in seen.key_averages():
        time_us = getattr(event, "self_device_time_total", 0.0)
        if time_us > 0:
            kernels[event.key][0] += time_us / 3
            kernels[event.key][1] += event.count / 3
    launches = sum(n for _, n in kernels.values())
    top = sorted(kernels.items(), key=lambda kv: -kv[1][0])[:25]
    return {
        "phase": "kernels",
        "host_ms": host_ms,
        "wall_ms": wall_ms,
        "kernel_ms": sum(t for t, _ in kernels.values()) / 1e3,
        "kernels": launches,
        "top": [[name[:110], round(t, 1), n] for name, (t, n) in top],
    }


# --- host ------------------------------------------------------------------------------------------------------


def host_task(seat: Seat, args: argparse.Namespace) -> dict[str, Any]:
    """F, I and W of layers 1 and 2 as one stage, replayed from graphs; inputs and gradients are copied in, as those
    that arrive from other ranks are."""
    from torch.profiler import ProfilerActivity, profile

    from octopipe.runtime.slots import Cell
    from octopipe.runtime.stages.chain import StageChain
    from octopipe.runtime.stages.graph_memory import graph_driver

    work = workload(args)
    device = work.place(0)
    layers = work.layers(device)
    made = [built(layers[k]) for k in range(3)]
    with torch.no_grad():
        value = made[0](work.batch(device, 1)[0])
        leaf = made[1](value)
    stage = Stage(made[1:], first_layer=1)
    ops, cell = GraphedOps({0: StageChain([(stage, False)])}, None, device), Cell(0, 0, False, False, False)
    # As in the middle of a pipeline: the input is a message of a known form, the gradient comes from another rank.
    cell.input_message, cell.gradient_slot = SimpleNamespace(wanted=[True]), SimpleNamespace()  # type: ignore[assignment]
    slope = torch.full_like(leaf if isinstance(leaf, torch.Tensor) else leaf[0], 1e-3)
    host: dict[str, list[float]] = {"F": [], "I": [], "W": []}
    queued: dict[str, list[float]] = {"F": [], "I": [], "W": []}
    moved: dict[str, list[float]] = {"F": [], "I": [], "W": []}
    kept = (value, slope)

    def once(wait: bool, into: dict[str, list[float]] | None = None, given: tuple[Any, Any] = kept) -> None:
        value, slope = given
        for kind in "FIW":
            if wait:
                torch.cuda.synchronize()
            began = time.perf_counter()
            if kind == "F":
                cell.runs, _, _ = ops.forward(cell, value, cell.input_message.wanted, None, None, None)
            elif kind == "I":
                ops.backward(cell, [slope], fused=False)
            else:
                ops.weight(cell)
            if into is not None:
                into[kind].append(1e6 * (time.perf_counter() - began))

    for _ in range(ops.warm_up_steps):
        ops.begin_step()
        once(False)
        ops.end_step(whole=True)
    ops.begin_step()
    for _ in range(100):
        once(True, host)
    for _ in range(30):  # as in a step: the device has work, and its queue has room
        torch.cuda.synchronize()
        once(False)
        for _ in range(4):
            once(False, queued)
    elsewhere = rebuilt(value, torch.clone), slope.clone()
    for k in range(100):  # inputs that arrive at another address every time
        once(True, moved, elsewhere if k % 2 == 0 else kept)
    graphs: dict[str, Captured] = cell.graphs or {}
    alone = parts_alone(graphs, slope)
    span_ms = device_ms(lambda: once(False), 20)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            once(False)
        torch.cuda.synchronize()
    kernel_ms = sum(float(getattr(e, "self_device_time_total", 0.0)) for e in seen.key_averages()) / 5e3
    return {
        "phase": "host",
        "captured": ops.captured,
        "reasons": ops.reasons,
        "copies_inside": graph_driver(device) is not None,
        "nodes": {kind: one.graph.node_counts() for kind, one in graphs.items()},
        "host_us": percentiles(host),
        "queued_us": percentiles(queued),
        "moved_us": percentiles(moved),
        "parts_us": {name: round(float(np.median(us)), 2) for name, us in alone.items() if us},
        "ops_ms": span_ms,
        "kernel_ms": kernel_ms,
        "idle_share": 1.0 - kernel_ms / span_ms,
        "kernels": sum(e.count for e in seen.key_averages()) / 5,
    }


def percentiles(times_us: dict[str, list[float]]) -> dict[str, list[float]]:
    """The 10th, 50th and 90th percentile of each kind's times."""
    return {kind: [float(x) for x in np.percentile(us, (10, 50, 90))] for kind, us in times_us.items()}


def parts_alone(graphs: dict[str, Captured], slope: torch.Tensor) -> dict[str, list[float]]:
    """Launches without the copies of the inputs, and the copy alone: what is left of an op's time is Python."""
    alone: dict[str, list[float]] = {"copy": [], "empty": []}
    parts: dict[str, Callable[[], None]] = {}
    for kind, captured in graphs.items():
        parts[f"launch {kind}"] = captured.graph.replay
        parts[f"torch launch {kind}"] = captured.graph._graph.replay
    if "I" in graphs:
        parts["copy"] = lambda: graphs["I"].inputs.fill_gradients([slope])
    parts["empty"] = lambda: None
    for _ in range(100):
        for part, act in parts.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            act()
            alone.setdefault(part, []).append(1e6 * (time.perf_counter() - began))
    return alone


def device_ms(act: Callable[[], None], count: int) -> float:
    """The device's time for one of `count` calls in a row."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begun.record()
    for _ in range(count):
        act()
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended) / count


def rebuilt(value: Any, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same value with other tensors."""
    leaves: list[Any] = []
    form = flatten(value, leaves)
    return build(form, iter([act(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))


def host_words(row: dict[str, Any]) -> str:
    """The medians of the phase `host`, by op kind, as one line each."""
    lines = []
    for key, what in (
        ("host_us", "idle device"),
        ("queued_us", "device with work queued"),
        ("moved_us", "idle device, inputs at new addresses"),
    ):
        lines.append(f"host us per op, {what}: " + ", ".join(f"{kind} {us[1]:.1f}" for kind, us in row[key].items()))
    for kind, nodes in row["nodes"].items():
        lines.append(f"nodes of the graph of {kind}: " + ", ".join(f"{count} {name}" for name, count in nodes.items()))
    inside = "inside the graph" if row["copies_inside"] else "before the launch"
    lines.append(f"inputs are copied {inside}; idle device inside ops {100 * row['idle_share']:.1f} %")
    return "\n".join(lines)


# --- drift -------------------------------------------------------------------------------------------------


def drift_task(seat: Seat, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All layers on one process, as `validate` steps them: gradients kept, AdamW that changes nothing."""
    from torch.profiler import ProfilerActivity, profile

    work, world = workload(args), World.make(None, None, None)
    costs = CostTable.uniform(num_layers=work.spec.num_layers, p2p_ms=0.05)
    plan = build_plan("gpipe", costs, 1, 2, split_backward=True)
    run = TimedRun(work, plan, world, Profile(costs=costs), optimizer="adamw")
    cuda = work.device == "cuda"
    rows: list[dict[str, Any]] = []
    tables: list[dict[str, float]] = []
    for k in range(args.steps):
        activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
        if k in (1, args.steps - 1):
            with profile(activities=activities) as seen:
                run.step()
            tables.append({e.key[:110]: float(getattr(e, "self_device_time_total", 0.0)) for e in seen.key_averages()})
        else:
            run.step()
        spans = run.timelines[-1].spans
        took = {KINDS[c]: float((spans.end_ms - spans.start_ms)[spans.kind == c].sum()) for c in np.unique(spans.kind)}
        parameters = list(run.pipe.named_parameters())
        rows.append(
            {
                "phase": "drift",
                "step": k,
                "kinds_ms": {name: round(ms, 2) for name, ms in took.items()},
                "bad_parameters": [n for n, p in parameters if not bool(torch.isfinite(p).all())][:5],
                "bad_gradients": [
                    n for n, p in parameters if p.grad is not None and not bool(torch.isfinite(p.grad).all())
                ][:5],
                "largest_gradient": max(float(p.grad.abs().max()) for _, p in parameters if p.grad is not None),
                "experts": routed(run),
                "segments": torch.cuda.memory_stats()["segment.all.allocated"] if cuda else 0,
            }
        )
    names = set(tables[0]) | set(tables[-1])
    moved = sorted(names, key=lambda n: -abs(tables[-1].get(n, 0.0) - tables[0].get(n, 0.0)))[:12]
    rows.append({"phase": "drift", "kernels_us": [[n, tables[0].get(n, 0.0), tables[-1].get(n, 0.0)] for n in moved]})
    run.close()
    return rows


def routed(run: TimedRun) -> list[float]:
    """The largest share of tokens that one expert got, by layer, of the routers of our own layers."""
    out = []
    batch = run._batch[0]
    with torch.no_grad():
        value: Any = batch
        for _, module in sorted(run.pipe.modules().items())[:-1]:
            for inner in module.modules():
                if isinstance(inner, Moe):
                    hook: list[Any] = []
                    handle = inner.router.register_forward_hook(lambda m, a, o, hook=hook: hook.append(o))
                    module(value)
                    handle.remove()
                    best = hook[0].float().topk(inner.layer.top_k, dim=-1)[1].flatten()
                    out.append(round(float(torch.bincount(best).max()) / best.numel(), 3))
            value = module(value)
    return out


def main() -> None:
    args = parse()
    needs_device(args.device)
    phases = known(args.phases.split(","), ("ops", "host", "kernels", "drift"), "phase")
    if "host" in phases and args.device != "cuda":
        raise OctoPipeError("the phase host times launches of CUDA graphs, which needs a GPU; leave it out of --phases")
    target = Path(args.out)
    target.parent.mkdir(parents=True, exist_ok=True)
    for phase in phases:
        began = time.perf_counter()
        if phase == "ops":
            found: list[Any] = on_ranks(ops_task, args.nproc, args, device=args.device, timeout_s=150)
        elif phase == "host":
            found = on_ranks(host_task, 1, args, device=args.device, timeout_s=100)
        elif phase == "kernels":
            found = on_ranks(kernels_task, 1, args, device=args.device, timeout_s=100)
        else:
            found = on_ranks(drift_task, 1, args, device=args.device, timeout_s=150)[0]
        with target.open("a") as file:
            for row in found:
                file.write(json.dumps({"model": args.model, **row}) + "\n")
        print(f"{phase}: {time.perf_counter() - began:.1f} s", flush=True)
        for row in found:
            print(json.dumps(row)[:3500], flush=True)
            if phase == "host":
                print(host_words(row), flush=True)


if __name__ == "__main__":
    start(main)
