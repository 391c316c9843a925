"""Damaged files for every reader: valid ones, changed in places that a generator of numbers picks.

Knows: a few valid files of each kind, what a reader's caller does with the result, and how files go wrong. Does not
know: who picks (`random` in scripts/fuzz.py, hypothesis in test_readers.py, a coverage-guided fuzzer), or files that
only training reads (`fuzz_training.py`).
"""

from __future__ import annotations

import copy
import json
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.setup import Setup, setup_from
from octopipe.costs.profile_file import load_profile
from octopipe.costs.resolve import costs_of_setup
from octopipe.costs.table import CostTable
from octopipe.models.readers.hf_config import from_config
from octopipe.plans.file import load_plan, plan_to_json
from octopipe.plans.plan import Plan
from octopipe.plans.setting import costs_of_plan
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import load_timeline

Pick = Callable[[int], int]
"""A number from 0 to n - 1."""
DUPLICATE = "\x00again"
"""Ends a key that is written without it: the object then has that key twice."""
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, -0.5, 1e-308, 1e15, 1e16, 1e308, float("nan"), float("inf"),
    float("-inf"), 255, 256, 1 << 16, 1 << 20, 10**6, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 64, 10**9,
    10**400, -(10**400),
    "", "x", "²", "٣", "1", "-1", "0F0", "1e999", "\ud800", "\x1b[31m", "[bold]x[/]", "\n", "a" * 5000, "null",
    [], {}, [[]], [{}], [None], {"": None}, [0] * 100, [[[[[[[[]]]]]]]], {"a": {"a": {"a": {}}}},
)  # fmt: skip
INSERTED = (b"NaN", b"1e999", b"\xff\xfe", b"\xef\xbb\xbf", b"[" * 2000, b"{}", b'"\\ud800"', b"-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A kind of file, some valid ones, and what is done with a path to one."""

    name: str
    suffix: str
    valid: tuple[bytes, ...]
    use: Callable[[Path], object]


def _plan_files() -> tuple[bytes, ...]:
    costs = CostTable.uniform(num_layers=6, activation_bytes=1e6, p2p_ms=0.1)
    plans = [build_plan(name, costs, 2, 4) for name in ("1f1b", "zb-h1", "interleaved")]
    named = build_plan("1f1b", CostTable.uniform(num_layers=34), 2, 2).with_extra(setting=dict(SETTING))
    twice = build_plan("chimera", CostTable.uniform(num_layers=4), 2, 4)
    return tuple(plan_to_json(p) for p in (plans[0], plans[1].with_extra(cost_table=costs), plans[2], named, twice))


SETTING = {
    "model": "llama3-8b", "gpu": "h100", "tp": 8, "cp": 1, "ep": 1, "dp": 2, "seq": 4096, "micro_batch_size": 1,
    "zero": 1, "precision": "bf16", "gradients": "fp32", "recompute": "none", "sequence_parallel": True,
    "vocab_parallel": False, "reserve_gib": 2.0, "p2p_ms": 0.1, "memory_gib": [60.0], "speeds": [1.0, 0.5],
    "gpus_per_node": 8,
}  # fmt: skip


def _use_plan(path: Path) -> object:
    plan = load_plan(path)
    if "setting" in plan.extra or "cost_table" in plan.extra:
        return finite_numbers(simulate(plan, costs_of_plan(plan)).summary())
    return _simulated(plan)


def _use_timeline(path: Path) -> object:
    timeline = load_timeline(path)
    return timeline.critical_path(), finite_numbers(timeline.summary()), timeline.to_json()


def _use_report(path: Path) -> object:
    from octopipe.views.report.load import load_entries
    from octopipe.views.report.page import report_html

    return report_html(load_entries([path], {}))


def _use_costs(path: Path) -> object:
    profile = load_profile(path)
    costs, ranks = profile.costs, min(2, profile.costs.num_layers)
    profile.to_json()
    return finite_numbers(simulate(build_plan("1f1b", costs, ranks, 2), costs).summary())


def _use_config(path: Path) -> object:
    spec = from_config(path)
    setup = Setup(gpu=_gpu(), seq=128)
    return spec.parameters, finite_numbers(costs_of_setup(spec, setup).layer_ms.tolist())


def _use_setup(path: Path) -> object:
    from octopipe.base.files import read_json_object

    return setup_from(read_json_object(path)).words()


def _use_cluster(path: Path) -> object:
    from octopipe.costs.cluster.file import network_of, ranks_on, read_cluster

    return network_of(ranks_on(read_cluster(path), 2, 1))


def _use_hardware(path: Path) -> object:
    from octopipe.costs.cluster.hardware_file import read_hardware

    spec = from_config(json.loads(CONFIGS[0]))
    return finite_numbers(costs_of_setup(spec, Setup(gpu=read_hardware(path), seq=128)).layer_ms.tolist())


def _use_stack(path: Path) -> object:
    from octopipe.costs.analytic.calibration import stack_named

    spec = from_config(json.loads(CONFIGS[0]))
    return finite_numbers(costs_of_setup(spec, Setup(gpu=_gpu(), stack=stack_named(path), seq=128)).layer_ms.tolist())


def _use_runs(path: Path) -> object:
    from octopipe.costs.runs import read_runs

    return finite_numbers([run.tokens_per_s_per_gpu for run in read_runs(path)])


def _text(path: Path) -> str:
    from octopipe.base.files import read_bytes

    return read_bytes(path).decode("utf-8", "replace")


def _use_torch_csv(path: Path) -> object:
    from octopipe.plans.readers.torch_csv import read_torch_csv
    from octopipe.search.foreign_plan import torch_plan

    return _simulated(torch_plan(read_torch_csv(_text(path), path.name), where=path.name).plan)


def _use_megatron(path: Path) -> object:
    from octopipe.plans.readers.megatron_text import read_megatron
    from octopipe.search.foreign_plan import megatron_plan

    text = read_megatron(_text(path))
    return _simulated(megatron_plan(text, pp=len(text.stages), num_micro_batches=4).plan)


def _simulated(plan: Plan) -> object:
    return finite_numbers(simulate(plan, CostTable.uniform(num_layers=plan.num_layers)).summary())


def _use_request(path: Path) -> object:
    """What the local page's form sends, as far as its search has not begun."""
    from octopipe.base.files import read_bytes
    from octopipe.costs.resolve import resolve_costs
    from octopipe.views.report.jobs import parse_request

    asked = parse_request(read_bytes(path))
    asked.check({"llama3-8b": "llama3-8b"})
    setting = {"gpu": asked.gpu, "tp": asked.tp, "seq": asked.seq, "memory_gib": asked.memory_gib}
    return finite_numbers(resolve_costs(asked.model, pp=asked.pp, **setting).layer_ms.tolist())


def _use_model(path: Path) -> object:
    """Whatever is given where a verb wants a model."""
    from octopipe.costs.resolve import resolve_costs

    costs = resolve_costs(str(path), pp=1, gpu="h100", seq=128)
    return finite_numbers(simulate(build_plan("1f1b", costs, 1, 2), costs).summary())


def _use_lengths(path: Path) -> object:
    from octopipe.models.lengths import packed_groups, padded_groups, read_lengths

    lengths = read_lengths(path)
    return padded_groups(lengths, 2), packed_groups(lengths, max(lengths))


def _use_foreign_times(path: Path) -> object:
    from octopipe.costs.foreign_times import load_foreign_profile

    profile = load_foreign_profile(path)
    if profile is None:
        raise OctoPipeError(f"{path.name} is no recording")
    costs = profile.costs
    return finite_numbers(simulate(build_plan("1f1b", costs, 1, 2), costs).summary())


def _gpu() -> Any:
    from octopipe.costs.cluster.hardware import gpu

    return gpu("h100")


def finite_numbers(value: Any) -> Any:
    """The value, if a verb could print every number of it: an answer of null or inf is none."""
    if isinstance(value, dict):
        return {k: finite_numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite_numbers(v) for v in value]
    if isinstance(value, float) and not np.isfinite(value):
        raise ArithmeticError(f"an answer holds {value}")
    return value


def _config(**keys: Any) -> bytes:
    common = {
        "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return json.dumps({**common, **keys}).encode()


CONFIGS = (
    _config(model_type="llama", architectures=["LlamaForCausalLM"], head_dim=16, attention_bias=False),
    _config(model_type="gpt2", n_embd=64, n_layer=3, n_head=4, n_positions=128, n_inner=None),
    _config(
        model_type="qwen3_next", head_dim=16, full_attention_interval=4, linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[0], partial_rotary_factor=0.25,
    ),
    _config(
        model_type="deepseek_v3", kv_lora_rank=8, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
        first_k_dense_replace=1,
        moe_layer_freq=1, num_nextn_predict_layers=1,
    ),
    _config(
        model_type="gemma3_text", head_dim=16, sliding_window=32,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        rope_local_base_freq=1e4, rope_parameters={"full_attention": {"rope_theta": 1e6}}, hidden_activation="gelu",
    ),
    _config(
        model_type="nemotron_h", hybrid_override_pattern="M-M*-E", mamba_num_heads=4, mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2, conv_kernel=4, chunk_size=16, head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    _config(
        model_type="jamba", mamba_expand=2, mamba_d_state=8, mamba_dt_rank="auto", mamba_d_conv=4, num_experts=4,
        num_experts_per_tok=2, attn_layer_period=4, attn_layer_offset=2, expert_layer_period=2, expert_layer_offset=1,
    ),
    _config(
        model_type="kimi_linear", linear_attn_config={"full_attn_layers": [4], "num_heads": 4, "head_dim": 16},
        kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    ),
    b'{"model_type": "llava", "text_config": ' + _config(model_type="mistral", sliding_window=8) + b"}",
)  # fmt: skip
PROFILE = {
    "format": "octopipe.profile/1", "model": "tiny", "pattern": "EML", "tokens": 128,
    "forward_ms": [0.1, 2.0, 0.3], "backward_ms": [0.0, 2.1, 0.2], "weight_ms": [0.1, 1.0, 0.2],
    "activation_gib": [0.1, 0.1, 0.1], "stash_gib": [0.0, 0.1, 0.0], "params_gib": [0.1, 0.2, 0.1],
    "gradient_gib": [0.1, 0.2, 0.1], "boundary_gib": [0.01, 0.01, 0.01], "workspace_gib": [0.0, 0.0, 0.0],
    "optimizer_ms": [0.1, 0.1, 0.1], "tied_gib": 0.05,
    "partial": {"1": {"forward_ms": [0.1, 1.0, 0.3], "backward_ms": [0.0, 2.1, 0.2], "weight_ms": [0.1, 1.0, 0.2]}},
    "links": [
        {"source": 0, "destination": 1, "latency_ms": 0.01, "gb_per_s": 40.0},
        {"source": 1, "destination": 0, "latency_ms": 0.01, "gb_per_s": None},
    ],
    "rank_slowdown": [1.0, 1.02], "memory_gib": [30.0, 30.0], "op_overhead_ms": 0.01, "fused_factor": 0.97,
    "about": {"device": "cpu", "date": "2026-01-01"},
}  # fmt: skip
LAYER_TIMES = {
    "format": "octopipe.layer-times/1", "pattern": "EM-M*-L",
    **{key: dict.fromkeys("EM-*L", 1.5) for key in ("forward_ms", "backward_ms", "weight_ms", "activation_gib")},
    "stash_gib": dict.fromkeys("EM-*L", 0.5), "params_gib": dict.fromkeys("EM-*L", 0.5), "boundary_gib": 0.01,
    "workspace_gib": 0.1, "tokens": 4096,
}  # fmt: skip
TORCH_CSVS = (
    b"0F0,0F1,0B0,,0B1\n1F0,1B0,1F1,1B1\n",
    b"0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
    b"1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1\n",
)
MEGATRON_TEXTS = (b"Et*3|(tt|)*2,m|L", b"M-M*|-ME/M*/M*", b"E|(t|)*30L")


REQUEST = json.dumps(
    {
        "model": "llama3-8b", "pp": 4, "micro_batches": 8, "gpu": "h100", "tp": 2, "seq": 4096, "memory_gib": 80.0,
        "budget_s": 2.0, "systems": ["1f1b", "zb-h1"],
    }
).encode()  # fmt: skip
LENGTHS = (b"[512, 1024, 96]", b"512\n1024 # long\n\n96\n")
TRACE = {
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": f"layer {k} {phase}", "ts": 100.0 * k + shift, "dur": 40.0,
         "tid": 1, "pid": 1}
        for k in range(3) for phase, shift in (("forward", 0.0), ("backward", 1000.0))
    ]
}  # fmt: skip
TIMES_CSVS = (b"layer,embedding,0,1,head\nF,0.1,1.0,1.1,2.0\nB,0.2,2.1,2.2,4.1\n", b"0,1,2,3\n0.3,3.0,3.1,6.2\n")


def _timelines() -> tuple[bytes, ...]:
    costs = CostTable.uniform(num_layers=4, activation_bytes=1e6, p2p_ms=0.1).replace(
        optimizer_ms=np.full(4, 0.5), rank_memory_bytes=(1e9,)
    )
    return tuple(simulate(build_plan(n, costs, 2, 2), costs, label=n).to_json() for n in ("1f1b", "zb-h1"))


HARDWARE_TOML = (
    b'[gpu]\nlike = "h100"\nname = "mine"\npower_watts = 500\n\n[network]\nnics_per_node = 4\nnic_gb_per_s = 50\n'
    b"pod_nodes = 4\noversubscription = 2.0\n"
)
HARDWARE_JSON = json.dumps(
    {
        "format": "octopipe.hardware/1",
        "gpu": {"name": "x", "generation": "hopper", "bf16_tflops": 900, "memory_gib": 80, "hbm_tb_per_s": 3.0},
        "network": {"gpus_per_node": 8, "inside_gb_per_s": 450, "between_gb_per_s": 50},
    }
).encode()
STACK = json.dumps(
    {
        "format": "octopipe.stack/1",
        "name": "mine",
        "errors": {"runs": 4, "median": 0.1, "p90": 0.2, "worst": 0.3},
        "rates": [
            {"generation": "hopper", "precision": "bf16", "gemm": 0.7, "half": 200.0, "core": 0.5, "launch_ms": 0.01},
            {"generation": "hopper", "precision": "fp8", "gemm": 0.6, "half": 300.0, "core": 0.5, "cast_bytes": 4.0},
        ],
    }
).encode()
RUNS_CSV = (
    b"system,model,gpus,tp,pp,vp,ep,mbs,gbs,seq,precision,zero,recompute,tokens_per_s_per_gpu\n"
    b"h100,llama3-8b,16,2,2,1,1,1,64,8192,bf16,1,none,7120\nh100,qwen3-30b-a3b,8,1,1,,8,2,64,4096,fp8,3,,8120\n"
)


def readers() -> tuple[Reader, ...]:
    """Every reader of files that other people write."""
    toml = b'[[nodes]]\ngpu = "h100"\ncount = 2\ngpus_per_node = 8\n\n[[nodes]]\ngpu = "a100"\ncount = 1\n'
    nodes = {"nodes": [{"gpu": "h100", "count": 2, "gpus_per_node": 8}, {"gpu": "a100"}]}
    setup = {**SETTING, "pp": 2, "micro_batches": 4, "nodes": nodes["nodes"][:1]}
    as_json = (json.dumps(x).encode() for x in (PROFILE, LAYER_TIMES, nodes, setup))
    profile, layer_times, cluster, plain_setup = as_json
    plans, timelines = _plan_files(), _timelines()
    return (
        Reader(name="plan", suffix=".json", valid=plans, use=_use_plan),
        Reader(name="timeline", suffix=".json", valid=timelines, use=_use_timeline),
        Reader(name="report", suffix=".json", valid=(*timelines, plans[1], plans[3]), use=_use_report),
        Reader(name="profile", suffix=".json", valid=(profile,), use=_use_costs),
        Reader(name="layer-times", suffix=".json", valid=(layer_times,), use=_use_costs),
        Reader(name="config", suffix=".json", valid=CONFIGS, use=_use_config),
        Reader(name="setup", suffix=".json", valid=(plain_setup,), use=_use_setup),
        Reader(name="cluster.json", suffix=".json", valid=(cluster,), use=_use_cluster),
        Reader(name="cluster.toml", suffix=".toml", valid=(toml,), use=_use_cluster),
        Reader(name="hardware.toml", suffix=".toml", valid=(HARDWARE_TOML,), use=_use_hardware),
        Reader(name="hardware.json", suffix=".json", valid=(HARDWARE_JSON,), use=_use_hardware),
        Reader(name="stack", suffix=".json", valid=(STACK,), use=_use_stack),
        Reader(name="runs.csv", suffix=".csv", valid=(RUNS_CSV,), use=_use_runs),
        Reader(name="torch.csv", suffix=".csv", valid=TORCH_CSVS, use=_use_torch_csv),
        Reader(name="lengths", suffix=".txt", valid=LENGTHS, use=_use_lengths),
        Reader(name="trace", suffix=".json", valid=(json.dumps(TRACE).encode(),), use=_use_foreign_times),
        Reader(name="times.csv", suffix=".csv", valid=TIMES_CSVS, use=_use_foreign_times),
        Reader(name="megatron", suffix=".txt", valid=MEGATRON_TEXTS, use=_use_megatron),
        Reader(name="recording", suffix=".json", valid=_recordings(), use=_use_costs),
        Reader(name="model", suffix=".json", valid=(CONFIGS[0], profile, layer_times, *_recordings()), use=_use_model),
        Reader(name="request", suffix=".json", valid=(REQUEST,), use=_use_request),
    )


def _recordings() -> tuple[bytes, ...]:
    """A trace of torch.profiler, an export of Nsight Systems, a report of its, a CSV of times."""
    back = "autograd::engine::evaluate_function: XBackward0"
    events: list[dict[str, Any]] = []
    for k in range(3):
        more = {"ph": "X", "pid": 1, "tid": 1}
        events.append({**more, "cat": "user_annotation", "name": f"layer {k}", "ts": 10.0 * k, "dur": 8.0})
        args = {"Sequence number": k, "correlation": k}
        events.append({**more, "cat": "cpu_op", "name": "aten::mm", "ts": 10.0 * k + 1, "dur": 5.0, "args": args})
        events.append({**more, "cat": "cpu_op", "name": back, "ts": 90.0 - 9 * k, "dur": 6.0, "args": args})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.sqlite"
        base = sqlite3.connect(path)
        base.execute('CREATE TABLE NVTX_EVENTS (start INT, "end" INT, eventType INT, text TEXT, globalTid INT)')
        rows = [(9 * k, 9 * k + 5, 59, f"layer {k // 2} {'bwd' if k % 2 else 'fwd'}", 1) for k in range(4)]
        base.executemany("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?)", rows)
        base.commit()
        base.close()
        exported = path.read_bytes()
    report = b"Range,Proj Med (ns)\n:layer 0 fwd,5\n:layer 0 bwd,9\n:layer 1 fwd,6\n:layer 1 bwd,8\n"
    times = b"layer,embed,0,head\nF,1,2,3\nB,2,4,6\n"
    return json.dumps({"traceEvents": events}).encode(), exported, report, times


def outcome(reader: Reader, path: Path) -> str:
    """ "read", or "refused" with one line; whatever else is raised goes on to the caller."""
    try:
        reader.use(path)
    except OctoPipeError as error:
        lines = str(error).splitlines()
        if len(lines) != 1 or len(lines[0]) > 1000 or not lines[0].strip():
            raise AssertionError(f"not one line of at most 1,000 characters: {str(error)[:200]!r}") from error
        return "refused"
    return "read"


# -- damage --------------------------------------------------------------------------------------------


def damaged(valid: bytes, pick: Pick) -> bytes:
    """The file with one to four things wrong in its structure, or some of its bytes."""
    try:
        value = json.loads(valid)
    except ValueError:
        value = None
    if value is None or pick(10) == 0:
        return _bytes_damaged(valid, pick)
    for _ in range((1, 1, 1, 2, 4)[pick(5)]):
        value = _changed(value, pick)
    text = json.dumps(value)
    for key in (json.dumps(DUPLICATE)[1:-1],):
        text = text.replace(key, "")
    return text.encode()


def _changed(root: Any, pick: Pick) -> Any:
    """One change at a place that is walked to from the top."""
    parent, key, here = None, None, root
    while isinstance(here, dict | list) and here and pick(40 if parent is None else 6):
        keys = list(here) if isinstance(here, dict) else range(len(here))
        parent, key = here, keys[pick(len(keys))]
        here = parent[key]
    new = _new_value(here, pick)
    if parent is None:
        return new
    change = pick(10)
    if change == 0:
        del parent[key]
    elif change == 1 and isinstance(parent, dict):
        parent[f"{key}{DUPLICATE}"] = new
    elif change == 1:
        parent.insert(key, copy.deepcopy(here))
    elif change == 2 and isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    elif change == 2:
        parent.append(new)
    else:
        parent[key] = new
    return root


def _new_value(here: Any, pick: Pick) -> Any:
    """Something near the old value, or something nasty."""
    how = pick(2)
    if how == 0 and isinstance(here, int | float) and not isinstance(here, bool):
        try:
            return (here + 1, here - 1, -here, here * 2, here / 3, here * 10**6, str(here), [here])[pick(8)]
        except (OverflowError, ValueError):
            return here
    if how == 0 and isinstance(here, list) and here:
        return (here[:-1], here + here[:1], here[::-1], here * 3, here[0])[pick(5)]
    if how == 0 and isinstance(here, str):
        return (here[:-1], here + here, here.upper(), here + "\x00", here.replace("/1", "/2"))[pick(5)]
    return copy.deepcopy(NASTY[pick(len(NASTY))])


def _bytes_damaged(valid: bytes, pick: Pick) -> bytes:
    out = bytearray(valid)
    for _ in range(1 + pick(4)):
        at = pick(len(out) + 1)
        how = pick(6)
        if how == 0:
            out[at : at + 1] = bytes([pick(256)])
        elif how == 1:
            del out[at : at + 1 + pick(16)]
        elif how == 2:
            out[at:at] = bytes([pick(256)]) * (1 + pick(8))
        elif how == 3:
            del out[at:]
        elif how == 4:
            other = pick(len(out) + 1)
            out[at:at] = out[other : other + pick(64)]
        else:
            out[at:at] = INSERTED[pick(len(INSERTED))]
    return bytes(out)
