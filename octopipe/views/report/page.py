"""The report page: template, style, scripts and data in one self-contained file.

Knows: how the parts are put together and escaped. Does not know: what the page shows (entry.py and the scripts in this
folder).
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from octopipe.base.errors import OctoPipeError
from octopipe.views.export.style import BUBBLES, COLOURS, NAMES
from octopipe.views.report.assets import SCRIPTS, asset, embed, fill, script
from octopipe.views.report.cluster import KEY, STYLE, panel
from octopipe.views.report.entry import Entry, entry_data
from octopipe.views.report.pack import Packer

SYMBOLS: Mapping[str, str] = MappingProxyType(
    {
        "E": "embedding",
        "L": "head and loss",
        "M": "Mamba",
        "-": "MLP",
        "*": "attention",
        "~": "sliding attention",
        "@": "latent attention",
        "#": "mixture of experts",
        "D": "gated delta net",
        "d": "Kimi delta attention",
        "/": "lightning attention",
        "P": "multi-token prediction",
        "T": "transformer block",
        "t": "sliding block",
        "X": "expert block",
        "x": "sliding expert block",
        "v": "embedding of patches",
        "V": "vision tower",
        "w": "vision tower, windows",
        "a": "embedding of sound",
        "A": "audio encoder",
        "s": "embedding of the source text",
        "S": "encoder",
        "J": "join of encoder and decoder",
        "j": "features that join later",
        "C": "block with cross-attention",
    }
)


def report_data(entries: Sequence[Entry]) -> tuple[dict[str, Any], str]:
    """Return the input of the page's scripts: the head (JSON-ready) and the packed columns."""
    if not entries:
        raise OctoPipeError("a report needs at least one plan or timeline")
    pack = Packer()
    rows = [entry_data(entry, pack) for entry in entries]
    head = {
        "format": "octopipe.report/1",
        "colours": dict(COLOURS),
        "kind_names": dict(NAMES),
        "bubble_colours": dict(BUBBLES),
        "symbol_names": dict(SYMBOLS),
        "columns": pack.columns,
        "entries": rows,
    }
    # A measured timeline may contain numpy numbers, which JSON cannot encode.
    return msgspec.to_builtins(head, enc_hook=float), pack.text()


def report_html(entries: Sequence[Entry], *, title: str = "") -> str:
    """Return the whole report as one HTML text."""
    head, columns = report_data(entries)
    models = list(dict.fromkeys(e.timeline.model for e in entries if e.timeline.model))
    ranks = sorted({e.timeline.num_ranks for e in entries})
    parts = {
        "title": html.escape(title or f"OctoPipe: {', '.join(models) or 'timelines'}"),
        "subtitle": html.escape(_subtitle(entries, ranks)),
        "style": asset("report.css"),
        "cluster": _clusters(entries),
        "head": embed(head),
        "columns": columns,
        "script": script("page.js"),
    }
    return fill(asset("report.html"), parts)


def _clusters(entries: Sequence[Entry]) -> str:
    """Return the panels of plans that were found for a whole cluster."""
    panels = [panel(e.plan.extra.get(KEY)) for e in entries if e.plan is not None]
    shown = "".join(panels)
    return f'<style>{STYLE}</style><div class="cluster-panels">{shown}</div>' if shown else ""


def _subtitle(entries: Sequence[Entry], ranks: Sequence[int]) -> str:
    words = [f"{' and '.join(map(str, ranks))} ranks"]
    micro_batches = sorted({e.plan.num_micro_batches for e in entries if e.plan is not None})
    if micro_batches:
        words.append(f"{' and '.join(map(str, micro_batches))} micro-batches")
    return ", ".join(words)


__all__ = ["SCRIPTS", "asset", "embed", "fill", "report_data", "report_html", "script"]
