"""The paper's own tuner: Algorithm 1, its three phases, and random search over the same moves.

Knows: plans, prices and the simulator. Does not know: the default search; it imports nothing of it.
"""

from octopipe.search.algorithm1.search import PHASES, IterativeSearch, RandomSearch, bubble_phase

__all__ = ["PHASES", "IterativeSearch", "RandomSearch", "bubble_phase"]
