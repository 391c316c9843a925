"""How long a first `octopipe tune` takes: with empty caches and again with what the first run left, on two cores.

    python benchmarks/bench_cold.py [--budget 5] [--runs 1] [--model h800/nemotron-h-8b]

Every cold run gets an empty folder for compiled kernels (OCTOPIPE_CACHE_DIR) and for Python's byte code; the warm run
uses the folder it filled.
Prints wall-clock and CPU seconds of the whole command (start of the interpreter included), and the step times, which
should be within 1 % of each other. A loop of plain Python is timed beside them: on a machine busy with other things it
takes longer too, and its time on a quiet machine says by how much.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

from one_line import start

PROFILE = "h800/nemotron-h-8b"
SETTING = ["--pp", "8", "--micro-batches", "16", "--p2p-ms", "0.3", "--json"]


def timed(model: str, budget_s: float, folder: str) -> tuple[float, float, float]:
    """Wall-clock seconds, CPU seconds and step time of one command."""
    words = [sys.executable, "-m", "octopipe", "tune", model, *SETTING, "--budget", f"{budget_s:g}s"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    kept = {"OCTOPIPE_CACHE_DIR": folder, "PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(words, env={**os.environ, **kept}, capture_output=True, text=True)
    seconds = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stderr)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu_s, float(json.loads(done.stdout)["step_ms"])


def loop_s() -> float:
    """CPU seconds of ten million additions: about half a second where nothing else runs."""
    began, total = time.process_time(), 0
    for i in range(10_000_000):
        total += i
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=5.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--model", default=str(PROFILE))
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    print(f"{len(cores)} cores, {os.getloadavg()[0]:.1f} processes waiting or running, loop {loop_s():.2f} s\n")
    print("| run | cold, s | CPU, s | step, ms | warm, s | CPU, s | step, ms | cold over warm |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for run in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            cold = timed(args.model, args.budget, folder)
            warm = timed(args.model, args.budget, folder)
        over = 100 * (cold[2] / warm[2] - 1)
        cells = [f"{x:.1f}" for x in (*cold, *warm)]
        print(f"| {run} | " + " | ".join(cells) + f" | {over:+.2f} % |", flush=True)


if __name__ == "__main__":
    start(main)
