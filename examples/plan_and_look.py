"""Plans without a GPU or torch: compare systems, build one, look at it. `python examples/plan_and_look.py`.

The layer times are a file's; a preset's name ("nemotron-h-8b") or a config.json works as well.
"""

import json
import tempfile
from pathlib import Path

import octopipe

TIMES = {
    "pattern": "E" + "M-M-M*-" * 2 + "L",
    "forward_ms": {"E": 0.2, "M": 2.7, "-": 1.8, "*": 1.9, "L": 6.2},
    "backward_ms": {"E": 0.1, "M": 4.3, "-": 1.9, "*": 2.5, "L": 6.0},  # the input gradient alone
    "weight_ms": {"E": 0.0, "M": 1.8, "-": 1.7, "*": 0.7, "L": 2.5},
    "params_gib": {"E": 4.0, "M": 1.6, "-": 2.3, "*": 0.7, "L": 4.0},  # weights, gradients, optimizer state
    "activation_gib": {"E": 0.1, "M": 0.6, "-": 0.2, "*": 0.1, "L": 1.0},
}


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "times.json").write_text(json.dumps(TIMES))

    systems = ["1f1b", "interleaved", "zb-v"]
    found = octopipe.compare(folder / "times.json", 4, 8, names=systems, p2p_ms=0.3, processes=1)
    for row in found.results:
        print(f"{row.system:12} {row.step_ms:7.1f} ms, {100 * row.bubble_ratio:4.1f} % bubble")

    plan = octopipe.build_plan("zb-v", folder / "times.json", 4, 8, p2p_ms=0.3)
    plan.save(folder / "plan.json")
    timeline = octopipe.simulate(folder / "plan.json")  # the file says what the plan was made for
    print(timeline)
    print(f"peak memory per rank: {', '.join(f'{g:.1f}' for g in timeline.peak_gib)} GiB")


if __name__ == "__main__":
    main()
