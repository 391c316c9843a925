"""Checkpoints by layer: whatever plan wrote them, whatever plan reads them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from executor_models import NUM_LAYERS, make  # noqa: E402
from ranks import Ranks, shared_ranks  # noqa: E402

from octopipe.cost import CostTable  # noqa: E402
from octopipe.errors import OctoPipeError  # noqa: E402
from octopipe.plan import Op, Plan, Stage  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.world import World  # noqa: E402
from octopipe.systems import build_plan  # noqa: E402
from octopipe.training.checkpoint import latest, load_checkpoint, save_checkpoint  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture
def two() -> Ranks:
    return shared_ranks(2)


def _single() -> Plan:
    ops = tuple(Op(0, kind, m) for m in range(4) for kind in "FB")
    stage = Stage(first=0, stop=NUM_LAYERS, rank=0)
    return Plan(num_layers=NUM_LAYERS, num_ranks=1, num_micro_batches=4, stages=(stage,), orders=(ops,))


def train(world, plan, folder, load, kind, steps=2, seed=0):
    """Load if asked, train some steps, save; returns the losses."""
    case = make(kind, 4, seed=seed)
    inputs, targets = make(kind, 4)[1:3]
    with Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=20) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        if load is not None:
            pipe.step_number = load_checkpoint(load, pipe, optimizer)["step"]
        losses = []
        for _ in range(steps):
            losses.append(float(pipe.step(inputs, targets)))
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(folder, pipe, optimizer, step=pipe.step_number)
    return losses


@pytest.mark.parametrize("kind", ["tied", "dropout"])
@pytest.mark.parametrize(("first", "second"), [("1f1b", "chimera"), ("chimera", "alone"), ("alone", "interleaved")])
def test_a_run_goes_on_under_another_plan(kind, first, second, tmp_path, two):
    costs = CostTable.uniform(num_layers=NUM_LAYERS)

    def run(name, load, seed):
        if name == "alone":
            return train(World(None), _single(), tmp_path, load, kind, seed=seed)
        return two.run(train, build_plan(name, costs, 2, 4), tmp_path, load, kind, 2, seed)[0]

    straight = train(World(None), _single(), tmp_path / "straight", None, kind, steps=4)
    assert run(first, None, 0) == pytest.approx(straight[:2], rel=1e-11)
    # Other starting weights: everything must come from the checkpoint.
    assert run(second, latest(tmp_path), 1) == pytest.approx(straight[2:], rel=1e-11)
    assert latest(tmp_path).name == "step-00000004"


def test_state_is_keyed_by_layer_whatever_the_plan(two):
    plans = [build_plan(name, CostTable.uniform(num_layers=NUM_LAYERS), 2, 4) for name in ("1f1b", "chimera")]
    alone = set(Pipeline(make("moe", 4).layers, _single(), make("moe", 4).loss_fn, group=World(None)).state_dict())
    for plan in plans:
        assert set().union(*two.run(keys, plan)) == alone


def keys(world, plan):
    case = make("moe", 4)
    with Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=20) as pipe:
        state = pipe.state_dict()
        pipe.load_state_dict({**state, "99.weight": torch.zeros(1)})
    return set(state)


def test_damaged_layers_are_named(tmp_path):
    train(World(None), _single(), tmp_path, None, "plain")
    path = latest(tmp_path)
    (path / "layer-0003.pt").write_bytes(b"nonsense")
    with pytest.raises(OctoPipeError, match=r"layer-0003\.pt"):
        train(World(None), _single(), tmp_path, path, "plain")
    (path / "layer-0003.pt").unlink()
    with pytest.raises(OctoPipeError, match=r"layer-0003\.pt: no such file"):
        train(World(None), _single(), tmp_path, path, "plain")
