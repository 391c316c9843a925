"""Megatron-Core's own orders against a tuned plan, on four ranks that share one GPU, in one run:

    python benchmarks/bench_megatron_gpu.py --megatron /path/to/unpacked/megatron_core --out results

GPT and hybrid chunks of Megatron-Core (local layers, no Transformer Engine, no apex, fusions off) run under MPS with
our CUDA-IPC transport below all of them, because NCCL refuses two ranks on one device. Megatron's 1F1B and interleaved
orders go through the same drop-in as plans, so that only partition, placement and order differ. Phases:
  profile  every layer's F, I, W and bytes, all ranks at work
  tune     the tuner on those times (needs no GPU)
  run      every plan: losses and step times
Prints one JSON object a line; the last line of a model says how much faster the tuned plan was than the better of
Megatron's own. `--small --device cpu` tries everything out without a GPU.

The hybrid's mixer is Mamba-2 between Megatron's own projections, compiled on a GPU: mamba_ssm's kernels are not needed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

RANKS = 4
HYBRID = "M-M-M-M*-M-M-M-M*-M-M-M-"
"""Nemotron-H's rhythm at 24 layers."""


class Sizes:
    """What is built: kept small enough that a quarter of a GPU holds every plan's activations."""

    def __init__(self, small: bool, tokens: int | None = None):
        self.width, self.heads, self.ffn = (64, 2, 128) if small else (2048, 16, 8192)
        self.vocab, self.tokens = (256, 32) if small else (131072, tokens or 1024)
        self.layers = len(HYBRID) if not small else 8
        self.hybrid = HYBRID if not small else "M-M*M-M-"
        self.micro_batches = 8 if small else 16
        self.mamba_heads = 4 if small else 64
        self.memory_gib = 30.0


# -- what every rank does ------------------------------------------------------------------------------


def config_of(sizes: Sizes, device: str, pp: int, virtual: int | None, layout: Any) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.width,
        num_attention_heads=sizes.heads,
        ffn_hidden_size=sizes.ffn,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        use_cpu_initialization=device == "cpu",
        perform_initialization=False,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=layout,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=device == "cuda",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=False,
        overlap_p2p_comm=bool(virtual),
    )


def gpt_chunk(sizes: Sizes, config: Any, layers: range, pre: bool, post: bool) -> Any:
    """Exactly these layers of the GPT: to its own block a chunk is a whole model on one rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        _own(config, _inner(sizes, layers)),
        get_gpt_layer_local_spec(),
        vocab_size=sizes.vocab,
        max_sequence_length=sizes.tokens,
        pre_process=pre,
        post_process=post,
        position_embedding_type="rope",
        parallel_output=True,
        pg_collection=_groups(),
    )


def hybrid_chunk(sizes: Sizes, config: Any, layers: range, pre: bool, post: bool) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    hybrid_block.TENorm = WrappedTorchNorm  # its final norm; Transformer Engine is not installed
    local = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm, self_attention=local.self_attention, self_attn_bda=get_bias_dropout_add
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=local.mlp, mlp_bda=get_bias_dropout_add)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(module=mixer_class(), params={"sizes": sizes}),
        mamba_bda=get_bias_dropout_add,
    )
    spec = ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )
    inner = _inner(sizes, layers)
    return HybridModel(
        _own(config, inner),
        spec,
        vocab_size=sizes.vocab,
        max_sequence_length=sizes.tokens,
        hybrid_layer_pattern="".join(sizes.hybrid[k - 1] for k in inner),
        pre_process=pre,
        post_process=post,
        position_embedding_type="none",
        parallel_output=True,
        pg_collection=_groups(),
    )


def mixer_class() -> type:
    """Mamba-2 between Megatron's own column- and row-parallel projections."""
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from torch import nn

    from octopipe.models.spec import Mamba2
    from octopipe.runtime.nn.mamba import compiled_mamba2_mix, mamba2_mix

    class Mixer(nn.Module):
        def __init__(self, config: Any, sizes: Sizes, submodules: Any = None, **_: Any):
            super().__init__()
            if "mix" not in _KNOWN:
                _KNOWN["mix"] = mamba2_mix if config.use_cpu_initialization else compiled_mamba2_mix()
            self.layer = layer = Mamba2(
                hidden=sizes.width, heads=sizes.mamba_heads, head_dim=64 if sizes.width > 64 else 16, state=128
                if sizes.width > 64 else 16, groups=1,
            )  # fmt: skip
            usual = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True}
            width = layer.projection_width
            self.in_proj = ColumnParallelLinear(config.hidden_size, width, gather_output=False, **usual)
            self.out_proj = RowParallelLinear(layer.inner, config.hidden_size, input_is_parallel=True, **usual)
            made = {"dtype": config.params_dtype}
            self.conv_weight = nn.Parameter(torch.zeros(layer.conv_width, layer.conv, **made))
            self.conv_bias = nn.Parameter(torch.zeros(layer.conv_width, **made))
            self.dt_bias = nn.Parameter(torch.full((layer.heads,), -3.0))
            self.a_log = nn.Parameter(torch.linspace(0.1, 2.5, layer.heads))
            self.d = nn.Parameter(torch.ones(layer.heads))
            self.gate_norm = nn.Parameter(torch.ones(layer.inner, **made))

        def forward(self, hidden: Any, **_: Any) -> Any:
            projected = self.in_proj(hidden)[0].transpose(0, 1)
            small = self.conv_weight, self.conv_bias, self.dt_bias, self.a_log, self.d, self.gate_norm
            mixed = _KNOWN["mix"](self.layer, 1e-5, projected, *small)
            return self.out_proj(mixed.transpose(0, 1).contiguous())

    return Mixer


def _inner(sizes: Sizes, layers: range) -> list[int]:
    return [k for k in layers if 1 <= k <= sizes.layers]


def _own(config: Any, inner: list[int]) -> Any:
    own = copy.copy(config)
    own.num_layers = len(inner)
    own.pipeline_model_parallel_size = 1
    own.virtual_pipeline_model_parallel_size = own.pipeline_model_parallel_layout = None
    return own


_KNOWN: dict[str, Any] = {}


def _groups() -> Any:
    """Megatron's groups with a pipeline of this process alone, for building a chunk by itself."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if "alone" not in _KNOWN:
        made = [dist.new_group([r]) for r in range(dist.get_world_size())]
        _KNOWN["alone"] = made[dist.get_rank()]
    out = ProcessGroupCollection()
    out.tp = parallel_state.get_tensor_model_parallel_group()
    out.cp = parallel_state.get_context_parallel_group()
    out.pp = _KNOWN["alone"]
    out.embd = out.pos_embd = _KNOWN["alone"]
    out.dp = parallel_state.get_data_parallel_group()
    out.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for name in ("ep", "expt_tp", "tp_ep", "expt_dp", "tp_cp", "hcp", "tp_ep_pp", "mp"):
        if not hasattr(out, name):
            setattr(out, name, _KNOWN["alone"])
    return out


def start(device: str, rank: int, port: int, pp: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(2)
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        from octopipe.megatron import use_cpu

        use_cpu()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp, create_gloo_process_groups=False)
    initialize_rng_tracker(inference_rng_tracker=True)
    if device == "cuda":
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)


def fill(chunk: Any, first: int) -> None:
    """Weights that depend on their name in the whole model alone: every plan trains the same model."""
    import torch

    with torch.no_grad():
        for name, p in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + first)
            generator = torch.Generator(p.device).manual_seed(zlib.crc32(".".join(parts).encode()))
            if p.ndim > 1:
                p.normal_(0, 0.02, generator=generator)
            elif "norm" in name and "bias" not in name:
                p.fill_(1)


def build(kind: str, sizes: Sizes, config: Any, layers: range, pre: bool, post: bool, device: str) -> Any:
    made = (gpt_chunk if kind == "gpt" else hybrid_chunk)(sizes, config, layers, pre, post)
    made = made.to(device, config.params_dtype)  # as Megatron does: its local norms are made in float32
    made.config = config
    fill(made, max(layers.start - 1, 0))
    return made


def batches(sizes: Sizes, device: str) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(7)
    out = []
    for _ in range(sizes.micro_batches):
        tokens = torch.randint(sizes.vocab, (1, sizes.tokens + 1), generator=generator).to(device)
        out.append({"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})
    return out


def forward_step(data: Any, model: Any) -> Any:
    import torch

    batch = next(data)
    tokens = batch["tokens"]
    key = ("mask", tokens.shape[1], tokens.device)
    if key not in _KNOWN:
        n = tokens.shape[1]
        _KNOWN[key] = torch.ones(1, 1, n, n, dtype=torch.bool, device=tokens.device).triu(1)
        _KNOWN[key, 0] = torch.arange(n, device=tokens.device)[None]
    out = model(tokens, _KNOWN[key, 0], _KNOWN[key], labels=batch["labels"])

    def loss(output: Any) -> Any:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}  # Megatron divides the first one in place

    return out, loss


def profile(rank: int, args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Per model and kind of layer: F, I, W in ms and bytes held, as every rank at work finds them."""
    import torch
    import torch.distributed as dist

    from octopipe.megatron.weights import Split
    from octopipe.runtime.stages.wgrad_ops import WeightQueue

    config = config_of(sizes, args.device, 1, None, None)
    batch = batches(sizes, args.device)[0]
    out: dict[str, Any] = {}
    for kind in args.models:
        letters = "E" + ("t" * sizes.layers if kind == "gpt" else sizes.hybrid) + "L"
        found = {}
        for letter in dict.fromkeys(letters):
            k = letters.index(letter)
            pre, post = letter == "E", letter == "L"
            chunk = build(kind, sizes, config, range(k, k + 1), pre, post, args.device)
            split = Split(chunk)
            rows: list[list[float]] = []
            held: list[list[int]] = []
            for _ in range(args.repeats + 2):
                value = None
                if not pre:
                    shape = (sizes.tokens, 1, sizes.width)
                    value = torch.randn(shape, device=args.device, dtype=config.params_dtype, requires_grad=True)
                chunk.set_input_tensor(value)
                dist.barrier()
                marks = [_mark(args.device)]
                before = _allocated(args.device)
                output, loss = forward_step(iter([batch]), chunk)
                output = loss(output)[0] if post else output
                marks.append(_mark(args.device))
                after_f = _allocated(args.device) - before
                queue = split.queue = WeightQueue()
                queue.defer = True
                output.backward(None if post else torch.ones_like(output))
                marks.append(_mark(args.device))
                kept = sum(t.numel() * t.element_size() for t in queue.tensors())
                queue.run()
                marks.append(_mark(args.device))
                rows.append(_between(marks, args.device))
                held.append([after_f, min(kept, max(after_f, 0))])
                del output, value
                chunk.zero_grad(set_to_none=True)
            best = [statistics.median(r[i] for r in rows[2:]) for i in range(3)]
            parameters = sum(p.numel() for p in chunk.parameters())
            found[letter] = [*best, *held[-1], parameters]
            del chunk, split
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, found)
        mean = {c: [statistics.mean(e[c][i] for e in everyone) for i in range(6)] for c in found}
        out[kind] = {"letters": letters, "layers": mean}
    return out


def _mark(device: str) -> Any:
    import torch

    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(marks: list[Any], device: str) -> list[float]:
    import torch

    if device == "cpu":
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def _allocated(device: str) -> int:
    import torch

    return 0 if device == "cpu" else torch.cuda.memory_allocated()


def compile_mixer(sizes: Sizes, device: str) -> None:
    """All ranks at once: in the first step each would wait for the one before it."""
    import torch

    config = config_of(sizes, device, 1, None, None)
    mixer = mixer_class()(config, sizes).to(device, config.params_dtype)
    shape = (sizes.tokens, 1, sizes.width)
    mixer(torch.randn(shape, device=device, dtype=config.params_dtype, requires_grad=True))[0].sum().backward()


def run(rank: int, args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Every plan: losses of the first step, step times."""
    import torch
    import torch.distributed as dist

    from octopipe import megatron
    from octopipe.plans.file import load_plan

    out: dict[str, Any] = {}
    data = batches(sizes, args.device)
    if "hybrid" in args.models:
        compile_mixer(sizes, args.device)
    for path in sorted(Path(args.out).glob("*.plan.json")):
        kind, name = path.name.split(".")[:2]
        if kind not in args.models:
            continue
        plan = megatron.for_megatron(load_plan(path))
        config = config_of(sizes, args.device, RANKS, megatron.virtual_size(plan), None)
        chunks = megatron.build_chunks(
            plan,
            lambda pre_process, post_process, layers, kind=kind, config=config: build(
                kind, sizes, config, layers, pre_process, post_process, args.device
            ),
        )
        transport = "cuda_ipc" if args.device == "cuda" else "gloo"
        step = megatron.forward_backward_func(plan, transport=transport, timeout_s=60.0)
        times, losses = [], []
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for number in range(args.steps + 2):
            for chunk in chunks:
                chunk.zero_grad(set_to_none=True)
            if args.device == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            found = step(
                forward_step_func=forward_step,
                data_iterator=[iter(data) for _ in chunks],
                model=chunks,
                num_microbatches=sizes.micro_batches,
                seq_length=sizes.tokens,
                micro_batch_size=1,
            )
            if args.device == "cuda":
                torch.cuda.synchronize()
            took = 1e3 * (time.perf_counter() - began)
            if number == 0:
                losses = [float(x["loss"]) for x in found]
            everyone: list[Any] = [None] * RANKS
            dist.all_gather_object(everyone, took)
            times.append(max(everyone))
        norm = sum(float(p.grad.float().norm()) ** 2 for c in chunks for p in c.parameters() if p.grad is not None)
        peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
        everyone = [None] * RANKS
        dist.all_gather_object(everyone, (losses, norm, peak))
        step.close()
        del chunks
        if args.device == "cuda":
            torch.cuda.empty_cache()
        out[f"{kind}.{name}"] = {
            "losses": next(x for x, _, _ in everyone if x),
            "gradient_norm": sum(n for _, n, _ in everyone) ** 0.5,
            "step_ms": statistics.median(times[2:]),
            "steps_ms": [round(t, 2) for t in times[2:]],
            "peak_gib": [round(p, 2) for _, _, p in everyone],
        }
    return out


# -- the parent ----------------------------------------------------------------------------------------


def spawn(phase: str, args: argparse.Namespace) -> dict[str, Any]:
    """Four ranks of one phase; rank 0's result."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    result = Path(args.out) / f"{phase}.result.json"
    result.unlink(missing_ok=True)
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [args.megatron, root, environment.get("PYTHONPATH", "")]))
    mps = None
    if args.device == "cuda":
        from octopipe.runtime.measure.mps import Mps

        mps = Mps.start(num_ranks=RANKS)
        environment |= dict(mps.environment)
    try:
        words = [sys.executable, __file__, *sys.argv[1:], "--port", str(port), "--phases", phase]
        ranks = [subprocess.Popen([*words, "--rank", str(r)], env=environment) for r in range(RANKS)]
        end = time.monotonic() + args.limit_s
        while any(p.poll() is None for p in ranks) and time.monotonic() < end:
            if any(p.poll() not in (None, 0) for p in ranks):
                break  # one failed: the others would wait for it
            time.sleep(0.2)
        for p in ranks:
            if p.poll() is None:
                p.kill()
            p.wait()
        if any(p.returncode for p in ranks) or not result.exists():
            raise SystemExit(f"phase {phase} failed: exit codes {[p.returncode for p in ranks]}")
    finally:
        if mps is not None:
            mps.stop()
    return json.loads(result.read_text())


def costs_of(measured: dict[str, Any], sizes: Sizes) -> Any:
    import numpy as np

    from octopipe.costs.cluster.hardware import Network
    from octopipe.costs.table import CostTable

    letters, table = measured["letters"], measured["layers"]
    columns = np.array([table[c] for c in letters])
    symbols = letters.replace("t", "T")
    held = np.maximum(columns[:, 3], 0)
    return CostTable(
        model="measured",
        symbols=symbols,
        forward_ms=columns[:, 0],
        input_ms=columns[:, 1],
        weight_ms=columns[:, 2],
        activation_bytes=held,
        stash_bytes=np.minimum(columns[:, 4], held),
        static_bytes=4.0 * columns[:, 5],
        boundary_bytes=np.full(len(letters), 2.0 * sizes.tokens * sizes.width),
        network=Network.constant(0.1),
        rank_memory_bytes=(sizes.memory_gib * 2**30,),
        tokens_per_micro_batch=sizes.tokens,
    )


def tune(args: argparse.Namespace, sizes: Sizes, measured: dict[str, Any]) -> dict[str, Any]:
    """Megatron's own plans (even layouts, its orders) and the tuned one, as files; predicted step times."""
    import octopipe
    from octopipe.plans.file import save_plan
    from octopipe.plans.readers.megatron_text import read_megatron
    from octopipe.search.foreign_plan import megatron_plan
    from octopipe.simulation.simulator import simulate

    out = {}
    for old in Path(args.out).glob("*.plan.json"):
        old.unlink()
    for kind in args.models:
        costs = costs_of(measured[kind], sizes)
        inner = measured[kind]["letters"][1:-1]
        plans = {}
        for chunks in (1, 2, 3, 6):
            if sizes.layers % (RANKS * chunks):
                continue
            size = sizes.layers // (RANKS * chunks)
            pieces = [inner[k : k + size] for k in range(0, len(inner), size)]
            text = "|".join(pieces) if kind == "hybrid" else "E" + "|".join(pieces) + "L"
            found = megatron_plan(read_megatron(text), pp=RANKS, num_micro_batches=sizes.micro_batches)
            plans["1f1b" if chunks == 1 else f"interleaved-{chunks}"] = found.plan
        result = octopipe.tune(
            costs, RANKS, sizes.micro_batches, budget_s=args.budget_s, recompute=False, copies=False, robust=True
        )
        plans["tuned"] = result.plan
        for name, plan in plans.items():
            save_plan(plan, Path(args.out) / f"{kind}.{name}.plan.json")
            out[f"{kind}.{name}"] = simulate(plan, costs).step_ms
    return out


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", default="", help="folder with an unpacked megatron_core wheel")
    parser.add_argument("--out", default="bench-megatron")
    parser.add_argument("--models", default="gpt,hybrid")
    parser.add_argument("--phases", default="profile,tune,run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--budget-s", type=float, default=45.0, help="of the tuner, per model")
    parser.add_argument("--tokens", type=int, help="per sequence (default: 1024)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=240.0, help="of one phase")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.models = args.models.split(",")
    sizes = Sizes(args.small, args.tokens)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if args.rank >= 0:
        phase = args.phases.split(",")[-1]
        start(args.device, args.rank, args.port, 1 if phase == "profile" else RANKS)
        found = (profile if phase == "profile" else run)(args.rank, args, sizes)
        if args.rank == 0:
            (Path(args.out) / f"{phase}.result.json").write_text(json.dumps(found))
        return
    phases = args.phases.split(",")
    if "profile" in phases:
        measured = spawn("profile", args)
        (Path(args.out) / "profile.json").write_text(json.dumps(measured))
        for kind, found in measured.items():
            for letter, (f, i, w, held, kept, parameters) in found["layers"].items():
                say(model=kind, layer=letter, F_ms=round(f, 3), I_ms=round(i, 3), W_ms=round(w, 3),
                    held_mib=round(held / 2**20), kept_mib=round(kept / 2**20), parameters=parameters)  # fmt: skip
    if "tune" in phases:
        measured = json.loads((Path(args.out) / "profile.json").read_text())
        predicted = tune(args, sizes, measured)
        (Path(args.out) / "predicted.json").write_text(json.dumps(predicted))
        for name, step_ms in predicted.items():
            say(plan=name, predicted_ms=round(step_ms, 2))
    if "run" in phases:
        predicted = json.loads((Path(args.out) / "predicted.json").read_text())
        found = spawn("run", args)
        for name, row in found.items():
            say(plan=name, predicted_ms=round(predicted.get(name, 0.0), 2), **row)
        for kind in args.models:
            own = {n: r for n, r in found.items() if n.startswith(f"{kind}.") and not n.endswith(".tuned")}
            tuned = found[f"{kind}.tuned"]
            best = min(own, key=lambda n: own[n]["step_ms"])
            apart = max(abs(a - b) for r in own.values() for a, b in zip(r["losses"], tuned["losses"]))
            say(model=kind, best_own=best, own_ms=round(own[best]["step_ms"], 2), tuned_ms=round(tuned["step_ms"], 2),
                speedup=round(own[best]["step_ms"] / tuned["step_ms"], 3), losses_apart=apart)  # fmt: skip


if __name__ == "__main__":
    main()
