"""The `octopipe` command: finds the verb, loads only its module, turns mistakes into one line.

Knows: the verbs' names and one line of help each. Does not know: what a verb does; see octopipe/verbs/.
Heavy imports happen inside the verb that needs them, so `octopipe --help` starts in a blink.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from octopipe.errors import DoesNotFitError, OctoPipeError, PlanError

VERBS = {
    "models": "list the model presets, or show one layer by layer",
    "simulate": "predict step time, bubbles and memory of a system or a plan",
    "check": "say everything that is wrong with a plan file",
    "systems": "list the published systems; --check re-derives their closed forms",
    "compare": "run every system on a model, side by side",
    "tune": "find a faster plan: partition, placement and order together",
    "report": "one self-contained HTML page about plans and timelines",
    "export": "a plan as Perfetto trace, SVG, PNG, CSV, PyTorch or Megatron text",
    "serve": "a local page to tune and look at plans",
    "train": "train a model with a plan, for real",
    "profile": "measure the layers of a model on this machine",
    "validate": "run a plan and compare it with its prediction",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the return value is the exit code (2: a user's mistake, 3: nothing that fits)."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = next((w for w in words if not w.startswith("-")), None)
    parser = _parser()
    if verb not in VERBS or words[0] != verb:
        parser.parse_args(words[:1] if words else ["--help"])
        return 0
    module = importlib.import_module(f"octopipe.verbs.{verb}")
    own = argparse.ArgumentParser(prog=f"octopipe {verb}", description=VERBS[verb][0].upper() + VERBS[verb][1:] + ".")
    module.add_arguments(own)
    args = own.parse_args(words[1:])
    try:
        return int(module.run(args) or 0)
    except PlanError as error:
        for problem in error.problems:
            print(f"octopipe: {problem}", file=sys.stderr)
        return 2
    except OctoPipeError as error:
        print(f"octopipe: {error}", file=sys.stderr)
        return 3 if isinstance(error, DoesNotFitError) else 2
    except KeyboardInterrupt:
        print("octopipe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; point stdout at nothing so that the interpreter can close quietly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    from octopipe import __version__

    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:{width}}  {text}" for name, text in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="octopipe",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Plan, simulate, tune and run pipeline-parallel training of heterogeneous models.",
        epilog=f"verbs:\n{verbs}\n\n`octopipe VERB --help` says what a verb takes.",
    )
    parser.add_argument("verb", choices=list(VERBS), metavar="VERB", help="what to do, one of the verbs below")
    parser.add_argument("--version", action="version", version=f"octopipe {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
