"""Every kernel of the package against its plain twin on recorded and random arguments; its language against CPython."""

from __future__ import annotations

import importlib
import pkgutil
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from effort import draws
from kernel_programs import copied, disagreement, made, same
from moe_settings import moe_setting

import octopipe
from octopipe.base.compile import Kernel, njit
from octopipe.costs.table import CostTable
from octopipe.plans.two_lanes import pair_table
from octopipe.search.algorithm1.arrange import OrderState, _stashed
from octopipe.search.algorithm1.prices import Prices
from octopipe.search.graphs.cut_head import CutHeadSearch
from octopipe.search.pairing.choose import neighbours_paired
from octopipe.search.pairing.polish import Polisher
from octopipe.search.pairing.search import PairSearch
from octopipe.search.systems import build_plan, systems
from octopipe.search.tuner import tune
from octopipe.search.tuner.core.anneal import write_line
from octopipe.search.tuner.warm import compile_kernels
from octopipe.simulation.bounds.bounds import lower_bound
from octopipe.simulation.lowering import CHANNELS, lower
from octopipe.simulation.simulator import jitter_ms, simulate

FEW = 3
"""Calls of a kernel that are recorded."""
ROOMS = ("base", "plans", "simulation", "search")


def kernels() -> dict[str, Kernel]:
    """All kernels of the package, by module and name."""
    found: dict[str, Kernel] = {}
    for room in ROOMS:
        package = importlib.import_module(f"octopipe.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"octopipe.{room}."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, Kernel):
                    found[f"{value.__module__}.{value.__name__}"] = value
    return found


def _costs(seed: int, layers: int = 6) -> CostTable:
    lot = np.random.default_rng(seed)
    times = {name: lot.uniform(0.5, 4.0, layers) for name in ("forward_ms", "input_ms", "weight_ms")}
    return CostTable.uniform(num_layers=layers, activation_bytes=1.0, p2p_ms=0.1).replace(
        **times, rank_memory_bytes=(40.0,)
    )


def _work() -> None:
    """What calls every kernel at least once, on small settings."""
    compile_kernels.__wrapped__("best")
    compile_kernels.__wrapped__("octopipe")
    for seed in range(2):
        costs = _costs(seed)
        for name in systems():
            if name not in ("tessel", "optpipe"):
                with suppress(octopipe.OctoPipeError):
                    simulate(build_plan(name, costs, 2, 4, split_backward=True), costs)
        for channel in CHANNELS:
            lower(build_plan("interleaved", costs, 2, 4), costs, channel=channel)
            simulate(build_plan("interleaved", costs, 2, 4), costs, channel=channel)
        lower_bound(costs, 2, 4, True, True)
    costs = _costs(1)
    jitter_ms(lower(build_plan("1f1b", costs, 2, 4), costs), costs, sigma=0.1, runs=3)
    for memory in (9.0, 6.0):
        with suppress(octopipe.OctoPipeError):
            build_plan("adapipe", costs.replace(rank_memory_bytes=(memory,)), 2, 4)
    for seed in range(3):  # some moves are rare
        tune(costs.replace(optimizer_ms=np.ones(6)), 2, 4, budget_s=600.0, iterations=300, workers=1, seed=seed)
    headed = costs.replace(symbols="ETTTTL", boundary_bytes=np.ones(6), tokens_per_micro_batch=16, rank_memory_bytes=())
    CutHeadSearch(costs=headed, num_ranks=2, num_micro_batches=4, budget_s=600.0, moves=60).run()
    for seed in (10, 11):
        with_experts, ranks, micro_batches = moe_setting(random.Random(seed), 0.4)
        setting = {"costs": with_experts, "num_ranks": ranks, "num_micro_batches": micro_batches}
        PairSearch(**setting, budget_s=600.0, moves=20, seed=seed).run()
        paired = neighbours_paired(build_plan("zb-v", with_experts, ranks, micro_batches), with_experts)
        Polisher(paired, with_experts, seed).run(budget_s=None, moves=20)
    # What small settings do not come to.
    pair_table(0, np.array([1.0, 2.0, 0.5]), 1, np.array([0.7, 1.1]), 0.1, 0.2)
    write_line(np.zeros((2, 4)), 1, 5, 2, 3.5, 3.25)
    write_line(np.zeros((1, 4)), 1, 5, 2, 3.5, 3.25)
    nothing = np.zeros(1)
    prices = Prices(*[nothing] * len(Prices._fields))._replace(stash=np.arange(6.0).reshape(2, 3))
    waiting = np.array([[[0, 2], [1, 0], [1, 1]]])
    state = OrderState(*[nothing] * len(OrderState._fields))._replace(waiting=waiting, queue=np.array([[0], [3]]))
    _stashed(prices, state, 0)


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[tuple[Any, ...]]]:
    """Arguments of every kernel, those that only other kernels call as well: all are run by Python meanwhile."""
    calls: dict[str, list[tuple[Any, ...]]] = {}
    seen: dict[str, int] = {}
    lot = random.Random(0)

    def plain(self: Kernel, *given: Any) -> Any:
        name = f"{self.__module__}.{self.__name__}"
        seen[name] = seen.get(name, 0) + 1
        kept = calls.setdefault(name, [])
        if len(kept) < FEW:
            kept.append(copied(given))
        elif lot.random() < FEW / seen[name]:
            kept[lot.randrange(FEW)] = copied(given)
        return self.python(*given)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Kernel, "__call__", plain)
        _work()
    return calls


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Run a kernel by Python, with all that it calls."""

    def run(kernel: Kernel, given: tuple[Any, ...]) -> tuple[Any, Any]:
        mine = copied(given)
        with monkeypatch.context() as patch, warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            patch.setattr(Kernel, "__call__", lambda self, *more: self.python(*more))
            return kernel.python(*mine), mine

    return run


def close(one: Any, other: Any) -> bool:
    """Equal to the last bits: numpy's logarithm and the system's may differ in one."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(close, one, other))
    return same(one, other) or bool(np.allclose(one, other, rtol=1e-12, atol=0.0, equal_nan=True))


@pytest.fixture(params=["", "1"], ids=["as it runs", "bounds checked"])
def fresh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Kernel], Kernel]]:
    """Kernels compiled anew, with every index looked at or as they run."""
    monkeypatch.setenv("OCTOPIPE_CHECK_BOUNDS", request.param)
    yield lambda kernel: Kernel(kernel.python)


@pytest.mark.slow
def test_every_kernel_is_recorded(recorded: dict[str, list[tuple[Any, ...]]]) -> None:
    missing = sorted(set(kernels()) - set(recorded))
    assert len(recorded) >= 60 and not missing, missing


@pytest.mark.slow
def test_every_kernel_gives_what_its_plain_twin_gives(
    recorded: dict[str, list[tuple[Any, ...]]], fresh: Callable[[Kernel], Kernel], plainly: Any
) -> None:
    known, wrong = kernels(), []
    for name, calls in recorded.items():
        if name not in known:
            continue
        kernel = fresh(known[name])
        for given in calls:
            mine = copied(given)
            found = kernel(*mine), mine
            if not close(plainly(known[name], given), found):
                wrong.append(name)
                break
    assert not wrong, wrong


@pytest.mark.slow
def test_every_kernel_gives_what_its_plain_twin_gives_on_other_numbers(
    recorded: dict[str, list[tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch, plainly: Any
) -> None:
    """Real numbers varied at random. Bounds are checked: what makes an index run away is an error for both."""
    monkeypatch.setenv("OCTOPIPE_CHECK_BOUNDS", "1")
    known, dice, compared, wrong = kernels(), np.random.default_rng(0), 0, []

    def varied(given: Any) -> Any:
        if isinstance(given, np.ndarray) and given.dtype == np.float64:
            with np.errstate(all="ignore"):
                return given * dice.uniform(0.5, 1.5, given.shape)
        if isinstance(given, tuple):
            parts = [varied(part) for part in given]
            return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
        return copied(given)

    for name, calls in recorded.items():
        if name not in known:
            continue
        kernel = Kernel(known[name].python)
        for given in calls:
            other = varied(given)
            mine = copied(other)
            try:
                found = kernel(*mine), mine
                twin = plainly(known[name], other)
            except (IndexError, ZeroDivisionError, ValueError, OverflowError):
                continue
            compared += 1
            if not close(twin, found):
                wrong.append(name)
                break
    assert not wrong and compared > 100, (wrong, compared)


@pytest.mark.parametrize("first", range(0, draws(40, least=20), 10))
def test_random_programs_give_what_cpython_gives(first: int) -> None:
    for seed in range(first, first + 10):
        found = disagreement(seed)
        assert not found, found


@pytest.mark.slow
def test_many_random_programs_give_what_cpython_gives() -> None:
    """A hundred thousand take hours: scripts/fuzz_kernels.py."""
    for seed in range(100_000, 100_400):
        found = disagreement(seed)
        assert not found, found


# -- what is refused, and what is an error of the call ----------------------------------------------------

REFUSED = {
    "for i in range(3):\n        pass\n    else:\n        a = 1": "a loop cannot have an else branch",
    "while a > 0:\n        a -= 1\n    else:\n        a = 1": "a loop cannot have an else branch",
    "f = f[::2]": "a slice cannot have a step",
    "f = f[::-1]": "a slice cannot have a step",
    "m[0] += 1.0": "a whole row",
    "f[1:] += 1.0": "Slice",
    "x = m.max(0)": "takes no arguments",
    "f = f.copy('F')": "takes no arguments",
    "f.sort()": "sort",
    "a = a or b": "return a number in Python",
    "x = x and y": "return a number in Python",
    "x = f[1, 2]": "2 indices of an array of 1",
    "x = f[x]": "an index must be an integer",
    "x = f[a > b]": "an index must be an integer",
    "x = f[:, 0]": "indices",
    "x = m[0, 1:2]": "Slice",
    "a = a ** b": "power of an integer",
    "a = x // y": "for integers only",
    "a = x & a": "for integers only",
    "a = (a > b) + (b > a)": "two booleans",
    "a = a << 64": "a shift by 64",
    "a = ~a": "Invert",
    "a = +a": "UAdd",
    "a = a is b": "Is is not supported",
    "a = a in (1, 2)": "In is not supported",
    "a = 1 << 3 if a else 2 ** 70": "power of an integer",
    "a = 18446744073709551616": "more than 64 bits",
    "if a > 1:\n        c = 1\n    b = c": "c may have no value here",
    "for i in range(a):\n        c = i\n    b = c": "c may have no value here",
    "for i in range(a):\n        b = c\n        c = i": "c may have no value here",
    "if a:\n        return": "not every path returns a value",
    "for i in range(3):\n        h = np.zeros(3)": "inside a loop",
    "for i in range(3):\n        h = f.copy()": "inside a loop",
    "for i in range(x):\n        pass": "the arguments of range must be integers",
    "for i in range(0, 3, a):\n        pass": "the step of a range",
    "for i in range(0, 3, 0):\n        pass": "the step of a range",
    "for i in f:\n        pass": "a range or a tuple",
    "for i in [1, 2]:\n        pass": "a range or a tuple",
    "h = np.zeros(x)": "a length must be an integer",
    "h = np.zeros(3, np.complex128)": "complex128",
    "h = np.zeros(3, order='F')": "order",
    "a = min(f)": "two numbers or more",
    "a = min(a, b, key=abs)": "key",
    "a = np.searchsorted(f, x, side='rihgt')": "the side is",
    "a = np.searchsorted(g, x)": "is looked for in an array of int64",
    "a = np.searchsorted(m, x)": "one dimension",
    "a = len(f)": "len is not supported",
    "a = sum((1, 2))": "sum is not supported",
    "a = helped(a, x=x)": "positional arguments only",
    "a = helped(*f)": "Starred",
    "a = helped(a)": "takes 2 arguments",
    "f[:] = g": "into",
    "f = g": "f is",
    "a, b = 1, 2, 3": "",
    "a, *b = 1, 2, 3": "Starred",
    "a = {1: 2}": "Dict",
    "a = [1, 2]": "List",
    "a = [i for i in range(3)]": "ListComp",
    "a = lambda: 1": "Lambda",
    "assert a": "Assert",
    "raise ValueError": "Raise",
    "try:\n        a = 1\n    except ValueError:\n        pass": "Try",
    "with a:\n        pass": "With",
    "del a": "Delete",
    "import os": "Import",
    "global x9\n    x9 = 1": "Global",
    "a = (b := 3)": "NamedExpr",
    "a = f'{a}'": "JoinedStr",
    "a = -np.uint64(3)": "cannot be negated",
    "a = np.uint64(3) + a": "cannot be mixed",
    "a = nothing": "nothing is not defined here",
    "a = TABLE[1:]": "a tuple cannot be sliced",
    "a = (a, b)[b]": "the index of a tuple must be a constant",
    "pair.v = 3.0": "Attribute",
    "f.shape = 3": "Attribute",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_what_is_not_part_of_the_language_is_refused_with_file_and_line(statement: str) -> None:
    name = f"refused_{list(REFUSED).index(statement)}"
    text = f"def program(a, b, x, y, f, g, m, pair):\n    {statement}\n    return a\n"
    with pytest.raises(TypeError, match=rf"{name}\.py:\d+: a kernel cannot do this: ") as caught:
        njit(made(text, name))(1, 2, 1.0, 2.0, np.ones(4), np.ones(4, np.int64), np.ones((2, 2)), (np.ones(2), 3))
    assert REFUSED[statement] in str(caught.value)


@pytest.mark.parametrize("head", ["a, b=1", "a, *b", "a, **b", "a, *, b", "a, /, b"])
def test_arguments_are_plain_names(head: str) -> None:
    name = f"head_{sum(map(ord, head))}"
    with pytest.raises(TypeError, match="parameters must be plain names"):
        njit(made(f"def program({head}):\n    return a\n", name))(1, 2)


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("a = a // b", ZeroDivisionError),
        ("a = a % b", ZeroDivisionError),
        ("g[0] //= b", ZeroDivisionError),
        ("a = helped2(a, b)", ZeroDivisionError),
        ("f[:] = f[1:]", ValueError),
        ("m[0] = f", ValueError),
        ("f = np.zeros(b - 1)", ValueError),
        ("x = f[2:2].max()", ValueError),
    ],
)
def test_what_python_would_raise_is_raised_with_file_and_line(statement: str, error: type[Exception]) -> None:
    name = f"raised_{abs(hash(statement)) % 10**9}"
    text = f"def program(a, b, x, f, g, m):\n    kept = np.zeros(3)\n    {statement}\n    return a, kept\n"
    function = made(text, name)
    function.__globals__["helped2"] = njit(made("def program(a, b):\n    return a // b\n", f"{name}_inner"))
    with pytest.raises(error, match=r"\.py:\d+: "):
        njit(function)(1, 0, 1.0, np.ones(4), np.ones(4, np.int64), np.ones((2, 3)))


def test_the_least_number_over_minus_one_is_no_signal() -> None:
    kernel = njit(made("def program(a, b):\n    return a // b, a % b, abs(a), -a\n", "least"))
    assert kernel(-(1 << 63), -1) == (-(1 << 63), 0, -(1 << 63), -(1 << 63))
    assert kernel(7, -1) == (-7, 0, 7, -7)


def test_shifts_by_any_number_and_numbers_that_are_none_are_defined() -> None:
    text = "def program(a, b, x):\n    return a << b, a >> b, int(x), np.floor(x)\n"
    kernel = njit(made(text, "shifts"))
    for by, left, right in ((3, -40, -1), (63, -(1 << 63), -1), (64, 0, -1), (1000, 0, -1), (-1, 0, -1)):
        assert kernel(-5, by, 0.5)[:2] == (left, right), by
    assert [kernel(1, 1, x)[2] for x in (1e300, -1e300, float("nan"))] == [(1 << 63) - 1, -(1 << 63), 0]


def test_arrays_that_are_returned_are_their_own() -> None:
    """Parts of others, arguments, the same one twice: each came back as memory that was freed twice, or not ours."""
    text = "def program(f):\n    h = f.copy()\n    return f, h, h, h[1:], f[2:], h[:0]\n"
    kernel, given = njit(made(text, "returned")), np.arange(4.0)
    for _ in range(50):
        f, h, again, part, rest, none = kernel(given)
        assert f.tolist() == h.tolist() == again.tolist() == [0, 1, 2, 3]
        assert part.tolist() == [1, 2, 3] and rest.tolist() == [2, 3] and none.size == 0
        f[0] = h[0] = 9.0
        assert given[0] == 0.0 and again[0] == 0.0


def test_every_index_is_looked_at_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTOPIPE_CHECK_BOUNDS", "1")
    text = "def program(f, m, i, j, x):\n    m[i, j] = x\n    return f[i] + TABLE[j] + m[i][j] + int(x)\n"
    kernel = njit(made(text, "bounds"))
    given = (np.ones(2), np.ones((2, 3)))
    assert kernel(*given, 1, 2, 1.0) == 1.0 + 3.0 + 1.0 + 1.0
    for i, j in ((2, 0), (-1, 0), (0, 3), (0, -1), (1 << 40, 0)):
        with pytest.raises(IndexError, match=r"bounds\.py:\d+: index out of bounds"):
            kernel(*given, i, j, 1.0)
    with pytest.raises(ValueError, match="outside the range of integers"):
        kernel(*given, 0, 0, float("nan"))


def test_arrays_of_another_byte_order_and_places_that_are_not_aligned() -> None:
    kernel = njit(made("def program(f):\n    f[0] = 7.0\n    return f[1]\n", "order"))
    swapped = np.array([1.0, 2.0]).astype(">f8")
    assert kernel(swapped) == 2.0 and swapped.tolist() == [7.0, 2.0]
    raw = np.zeros(17, np.uint8)
    odd = raw[1:].view(np.float64)
    odd[:] = 1.0, 3.0
    assert kernel(odd) == 3.0 and odd.tolist() == [7.0, 3.0]


def test_whole_numbers_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(OverflowError, match="64-bit integers"):
        njit(made("def program(a):\n    return a\n", "huge"))(1 << 70)
