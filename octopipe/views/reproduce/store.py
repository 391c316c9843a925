"""Plans that searches found, stored by the search's inputs and the code that ran it.

Knows: the folder of one run, and the one file in which the plans behind docs/reproduction.md are stored, so that every
number of the page can be computed again from its plan without a search. Does not know: what a search does.
"""

from __future__ import annotations

import base64
import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octopipe.base.files import write_whole
from octopipe.plans.file import plan_from_json, plan_to_json
from octopipe.plans.plan import Plan

FORMAT = "octopipe.reproduction-plans/1"


@dataclass(slots=True, kw_only=True)
class ResultStore:
    """Plans by a key of the search's inputs; written to a folder as they are found."""

    folder: Path | None = None
    any_code: bool = False
    """Whether to use plans found by other code too: their numbers are computed again, their search is not repeated."""
    plans: dict[str, Plan] = field(default_factory=dict)

    def get(self, key: str, code: str) -> Plan | None:
        """Return the plan for this key if it was found by this code, else None."""
        if key in self.plans:
            return self.plans[key]
        path = None if self.folder is None else self.folder / f"{key}.json"
        if path is None or not path.exists():
            return None
        plan = plan_from_json(path.read_bytes(), path.name)
        if not self.any_code and plan.extra.get("searched_by") != code:
            return None
        self.plans[key] = plan
        return plan

    def put(self, key: str, code: str, plan: Plan, log: Mapping[str, Any]) -> Plan:
        kept = plan.with_extra(searched_by=code, **log)
        self.plans[key] = kept
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / f"{key}.json", plan_to_json(kept))
        return kept


def write_kept(path: Path, plans: Mapping[str, Plan]) -> None:
    """Write all plans to one compressed file; the bytes depend only on the plans, not on the code that found them."""
    lines = {key: plan_to_json(_anonymous(plan)).decode() for key, plan in sorted(plans.items())}
    packed = lzma.compress(json.dumps({"format": FORMAT, "plans": lines}, sort_keys=True).encode(), preset=9)
    write_whole(path, base64.b85encode(packed))


def _anonymous(plan: Plan) -> Plan:
    return replace(plan, extra={name: value for name, value in plan.extra.items() if name != "searched_by"})


def read_kept(path: Path) -> dict[str, Plan]:
    """Return the plans in a file that `write_kept` wrote."""
    record = json.loads(lzma.decompress(base64.b85decode(path.read_bytes())))
    if record["format"] != FORMAT:
        raise ValueError(f"{path.name}: format {record['format']!r}, not {FORMAT}; make the page again")
    return {key: plan_from_json(text, key) for key, text in record["plans"].items()}
