"""Published measurements included in the package: layer times of models, and training runs.

Knows: which files there are (each names its source). Does not know: how they are read (`layer_times.py`) or what is
fitted to them (`analytic/calibration.py`).

>>> measured_models()[:2]
['h800/jamba-100b', 'h800/jamba-20b']
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
AUTHORS = FOLDER / "h800"
"""Layer times measured by the authors of the paper, one file per model."""
PUBLISHED_RUNS = FOLDER / "published-runs.csv"
"""Training runs that others published: their splits and what they reached."""
PUBLISHED_MODELS = FOLDER / "published-models.csv"
"""Dimensions of the models of those runs that are not presets."""
STACKS_FILE = FOLDER / "stacks.json"
"""Rates of training stacks, fitted to those runs."""


def measured_models() -> list[str]:
    """Return the names (`device/model`) that users may give as a model to use a file of measured layer times."""
    return sorted(f"{file.parent.name}/{file.stem}" for file in FOLDER.glob("*/*.json"))


def measured_file(name: str) -> Path | None:
    """Return the file with such a name, or None if there is none."""
    return FOLDER / f"{name}.json" if name in measured_models() else None
