"""`octopipe doctor`: reports what works on this machine, what does not, and how to fix it.

Knows: what is checked without torch, and how findings are shown. Does not know: torch; `runtime/torch_check.py` checks
it in a process of its own, so that neither a missing nor a crashing torch stops the rest.

Exit code 0: nothing is broken (what is merely missing is a note); 1: something is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from octopipe.base.versions import OLDEST_TRANSFORMERS
from octopipe.cli.verbs.common import console, named, print_json

OK, NOTE, BROKEN = "ok", "note", "broken"
GIB = float(1 << 30)
NEEDED = ("numpy", "llvmlite", "msgspec", "rich")
EXTRAS = {
    "torch": ("torch", "train, profile, validate"),
    "transformers": ("hf", "models of Hugging Face"),
    "tokenizers": ("train", "train --data text.jsonl"),
    "datasets": ("train", "train --data of a saved dataset"),
    "tensorboard": ("train", "train --tensorboard"),
    "wandb": ("wandb", "train --wandb"),
    "ortools": ("exact", "tune --method exact"),
    "resvg-py": ("png", "export --to png"),
    "megatron-core": ("megatron", "plans inside Megatron-Core"),
}
"""Optional packages: the extra of octopipe that installs each, and what it is for."""
OLDEST = {"transformers": OLDEST_TRANSFORMERS}
TORCH_S = 150.0
"""The longest time in seconds that the check of torch may take."""
FEW_FILES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    state: str
    """"ok", "note" (missing, but not required) or "broken"."""
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    findings = list(examined())
    broken = [finding for finding in findings if finding.state == BROKEN]
    if args.json:
        print_json({"works": not broken, "findings": [asdict(finding) for finding in findings]})
        return int(bool(broken))
    out = console()
    width = max(len(finding.name) for finding in findings)
    colours = {OK: "green", NOTE: "dim", BROKEN: "red"}
    for f in findings:
        remedy = f"; {f.remedy}" if f.remedy else ""
        out.print(
            f"[{colours[f.state]}]{f.state:<6}[/]  {named(f.name):<{width}}  {named(f.found + remedy)}", soft_wrap=True
        )
    if broken:
        out.print(f"[bold]{len(broken)} of {len(findings)} are broken:[/] {named(', '.join(f.name for f in broken))}")
    else:
        out.print("[bold]nothing is broken[/]")
    return int(bool(broken))


def examined() -> Iterator[Finding]:
    """Run all checks and yield their findings; a check that raises is reported as broken."""
    for check in (python, packages, kernel_compiler, cache, memory, shared_memory, loopback, files, extras, torch):
        try:
            yield from check()
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            yield Finding(name=check.__name__.replace("_", " "), state=BROKEN, found=f"could not be checked ({why})")


def python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding(
        name="Python", state=OK if good else BROKEN, found=f"{version}, {sys.executable}",
        remedy="" if good else "use Python 3.11 or newer",
    )  # fmt: skip
    from octopipe import __version__

    yield Finding(
        name="octopipe", state=OK, found=f"{__version__}, {os.path.dirname(sys.modules['octopipe'].__file__ or '')}"
    )


def packages() -> Iterator[Finding]:
    for name in NEEDED:
        try:
            __import__(name)
            yield Finding(name=name, state=OK, found=importlib.metadata.version(name))
        except Exception as error:
            why = " ".join(str(error).split())[:120]
            yield Finding(name=name, state=BROKEN, found=f"cannot be imported ({why})", remedy=f"pip install {name}")


def kernel_compiler() -> Iterator[Finding]:
    """Check that kernels compile and run: simulating a small plan compiles some of them."""
    from octopipe.costs.table import CostTable
    from octopipe.search.systems import build_plan
    from octopipe.simulation.simulator import simulate

    costs = CostTable.uniform(num_layers=2)
    found = simulate(build_plan("1f1b", costs, 2, 2), costs).makespan_ms
    # Two equal stages, two micro-batches, F = 1 and B = 2: (2 + 2 - 1) x 3.
    good = abs(found - 9.0) < 1e-9
    yield Finding(
        name="kernels", state=OK if good else BROKEN, found="compiled and run" if good else f"{found} instead of 9",
        remedy="" if good else "empty the cache folder",
    )  # fmt: skip


def cache() -> Iterator[Finding]:
    from octopipe.base.compile.store import private_folder

    place = private_folder()
    if place is None:
        yield Finding(
            name="cache folder",
            state=BROKEN,
            found="none can be written",
            remedy="set OCTOPIPE_CACHE_DIR to a folder of yours",
        )
        return
    asked = os.environ.get("OCTOPIPE_CACHE_DIR", "")
    free = shutil.disk_usage(place).free / GIB
    if asked and os.path.realpath(asked) != os.path.realpath(place):
        yield Finding(
            name="cache folder", state=NOTE, found=f"{place}, not OCTOPIPE_CACHE_DIR={asked}",
            remedy="that one is not a folder that you alone can write (chmod 700)",
        )  # fmt: skip
        return
    low = free < 1.0
    yield Finding(
        name="cache folder", state=NOTE if low else OK, found=f"{place}, {free:.1f} GiB free",
        remedy="free space: tokenized text is cached there" if low else "",
    )  # fmt: skip


def memory() -> Iterator[Finding]:
    from octopipe.runtime.measure.host_memory import free_host_bytes

    free = free_host_bytes()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = "unknown" if free is None else f"{free / GIB:.1f} GiB free"
    yield Finding(name="host", state=OK, found=f"{cores} cores, memory {told}")


def shared_memory() -> Iterator[Finding]:
    """Check /dev/shm, which torch uses; ranks of one host exchange tensors through unnamed shared memory instead."""
    if not os.path.isdir("/dev/shm"):
        yield Finding(name="shared memory", state=NOTE, found="no /dev/shm on this system")
        return
    use = shutil.disk_usage("/dev/shm")
    small = use.free < 64 << 20
    yield Finding(
        name="shared memory", state=BROKEN if small else OK,
        found=f"/dev/shm {use.total / GIB:.2f} GiB, {use.free / GIB:.2f} free",
        remedy="start the container with --shm-size 1g, or remove stale files" if small else "",
    )  # fmt: skip


def loopback() -> Iterator[Finding]:
    with socket.socket() as listening:
        listening.settimeout(5)
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5) as out, listening.accept()[0] as come:
            out.sendall(b"hello")
            good = come.recv(5) == b"hello"
    yield Finding(
        name="loopback",
        state=OK if good else BROKEN,
        found=f"connections to 127.0.0.1 {'work' if good else 'lose data'} (port {port} was free)",
        remedy="" if good else "allow connections to 127.0.0.1",
    )  # fmt: skip


def files() -> Iterator[Finding]:
    try:
        import resource
    except ModuleNotFoundError:
        yield Finding(name="open files", state=NOTE, found="this system has no such limit")
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < FEW_FILES
    yield Finding(
        name="open files", state=NOTE if few else OK, found=f"limit {soft}", remedy=f"ulimit -n {hard}" if few else ""
    )


def extras() -> Iterator[Finding]:
    for name, (extra, use) in EXTRAS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                name=name, state=NOTE, found=f"not installed ({use})", remedy=f'pip install "octopipe[{extra}]"'
            )
            continue
        if name == "torch":  # checked separately
            continue
        oldest = OLDEST.get(name)
        old = oldest is not None and tuple(int(x) for x in version.split(".")[:2]) < oldest
        needs = ".".join(map(str, oldest or ()))
        yield Finding(
            name=name, state=BROKEN if old else OK, found=f"{version}{f', older than {needs}' if old else ''}",
            remedy=f"pip install '{name}>={needs}'" if old else "",
        )  # fmt: skip


def torch(start: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Iterator[Finding]:
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return  # `extras` reports it
    command = [sys.executable, "-m", "octopipe.runtime.torch_check"]
    try:
        done = start(command, capture_output=True, text=True, timeout=TORCH_S)
    except subprocess.TimeoutExpired:
        yield Finding(
            name="torch", state=BROKEN, found=f"no answer within {TORCH_S:g} s", remedy="is a GPU hung? try nvidia-smi"
        )
        return
    lines = done.stdout.strip().splitlines()
    try:
        rows = json.loads(lines[-1]) if lines else None
    except ValueError:
        rows = None
    if not isinstance(rows, list):
        last = " ".join(done.stderr.strip().splitlines()[-1:])[:200] or f"exit code {done.returncode}"
        yield Finding(name="torch", state=BROKEN, found=f"cannot be imported: {last}", remedy="install torch again")
        return
    for name, state, found, remedy in rows:
        yield Finding(name=name, state=state, found=found, remedy=remedy)
