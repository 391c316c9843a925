"""ds.json through DeepSpeed's own config reader, in a process of its own: reads JSON, prints how many it took.

OCTOPIPE_DEEPSPEED names a checkout or an unpacked release. Its reader asks for the number of data-parallel ranks alone,
which a stand-in for Megatron's `mpu` answers.
"""

import contextlib
import io
import json
import os
import sys
from unittest.mock import MagicMock


def main() -> int:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.path.insert(0, os.environ["OCTOPIPE_DEEPSPEED"])
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        from deepspeed.runtime import config as reader
    reader.dist.get_rank = lambda *_: 0
    lines = json.load(sys.stdin)
    for replicas, micro_batches, settings in lines:
        mpu = MagicMock()
        mpu.get_data_parallel_world_size.return_value = replicas
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found = reader.DeepSpeedConfig(settings, mpu)
            assert found.gradient_accumulation_steps == micro_batches, "other micro-batches than were priced"
            assert found.zero_optimization_stage == settings["zero_optimization"]["stage"]
            assert found.bfloat16_config.enabled and found.bfloat16_config.immediate_grad_update
            assert found.grad_accum_dtype == settings["data_types"]["grad_accum_dtype"]
        except (Exception, SystemExit) as error:
            print(f"refused: {error or type(error).__name__}\n{json.dumps(settings)}")
            return 1
    print(f"{len(lines)} lines taken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
