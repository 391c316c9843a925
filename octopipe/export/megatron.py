"""A plan's partition as Megatron-LM's layout strings.

Knows: `--pipeline-model-parallel-layout` (transformers: E embedding, t decoder layer, m multi-token
prediction, L loss) and `--hybrid-layer-pattern` (hybrids: M, *, -, E for experts), both with | between stages.
Does not know: orders; Megatron keeps its own (interleaved) 1F1B, so only the partition is carried over.

Megatron puts stage i on rank i mod pp; a plan placed otherwise cannot be said in these strings.
"""

from __future__ import annotations

from itertools import groupby

from octopipe.errors import OctoPipeError
from octopipe.plan import Plan

_BLOCKS = {"E": "E", "T": "t", "t": "t", "X": "t", "x": "t", "P": "m", "L": "L"}
_HYBRID = {"M": "M", "*": "*", "-": "-", "#": "E"}


def megatron_arguments(plan: Plan, symbols: str) -> str:
    """The command-line arguments that give Megatron-LM this partition."""
    if len(symbols) != plan.num_layers:
        raise OctoPipeError(f"{len(symbols)} layer symbols for {plan.num_layers} layers; use the plan's own model")
    if len(plan.routes) > 1:
        raise OctoPipeError(f"Megatron-LM knows one chain of stages; this plan has {len(plan.routes)} routes")
    pp = plan.num_ranks
    route = [plan.stages[s] for s in plan.routes[0]]
    for i, stage in enumerate(route):
        if stage.rank != i % pp:
            raise OctoPipeError(
                f"Megatron-LM puts stage {i} on rank {i % pp}, this plan on rank {stage.rank}; "
                "only plans with cyclic placement can be exported"
            )
    if len(route) % pp:
        raise OctoPipeError(f"Megatron-LM wants as many stages on every rank; {len(route)} stages on {pp} ranks")
    pieces = [symbols[s.first : s.stop] for s in route]
    arguments = [f"--pipeline-model-parallel-size {pp}"]
    if set(symbols) <= set(_BLOCKS):
        layout = "|".join("".join(_repeat(c, len(list(g))) for c, g in groupby(_BLOCKS[s] for s in p)) for p in pieces)
        return " ".join([*arguments, f'--pipeline-model-parallel-layout "{layout}"'])
    inner = symbols[1:-1]
    if symbols[0] == "E" and symbols[-1] == "L" and set(inner) <= set(_HYBRID):
        # Embedding and head are not in a hybrid pattern; they belong to its first and last stage.
        pieces[0], pieces[-1] = pieces[0][1:], pieces[-1][:-1]
        pattern = "|".join("".join(_HYBRID[c] for c in p) for p in pieces)
        return " ".join([*arguments, f'--hybrid-layer-pattern "{pattern}"'])
    unknown = sorted(set(inner) - set(_HYBRID) - set(_BLOCKS))
    raise OctoPipeError(
        f"Megatron-LM's layout strings have no word for layers {' '.join(unknown) or 'of both kinds together'}"
    )


def _repeat(letter: str, times: int) -> str:
    return letter if times == 1 else letter * 2 if times == 2 else f"{letter}*{times}"
