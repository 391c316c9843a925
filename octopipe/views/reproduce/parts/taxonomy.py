"""Table I: which phases the published systems tune, according to our registry."""

from __future__ import annotations

from octopipe.search.systems import systems
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import Result, Row

PHASES = ("partitioning", "placement", "scheduling")
TABLE = {
    "Mist": ("mist", "partitioning"),
    "Alpa": ("alpa", "partitioning"),
    "Dapple": ("dapple", "partitioning"),
    "AdaPipe": ("adapipe", "partitioning"),
    "Metis": ("metis", "partitioning"),
    "Interleaved": ("interleaved", "placement"),
    "DualPipe": ("dualpipe", "placement"),
    "Hanayo": ("hanayo", "placement"),
    "Chimera": ("chimera", "placement"),
    "Tessel": ("tessel", "scheduling"),
    "DynaPipe": ("dynapipe", "scheduling"),
    "ZeroBubble": ("zb-h1", "scheduling"),
    "Mario": ("mario", "scheduling"),
}
"""The paper's name -> ours, and the one phase it tunes."""


def run(bench: Bench) -> Result:
    known = systems()
    rows = []
    for title, (name, phase) in TABLE.items():
        ours = ", ".join(p for p in PHASES if p in known[name].tunes) if name in known else None
        rows.append(
            Row.constructed(f"taxonomy.{name}", title, phase, ours, ours == phase, source="Table I", group="taxonomy")
        )
    every = ", ".join(PHASES)
    rows.append(
        Row.constructed("taxonomy.octopipe", "OctoPipe", every, every, True, source="Table I", group="taxonomy")
    )
    return Result(rows=tuple(rows), costs="none needed")


PART = Part(name="taxonomy", title="Table I: what published systems tune", labels=("tab:existing_methods",), run=run)
