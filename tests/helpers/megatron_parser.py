"""Command lines through Megatron-LM's own argument code, in a process of its own: reads JSON, prints how many it took.

OCTOPIPE_MEGATRON_LM names a checkout. Its parser imports GPU kernels that are not needed to read flags: modules that
import triton are replaced, a Hopper GPU and a recent Transformer Engine are stood in for.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import typing
import warnings
from pathlib import Path
from unittest.mock import MagicMock

import torch
import typing_extensions
from packaging.version import Version


def prepare(checkout: Path) -> None:
    warnings.filterwarnings("ignore")
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    sys.path.insert(0, str(checkout))
    for file in (checkout / "megatron").rglob("*.py"):
        if any(line.startswith(("import triton", "from triton")) for line in file.read_text().splitlines()):
            sys.modules[".".join(file.relative_to(checkout).with_suffix("").parts)] = MagicMock()
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.get_device_properties = lambda *_: MagicMock(major=9, minor=0)  # type: ignore[assignment]
    os.environ.update(WORLD_SIZE="8", RANK="0")
    import megatron.core.utils as utils

    utils._te_version = Version("2.12.0")
    utils.get_te_version = lambda: Version("2.12.0")
    logging.disable(logging.CRITICAL)


def main() -> int:
    prepare(Path(os.environ["OCTOPIPE_MEGATRON_LM"]))
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    lines = json.load(sys.stdin)
    for world, environment, flags, dp in lines:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        os.environ.update(environment, WORLD_SIZE=str(world))
        sys.argv = ["pretrain_gpt.py", *flags]
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                args = parse_args()
                validate_args(args)
                args.apply_rope_fusion = False  # asks for Transformer Engine itself
                core_transformer_config_from_args(args)
            assert args.data_parallel_size == dp, f"dp {args.data_parallel_size}, {dp} were priced"
        except (Exception, SystemExit) as error:
            print(f"refused: {error or type(error).__name__}\n{said.getvalue()[-500:]}\n{' '.join(flags)}")
            return 1
    print(f"{len(lines)} lines taken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
