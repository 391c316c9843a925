"""Ops replayed from CUDA graphs give the gradients of ops run call by call; what cannot be captured is found out."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from captured_layers import (
    COUNT,
    TOKENS,
    WIDTH,
    Averaging,
    Block,
    Counting,
    Dropping,
    Half,
    Remembering,
    Tabling,
    data,
    layers,
    loss_fn,
    plan,
    same,
)
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.pipeline import Pipeline

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fused", "recompute"), [(False, False), (True, False), (False, True)])
def test_graphs_train_bit_for_bit_as_calls_do(dtype: torch.dtype, fused: bool, recompute: bool) -> None:
    made = layers(Block, Block, Half, Block, dtype=dtype)
    pipe = same(made, plan(6, fused=fused, recompute=recompute))
    kinds = 2 + recompute + (not fused)
    assert pipe.executor.ops.captured == kinds * 2 * COUNT
    assert next(p for name, p in pipe.named_parameters() if "unused" in name).grad is None


@needs_gpu
def test_graphs_under_autocast() -> None:
    same(layers(Block, Block), plan(4), autocast=torch.bfloat16)


@needs_gpu
@pytest.mark.parametrize(
    ("kind", "word"), [(Counting, "the host waits"), (Dropping, "draws random"), (Remembering, "changes its own")]
)
def test_what_cannot_be_captured_is_found_and_the_rest_is_captured(kind: type[nn.Module], word: str) -> None:
    pipe = same(layers(kind, Block, Block, Block), plan(6))
    reasons = pipe.executor.ops.reasons
    assert list(reasons) == [0] and word in reasons[0]


@needs_gpu
def test_a_table_that_was_made_once_does_not_keep_a_stage_from_its_graphs() -> None:
    pipe = same(layers(Tabling, Block, Block, Tabling), plan(6))
    assert not pipe.executor.ops.reasons


@needs_gpu
@pytest.mark.parametrize("preset", ["gpt-oss-20b", "gemma-3-27b", "nemotron-h-8b", "qwen3-30b-a3b", "llama3-8b"])
def test_layers_of_the_zoo_are_captured(preset: str) -> None:
    from octopipe.models.zoo import preset as model
    from octopipe.runtime.measure.one_layer import Layer
    from octopipe.runtime.measure.workload import Workload

    work = Workload(
        spec=model(preset).scaled(0.03, num_layers=8), tokens=64, device="cuda", precision="bf16-main-fp32", graphs=True
    )
    device = work.place(0)
    value = work.batch(device, 1)[0]
    for k, make in enumerate(work.layers(device)[:-1]):
        layer = Layer(make(), value, None, k == 0, work.precision, work.graphs)  # type: ignore[operator]
        layer.capture()
        assert layer._replayed is not None and not layer._replayed.reason, (k, layer._replayed.reason)
        value = layer.output


@pytest.mark.parametrize(("kind", "rests"), [(Block, True), (Tabling, True), (Remembering, False), (Averaging, False)])
def test_forwards_that_only_read_what_an_earlier_one_left_are_at_rest(kind: type[nn.Module], rests: bool) -> None:
    from octopipe.runtime.stages.stage import Stage as RunningStage

    torch.manual_seed(0)
    stage = RunningStage([kind()])
    value = torch.randn(2, WIDTH)
    stage.forward(value)
    stage.forward(value)
    stage.replay.observe()
    stage.forward(value)
    assert stage.replay.changes_state() is not rests


@pytest.mark.parametrize(("kind", "rests"), [(Block, True), (Tabling, True), (Remembering, False), (Averaging, False)])
def test_a_cache_that_is_filled_once_is_not_state_that_copies_would_keep_apart(
    kind: type[nn.Module], rests: bool
) -> None:
    from octopipe.runtime.stages.stage import Stage as RunningStage

    torch.manual_seed(0)
    stage = RunningStage([kind()])
    value = torch.randn(2, WIDTH)
    assert not stage.replay.settled()  # nothing is known before the first forward
    for _ in range(3):
        stage.forward(value)
    assert stage.replay.settled() is rests
    named = stage.replay.kept()  # buffers are averaged over copies, so they are not named
    assert (named == []) is (rests or kind is Averaging)


def test_what_watches_a_stage_is_not_taken_for_state_of_its_layers() -> None:
    """A layer that set an attribute is looked at in every forward, and with it the hooks by which draws are detected;
    these note the generators' state, which every layer's seed changes."""
    from octopipe.runtime.stages.capturable import _Draws
    from octopipe.runtime.stages.chain import StageChain
    from octopipe.runtime.stages.stage import Stage as RunningStage

    class Settling(Block):
        device: torch.device | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.device is None:
                self.device = x.device
            return super().forward(x)

    stage = RunningStage([Settling()])
    value = torch.randn(2, WIDTH)
    stage.forward(value)
    draws = _Draws(StageChain([(stage, False)]), True, SimpleNamespace(get_offset=lambda: 0))
    calls: list[int] = []
    draws._now = lambda: (calls.append(1) or len(calls), b"")  # type: ignore[method-assign]
    draws._was = draws._now()
    stage.replay.observe()
    with draws:
        stage.forward(value)
    assert len(calls) > 2 and not stage.replay.changes_state()


def test_stages_that_share_a_parameter_with_an_eager_one_stay_eager() -> None:
    from octopipe.runtime.stages.capturable import reasons_of_shared_parameters
    from octopipe.runtime.stages.chain import StageChain
    from octopipe.runtime.stages.stage import Stage as RunningStage

    a, b, c, d, e = (Block() for _ in range(5))
    members = {0: [a, b], 1: [b, c], 2: [c], 3: [d], 4: [e]}
    chains = {k: StageChain([(RunningStage(some), False)]) for k, some in members.items()}
    found = reasons_of_shared_parameters(chains, {0: "it draws random numbers"})
    assert sorted(found) == [1, 2] and "with stage 0" in found[1] and "with stage 1" in found[2]
    assert reasons_of_shared_parameters(chains, {3: "hooks"}) == {}


@needs_gpu
def test_a_stage_that_shares_its_layers_with_an_eager_one_is_not_captured() -> None:
    """A rank of a plan with copies may hold a layer in two stages. The eager one keeps the node that adds to a weight's
    gradient, of the default stream, while the other one would be captured."""
    made = layers(Block, Dropping, Block, Block)
    made[4] = made[1]  # stage 0: embedding, shared, dropout; stage 1: block, shared, head
    pipe = same(made, plan(6), captured=False, seed=3)
    reasons = pipe.executor.ops.reasons
    assert "draws random" in reasons[0] and "shares a parameter with stage 0" in reasons[1]


@needs_gpu
def test_a_stage_that_fails_only_while_captured_runs_by_calls() -> None:
    class Waiting(Block):
        def forward(self, x: Tensor) -> Tensor:
            torch.cuda.synchronize()  # torch's own watch does not see this one
            return super().forward(x)

    pipe = same(layers(Waiting, Block, Block, Block), plan(6))
    assert "cannot be captured" in pipe.executor.ops.reasons[0]
    assert torch.rand(3, device="cuda").unique().numel() == 3  # the generator draws as before


@needs_gpu
def test_a_graph_that_somebody_keeps_from_an_earlier_step_does_no_harm() -> None:
    class Keeping(Block):
        def __init__(self) -> None:
            super().__init__()
            object.__setattr__(self, "_kept", {})

        def __deepcopy__(self, memo: Any) -> Keeping:
            made = Keeping().to(self.up.weight.device)
            made.load_state_dict(self.state_dict())
            return made

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self._kept["last"] = out  # and with it the nodes that add to its weights' gradients, of the default stream
            return out

    pipe = same(layers(Keeping, Block, Block, Block), plan(6))
    assert list(pipe.executor.ops.reasons) in ([], [0])


@needs_gpu
def test_another_length_runs_by_calls_and_the_old_one_by_graphs_again() -> None:
    same(layers(Block, Block), plan(4), tokens=lambda step: 9 if step == 5 else TOKENS)


@needs_gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_first_micro_batch_of_another_length_leaves_the_others_right(autocast: torch.dtype | None) -> None:
    """Under autocast, the first one's graph casts the weights for the others."""
    made, found = layers(Block, Block, Block, Block), []
    for graphs in (False, True):
        pipe = Pipeline(copy.deepcopy(made), plan(6), loss_fn, device="cuda", cuda_graphs=graphs, autocast=autocast)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(9):
            batch, target = (x.chunk(COUNT) for x in data(step))
            cut = 9 if step in (6, 7) else TOKENS
            some = [[x[0][:, :cut].contiguous(), *x[1:]] for x in (batch, target)]
            losses.append(float(pipe.step(*some)))
            optimizer.step()
            optimizer.zero_grad()
        assert (pipe.executor.ops.captured > 0) == graphs
        found.append((losses, [p.detach().clone() for p in pipe.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@needs_gpu
@pytest.mark.parametrize("what", ["attribute", "weight", "training", "frozen", "hook"])
def test_what_changes_between_steps_is_never_answered_from_old_graphs(what: str) -> None:
    def change(step: int, pipe: Pipeline) -> None:
        if step != 6:
            return
        block = pipe.modules()[1]
        assert isinstance(block, Block)
        if what == "attribute":
            block.factor = -2.0
        elif what == "weight":
            block.up.weight.data = block.up.weight.data.clone() * 0.5
        elif what == "training":
            pipe.eval()
        elif what == "frozen":
            block.up.weight.requires_grad_(False)
        else:
            block.register_forward_hook(lambda module, given, out: 2 * out)

    same(layers(Block, Block), plan(4), between=change, steps=12)


@needs_gpu
def test_a_batch_that_takes_a_gradient_gets_it() -> None:
    made = layers(Block, Block)[1:]
    grads = []
    for graphs in (False, True):
        pipe = Pipeline(copy.deepcopy(made), plan(3), loss_fn, device="cuda", cuda_graphs=graphs)
        for step in range(7):
            torch.manual_seed(step)
            batch = torch.randn(COUNT * 2, TOKENS, WIDTH, device="cuda", requires_grad=True)
            pipe.step(batch, data(step)[1])
            pipe.zero_grad()
        assert batch.grad is not None
        grads.append(batch.grad.clone())
    assert torch.equal(*grads)


@needs_gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_evaluation_between_steps_changes_nothing(recompute: bool) -> None:
    """A change of the mode begins the checks of the first steps again, which wait for the device."""

    def look(step: int, pipe: Pipeline) -> None:
        pipe.eval()
        pipe.evaluate(*data(100 + step, 5))
        pipe.train()

    same(layers(Block, Block), plan(4, recompute=recompute), between=look)


@needs_gpu
@pytest.mark.parametrize("main_grads", [False, True])
def test_gradients_add_up_over_steps_without_zero_grad(main_grads: bool) -> None:
    """In float32 of bfloat16 layers, too."""
    found = []
    for graphs in (False, True):
        made = layers(Block, Block, dtype=torch.bfloat16 if main_grads else torch.float32)
        pipe = Pipeline(made, plan(4), loss_fn, device="cuda", cuda_graphs=graphs, main_grads=main_grads)
        for step in range(7):
            if step == 5:
                pipe.zero_grad()
            pipe.step(*data(step))
        found.append([p.grad.clone() for p in pipe.parameters() if p.grad is not None])
        assert {g.dtype for g in found[-1]} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_gpu
@pytest.mark.parametrize("inside", [True, False])
def test_inputs_are_copied_by_the_graph_or_before_its_launch_with_the_same_result(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step has a batch of its own, at an address of its own."""
    from octopipe.runtime.stages import graph_memory

    if not inside:
        monkeypatch.setattr(graph_memory, "graph_driver", lambda device: None)
    pipe = same(layers(Block, Block, Half, Block), plan(6))
    nodes = [cell.graphs["F"].inputs.first_node() for cell in pipe.executor.program.cells if cell.takes_batch]
    assert nodes and all((node is not None) == inside for node in nodes)


@needs_gpu
def test_a_graph_that_draws_random_numbers_is_left_to_torch() -> None:
    from octopipe.runtime.stages.graph_memory import Pool

    out = torch.zeros(64, device="cuda")
    plain, _ = Pool(torch.device("cuda", 0)).capture(lambda: out.add_(1))
    drawing, _ = Pool(torch.device("cuda", 0)).capture(lambda: out.uniform_())
    for graph, by_torch in ((plain, False), (drawing, True)):
        graph.replay_first()
        assert (graph.replay == graph._graph.replay) == by_torch
    before = out.clone()
    drawing.replay()
    assert not torch.equal(out, before)


@needs_gpu
def test_replays_allocate_nothing() -> None:
    pipe = Pipeline(layers(Block, Block), plan(4), loss_fn, device="cuda", cuda_graphs=True)
    for step in range(5):
        pipe.step(*data(step), reduce_loss=False)
    batch = data(9)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    pipe.executor.run(*pipe._inputs.split(*batch), step=9)
    # Two events' worth of slack: the seed of the loss's gradient is made once.
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 2


def test_graphs_are_refused_on_the_host() -> None:
    with pytest.raises(OctoPipeError, match="cuda_graphs on cpu"):
        Pipeline([nn.Linear(2, 2)] * 3, plan(3), loss_fn, device="cpu", cuda_graphs=True)


def test_stages_whose_ops_run_in_pairs_run_by_calls_and_say_why() -> None:
    """Nothing of a GPU is asked: watching two ops that change turns would mix up what each of them does."""
    from octopipe.runtime.stages.chain import StageChain
    from octopipe.runtime.stages.cuda_graphs import WATCHED, GraphedOps
    from octopipe.runtime.stages.stage import Stage as RunningStage

    chains = {k: StageChain([(RunningStage([Block()]), False)]) for k in range(2)}
    ops = GraphedOps(chains, None, torch.device("cpu"), {0})
    ops._phase = WATCHED
    ops.begin_step()
    assert ops.reasons[0] == "its ops run in pairs with others"
    assert "on the host" in ops.reasons[1]
    assert ops._watch is not None
    with ops._watch.op(0, seeded=False):
        chains[0].parts[0][0].forward(torch.randn(2, WIDTH))


def test_an_exchange_past_torch_distributed_counts_as_communication() -> None:
    from octopipe import exchange
    from octopipe.runtime.stages.capturable import _collectives
    from octopipe.runtime.turns import run_exchange

    class Arrived:
        def wait(self) -> int:
            return 3

    before = _collectives()
    with exchange():
        pass
    assert _collectives() == before + 1
    assert run_exchange(Arrived) == 3
    assert _collectives() == before + 2
