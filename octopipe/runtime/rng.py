"""Seeds that depend on what is computed, not on where or when.

Knows: how a run's seed, a training step, a data-parallel replica and a micro-batch make one number; `stage.py`
mixes in the layer. So dropout masks are those of a single-device run under every plan, and resume needs no
generator state, only the step's number.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def micro_batch_seed(seed: int, step: int, replica: int, micro_batch: int) -> int:
    """A 63-bit seed for one micro-batch of one training step.

    >>> micro_batch_seed(0, 0, 0, 0) != micro_batch_seed(0, 0, 0, 1) != micro_batch_seed(0, 1, 0, 0)
    True
    """
    z = seed & _MASK
    for part in (step, replica, micro_batch):
        z = (z * 0x9E3779B97F4A7C15 + part + 0x632BE59BD9B4E019) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z ^= z >> 31
    return z >> 1
