"""The numbers by which the default search finds plans: one record, a sentence each.

Knows: shares, temperatures, counts and chances. Does not know: what is done with them, nor how the search uses its
machine (`mechanics.py`). The kernels in core/ take these numbers as constants when they are compiled, and are compiled
anew when this file changes. docs/settings.md says what each setting is worth, as measured by
benchmarks/bench_settings.py. What happens half of the time is not a setting: it is a 0.5 where it happens.
"""

from __future__ import annotations

from dataclasses import dataclass

STRUCTURE_MOVES = (
    ("migrate layers", "partition"),
    ("shift stages", "partition"),
    ("move stage", "placement"),
    ("exchange stages", "placement"),
    ("split stage", "placement"),
    ("merge stages", "placement"),
    ("rotate stages", "placement"),
    ("exchange ranks", "placement"),
    ("recompute", "recompute"),
    ("micro-batch order", "schedule"),
)
"""The moves of a structure by name and phase. `migrating` says how often the first is made; the next five are as likely
as each other, and the others are rare (`other_moves`)."""
ORDER_MOVES = (
    ("migrate layers", "partition"),
    ("shift stages", "partition"),
    ("move stage", "placement"),
    ("exchange stages", "placement"),
    ("swap ops", "schedule"),
    ("advance op", "schedule"),
    ("move op", "schedule"),
)
"""The moves of orders by name and phase. `reordering` says how often one of the last three is made, else it is one of
the first two; the others are rare (`other_moves`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRanges:
    """The ranges from which the numbers of a key vector are drawn, and how far a mutation changes them. Slopes are in
    micro-batches per rank of the pipeline."""

    decades: float = 1.0
    """The priority of an op grows with its micro-batch number. The weight of that number is drawn from this many
    decades below and above one."""
    slope_from: float = -2.0
    """The slope of priorities along the chain of stages, and the head start of I over F, are drawn from a range that
    begins here."""
    slope_width: float = 6.0
    """Slopes are drawn from a range of this width."""
    i_width: float = 4.0
    """The head start of I over F is drawn from a range of this width, unless every I goes before any F."""
    step: float = 0.15
    """A mutation changes a number by about this much in its own unit: decades of a weight, a slope, the share of memory
    kept free for later stages, the factor of Little's law, the range of the number added to it, a multiple of `w_over`
    for the look ahead, and the share by which first and last stages are smaller."""
    share_step: float = 0.08
    """A mutation changes the share of memory to fill by about this much."""
    look: float = 0.5
    """A rank may wait for a better op by at most this share of its time per micro-batch. Most waits are much shorter,
    since they are drawn as this share times the fourth power of a uniform number."""
    rarely: float = 0.15
    """This is the probability that W waits until nothing else can run, that a mutation ends the waiting for better ops,
    and that memory is saved up for a large stage."""
    w_over: float = 0.1
    """A W may delay an op whose arrival is known by at most this share of a rank's time per micro-batch."""
    flight_width: int = 6
    """A limit of micro-batches in flight that is the same for all stages is drawn from this many numbers, a third of
    which are below the number of ranks. A limit that follows Little's law is raised by up to half as many."""
    share_width: float = 0.6
    """The share of memory that micro-batches in flight may fill is drawn from a range of this width around one. Neither
    this share nor the factor of Little's law falls below one minus this width."""
    little_decades: float = 0.5
    """A limit that follows Little's law is multiplied by up to this many decades."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The numbers of the default search."""

    keys: KeyRanges = KeyRanges()
    """These are the ranges of the priorities of list scheduling."""

    sometimes: float = 0.3
    """This is the probability of what is neither the rule nor rare. In starts: a visit to a rank consists of one more
    stage, so that memory is taken and given back in smaller pieces; a round that skips ranks goes backward; a similar
    shape takes another way; early stages are not assumed to hold more micro-batches. In moves: another change follows
    at once; a boundary moves by two layers; a stage is split or merged in place, or exchanges layers with another place
    of the chain."""

    # -- shares of the budget
    draw: float = 0.08
    """The first structures, which give a plan at once, are evaluated until this share of the budget is used, and starts
    are drawn until twice this share is used. Drawing new starts between two populations takes this share again."""
    polish: float = 0.2
    """Polishing of orders takes this share of the budget at the end."""
    cells: int = 256
    """If ranks times micro-batches exceed this number, fewer moves are made in the same time. Then the first
    temperature is lower in proportion, and the share of polishing, which gains little there, is lower with the
    square."""
    special: float = 0.7
    """Plans with pairs of ops, with a cut head or with host memory take this share of the budget if they are
    searched."""
    meetings: int = 4
    """Lanes tell each other what they drew, and exchange members of their populations, this many times."""
    shown: int = 4
    """One out of this many members of a population is shown to the other lanes, the best ones first."""

    # -- starts
    rounds: tuple[float, ...] = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.0, 3.5, 4.0, 4.0, 5.0, 6.0)
    """Starts visit the ranks in one of these numbers of rounds, give or take a few stages."""
    first_rounds: tuple[float, ...] = (1, 2, 3, 1.5, 4, 2.5)
    """The first structures, which give a plan at once, visit the ranks in these numbers of rounds."""
    kinds: tuple[str, ...] = ("loop", "loop", "turn", "turn", "mixed", "wave", "skip")
    """Starts go round the ranks in one of these ways. All ways in all numbers of rounds are drawn in turn."""
    small: tuple[float, ...] = (0.0, 0.3, 0.6, 0.85)
    """First and last stages are asked to be smaller than the others by one of these shares."""
    again: float = 0.85
    """In the end, a start resembles one of the best shapes so far with this probability."""
    spread: int = 60
    """After this many draws, that probability has reached half of its final value."""
    kept: int = 4
    """For every size (counted in half rounds over the ranks), this many starts, shapes and keys are kept; as many keys
    are taken from all sizes, and as many new keys are tried on a drawn structure. In the end, every lane polishes the
    orders of this many candidates."""
    keys_near: int = 6
    """This many variants of remembered keys are tried on a drawn structure."""
    balance_moves: int = 2000
    """A partition is balanced by annealing with this many moves."""
    balance_hot: float = 0.02
    """The balance is annealed from this temperature on, as a share of the balance."""
    even: tuple[float, ...] = (1.0, 4.0, 4.0, 16.0)
    """Stages of uneven size count in the balance with one of these weights."""
    little: float = 1.3
    """To estimate the memory of a partition, a micro-batch is assumed to be under way this many times as long as it
    would be if it never waited."""

    # -- keys
    fresh: float = 0.1
    """A child has no parents with this probability: without new keys, a population settles on one kind of order. With
    the same probability, a child is not mutated after its parents' keys were combined."""
    most_varied: int = 4
    """A mutation changes at most this many numbers at once."""

    # -- population annealing of structures
    populations: tuple[int, ...] = (2, 1)
    """Lanes run this many populations one after another. A cool population settles early, and another one from other
    starts is worth more than the second half of the first."""
    members: int = 8
    """A population has at most this many members."""
    temperatures: int = 20
    """A population passes through this many temperatures, and is resampled after each of them."""
    hot: tuple[float, ...] = (4e-3, 1.2e-2)
    """Lanes begin at these temperatures, as shares of the step time. Tight memory needs the higher one."""
    cool: float = 0.1
    """Every temperature falls to this share of its first value."""
    few_ops: int = 192
    """If there are fewer ops than this (with two stages per rank), the first temperature is higher by the square of the
    ratio, because a single op then changes the step time by more."""
    resample_scale: float = 3.0
    """A member has a third of the descendants of another one if its score is worse by this many temperatures."""
    key_population: int = 16
    """A member breeds from this many keys, and this many are tried on each of the first structures."""
    bred: int = 400
    """This many keys are tried on a structure before its walk begins. A quarter of them are drawn, and the others are
    bred."""
    tries: int = 2
    """A changed structure is evaluated under this many keys: the best so far, then children."""
    rejudged: int = 4
    """Once a change is accepted, this many keys are evaluated again, and as many children are bred."""
    near: float = 1.04
    """Keys that are this many times slower than the best on a new structure are not evaluated to the end."""
    mean_weight: float = 0.2
    """The mean finish time of the ranks has this weight in a score, beside the step time: it is progress if any rank
    finishes earlier."""
    behind: float = 0.01
    """While keys are evaluated, the mean finish time may fall behind the best by this share of the step time. A move is
    assumed to improve the mean finish time by at most as much."""
    slack: float = 0.003
    """The schedule of a changed structure is abandoned once it falls behind the member's pace by this share of the step
    time. Most moves therefore cost a fraction of a schedule."""
    any_pace: float = 0.05
    """With this probability, such a schedule may run at any pace, so that a walk does not get stuck behind a fast
    beginning."""
    room: float = 0.8
    """The busiest rank may fill this share of the interval between the best possible load and the step time. Load
    beyond that counts against a structure: if one rank is nearly full, changes of the others do not shorten the
    step."""
    migrating: float = 0.34
    """This share of moves shifts one boundary between stages."""
    other_moves: float = 0.1
    """This share of moves rotates stages or exchanges ranks (in polishing: moves or exchanges stages). The same share
    changes recomputation, and the order of micro-batches, where that matters."""
    longest_run: int = 3
    """At most this many boundaries shift together, and at most this many layers are sent elsewhere. A stage needs this
    many layers to be split in place."""
    relief: float = 0.005
    """If the step is longer than the work of its busiest rank by less than a tenth of this share, only a lower load can
    shorten it. Some moves then aim at a load that is lower by up to this share."""
    repair_moves: int = 40
    """After a move, the loads of ranks are evened out by at most this many migrations of layers."""

    # -- polishing of orders
    polish_hot: float = 3e-4
    """Polishing begins at this temperature, as a share of the step time."""
    reordering: float = 0.7
    """This share of the moves of polishing changes the order of ops. The others shift boundaries between stages."""
    reach: int = 6
    """An op jumps over at most this many others, a W over three times as many, and a critical op at most this far
    ahead."""
    copies_hot: float = 2e-3
    """Plans that hold layers several times are polished from this temperature on, as a share of the step time, down to
    the temperature at which all polishing ends."""
    jitter: float = 0.05
    """A robust search scales the times of ops and transfers by a log-normal distribution with this sigma."""


SETTINGS = Settings()
