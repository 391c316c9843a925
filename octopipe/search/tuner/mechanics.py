"""How the search uses its machine and its budget: threads, clocks, portions of work, bytes kept free.

Knows: numbers that follow from what they stand for (how long a person waits, how much a plan of that size costs to
simulate). Does not know: the numbers by which a search finds better plans; those are in `settings.py`, where each says
what it is worth.
"""

from __future__ import annotations

# -- the budget
SYSTEMS_SHARE = 0.1
"""Building published systems may take this share of the budget, of one core."""
SYSTEMS_UNTIL = 0.5
"""No further published system is begun after this share of the budget, however little of a core they got."""
ENDING = 8.0
"""Lanes end early by this many times the time of the slowest simulation of a plan, since more plans follow them."""
ENDING_MOST = 0.4
"""At most this share of the budget is kept for these plans."""
HIDE_S, HIDE_SHARE = 0.3, 0.04
"""In the end, transfers are moved behind computation for at most this many seconds, and this share of the budget."""
HIDE_OPS = 30_000
"""Transfers are not moved in plans of more ops: the few moves that the time allows would hide nothing there."""
HIDE_MOVES = 400
"""If moves are counted instead of time, this many moves are tried to hide transfers."""
AT_BOUND = 2e-5
"""A plan this close to a proven bound of all plans that are searched ends the search."""

# -- threads and clocks
COUNTED_LANES = 2
"""A search that counts its moves has this many lanes on any machine."""
POLL_S = 0.2
"""Progress is reported this often, in seconds."""
HANDED_OVER_CELLS = 4096
"""A search that is stopped still turns the last results of its lanes into plans if ranks times micro-batches do not
exceed this number. Beyond it, that alone may take seconds."""
GATHER_PAUSE = 20.0
"""After the lanes' best structures were turned into plans, this many times as long passes before the next time."""
SWITCH_S = 3e-5
"""The interpreter switches threads after this time, since lanes need it only for a moment between long kernels."""
TIMED = 5
"""The fastest of this many schedules, since other threads may hold one up, says how many fit into a time."""

# -- portions
JUDGED_EACH = 5000
"""A member of a population should get at least this many schedules; with fewer, the population is smaller."""
CHUNK = 10
"""Structures are changed this many times between two looks at the clock."""
MOVES_PER_DRAW = 25
"""If moves are counted instead of time, drawing a start counts as this many."""
POLISH_CHUNK_S = 0.03
"""Polishing looks at the clock this often, in seconds."""
POLISH_CHUNK = 200
"""If moves are counted instead of time, polishing looks at the count after this many."""
POLISH_CHUNK_LEAST, POLISH_CHUNK_MOST = 10, 20_000
"""Between two looks at the clock, polishing makes at least and at most this many moves."""
FAILED_DRAWS = 6
"""If this many draws gave no structure that fits, further starts recompute all activations, if that is allowed."""
MOST_ROUNDS, LEAST_MOST = 10, 24
"""A structure has at most MOST_ROUNDS stages per rank, or LEAST_MOST stages in all if that is more."""

# -- memory
RESERVE_TRIES, RESERVE = 4, 1.01
"""If the plan of a structure does not fit, its structure is scheduled again with more memory reserved: by the excess
times RESERVE, in at most RESERVE_TRIES attempts."""
BUFFERS = 1.1
"""Polishing reserves this multiple of the memory that tensors between stages take in the best plan."""

# -- plans that hold layers several times
COPIES_TRIAL, COPIES_CHUNK = 5000, 2000
"""Every plan with copies is first polished for COPIES_TRIAL moves, then the best one in portions of COPIES_CHUNK."""
COPIES_OPS = 15_000
"""If a plan with copies has more ops than this, the numbers of moves are smaller in proportion."""
COPIES_UNTIL = 0.95
"""Their polishing ends at this share of the budget."""
COPIES_AFTER, COPIES_CLOSE = 0.3, 1.03
"""After COPIES_AFTER of that time, it ends if the plan takes more than COPIES_CLOSE times as long as the best one."""
COPIES_ROOM = 0.96
"""They may fill this share of the memory if it is limited and tensors between stages take some of it."""

# -- jitter
JITTER_DRAWS, JITTER_OPS = 12, 24_000
"""Polishing under jitter minimises the mean over at least JITTER_DRAWS draws. Small plans get about as many as jitter
JITTER_OPS ops in all, because with few draws of few ops, orders would be fitted to the draws."""
JITTER_RUNS = 400
"""The finalists of a robust search are compared by their mean over this many draws."""
CLOSE = 0.01
"""Without jitter, a finalist is slower than the best plan by at most this share."""
