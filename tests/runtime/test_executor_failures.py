"""What goes wrong elsewhere, and what must happen when something goes wrong here."""

from __future__ import annotations

import inspect
import os
import time

import pytest
from effort import some

torch = pytest.importorskip("torch")
from executor_models import make  # noqa: E402
from ranks import PATIENCE_S, Ranks  # noqa: E402
from torch import nn  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.plans.plan import Plan, Stage, parse_orders  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

TOLERANCE = 1e-12


def _plan(orders, num_layers=8, num_micro_batches=3, cut=4, **more):
    stages = (Stage(first=0, stop=cut, rank=0), Stage(first=cut, stop=num_layers, rank=1))
    return Plan(
        num_layers=num_layers,
        num_ranks=2,
        num_micro_batches=num_micro_batches,
        stages=stages,
        orders=parse_orders(orders),
        **more,
    ).check()


def _loss(output, target):
    return (output - target).square().mean()


# -- failures of PyTorch's pipelining (design: "The executor") ------------------------------------------


def out_of_order(world):
    plan = _plan([["0F0", "0F1", "0F2", "0B1", "0B2", "0B0"], ["1F2", "1F0", "1F1", "1B1", "1B2", "1B0"]])
    case = make("shapes", 3)
    expected, losses = plain_gradients(*case)
    with Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        pipe.step(case.inputs, case.targets)
    return worst_error(pipe, expected), max(abs(a - b) for a, b in zip(pipe.losses.tolist(), losses))


def test_last_stage_may_run_forwards_out_of_micro_batch_order(two):
    for gradient, loss in two.run(out_of_order):
        assert gradient <= TOLERANCE
        assert loss <= TOLERANCE


def kinds(world, kind, split):
    plan = build_plan("1f1b", CostTable.uniform(num_layers=8), 2, 4, split_backward=split)
    case = make(kind, 4)
    expected, _ = plain_gradients(*case)
    with Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        pipe.step(case.inputs, case.targets)
    return worst_error(pipe, expected)


@pytest.mark.parametrize("kind", ["views", "pair", "tied", "shapes"])
def test_views_ties_and_shapes_survive_the_split(kind, two):
    """Outputs that are views break PyTorch's split, ties are scaled twice, unequal shapes abort."""
    assert max(two.run(kinds, kind, True)) <= TOLERANCE


def buffers(world, num_micro_batches):
    plan = build_plan("1f1b", CostTable.uniform(num_layers=4), 2, num_micro_batches)
    layers = [nn.Linear(64, 64) for _ in range(4)]
    data = [torch.randn(32, 64) for _ in range(num_micro_batches)]
    with Pipeline(layers, plan, _loss, group=world, timeout_s=PATIENCE_S) as pipe:
        for _ in range(3):
            pipe.step(data, data)
    return pipe.transport.delivery.pool.held_bytes / (32 * 64 * 4)


def test_receive_buffers_grow_with_what_is_in_flight_not_with_the_micro_batches(two):
    few, many = max(two.run(buffers, 4)), max(two.run(buffers, 32))
    assert many == few
    assert few <= 4


# -- shapes that change from step to step, large and small ----------------------------------------------


class Grow(nn.Module):
    """As many rows, another width or nesting, depending on the input."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        x = x if torch.is_tensor(x) else x[0]
        y = torch.tanh(self.inner(x))
        return (y, y[:0], x.shape[0]) if x.shape[0] % 2 else y


def changing(world):
    plan = _plan([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], 4, 2, 2)
    torch.manual_seed(3)
    layers = [Grow() for _ in range(4)]
    loss_fn = lambda o, t: (o if torch.is_tensor(o) else o[0]).square().mean() + 0 * t  # noqa: E731
    worst = 0.0
    zero = [torch.zeros(())] * 2
    with Pipeline(layers, plan, loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        # Rows per micro-batch: below and above what rides in a header, growing, shrinking, empty.
        for rows in ((2, 3), (300, 2), (300, 301), (300, 301), (5000, 4), (4, 5000), (1, 1), (600, 601), (2, 600)):
            inputs = [torch.randn(n, 8, dtype=torch.float64) for n in rows]
            expected, losses = plain_gradients(layers, inputs, zero, loss_fn)
            loss = pipe.step(inputs, zero)
            worst = max(worst, worst_error(pipe, expected), abs(float(loss) - sum(losses) / 2))
            pipe.zero_grad()
    return worst


def test_forms_may_change_at_every_step(two):
    torch.manual_seed(0)
    assert max(two.run(_seeded, changing)) <= TOLERANCE


def _seeded(world, function):
    torch.manual_seed(11)
    return function(world)


class Passes(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, value):
        first = next(iter(value.values()))
        return {**value, next(iter(value)): first * self.scale}


def every_dtype(world, rows):
    """What leaves the first rank arrives at the last one, bit for bit."""
    plan = _plan([["0F0", "0B0"], ["1F0", "1B0"]], 2, 1, 1)
    value = {"x": torch.randn(rows, 4)}
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool):
        value[str(dtype)] = torch.randint(0, 2, (rows, 3)).to(dtype)
    value |= {"complex": torch.randn(rows, 2, dtype=torch.complex64), "empty": torch.zeros(0, 3), "none": None}
    value |= {f"text {k}": "a constant that makes the description long " * 3 for k in range(40 if rows > 9 else 0)}
    value |= {"strided": torch.randn(3, rows).T, "zero": torch.tensor(3.5)}

    def loss_fn(output, target):
        for name, want in value.items():
            got = output[name]
            same = torch.equal(got, want) and got.dtype == want.dtype if torch.is_tensor(want) else got == want
            assert same, name
        return output["x"].square().mean() + output["strided"].mean()

    with Pipeline([Passes(), Passes()], plan, loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        for _ in range(3):
            pipe.step([value], [None])
    return True


@pytest.mark.parametrize("rows", [2, 500])
def test_every_dtype_and_nesting_crosses_unchanged(rows, two):
    assert all(two.run(_seeded_rows, rows))


def _seeded_rows(world, rows):
    torch.manual_seed(5)
    return every_dtype(world, rows)


# -- when something breaks ------------------------------------------------------------------------------


HANG_TIMEOUT_S = 30.0
"""Waited out, and longer than a busy machine takes for a step of this size."""


def steps_until(world, behaviour):
    """Rank 1 misbehaves in the second step; returns what rank 0 says."""
    plan = _plan([["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]], 4, 3, 2)

    class Misbehaves(nn.Linear):
        count = 0

        def forward(self, x):
            Misbehaves.count += 1
            if world.rank == 1 and Misbehaves.count == 5:
                if behaviour == "dies":
                    os._exit(7)
                if behaviour == "hangs":
                    time.sleep(PATIENCE_S)
                if behaviour == "raises":
                    raise ValueError("a bad layer")
            return super().forward(x)

    layers = [nn.Linear(4, 4), nn.Linear(4, 4), Misbehaves(4, 4), nn.Linear(4, 4)]
    data = [torch.randn(2, 4) for _ in range(3)]
    # A dead or failed peer must be noticed long before the timeout; only a hung one takes it.
    timeout_s = HANG_TIMEOUT_S if behaviour == "hangs" else PATIENCE_S
    with Pipeline(layers, plan, _loss, group=world, timeout_s=timeout_s) as pipe:
        start = time.monotonic()
        try:
            for _ in range(3):
                pipe.step(data, data)
                start = time.monotonic()
        except (OctoPipeError, ValueError) as error:
            return type(error).__name__, str(error), time.monotonic() - start
    return "none", "", 0.0


def test_killed_rank_is_noticed_and_named():
    ranks = Ranks(2)
    ranks.start(steps_until, "dies")
    (worked, result), dead = ranks.results()
    ranks.close()
    assert worked, result
    name, text, seconds = result
    assert name == "PeerError"
    assert "the peer is gone" in text and "from rank 1" in text and "micro-batch 1" in text
    assert seconds < PATIENCE_S
    assert dead == (False, "dead")
    assert all(not p.is_alive() for p in ranks.processes)


def test_hung_rank_is_named_with_its_pending_op():
    ranks = Ranks(2)
    ranks.start(steps_until, "hangs")
    ((worked, result),) = ranks.results(of=[0])
    ranks.kill()
    assert worked, result
    name, text, seconds = result
    assert name == "PeerError"
    assert f"within {HANG_TIMEOUT_S:g} s" in text
    assert "input gradient of 1B1 (micro-batch 1) from rank 1" in text
    assert "rank 1: runs 1F1" in text
    assert seconds >= HANG_TIMEOUT_S


def test_error_in_a_layer_is_raised_there_and_reported_elsewhere():
    ranks = Ranks(2)
    ranks.start(steps_until, "raises")
    (worked, result), (_, other) = ranks.results()
    ranks.close()
    assert worked, result
    assert "rank 1: failed in 1F1: a bad layer" in result[1]
    assert other[0] == "ValueError"


def fails_and_goes_on(world, plan, where, transport, large):
    """A layer raises in the second step; then the pipeline says so, and recovers when asked to."""
    case = make("plain", plan.num_micro_batches)
    inputs = [x.repeat(40 if large else 1, 1) for x in case.inputs]
    targets = [y.repeat(40 if large else 1, 1) for y in case.targets]
    expected, losses = plain_gradients(case.layers, inputs, targets, case.loss_fn)
    out = []
    with Pipeline(case.layers, plan, case.loss_fn, group=world, transport=transport, timeout_s=PATIENCE_S) as pipe:
        pipe.step(inputs, targets)
        pipe.zero_grad()
        for number in (1, 2):
            calls = iter(range(100))

            def at(module, args, calls=calls, number=number):
                if next(calls) == number:
                    raise ValueError("a bad batch")

            hook = case.layers[where].register_forward_pre_hook(at)
            begin = time.monotonic()
            try:
                pipe.step(inputs, targets)
            except (OctoPipeError, ValueError) as error:
                out.append(str(error))
            hook.remove()
            assert time.monotonic() - begin < PATIENCE_S, "the others waited for their timeout"
            try:
                pipe.step(inputs, targets)
            except OctoPipeError as error:
                out.append(str(error))
            world.gather(None)
            pipe.recover()
            pipe.zero_grad()
            for _ in range(2):
                pipe.zero_grad()
                loss = float(pipe.step(inputs, targets))
            assert worst_error(pipe, expected) <= TOLERANCE
            assert abs(loss - sum(losses) / len(losses)) <= TOLERANCE
    return out


@pytest.mark.parametrize(
    ("name", "where", "transport", "large"),
    [
        pytest.param("1f1b", 6, None, False, marks=pytest.mark.slow),
        ("chimera", 2, None, False),
        ("zb-h1", 6, None, False),
        ("1f1b", 1, None, True),
    ],
)
def test_a_step_that_raised_is_told_at_once_and_recovered_from(name, where, transport, large):
    ranks = Ranks(2)
    plan = build_plan(name, CostTable.uniform(num_layers=8), 2, 6)
    try:
        results = ranks.run(fails_and_goes_on, plan, where, transport, large)
    finally:
        ranks.close()
    for texts in results:
        assert len(texts) == 4
        for text in (texts[1], texts[3]):
            assert "was interrupted" in text and "call recover() on all ranks" in text
    assert any("a bad batch" in texts[0] for texts in results)


def mistaken(world):
    """A call without its batch harms nothing: nothing was sent."""
    plan = build_plan("1f1b", CostTable.uniform(num_layers=8), 2, 4)
    case = make("plain", 4)
    with Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
        if world.rank == 0:
            for call in (pipe.step, pipe.evaluate):
                with pytest.raises(OctoPipeError, match="give it the batch"):
                    call()
        return float(pipe.step(case.inputs, case.targets))


def test_a_call_that_is_refused_leaves_the_pipeline_usable(two):
    assert len(set(two.run(mistaken))) == 1


# -- the first step -------------------------------------------------------------------------------------


def fails_at_first(world, where, backward, loss_kind, again):
    """The very first step raises; what everybody hears, how long it took, and whether things go on."""
    torch.manual_seed(0)
    case = make("plain", 4)
    expected, _ = plain_gradients(*case)
    plan = build_plan("1f1b", CostTable.uniform(num_layers=8), 2, 4)

    def bad(*_):
        raise ValueError("a bad start")

    loss_fn = case.loss_fn
    hooks = []
    if loss_kind:
        loss_fn = {"dict": lambda o, t: {"loss": o.sum()}, "rows": lambda o, t: o.square()}[loss_kind]
    elif backward:
        hooks.append(case.layers[where].register_full_backward_hook(bad))
    else:
        hooks.append(case.layers[where].register_forward_pre_hook(bad))
    out = []
    pipe = Pipeline(case.layers, plan, loss_fn, group=world, timeout_s=PATIENCE_S)
    begin = time.monotonic()
    try:
        pipe.step(case.inputs, case.targets)
    except (OctoPipeError, ValueError) as error:
        out.append(str(error))
    out.append(time.monotonic() - begin)
    for hook in hooks:
        hook.remove()
    if again == "recover" and not loss_kind:
        pipe.recover()
    else:
        pipe.close()
        pipe = Pipeline(case.layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S)
    pipe.zero_grad()
    pipe.step(case.inputs, case.targets)
    out.append(worst_error(pipe, expected))
    pipe.close()
    return out


@pytest.mark.parametrize("again", some(["recover", "new"]))
@pytest.mark.parametrize(
    ("where", "backward", "loss_kind"),
    [(1, False, ""), (6, False, ""), (6, True, ""), (0, False, "dict"), (0, False, "rows")],
)
def test_an_error_in_the_first_step_is_told_at_once_and_something_new_works(where, backward, loss_kind, again):
    ranks = Ranks(2)
    try:
        results = ranks.run(fails_at_first, where, backward, loss_kind, again)
    finally:
        ranks.close()
    word = "one scalar tensor per micro-batch" if loss_kind else "a bad start"
    for text, seconds, error in results:
        assert word in text
        assert seconds < PATIENCE_S, "the others waited for their timeout"
        assert error <= TOLERANCE


class Reentrant(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)


class RunsOnce(nn.Module):
    """Its forward raises in the plain run that verify makes, whatever is put back before it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x):
        if any(frame.function == "compare" for frame in inspect.stack()):
            raise ValueError("once is enough")
        return self.linear(x)


def verified(world, kind):
    case = make("plain", 4)
    layers = list(case.layers)
    expected, _ = plain_gradients(*case)
    if kind == "reentrant":
        layers[2], layers[6] = Reentrant(layers[2]), Reentrant(layers[6])
    else:
        layers[6] = RunsOnce()
    plan = build_plan("1f1b", CostTable.uniform(num_layers=8), 2, 4)
    with Pipeline(layers, plan, case.loss_fn, group=world, timeout_s=PATIENCE_S, verify=True) as pipe:
        try:
            pipe.step(case.inputs, case.targets)
        except OctoPipeError as error:
            return str(error)
        return {
            name.replace("inner.", ""): p.grad - expected[name.replace("inner.", "")]
            for name, p in pipe.named_parameters()
        }


def test_verify_runs_through_reentrant_checkpoints(two):
    for apart in two.run(verified, "reentrant"):
        assert apart and max(float(t.abs().max()) for t in apart.values()) <= TOLERANCE


def test_a_plain_run_that_raises_is_every_ranks_error():
    ranks = Ranks(2)
    try:
        texts = ranks.run(verified, "once")
    finally:
        ranks.close()
    for text in texts:
        assert "cannot run a second time (ValueError: once is enough)" in text
