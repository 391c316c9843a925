"""Fuzz every reader: damaged files in, "read" or one line out; anything else is kept and counted.

    make fuzz                                  100,000 cases over all readers
    python scripts/fuzz.py --cases 2000 --readers plan timeline --seed 7
    python scripts/fuzz.py --atheris --cases 100000        coverage-guided, where atheris is installed

A case may take `--limit-s` seconds of processor time (a busy machine is no hang) and the process `--memory-gib` of
address space beyond what it started with. The exit code is 1 if a case raised, hung or ran out of memory; the files
that did are in `--keep`, named after reader and case.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.util
import logging
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

READING = (
    "base.files", "base.limits", "costs.cluster.file", "costs.cluster.setup", "costs.foreign_times",
    "costs.layer_times", "costs.profile_file", "costs.readers", "costs.resolve", "costs.table", "costs.table_file",
    "huggingface.weights", "models.layers", "models.lengths", "models.readers", "models.spec", "plans.file",
    "plans.plan", "plans.readers", "plans.setting", "runtime.training.checkpoint", "runtime.training.checkpoint_folder",
    "runtime.training.data", "search.foreign_plan", "simulation.timeline", "simulation.timeline_file", "views.report",
)  # fmt: skip
"""Modules that read; in those with kernels the counters would be compiled along."""
if "--inner" in sys.argv:  # readers are compiled with counters as they are imported
    import atheris

    with atheris.instrument_imports(include=[f"octopipe.{name}" for name in READING]):
        import fuzz_cases
else:
    import fuzz_cases
from fuzz_cases import Reader, damaged, outcome  # noqa: E402

MIB = 1 << 20


def all_readers() -> dict[str, Reader]:
    """By name; those of training where torch is installed."""
    found = fuzz_cases.readers()
    if importlib.util.find_spec("torch") is not None:
        import fuzz_training

        found += fuzz_training.readers()
    return {reader.name: reader for reader in found}


class TooLongError(BaseException):
    """Raised in the middle of a case; not an Exception, so that no reader can take it for its own."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TooLongError after so much processor time."""

    def stop(*_: object) -> None:
        raise TooLongError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def try_one(reader: Reader, data: bytes, folder: Path, limit_s: float) -> tuple[str, str]:
    """What came of one file: read, refused, traceback, hang or memory; and where it went wrong."""
    path = folder / f"case{reader.suffix}"
    path.write_bytes(data)
    try:
        with limited(limit_s):
            return outcome(reader, path), ""
    except TooLongError:
        return "hang", traceback.format_exc(limit=-3)
    except MemoryError:
        return "memory", traceback.format_exc(limit=-3)
    except Exception:
        return "traceback", traceback.format_exc(limit=-3)


def fuzz(reader: Reader, cases: int, seed: int, limit_s: float, keep: Path, folder: Path) -> Counter[str]:
    """So many damaged files of one kind; the same seed makes the same files."""
    rng = random.Random(f"{reader.name}/{seed}")
    counts: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for number in range(cases):
        if number % 100 == 0:  # compiled code does not hear the signal: where it hangs, the process ends
            faulthandler.dump_traceback_later(100 * limit_s, exit=True)
        before = peak_mib()
        data = damaged(reader.valid[number % len(reader.valid)], rng.randrange)
        result, where = try_one(reader, data, folder, limit_s)
        counts[result] += 1
        if peak_mib() - before > 256:
            counts["over 256 MiB"] += 1
            result = f"{result}-large"
        if result not in ("read", "refused"):
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{reader.name}-{seed}-{number}-{result}{reader.suffix}").write_bytes(data)
            place = where.strip().splitlines()[-1] if where else "a large step in memory"
            places[place] += 1
            if places[place] == 1:
                print(f"{reader.name}, case {number}: {result}\n{where}", file=sys.stderr)
    faulthandler.cancel_dump_traceback_later()
    return counts


def guided(reader: Reader, cases: int, folder: Path) -> None:
    """Coverage-guided: libFuzzer picks the numbers that pick the damage."""
    import atheris

    def one(data: bytes) -> None:
        provider = atheris.FuzzedDataProvider(data)
        valid = reader.valid[provider.ConsumeIntInRange(0, len(reader.valid) - 1)]
        path = folder / f"case{reader.suffix}"
        path.write_bytes(damaged(valid, lambda n: int(provider.ConsumeIntInRange(0, n - 1))))
        outcome(reader, path)

    # Numbers for several places from the start: left to itself, libFuzzer begins with a byte or two.
    limits = ["-timeout=30", "-rss_limit_mb=4096", "-len_control=0", "-max_len=512"]
    atheris.Setup([sys.argv[0], f"-runs={cases}", *limits], one)
    atheris.Fuzz()


def guided_each(names: list[str], cases: int) -> int:
    """One process a reader: libFuzzer ends its own. Returns how many readers went wrong."""
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed: no coverage-guided run (pip install atheris)")
        return 0
    wrong = 0
    for name in names:
        share = str(cases // len(names))
        words = [sys.executable, __file__, "--atheris", "--inner", "--readers", name, "--cases", share]
        began = time.monotonic()
        # libFuzzer ends its process at once: what that has made is removed here.
        with tempfile.TemporaryDirectory(prefix="octopipe-fuzz-", dir=_memory_disk()) as folder:
            done = subprocess.run([*words, "--folder", folder], capture_output=True, text=True)
        lines = [line for line in done.stderr.splitlines() if re.match(r"#\d+\s+DONE", line)]
        wrong += done.returncode != 0
        result = "went wrong" if done.returncode else "clean"
        print(f"{name:14}{result}; {time.monotonic() - began:.0f} s; {' '.join(' '.join(lines[-1:]).split())}")
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
        sys.stdout.flush()
    return wrong


def main() -> int:
    known = all_readers()
    parser = argparse.ArgumentParser(description="Fuzz every reader of files.")
    parser.add_argument("--cases", type=int, default=100_000, help="over all readers together (default: 100,000)")
    parser.add_argument("--readers", nargs="+", choices=sorted(known), default=list(known))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=5.0, help="processor time of one case (default: 5)")
    parser.add_argument("--memory-gib", type=float, default=4.0, help="that may be added in all (default: 4)")
    parser.add_argument("--keep", type=Path, default=ROOT / "out" / "fuzz", help="for files that went wrong")
    parser.add_argument("--atheris", action="store_true", help="coverage-guided, one process a reader")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.getLogger("octopipe").setLevel(logging.ERROR)  # what a recording leaves open is said for each that is read
    if args.atheris and not args.inner:
        return int(guided_each(args.readers, args.cases) > 0)
    with tempfile.TemporaryDirectory(prefix="octopipe-fuzz-", dir=args.folder or _memory_disk()) as name:
        folder = Path(name)
        # Kernels are compiled, and every valid file is read, before anything counts.
        for reader in map(known.__getitem__, args.readers):
            for data in reader.valid:
                (folder / f"case{reader.suffix}").write_bytes(data)
                assert outcome(reader, folder / f"case{reader.suffix}") == "read", reader.name
        if args.atheris:
            guided(known[args.readers[0]], args.cases, folder)
            return 0
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + int(args.memory_gib * 1024) * MIB, resource.RLIM_INFINITY))
        began, start_mib, total = time.monotonic(), peak_mib(), Counter[str]()
        for reader in map(known.__getitem__, args.readers):
            at = time.monotonic()
            counts = fuzz(reader, args.cases // len(args.readers), args.seed, args.limit_s, args.keep, folder)
            total += counts
            took = time.monotonic() - at
            print(f"{reader.name:14}{_words(counts)}; {took:.0f} s, peak {peak_mib():.0f} MiB", flush=True)
    print(
        f"{'in all':14}{_words(total)}; {time.monotonic() - began:.0f} s, "
        f"peak {peak_mib():.0f} MiB ({start_mib:.0f} MiB before the first case)"
    )
    return int(any(total[name] for name in ("traceback", "hang", "memory", "over 256 MiB")))


def _memory_disk() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _words(counts: Counter[str]) -> str:
    cases = sum(counts[name] for name in ("read", "refused", "traceback", "hang", "memory"))
    return (
        f"{cases} cases: {counts['read']} read, {counts['refused']} refused, {counts['traceback']} tracebacks, "
        f"{counts['hang']} hangs, {counts['memory']} out of memory, {counts['over 256 MiB']} over 256 MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
