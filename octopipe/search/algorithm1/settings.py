"""The numbers of Algorithm 1 that the paper does not give, in one record.

Knows: how many candidates each policy may judge and when a search gives up. Does not know: what the policies do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every count, share and threshold of the paper's tuner."""

    patience: int = 240
    """Iterations without a better plan after which a start is given up."""
    returns: int = 2
    """Iterations without progress, since leaving the best plan, after which the search returns to it."""
    better: float = 1e-9
    """Step times that differ by less than this share count as equal."""
    most_stages: int = 8
    """Maximum number of stages per rank, on average."""
    migrations: int = 8
    """Migrations evaluated in an iteration of the partition phase, those that balance the ranks best first."""
    reach: int = 6
    """Maximum number of neighbouring stage boundaries that are shifted together."""
    paired: int = 12
    """Number of single migrations, the best ones, that are also tried in pairs with every other one."""
    spread: float = 0.05
    """Weight of the standard deviation of the ranks' loads, added to the largest load."""
    dispersions: int = 4
    """Dispersions of single stages evaluated in an iteration of the placement phase."""
    refinements: int = 1
    """Dispersions of all stages at once evaluated in an iteration."""
    exchanges: int = 2
    """Exchanges of two layers evaluated in an iteration."""
    comparable: float = 0.25
    """Ranks whose work differs by no more than this share of the mean are comparable."""
    placement_slack: float = 1.15
    """A placement may be slower than the best plan by at most this factor, even if balancing is expected to gain
    more."""
    advances: int = 4
    """Advances of F and I evaluated in an iteration of the schedule phase."""
    insertions: int = 3
    """Insertions of ops into bubbles evaluated in an iteration."""
    delays: int = 2
    """Moves of a W to a later bubble evaluated in an iteration."""
    rules: int = 1
    """Attempts per iteration to derive the whole order by list scheduling (F and I as early as possible, W in gaps)."""
    recomputations: int = 6
    """Changes of the recomputed layers evaluated in an iteration, under a memory limit."""
    bubbles: int = 4
    """Number of bubbles, the longest ones, from which moves are derived."""
    depth: int = 40
    """Maximum number of delays that are traced back from one op."""
    advanced_weights: int = 6
    """If memory is short: how many W are tried for one that costs no time, before the earliest is advanced anyway."""
    repairs: int = 4
    """How often a plan is adapted to leave more memory for transfer buffers before it counts as too large."""
    systems_share: float = 0.4
    """Share of the budget for building published systems' plans."""
    restarts: int = 3
    """Number of published plans, the fastest ones, from which the search restarts."""
    report_every_s: float = 0.1
    """Least time between two reports of progress."""


SETTINGS = Settings()
