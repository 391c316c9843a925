"""The executor side by side with torch.distributed.pipelining: same layers, ranks and micro-batches, on gloo.

    python benchmarks/bench_executor.py                     # everything, 2 ranks
    python benchmarks/bench_executor.py overhead schedules  # some sections
    python benchmarks/bench_executor.py --ranks 4 --json out.json

Sections: overhead (host time per op with empty layers), schedules (1F1B, interleaved, ...), split (I + W against B,
recompute against theirs), memory (peak resident memory), tuned (a small hybrid profiled, tuned and run, against their
best schedule). Ours and theirs alternate, round by round, in one world; every figure is the median of rounds, ratios
are medians of the rounds' ratios, so that a busy machine disturbs both alike. Ranks run on one thread each: give the
machine at least as many free cores as ranks.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from one_line import known, place_for, start, write_json
from torch import Tensor, nn
from two_executors import (
    THEIR_SCHEDULES,
    WIDTH,
    Block,
    Clock,
    Clocked,
    Nothing,
    loss_fn,
    our_step,
    ratio,
    rounds,
    step_theirs,
    theirs,
)

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.runtime.nn import cross_entropy
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.ranks.launch import Seat, run_ranks
from octopipe.runtime.ranks.world import World
from octopipe.runtime.ranks.world import wire as wire_of
from octopipe.runtime.stages import graph as stage_graph
from octopipe.search.recompute import recomputing
from octopipe.search.systems import build_plan

TOKENS, VOCAB = 192, 20480
# Memory given back to the system after every step comes back page by page in the next: noise for both sides.
STEADY_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_MMAP_MAX_": "0"}


# -- sections: run on every rank --------------------------------------------------------------------------


def overhead(seat: Seat, args: argparse.Namespace) -> dict[str, Any]:
    """CPU time of the executor's thread per op, less that of the same module calls.

    The module's calls are timed three times: in a loop of nothing else; in a loop that waits for a message of a
    neighbour before every micro-batch, as ops do, which leaves caches and clocks cold; and in place, with clocks
    around the layer, the loss and autograd's engine in steps of their own. Beside them: what gloo alone takes for as
    many messages, sent and received in a bare loop.
    """
    count, steps = 32, args.rounds * 6
    x = torch.randn(4, 64)
    module, ones = Nothing(), torch.ones(4, 64)

    def calls() -> None:
        leaf = x.detach().requires_grad_()
        if seat.rank == seat.size - 1:  # it calls the loss too
            torch.autograd.backward([loss_fn(module(leaf), x)])
        else:
            torch.autograd.backward([module(leaf)], [ones])

    def bare(act: Callable[[], None]) -> float:
        begin = time.thread_time()
        for _ in range(count):
            act()
        return (time.thread_time() - begin) / (2 * count) * 1e6

    exchange = _exchange(seat, x)

    def both() -> None:
        exchange()
        calls()

    # The first that this torch has is what stages call.
    engine = "engine_run_backward" if stage_graph.run_engine is None else "run_engine"
    out: dict[str, Any] = {}
    for split in (False, True):
        plan = build_plan("1f1b", CostTable.uniform(num_layers=seat.size), seat.size, count, split_backward=split)
        layers: list[nn.Module] = [Nothing() for _ in range(seat.size)]
        data = torch.randn(4 * count, 64)
        own: list[float] = []
        cold: list[float] = []
        placed: list[float] = []
        wire: list[float] = []
        per_op: list[float] = []
        ops = len(plan.orders[seat.rank])
        clock, world = Clock(), World(dist.group.WORLD)
        twins: list[nn.Module] = [Clocked(clock) for _ in range(seat.size)]
        with (
            Pipeline(layers, plan, loss_fn, group=world) as pipe,
            Pipeline(twins, plan, clock.around(loss_fn), group=world) as twin,
        ):
            messages = len(pipe.executor.program.slots) / ops  # sent and received, per op
            for _ in range(steps):
                own.append(bare(calls))
                dist.barrier()
                wire.append(bare(exchange))  # one sent and one received: per message
                cold.append(bare(both) - wire[-1])
                pipe.zero_grad()
                dist.barrier()
                begin = time.thread_time()
                pipe.step(data, data, reduce_loss=False)
                per_op.append((time.thread_time() - begin) / ops * 1e6)
                twin.zero_grad()
                clock.spent = 0.0
                with patch.object(stage_graph, engine, clock.around(getattr(stage_graph, engine))):
                    dist.barrier()
                    twin.step(data, data, reduce_loss=False)
                placed.append(clock.spent / ops * 1e6)
        out |= _per_op(split, (per_op, own, cold, placed, wire), messages)
    return out


def _per_op(split: bool, times_us: Sequence[Sequence[float]], messages: float) -> dict[str, Any]:
    """The rows of one plan. `times_us`, per step: an op, the calls in a loop, after waits and in place, a message."""
    kind, out = "I and W" if split else "B", dict[str, Any]()
    # Every op of a fused plan is one of the bare calls; of a split plan two in three are.
    share = 2 / 3 if split else 1
    # Other programs' cache misses only ever add: the quiet tenth of the steps is nearer to the truth.
    for word, pick in (("median", 0.5), ("quiet tenth", 0.1)):
        total, hot, waited, there, message = (sorted(v)[int(pick * len(v))] for v in times_us)
        out[f"F and {kind}, {word}: executor us per op"] = round(total - share * hot, 1)
        out[f"F and {kind}, {word}: the same, calls after waits"] = round(total - share * waited, 1)
        out[f"F and {kind}, {word}: the same, calls timed in place"] = round(total - there, 1)
        out[f"F and {kind}, {word}: of it gloo's own"] = round(message * messages, 1)
        calls_us = [round(v, 1) for v in (share * hot, share * waited, there)]
        out[f"F and {kind}, {word}: the module's own calls"] = calls_us
    return out


def _exchange(seat: Seat, x: Tensor) -> Callable[[], None]:
    """A tensor to the next rank and one from the rank before, both waited for, by gloo alone."""
    group = wire_of(dist.group.WORLD)
    room, there, before = torch.empty_like(x), (seat.rank + 1) % seat.size, (seat.rank - 1) % seat.size
    timeout = timedelta(seconds=60)

    def act() -> None:
        receive = group.recv([room], before, 7)
        send = group.send([x], there, 7)
        receive.wait(timeout)
        send.wait(timeout)

    return act


def schedules(seat: Seat, args: argparse.Namespace) -> dict[str, Any]:
    size, count = seat.size, max(args.micro_batches, 2 * seat.size)
    out: dict[str, Any] = {}
    for ours_name, their_name, chunks in (
        ("1f1b", "Schedule1F1B", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("zb-1p", "ScheduleInterleavedZeroBubble", 1),
    )[: 2 if args.quick else 3]:
        torch.manual_seed(0)
        layers: list[nn.Module] = [Block() for _ in range(4 * size)]
        x, y = torch.randn(count * TOKENS, WIDTH), torch.randn(count * TOKENS, WIDTH)
        costs = CostTable.uniform(num_layers=len(layers), input_ms=1.0, weight_ms=1.0, p2p_ms=0.2)
        options: dict[str, Any] = {"chunks": 2} if ours_name == "interleaved" else {}
        plan = build_plan(ours_name, costs, size, count, **options)
        schedule, modules = theirs(their_name, layers, count, chunks)
        with Pipeline(layers, plan, loss_fn, costs=costs, group=World(dist.group.WORLD)) as pipe:
            times = rounds(
                {
                    "ours": our_step(pipe, x, y),
                    "theirs": partial(step_theirs, schedule, their_name, x, y, modules),
                },
                args.rounds,
            )
        out[f"{ours_name}: ours ms"] = round(statistics.median(times["ours"]), 2)
        out[f"{ours_name}: theirs ms"] = round(statistics.median(times["theirs"]), 2)
        out[f"{ours_name}: theirs / ours"] = round(ratio(times, "theirs", "ours"), 3)
    return out


def split(seat: Seat, args: argparse.Namespace) -> dict[str, Any]:
    """I + W against B in one place, then recompute with a split backward against theirs."""
    size, count = seat.size, args.micro_batches
    out: dict[str, Any] = {}
    torch.manual_seed(0)
    layers: list[nn.Module] = [Block() for _ in range(4)]
    x, y = torch.randn(count * TOKENS, WIDTH), torch.randn(count * TOKENS, WIDTH)
    acts, pipes = {}, []
    for again in (False, True):
        for kinds in ("B", "IW"):
            stage = Stage(first=0, stop=4, rank=0, recompute=again)
            ops = [Op(0, k, m) for m in range(count) for k in ("FR" if again else "F") + kinds]
            plan = Plan(num_layers=4, num_ranks=1, num_micro_batches=count, stages=(stage,), orders=(tuple(ops),))
            pipe = Pipeline(layers, plan, loss_fn, group=World(None))
            pipes.append(pipe)
            acts[f"{kinds}{'+R' if again else ''}"] = our_step(pipe, x, y)
    times = rounds(acts, args.rounds)
    out["whole step, one rank: F, I, W / F, B"] = round(ratio(times, "IW", "B"), 3)
    out["whole step, one rank: F, R, I, W / F, R, B"] = round(ratio(times, "IW+R", "B+R"), 3)
    out |= _backwards(layers, x[:TOKENS], 4 * args.rounds)
    layers = [Block() for _ in range(4 * size)]
    checkpointed: list[nn.Module] = [Block(again=True) for _ in range(4 * size)]
    plan = recomputing(build_plan("zb-1p", CostTable.uniform(num_layers=4 * size), size, count), head=True)
    schedule, modules = theirs("ScheduleInterleavedZeroBubble", checkpointed, count, 1)
    with Pipeline(layers, plan, loss_fn, group=World(dist.group.WORLD)) as pipe:
        times = rounds(
            {
                "ours": our_step(pipe, x, y),
                "theirs": lambda: step_theirs(schedule, "ScheduleInterleavedZeroBubble", x, y, modules),
            },
            args.rounds,
        )
    out["whole step, split with recompute: ours ms"] = round(statistics.median(times["ours"]), 2)
    out["whole step, split with recompute: theirs ms"] = round(statistics.median(times["theirs"]), 2)
    out["whole step, split with recompute: theirs / ours"] = round(ratio(times, "theirs", "ours"), 3)
    return out


def _backwards(layers: list[nn.Module], x: Tensor, count: int) -> dict[str, float]:
    """Backward work alone, on one stage of four layers: ours fused and split, and theirs split."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    from octopipe.runtime.stages.stage import Stage as Runner

    blocks = {again: nn.Sequential(*(Block(again=again) for _ in layers)) for again in (False, True)}
    runner, g = Runner(layers), torch.ones_like(x)

    def ours(split: bool, again: bool) -> float:
        run = runner.forward(x, recompute=again)
        begin = time.perf_counter()
        if again:
            run.recompute()
        if split:
            run.backward_input([g])
            run.backward_weight()
        else:
            run.backward_full([g])
        return time.perf_counter() - begin

    def theirs(split: bool, again: bool) -> float:
        module, leaf = blocks[again], x.detach().requires_grad_()
        y = module(leaf)
        begin = time.perf_counter()
        if split:
            _, groups = stage_backward_input([y], [g], [leaf], module.parameters())
            stage_backward_weight(module.parameters(), groups)
        else:
            torch.autograd.backward([y], [g])
        return time.perf_counter() - begin

    acts = {
        "B": partial(ours, False, False),
        "I, W": partial(ours, True, False),
        "R, B": partial(ours, False, True),
        "R, I, W": partial(ours, True, True),
        "their I, W": partial(theirs, True, False),
        "their I, W of checkpointed layers": partial(theirs, True, True),
    }
    times: dict[str, list[float]] = {name: [] for name in acts}
    for k in range(count + 3):
        for name in random.Random(k).sample(list(acts), len(acts)):
            took = acts[name]()
            if k >= 3:  # gradients are there, as in every micro-batch but the first
                times[name].append(took)
    out = {f"backward alone: {name} ms": round(1e3 * statistics.median(v), 3) for name, v in times.items()}
    for a, b in (
        ("I, W", "B"),
        ("R, I, W", "R, B"),
        ("their I, W", "I, W"),
        ("their I, W of checkpointed layers", "R, I, W"),
    ):
        out[f"backward alone: {a} / {b}"] = round(ratio(times, a, b), 3)
    return out


def memory(seat: Seat, args: argparse.Namespace) -> dict[str, Any]:
    """Peak resident memory of one way of running, over what stands before the first step."""
    size, count, side, name = seat.size, 4 * args.micro_batches, args.side, args.schedule
    torch.manual_seed(0)
    layers: list[nn.Module] = [Block(factor=1, width=512) for _ in range(4 * size)]
    x, y = torch.randn(count * 512, 512), torch.randn(count * 512, 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if side == "ours":
        options: dict[str, Any] = {"chunks": 2} if name == "interleaved" else {}
        plan = build_plan(name, CostTable.uniform(num_layers=len(layers)), size, count, **options)
        with Pipeline(layers, plan, loss_fn, group=World(dist.group.WORLD)) as pipe:
            for _ in range(4):
                our_step(pipe, x, y)()
    else:
        full = {"1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}[name]
        schedule, modules = theirs(full, layers, count, 2 if name == "interleaved" else 1)
        for _ in range(4):
            step_theirs(schedule, full, x, y, modules)
    return {"mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def hybrid(size: int, tokens: int) -> tuple[list[nn.Module], Tensor]:
    """A small Nemotron-H, and one micro-batch: six layers a rank, and a head that costs as much as five mean layers, as
    in the published layer times of the 8B model (seven a rank on 8 ranks, the head 5.1 mean layers)."""
    from octopipe.models import layers as kinds
    from octopipe.models import mixers
    from octopipe.models.spec import ModelSpec
    from octopipe.runtime.nn import build_layers

    of: dict[str, kinds.Layer] = {
        "M": mixers.Mamba2(hidden=WIDTH, heads=8, head_dim=64, state=64, groups=1, chunk=64),
        "-": kinds.Mlp(hidden=WIDTH, ffn=4 * WIDTH, activation="relu2"),
        "*": mixers.Attention(hidden=WIDTH, heads=4, kv_heads=2, head_dim=64),
    }
    pattern = ("M-M-M*-" * size)[: 6 * size - 2]
    ends = kinds.Embedding(hidden=WIDTH, vocab=VOCAB), kinds.Head(hidden=WIDTH, vocab=VOCAB)
    spec = ModelSpec(name="small-nemotron-h", layers=(ends[0], *(of[c] for c in pattern), ends[1]))
    torch.manual_seed(0)
    return [factory() for factory in build_layers(spec, lean_head=False)], torch.randint(VOCAB, (1, tokens))


def _profile(layers: list[nn.Module], tokens: Tensor, world: World) -> CostTable:
    """What our profiler says of the layers, with all ranks at work, and of the link between two ranks."""
    from octopipe.runtime.measure.links import measure_links
    from octopipe.runtime.measure.profiler import assemble, gather, profile_layers

    # One pair stands for all: the ranks are on one machine.
    sizes = (1 << 12, 4 * tokens.numel() * WIDTH)
    link = measure_links(world, torch.device("cpu"), sizes=sizes, pairs=[(0, 1)])[0, 1]
    links = {(a, b): link for a in range(world.size) for b in range(world.size) if a != b}
    mine = profile_layers(layers, tokens, cross_entropy, tokens, repeats=7, levels=(), group=world.control)
    return assemble(gather(mine, world.control), model="hybrid", symbols="x" * len(layers), links=links).costs


def tuned(seat: Seat, args: argparse.Namespace) -> dict[str, Any]:
    """A hybrid model, profiled by our profiler with all ranks at work, tuned and run, against their schedules."""
    from octopipe.search.tuner import tune
    from octopipe.simulation.simulator import simulate

    size, count, world = seat.size, max(args.micro_batches, 2 * seat.size), World(dist.group.WORLD)
    layers, tokens = hybrid(size, args.tokens)
    kept = None if args.plans is None else Path(args.plans, f"tuned-{size}-{count}-{args.tokens}.pickle")
    if kept is not None and kept.exists():
        costs, plan = pickle.loads(kept.read_bytes())
    else:
        costs = _profile(layers, tokens, world)
        box: list[Any] = [None]
        if seat.rank == 0:
            box = [tune(costs, size, count, budget_s=args.budget_s, workers=1, recompute=False).plan]
        dist.broadcast_object_list(box, src=0)
        plan = box[0]
        if kept is not None and seat.rank == 0:
            kept.write_bytes(pickle.dumps((costs, plan)))
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    x, y = (torch.randint(VOCAB, (count, args.tokens)) for _ in range(2))
    acts: dict[str, Callable[[], Any]] = {}
    for name, chunks in THEIR_SCHEDULES.items():
        if name in args.without:
            continue
        schedule, modules = theirs(name, layers, count, chunks, cross_entropy)
        acts[name] = partial(step_theirs, schedule, name, x, y, modules)
    with Pipeline(layers, plan, cross_entropy, costs=costs, group=world) as pipe:
        acts["tuned"] = our_step(pipe, x, y)
        times = rounds(acts, args.rounds, warm_up=args.warm_up)
    out: dict[str, Any] = {f"{name} ms": round(statistics.median(values), 2) for name, values in times.items()}
    best = min((n for n in times if n != "tuned"), key=lambda n: statistics.median(times[n]))
    out["their best"] = best
    out["their best / tuned"] = round(ratio(times, best, "tuned"), 3)
    out["tuned, predicted ms"] = round(simulate(plan, costs).makespan_ms, 2)
    work = costs.forward_ms + costs.input_ms + costs.weight_ms
    out["layers and micro-batches"] = [len(layers), count]
    out["head / mean layer"] = round(float(work[-1] / work[1:-1].mean()), 2)
    out["layer ms: least, most, head"] = [round(float(v), 2) for v in (work[1:-1].min(), work[1:-1].max(), work[-1])]
    return out


SECTIONS = {"overhead": overhead, "schedules": schedules, "split": split, "memory": memory, "tuned": tuned}


def pinned(section: Callable[..., Any], seat: Seat, args: argparse.Namespace) -> Any:
    """The section, with this rank's own thread on one core (gloo's threads go where they like)."""
    if args.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[seat.rank % len(cores)]})
    return section(seat, args)


def run_section(name: str, args: argparse.Namespace) -> dict[str, Any]:
    if name != "memory":
        results = run_ranks(partial(pinned, SECTIONS[name]), args.ranks, args, threads=1, environment=STEADY_MEMORY)
        if name == "overhead":  # the rank with most to do
            return max(results, key=lambda r: max(v for k, v in r.items() if k.endswith("executor us per op")))
        return results[0]
    out: dict[str, Any] = {}
    for schedule in ("1f1b", "interleaved"):
        for side in ("ours", "theirs"):  # fresh processes: a peak never goes down
            args.side, args.schedule = side, schedule
            peaks = [r["mib"] for r in run_ranks(memory, args.ranks, args, threads=1)]
            out[f"{schedule}: {side} MiB per rank"] = [round(p) for p in peaks]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=10.0, help="of the tuner")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="per micro-batch of the hybrid model")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds of the hybrid model that do not count")
    parser.add_argument("--plans", help="folder of tuned plans and their costs: read where there, else written")
    parser.add_argument("--without", nargs="*", default=[], help="their schedules to leave out of tuned")
    parser.add_argument("--quick", action="store_true", help="1F1B and interleaved only")
    parser.add_argument("--pin", action="store_true", help="keep every rank on a core of its own")
    parser.add_argument("--json", help="write the results here too")
    args = parser.parse_args()
    known(args.sections, SECTIONS, "section")
    for path in filter(None, (args.json, args.plans and f"{args.plans}/plan")):
        place_for(path)
    results = {}
    for name in args.sections:
        results[name] = run_section(name, args)
        print(f"\n{name}")
        for key, value in results[name].items():
            print(f"  {key:45s} {value}")
    if args.json:
        write_json({"ranks": args.ranks, "torch": torch.__version__, **results}, args.json)


if __name__ == "__main__":
    start(main)
