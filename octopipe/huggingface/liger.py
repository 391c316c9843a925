"""Selection of fast kernels for a transformers model: attention by name, Liger's norms and gated products.

Knows: the meaning of the `--kernels` values for transformers, and how Liger is applied to one model. Does not know:
kernels of our own layers (`nn/kernels.py`). transformers itself uses mamba_ssm, causal_conv1d and
flash-linear-attention if they are installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from octopipe.base.errors import OctoPipeError

ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash_attn": "flash_attention_2"}
"""Values of `--kernels` -> transformers' names of attention implementations."""
TAKEN = ("mamba_ssm", "fla")
"""Values of `--kernels` for packages that transformers uses by itself if they are installed."""
WORDS = (*ATTENTION, "liger", *TAKEN)


def choice(words: Sequence[str]) -> tuple[str | None, bool]:
    """transformers' name of an attention implementation (None: its default), and whether Liger's kernels are used."""
    named = [word for word in words if word in ATTENTION]
    if len(named) > 1:
        raise OctoPipeError(f"--kernels {','.join(named)}: one of them runs attention; give one")
    return (ATTENTION[named[0]] if named else None), "liger" in words


def apply(model: nn.Module) -> None:
    """Use Liger's kernels in this model. Its loss does not change, because the head runs on one rank only, and neither
    do rotary positions, because Liger replaces those for every model of the process."""
    kind = getattr(model.config, "model_type", "")
    try:
        package: Any = importlib.import_module("liger_kernel.transformers")
        known = package.monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    except (ImportError, AttributeError) as error:
        raise OctoPipeError(f"liger_kernel cannot be used ({' '.join(str(error).split())[:120]}); update it") from None
    if kind not in known:
        raise OctoPipeError(
            f"liger_kernel does not support {kind or type(model).__name__}; leave liger out of --kernels"
        )
    package._apply_liger_kernel_to_instance(
        model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False
    )
