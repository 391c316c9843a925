"""torchtitan's hook with our plans, on a model spec of its shape; and the settings it runs without the hook."""

from __future__ import annotations

import inspect
import random
import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from random_plans import random_plan  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

from octopipe import torchtitan  # noqa: E402
from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402
from octopipe.views.export.torchtitan import titan_settings  # noqa: E402

VOCAB, WIDTH, BLOCKS = 11, 6, 6
LAYERS = BLOCKS + 2


class Decoder(nn.Module):
    """A model of torchtitan's shape: its forward tolerates parts that are gone."""

    def __init__(self, blocks: int = BLOCKS, head: str = "lm_head"):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict(
            {str(k): nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for k in range(blocks)}
        )
        self.norm = nn.LayerNorm(WIDTH)
        setattr(self, head, nn.Linear(WIDTH, VOCAB))
        self.head_name = head

    def forward(self, x):
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for block in self.layers.values():
            x = x + block(x)
        x = self.norm(x) if self.norm is not None else x
        head = getattr(self, self.head_name)
        return head(x) if head is not None else x


def loss_fn(output, target):
    """As torchtitan's: a sum, and metrics beside it."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), {"tokens": 1}


class Dims:
    def __init__(self, mesh):
        self.mesh = mesh

    def get_mesh(self, name):
        assert name in ("pp", ["pp"])
        return self.mesh


# -- jobs: run on every rank ---------------------------------------------------------------------------


def run_plans(world, plans):
    """[(plan, head)] -> per plan: (worst gradient error, loss error, has first, has last)."""
    mesh = DeviceMesh.from_group(world.group, "cpu", mesh_dim_names=("pp",))
    out = []
    for plan, head in plans:
        torch.manual_seed(1)
        model = Decoder(head=head).double()
        count = plan.num_micro_batches
        tokens, labels = torch.randint(VOCAB, (2, 2 * count, 5), generator=torch.Generator().manual_seed(2))
        want = loss_fn(model(tokens), labels)[0]
        want.backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        seen = []

        def parallelize(part, *, parallel_dims, training, parallelism, compile_config, _seen=seen):
            _seen.append(compile_config)
            return part

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made, parts, first, last = torchtitan.pipelining_fn(plan)(
                model,
                parallel_dims=Dims(mesh),
                training=SimpleNamespace(local_batch_size=2 * count),
                parallelism=SimpleNamespace(pipeline_parallel_microbatch_size=2),
                compile_config="as given",
                device=torch.device("cpu"),
                model_config=None,
                parallelize_fn=parallelize,
                loss_fn=loss_fn,
            )
        assert seen == ["as given"] * len(parts)
        losses = []
        args = (tokens,) if first else ()
        # As torchtitan calls it; older versions of PyTorch, and the torchtitan of their time, have no such keyword.
        quiet = {"return_outputs": False} if "return_outputs" in inspect.signature(made.step).parameters else {}
        made.step(*args, target=labels if last else None, losses=losses if last else None, **quiet)
        worst = 0.0
        for part in parts:
            for name, p in part.named_parameters():
                worst = max(worst, float((p.grad - expected[name]).abs().max() / expected[name].abs().max()))
        error = abs(float(sum(losses)) - want.item()) if last else 0.0
        out.append((worst, error, first, last))
    return out


def _plan(system, ranks=2, micro_batches=4, **more):
    return build_plan(system, CostTable.uniform(num_layers=LAYERS), ranks, micro_batches, **more)


def test_any_plan_runs_through_the_hook(two):
    rng = random.Random(1)
    plans = [(_plan("zb-v"), "lm_head"), (_plan("interleaved", chunks=2), "output")]
    while len(plans) < 8:
        plan = random_plan(rng, num_ranks=2, num_layers=LAYERS, num_micro_batches=3, routes=1, recompute=False)
        if all(plan.orders):
            plans.append((plan, "lm_head"))
    for rank, per_rank in enumerate(two.run(run_plans, plans)):
        for (plan, _), (gradient, loss, first, last) in zip(plans, per_rank):
            assert gradient <= 1e-12 and loss <= 1e-9
            assert first == (plan.stages[0].rank == rank) and last == (plan.stages[-1].rank == rank)


def refusals(world, plan):
    mesh = DeviceMesh.from_group(world.group, "cpu", mesh_dim_names=("pp",))
    said = []
    for model, batch in ((Decoder(3), 8), (Decoder(), 7), (nn.Linear(1, 1), 8)):
        try:
            torchtitan.pipelining_fn(plan)(
                model,
                parallel_dims=Dims(mesh),
                training=SimpleNamespace(local_batch_size=batch),
                parallelism=SimpleNamespace(pipeline_parallel_microbatch_size=2),
                device=torch.device("cpu"),
                parallelize_fn=None,
                loss_fn=loss_fn,
            )
        except OctoPipeError as error:
            said.append(str(error))
    return said


def test_wrong_models_and_batches_are_one_line(two):
    for said in two.run(refusals, _plan("1f1b")):
        assert "3 blocks, the plan 6" in said[0]
        assert "set local_batch_size to 8" in said[1]
        assert "tok_embeddings" in said[2]


def test_settings_without_the_hook_or_why_not(tmp_path):
    found = titan_settings(_plan("interleaved", chunks=2))
    assert found.schedule == "PipelineScheduleMulti"
    assert found.parts[0] == ("tok_embeddings", "layers.0") and found.parts[-1][-2:] == ("norm", "lm_head")
    assert sum(len(p) for p in found.parts) == LAYERS + 1
    config = SimpleNamespace(parallelism=SimpleNamespace())
    exec(found.lines("schedule.csv"), {"config": config})
    assert config.parallelism.module_fqns_per_model_part == [list(p) for p in found.parts]
    assert config.parallelism.pipeline_parallel_schedule_csv == "schedule.csv"
    assert titan_settings(_plan("zb-v")).schedule == "ZBVZeroBubble"
    rng = random.Random(0)
    plan = random_plan(rng, num_ranks=2, num_layers=LAYERS, num_micro_batches=2, routes=1)
    with pytest.raises(OctoPipeError, match="pipelining_fn runs any plan"):
        titan_settings(plan)
