"""The numbers of Algorithm 1 that the paper leaves open, in one record.

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
    """Iterations away from the best plan that mend nothing, after which the search goes back to it."""
    better: float = 1e-9
    """Step times closer than this share are equal."""
    most_stages: int = 8
    """Stages a rank may hold on average."""
    migrations: int = 8
    """Migrations judged in an iteration of the partition phase, the most even first."""
    reach: int = 6
    """Stage boundaries that slide together."""
    paired: int = 12
    """Single migrations that are tried together with every other."""
    spread: float = 0.05
    """Weight of the spread of all ranks' loads beside the largest one."""
    dispersions: int = 4
    """Stages dispersed in an iteration of the placement phase, each in a few ways."""
    refinements: int = 1
    """Ways to disperse every stage at once that are judged in an iteration."""
    exchanges: int = 2
    """Pairs of layers exchanged in an iteration."""
    comparable: float = 0.25
    """Ranks whose work differs by no more than this share of the mean are comparable."""
    placement_slack: float = 1.15
    """No placement may slow the best plan by more than this, whatever balancing promises."""
    advances: int = 4
    """Advances of F and I judged in an iteration of the schedule phase."""
    insertions: int = 3
    """Ops inserted into bubbles, judged in an iteration."""
    delays: int = 2
    """W moved to later bubbles, judged in an iteration."""
    rules: int = 1
    """Whole orders derived anew (F and I as early as may be, W into gaps), judged in an iteration."""
    recomputations: int = 6
    """Changes of what is recomputed, judged in an iteration under a memory limit."""
    bubbles: int = 4
    """Longest bubbles that are looked into."""
    depth: int = 40
    """Most delays followed back from one op."""
    advanced_weights: int = 6
    """W's tried before the earliest is advanced anyway, where memory lacks."""
    repairs: int = 4
    """Times the room left for transfers' buffers is widened before a plan counts as too large."""
    systems_share: float = 0.4
    """Share of the budget for building published systems' plans."""
    restarts: int = 3
    """Published plans that the search begins from again, the fastest first."""
    report_every_s: float = 0.1
    """Least time between two reports of progress."""


SETTINGS = Settings()
