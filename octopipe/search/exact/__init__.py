"""The exact method: CP-SAT finds and proves the best plan of a small case.

Knows: the problem as constraints (model.py), how a solve is run and read (solver.py). Does not know: the default
search.
"""

from octopipe.search.exact.solver import Solved, solve

__all__ = ["Solved", "solve"]
