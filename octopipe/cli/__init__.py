"""The `octopipe` command: finds the verb, imports only its module, and turns every error into one line.

Knows: the verbs' names with one line of help each, the exit codes, and the signals that end a verb. Does not know: what
a verb does; see octopipe/cli/verbs/. Heavy imports happen inside the verb that needs them, so `octopipe --help` starts
quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from octopipe.base.errors import MAX_MICRO_BATCHES, DoesNotFitError, OctoPipeError, PlanError, Terminated
from octopipe.base.streams import open_standard_streams
from octopipe.cli.faults import BAD_INPUT, FAULT, explained

VERBS = {
    "plan": "find the fastest way to split a model over a whole cluster",
    "models": "list the model presets, or show one layer by layer",
    "gpus": "list the GPU presets",
    "simulate": "predict step time, bubbles and memory of a system or a plan",
    "check": "list everything that is wrong with a plan file",
    "systems": "list the published systems; --check re-derives their closed forms",
    "compare": "run every system on a model, side by side",
    "tune": "find a faster plan: partition, placement and order together",
    "scale": "weak and strong scaling of one split over increasing numbers of GPUs",
    "report": "write a self-contained HTML page about plans and timelines",
    "export": "export a plan as Perfetto trace, SVG, PNG, CSV, PyTorch or Megatron text",
    "import": "import schedules of PyTorch, torchtitan or Megatron as plans, and profiler traces as profiles",
    "serve": "serve a local web page to tune and view plans",
    "train": "train a model with a plan",
    "convert": "convert a checkpoint to safetensors (transformers) or torch.distributed.checkpoint",
    "profile": "measure the layers of a model on this machine",
    "calibrate": "fit the efficiency rates of your training stack to your own runs",
    "validate": "run a plan and compare it with its prediction",
    "doctor": "report what works on this machine, what does not, and how to fix it",
    "reproduce": "compute the paper's tables and figures again, with the paper's numbers next to ours",
    "completion": "print a completion script for bash, zsh or fish",
}
OK, BROKEN_PIPE, DOES_NOT_FIT, INTERRUPTED, TERMINATED = 0, 1, 3, 130, 143
EXIT_CODES = {
    OK: "success",
    BROKEN_PIPE: "a check failed, or the reader of the output closed it",
    BAD_INPUT: "bad input",
    DOES_NOT_FIT: "does not fit in memory",
    FAULT: "an internal error",
    INTERRUPTED: "interrupted (Ctrl-C)",
    TERMINATED: "terminated (SIGTERM)",
}
MODULES = {"import": "import_plan"}
"""Modules of verbs whose name is not a valid module name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code (see `EXIT_CODES`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("OCTOPIPE_TRACEBACK", "") not in ("", "0")
    if "--debug" in words:
        words, debug = [w for w in words if w != "--debug"], True
    open_standard_streams()
    signals = _Signals()
    try:
        code = _run(words, debug)
        sys.stdout.flush()
        # A verb may catch the signal's exception to return a partial result; the exit code still reports the signal.
        return 128 + signals.number if signals.number else code
    except PlanError as error:
        for problem in error.problems:
            _say(problem)
        return BAD_INPUT
    except OctoPipeError as error:
        _say(str(error))
        return DOES_NOT_FIT if isinstance(error, DoesNotFitError) else BAD_INPUT
    except Terminated:
        _say("terminated")
        return TERMINATED
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout (head, less) has exited
        return BROKEN_PIPE
    except Exception as error:
        if debug:
            raise
        code, line = explained(error, words)
        _say(line)
        return code
    finally:
        signals.restore()
        _close_quietly()


def _close_quietly() -> None:
    """Redirect output streams that are closed or full to the null device, as the interpreter flushes them again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(words: list[str], debug: bool) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return OK
    if words[0] == "--version":
        from octopipe import __version__

        print(f"octopipe {__version__}")
        return OK
    verb = words[0]
    if verb not in VERBS:
        if verb.startswith("-"):
            raise OctoPipeError(f"{verb[:60]!r} is given before the verb; write `octopipe VERB {verb[:60]} ...`")
        raise OctoPipeError(f"unknown verb {verb[:60]!r}{_did_you_mean(verb, list(VERBS))} (see `octopipe --help`)")
    module = importlib.import_module(f"octopipe.cli.verbs.{MODULES.get(verb, verb)}")
    parser = parser_of(verb, module)
    args = parser.parse_args(words[1:])
    from octopipe.cli.verbs.screen import make_streams_safe

    make_streams_safe()
    _show_log(debug)
    return int(module.run(args) or OK)


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports errors in one line, with the closest known word for a mistyped one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, left = self.parse_known_args(args, namespace)
        if left:
            known = [flag for action in self._actions for flag in action.option_strings]
            flag = left[0].split("=")[0]
            kind = "flag" if flag.startswith("-") else "word"
            self.error(f"unknown {kind} {flag[:60]!r}{_did_you_mean(flag, known) if kind == 'flag' else ''}")
        return found

    def print_help(self, file: Any = None) -> None:
        # argparse's own ignores an output that is full or closed, so the help would be lost with exit code 0.
        print(self.format_help(), end="", file=file, flush=True)

    def error(self, message: str) -> NoReturn:
        text = message.replace("the following arguments are required:", "missing")
        _say(f"{text} (see `{self.prog} --help`)", self.prog)
        raise SystemExit(BAD_INPUT)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if arg_string == "" and action.option_strings and action.default != "" and action.const is None:
            # An unset variable of a script; verbs would take it for a flag that was not given.
            raise argparse.ArgumentError(action, "its value is empty; give one, or leave the flag out")
        if action.dest == "micro_batches" and arg_string.isdecimal() and int(arg_string[:20]) > MAX_MICRO_BATCHES:
            raise argparse.ArgumentError(action, f"{arg_string[:20]} is too many; give at most {MAX_MICRO_BATCHES}")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value == [] and action.nargs == "*":
            return  # Python 3.11 also checks the empty list of an optional positional
        if action.choices is not None and value not in action.choices:
            known = [str(c) for c in action.choices]
            hint = _did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"{str(value)[:60]!r} is not one of {', '.join(known)}{hint}")


def parser_of(verb: str, module: Any) -> Parser:
    """Return the parser of a verb's flags."""
    parser = Parser(prog=f"octopipe {verb}", description=VERBS[verb][0].upper() + VERBS[verb][1:] + ".")
    module.add_arguments(parser)
    return parser


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word.lower(), known, 2, 0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _say(line: str, who: str = "octopipe") -> None:
    """Print one line on stderr; control characters and characters that the encoding lacks are escaped."""
    text = " ".join(f"{who}: {line}".split("\n"))
    text = text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):  # stderr is full or closed: the exit code still reports the error
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)


def _show_log(debug: bool) -> None:
    """Print log records of `octopipe.*` as one line each: warnings, and with --debug everything."""
    import logging

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _say(record.getMessage())

    ours = logging.getLogger("octopipe")
    ours.setLevel(logging.DEBUG if debug else logging.WARNING)
    if not any(type(handler).__name__ == "Lines" for handler in ours.handlers):
        ours.addHandler(Lines())


SENT_AGAIN_S = 0.05
"""Seconds after which a signal is sent again if its exception was raised where Python drops exceptions."""


class _Signals:
    """Turns SIGTERM and Ctrl-C into exceptions, so that verbs close files, stop ranks and keep plans."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the last signal received, or 0."""
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}
        self._hook: Any = None
        if threading.current_thread() is not threading.main_thread():
            return
        # Handlers installed by others remain, and so do signals that the parent process wants to be ignored.
        for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            if signal.getsignal(number) == usual:
                self._before[number] = signal.signal(number, self._stop)
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._unraisable

    def _unraisable(self, what: Any) -> None:
        """Send the signal again if its exception was dropped, so that it arrives at another point of the program.

        Python drops exceptions raised in callbacks of weak references, and every import runs such callbacks: a Ctrl-C
        during one would have no effect.
        """
        if not (self.number and isinstance(what.exc_value, KeyboardInterrupt)):
            self._hook(what)
            return
        again = threading.Timer(SENT_AGAIN_S, os.kill, (os.getpid(), self.number))
        again.daemon = True
        again.start()

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked worker ends as if no handler had been installed
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.number = number
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._hook is not None:
            sys.unraisablehook = self._hook


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:{width}}  {text}" for name, text in VERBS.items())
    codes = "\n".join(f"  {code:<{width}}  {text}" for code, text in EXIT_CODES.items())
    return (
        "usage: octopipe VERB ...\n\nPlan, simulate, tune and run pipeline-parallel training of heterogeneous models."
        f"\n\nverbs:\n{verbs}\n\nexit codes:\n{codes}\n\n`octopipe VERB --help` lists a verb's "
        "flags, --version prints the version;\n--debug (or OCTOPIPE_TRACEBACK=1) prints the traceback of an error."
    )


if __name__ == "__main__":
    sys.exit(main())
