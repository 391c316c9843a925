"""Random numbers that do not depend on where or when a layer runs.

Knows: how the seed of a run, a training step, a data-parallel replica, a micro-batch and a layer determine one seed,
and how torch's generators are set to it and restored. Dropout masks are therefore those of a single-device run under
every plan, and resuming needs only the step number, no generator state. Does not know: who draws random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def micro_batch_seed(seed: int, step: int, replica: int, micro_batch: int) -> int:
    """A 63-bit seed for one micro-batch of one training step.

    >>> micro_batch_seed(0, 0, 0, 0) != micro_batch_seed(0, 0, 0, 1) != micro_batch_seed(0, 1, 0, 0)
    True
    """
    return within_step(step_seed(seed, step, replica), micro_batch)


def step_seed(seed: int, step: int, replica: int) -> int:
    """The part of the seed that all micro-batches of one training step share."""
    return _mixed(_mixed(seed & _MASK, step), replica)


def within_step(common: int, micro_batch: int) -> int:
    """`micro_batch_seed` from its step's `step_seed`."""
    return _mixed(common, micro_batch) >> 1


def _mixed(z: int, part: int) -> int:
    z = (z * 0x9E3779B97F4A7C15 + part + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return z ^ (z >> 31)


def mix(seed: int, layer: int) -> int:
    """A seed per layer that neighbours do not share (splitmix64's finaliser)."""
    z = (seed * 0x9E3779B97F4A7C15 + (layer + 1) * 0xD1B54A32D192ED03) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


# --- torch's generators ----------------------------------------------------------------------------------

States = list[tuple[torch.Generator, Tensor]]


def seed_all(seed: int) -> None:
    """Set the generators of the host and of this rank's device."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def rng_state() -> States:
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [(g, g.get_state()) for g in generators]


def set_rng_state(states: States) -> None:
    for generator, state in states:
        generator.set_state(state)


@contextmanager
def rng_kept() -> Iterator[None]:
    """Restores the global generators afterwards."""
    states = rng_state()
    try:
        yield
    finally:
        set_rng_state(states)
