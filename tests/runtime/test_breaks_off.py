"""A step that breaks off on one rank ends on all of them at once, on one host and between hosts, in whatever they wait.

Between hosts nothing goes through shared memory: the ranks here are told that there is none
(`tests/runtime/test_two_hosts.py` has real ones). The timeout is far longer than anything may take.
"""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from executor_models import make  # noqa: E402
from ranks import PATIENCE_S, Ranks  # noqa: E402
from twins import plain_gradients, worst_error  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.wire.transports import mail  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

COUNT, LAYERS, TIMEOUT_S = 4, 8, PATIENCE_S
TOLERANCE = 1e-12


def bad(*_):
    raise ValueError("a bad start")


def spoil(case, place, system):
    """Make one layer fail where it stands; the hooks that do so."""
    if place == "forward of the first layer":
        return [case.layers[0].register_forward_pre_hook(bad)]
    if place == "forward of the last layer":
        return [case.layers[-1].register_forward_pre_hook(bad)]
    if place == "backward of the last layer":
        return [case.layers[-1].register_full_backward_hook(bad)]
    # The very last op of a split plan: everybody else may have finished. Copies share the micro-batches.
    weight = next(case.layers[-1].parameters())
    calls = iter(range(1, 100))

    def late(_):
        if next(calls) == (COUNT // 2 if system == "chimera" else COUNT):
            bad()

    return [weight.register_post_accumulate_grad_hook(late)]


def breaks_off(world, place, system, dp, by_mail, again):
    supported = mail.supported
    if not by_mail:
        mail.supported = lambda: False
    try:
        return _breaks_off(world, place, system, dp, again)
    finally:
        mail.supported = supported


def _breaks_off(world, place, system, dp, again):
    torch.manual_seed(0)
    case = make("plain", COUNT)
    expected, losses = plain_gradients(*case)
    groups = {"group": world}
    if dp > 1:
        mesh = dist.init_device_mesh("cpu", (dp, world.size // dp), mesh_dim_names=("dp", "pp"))
        groups = {"mesh": mesh}
    plan = build_plan(system, CostTable.uniform(num_layers=LAYERS), world.size // dp, COUNT)
    # One pipeline of several, one rank of it.
    hooks = spoil(case, place, system) if world.rank // (world.size // dp) == 0 else []
    pipe = Pipeline(case.layers, plan, case.loss_fn, timeout_s=TIMEOUT_S, **groups)
    begin, said = time.monotonic(), ""
    try:
        pipe.step(case.inputs, case.targets)
    except (OctoPipeError, ValueError) as error:
        said = str(error)
    waited = time.monotonic() - begin
    for hook in hooks:
        hook.remove()
    # The user's own groups are whole, whatever was closed.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert float(total) == world.size
    if again == "recover":
        pipe.recover()
    else:
        pipe.close()
        pipe = Pipeline(case.layers, plan, case.loss_fn, timeout_s=TIMEOUT_S, **groups)
    pipe.zero_grad()
    loss = float(pipe.step(case.inputs, case.targets))
    error = max(worst_error(pipe, expected), abs(loss - sum(losses) / COUNT))
    pipe.close()
    return said, waited, error


def check(results):
    for said, waited, error in results:
        assert "a bad start" in said
        assert waited < TIMEOUT_S, f"waited {waited:.0f} s: {said}"
        assert error <= TOLERANCE


PLACES = (
    "forward of the first layer",
    "forward of the last layer",
    "backward of the last layer",
    "the last weight gradient",
)


@pytest.mark.parametrize("by_mail", [True, False], ids=["one host", "two hosts"])
@pytest.mark.parametrize(("place", "system"), [(PLACES[1], "1f1b"), (PLACES[3], "zb-h1")])
def test_everybody_hears_of_it_at_once_and_goes_on(place, system, by_mail, two):
    check(two.run(breaks_off, place, system, 1, by_mail, "recover"))


@pytest.mark.slow
@pytest.mark.parametrize("again", ["recover", "new"])
@pytest.mark.parametrize("by_mail", [True, False], ids=["one host", "two hosts"])
@pytest.mark.parametrize("system", ["1f1b", "zb-v", "chimera"])
@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_breaks(place, system, by_mail, again, two):
    check(two.run(breaks_off, place, system, 1, by_mail, again))


@pytest.mark.slow
@pytest.mark.parametrize("again", ["recover", "new"])
@pytest.mark.parametrize("by_mail", [True, False], ids=["one host", "two hosts"])
@pytest.mark.parametrize("place", PLACES)
def test_the_other_pipelines_of_data_parallelism_hear_of_it_too(place, by_mail, again):
    ranks = Ranks(4)
    try:
        check(ranks.run(breaks_off, place, "zb-h1", 2, by_mail, again))
    finally:
        ranks.close()
