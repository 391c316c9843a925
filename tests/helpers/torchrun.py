"""torchrun as a function: its own flags, rendezvous and agent, with ranks forked from the tests' server.

A rank that torchrun starts as a process of its own imports torch for seconds; `--run-path` runs the script in a rank
that has it already. All else is torchrun's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from ranks import start_server

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def torchrun(words: Sequence[str], folder: Path, logs: Path, environment: Mapping[str, str] | None = None) -> str:
    """What all ranks of `torchrun words` print, run in this folder; raises what torchrun raises."""
    from torch.distributed.run import main

    start_server()
    before, where = [signal.getsignal(number) for number in SIGNALS], Path.cwd()
    flags = ["--run-path", "--start-method", "forkserver", "--redirects", "3", "--log-dir", str(logs)]
    wanted = {"OMP_NUM_THREADS": "1", "TORCH_MP_PARALLEL_START": "0", **(environment or {})}
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, wanted), mock.patch.object(sys, "argv", ["torchrun", *flags, *words]):
            main()
    except Exception as error:
        raise AssertionError(f"torchrun {' '.join(words)}\n{_said(logs, 'std*.log')}") from error
    finally:
        os.chdir(where)
        for number, handler in zip(SIGNALS, before):
            signal.signal(number, handler)
    return _said(logs, "stdout.log")


def _said(logs: Path, pattern: str) -> str:
    return "".join(path.read_text() for path in sorted(logs.rglob(pattern)))
