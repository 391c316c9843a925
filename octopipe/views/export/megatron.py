"""A plan's partition and placement as Megatron-LM's layout strings.

Knows: which plans `--pipeline-model-parallel-layout` (transformers) and `--hybrid-layer-pattern` (hybrids) can express:
stage i is on rank i mod pp, stages may be empty, the embedding is in the first stage and the loss in the last.
Placements that are not round robin are written with empty stages and, if that needs fewer of them, with ranks renamed.
What the plan recomputes, by R ops or in its costs, becomes Megatron's recompute flags. Does not know: orders; with
these flags Megatron uses its own (interleaved) 1F1B (`octopipe.megatron.forward_backward_func` runs the plan's orders).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan
from octopipe.plans.readers.megatron_text import MegatronText, read_hybrid
from octopipe.plans.setting import checkpointed_by_prices, priced_recomputation

BLOCKS = {"E": "E", "T": "t", "t": "t", "X": "t", "x": "t", "g": "t", "G": "t", "P": "m", "L": "L"}
HYBRID = {"M": "M", "D": "G", "*": "*", "@": "+", "-": "-", "#": "E"}
_EXPERTS = frozenset("X#xgGN")
"""Symbols of layers with experts."""
_MOST_TRIED_RANKS = 8
"""Up to this number of ranks every renaming of the inner ranks is tried (at most 720)."""
_OTHERWISE = "`octopipe.megatron.forward_backward_func` runs any plan"

Piece = tuple[int, int, int]
"""First layer, the layer after the last one, rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """A plan expressed in Megatron's flags."""

    pp: int
    text: MegatronText
    ranks: tuple[int, ...]
    """ranks[r]: the plan's rank that becomes Megatron's rank r."""
    recompute: str
    """Megatron's recompute flags; empty if the plan recomputes nothing."""
    notes: tuple[str, ...]

    @property
    def arguments(self) -> str:
        """The command-line arguments."""
        flag = "--pipeline-model-parallel-layout" if self.text.kind == "layout" else "--hybrid-layer-pattern"
        words = [f'--pipeline-model-parallel-size {self.pp} {flag} "{self.text.text()}"', self.recompute]
        return " ".join(word for word in words if word)


def megatron_arguments(plan: Plan, symbols: str) -> str:
    """Return the command-line arguments that give Megatron-LM this partition."""
    return megatron_layout(plan, symbols).arguments


def megatron_layout(plan: Plan, symbols: str) -> MegatronLayout:
    """Return the plan as Megatron's flags; raise OctoPipeError with the reason if they cannot express it."""
    if len(symbols) != plan.num_layers:
        raise OctoPipeError(f"{len(symbols)} layer symbols for {plan.num_layers} layers; use the plan's own model")
    if plan.forks:
        raise OctoPipeError(
            "Megatron-LM supports one chain of stages, and this plan's paths fork or join; run it with `octopipe "
            "train`, or plan without --mtp and --cut-head"
        )
    if plan.offloads:
        raise OctoPipeError(
            "Megatron-LM's layout flags cannot express activations in host memory, which this plan needs to fit; run "
            "it with `octopipe train`, or plan without --offload"
        )
    if len(plan.routes) > 1:
        raise OctoPipeError(
            f"Megatron-LM supports one chain of stages, and this plan has {len(plan.routes)} routes (layers held "
            "twice); run it with `octopipe train`, or tune with --no-copies"
        )
    pp, pieces = plan.num_ranks, _merged(plan)
    notes = []
    if len(pieces) < len(plan.stages):
        notes.append(f"{len(plan.stages)} stages became {len(pieces)}: neighbours on one rank are one")
    if pp > 1 and pieces[0][2] == pieces[-1][2]:
        raise OctoPipeError(
            f"embedding and loss are both on rank {pieces[0][2]}; Megatron-LM's strings put them on its first and its "
            f"last rank: {_OTHERWISE}"
        )
    ranks, slots = _fewest_slots([p[2] for p in pieces], pp)
    cells = [""] * (slots[-1] + 1)
    text = _text(plan, symbols, pieces, slots, cells)
    empty = sum(not cell for cell in cells) if text.kind == "layout" else sum(not s for s in text.stages)
    if empty:
        notes.append(f"{empty} of {len(cells)} stages are empty: they carry a placement that is not round robin")
    if ranks != tuple(range(pp)):
        notes.append(f"ranks renamed: Megatron's ranks 0..{pp - 1} are the plan's {', '.join(map(str, ranks))}")
    _check_predictions(text, pp)
    notes.append(
        f"the order is Megatron's own {'1F1B' if len(cells) == pp else 'interleaved 1F1B'}; {_OTHERWISE} in its own"
    )
    if plan.pairs:
        how = (
            "--overlap-moe-expert-parallel-comm --delay-wgrad-compute pairs each forward with the backward after it"
            if len(cells) > pp
            else "Megatron-LM overlaps the experts' exchange in interleaved 1F1B only (two or more stages a rank)"
        )
        notes.append(f"{len(plan.pairs)} pairs are left out: {how}")
    recompute, note = _recompute_flags(plan, symbols, pieces)
    return MegatronLayout(pp=pp, text=text, ranks=ranks, recompute=recompute, notes=(*notes, *note))


def _recompute_flags(plan: Plan, symbols: str, pieces: Sequence[Piece]) -> tuple[str, list[str]]:
    """Return Megatron's flags for what the plan recomputes, with a note if they recompute something else."""
    again = {k for stage in plan.stages for k in stage.recomputed_layers} | set(checkpointed_by_prices(plan))
    again -= {0, plan.num_layers - 1}
    if again:
        per_stage = [len(again.intersection(range(first, stop))) for first, stop, _ in pieces]
        inner = [sum(0 < k < plan.num_layers - 1 for k in range(first, stop)) for first, stop, _ in pieces]
        if per_stage == inner:
            return "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", []
        most = max(per_stage)
        note = (
            f"the plan recomputes {len(again)} layers; Megatron-LM recomputes the first {most} of every stage, "
            f"{sum(min(most, count) for count in inner)} in all, so that the stage with most of them has enough"
        )
        return f"--recompute-granularity full --recompute-method block --recompute-num-layers {most}", [note]
    if priced_recomputation(plan) != "selective":
        return "", []
    modules = ["layernorm", *(["moe_act"] if _EXPERTS.intersection(symbols) else [])]
    note = "with latent attention add mla_up_proj to --recompute-modules: the plan's prices recompute it too"
    return f"--recompute-granularity selective --recompute-modules {' '.join(modules)}", [note]


def _merged(plan: Plan) -> list[Piece]:
    """Return the chain of stages, with consecutive stages on the same rank merged."""
    out: list[Piece] = []
    for number in plan.routes[0]:
        stage = plan.stages[number]
        if out and out[-1][2] == stage.rank:
            out[-1] = (out[-1][0], stage.stop, stage.rank)
        else:
            out.append((stage.first, stage.stop, stage.rank))
    return out


def _fewest_slots(chain: Sequence[int], pp: int) -> tuple[tuple[int, ...], list[int]]:
    """Return the plan's rank for each of Megatron's ranks, and the position of every stage among Megatron's stages.

    Chooses the ranks that need the fewest empty stages.
    """
    if pp == 1:
        return (0,), [0] * len(chain)
    first, last = chain[0], chain[-1]
    middle = [r for r in dict.fromkeys([*chain, *range(pp)]) if r not in (first, last)]
    tried: Iterable[Sequence[int]] = (
        permutations(sorted(middle)) if pp <= _MOST_TRIED_RANKS else [sorted(middle), middle]
    )
    best: tuple[tuple[int, ...], list[int]] | None = None
    for inner in tried:
        ranks = (first, *inner, last)
        place = {rank: k for k, rank in enumerate(ranks)}
        slots, at = [], -1
        for rank in chain:
            at += 1 + (place[rank] - at - 1) % pp
            slots.append(at)
        if best is None or slots[-1] < best[1][-1]:
            best = ranks, slots
    assert best is not None
    return best


def _text(plan: Plan, symbols: str, pieces: Sequence[Piece], slots: Sequence[int], cells: list[str]) -> MegatronText:
    for (first, stop, _), slot in zip(pieces, slots):
        cells[slot] += symbols[first:stop]
    if set(symbols) <= set(BLOCKS):
        stages = tuple("".join(BLOCKS[s] for s in cell) for cell in cells)
        return MegatronText(kind="layout", stages=stages, depths=symbols.count("P"))
    # A hybrid pattern omits embedding, prediction modules and head; they belong to its first and last stage.
    inner = symbols[1:-1].rstrip("P")
    depths = len(symbols) - 2 - len(inner)
    if symbols[0] != "E" or symbols[-1] != "L" or not set(inner) <= set(HYBRID):
        unknown = sorted(set(inner) - set(HYBRID) - set(BLOCKS))
        raise OctoPipeError(
            f"Megatron-LM's layout strings have no letter for layers {' '.join(unknown) or 'of both kinds together'}; "
            f"{_OTHERWISE}"
        )
    if "*" in inner and "@" in inner:
        raise OctoPipeError(
            f"Megatron-LM's hybrid patterns take plain (*) or latent (+) attention, not both; {_OTHERWISE}"
        )
    pattern = _depth_pattern(plan) if depths else ""
    if depths and not all(c == "P" for c in cells[-1][-1 - depths : -1]):
        raise OctoPipeError(
            f"Megatron-LM keeps prediction layers in a hybrid's last stage, and this plan does not; {_OTHERWISE}"
        )
    cells[0] = cells[0][1:]
    cells[-1] = cells[-1][: len(cells[-1]) - 1 - depths]
    stages = tuple("".join(HYBRID[c] for c in cell) for cell in cells)
    return MegatronText(kind="hybrid", stages=stages, depth_pattern=pattern, depths=depths)


def _depth_pattern(plan: Plan) -> str:
    """Return the layers of one prediction depth, which only the pattern that the plan was read from contains."""
    known = plan.extra.get("megatron")
    text = known.get("--hybrid-layer-pattern") if isinstance(known, dict) else None
    if not isinstance(text, str):
        raise OctoPipeError(
            "a hybrid pattern names the layers of every prediction depth, which this plan does not store; export a "
            "plan made by `octopipe import` from your own pattern"
        )
    return read_hybrid(text).depth_pattern


def _check_predictions(text: MegatronText, pp: int) -> None:
    if text.kind != "layout" or not text.depths:
        return
    at = [k for k, stage in enumerate(text.stages) if "m" in stage]
    if len(at) > 1:
        raise OctoPipeError(
            f"Megatron-LM wants all multi-token prediction in one stage, and this plan has it in two; {_OTHERWISE}"
        )
    if at[0] < len(text.stages) - pp or (pp > 1 and at[0] % pp == 0):
        raise OctoPipeError(
            "Megatron-LM wants multi-token prediction in the last stage of its rank, and not on the first rank; "
            f"{_OTHERWISE}"
        )
