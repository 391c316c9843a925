"""What users bring, on one GPU that several ranks share: `python benchmarks/bench_users.py --setups hf-dense,gpt-oss`.

For every set-up, in the same processes under MPS: a profile in the mode that training runs in, then `tune --measure`:
1F1B, interleaved and ZB-V, the tuned plan and the tuned plan with copies, each run for real. One JSON line per set-up
goes to --out: predicted and measured step of every plan, memory, corrections per layer kind, and what was measured
call by call where --calls is given. `--tables FILE...` makes Markdown of such lines and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RANKS = 4
DENSE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
    "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768, "norm_topk_prob": True,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    model: str | dict[str, Any]
    """A preset's name, or a Hugging Face config."""
    tokens: int
    scale: float | None = None
    layers: int | None = None
    ranks: int = RANKS
    micro_batches: int = 16


SETUPS = {
    "hf-dense": Setup(model=DENSE, tokens=2048),
    "hf-moe": Setup(model=MOE, tokens=2048),
    "gpt-oss": Setup(model="gpt-oss-20b", scale=0.5, layers=14, tokens=4096, ranks=3),
    "nemotron-3": Setup(model="nemotron-3-nano-30b", scale=0.5, layers=16, tokens=4096),
    "gemma": Setup(model="gemma-3-27b", scale=0.375, layers=20, tokens=4096),
    "hybrid": Setup(model="nemotron-h-8b", scale=0.5, layers=26, tokens=4096),
}


def task(seat: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One set-up on every rank; rank 0's answer counts."""
    from octopipe.cli.verbs.runnable import model_of
    from octopipe.runtime.measure.trial import Workload, profile_workload
    from octopipe.runtime.measure.tuned_run import MeasuredTuneJob, tune_on_ranks
    from octopipe.runtime.ranks.world import World
    from octopipe.simulation.contention import predict

    setup = SETUPS[args.setup]
    world = World.make(None, None, None)
    name = setup.model
    if isinstance(name, dict):
        path = Path(tempfile.mkdtemp()) / "config.json"
        path.write_text(json.dumps(name if not args.small else shrunk(name)))
        name = str(path)
    own = not isinstance(setup.model, dict)
    spec = model_of(name, scale=(0.03 if args.small else setup.scale) if own else None, num_layers=setup.layers)
    began = time.perf_counter()
    out = []
    for graphs in (False, True) if args.calls else (args.device == "cuda",):
        work = Workload(
            spec=spec,
            tokens=32 if args.small else setup.tokens,
            device=args.device,
            precision=args.precision if args.device == "cuda" else "fp32",
            graphs=graphs,
        )
        profile = profile_workload(work, world, repeats=args.repeats, state_factor=0.0)
        job = MeasuredTuneJob(
            work=work,
            profile=profile,
            num_micro_batches=4 if args.small else setup.micro_batches,
            tune_s=args.tune,
            budget_s=args.budget,
            rounds=args.rounds,
            steps=args.steps,
        )
        outcome = tune_on_ranks(world, job, tell=lambda line: seat.tell(line))
        told = outcome.as_dict()
        for row, kept in zip(told["rows"], outcome.rows):
            predicted = predict(kept.plan, profile if row["round"] == 0 else outcome.profile)
            row["final_error"] = predict(kept.plan, outcome.profile).makespan_ms / row["measured_ms"] - 1.0
            row["predicted_gib"] = list(predicted.peak_gib)
            row["ops_per_rank"] = len(kept.plan.orders[0])
        out.append(
            {
                "setup": args.setup,
                "graphs": graphs,
                "ranks": world.size,
                "precision": args.precision,
                "host_share": profile.about.get("host_share"),
                "layer_ms": {k: profile.costs.layer_ms[i] for i, k in enumerate(work.kinds)},
                "seconds": time.perf_counter() - began,
                **told,
            }
        )
    return out


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 128, "head_dim": 16}
    return config | small | {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32}


def tables(paths: list[str]) -> str:
    """The runs as Markdown."""
    lines = [
        "| set-up | graphs | plan | predicted | measured | error | memory error |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    errors, gains = [], []
    for line in (line for path in paths for line in Path(path).read_text().splitlines()):
        run = json.loads(line)
        published = min(r["measured_ms"] for r in run["rows"] if r["round"] == 0)
        for row in run["rows"]:
            peaks = [p / m - 1 for p, m in zip(row["predicted_gib"], row["peak_gib"])]
            memory = f"{100 * np.mean(np.abs(peaks)):.1f} %" if peaks else ""
            errors.append(abs(row["error"]))
            lines.append(
                f"| {run['setup']} | {'yes' if run['graphs'] else 'no'} | {row['name']} | {row['predicted_ms']:.1f} | "
                f"{row['measured_ms']:.1f} | {100 * row['error']:+.1f} % | {memory} |"
            )
        gains.append((run["setup"], published / run["measured_ms"]))
    lines.append("")
    lines.append(f"mean error {100 * np.mean(errors):.1f} %, worst {100 * max(errors):.1f} %")
    lines.append("over the best published: " + ", ".join(f"{name} {gain:.3f}" for name, gain in gains))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", default=",".join(SETUPS))
    parser.add_argument("--tune", type=float, default=6.0, help="seconds of each search")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each set-up's loop")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", default="bf16-main-fp32")
    parser.add_argument("--calls", action="store_true", help="also without graphs")
    parser.add_argument("--deadline", type=float, default=1e9, help="start no set-up after so many seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to try it on a CPU")
    parser.add_argument("--out", default="out/users.jsonl")
    parser.add_argument("--tables", nargs="*")
    args = parser.parse_args()
    if args.tables:
        print(tables(args.tables))
        return
    from octopipe.runtime.measure.trial import on_ranks

    target = Path(args.out)
    target.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for name in args.setups.split(","):
        if time.perf_counter() - began > args.deadline:
            print(f"{name}: no time left", flush=True)
            continue
        args.setup = name
        ranks = 2 if args.small else SETUPS[name].ranks
        try:
            found = on_ranks(
                task, ranks, args, device=args.device, timeout_s=300, listen=lambda line: print(f"  {line}", flush=True)
            )[0]
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        with target.open("a") as file:
            for run in found:
                file.write(json.dumps(run) + "\n")
                print(
                    f"{name} graphs={run['graphs']} {run['seconds']:.0f} s best {run['best']} {run['measured_ms']:.1f}"
                )
    if target.exists():
        print(tables([args.out]), flush=True)


if __name__ == "__main__":
    main()
