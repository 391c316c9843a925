"""Every number the default search is tuned by: one record, one line each saying what it does.

Knows: shares, temperatures, counts and weights. Does not know: what is done with them. The kernels in core/ take theirs
from here when they are compiled, and are compiled anew when this file changes.
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
    """The parts of a vector of keys: where they are drawn from, and how far one step changes them. Slopes are in
    micro-batches per rank of the pipeline."""

    decades: float = 1.0
    """Weights of the micro-batch number: a power of ten up to so many decades either way."""
    weight_step: float = 0.2
    """A step of them, in decades."""
    slope_from: float = -2.0
    slope_width: float = 6.0
    """Slopes over the chain of stages: from so much on, over so wide a range."""
    slope_step: float = 0.15
    i_first: float = 0.5
    """How often any I goes before any F;"""
    i_from: float = -2.0
    i_width: float = 4.0
    """else the range of its head start."""
    no_look: float = 0.5
    """How often no rank waits for a better op;"""
    short_look: float = 0.8
    """else how often it looks"""
    look_short: float = 0.05
    """so far ahead, of its time per micro-batch, instead of"""
    look_long: float = 0.5
    look_off: float = 0.2
    """How often a step ends the waiting."""
    look_step: float = 0.015
    whole_reserve: float = 0.5
    """How often all memory that later stages need is kept free, else a share."""
    reserve_step: float = 0.25
    w_last: float = 0.25
    """How often W waits until nothing else can run (`w_never`), else it may pass ops up to `w_over` later."""
    w_last_again: float = 0.1
    """The same in a step."""
    w_never: float = 10.0
    w_over: float = 0.1
    no_bank: float = 0.85
    """How often no memory is saved up for a large stage."""
    free_rule: float = 0.6
    """Without a limit of memory: how often the number of micro-batches in flight has none either."""
    same_rule: float = 0.4
    """How often it is the same for all stages,"""
    same_width: int = 6
    same_from: float = -2.0
    """in a range around the number of ranks;"""
    share_rule: float = 0.75
    """up to here as many as fill a share of memory,"""
    share_from: float = 0.7
    share_width: float = 0.6
    share_step: float = 0.08
    little_decades: float = 0.5
    """else by Little's law, times up to so many decades,"""
    little_step: float = 0.15
    more_from: float = 0.5
    more_width: float = 2.5
    """plus so many."""
    more_step: float = 0.4
    least_slack: float = 0.3
    """Neither share nor factor falls below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    keys: KeyRanges = KeyRanges()
    """Of list scheduling's priorities."""

    # -- shares of the budget
    first_until: float = 0.08
    """End of the first structures, which give a plan at once."""
    draw_until: float = 0.15
    """End of drawing starts."""
    draw_at_least: float = 0.08
    """Least share for drawing starts."""
    draw_again: float = 0.05
    """Share for new starts between two populations."""
    polish: float = 0.2
    """Share for polishing orders at the end."""
    polish_cells: int = 150
    """Less of it, in proportion, where ranks times micro-batches are more: it gains nothing there."""
    systems: float = 0.1
    """Share of the budget that building published systems may take of one core."""
    systems_until: float = 0.5
    """No further one is begun after this share of the budget, however little of a core they got."""
    ending: float = 8.0
    """The lanes end so many times earlier as building and simulating one plan takes, for what comes after them."""
    ending_most: float = 0.4
    """Of the budget, the largest share kept for that."""
    pairs: float = 0.7
    """Share of the budget for plans with pairs, where ops have an exchange to hide."""
    cut_head: float = 0.8
    """Share of the budget for plans with a cut head, where they are asked for."""
    offload: float = 0.7
    """Share of the budget for plans that use host memory, where they are asked for."""
    hide_s: float = 0.3
    """Seconds at most for moving transfers behind computation in the end; a share of the budget at most as well."""
    hide: float = 0.04
    hide_ops: int = 30_000
    """Not in plans of more ops: a walk of so few moves hides nothing."""
    hide_moves: int = 400
    """The same where moves are counted."""

    # -- threads
    counted_lanes: int = 2
    """Lanes of a search that counts its moves: as many on any machine."""
    draw_rounds: int = 4
    """How often lanes tell each other what they drew."""
    exchange_rounds: int = 4
    """How often populations exchange members."""
    shown: int = 4
    """One of so many members is shown to the other lanes, the best first."""
    poll_s: float = 0.2
    handed_over_cells: int = 4096
    """Ranks times micro-batches up to which a search that is stopped still turns what its lanes found last into plans:
    beyond, that alone may take seconds."""
    """Seconds between reports."""
    gather_pause: float = 20.0
    """How much longer than building and judging a plan is the pause before it is done again."""
    switch_s: float = 3e-5
    """How soon a thread gives the interpreter to another: lanes need it for a moment between long calls without it."""
    timed: int = 5
    """Schedules timed to know how many fit into a time: other threads may hold one up."""

    # -- starts
    rounds: tuple[float, ...] = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.0, 3.5, 4.0, 4.0, 5.0, 6.0)
    """Rounds over the ranks, a few stages more or less."""
    first_rounds: tuple[float, ...] = (1, 2, 3, 1.5, 4, 2.5)
    """Of the first structures."""
    kinds: tuple[str, ...] = ("loop", "loop", "turn", "turn", "mixed", "wave", "skip")
    """Ways round the ranks; all kinds of all lengths are drawn in turn."""
    most_rounds: int = 10
    """Most stages, in rounds over the ranks."""
    least_most: int = 24
    """Most stages where ranks are few."""
    small: tuple[float, ...] = (0.0, 0.3, 0.6, 0.85)
    """How much smaller than the others first or last stages are asked to be."""
    smallest: float = 0.1
    """Least size asked of a stage, the others' being 1."""
    divided: float = 0.3
    """How often a visit to a rank falls into one stage more: memory is taken and given back in smaller pieces."""
    wide: float = 3.0
    """Only where visits have so many layers on average."""
    again: float = 0.85
    """How often a shape like one of the best is drawn in the end."""
    spread: int = 60
    """After so many draws, half as often."""
    shapes_kept: int = 3
    """Shapes of one size that are drawn from again."""
    starts_kept: int = 4
    """Starts kept of one size (half rounds over the ranks)."""
    keys_kept: int = 4
    """Keys remembered of one size, and taken from all sizes."""
    keys_near: int = 6
    """Keys tried on a drawn structure that are like remembered ones."""
    keys_drawn: int = 4
    """Keys tried on it that are new."""
    keys_first: int = 24
    """Keys tried on each of the first structures."""
    balance_moves: int = 2000
    """Moves of a partition's own annealing."""
    evenness: tuple[float, ...] = (1.0, 4.0, 4.0, 16.0)
    """Weights of uneven stages in a partition's balance."""
    tilts: tuple[float, ...] = (0.0, 0.5, 1.0)
    """How much I counts beside F there."""
    rising: float = 0.7
    """How often early stages are taken to hold more micro-batches there."""
    balance_hot: float = 0.02
    """Its temperature, as a share of the balance."""
    balance_migrate: float = 0.6
    """How often it moves one boundary, not several."""
    little: float = 1.3
    """How much longer than without any wait a micro-batch is taken to be under way."""
    memory_weight: float = 0.5
    """Weight of memory that is exceeded in the balance."""
    misfits: int = 6
    """Draws in vain after which starts recompute, where they may."""
    moves_per_draw: int = 25
    """What a drawn start counts where moves are counted."""

    # -- keys
    crossed: float = 0.5
    """How often a child has two parents."""
    fresh: float = 0.1
    """How often it has none: without new ones a population settles on one kind of order."""
    varied: float = 0.9
    """How often a child is varied."""
    most_varied: int = 4
    """Most numbers changed at once."""

    # -- population annealing of structures
    populations: tuple[int, ...] = (2, 1)
    """Populations one after another, by lane: a cool one settles early, and another from other starts is worth more
    than its second half."""
    members: int = 8
    """Most members of a population."""
    judged_each: int = 5000
    """Schedules that each should have at least."""
    temperatures: int = 20
    """Temperatures of a population, after each of which it is resampled."""
    chunk: int = 10
    """Moves between looks at the clock."""
    hot: tuple[float, ...] = (4e-3, 1.2e-2)
    """First temperature as a share of the step time, by lane: tight memory wants the hotter one."""
    cool: float = 0.1
    """How far it falls."""
    hot_cells: int = 256
    """Less in proportion where ranks times micro-batches are more: fewer moves are made."""
    few_ops: int = 192
    """Below so many ops (two stages a rank) it is hotter, by the square: one op changes the step time by more."""
    resample_scale: float = 3.0
    """Difference of scores, in temperatures, at which a member has a third of another's descendants."""
    key_population: int = 16
    """Keys that a member breeds from."""
    bred_drawn: int = 100
    """Keys drawn for a structure before its walk begins."""
    bred: int = 300
    """Keys bred for it."""
    tries: int = 2
    """Keys under which a changed structure is judged: the best so far, then children."""
    rejudged: int = 4
    """Keys judged again once it is accepted."""
    bred_again: int = 4
    """Children bred on it then."""
    laps: int = 10
    """A schedule's pace is read after so many equal parts of its ops."""
    promising: int = 7
    """The lap that a schedule must have come to for other keys to be tried."""
    near: float = 1.04
    """Keys that are so much worse than the best on a new structure are not judged to the end."""
    mean_weight: float = 0.2
    """Weight of the ranks' mean finish in a score, beside the step time: helping any rank is a step on the way."""
    earlier: float = 0.01
    """How much earlier than now the mean finish is taken to come, at most."""
    behind: float = 0.01
    """Share of the step time by which the mean finish may fall behind the best keys' while others are judged."""
    room: float = 0.8
    """Share of the way from the best possible load to the step time that the busiest rank may take up; what is beyond
    counts against a structure: where one rank is nearly full, no change of the others shortens the step."""
    compound: float = 0.3
    """How often another change follows at once."""
    other_moves: float = 0.1
    """Share of moves that change recomputation, or the order of micro-batches, where that matters."""
    focus: float = 0.5
    """How often a move starts from a stage of the rank that finished last."""
    by_two: float = 0.25
    """How often a boundary moves by two layers."""
    longest_run: int = 3
    """Most stages that shift together."""
    visit: float = 0.33
    """How often all stages that follow one another on a rank move together."""
    change_places: float = 0.33
    """How often they take their sizes along when they are exchanged."""
    nearby: float = 0.5
    """How often a stage is exchanged with one of the next few."""
    stay: float = 0.4
    """How often both halves of a stage that is split stay on its rank; merged as often."""
    stay_width: int = 3
    """Only where it has so many layers."""
    elsewhere: float = 0.4
    """How often a stage is split or merged with another place of the chain."""
    most_sent: int = 3
    """Most layers sent there."""
    repair_moves: int = 40
    """Most migrations tried to even out ranks after a move."""
    repair_run: int = 4
    """Most boundaries they move together."""
    full: float = 5e-4
    """How close to its busiest rank's work a step is where only a lower load can shorten it,"""
    relief: float = 0.005
    """which moves then aim at, by up to this share,"""
    relief_often: float = 0.3
    """this often."""
    slack: float = 0.003
    """Share of the step time that a schedule may fall behind the member's pace before it is given up."""
    full_race: float = 0.05
    """How often a schedule may run at any pace."""

    # -- polishing of orders
    polished: int = 3
    """Candidates whose orders a lane polishes in turn."""
    trials: float = 0.6
    """Share of polishing in which candidates take turns; the rest is the best one's."""
    polish_hot: float = 3e-4
    """Temperatures, as shares of the step time."""
    polish_cold: float = 3e-5
    polish_compound: float = 0.25
    """How often another change follows at once."""
    advance: int = 6
    """How far a critical op jumps ahead at most."""
    reach: int = 6
    """How far any op jumps at most, either way."""
    reach_w: int = 20
    """How far a W does."""
    on_critical: float = 0.4
    """How often such an op is one of the rank that finished last."""
    polish_chunk_s: float = 0.03
    """Seconds between looks at the clock."""
    polish_chunk: int = 200
    """Moves between looks at the count."""
    polish_chunk_least: int = 10
    polish_chunk_most: int = 20000
    """The same where the clock decides."""
    buffers: float = 1.1
    """Memory kept free for tensors between stages, as a multiple of what the best plan needs for them."""
    copies_hot: float = 2e-3
    """Temperatures for plans that hold layers several times."""
    copies_cold: float = 5e-5
    copies_trial: int = 5000
    """Moves each of them gets before the best goes on."""
    copies_ops: int = 15_000
    """Fewer moves at a time, in proportion, where a plan has more ops."""
    copies_chunk: int = 2000
    """Moves between comparisons with the other plans."""
    copies_until: float = 0.95
    """End of their share of the budget."""
    copies_after: float = 0.3
    """The share of that after which one must"""
    copies_close: float = 1.03
    """be no more than so much slower than the best plan to go on."""
    copies_room: float = 0.96
    """Share of memory that it may fill where tensors between stages take some."""

    # -- shapes of starts
    wave_from: float = 0.5
    """How often a wave begins somewhere on its way, not at its start."""
    skipping: float = 0.5
    """How often a way that may skip ranks does so in a round."""
    back_mixed: float = 0.5
    """How often a round goes backward, on a mixed way"""
    back_skip: float = 0.3
    """and on one that skips."""
    rounds_spread: int = 16
    """Stages of a number of rounds that is not whole vary by one in so many ranks."""
    near_divide: float = 0.6
    """A shape like another one: how often one more of its stages is divided instead of one less,"""
    near_visits: float = 0.5
    """how often it has more or fewer visits,"""
    near_visits_most: int = 2
    near_way: float = 0.3
    """how often it takes another way,"""
    near_size: float = 0.5
    """how often its first or last stage has another size,"""
    near_size_step: float = 0.15
    small_most: float = 0.9
    """which is at most this much smaller than the others'."""
    first_even: float = 4.0
    """Weight of equal stages in the first structures, and"""
    first_tilt: float = 1.0
    """of I beside F in what is equal."""

    # -- results
    close: float = 0.01
    """How much slower than the best a finalist may be."""
    at_bound: float = 2e-5
    """A plan this close to a proven bound of all plans searched ends the search."""
    reserve_tries: int = 4
    """How often more memory is reserved for a structure that does not fit after all."""
    reserve: float = 1.01
    """How much more than it lacked."""
    jitter: float = 0.05
    """Width of the log-normal that a robust search scales ops and transfers by."""
    jitter_draws: int = 12
    """Draws of which the mean is taken while orders are polished; more until they jitter"""
    jitter_ops: int = 24000
    """so many ops: with few ops and few draws orders would suit the draws."""
    jitter_runs: int = 400
    """Draws that finalists are compared by."""


SETTINGS = Settings()
