"""How far predictions are from runs: the error bar of every row.

Knows: what was measured on published runs that the rates were not fitted on (`costs/measured/accuracy.json`, written by
`benchmarks/bench_published.py --held-out`). Does not know: rates, or how rows are shown.

The bar is of absolute speed. Splits of one model on one cluster share most of that error, so their order is more
certain than it says; what counts as a tie is `choice.MARGIN`.
"""

from __future__ import annotations

import json
from functools import cache

from octopipe.costs.analytic.calibration import is_calibrated
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.measured import FOLDER

ACCURACY = FOLDER / "accuracy.json"


def expected_error(setup: Setup) -> float | None:
    """Half of the runs lie within this share of what was predicted; None where no run calibrates the GPU."""
    if setup.gpu is None or not is_calibrated(setup.gpu, setup.precision):
        return None
    return float(measured_errors()["median"])


@cache
def measured_errors() -> dict[str, float | str]:
    """The file's record."""
    record: dict[str, float | str] = json.loads(ACCURACY.read_text(encoding="utf-8"))
    return record


def errors_in_words(setup: Setup) -> str:
    """One line that says what the bars mean."""
    if setup.gpu is None or expected_error(setup) is None:
        return ""
    known = measured_errors()
    return (
        f"±: half of {known['runs']} published runs that the rates were not fitted on lie within "
        f"{100 * float(known['median']):.0f} % of their prediction, the worst {100 * float(known['worst']):.0f} % off"
    )
