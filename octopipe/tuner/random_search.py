"""Random search: Algorithm 1's framework and moves, with the phase drawn by lot.

The paper's comparison in "Pipeline Search Cost". Knows: nothing of bubbles.
"""

from __future__ import annotations

from octopipe.tuner.algorithm1 import PHASES, IterativeSearch
from octopipe.tuner.candidate import Candidate


class RandomSearch(IterativeSearch):
    """As Algorithm 1, but whatever the bubbles say."""

    name = "random"

    def choose(self, now: Candidate) -> str:
        return self.lot.choice(PHASES)
