"""Read published training runs out of the repositories that publish them, into the table of published runs.

Knows: where Megatron-Bridge, NeMo and llm-foundry keep their tables and what the columns are called. Does not know:
what is done with the runs (`octopipe/costs/runs.py`, `benchmarks/bench_published.py`).

    python scripts/gather_published_runs.py --megatron-bridge DIR --nemo DIR --llm-foundry DIR

Every DIR is a git clone. Rows of these sources are written anew; all other rows of the table (papers and pages, entered
by hand with their source) stay as they are. Of runs of one stack that differ in nothing but the release, the latest
is kept: a near twin of a row would make leave-one-out errors look better than they are.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from octopipe.costs.measured import PUBLISHED_RUNS
from octopipe.costs.runs import COLUMNS

BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary-archive.md"
NEMO = "https://github.com/NVIDIA/NeMo/blob/9c5c5e9709/docs/source/performance/performance_summary.md"
NEMO_LONG = "https://github.com/NVIDIA/NeMo/blob/main/docs/source/performance/performance_long_sequence.md"
FOUNDRY = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
SOURCES = (BRIDGE, NEMO, NEMO_LONG, FOUNDRY)
STACKS = {
    "25.09": "megatron-2025-09",
    "25.11": "megatron-2025",
    "26.02": "megatron-2025",
    "26.02.01": "megatron-2026",
    "26.04": "megatron-2026",
    "26.04.01": "megatron-2026",
}
"""By release; every later one is of megatron-2026-06. 25.09 dropped tokens beyond an expert's capacity; 25.11 and 26.02
were dropless and slow on eight-GPU nodes, where 26.02.01 ran the same splits up to 1.8 times as fast."""
DATES = {
    "25.09": "2025-10",
    "25.11": "2025-12",
    "26.02": "2026-02",
    "26.02.01": "2026-03",
    "26.04": "2026-04",
    "26.04.01": "2026-05",
    "26.06": "2026-06",
    "26.06.01": "2026-07",
    "26.08": "2026-08",
}
MODELS = {
    "LLAMA3_8B": "llama3-8b",
    "LLAMA3_70B": "llama3-70b",
    "LLAMA3.1_405B": "llama3.1-405b",
    "DeepSeekV3": "deepseek-v3",
    "GPT OSS 120B": "gpt-oss-120b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "Kimi_K2": "kimi-k2",
    "Nemotron_3_Nano": "nemotron-3-nano-30b",
    "GPT3-5B": "gpt3-5b",
    "GPT3-20B": "gpt3-20b",
    "GPT3-175B": "gpt3-175b",
    "LLAMA2-7B": "llama2-7b",
    "LLAMA2-13B": "llama2-13b",
    "LLAMA2-70B": "llama2-70b",
    "Nemotron-340B": "nemotron-340b",
    "LLAMA3-8B": "llama3-8b",
    "LLAMA3-70B": "llama3-70b",
}
"""Models whose dimensions are known here; rows of others are left out."""
PRECISIONS = {"BF16": "bf16", "FP8": "fp8", "FP8-CS": "fp8", "MXFP8": "mxfp8", "FP8-MX": "mxfp8", "NVFP4": "nvfp4"}
IMPOSSIBLE = {("26.02.01", "gb300", "LLAMA3_70B", "NVFP4")}
"""Listed without sharding and without model parallelism: its weights and gradients alone would fill the GPU."""
Row = dict[str, str]


def shown(repository: Path, commit: str, path: str) -> str:
    return subprocess.run(
        ["git", "-C", str(repository), "show", f"{commit}:{path}"], check=True, capture_output=True, text=True
    ).stdout


def tables(text: str) -> Iterator[tuple[list[str], Row]]:
    """Rows of all Markdown tables, each with the headings above it."""
    headings: list[str] = []
    names: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            depth = len(line) - len(line.lstrip("#"))
            headings = [*headings[: depth - 1], *[""] * (depth - 1 - len(headings)), line.strip("# ").strip()]
        if not line.startswith("|"):
            names = []
            continue
        cells = [
            re.sub(r"\[\^.*?\]|\*|\[(\d+)\]\(.*?\)", r"\1", cell).strip() for cell in line.strip("|\n ").split("|")
        ]
        if not names:
            names = cells
        elif not set(line) <= set("|-: "):
            yield headings, dict(zip(names, cells, strict=False))


def number(text: str, default: str = "1") -> str:
    found = re.match(r"[\d.,]+", text or "")
    return found.group().replace(",", "") if found else default


def bridge(repository: Path) -> Iterator[Row]:
    for path in ("docs/performance-summary-archive.md", "docs/performance-summary.md"):
        for headings, cells in tables(shown(repository, "HEAD", path)):
            release = next((h.split()[0] for h in headings if h.endswith("NeMo Container")), "")
            if release not in DATES or not any("Pre-Training" in h or "SFT" in h for h in headings):
                continue
            title = next((h for h in headings if h.startswith(("Model:", "System:"))), "").split(":")[-1].strip()
            label = cells.get("Model", title)
            system = cells.get("System", title).removeprefix("DGX-").lower()
            model = MODELS.get(label.split(" (")[0])
            precision = cells.get("Precision", "FP8").split(" ")[0]
            if model is None or "(" in cells.get("TP", "") or (release, system, label, precision) in IMPOSSIBLE:
                continue
            stack = STACKS.get(release, "megatron-2026-06")
            # The published FLOPs of a token say whether the module that predicts a second one was trained.
            rate, tflops = number(cells["Tokens / sec / GPU"]), number(cells["Model TFLOP / sec / GPU"])
            mtp = model == "deepseek-v3" and float(tflops) / float(rate) > 0.255
            drop = "tokens beyond an expert's capacity are dropped" if "tokendrop" in label else ""
            yield {
                "stack": stack,
                "source": BRIDGE,
                "release": f"Megatron-Bridge {release}",
                "date": DATES[release],
                "system": system,
                "model": model,
                "gpus": cells["#-GPUs"],
                "precision": PRECISIONS[precision],
                "gbs": cells["GBS"],
                "mbs": cells["MBS"],
                "seq": cells["Sequence Length"],
                "zero": "3" if number(cells.get("FSDP", "0")) != "0" and cells.get("FSDP", "0") != "0" else "1",
                **{name: number(cells[name.upper()]) for name in ("tp", "pp", "cp", "vp", "ep")},
                "gradients": "bf16",
                "mtp": "1" if mtp else "",
                # Recipes of these models give a layout, which deals the ends' work to fuller and emptier stages.
                "layout": "balanced" if model in ("deepseek-v3", "kimi-k2") else "",
                "tokens_per_s_per_gpu": rate,
                "model_tflops_per_gpu": tflops,
                "note": drop,
            }


def nemo(repository: Path) -> Iterator[Row]:
    for headings, cells in tables(shown(repository, "9c5c5e9709", "docs/source/performance/performance_summary.md")):
        model = MODELS.get(cells.get("Model", ""))
        if "Pretraining" not in headings or model is None:
            continue
        yield {
            "stack": "megatron-2024",
            "source": NEMO,
            "release": "NeMo 24.07",
            "date": "2024-08",
            "system": "h100",
            "model": model,
            "gpus": cells["#-GPUs"],
            "precision": "fp8",
            "gbs": cells["GBS"],
            "mbs": cells["MBS"],
            "seq": cells["Sequence Length"],
            "zero": "1",
            **{name: number(cells[name.upper()]) for name in ("tp", "pp", "cp", "vp")},
            "ep": "1",
            "gradients": "bf16",
            "tokens_per_s_per_gpu": number(cells["Tokens / sec / GPU"]),
            "model_tflops_per_gpu": number(cells["Model TFLOP / sec / GPU"]),
            "note": "the MLPerf submission's settings" if cells["GBS"] == "2048" and cells["TP"] == "4" else "",
        }


def nemo_long(repository: Path) -> Iterator[Row]:
    """LLAMA2-7B with context parallelism on H100. (The B200 table's GPUs are not the product of its sizes.)"""
    text = shown(repository, "HEAD", "docs/source/performance/performance_long_sequence.md").split("LLAMA2-7B (FP8)")[1]
    for block in re.findall(r"<tr>(.*?)</tr>", text, re.S):
        cells = re.findall(r"<td.*?>(.*?)</td>", block, re.S)
        if len(cells) != 10:
            continue
        seq, gpus, batch, tp, pp, dp, cp = (int(cells[i]) for i in (0, 1, 2, 4, 5, 6, 7))
        assert tp * pp * dp * cp == gpus
        tflops = float(cells[8])
        # NeMo's count of a token's FLOPs: full attention, no causal half.
        flops = 32 * 4096**2 * (24 + 18 * 11008 / 4096 + 12 * 1024 * seq / 4096 + 6 * 32000 / (32 * 4096))
        yield {
            "stack": "megatron-2024",
            "source": NEMO_LONG,
            "release": "NeMo 24.03",
            "date": "2024-05",
            "system": "h100",
            "model": "llama2-7b",
            "gpus": str(gpus),
            "precision": "fp8",
            "gbs": str(batch),
            "mbs": "1",
            "seq": str(1024 * seq),
            "zero": "1",
            "tp": str(tp),
            "pp": str(pp),
            "cp": str(cp),
            "vp": "1",
            "ep": "1",
            "gradients": "bf16",
            "tokens_per_s_per_gpu": f"{1e12 * tflops / flops:.0f}",
            "model_tflops_per_gpu": cells[8],
            "note": "tokens per second from the published FLOP rate; micro-batch size not stated",
        }


def foundry(repository: Path) -> Iterator[Row]:
    """MPT models of 7 B parameters and more."""
    for headings, cells in tables(shown(repository, "HEAD", "scripts/train/benchmarking/README.md")):
        size = cells.get("Model", "")
        if size not in ("7b", "13b", "30b", "70b") or cells.get("Sharding Strategy") != "FULL_SHARD":
            continue
        system = {"h100_80gb": "h100", "a100_80gb": "a100", "a100_40gb": "a100-40g"}[cells["GPU"]]
        low = "FP8" in headings[-1] or "fp8" in cells["Precision"].lower()
        yield {
            "stack": "llm-foundry",
            "source": FOUNDRY,
            "release": "llm-foundry 0.4" if system == "h100" else "llm-foundry 0.3",
            "date": "2024-01" if system == "h100" else "2023-10",
            "system": system,
            "model": f"mpt-{size}",
            "gpus": cells["# GPUs"],
            "precision": "fp8" if low else "bf16",
            "gbs": cells["GlobalBatchSize"],
            "mbs": cells["MicroBatchSize"],
            "seq": cells["SeqLen (T)"],
            "zero": "3",
            **dict.fromkeys(("tp", "pp", "cp", "vp", "ep"), "1"),
            "recompute": "full" if cells["Activation Checkpointing"] == "True" else "none",
            "gradients": "bf16" if cells["MP Mode"] == "PURE" else "fp32",
            "tokens_per_s_per_gpu": cells["Throughput (T/s/GPU)"],
            "model_tflops_per_gpu": cells.get("Model TFLOP") or cells.get("Model TFLOP ") or "",
        }


SETUP = ("stack", "system", "model", "gpus", "precision", "gbs", "mbs", "seq", "zero", "tp", "pp", "cp", "vp", "ep")


def latest(rows: list[Row]) -> list[Row]:
    """Of rows with the same set-up the one of the latest release, in the order of the first."""
    kept: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in SETUP)
        if key not in kept or row["date"] >= kept[key]["date"]:
            kept[key] = row
    return list(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("megatron-bridge", "nemo", "llm-foundry"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    rows = [*nemo_long(args.nemo), *nemo(args.nemo), *bridge(args.megatron_bridge), *foundry(args.llm_foundry)]
    with PUBLISHED_RUNS.open() as file:
        by_hand = [row for row in csv.DictReader(file) if row["source"] not in SOURCES]
    with PUBLISHED_RUNS.open("w", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        out.writeheader()
        out.writerows([*latest(rows), *by_hand])


if __name__ == "__main__":
    main()
