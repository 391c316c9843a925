"""Command lines through torchtitan's own config code, in a process of its own: reads JSON, prints how many it took.

OCTOPIPE_TORCHTITAN names a checkout; what torchtitan imports (tyro, grain, spmd_types and others) must be importable. A
command is its world size, its flags and the files that they name. torchtitan's `ConfigManager` loads the config
and parses the flags, its `Trainer.Config` checks them together, its `ParallelDims` the sizes, and its pipelining the
schedule's name and the rank of every stage.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from torch.distributed.pipelining.schedules import get_schedule_class


def taken(world: int, flags: list[str]) -> None:
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.distributed.pipeline_parallel import _get_pp_rank_to_stage_indices_mapping

    found = ConfigManager().parse_args(flags)
    sizes, training = found.parallelism, found.training
    dims = ParallelDims.from_config(sizes, world)
    share = training.num_tokens_per_microbatch_per_dp_rank * dims.dp_shard * dims.dp_replicate
    assert training.num_tokens_per_train_step % share == 0, "the batch is no whole number of shares"
    if dims.pp == 1:
        return
    assert training.num_tokens_per_train_step == share * sizes.num_pp_microbatches
    parts = sizes.module_fqns_per_model_part
    if parts is None:  # the plan needs the hook
        assert "pipelining_fn" in str(found.model_spec.pipelining_fn)
        return
    blocks = [name for part in parts for name in part if name.startswith("layers.")]
    assert blocks == [f"layers.{k}" for k in range(len(found.model_spec.model.layers))], "not the model's blocks"
    get_schedule_class(sizes.pipeline_parallel_schedule)
    rows = Path(sizes.pipeline_parallel_schedule_csv).read_text().splitlines()
    assert len(rows) == dims.pp
    for rank, row in enumerate(rows):
        mine = _get_pp_rank_to_stage_indices_mapping(rank, dims.pp, sizes.pipeline_parallel_schedule, len(parts))
        seen = {int(stage) for stage in re.findall(r"(\d+)F\d+", row)}
        assert seen == set(mine), f"rank {rank} has stages {sorted(seen)}, torchtitan builds {mine}"


def main() -> int:
    sys.path.insert(0, os.environ["OCTOPIPE_TORCHTITAN"])
    from torchtitan.tools import utils

    utils.has_cuda_capability = lambda *_: True  # a config with float8 layers asks for a GPU that has them
    lines = json.load(sys.stdin)
    for world, flags, files in lines:
        said = io.StringIO()
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text)
            sys.path.insert(0, folder)
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    taken(world, flags)
            except (Exception, SystemExit) as error:
                print(f"refused: {error or type(error).__name__}\n{said.getvalue()[-800:]}\n{' '.join(flags)}")
                return 1
            finally:
                sys.path.remove(folder)
                sys.modules.pop("planned", None)
    print(f"{len(lines)} lines taken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
