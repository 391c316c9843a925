"""Random programs of the kernels' language against CPython: `python scripts/fuzz_kernels.py --programs 100000`.

Prints how many agreed; the first that does not is printed whole, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program (default: 0)")
    args = parser.parse_args()
    # Nothing is kept of programs that nobody runs again.
    os.environ["OCTOPIPE_CACHE_DIR"] = "/dev/null"
    os.environ["XDG_CACHE_HOME"] = "/dev/null"
    os.environ["TMPDIR"] = "/dev/null"
    from kernel_programs import disagreement

    began = time.monotonic()
    for number in range(args.programs):
        found = disagreement(args.first + number)
        if found:
            print(found)
            return 1
        if (number + 1) % 500 == 0:
            print(f"{number + 1} programs agree, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{args.programs} programs agree with CPython, three calls each, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
