"""Pairs in a run: two ops take turns at exchanges, and gradients are those of one process."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from effort import some
from executor_models import WIDTH, Block
from mesh_checks import TOLERANCE, mesh_of, plan_for, worst_error_of
from ranks import PATIENCE_S
from test_mesh_experts import Experts
from test_pairs import with_pairs
from torch import nn
from twins import plain_gradients

from octopipe import OctoPipeError, Pipeline
from octopipe.plans.plan import Plan
from octopipe.runtime import turns
from octopipe.runtime.paired_ops import Portions
from octopipe.runtime.stages.wgrad import SplitMode, WeightQueue
from octopipe.runtime.turns import Turns, exchange, give_turn

# -- turns alone ----------------------------------------------------------------------------------------


def test_turns_change_at_every_exchange_and_nowhere_else() -> None:
    said: list[str] = []

    def op(name: str, exchanges: int):
        def run() -> None:
            for k in range(exchanges):
                said.append(f"{name}{k}")
                with exchange():
                    said.append(f"{name}x{k}")
            said.append(f"{name} ends")

        return run

    pairs = Turns()
    assert pairs.together(op("a", 2), op("b", 1), []) is None
    assert said == ["a0", "ax0", "b0", "bx0", "a1", "ax1", "b ends", "a ends"]
    said.clear()
    assert pairs.together(op("a", 0), op("b", 2), []) is None
    assert said == ["a ends", "b0", "bx0", "b1", "bx1", "b ends"]
    pairs.close()


@pytest.mark.parametrize(
    ("exchanges", "expected"),
    [
        (0, "F W0 W1 W2 W3"),
        (1, "Fx0 W0 W1 W2 W3 F"),
        (2, "Fx0 W0 W1 Fx1 W2 W3 F"),
        (3, "Fx0 W0 W1 Fx1 W2 Fx2 W3 F"),
        (6, "Fx0 W0 Fx1 W1 Fx2 W2 Fx3 W3 Fx4 Fx5 F"),
    ],
)
def test_a_w_runs_in_portions_beside_every_exchange_of_the_other_op(exchanges: int, expected: str) -> None:
    said: list[str] = []

    def forward() -> None:
        for k in range(exchanges):
            with exchange():
                said.append(f"Fx{k}")
        said.append("F")

    def weight() -> None:
        portions = Portions(4, exchanges, give_turn)
        for k in range(4):
            said.append(f"W{k}")
            portions(1)

    pairs = Turns()
    assert pairs.together(forward, weight, []) is None
    assert " ".join(said) == expected and pairs.handed[0] == exchanges
    pairs.close()


def test_each_op_finds_its_random_numbers_and_its_queue_again() -> None:
    mode = SplitMode([], WeightQueue())
    queues = WeightQueue(), WeightQueue()
    draws: dict[int, list[float]] = {0: [], 1: []}

    def op(side: int):
        def run() -> None:
            torch.manual_seed(side)
            mode.queue = queues[side]
            for _ in range(3):
                draws[side].append(float(torch.rand(())))
                with exchange():
                    pass
                assert mode.queue is queues[side]

        return run

    Turns().together(op(0), op(1), [mode])
    for side in (0, 1):
        torch.manual_seed(side)
        assert draws[side] == [float(torch.rand(())) for _ in range(3)]


@pytest.mark.parametrize("side", [0, 1])
def test_an_op_that_fails_ends_its_partner_and_says_why(side: int) -> None:
    ended = threading.Event()

    def fails() -> None:
        with exchange():
            pass
        raise ValueError("a wrong shape")

    def waits() -> None:
        try:
            for _ in range(100):
                with exchange():
                    pass
        finally:
            ended.set()

    pairs = Turns()
    ops = (fails, waits) if side == 0 else (waits, fails)
    assert pairs.together(*ops, []) == side
    assert str(pairs.error) == "a wrong shape" and ended.is_set()
    assert turns._running is None


def test_an_exchange_outside_a_pair_changes_nothing() -> None:
    with exchange():
        pass


# -- in a pipeline --------------------------------------------------------------------------------------


def paired(plan: Plan, seed: int) -> Plan:
    found = with_pairs(random.Random(seed), plan, share=1.0)
    assert found.pairs
    return found


def experts_in_pairs(world, plan: Plan):
    mesh = mesh_of((2, 2), ("ep", "pp"))
    group, place = mesh.get_group("ep"), mesh.get_local_rank("ep")
    torch.manual_seed(3)
    whole = [Block().double() if k % 2 else Experts() for k in range(6)]
    mine = [Block().double() if k % 2 else Experts(group) for k in range(6)]
    for a, b in zip(whole, mine, strict=True):
        state = a.state_dict()
        if isinstance(a, Experts):
            b.experts = nn.Parameter(a.experts.detach()[place : place + 1].clone())
            state["experts"] = b.experts.detach()
        b.load_state_dict(state)
    count = plan.num_micro_batches
    data = [torch.randn(2, 5, WIDTH, dtype=torch.float64) for _ in range(2 * count)]
    expected, losses = plain_gradients(whole, data, data, F.mse_loss)
    handed = [0]
    before = turns._Pair.hand_over

    def counted(pair: turns._Pair) -> None:
        handed[0] += 1
        before(pair)

    turns._Pair.hand_over = counted
    try:
        with Pipeline(mine, plan, F.mse_loss, mesh=mesh, sharded={"ep": ["*.experts"]}, timeout_s=PATIENCE_S) as pipe:
            part = slice(pipe.world.replica * count, (pipe.world.replica + 1) * count)
            errors = []
            for _ in range(2):
                for p in pipe.parameters():
                    p.grad = None
                loss = float(pipe.step(data[part], data[part]))
                here = {n: g[place : place + 1] if n.endswith("experts") else g for n, g in expected.items()}
                errors += [worst_error_of(pipe, here), abs(loss - sum(losses) / len(losses))]
    finally:
        turns._Pair.hand_over = before
    return max(errors), handed[0]


@pytest.mark.parametrize(
    "case", some([("zb-v", 2), ("interleaved", 3), ("1f1b", 0), ("zb-h1", 1), ("gpipe", 4)], quick=2), ids=str
)
def test_pairs_over_ep_give_the_gradients_of_one_process(case: tuple[str, int], four) -> None:
    name, seed = case
    plan = paired(plan_for(name, num_layers=6), seed)
    found = four.run(experts_in_pairs, plan)
    assert max(error for error, _ in found) <= TOLERANCE
    assert sum(handed for _, handed in found) > 0, "no exchange was found"


def dropout_in_pairs(world, plan: Plan):
    """Layers with random draws: pairs and single ops draw the same."""
    losses = []
    for each in (plan, replace(plan, pairs=frozenset())):
        torch.manual_seed(5)
        layers = [nn.Sequential(Block().double(), nn.Dropout(0.3)) for _ in range(6)]
        data = [torch.randn(2, 5, WIDTH, dtype=torch.float64) for _ in range(plan.num_micro_batches)]
        with Pipeline(layers, each, F.mse_loss, seed=7, timeout_s=PATIENCE_S) as pipe:
            losses.append(float(pipe.step(data, data)))
    return losses


def test_pairs_draw_the_random_numbers_of_single_ops(two) -> None:
    for first, second in two.run(dropout_in_pairs, paired(plan_for("zb-v", num_layers=6), 9)):
        assert first == second


def failing_in_pairs(world, plan: Plan):
    class Fails(nn.Module):
        def __init__(self, when: int):
            super().__init__()
            self.when, self.calls = when, 0
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x):
            self.calls += 1
            if self.calls == self.when:
                raise ValueError("no such token")
            return x * self.weight

    layers = [Fails(3 if k == 1 else 10**9) for k in range(6)]
    data = [torch.randn(2, 5, WIDTH, dtype=torch.float64) for _ in range(plan.num_micro_batches)]
    with Pipeline(layers, plan, F.mse_loss, timeout_s=PATIENCE_S) as pipe:
        try:
            pipe.step(data, data)
        except (OctoPipeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_inside_a_pair_is_told_in_its_own_words(two) -> None:
    said = two.run(failing_in_pairs, paired(plan_for("1f1b", num_layers=6), 0))
    assert any("no such token" in words for words in said), said
