"""Packaging: the wheel and the sdist, installed where nothing else is, can plan without torch and train with it.

    make package
    python scripts/package.py --pythons python3.12 python3.13

For every interpreter that is found: a fresh environment, the wheel with what it depends on, and the verbs that plan.
Then the sdist in its place. With the interpreter that runs this script, if it has torch: the installed wheel trains
two steps on two ranks. For interpreters and machines that are not here (Python 3.11 to 3.13, x86-64 and aarch64), pip
is asked whether everything that the wheel needs exists for them. Slow: it downloads; not part of the tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
MACHINES = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64")
SETUP = ("--gpu", "h100", "--pp", "4", "--tp", "2", "--micro-batches", "8")
PLANNING = (
    ("tune", "llama3-8b", *SETUP, "--budget", "1s", "-o", "p.json"),
    ("simulate", "--plan", "p.json"),
    ("compare", "llama3-8b", *SETUP, "--systems", "1f1b,gpipe"),
)  # fmt: skip
TRAINING = (
    "train", "nemotron-h-8b", "--scale", "0.005", "--layers", "6", "--seq", "16", "--micro-batches", "2",
    "--no-measure", "--steps", "2",
)  # fmt: skip


def run(*words: str | Path, folder: Path, **variables: str) -> str:
    """A command's output; ends the script with its last lines where it fails."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(list(map(str, words)), cwd=folder, env={**kept, **variables}, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        sys.exit(f"{' '.join(map(str, words))}\nended with {done.returncode}:\n{tail}")
    return done.stdout


def built(folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist of a copy of the tree, so that nothing is left in it."""
    source = folder / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "out", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
    make = f"from setuptools import build_meta as b; b.build_sdist({str(folder)!r}); b.build_wheel({str(folder)!r})"
    run(sys.executable, "-c", make, folder=source)
    wheel, sdist = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    if not wheel.name.endswith("py3-none-any.whl"):
        sys.exit(f"{wheel.name} is bound to a machine or a Python; it must be py3-none-any")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("octopipe/py.typed", "octopipe/views/report/"):
        if not any(name.startswith(needed) for name in names):
            sys.exit(f"{wheel.name} lacks {needed}")
    if any(name.split("/")[0] in ("tests", "scripts", "benchmarks") for name in names):
        sys.exit(f"{wheel.name} holds more than the package")
    return wheel, sdist


def plans_without_torch(python: str, wheel: Path, sdist: Path, folder: Path) -> str:
    home = folder / Path(python).name
    run(python, "-m", "venv", home, folder=folder)
    inner = home / "bin" / "python"
    for number, package in enumerate((wheel, sdist)):
        more = [] if number == 0 else ["--force-reinstall", "--no-deps"]
        run(inner, "-m", "pip", "install", "-q", "--disable-pip-version-check", *more, package, folder=folder)
        without = "import importlib.util as u, octopipe; assert u.find_spec('torch') is None; print(octopipe.__file__)"
        place = run(inner, "-c", without, folder=folder).strip()
        if not place.startswith(str(home)):
            sys.exit(f"octopipe came from {place}, not from the package")
        for words in PLANNING if number == 0 else PLANNING[1:]:
            run(home / "bin" / "octopipe", *words, folder=folder)
    return run(inner, "-V", folder=folder).strip()


def trains(wheel: Path, folder: Path) -> None:
    target = folder / "with-torch"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel, folder=folder)
    text = run(sys.executable, "-m", "octopipe", *TRAINING, folder=folder, PYTHONPATH=str(target))
    assert "loss" in text, text
    where = "import octopipe; print(octopipe.__file__)"
    place = run(sys.executable, "-c", where, folder=folder, PYTHONPATH=str(target))
    assert place.startswith(str(target)), place


def resolves(wheel: Path, version: str, machine: str, folder: Path) -> bool:
    """Whether pip finds wheels of everything for an interpreter and a machine that need not be here."""
    command = [
        *(sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--disable-pip-version-check"),
        *("--only-binary", ":all:", "--python-version", version, "--platform", machine),
        *("--platform", machine.replace("_2_28", "_2_27"), "--platform", machine.replace("_2_28", "_2_17")),
        *("--platform", machine.replace("_2_28", "2014")),
        *("--target", str(folder / "none"), str(wheel)),
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Install what is shipped, and use it.")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octopipe-package-") as name:
        folder = Path(name)
        wheel, sdist = built(folder)
        print(f"{wheel.name} ({wheel.stat().st_size >> 10} KiB), {sdist.name} ({sdist.stat().st_size >> 10} KiB)")
        for python in args.pythons:
            found = shutil.which(python)
            # A version manager leaves names behind that run nothing.
            if found is None or subprocess.run([found, "-V"], capture_output=True).returncode:
                print(f"{python}: not here, not tried", flush=True)
                continue
            version = plans_without_torch(found, wheel, sdist, folder)
            print(f"{version}: wheel and sdist install and plan without torch", flush=True)
        if importlib.util.find_spec("torch") is None:
            print("no torch here: training was not tried")
        else:
            trains(wheel, folder)
            print(f"Python {sys.version.split()[0]} with torch: the installed wheel trains on two ranks", flush=True)
        for version in ("3.11", "3.12", "3.13"):
            for machine in MACHINES:
                good = resolves(wheel, version, machine, folder)
                words = "all dependencies have wheels" if good else "pip finds no wheels of all dependencies here"
                print(f"Python {version}, {machine.rpartition('_2_28_')[2]}: {words}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
