"""Command lines through torchtitan's own config classes, in a process of its own: reads JSON, prints how many it took.

OCTOPIPE_TORCHTITAN names a checkout; tyro, which torchtitan parses with, must be importable. Flags are parsed into its
`TrainingConfig` and `ParallelismConfig`, and the sizes checked by its `ParallelDims`. The model's config (--module,
--config) is looked up by name alone: building it needs kernels that are not here.
"""

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import MagicMock


def main() -> int:
    checkout = Path(os.environ["OCTOPIPE_TORCHTITAN"])
    sys.path.insert(0, str(checkout))
    sys.modules.setdefault("spmd_types", MagicMock())
    import tyro
    from torchtitan.config.configs import ParallelismConfig, TrainingConfig
    from torchtitan.distributed.parallel_dims import ParallelDims

    @dataclass
    class Config:
        training: TrainingConfig = field(default_factory=TrainingConfig)
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)

    lines = json.load(sys.stdin)
    for world, flags in lines:
        said = io.StringIO()
        try:
            rest = list(flags)
            module, config = (rest.pop(rest.index(name) + 1) for name in ("--module", "--config"))
            rest = [word for word in rest if word not in ("--module", "--config")]
            if not module.startswith("$"):
                registry = checkout / "torchtitan" / "models" / module / "config_registry.py"
                assert f"def {config}(" in registry.read_text(), f"torchtitan has no config {config}"
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found = tyro.cli(Config, args=rest)
            dims = ParallelDims.from_config(found.parallelism, world)
            tokens, share = (
                found.training.num_tokens_per_train_step,
                found.training.num_tokens_per_microbatch_per_dp_rank,
            )
            assert tokens % (share * dims.dp_shard * dims.dp_replicate) == 0, "the batch is no whole number of shares"
        except (Exception, SystemExit) as error:
            print(f"refused: {error or type(error).__name__}\n{said.getvalue()[-800:]}\n{' '.join(flags)}")
            return 1
    print(f"{len(lines)} lines taken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
