"""Checks of torch on this machine by using it, in a separate process, so that a crash is reported as a finding.

Knows: devices, communication libraries, kernels of other packages, and whether two ranks can communicate. Does not
know: how findings are shown (`octopipe doctor`).

    python -m octopipe.runtime.torch_check        # one JSON list of [name, state, found, remedy]
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

TRIED = ((2, 9), (2, 15))
"""The oldest and the newest torch that the tests were run with."""
OK, NOTE, BROKEN = "ok", "note", "broken"
Finding = tuple[str, str, str, str]
KERNELS = {
    "flash_attn": ("flash-attn", "attention with windows, --kernels flash-attn"),
    "liger_kernel": ("liger-kernel", "norms and gated products, --kernels liger"),
    "mamba_ssm": ("mamba-ssm", "Mamba-2's scan"),
    "causal_conv1d": ("causal-conv1d", "Mamba-2's convolution"),
    "fla": ("flash-linear-attention", "delta rules"),
}


def main() -> None:
    findings: list[Finding] = []
    for check in (torch_version, devices, collectives, kernels, mps, two_ranks):
        try:
            findings += check()
        except Exception as error:  # every failure is a finding that the user should see
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            findings.append((check.__name__.replace("_", " "), BROKEN, why, "see the message"))
    sys.stdout.write(json.dumps(findings) + "\n")


def torch_version() -> list[Finding]:
    import torch

    number = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    found = str(torch.__version__)
    oldest, newest = (".".join(map(str, v)) for v in TRIED)
    if number < TRIED[0]:
        return [("torch", BROKEN, f"{found}, older than {oldest}", 'pip install "torch>=2.9"')]
    if number > TRIED[1]:
        return [("torch", NOTE, f"{found}; tried are {oldest} to {newest}", f"torch {newest} if something fails")]
    return [("torch", OK, f"{found} (tried: {oldest} to {newest})", "")]


def devices() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        seen = _driver_gpus()
        if seen:
            built = torch.version.cuda or "no CUDA"
            return [
                ("GPUs", BROKEN, f"the driver shows {seen}, torch (built with {built}) uses none",
                 "install a torch built for this driver's CUDA: https://pytorch.org/get-started")
            ]  # fmt: skip
        return [("GPUs", NOTE, "none: --device cpu", "")]
    out: list[Finding] = []
    for k in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(k)
        free = torch.cuda.mem_get_info(k)[0] / (1 << 30)
        x = torch.ones(64, 64, device=f"cuda:{k}")
        works = float((x @ x)[0, 0]) == 64.0
        what = f"{p.name}, {p.total_memory / (1 << 30):.0f} GiB, {free:.0f} free, compute {p.major}.{p.minor}"
        remedy = "" if works else "a product gave a wrong result: check the driver"
        out.append((f"GPU {k}", OK if works else BROKEN, what, remedy))
    out.append(("CUDA", OK, f"{torch.version.cuda}, driver's GPUs usable", ""))
    return out


def _driver_gpus() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
    count = len([line for line in done.stdout.splitlines() if line.startswith("GPU ")])
    return f"{count} GPUs" if count else ""


def collectives() -> list[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return [("torch.distributed", BROKEN, "not in this torch", "install a torch with distributed support")]
    gloo = dist.is_gloo_available() if hasattr(dist, "is_gloo_available") else True
    out: list[Finding] = [
        ("gloo", OK if gloo else BROKEN, "there" if gloo else "missing", "" if gloo else "install a torch with gloo")
    ]
    if torch.cuda.is_available():
        there = dist.is_nccl_available()
        version = ".".join(map(str, torch.cuda.nccl.version())) if there else "missing"
        out.append(("NCCL", OK if there else BROKEN, version, "" if there else "install a torch with NCCL"))
    return out


def kernels() -> list[Finding]:
    """Import the optional packages: one that was built for another torch counts as broken, not as installed."""
    import torch

    out: list[Finding] = []
    for name, (package, use) in KERNELS.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if torch.cuda.is_available():  # they are for GPUs alone
                out.append((name, NOTE, f"not installed ({use})", f"pip install {package}"))
            continue
        try:
            importlib.import_module(name)
            out.append((name, OK, version, ""))
        except Exception as error:
            why = " ".join(str(error).split())[:120]
            out.append((name, BROKEN, f"{version} does not load: {why}", f"pip install --force-reinstall {package}"))
    return out


def mps() -> list[Finding]:
    """Look for NVIDIA's Multi-Process Service, which matters only if ranks share a GPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    tool = shutil.which("nvidia-cuda-mps-control")
    if tool is None:
        return [
            (
                "MPS",
                NOTE,
                "nvidia-cuda-mps-control is not on the PATH: no two ranks can share a GPU",
                "install the driver's MPS",
            )
        ]
    return [("MPS", OK, f"{tool}; started where ranks share a GPU", "")]


def _add(seat: Any, payload: Any) -> float:
    import torch
    import torch.distributed as dist

    box = torch.tensor([float(seat.rank + 1)])
    dist.all_reduce(box)
    return float(box)


def two_ranks(run: Callable[..., Any] | None = None) -> list[Finding]:
    from octopipe.runtime.ranks.launch import run_ranks

    found = (run or run_ranks)(_add, 2, threads=1, timeout_s=90.0)
    if found != [3.0, 3.0]:
        return [("two ranks", BROKEN, f"1 + 2 came out as {found}", "report it")]
    return [("two ranks", OK, "start, connect and sum over gloo", "")]


if __name__ == "__main__":
    # Under its own name: ranks look functions up by module.
    from octopipe.runtime.torch_check import main as run

    run()
