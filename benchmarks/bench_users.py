"""Eight set-ups on one GPU that several ranks share: `python benchmarks/bench_users.py --setups hf-dense,gpt-oss`.

For every set-up of `user_setups.py`, in the same processes under MPS: a profile in the mode that training runs in,
then tuning by running (`octopipe tune --measure`; on Megatron-Core's chunks `octopipe.megatron.profile` and
`octopipe.megatron.tune_measured`): 1F1B, interleaved and ZB-V, the tuned plan and the tuned plan with copies, each run
for real. One JSON line per set-up goes to --out: predicted and measured step of every plan, memory, host time per op,
corrections per layer kind. --detail keeps every op's predicted and measured time as well. --train N then trains every
one of these plans for N steps with AdamW, in the loop of `octopipe train` (`user_training.py`), and records predicted
and measured pipeline times, whole steps and memory. `--tables FILE...` makes Markdown of the lines of one or several
runs and needs no GPU; `--small --device cpu` tries everything without one.

--share is the part of the GPU's multiprocessors that a rank has, in percent. Ranks that stand for GPUs of their own
should not compete for what such GPUs do not share, the card's power and its memory's bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_line import end, known, needs_device, place_for, start
from user_setups import SETUPS
from user_tables import tables
from user_training import Train, train_chunks, train_plans, train_workload

from octopipe.costs.profile_file import Profile
from octopipe.runtime.ranks.rank_process import Seat
from octopipe.runtime.ranks.world import World
from octopipe.search.measured_tuning import Outcome
from octopipe.simulation.contention import predict

RANKS = 4
SETUP_S = 900.0
"""The most that one set-up may take."""
TRAINING = "training "
"""What the first rank tells about a set-up begins so while one of its plans is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A set-up whose plans were found and timed."""

    profile: Profile
    outcome: Outcome
    kinds: tuple[str, ...]
    """Of every layer."""
    about: dict[str, Any]
    train: Train
    """Trains one of its plans."""


class Line:
    """The line of one set-up in the file of results, written again whenever more of it is known: what a plan has shown
    is kept, whatever the next one does."""

    def __init__(self, path: str, record: dict[str, Any]):
        self._path, self.record = Path(path), record
        self._before = self._path.read_text() if self._path.exists() else ""

    def write(self) -> None:
        self._path.write_text(f"{self._before}{json.dumps(self.record)}\n")


def task(seat: Seat, args: argparse.Namespace) -> None:
    """All set-ups of one kind on every rank; rank 0 writes."""
    world = World.make(None, None, None)
    for name in args.names:
        # All ranks ask one clock: one that begins alone would wait for the others for ever.
        if not world.gather(time.time() < args.until)[0]:
            seat.tell(f"{name}: no time left")
            continue
        began = time.perf_counter()
        tune = _megatron if SETUPS[name].megatron else _ours
        tuned = tune(name, seat, world, args)
        gc.collect()
        seconds = time.perf_counter() - began
        line = Line(args.out, _record(name, tuned, args) | {"seconds": round(seconds, 1), "ranks": world.size})
        _write(line, world)
        if world.rank == 0 and args.detail:
            _write_detail(name, tuned, args)
        if args.train:
            _train(name, tuned, line, seat, world, args)
        best = tuned.outcome.best
        del tuned
        gc.collect()
        torch.compiler.reset()  # shapes of the next set-up are its own, not variants of these
        line.record["left_gib"] = _forget() if args.device == "cuda" else 0.0
        _write(line, world)
        seat.tell(f"{name}: {time.perf_counter() - began:.0f} s, {best.name} {best.ran.step_ms:.1f} ms")


def _write(line: Line, world: World) -> None:
    if world.rank == 0:
        line.write()


def _train(name: str, tuned: Tuned, line: Line, seat: Seat, world: World, args: argparse.Namespace) -> None:
    """Train the set-up's plans, each recorded as soon as it is through."""
    plans: list[dict[str, Any]] = []
    line.record["train"] = {"steps": args.train, "optimizer": "adamw", "plans": plans}
    device = torch.device(args.device, seat.local_rank % torch.cuda.device_count()) if args.device == "cuda" else None
    for found in train_plans(
        world,
        tuned.outcome,
        tuned.profile,
        tuned.kinds,
        tuned.train,
        device=device or torch.device("cpu"),
        timeout_s=args.timeout,
        until=args.until,
        tell=lambda text: seat.tell(f"{name}: {text}"),
    ):
        plans.append(found)
        _write(line, world)


def _forget() -> float:
    """What libraries keep is made anew, and so counted, by the next set-up's profile, as in a process of its own: the
    workspaces of cuBLAS, and the buffer in which Megatron-Core multiplies queries and keys. Returns the GiB left."""
    kept = getattr(sys.modules.get("megatron.core.parallel_state"), "_GLOBAL_MEMORY_BUFFER", None)
    if kept is not None:
        kept.buffer.clear()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return round(torch.cuda.memory_allocated() / (1 << 30), 3)


def _ours(name: str, seat: Seat, world: World, args: argparse.Namespace) -> Tuned:
    """A set-up on octopipe's own runtime."""
    from octopipe.cli.verbs.runnable import model_of
    from octopipe.runtime.measure.trial import Workload, profile_workload
    from octopipe.runtime.measure.tuned_run import MeasuredTuneJob, tune_on_ranks

    setup, model, cuda = SETUPS[name], SETUPS[name].model, args.device == "cuda"
    if isinstance(model, dict):
        path = Path(tempfile.mkdtemp()) / "config.json"
        path.write_text(json.dumps(_shrunk(model) if args.small else model))
        spec = model_of(str(path))
    else:
        spec = model_of(model, scale=0.03 if args.small else setup.scale, num_layers=setup.layers)
    work = Workload(
        spec=spec,
        tokens=32 if args.small else setup.tokens,
        device=args.device,
        precision=args.precision if cuda else "fp32",
        graphs=cuda and not args.calls,
    )
    seat.tell(f"{name}: profile")
    profile = profile_workload(work, world, repeats=args.repeats, state_factor=0.0)
    job = MeasuredTuneJob(
        work=work,
        profile=profile,
        num_micro_batches=8 if args.small else setup.micro_batches,
        tune_s=args.tune,
        budget_s=args.budget,
        rounds=args.rounds,
        steps=args.steps,
        copies=(False, True) if args.copies else (False,),
        timeout_s=args.timeout,
    )
    outcome = tune_on_ranks(world, job, tell=seat.tell)
    return Tuned(
        profile=profile,
        outcome=outcome,
        kinds=tuple(work.kinds),
        about={"precision": work.precision, "graphs": work.graphs},
        train=partial(train_workload, seat, work, steps=args.train, timeout_s=args.timeout),
    )


def _megatron(name: str, seat: Seat, world: World, args: argparse.Namespace) -> Tuned:
    """A set-up on Megatron-Core's chunks, through the drop-in."""
    import megatron_chunks as chunks

    from octopipe import megatron
    from octopipe.costs.table import CostTable
    from octopipe.search.systems import build_plan

    setup = SETUPS[name]
    if args.small:
        sizes = chunks.Chunks(
            pattern=setup.megatron[:8], width=64, heads=2, ffn=128, vocab=256, tokens=32, device=args.device,
            mamba_heads=4, mamba_head_dim=16, mamba_state=16, mamba_groups=1,
        )  # fmt: skip
    else:
        sizes = chunks.Chunks(
            pattern=setup.megatron, width=2048, heads=16, ffn=8192, vocab=131072, tokens=setup.tokens,
            device=args.device,
        )  # fmt: skip
    if not args.started:
        chunks.start(args.device, world.size)
        args.started = True
    count = 8 if args.small else setup.micro_batches
    batches = sizes.step_data(count)
    transport = "cuda_ipc" if args.device == "cuda" else None
    usual: dict[str, Any] = {
        "forward_step_func": chunks.forward_step,
        "seq_length": sizes.tokens,
        "micro_batch_size": 1,
        "transport": transport,
    }
    plan = build_plan("1f1b", CostTable.uniform(num_layers=sizes.num_layers), world.size, count)
    seat.tell(f"{name}: profile")
    built = sizes.build(plan)
    more: dict[str, Any] = {"plan": plan, "name": name, "repeats": args.repeats, "state_bytes_per_parameter": 0.0}
    profile = megatron.profile(built, data_iterator=iter(batches), **more, **usual)
    del built
    outcome = megatron.tune_measured(
        profile,
        sizes.build,
        data=lambda: iter(batches),
        num_micro_batches=count,
        tune_s=args.tune,
        budget_s=args.budget,
        rounds=args.rounds,
        steps=args.steps,
        flags_too=True,
        tell=seat.tell,
        **usual,
    )

    def arguments(built: list[Any]) -> dict[str, Any]:
        mine = {name: value for name, value in usual.items() if name != "transport"}
        return {"data_iterator": iter(batches), "model": built, "num_microbatches": count, **mine}

    return Tuned(
        profile=profile,
        outcome=outcome,
        kinds=tuple(profile.about["layers"]),
        about={"precision": str(profile.mode), "graphs": False},
        train=partial(
            train_chunks, world, sizes.build, arguments, steps=args.train, transport=transport, timeout_s=args.timeout
        ),
    )


def _record(name: str, tuned: Tuned, args: argparse.Namespace) -> dict[str, Any]:
    """What is known of a set-up once its plans have been timed."""
    profile, outcome = tuned.profile, tuned.outcome
    told = outcome.as_dict()
    for row, kept in zip(told["rows"], outcome.rows):
        predicted = predict(kept.plan, profile if row["round"] == 0 else outcome.profile)
        row["final_error"] = predict(kept.plan, outcome.profile).reduced_ms / row["measured_ms"] - 1.0
        row["predicted_gib"] = list(predicted.peak_gib)
        row["stages"] = [[s.first, s.stop, s.rank, s.recompute] for s in kept.plan.stages]
        row["ops_per_rank"] = max(len(order) for order in kept.plan.orders)
        row["reduction_ms"] = round(predicted.reduced_ms - predicted.makespan_ms, 2)
        row["load"] = round(float(np.sum(kept.ran.op_ms)) / kept.plan.num_ranks / kept.ran.step_ms, 4)
    return {
        "setup": name,
        "share": args.share,
        **tuned.about,
        "layer_ms": {kind: profile.costs.layer_ms[i] for i, kind in enumerate(tuned.kinds)},
        "host_share": profile.about.get("host_share"),
        "rehearsal": profile.about.get("rehearsal"),
        "overlap_slowdown": profile.about.get("overlap_slowdown"),
        "date": time.strftime("%Y-%m-%d"),
        **told,
    }


def _write_detail(name: str, tuned: Tuned, args: argparse.Namespace) -> None:
    """Every op's predicted and measured time."""
    profile, outcome = tuned.profile, tuned.outcome
    details = []
    for row in outcome.rows:
        spans = predict(row.plan, profile if row.round == 0 else outcome.profile).spans
        details.append(
            {
                "name": row.name,
                "stages": [[s.first, s.stop, s.rank, s.recompute] for s in row.plan.stages],
                "orders": [[str(op) for op in order] for order in row.plan.orders],
                "predicted": np.round([spans.start_ms, spans.end_ms - spans.start_ms], 4).tolist(),
                "measured": np.round([row.ran.start_ms, row.ran.op_ms], 4).tolist(),
            }
        )
    kept_profiles = {"profile": json.loads(profile.to_json()), "corrected": json.loads(outcome.profile.to_json())}
    with Path(args.detail).open("a") as file:
        file.write(json.dumps({"setup": name, "share": args.share, **kept_profiles, "rows": details}) + "\n")


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 128, "head_dim": 16}
    return config | small | {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32}


def _note_end(path: str, name: str, plan: str, why: str) -> None:
    """Record a plan whose training ended the ranks in the line of its set-up, unless they did so themselves."""
    *before, last = Path(path).read_text().splitlines()
    record = json.loads(last)
    plans = record.setdefault("train", {}).setdefault("plans", [])
    if record["setup"] == name and plan not in [one["name"] for one in plans]:
        plans.append({"name": plan, "error": " ".join(why.split())})
        Path(path).write_text("".join(f"{line}\n" for line in (*before, json.dumps(record))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", default=",".join(SETUPS))
    parser.add_argument("--tune", type=float, default=5.0, help="seconds of each search")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of each set-up's loop")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", default="bf16-main-fp32")
    parser.add_argument("--share", type=float, default=12.5, help="of the multiprocessors, per rank, in percent")
    parser.add_argument("--calls", action="store_true", help="call by call instead of CUDA graphs")
    parser.add_argument("--copies", action="store_true", help="also tuned plans that hold layers twice")
    parser.add_argument("--train", type=int, default=0, help="steps of training with each plan")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a rank waits for another one")
    parser.add_argument("--deadline", type=float, default=1e6, help="start nothing after so many seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to try it on a CPU")
    parser.add_argument("--out", default="out/users.jsonl")
    parser.add_argument("--detail", help="a file for every op's times")
    parser.add_argument("--tables", nargs="*")
    args = parser.parse_args()
    if args.tables:
        print(tables(args.tables))
        return
    needs_device(args.device)
    from octopipe.runtime.measure.trial import on_ranks

    target = place_for(args.out)
    if args.detail:
        place_for(args.detail)
    args.until, args.started = time.time() + args.deadline, False
    asked = known(args.setups.split(","), SETUPS, "set-up")
    # On a CPU Megatron-Core needs changes of torch itself: there its set-ups have ranks of their own.
    kinds = (False, True) if args.device == "cpu" else (None,)
    lost: list[str] = []
    for kind in kinds:
        left = [name for name in asked if kind is None or bool(SETUPS[name].megatron) is kind]
        while left:
            args.names = left
            heard: list[str] = []

            def listen(line: str, heard: list[str] = heard) -> None:
                heard.append(line)
                print(f"  {time.strftime('%H:%M:%S')} {line}", flush=True)

            try:
                share = args.share if args.device == "cuda" else None
                limit_s = SETUP_S * len(left)
                on_ranks(task, RANKS, args, device=args.device, timeout_s=limit_s, listen=listen, share_percent=share)
                break
            except Exception as error:  # the set-up that failed is run without copies or left out; the others go on
                seen = [name for name in left if any(line.startswith(f"{name}: ") for line in heard)]
                failed = seen[-1] if seen else left[0]
                print(f"{failed}: {type(error).__name__}: {error}", flush=True)
                trained = [line for line in heard if line.startswith(f"{failed}: {TRAINING}")]
                if trained:
                    _note_end(args.out, failed, trained[-1].partition(TRAINING)[2], str(error))
                left_out = bool(trained) or not args.copies
                if left_out:
                    lost.append(failed)
                left = left[left.index(failed) + left_out :]
                args.copies = args.copies and bool(trained)
    if target.exists():
        print(tables([args.out]), flush=True)
    end(lost)


if __name__ == "__main__":
    start(main)
