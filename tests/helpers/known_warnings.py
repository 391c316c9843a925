"""Which warnings a test run may give: none of our own modules' use of something deprecated, and of others only what is
listed here by name.

Used by the tests' processes (`tests/conftest.py`) and by their ranks (`ranks.py`), which pytest does not reach. A
warning of OctoPipe itself belongs into its test, with `pytest.warns`.
"""

from __future__ import annotations

import warnings

OUTDATED = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
OWN = r"octopipe\b"
FOREIGN: tuple[tuple[str, type[Warning], str], ...] = (
    # On processors without bfloat16 torch multiplies by other means, and says so with a page of frames.
    ("mkldnn_matmul failed, switching to BLAS gemm", UserWarning, ""),
    # Layers of users call it, so tests do; every version of torch that we support has it.
    ("torch.distributed.nn.functional.all_to_all_single is deprecated", FutureWarning, ""),
    # Megatron-Core on a machine without NVIDIA's kernels.
    ("Transformer Engine and Apex are not installed", UserWarning, "megatron"),
    ("Apex is not installed", UserWarning, "megatron"),
    # What others call of their own that is deprecated, and modules made by SWIG while they are imported.
    ("", DeprecationWarning, r"(torch|megatron|transformers|datasets|tensorboard|google|ortools|playwright)\b"),
    ("builtin type ", DeprecationWarning, ""),
)
"""(beginning of its text, kind, beginning of the module it is attributed to) of warnings about somebody else's code."""


def as_lines() -> list[str]:
    """The filters as lines of pytest's configuration; the last that fits a warning decides."""
    lines = [f"error::{kind.__name__}:{OWN}" for kind in OUTDATED]
    return lines + [f"ignore:{text}:{kind.__name__}:{module}".rstrip(":") for text, kind, module in FOREIGN]


def filter_in_a_rank() -> None:
    """The same filters in a process that pytest knows nothing of; the last that is added decides."""
    for kind in OUTDATED:
        warnings.filterwarnings("error", category=kind, module=OWN)
    for text, category, module in FOREIGN:
        warnings.filterwarnings("ignore", text, category, module)
