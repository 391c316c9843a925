"""Many ranks on one GPU: NVIDIA's Multi-Process Service, started and stopped cleanly.

Knows: the MPS daemon, its folders, the share of multiprocessors of each rank. Does not know: plans, or which shares
compute correctly (`ranks/gpu_share.py`).

Without MPS, the processes on a GPU are time-sliced and no two ranks compute at the same time, so measurements say
nothing about a pipeline. With MPS, every rank has its own share of the multiprocessors.

    with Mps.start(num_ranks=4) as mps:
        spawn(..., env=mps.environment)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.ranks.gpu_share import SHARE

CONTROL = "nvidia-cuda-mps-control"
_WAIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mps:
    """A running daemon of our own (or none, in which case `environment` is empty)."""

    environment: Mapping[str, str]
    """The environment variables that every rank must have before it first uses the GPU."""
    folder: Path | None

    @classmethod
    def start(cls, *, num_ranks: int, share_percent: float | None = None) -> Mps:
        """Start a daemon for `num_ranks` ranks, each with this share of the multiprocessors. Default: the value of the
        variable CUDA_MPS_ACTIVE_THREAD_PERCENTAGE if the user has set it, otherwise `equal_share`.

        Raises an error if MPS is missing or does not start. A daemon that the environment already names is used as it
        is and is not stopped.
        """
        if num_ranks < 1:
            raise OctoPipeError(f"MPS for {num_ranks} ranks; give at least 1")
        share = _share_asked(os.environ.get(SHARE)) if share_percent is None else share_percent
        if share is None:
            share = equal_share(num_ranks)
        own_share = {
            SHARE: f"{share:.4g}",
            "CUDA_DEVICE_MAX_CONNECTIONS": str(connections(num_ranks)),
        }
        if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
            return cls(environment=own_share, folder=None)
        control = shutil.which(CONTROL)
        if control is None:
            raise OctoPipeError(
                f"several ranks on one GPU need NVIDIA MPS, and {CONTROL} is not on the PATH; install the "
                "driver's MPS, use one GPU per rank, or --device cpu"
            )
        folder = Path(tempfile.mkdtemp(prefix="octopipe-mps-"))
        places = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        }
        for place in places.values():
            Path(place).mkdir()
        mps = cls(environment={**places, **own_share}, folder=folder)
        try:
            done = subprocess.run(
                [control, "-d"], env={**os.environ, **places}, capture_output=True, text=True, timeout=_WAIT_S
            )
            problem = "" if done.returncode == 0 else (done.stderr or done.stdout)
            if not problem and not mps.answers():
                problem = "it does not answer"
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if problem:
            log = _last_line(folder / "log" / "control.log")
            mps.stop()
            raise OctoPipeError(
                f"NVIDIA MPS does not start: {' '.join(problem.split())[:200]}{log}; is another daemon running, "
                "or the GPU in a mode that forbids it?"
            )
        return mps

    def _ask(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [CONTROL],
            input=command + "\n",
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
        )

    def answers(self) -> bool:
        """Whether the daemon responds to commands."""
        end = time.monotonic() + _WAIT_S
        while time.monotonic() < end:
            try:
                if self._ask("get_default_active_thread_percentage").returncode == 0:
                    return True
            except (OSError, subprocess.TimeoutExpired):
                return False
            time.sleep(0.1)
        return False

    def stop(self) -> None:
        """Stop our daemon and its servers and remove its folders; a daemon that we did not start is left running."""
        if self.folder is None:
            return
        with suppress(OSError, subprocess.TimeoutExpired):
            self._ask("quit")
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Mps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def equal_share(num_ranks: int) -> float:
    """Return the percentage of the multiprocessors that each of so many ranks gets: a half, a quarter, an eighth and so
    on, the largest that all of them can have. With other shares, products can be wrong (`ranks/gpu_share.py`).

    >>> [equal_share(n) for n in (1, 2, 3, 4, 6, 8)]
    [100.0, 50.0, 25.0, 25.0, 12.5, 12.5]
    """
    return 100.0 / (1 << (num_ranks - 1).bit_length())


def connections(num_ranks: int) -> int:
    """Return the number of hardware queues of one rank.

    Streams that wait for a peer must not share a queue with the streams that they wait for. With MPS's default they do,
    and a pipeline of four ranks hangs. Too many queues are rejected: on an H200 four ranks can have 16 each, but not
    32.

    >>> [connections(n) for n in (1, 2, 4, 8)]
    [32, 32, 16, 8]
    """
    return min(32, max(8, 64 // num_ranks))


def _share_asked(text: str | None) -> float | None:
    """Return the share that the user has set in the environment, if any.

    >>> _share_asked("12.5"), _share_asked(None)
    (12.5, None)
    """
    if text is None or not text.strip():
        return None
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 100.0:
        raise OctoPipeError(f"{SHARE} is {text!r}; give a percentage above 0 and up to 100, or unset it")
    return share


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f" ({lines[-1][:160]})" if lines else ""
