"""Pairs on one GPU: experts' exchange hidden behind computation, predicted and measured.

    python benchmarks/bench_pairs_gpu.py [--pp 2,3] [--limit-s 200]         # one H200, 2 x pp ranks under MPS
    python benchmarks/bench_pairs_gpu.py --device cpu --small               # a rehearsal on a CPU

Every rank of a pipeline has a twin that holds the other half of the experts (ep 2), and rows go between twins through
`TokenExchange` (copy engines, CUDA IPC). Per pipeline length: gradients of a small model in float64 against one
process; a profile, which says by itself which parts of the layers exchange; then plans with pairs against the same
plans without, step by step in turns, and what the profile predicted for both. A line of JSON per plan goes to --out as
soon as it is there.

The rehearsal runs the same code on small sizes, in float32, with the same rings for rows and activations, in shared
files instead of pinned memory. Its times say nothing; what it does not reach is what only a GPU has (streams, events,
MPS). A rank that fails prints its traceback, and one that still runs shortly before the time limit writes where it
stands to --out.

The model: blocks of causal attention and experts that choose their tokens (Zhou et al., "Mixture-of-Experts with Expert
Choice Routing", 2022), so that every expert has as many rows in every step and no host needs to know a count.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from one_line import end, needs_device, start
from op_times import by_kind

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from octopipe.costs.profile import Profile
    from octopipe.costs.table import CostTable
    from octopipe.plans.plan import Plan
    from octopipe.runtime.measure.workload import Workload
    from octopipe.runtime.ranks.world import World
    from octopipe.runtime.token_exchange import TokenExchange

    # `ExpertWork` has these under the same names: where one of them is renamed, the type check fails here.
    ASKED = (
        Workload.place, Workload.transport, Workload.layers, Workload.loss, Workload.batch, Workload.targets,
        Workload.mode, Workload.compiles, Workload.groups, Workload.kinds, Workload.kernel_names,
    )  # fmt: skip

EP = 2
TRANSPORT = "cuda_ipc"
"""Between stages. On a CPU its rings lie in shared files."""
MEMORY_SHARE = 0.9
"""Of a rank's memory that plans may use: the device also holds six processes' contexts and what allocators keep."""
STACKS_S, ENDED_S = 45.0, 60.0
"""After the limit: when ranks write where they stand, and when they are ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the model and its micro-batches."""

    hidden: int = 2048
    heads: int = 16
    experts: int = 8
    per_token: int = 2
    """Experts that a token meets in the mean."""
    ffn: int = 768
    vocab: int = 8192
    blocks: int = 8
    tokens: int = 8192


SMALL = Sizes(hidden=64, heads=4, ffn=96, vocab=128, blocks=6, tokens=256)


def layer_classes() -> tuple[type[nn.Module], type[nn.Module], type[nn.Module]]:
    """torch is imported in the ranks only: a process that touches the GPU before MPS starts stays outside it."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Embedding(nn.Module):
        def __init__(self, s: Sizes, make: dict[str, Any]):
            super().__init__()
            self.table = nn.Embedding(s.vocab, s.hidden, **make)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens)

    class Head(nn.Module):
        def __init__(self, s: Sizes, make: dict[str, Any]):
            super().__init__()
            self.norm, self.out = nn.RMSNorm(s.hidden, **make), nn.Linear(s.hidden, s.vocab, bias=False, **make)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(x))

    class Block(nn.Module):
        """Without an exchange the block holds all experts."""

        def __init__(self, s: Sizes, make: dict[str, Any], moved: TokenExchange | None = None):
            super().__init__()
            self.s, self.moved = s, moved
            own = s.experts // (1 if moved is None else moved.size)
            self.norm1, self.norm2 = nn.RMSNorm(s.hidden, **make), nn.RMSNorm(s.hidden, **make)
            self.qkv = nn.Linear(s.hidden, 3 * s.hidden, bias=False, **make)
            self.proj = nn.Linear(s.hidden, s.hidden, bias=False, **make)
            self.router = nn.Linear(s.hidden, s.experts, bias=False, **make)
            self.up = nn.Parameter(torch.empty(own, s.hidden, 2 * s.ffn, **make).normal_(std=s.hidden**-0.5))
            self.down = nn.Parameter(torch.empty(own, s.ffn, s.hidden, **make).normal_(std=s.ffn**-0.5))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x))
            return x + self.experts(self.norm2(x).flatten(0, 1)).view_as(x)

        def attention(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.s.heads, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.proj(y.transpose(1, 2).flatten(2))

        def experts(self, x: Tensor) -> Tensor:
            rows = x.shape[0] * self.s.per_token // self.s.experts
            gate, chosen = self.router(x).softmax(-1).t().topk(rows, dim=-1)  # [experts, rows]
            sent = x.index_select(0, chosen.flatten())
            if self.moved is not None:
                # To the rank of each expert; there every expert's rows of all ranks side by side.
                sent = self.moved(sent).unflatten(0, (self.moved.size, -1, rows)).transpose(0, 1).flatten(0, 2)
            a, b = torch.bmm(sent.unflatten(0, (self.up.shape[0], -1)), self.up).chunk(2, -1)
            done = torch.bmm(F.silu(a) * b, self.down).flatten(0, 1)
            if self.moved is not None:
                done = done.unflatten(0, (self.up.shape[0], self.moved.size, rows)).transpose(0, 1).flatten(0, 2)
                done = self.moved(done)
            return torch.zeros_like(x).index_add(0, chosen.flatten(), done * gate.flatten()[:, None].to(x.dtype))

    return Embedding, Block, Head


def make_layers(s: Sizes, device: torch.device, dtype: torch.dtype, moved: TokenExchange | None) -> list[nn.Module]:
    import torch

    embedding, block, head = layer_classes()
    make = {"device": device, "dtype": dtype}
    torch.manual_seed(1)
    return [embedding(s, make), *(block(s, make, moved) for _ in range(s.blocks)), head(s, make)]


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(
        logits.flatten(0, 1).float() if logits.dtype.itemsize < 4 else logits.flatten(0, 1), target.flatten()
    )


def itself(layer: nn.Module) -> nn.Module:
    return layer


class ExpertWork:
    """What `profile_workload` and `TimedRun` ask of a workload."""

    graphs, micro_batch_size, compiles = False, 1, False

    def __init__(self, s: Sizes, device: str, moved: TokenExchange):
        from octopipe.costs.mode import Mode

        self.sizes, self.device, self.moved = s, device, moved
        self.precision = "bf16" if device == "cuda" else "fp32"  # not every CPU multiplies bfloat16
        self.mode = Mode(precision=self.precision)
        count = s.blocks + 2
        self.spec = SimpleNamespace(
            name="experts", pattern="E" + "X" * s.blocks + "H", num_layers=count, vocab=s.vocab, layers=()
        )
        self.groups = (0, *[1] * s.blocks, 2)
        self.kinds = ("embedding", *["attention + experts"] * s.blocks, "head")
        self.tokens = s.tokens

    def place(self, rank: int) -> torch.device:
        import torch

        if self.device == "cuda":
            torch.cuda.set_device(0)
            return torch.device("cuda", 0)
        return torch.device("cpu")

    def transport(self, world: World) -> str | None:
        return TRANSPORT

    def layers(self, device: torch.device) -> list[Callable[[], nn.Module]]:
        import torch

        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        return [partial(itself, layer) for layer in make_layers(self.sizes, device, dtype, self.moved)]

    def loss(self, layers: Sequence[object]) -> Callable[..., Tensor]:
        return loss_of

    def kernel_names(self) -> dict[str, str]:
        return {}

    def batch(self, device: torch.device, count: int, step: int = 0) -> list[Tensor]:
        import torch

        generator = torch.Generator().manual_seed(7919 * step)
        return [
            torch.randint(self.sizes.vocab, (1, self.sizes.tokens), generator=generator).to(device)
            for _ in range(count)
        ]

    def targets(self, device: torch.device, count: int) -> list[Tensor]:
        return self.batch(device, count, step=1)


def groups_of_ranks(rank: int, pp: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's pipeline and its expert group; ranks are numbered pipeline by pipeline."""
    import torch.distributed as dist

    mine: list[Any] = [None, None]
    for e in range(EP):
        members = [e * pp + p for p in range(pp)]
        group = dist.new_group(members)
        mine[0] = group if rank in members else mine[0]
    for p in range(pp):
        members = [e * pp + p for e in range(EP)]
        group = dist.new_group(members)
        mine[1] = group if rank in members else mine[1]
    return mine[0], mine[1]


def gradient_error(rank: int, pp: int, device: str) -> float:
    """Worst relative error of this rank's gradients in float64, a plan of pairs against one process."""
    import torch
    import torch.distributed as dist

    from octopipe.costs.table import CostTable
    from octopipe.runtime.pipeline import Pipeline
    from octopipe.runtime.token_exchange import TokenExchange
    from octopipe.search.systems import build_plan

    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    s = replace(SMALL, blocks=2 * pp - 2 + pp % 2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (EP, pp), mesh_dim_names=("ep", "pp"))
    moved = TokenExchange(mesh.get_group("ep"), place, timeout_s=60)
    whole = make_layers(s, place, torch.float64, None)
    mine = make_layers(s, place, torch.float64, moved)
    half = s.experts // EP
    for a, b in zip(whole, mine, strict=True):
        state = {
            name: value[moved.rank * half : (moved.rank + 1) * half] if name in ("up", "down") else value
            for name, value in a.state_dict().items()
        }
        b.load_state_dict(state)
    plan = build_plan("dualpipev", CostTable.uniform(num_layers=s.blocks + 2), pp, 2 * pp + 2)
    count = plan.num_micro_batches
    generator = torch.Generator().manual_seed(3)
    data = [torch.randint(s.vocab, (1, s.tokens), generator=generator).to(place) for _ in range(EP * count)]
    for x in data:
        y = x
        for layer in whole:
            y = layer(y)
        (loss_of(y, x) / len(data)).backward()
    expected = {f"{k}.{n}": p.grad for k, layer in enumerate(whole) for n, p in layer.named_parameters()}
    worst = 0.0
    with Pipeline(
        mine, plan, loss_of, mesh=mesh, sharded={"ep": ["*.up", "*.down"]}, device=place, transport=TRANSPORT,
        timeout_s=60,
    ) as pipe:  # fmt: skip
        part = data[moved.rank * count : (moved.rank + 1) * count]
        for _ in range(2):
            for p in pipe.parameters():
                p.grad = None
            pipe.step(part, part)
            for name, p in pipe.named_parameters():
                got, want = p.grad, expected[name]
                assert got is not None and want is not None
                if name.endswith((".up", ".down")):
                    want = want[moved.rank * half : (moved.rank + 1) * half]
                worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    dist.barrier()
    moved.close()
    return worst


def plans_of(costs: CostTable, pp: int, count: int, budget_s: float) -> dict[str, Plan]:
    """Plans with pairs by name."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.search.systems import build_plan
    from octopipe.search.tuner import tune

    out = {"tuned": tune(costs, pp, count, budget_s=budget_s, copies=False, recompute=False).plan}
    for name in ("dualpipev", "interleaved-overlap")[: 1 if budget_s < 10 else 2]:
        try:
            out[name] = build_plan(name, costs, pp, count)
        except OctoPipeError as error:
            print(f"{name}: {error}", flush=True)
    return {name: plan for name, plan in out.items() if plan.pairs}


def task(rank: int, nproc: int, args: argparse.Namespace) -> None:
    """`measured` on one rank, with what helps to find a failure: time on a GPU is short."""
    with Path(args.out, f"stacks.pp{nproc // EP}.rank{rank}.txt").open("w") as stacks:
        left_s = args.began + args.limit_s + STACKS_S - time.time()
        faulthandler.dump_traceback_later(max(1.0, left_s), file=stacks)
        try:
            measured(rank, nproc, args)
        except BaseException:
            print(f"rank {rank} of {nproc}:\n{traceback.format_exc()}", flush=True)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


def measured(rank: int, nproc: int, args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from octopipe.costs.profile_file import load_profile
    from octopipe.plans.file import plan_from_json, plan_to_json
    from octopipe.runtime.measure.trial import profile_workload
    from octopipe.runtime.ranks.world import World
    from octopipe.runtime.token_exchange import TokenExchange

    began = time.time()
    pp = nproc // EP
    if args.device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    worst: list[Any] = [None] * nproc
    dist.all_gather_object(worst, gradient_error(rank, pp, args.device))
    sink = Path(args.out, "pairs-gpu.jsonl")

    def write(row: dict[str, Any]) -> None:
        if rank == 0:
            row = {"pp": pp, "ep": EP, "seconds": round(time.time() - began, 1), **row}
            with sink.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)

    write({"gradients": max(worst)})
    gc.collect()  # the small model's memory is not the profile's
    pipeline, experts = groups_of_ranks(rank, pp)
    place = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    # Room for two exchanges of a pair at a time.
    moved = TokenExchange(experts, place, timeout_s=60, chunks=32)
    sizes = replace(Sizes(), blocks=args.blocks * pp, ffn=args.ffn, per_token=args.per_token)
    s = SMALL if args.small else sizes
    # The model is no `ModelSpec`, so this is no `Workload`; it has what is asked of one (ASKED).
    work = cast("Workload", ExpertWork(s, args.device, moved))
    world = World(pipeline)
    profile = profile_workload(work, world, repeats=args.repeats, state_factor=0.0, levels=range(1, pp))
    costs = profile.costs
    write(profile_row(profile))
    assert costs.segments is not None, "no exchange was found"
    # A pipeline's profile does not know of the other pipelines on its device.
    limits = tuple(MEMORY_SHARE * limit / EP for limit in costs.rank_memory_bytes)
    profile = profile.with_costs(costs.replace(rank_memory_bytes=limits))
    costs = profile.costs
    # All ranks must have the same profile and plans: the first one's.
    given: list[Any] = [None]
    if rank == 0:
        plans = plans_of(costs, pp, args.micro_batches or 4 * pp, args.tune_s)
        Path(args.out, f"profile.pp{pp}.json").write_bytes(profile.to_json())
        given = [{name: plan_to_json(plan) for name, plan in plans.items()}]
        for name, data in given[0].items():
            Path(args.out, f"plan.pp{pp}.{name}.json").write_bytes(data)
    dist.broadcast_object_list(given, src=0)
    profile = load_profile(Path(args.out, f"profile.pp{pp}.json"))
    exchange = exchange_share(profile.costs)
    for name, data in given[0].items():
        stop = [time.time() - began > args.limit_s]
        dist.broadcast_object_list(stop, src=0)
        if stop[0]:
            break
        row = timed_pairs(plan_from_json(data), work, world, profile, args.steps)
        write({"plan": name, "exchange_share": exchange, **row})
    dist.barrier()
    moved.close()


def profile_row(profile: Profile) -> dict[str, Any]:
    """What the profile says of layers, exchanges and the machine."""
    import numpy as np

    costs = profile.costs
    segments = costs.segments
    return {
        "F, I, W": [
            [*np.round(x, 3).tolist()[:2], round(float(x[-1]), 3)]
            for x in (costs.forward_ms, costs.input_ms, costs.weight_ms)
        ],
        "segments": None
        if segments is None
        else [segments.forward[1], segments.input[1], segments.slows_compute, segments.slows_exchange],
        "partial": {k: round(float(t.layer_ms.sum() / costs.layer_ms.sum()), 3) for k, t in profile.partial.items()},
        "about": {
            k: profile.about.get(k)
            for k in (
                "rehearsal",
                "rehearsal_of_pairs",
                "transfers_crowded",
                "host_share",
                "overlap_slowdown",
                "total_seconds",
            )
        },
        "overhead": profile.op_overhead_ms,
    }


def timed_pairs(paired: Plan, work: Workload, world: World, profile: Profile, steps: int) -> dict[str, Any]:
    """The plan with and without its pairs, timed a step of each in turn, and what was predicted for both."""
    import torch.distributed as dist

    from octopipe.runtime.measure.timed_run import TimedRun
    from octopipe.simulation.contention import predict

    both = {"pairs": paired, "without": replace(paired, pairs=frozenset())}
    made = {key: TimedRun(work, plan, world, profile, timeout_s=60.0) for key, plan in both.items()}
    for k in range(2 + steps):
        for run in made.values():
            dist.barrier()
            run.step(timed=k >= 2)
    row: dict[str, Any] = {"num_pairs": len(paired.pairs)}
    for key, run in made.items():
        trial = run.trial()
        expected = predict(both[key], profile)
        foreseen = expected.makespan_ms
        row[key] = {
            "ms": trial.step_ms, "predicted_ms": foreseen, "error": foreseen / trial.step_ms - 1,
            "steps_ms": [round(x, 2) for x in trial.steps_ms], "loss": trial.loss,
            "ops": by_kind(both[key], expected, trial.timeline),
        }  # fmt: skip
    row["gain"] = row["without"]["ms"] / row["pairs"]["ms"]
    row["promised"] = row["without"]["predicted_ms"] / row["pairs"]["predicted_ms"]
    for run in made.values():
        run.close()
    return row


def exchange_share(costs: CostTable) -> float:
    """Of the work of a step, F, I and W one after the other, how much is exchange."""
    segments = costs.segments
    assert segments is not None
    x = segments.share("F", "exchange") * costs.forward_ms + segments.share("I", "exchange") * costs.input_ms
    return float(x.sum() / costs.layer_ms.sum())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", default="2,3")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--blocks", type=int, default=3, help="per rank of a pipeline")
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--per-token", type=int, default=3, help="experts that a token meets in the mean")
    parser.add_argument("--micro-batches", type=int, default=0, help="default: four per rank of a pipeline")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tune-s", type=float, default=8.0)
    parser.add_argument("--limit-s", type=float, default=90.0, help="per pipeline length; no plan starts later")
    parser.add_argument("--out", default="out")
    args = parser.parse_args(argv)
    needs_device(args.device)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    from octopipe.runtime.measure.mps import Mps
    from octopipe.runtime.measure.trial import STEADY_MEMORY
    from octopipe.runtime.ranks.launch import by_rank, run_ranks

    limit_s = args.limit_s + ENDED_S
    failed: list[str] = []
    for pp in map(int, args.pp.split(",")):
        began = args.began = time.time()
        try:
            if args.device == "cpu":
                run_ranks(by_rank(task), EP * pp, args, environment=STEADY_MEMORY, timeout_s=limit_s)
            else:
                with Mps.start(num_ranks=EP * pp) as mps:
                    run_ranks(by_rank(task), EP * pp, args, environment=mps.environment, timeout_s=limit_s)
        except Exception as error:  # the other pipeline length is worth measuring all the same
            print(f"pp {pp}: {type(error).__name__}: {error}", flush=True)
            failed.append(f"pp {pp}")
        print(f"pp {pp}: {time.time() - began:.1f} s", flush=True)
    end(failed)


if __name__ == "__main__":
    start(main)
