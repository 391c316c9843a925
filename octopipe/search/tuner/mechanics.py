"""How the search uses its machine and its budget: threads, clocks, portions of work, bytes kept free.

Knows: numbers that follow from their purpose (how long a person waits, how much it costs to simulate a plan of a given
size). Does not know: the numbers that affect how good plans are found; those are in `settings.py`, each with its
measured effect.
"""

from __future__ import annotations

# -- the budget
SYSTEMS_SHARE = 0.1
"""Building published systems may take this share of the budget, of one core."""
SYSTEMS_UNTIL = 0.5
"""No further published system is begun after this share of the budget, however little of a core they got."""
ENDING = 8.0
"""Lanes end earlier by this many times what it takes to build and simulate one plan, which is done after them."""
ENDING_MOST = 0.4
"""At most this share of the budget is kept for that."""
HIDE_S, HIDE_SHARE = 0.3, 0.04
"""In the end, transfers are moved behind computation for at most this many seconds, and this share of the budget."""
HIDE_OPS = 30_000
"""That is not tried in plans of more ops: the few moves that the time allows hide nothing there."""
HIDE_MOVES = 400
"""It takes this many moves where moves are counted."""
AT_BOUND = 2e-5
"""A plan this close to a proven bound of all plans that are searched ends the search."""

# -- threads and clocks
COUNTED_LANES = 2
"""A search that counts its moves has this many lanes on any machine."""
POLL_S = 0.2
"""Progress is reported this often, in seconds."""
HANDED_OVER_CELLS = 4096
"""A search that is stopped still turns what its lanes found last into plans, up to this number of ranks times
micro-batches: beyond, that alone may take seconds."""
GATHER_PAUSE = 20.0
"""After the lanes' best were built and judged, this many times as long passes before that is done again."""
SWITCH_S = 3e-5
"""A thread gives the interpreter to another after this time: lanes need it for a moment between long kernels."""
TIMED = 5
"""This many schedules are timed to know how many fit into a time: other threads may hold one up."""

# -- portions
JUDGED_EACH = 5000
"""A member of a population should get at least this many schedules; with fewer, the population is smaller."""
CHUNK = 10
"""Structures are changed this many times between two looks at the clock."""
MOVES_PER_DRAW = 25
"""A start that is drawn counts as this many moves where moves are counted."""
POLISH_CHUNK_S = 0.03
"""Polishing looks at the clock this often, in seconds,"""
POLISH_CHUNK = 200
"""or after this many moves where moves are counted;"""
POLISH_CHUNK_LEAST, POLISH_CHUNK_MOST = 10, 20_000
"""never after fewer or more moves than these."""
MISFITS = 6
"""After this many draws in vain, starts recompute their activations where they may."""
MOST_ROUNDS, LEAST_MOST = 10, 24
"""A structure has at most this many stages per rank; where ranks are few, at most this many in all."""

# -- memory
RESERVE_TRIES, RESERVE = 4, 1.01
"""Where a plan does not fit after all, more memory is reserved this often, each time this much more than it lacked."""
BUFFERS = 1.1
"""Polishing keeps this multiple of what tensors between stages take in the best plan."""

# -- plans that hold layers several times
COPIES_TRIAL, COPIES_CHUNK = 5000, 2000
"""Every plan with copies is polished for so many moves first, then the best of them for so many at a time,"""
COPIES_OPS = 15_000
"""in proportion less where plans have more ops than this."""
COPIES_UNTIL = 0.95
"""Their polishing ends at this share of the budget,"""
COPIES_AFTER, COPIES_CLOSE = 0.3, 1.03
"""and after this share of that time already where the plan is this much slower than the best one."""
COPIES_ROOM = 0.96
"""They may fill this share of the memory where tensors between stages take some."""

# -- jitter
JITTER_DRAWS, JITTER_OPS = 12, 24_000
"""Polishing under jitter takes the mean of at least so many draws, and of more until they jitter so many ops: with few
draws of few ops, orders would suit the draws."""
JITTER_RUNS = 400
"""Finalists are compared over this many draws."""
CLOSE = 0.01
"""A finalist is at most this much slower than the best plan without jitter."""
