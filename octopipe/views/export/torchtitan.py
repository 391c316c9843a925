"""A plan in torchtitan's own settings: the modules of every model part, the schedule CSV, a config module with both.

Knows: what torchtitan can run without a patch: stage i on rank i mod pp with the same number of stages on every rank,
or a V of two stages per rank. Does not know: torch, torchtitan. Any other plan runs through
`octopipe.torchtitan.pipelining_fn`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan
from octopipe.views.export.pytorch import pytorch_csv, torch_order

LOOP, V = "PipelineScheduleMulti", "ZBVZeroBubble"
"""Names of torchtitan's schedules that place stages in a loop and in a V; the CSV determines the order."""
_OTHERWISE = "octopipe.torchtitan.pipelining_fn runs any plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanSettings:
    """The values to set in a torchtitan config."""

    pp: int
    schedule: str
    parts: tuple[tuple[str, ...], ...]
    """The value of `module_fqns_per_model_part`."""
    csv: str
    num_micro_batches: int
    notes: tuple[str, ...]

    def lines(self, csv_path: str) -> str:
        """Return the settings as lines of a config function, with the CSV at this path."""
        parts = ",\n".join("    [" + ", ".join(f'"{name}"' for name in part) + "]" for part in self.parts)
        return (
            f"config.parallelism.pipeline_parallel_degree = {self.pp}\n"
            f'config.parallelism.pipeline_parallel_schedule = "{self.schedule}"\n'
            f'config.parallelism.pipeline_parallel_schedule_csv = "{csv_path}"\n'
            f"config.parallelism.module_fqns_per_model_part = [\n{parts},\n]\n"
            f"config.parallelism.num_pp_microbatches = {self.num_micro_batches}\n"
            "config.training.disable_cuda_graphs = True\n"
            f"# torchtitan 0.3 has neither of the two: local_batch_size = {self.num_micro_batches} x "
            "pipeline_parallel_microbatch_size\n"
        )


def module_names(plan: Plan, *, head: tuple[str, ...] = ("norm", "lm_head")) -> tuple[tuple[str, ...], ...]:
    """Return the names of torchtitan's modules in every stage along the chain: embedding, blocks, norm and head.

    A plan's layer 0 is the embedding, layer k is block k - 1, and its last layer is norm and head.
    """
    if plan.num_layers < 2:
        raise OctoPipeError("a plan of one layer; torchtitan's models have at least an embedding and a head")
    names = [("tok_embeddings",), *((f"layers.{k}",) for k in range(plan.num_layers - 2)), head]
    route = plan.routes[0]
    return tuple(
        tuple(name for k in range(plan.stages[s].first, plan.stages[s].stop) for name in names[k]) for s in route
    )


def titan_settings(plan: Plan) -> TitanSettings:
    """Return the plan in torchtitan's settings; raise OctoPipeError with the reason if it needs the hook."""
    order = torch_order(plan)
    pp, ranks = plan.num_ranks, [s.rank for s in order.plan.stages]
    count = len(ranks)
    if count % pp:
        raise OctoPipeError(
            f"{count} stages on {pp} ranks; torchtitan requires the same number on every rank: {_OTHERWISE}"
        )
    loop = [s % pp for s in range(count)]
    wave = [s if s < pp else 2 * pp - 1 - s for s in range(count)]
    if ranks == loop:
        schedule = LOOP
    elif count == 2 * pp and ranks == wave:
        schedule = V
    else:
        at = next(k for k, (a, b) in enumerate(zip(ranks, loop)) if a != b)
        raise OctoPipeError(
            f"torchtitan puts stage {at} on rank {loop[at]}, this plan on rank {ranks[at]}; it "
            f"supports loops and V shapes of "
            f"two stages per rank: {_OTHERWISE}"
        )
    return TitanSettings(
        pp=pp,
        schedule=schedule,
        parts=module_names(order.plan),
        csv=pytorch_csv(plan),
        num_micro_batches=plan.num_micro_batches,
        notes=order.notes,
    )


def titan_module(plan: Plan, base: str, *, csv_name: str, plan_name: str) -> tuple[str, TitanSettings | None]:
    """Return a Python module with a config function `planned` for torchtitan's --module and --config, and the settings.

    The CSV of the settings must be stored next to the module as `csv_name`. If the settings cannot express the plan,
    they are None, and the module runs the plan file `plan_name` through the hook. `base` is the config that the module
    changes, as MODULE:CONFIG: a module of torchtitan.models, or one with dots in its name.
    """
    found = re.fullmatch(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", base)
    if found is None:
        raise OctoPipeError(f"{base[:60]!r} names no config of torchtitan; write MODULE:CONFIG, as in llama3:llama3_8b")
    module = found[1] if "." in found[1] else f"torchtitan.models.{found[1]}.config_registry"
    try:
        settings = titan_settings(plan)
        lines, more = settings.lines("CSV").replace('"CSV"', f'str(HERE / "{csv_name}")').partition("# ")[0], ""
    except OctoPipeError:
        torch_order(plan)  # raises if PyTorch's pipelining cannot run the plan at all
        settings, more = None, "import dataclasses\n"
        lines = (
            "import octopipe.torchtitan\n"
            "from octopipe.plans.file import load_plan\n\n"
            f"plan = load_plan(HERE / {json.dumps(plan_name)})\n"
            "hook = octopipe.torchtitan.pipelining_fn(plan)\n"
            "config.model_spec = dataclasses.replace(config.model_spec, pipelining_fn=hook)\n"
            f"config.parallelism.pipeline_parallel_degree = {plan.num_ranks}\n"
            f"config.parallelism.num_pp_microbatches = {plan.num_micro_batches}\n"
            "config.training.disable_cuda_graphs = True\n"
        )
    inner = "".join(f"    {line}\n" if line else "\n" for line in lines.splitlines())
    text = (
        f'"""{plan.num_ranks} pipeline ranks and {plan.num_micro_batches} micro-batches as a config of torchtitan, '
        f'written by octopipe export."""\n\n'
        f"{more}from pathlib import Path\n\n"
        f"from {module} import {found[2]} as base\n\n"
        "HERE = Path(__file__).resolve().parent\n\n\n"
        f"def planned():\n    config = base()\n{inner}    return config\n"
    )
    return text, settings
