"""The expected error of predictions: the error bar of every row.

Knows: which stack's measured errors apply to a set-up. Does not know: rates (`costs/analytic/calibration.py`), or how
rows are shown.

The error bar refers to absolute speed. Splits of one model on one cluster share most of that error, so their ranking is
more certain than the bar suggests; `choice.MARGIN` defines what counts as a tie.
"""

from __future__ import annotations

import json
from functools import cache

from octopipe.costs.analytic.calibration import is_calibrated, stack_named
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.measured import FOLDER

ACCURACY = FOLDER / "accuracy.json"
"""File with the errors of the default rates on runs that were left out of their fit."""


def expected_error(setup: Setup) -> float | None:
    """Return the median relative error of the predictions for measured runs; None if no run calibrates this GPU."""
    if setup.gpu is None or not is_calibrated(setup.gpu, setup.precision, setup.stack):
        return None
    errors = stack_named(setup.stack).errors
    return float(_of_default()["median"]) if errors is None else errors.median


def errors_in_words(setup: Setup) -> str:
    """Explain the error bars in one line."""
    if expected_error(setup) is None:
        return "±: no run of this stack on this GPU is known"
    errors = stack_named(setup.stack).errors
    if errors is not None:
        return f"±: half of the stack's {errors.of} lie within it ({errors.words()})"
    known = _of_default()
    return (
        f"±: half of {known['runs']} published runs that the rates were not fitted on lie within "
        f"{100 * float(known['median']):.0f} % of their prediction, the worst {100 * float(known['worst']):.0f} % off"
    )


@cache
def _of_default() -> dict[str, float | str]:
    """Return the errors of the default rates; they are in a file of their own because the default stack stores none."""
    record: dict[str, float | str] = json.loads(ACCURACY.read_text(encoding="utf-8"))
    return record
