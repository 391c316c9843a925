"""The torch engine's tests on several versions of PyTorch: `python scripts/torch_versions.py [2.9.1 2.13.0 newest]`.

Knows: one environment per version (kept under out/torch-versions, so that a second run is quick) and which tests depend
on PyTorch's private names. Does not know: what is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("2.9.1", "2.13.0", "newest")
TESTS = ("test_torch_private.py", "test_torch_engine.py", "test_torchtitan.py", "test_export.py", "test_readers.py")
NEEDS = ("numpy", "llvmlite", "msgspec", "rich", "pytest", "hypothesis", "pytest-xdist")


def main(versions: list[str]) -> int:
    """Runs the tests on every version; the exit code is 1 if one of them fails."""
    failed = []
    for version in versions or VERSIONS:
        place = ROOT / "out" / "torch-versions" / version
        python = place / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        torch = "torch" if version == "newest" else f"torch=={version}"
        subprocess.run([str(python), "-m", "pip", "install", "-q", "-U", torch, *NEEDS], check=True)
        found = subprocess.check_output(
            [str(python), "-c", "import torch; print(torch.__version__)"], text=True
        ).strip()
        tests = [str(ROOT / "tests" / name) for name in TESTS]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([str(python), "-m", "pytest", "-q", *tests], cwd=ROOT, env=env, check=False)
        print(f"torch {found}: {'passed' if done.returncode == 0 else 'FAILED'}", flush=True)
        failed += [found] if done.returncode else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
