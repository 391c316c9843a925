"""What belongs together across ranks: hidden, shared and replaced weights, and wrapped layers.

Every case against plain torch in one process, or refused by name.
"""

from __future__ import annotations

import copy
import functools

import pytest
from effort import some

torch = pytest.importorskip("torch")
from mesh_checks import mesh_of  # noqa: E402
from ranks import PATIENCE_S, Ranks  # noqa: E402
from small_pipelines import (  # noqa: E402
    COUNT,
    EXACT,
    LAYERS,
    WIDTH,
    data,
    linears,
    plainly,
    plan_of,
    square,
    worst,
)
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.world import World  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

# -- weights that nobody registers ----------------------------------------------------------------------


class Hides(nn.Module):
    """Multiplies by another layer's weight without registering it."""

    def __init__(self, other, how):
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        if how == "list":
            self.held = [other]
        elif how == "closure":
            self.held = lambda: other
        else:
            self.held = {"deep": (None, [other])}
        self.how = how

    def forward(self, x):
        held = {"list": lambda: self.held[0], "closure": self.held, "dict": lambda: self.held["deep"][1][0]}[self.how]()
        return torch.tanh(self.own(x)) @ held.weight


def hidden(world, how, at, source, name, dp):
    layers = linears()
    layers[at] = Hides(layers[source], how)
    twin = copy.deepcopy(layers)
    total = COUNT * (2 if dp else 1)
    plainly(twin, square, data(total))
    options = {"mesh": mesh_of((2, 2), ("dp", "pp"))} if dp else {"group": world}
    with Pipeline(layers, plan_of(name), square, timeout_s=PATIENCE_S, **options) as pipe:
        mine = data(total)[COUNT * pipe.world.replica :][:COUNT]
        try:
            pipe.step(mine, mine)
        except OctoPipeError as error:
            return str(error)
        named = {f"{k}.{n}": p for k, m in enumerate(twin) for n, p in m.named_parameters()}
        return worst((n, p.grad, named[n].grad) for n, p in pipe.named_parameters())


@pytest.mark.parametrize("how", ["list", "closure", "dict"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_weight_that_is_used_on_another_rank_in_secret_is_refused(how, name):
    ranks = Ranks(2)
    try:
        texts = ranks.run(hidden, how, 3, 0, name, False)
    finally:
        ranks.close()
    for text in texts:
        assert "uses parameter 0.weight" in text and "register it" in text


@pytest.mark.parametrize(("at", "source"), [(1, 0), (0, 1), (3, 2)])
@pytest.mark.parametrize("name", some(["chimera", "zb-h1", "1f1b"]))
@pytest.mark.parametrize("dp", [False, True])
def test_on_one_rank_a_hidden_weight_gets_the_gradient_of_all_its_uses(at, source, name, dp, two, four):
    for apart in (four if dp else two).run(hidden, "list", at, source, name, dp):
        assert isinstance(apart, float) and apart <= EXACT


class Inner(nn.Module):
    """Cuts its input off and differentiates it again: leaves of its own making."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        cut = x.detach().requires_grad_()
        return self.linear(x) + cut * 0.5


def leaves_of_its_own(world):
    layers = [Inner() for _ in range(LAYERS)]
    with Pipeline(layers, plan_of("1f1b"), square, group=world, timeout_s=PATIENCE_S) as pipe:
        return [float(pipe.step(data(), data())) for _ in range(3)]


def test_leaves_that_a_forward_makes_for_itself_are_its_own_business(two):
    assert len({tuple(losses) for losses in two.run(leaves_of_its_own)}) == 1


def from_factories(world, name):
    """Factories that hold one weight and give it to two layers on different ranks."""

    def build():
        torch.manual_seed(3)
        shared = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

        class Uses(nn.Module):
            def __init__(self, weight):
                super().__init__()
                self.weight = weight

            def forward(self, x):
                return torch.tanh(x @ self.weight)

        return [lambda: Uses(shared), *(lambda m=m: m for m in linears()[1:3]), lambda: Uses(shared)]

    twin = [make() for make in build()]
    plainly(twin, square, data())
    with Pipeline(build(), plan_of(name), square, group=world, timeout_s=PATIENCE_S) as pipe:
        pipe.step(data(), data())
        named = {f"{k}.{n}": p for k, m in enumerate(twin) for n, p in m.named_parameters()}
        return worst((n, p.grad, named[n].grad) for n, p in pipe.named_parameters())


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_a_weight_that_factories_hold_together_is_tied(name, two):
    for apart in two.run(from_factories, name):
        assert apart <= EXACT


# -- parameters that are replaced -----------------------------------------------------------------------


def replaced(world, name, dp):
    layers, twin = linears(), linears()
    total = COUNT * (2 if dp else 1)
    options = {"mesh": mesh_of((2, 2), ("dp", "pp"))} if dp else {"group": world}
    with Pipeline(layers, plan_of(name), square, timeout_s=PATIENCE_S, **options) as pipe:
        mine = data(total)[COUNT * pipe.world.replica :][:COUNT]
        pipe.step(mine, mine)
        pipe.zero_grad()
        torch.manual_seed(world.rank)  # every rank draws another one
        for module in pipe.modules().values():
            module.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        pipe.step(mine, mine)
        everywhere = {}
        for part in pipe.world.gather({n: p.detach() for n, p in pipe.named_parameters()}):
            everywhere |= part
        for k, module in enumerate(twin):
            module.weight.data.copy_(everywhere[f"{k}.weight"])
        plainly(twin, square, data(total))
        named = {f"{k}.{n}": p for k, m in enumerate(twin) for n, p in m.named_parameters()}
        apart = worst((n, p.grad, named[n].grad) for n, p in pipe.named_parameters())
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in named.values()]))
        return apart, abs(float(pipe.clip_grad_norm_(1e9)) - float(norm))


@pytest.mark.parametrize(("name", "dp"), [("1f1b", False), ("chimera", False), ("1f1b", True)])
def test_a_parameter_that_was_replaced_counts(name, dp, two, four):
    for errors in (four if dp else two).run(replaced, name, dp):
        assert max(errors) <= EXACT


def test_a_new_parameter_is_refused_by_name():
    plan = build_plan("1f1b", CostTable.uniform(num_layers=LAYERS), 1, 2)
    with Pipeline(linears(), plan, square, timeout_s=PATIENCE_S) as pipe:
        pipe.modules()[2].extra = nn.Parameter(torch.zeros(1))
        with pytest.raises(OctoPipeError, match=r"2\.extra is new since the Pipeline was made"):
            list(pipe.parameters())


# -- wrapped layers -------------------------------------------------------------------------------------


def wrapped(world, whose):
    mesh = mesh_of((2, 2), ("dp", "pp"))
    layers, twin = linears(), linears()
    group = mesh.get_group("dp") if whose == "ours" else mesh.get_group("pp")
    layers[mesh.get_local_rank("pp") * 2] = DistributedDataParallel(
        layers[mesh.get_local_rank("pp") * 2], process_group=group
    )
    batches = data(2 * COUNT)
    plainly(twin, square, batches)
    try:
        with Pipeline(layers, plan_of("1f1b"), square, mesh=mesh, timeout_s=PATIENCE_S) as pipe:
            mine = batches[COUNT * pipe.world.replica :][:COUNT]
            pipe.step(mine, mine)
            named = {f"{k}.{n}": p for k, m in enumerate(twin) for n, p in m.named_parameters()}
            return worst((n, p.grad, named[n.replace("module.", "")].grad) for n, p in pipe.named_parameters())
    except OctoPipeError as error:
        return str(error)


def test_ddp_over_the_pipelines_own_data_ranks_leaves_the_reduction_to_it(four):
    for apart in four.run(wrapped, "ours"):
        assert apart <= EXACT


def test_ddp_over_other_ranks_is_refused():
    ranks = Ranks(4)
    try:
        for text in ranks.run(wrapped, "others"):
            assert "is wrapped in DistributedDataParallel over ranks" in text and "dp_group=" in text
    finally:
        ranks.close()


def tied_otherwise(world, changed):
    layers = linears()
    layers[LAYERS - 1] = (
        nn.Linear(WIDTH, WIDTH + 1, dtype=torch.float64) if changed == "shape" else nn.Linear(WIDTH, WIDTH)
    )
    try:
        Pipeline(layers, plan_of("1f1b"), square, group=world, timeout_s=PATIENCE_S, tied=[("0.weight", "3.weight")])
    except OctoPipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("changed", ["shape", "dtype"])
def test_ties_of_unlike_weights_on_two_ranks_are_refused_by_name(changed):
    """Their sum would be of other lengths on each rank, which ends the process."""
    ranks = Ranks(2)
    try:
        for text in ranks.run(tied_otherwise, changed):
            assert "0.weight (rank 0) and 3.weight (rank 1) are one parameter, but are [5, 5] float64" in text
    finally:
        ranks.close()


# -- one memory, and values that are read without a gradient ----------------------------------------------


class Reads(nn.Linear):
    """Adds what another layer makes of its input, without the gradient of that layer's weight."""

    def __init__(self, other, how):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.held, self.how = [other], how

    def forward(self, x):
        other = self.held[0]
        if self.how == "no_grad":
            with torch.no_grad():
                more = other(x)
        elif self.how == "view":
            with torch.no_grad():
                more = x @ other.weight.T
        elif self.how == "data":
            more = x @ other.weight.data
        elif self.how == "detach":
            more = x @ other.weight.detach()
        else:  # nothing but its form
            more = x.new_zeros(other.weight.shape[0]).to(other.weight.dtype) + other.weight.numel()
        return super().forward(x) + more


def sharing(world, how, frozen, tied):
    layers = linears()
    first, last = layers[0], layers[LAYERS - 1]
    if frozen:
        first.requires_grad_(False)
        last.requires_grad_(False)
    if how == "parameter":
        last.weight = nn.Parameter(first.weight.data, requires_grad=not frozen)
    elif how == "buffer":
        last.register_buffer("table", first.weight.detach())
    elif how == "parts":
        whole = torch.randn(WIDTH, 2 * WIDTH, dtype=torch.float64)
        first.weight, last.weight = nn.Parameter(whole[:, :WIDTH]), nn.Parameter(whole[:, WIDTH:])
    else:
        layers[LAYERS - 1] = Reads(first, how)
    ties = [("0.weight", "3.weight")] if tied else ()
    try:
        with Pipeline(layers, plan_of("1f1b"), square, group=world, timeout_s=PATIENCE_S, tied=ties) as pipe:
            for _ in range(2):
                pipe.step(data(), data())
    except OctoPipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", some(["no_grad", "view", "data", "detach", "parameter", "buffer"], 2))
def test_values_of_a_layer_on_another_rank_that_no_update_reaches_are_refused_by_name(how):
    words = (
        "two tensors that share memory" if how in ("parameter", "buffer") else "of a layer on another rank, without its"
    )
    ranks = Ranks(2)
    try:
        for text in ranks.run(sharing, how, False, False):
            assert words in text and "0." in text
    finally:
        ranks.close()


def test_what_no_update_changes_and_what_is_tied_or_apart_is_not_refused(two):
    for job in (("detach", True, False), ("parameter", False, True), ("parts", False, False), ("form", False, False)):
        assert two.run(sharing, *job) == ["", ""], job


def half_frozen(world, which, name, factories):
    """A tie whose layers are frozen in part; the message, or how many parameters are trained on this rank."""
    layers = linears()
    for k in which:
        layers[k].requires_grad_(False)
    given = [functools.partial(copy.deepcopy, layer) for layer in layers] if factories else layers
    ties = [("0.weight", "3.weight")]
    try:
        plan = plan_of(name) if isinstance(name, str) else name
        with Pipeline(given, plan, square, group=world, timeout_s=PATIENCE_S, tied=ties) as pipe:
            return [n for n, p in pipe.named_parameters() if p.requires_grad]
    except OctoPipeError as error:
        return str(error)


@pytest.mark.parametrize(("which", "frozen", "trained"), [((0, 1), 0, 3), ((3,), 3, 0)])
@pytest.mark.parametrize("factories", [False, True])
def test_tied_layers_that_are_frozen_in_part_are_refused_alike_on_any_number_of_ranks(
    which, frozen, trained, factories, two
):
    words = (
        f"layer {frozen} is tied to layer {trained} ({frozen}.weight is frozen, {trained}.weight is trained): freeze "
        "both, or neither"
    )
    one_rank = build_plan("1f1b", CostTable.uniform(num_layers=LAYERS), 1, COUNT)
    assert half_frozen(World(None), which, one_rank, factories) == words
    ranks = Ranks(2)
    try:
        assert ranks.run(half_frozen, which, "1f1b", factories) == [words] * 2
    finally:
        ranks.close()
    both = two.run(half_frozen, (0, 3), "1f1b", factories)
    assert [name for names in both for name in names] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert len(two.run(half_frozen, (1,), "1f1b", factories)[0]) == 2
