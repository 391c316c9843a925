"""Random programs of the kernels' language against CPython: `python scripts/fuzz_kernels.py --programs 100000`.

Prints how many agreed; the first that does not is printed whole, and the exit code is 1.

Four fifths of the time of a program are LLVM's optimiser, which is not what is on trial: the translation is. So one
program in `--optimised-every` is compiled as production code is. The others are compiled without optimisation and with
the small, position-independent code model, for which LLVM's fast instruction selector takes half the time.
"""

from __future__ import annotations

import argparse
import linecache
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from octopipe.base.compile import language, machine

FORGET_EVERY = 500
"""Programs after which the sources of those that ran are forgotten."""


@cache
def fast_machine() -> Any:
    """The machine that production code is compiled for, set to compile fast instead of well."""
    _, maker, _ = machine._target()
    return maker.func(**(maker.keywords | {"opt": 0, "codemodel": "small", "reloc": "pic"}))  # type: ignore[attr-defined]


def unoptimised(llvm: Any, machine: Any, text: str) -> bytes:
    """A module's code as `machine._compiled` makes it, without any optimisation."""
    return bytes(fast_machine().emit_object(llvm.parse_assembly(text)))


def spent(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s, {time.process_time():.0f} s of CPU"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program (default: 0)")
    parser.add_argument("--optimised-every", type=int, default=50, metavar="N", help="(default: 50; 1: every program)")
    args = parser.parse_args()
    # Nothing is kept of programs that nobody runs again.
    machine.kept = lambda name: None
    machine.keep = lambda name, content: None
    from kernel_programs import disagreement

    optimised, began, full = machine._compiled, time.monotonic(), 0
    for number in range(args.programs):
        as_production = number % args.optimised_every == 0
        machine._compiled = optimised if as_production else unoptimised
        found = disagreement(args.first + number)
        if found:
            print(found)
            return 1
        full += as_production
        if (number + 1) % FORGET_EVERY == 0:
            language._parsed.cache_clear()
            linecache.clearcache()
            print(f"{number + 1} programs agree, {full} of them optimised; {spent(began)}", flush=True)
    print(f"{args.programs} programs agree with CPython, three calls each; {full} were optimised; {spent(began)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
