"""Every private name of PyTorch's that the torch engine uses is there and does what the engine takes for granted."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest

torch = pytest.importorskip("torch")

from torch.autograd.graph import get_gradient_edge  # noqa: E402
from torch.distributed.pipelining import PipelineStage, schedules  # noqa: E402

from octopipe.torch_engine import torch_private  # noqa: E402
from octopipe.torch_engine.engine import PlanSchedule  # noqa: E402
from octopipe.torch_engine.stages import PlanStage  # noqa: E402
from octopipe.views.export.pytorch import actions_of_version  # noqa: E402


def test_the_installed_version_has_the_actions_that_its_number_promises():
    assert torch_private.known_actions() == actions_of_version(version("torch"))


def test_actions_are_read_from_text_and_know_whether_they_compute():
    words = [f"1{kind}" + ("" if "SHARD" in kind or "GRAD" in kind else "2") for kind in sorted(_plain_kinds())]
    actions = torch_private.parsed_actions(words)
    assert [str(a) for a in actions] == words
    assert {str(a) for a in actions if a.is_compute_op} == {"1F2", "1B2", "1I2", "1W2"}


def _plain_kinds():
    return torch_private.known_actions() - {"OVERLAP_F_B"}


@pytest.mark.parametrize(
    ("cls", "name", "parameters"),
    [
        (schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", {"actions", "format"}),
        (schedules._PipelineScheduleRuntime, "_maybe_get_loss", {"stage", "mb_index"}),
        (schedules._PipelineScheduleRuntime, "_step_microbatches", {"arg_mbs", "kwarg_mbs", "target_mbs", "losses"}),
        (PipelineStage, "clear_runtime_states", set()),
        (PipelineStage, "forward_one_chunk", {"fwd_chunk_id", "args", "kwargs"}),
        (PipelineStage, "backward_one_chunk", {"bwd_chunk_id", "loss", "full_backward", "last_backward"}),
        (PipelineStage, "backward_weight_one_chunk", {"bwd_chunk_id", "last_backward"}),
    ],
)
def test_methods_that_are_called_or_overridden_take_what_they_took(cls, name, parameters):
    assert parameters <= set(inspect.signature(getattr(cls, name)).parameters)
    ours = PlanSchedule if cls is schedules._PipelineScheduleRuntime else PlanStage
    if name in vars(ours):  # an override takes whatever the original does
        mine = inspect.signature(vars(ours)[name])
        mine.bind(*(["self"] + [None] * sum(p.default is p.empty for p in _named(cls, name))))


def _named(cls, name):
    return [
        p for p in list(inspect.signature(getattr(cls, name)).parameters.values())[1:] if p.kind is not p.VAR_KEYWORD
    ]


def test_the_trial_of_the_first_step_is_overridden_where_there_is_one():
    """`_compute_input_grads` came with the versions that measure strides before the first step."""
    number = tuple(map(int, version("torch").split(".")[:2]))
    assert hasattr(PipelineStage, "_compute_input_grads") == (number >= (2, 12))


def test_a_stage_is_given_the_finder_of_meshes_where_it_takes_one():
    taken = "get_mesh" in inspect.signature(PipelineStage.__init__).parameters
    assert ("get_mesh" in torch_private.mesh_argument(print)) == taken


def test_stages_greet_their_neighbours_in_the_type_that_is_expected():
    class Greeting:
        def __init__(self, peer, tensor):
            self.group_peer, self.tensor = peer, tensor

    class Stage:
        group_rank = 1

        def _get_init_p2p_neighbors_ops(self):
            return [Greeting(0, torch.tensor(3)), Greeting(1, torch.zeros(1)), Greeting(2, torch.zeros(1))]

    stage = Stage()
    torch_private.repair_first_contact(stage)
    found = stage._get_init_p2p_neighbors_ops()
    assert [op.group_peer for op in found] == [0, 2]
    assert all(op.tensor.dtype == torch.float32 and op.tensor.shape == (1,) for op in found)
    torch_private.repair_first_contact(object())  # newer versions greet nobody


def test_backward_adds_up_gradients_from_tensors_and_from_edges():
    weight = torch.ones(3, requires_grad=True)
    out = weight * 2.0
    torch_private.run_backward([out, (weight * 3.0).sum(), torch.ones(2)], [torch.full((3,), 5.0), None, None])
    assert weight.grad.tolist() == [13.0] * 3
    edge = get_gradient_edge(weight * 4.0)
    torch_private.run_backward([edge], [torch.ones(3)])
    assert weight.grad.tolist() == [17.0] * 3
    torch_private.run_backward((weight * 1.0).sum())
    assert weight.grad.tolist() == [18.0] * 3


def test_attributes_that_are_read_are_set_by_the_constructors():
    schedule_source = inspect.getsource(schedules)
    for name in ("_n_microbatches", "_has_backward", "_stages", "pipeline_order"):
        assert f"self.{name}" in schedule_source
    stage_source = inspect.getsource(inspect.getmodule(PipelineStage))
    for name in ("bwd_cache", "has_backward", "submod", "group_rank", "group_size", "is_last"):
        assert f"self.{name}" in stage_source or f"def {name}" in stage_source
