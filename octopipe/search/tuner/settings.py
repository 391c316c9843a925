"""The numbers by which the default search finds plans: one record, a sentence each.

Knows: shares, temperatures, counts and weights. Does not know: what is done with them, nor how the search uses its
machine (`mechanics.py`). The kernels in core/ take theirs from here when they are compiled, and are compiled anew when
this file changes. `benchmarks/bench_settings.py` says what a setting is worth. What happens half of the time is no
setting: it is a 0.5 where it happens.
"""

from __future__ import annotations

from dataclasses import dataclass

STRUCTURE_MOVES = (
    # name, phase, weight
    ("migrate layers", "partition", 0.34),
    ("shift stages", "partition", 0.10),
    ("move stage", "placement", 0.14),
    ("exchange stages", "placement", 0.16),
    ("rotate stages", "placement", 0.04),
    ("exchange ranks", "placement", 0.02),
    ("split stage", "placement", 0.10),
    ("merge stages", "placement", 0.10),
    ("recompute", "recompute", 0.0),
    ("micro-batch order", "schedule", 0.0),
)
"""Moves of a structure. The last two are drawn apart (`other_moves`), where they apply."""
ORDER_MOVES = (
    ("migrate layers", "partition", 0.20),
    ("shift stages", "partition", 0.10),
    ("move stage", "placement", 0.03),
    ("exchange stages", "placement", 0.03),
    ("swap ops", "schedule", 0.26),
    ("advance op", "schedule", 0.23),
    ("move op", "schedule", 0.15),
)
"""Moves of orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRanges:
    """Where the numbers of a key vector are drawn from, and how far one step changes them. Slopes are in micro-batches
    per rank of the pipeline."""

    decades: float = 1.0
    """The weights of the micro-batch number are powers of ten, up to this many decades either way."""
    weight_step: float = 0.2
    """A step changes a weight by about this many decades."""
    slope_from: float = -2.0
    """Slopes over the chain of stages, and the head start of I, are drawn from here on."""
    slope_width: float = 6.0
    """Slopes are drawn from a range this wide."""
    slope_step: float = 0.15
    """A step changes a slope, or the head start of I, by about this much."""
    i_width: float = 4.0
    """The head start of I over F is drawn from a range this wide, where not every I goes before any F."""
    short_look: float = 0.8
    """This often a rank that waits for a better op looks only a short time ahead."""
    look_short: float = 0.05
    """A short look ahead is at most this share of a rank's time per micro-batch."""
    look_long: float = 0.5
    """A long look ahead is at most this share of it."""
    look_off: float = 0.2
    """This often a step ends the waiting for better ops."""
    look_step: float = 0.015
    """A step changes the look ahead by about this share of a rank's time per micro-batch."""
    reserve_step: float = 0.25
    """A step changes the share of later stages' memory that is kept free by about this much."""
    w_last: float = 0.25
    """This often W waits until nothing else can run, when keys are drawn."""
    w_last_again: float = 0.1
    """This often W waits until nothing else can run, after a step."""
    w_over: float = 0.1
    """Else W may run into a known arrival by at most this share of a rank's time per micro-batch."""
    no_bank: float = 0.85
    """This often no memory is saved up for a large stage."""
    free_rule: float = 0.6
    """Without a memory limit, this often the number of micro-batches in flight has no limit either."""
    same_rule: float = 0.4
    """With a memory limit, this often the number in flight is the same for all stages."""
    same_width: int = 6
    """That number is drawn from this many numbers around the number of ranks."""
    same_from: float = -2.0
    """The first of these numbers is this far from the number of ranks."""
    share_rule: float = 0.75
    """Below this draw, and above `same_rule`, as many are in flight as fill a share of the memory."""
    share_from: float = 0.7
    """The share of memory to fill is drawn from here on."""
    share_width: float = 0.6
    """The share of memory to fill is drawn from a range this wide."""
    share_step: float = 0.08
    """A step changes the share of memory to fill by about this much."""
    little_decades: float = 0.5
    """Else the number in flight follows Little's law, times up to this many decades."""
    little_step: float = 0.15
    """A step changes the factor of Little's law by about this much."""
    more_from: float = 0.5
    """To the number after Little's law at least this many are added."""
    more_width: float = 2.5
    """The number added is drawn from a range this wide."""
    more_step: float = 0.4
    """A step changes the number added by about this much."""
    least_slack: float = 0.3
    """Neither the share of memory nor the factor of Little's law falls below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    keys: KeyRanges = KeyRanges()
    """The ranges of list scheduling's priorities."""

    # -- shares of the budget
    draw_least: float = 0.08
    """The first structures, which give a plan at once, end at this share of the budget; drawing starts takes at least
    as much."""
    draw_until: float = 0.15
    """Drawing starts ends at this share of the budget."""
    draw_again: float = 0.05
    """New starts between two populations take this share of the budget."""
    polish: float = 0.2
    """Polishing orders takes this share of the budget at the end."""
    polish_cells: int = 150
    """Polishing takes less, in proportion, where ranks times micro-batches are more than this: it gains nothing
    there."""
    pairs: float = 0.7
    """Plans with pairs take this share of the budget where ops have an exchange to hide."""
    cut_head: float = 0.8
    """Plans with a cut head take this share of the budget where they are asked for."""
    offload: float = 0.7
    """Plans that use host memory take this share of the budget where they are asked for."""
    meetings: int = 4
    """Lanes tell each other what they drew, and exchange members of their populations, this often."""
    shown: int = 4
    """One of this many members is shown to the other lanes, the best first."""

    # -- starts
    rounds: tuple[float, ...] = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.0, 3.5, 4.0, 4.0, 5.0, 6.0)
    """Starts visit the ranks in this many rounds, a few stages more or less."""
    first_rounds: tuple[float, ...] = (1, 2, 3, 1.5, 4, 2.5)
    """The first structures visit the ranks in this many rounds."""
    kinds: tuple[str, ...] = ("loop", "loop", "turn", "turn", "mixed", "wave", "skip")
    """Starts go round the ranks in one of these ways; all ways in all numbers of rounds are drawn in turn."""
    small: tuple[float, ...] = (0.0, 0.3, 0.6, 0.85)
    """First and last stages are asked to be smaller than the others by one of these shares."""
    small_most: float = 0.9
    """A shape like another one asks for at most this much smaller stages."""
    divided: float = 0.3
    """This often a visit to a rank falls into one stage more, so that memory is taken and given back in smaller
    pieces."""
    again: float = 0.85
    """In the end, this often a shape like one of the best is drawn."""
    spread: int = 60
    """After this many draws, a shape like one of the best is drawn half as often as in the end."""
    shapes_kept: int = 3
    """This many shapes of one size are drawn from again."""
    kept: int = 4
    """This many starts are kept of one size (half rounds over the ranks), this many keys are remembered of one size and
    taken from all sizes, and this many new keys are tried on a drawn structure."""
    keys_near: int = 6
    """This many keys that are like remembered ones are tried on a drawn structure."""
    keys_first: int = 24
    """This many keys are tried on each of the first structures."""
    balance_moves: int = 2000
    """The annealing of a partition's balance makes this many moves."""
    evenness: tuple[float, ...] = (1.0, 4.0, 4.0, 16.0)
    """Uneven stages have one of these weights in a partition's balance."""
    tilts: tuple[float, ...] = (0.0, 0.5, 1.0)
    """I counts by one of these weights beside F there."""
    rising: float = 0.7
    """This often early stages are taken to hold more micro-batches there."""
    balance_hot: float = 0.02
    """The balance is annealed at this temperature, as a share of the balance."""
    balance_migrate: float = 0.6
    """This often it moves one boundary, not several."""
    little: float = 1.3
    """A micro-batch is taken to be under way this much longer than without any wait."""
    memory_weight: float = 0.5
    """Memory that is exceeded has this weight in the balance."""
    back_skip: float = 0.3
    """A round that skips ranks goes backward this often."""
    near_divide: float = 0.6
    """In a shape like another one, this often one more stage is divided, else one less."""
    near_way: float = 0.3
    """A shape like another one takes another way this often."""
    near_size_step: float = 0.15
    """Its first or last stage becomes smaller or larger by about this share."""

    # -- keys
    fresh: float = 0.1
    """A child has no parents this often: without new ones a population settles on one kind of order."""
    varied: float = 0.9
    """A child is varied this often."""
    most_varied: int = 4
    """At most this many numbers are changed at once."""

    # -- population annealing of structures
    populations: tuple[int, ...] = (2, 1)
    """Lanes run this many populations one after another: a cool one settles early, and another from other starts is
    worth more than its second half."""
    members: int = 8
    """A population has at most this many members."""
    temperatures: int = 20
    """A population passes this many temperatures, and is resampled after each."""
    hot: tuple[float, ...] = (4e-3, 1.2e-2)
    """Lanes begin at these temperatures, as shares of the step time: tight memory wants the hotter one."""
    cool: float = 0.1
    """The temperature falls to this share of the first one."""
    hot_cells: int = 256
    """It is lower, in proportion, where ranks times micro-batches are more than this: fewer moves are made."""
    few_ops: int = 192
    """It is higher, by the square, where there are fewer ops than this (two stages a rank): one op then changes the
    step time by more."""
    resample_scale: float = 3.0
    """A member has a third of another's descendants where its score is worse by this many temperatures."""
    key_population: int = 16
    """A member breeds from this many keys."""
    bred_drawn: int = 100
    """This many keys are drawn for a structure before its walk begins."""
    bred: int = 300
    """This many keys are bred for it."""
    tries: int = 2
    """A changed structure is judged under this many keys: the best so far, then children."""
    rejudged: int = 4
    """Once it is accepted, this many keys are judged again, and as many children are bred."""
    near: float = 1.04
    """Keys that are this much worse than the best on a new structure are not judged to the end."""
    mean_weight: float = 0.2
    """The ranks' mean finish has this weight in a score, beside the step time: helping any rank is progress."""
    behind: float = 0.01
    """While keys are judged, the mean finish may fall behind the best ones' by this share of the step time; a move's
    mean finish is taken to come earlier than now by at most as much."""
    room: float = 0.8
    """The busiest rank may take up this share of the way from the best possible load to the step time. What is beyond
    counts against a structure: where one rank is nearly full, no change of the others shortens the step."""
    compound: float = 0.3
    """Another change follows at once this often."""
    other_moves: float = 0.1
    """This share of moves changes recomputation, or the order of micro-batches, where that matters."""
    by_two: float = 0.25
    """A boundary moves by two layers this often."""
    longest_run: int = 3
    """At most this many stages shift together, and at most this many layers are sent elsewhere."""
    visit: float = 0.33
    """All stages that follow one another on a rank move together this often."""
    change_places: float = 0.33
    """Stages that are exchanged take their sizes along this often."""
    stay: float = 0.4
    """Both halves of a stage that is split stay on its rank this often; stages are split and merged with another place
    of the chain as often."""
    stay_width: int = 3
    """Halves stay only where the stage has this many layers."""
    repair_moves: int = 40
    """After a move, ranks are evened out by at most this many migrations."""
    repair_run: int = 4
    """Each of them moves at most this many boundaries together."""
    full: float = 5e-4
    """A step this close to its busiest rank's work can be shortened by a lower load alone."""
    relief: float = 0.005
    """Moves of such a step may aim at a load that is lower by up to this share."""
    relief_often: float = 0.3
    """They do so this often."""
    slack: float = 0.003
    """A schedule that falls behind the member's pace by this share of the step time is given up."""
    full_race: float = 0.05
    """A schedule may run at any pace this often."""

    # -- polishing of orders
    polished: int = 3
    """A lane polishes the orders of this many candidates in turn."""
    trials: float = 0.6
    """Candidates take turns in this share of polishing; the rest is the best one's."""
    polish_hot: float = 3e-4
    """Polishing begins at this temperature, as a share of the step time."""
    polish_cold: float = 3e-5
    """Polishing ends at this temperature."""
    polish_compound: float = 0.25
    """Another change of orders follows at once this often."""
    reach: int = 6
    """An op jumps at most this far, and a critical op at most this far ahead."""
    reach_w: int = 20
    """A W jumps at most this far."""
    on_critical: float = 0.4
    """An op that jumps is one of the rank that finished last this often."""
    copies_hot: float = 2e-3
    """Plans that hold layers several times are polished from this temperature on, as a share of the step time."""
    copies_cold: float = 5e-5
    """Their polishing ends at this temperature."""
    jitter: float = 0.05
    """A robust search scales ops and transfers by a log-normal of this width."""


SETTINGS = Settings()
