"""Values as bytes: what was sent comes back, and no bytes whatever make a rank call, import or build what they name."""

from __future__ import annotations

import ast
import contextlib
import enum
import io
import pickle
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from effort import draws
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.wire.encoding import decoded, empty_aside, encoded  # noqa: E402
from octopipe.runtime.wire.messages import FIXED_BYTES, Specs  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

PACKAGE = Path(__file__).resolve().parents[2] / "octopipe"
Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    values: tuple[float, ...] = ()
    made: int = field(default=0, init=False)


@dataclass
class Executes:
    command: str = ""

    def __post_init__(self) -> None:
        raise AssertionError("built by its own constructor")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
    | st.text() | st.text(st.characters(categories=["Cs"]), max_size=3) | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=draws(150), deadline=None)
@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    again = decoded(encoded(value))
    assert again == value and repr(again) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        Pair(1, "x"), Colour.RED, Frozen("a", (1.0, 2.0)), OrderedDict(b=1, a=2), {1, 2}, frozenset("a"),
        range(3, 9, 2),
        slice(None, 4, 2), ..., 1 << 200, -(1 << 90), torch.float16, torch.device("cpu"), torch.Size([2, 3]),
        torch.strided, torch.channels_last, int, len, Path("a/b"), np.float32(1.5), np.int64(7), "\ud800", float("inf"),
    ],
    ids=repr,
)  # fmt: skip
def test_constants_of_many_kinds_come_back(value: Any) -> None:
    again = decoded(encoded(value))
    assert (again == value and type(again) is type(value)) or str(again) == str(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.int8])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_and_arrays_come_back_bit_for_bit(dtype: Any, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    strided = torch.randint(0, 2, (4, 6)).to(dtype).T[::2]
    aside: list[Any] = []
    data = encoded({"t": tensor, "s": strided}, aside)
    room = empty_aside(data)
    for got, sent in zip(room, aside, strict=True):
        got.copy_(sent)
    for again in (decoded(encoded({"t": tensor, "s": strided})), decoded(data, room)):
        assert torch.equal(again["t"], tensor) and torch.equal(again["s"], strided) and again["t"].dtype == dtype
    array = np.arange(6.0).reshape(2, 3).T
    assert np.array_equal(decoded(encoded(array)), array)


def test_a_plan_and_its_costs_come_back_equal() -> None:
    costs = CostTable.uniform(num_layers=8)
    plan = build_plan("zb-h1", costs, 2, 4)
    plan.table()  # whatever it keeps for later must not stand in the way
    again = decoded(encoded((plan, costs)))
    assert again[0] == plan and again[0].table().rank.tolist() == plan.table().rank.tolist()
    assert np.array_equal(again[1].forward_ms, costs.forward_ms)


@pytest.mark.parametrize("value", [object(), lambda: 0, (x for x in ()), np.array([object()]), Exception("no")])
def test_what_is_not_plain_is_refused_with_the_remedy(value: Any) -> None:
    with pytest.raises(OctoPipeError, match="cannot be sent to another rank"):
        encoded(value)


def test_a_value_inside_itself_is_refused() -> None:
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(OctoPipeError, match="contains itself"):
        encoded(knot)


HOSTILE = [
    ["Items", ["subprocess", "Popen"], ["list", "touch", "/tmp/never"]],
    ["Keys", ["os", "system"], "x"],
    ["Keys", ["subprocess", "Popen", ["tuple"]]],
    ["Fields", ["subprocess", "Popen", ["tuple", "args"]], "x"],
    ["Fields", ["test_plain", "Frozen", ["tuple", "__class__"]], ["type", "test_plain", "Executes"]],
    ["Registered", ["subprocess", "Popen", None], "x"],
    ["enum", "subprocess", "Popen", "x"],
    ["type", "antigravity", "x"],
    ["type", "os", "system"],
    ["function", "this", "s"],
    ["function", "os", "environ"],
    ["array", "|O", [1], b"12345678"],
    ["tensor", "load", [1], b""],
    ["tensor", "float32", [-1], b""],
    ["tensor", "float32", [1 << 40], b"1234"],
    ["tensor", "float32", [1], 7],
    ["reduce", "os", "system"],
    ["dict", 1],
    [], [[]], {"a": 1}, ["text", 3], ["int", "os"],
]  # fmt: skip


@pytest.mark.parametrize("packed", HOSTILE, ids=repr)
def test_bytes_that_name_what_they_should_not_are_refused(packed: Any) -> None:
    sys.modules.setdefault("test_plain", sys.modules[__name__])
    before = set(sys.modules)
    with pytest.raises(OctoPipeError, match="a message from another rank cannot be read"):
        decoded(msgspec.msgpack.encode(packed))
    assert not {"antigravity", "this"} & (set(sys.modules) - before)


def test_a_dataclass_is_made_without_its_constructor() -> None:
    made = object.__new__(Executes)
    made.command = "x"
    assert decoded(encoded(made)).command == "x"


@settings(max_examples=draws(200), deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (decoded, _described):
        try:
            read(data)
        except OctoPipeError as error:
            assert len(str(error).splitlines()) == 1


def _described(data: bytes) -> Any:
    return Specs().read(len(data).to_bytes(8, "little") + bytes(FIXED_BYTES - 8) + data)


@pytest.mark.parametrize(
    "form",
    [True, (list, True), (int, True), ("x", True), (pickle.Pickler, False), ((True,), True), {"a": True}, (list,) * 3],
    ids=repr,
)
def test_a_description_whose_form_fits_nothing_is_refused(form: Any) -> None:
    leaves = [((2, 2), "float32", True)] * 2
    with pytest.raises(OctoPipeError, match="description cannot be read"):
        _described(encoded((form, leaves, ())))


def test_nothing_in_the_package_unpickles() -> None:
    """Neither pickle itself, nor the collectives of torch that use it, nor torch.load without weights_only.

    But for `layer_file.py`, whose unpickler finds no class and calls nothing: it only looks at what an index names.
    """
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        # Parsing every module takes seconds: only those that have one of the words that are looked for.
        if path.name == "layer_file.py" or not any(word in text for word in ("pickle", "dill", "_object", "load")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                wrong += [f"{path.name}: {n}" for n in names if n.split(".")[0] in ("pickle", "dill", "cloudpickle")]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr.endswith(("_object", "_object_list")) and node.func.attr != "read_json_object":
                    base = node.func.value
                    if isinstance(base, ast.Name) and base.id in ("dist", "distributed", "torch"):
                        wrong.append(f"{path.name}: {node.func.attr}")
                if node.func.attr == "load" and ast.unparse(node.func) == "torch.load":
                    safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                    wrong += [] if safe else [f"{path.name}: torch.load"]
    assert wrong == []


def test_the_one_unpickler_calls_nothing() -> None:
    import pickle

    from octopipe.runtime.training.layer_file import _Index

    called: list[str] = []

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return called.append, ("called",)

    class Shell:
        def __reduce__(self) -> tuple[object, ...]:
            return eval, ("called.append('evaluated')", {"called": called})

    for trap in (Trap(), Shell()):
        reader = _Index.__new__(_Index)
        pickle.Unpickler.__init__(reader, io.BytesIO(pickle.dumps(trap)))
        with contextlib.suppress(Exception):
            reader.load()
    assert called == []
