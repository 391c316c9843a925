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
    return within_step(step_seed(seed, step, replica), micro_batch)


def step_seed(seed: int, step: int, replica: int) -> int:
    """What the micro-batches of one training step have in common."""
    return _mixed(_mixed(seed & _MASK, step), replica)


def within_step(common: int, micro_batch: int) -> int:
    """`micro_batch_seed` from its step's `step_seed`."""
    return _mixed(common, micro_batch) >> 1


def _mixed(z: int, part: int) -> int:
    z = (z * 0x9E3779B97F4A7C15 + part + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return z ^ (z >> 31)
