"""What users bring, on one GPU that several ranks share: `python benchmarks/bench_users.py --setups hf-dense,gpt-oss`.

For every set-up of `user_setups.py`, in the same processes under MPS: a profile in the mode that training runs in,
then tuning by running (`octopipe tune --measure`; on Megatron-Core's chunks `octopipe.megatron.profile` and
`octopipe.megatron.tune_measured`): 1F1B, interleaved and ZB-V, the tuned plan and the tuned plan with copies, each run
for real. One JSON line per set-up goes to --out: predicted and measured step of every plan, memory, host time per op,
corrections per layer kind. --detail keeps every op's predicted and measured time as well. `--tables FILE...` makes
Markdown of the lines of one or several runs and needs no GPU; `--small --device cpu` tries everything without one.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_line import needs_device, start
from user_setups import SETUPS

from octopipe.costs.profile_file import Profile
from octopipe.search.measured_tuning import Outcome, reduced_ms
from octopipe.simulation.contention import predict

RANKS = 4
MORE = ("copies", "flags")
"""Words in the names of tuned plans that are not the plain one: layers held twice; Megatron's own flags and order."""


def task(seat: Any, args: argparse.Namespace) -> None:
    """All set-ups of one kind on every rank; rank 0 writes."""
    from octopipe.runtime.ranks.world import World

    world = World.make(None, None, None)
    for name in args.names:
        # All ranks ask one clock: one that begins alone would wait for the others for ever.
        if not world.gather(time.time() < args.until)[0]:
            seat.tell(f"{name}: no time left")
            continue
        began = time.perf_counter()
        measure = _megatron if SETUPS[name].megatron else _ours
        profile, outcome, about = measure(name, world, args, seat.tell)
        seconds = time.perf_counter() - began
        gc.collect()
        torch.compiler.reset()  # shapes of the next set-up are its own, not variants of these
        left = _forget() if args.device == "cuda" else 0.0
        if world.rank == 0:
            _write(
                name,
                profile,
                outcome,
                {**about, "seconds": round(seconds, 1), "ranks": world.size, "left_gib": left},
                args,
            )
        seat.tell(f"{name}: {seconds:.0f} s, {outcome.best.name} {outcome.best.ran.step_ms:.1f} ms")


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


def _ours(name: str, world: Any, args: argparse.Namespace, tell: Callable[[str], None]) -> Any:
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
    tell(f"{name}: profile")
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
    outcome = tune_on_ranks(world, job, tell=tell)
    layer_ms = {kind: profile.costs.layer_ms[i] for i, kind in enumerate(work.kinds)}
    return profile, outcome, {"precision": work.precision, "graphs": work.graphs, "layer_ms": layer_ms}


def _megatron(name: str, world: Any, args: argparse.Namespace, tell: Callable[[str], None]) -> Any:
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
    usual = {
        "forward_step_func": chunks.forward_step,
        "seq_length": sizes.tokens,
        "micro_batch_size": 1,
        "transport": transport,
    }
    plan = build_plan("1f1b", CostTable.uniform(num_layers=sizes.num_layers), world.size, count)
    tell(f"{name}: profile")
    built = sizes.build(plan)
    more = {"plan": plan, "name": name, "repeats": args.repeats, "state_bytes_per_parameter": 0.0}
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
        tell=tell,
        **usual,
    )
    kinds = profile.about["layers"]
    layer_ms = {kind: profile.costs.layer_ms[i] for i, kind in enumerate(kinds)}
    return profile, outcome, {"precision": str(profile.mode), "graphs": False, "layer_ms": layer_ms}


def _write(name: str, profile: Profile, outcome: Outcome, about: dict[str, Any], args: argparse.Namespace) -> None:
    told = outcome.as_dict()
    details = []
    for row, kept in zip(told["rows"], outcome.rows):
        predicted = predict(kept.plan, profile if row["round"] == 0 else outcome.profile)
        row["final_error"] = reduced_ms(predict(kept.plan, outcome.profile)) / row["measured_ms"] - 1.0
        row["predicted_gib"] = list(predicted.peak_gib)
        row["ops_per_rank"] = max(len(order) for order in kept.plan.orders)
        row["reduction_ms"] = round(reduced_ms(predicted) - predicted.makespan_ms, 2)
        row["load"] = round(float(np.sum(kept.ran.op_ms)) / kept.plan.num_ranks / kept.ran.step_ms, 4)
        spans = predicted.spans
        details.append(
            {
                "name": row["name"],
                "stages": [[s.first, s.stop, s.rank, s.recompute] for s in kept.plan.stages],
                "orders": [[str(op) for op in order] for order in kept.plan.orders],
                "predicted": np.round([spans.start_ms, spans.end_ms - spans.start_ms], 4).tolist(),
                "measured": np.round([kept.ran.start_ms, kept.ran.op_ms], 4).tolist(),
            }
        )
    record = {
        "setup": name,
        "share": args.share,
        **about,
        "host_share": profile.about.get("host_share"),
        "rehearsal": profile.about.get("rehearsal"),
        "overlap_slowdown": profile.about.get("overlap_slowdown"),
        "date": time.strftime("%Y-%m-%d"),
        **told,
    }
    with Path(args.out).open("a") as file:
        file.write(json.dumps(record) + "\n")
    if args.detail:
        kept_profiles = {"profile": json.loads(profile.to_json()), "corrected": json.loads(outcome.profile.to_json())}
        with Path(args.detail).open("a") as file:
            file.write(json.dumps({"setup": name, "share": args.share, **kept_profiles, "rows": details}) + "\n")


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 128, "head_dim": 16}
    return config | small | {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32}


def tables(paths: list[str]) -> str:
    """The lines of one or several runs as Markdown: a row per set-up and run, then errors and gains over all."""
    lines = [
        "| set-up | 1F1B | interleaved | ZB-V | tuned | tuned with copies | tuned layout by flags "
        "| over the best published | promised | memory | host per op |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    errors, gains, arrived, memories = [], [], [], []
    for line in (line for path in paths for line in Path(path).read_text().splitlines()):
        run = json.loads(line)
        rows = run["rows"]
        tuned = [r for r in rows if r["round"] > 0]
        published = min((r for r in rows if r["round"] == 0), key=lambda r: r["measured_ms"])
        best = min(rows, key=lambda r: r["measured_ms"])
        cells = []
        for words in (("1f1b",), ("interleaved",), ("zb-v",), ("tuned",), ("tuned", "copies"), ("tuned", "flags")):
            mine = [
                r for r in rows
                if r["name"].startswith(words[0]) and all((word in r["name"]) == (word in words) for word in MORE)
            ]  # fmt: skip
            if not mine:
                cells.append("")
                continue
            row = min(mine, key=lambda r: r["measured_ms"])
            errors.append(abs(row["error"]))
            figure = f"{row['measured_ms']:.1f}"
            cells.append(f"{f'**{figure}**' if row is best else figure} ({100 * row['error']:+.1f} %)")
        gain = published["measured_ms"] / best["measured_ms"]
        # What the tuner promised: the published system and its own best plan, both as they were predicted.
        promise = min(r["predicted_ms"] for r in rows if r["round"] == 0) / min(r["predicted_ms"] for r in tuned)
        off = [abs(p / m - 1) for r in rows for p, m in zip(r["predicted_gib"], r["peak_gib"])]
        gains.append(gain)
        arrived.append(gain / promise)
        memories += off
        hosts = [r["host_us_per_op"][0] for r in rows if r["host_us_per_op"]]
        host = f"{np.median(hosts):.0f} µs" if hosts else ""
        memory = f"{100 * np.mean(off):.1f} %" if off else ""
        lines.append(f"| {run['setup']} | {' | '.join(cells)} | {gain:.2f} | {promise:.2f} | {memory} | {host} |")
    if not gains:
        return "no runs"
    lines += [
        "",
        f"step: mean error {100 * np.mean(errors):.1f} %, worst {100 * max(errors):.1f} %",
        f"over the best published: mean {np.mean(gains):.3f}, least {min(gains):.3f}",
        f"of the promise: mean {100 * np.mean(arrived):.1f} %, least {100 * min(arrived):.1f} %",
    ]
    if memories:
        lines.append(f"memory: mean error {100 * np.mean(memories):.1f} %, worst {100 * max(memories):.1f} %")
    return "\n".join(lines)


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
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a rank waits for another one")
    parser.add_argument("--deadline", type=float, default=1e6, help="start no set-up after so many seconds")
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

    target = Path(args.out)
    target.parent.mkdir(parents=True, exist_ok=True)
    args.until, args.started = time.time() + args.deadline, False
    asked = args.setups.split(",")
    # On a CPU Megatron-Core needs changes of torch itself: there its set-ups have ranks of their own.
    kinds = (False, True) if args.device == "cpu" else (None,)
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
                on_ranks(task, RANKS, args, device=args.device, timeout_s=900, listen=listen, share_percent=share)
                break
            except Exception as error:  # the set-up that failed is run without copies or left out; the others go on
                seen = [name for name in left if any(line.startswith(f"{name}: ") for line in heard)]
                failed = seen[-1] if seen else left[0]
                print(f"{failed}: {type(error).__name__}: {error}", flush=True)
                left = left[left.index(failed) + (not args.copies) :]
                args.copies = False
    if target.exists():
        print(tables([args.out]), flush=True)


if __name__ == "__main__":
    start(main)
