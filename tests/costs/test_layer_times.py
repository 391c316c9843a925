"""Layer-times files: read exactly, and every bad one refused in one line that names file, key and remedy."""

from __future__ import annotations

import json
import os

import msgspec
import pytest
from effort import draws
from hypothesis import given, settings
from hypothesis import strategies as st

from octopipe.base.errors import OctoPipeError
from octopipe.costs.layer_times import costs_of_layer_times, load_layer_times
from octopipe.costs.profile_file import Profile, profile_from_object

GOOD = {
    "pattern": "EM-M*L",
    "forward_ms": {"E": 0.5, "M": 2, "-": 1.5, "*": 3, "L": 4},
    "backward_ms": {"E": 0, "M": 4, "-": 1, "*": 2, "L": 5},
    "weight_ms": {"E": 0.25, "M": 1, "-": 1, "*": 0, "L": 2},
}
SAME = dict.fromkeys("EM-*L", 0.5)


def write(tmp_path, text, name="model.json"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_times_spread_over_the_pattern_and_bytes_default_to_zero(tmp_path):
    table = load_layer_times(write(tmp_path, json.dumps(GOOD), "my-model.json"))
    assert (table.model, table.symbols) == ("my-model", "EM-M*L")
    assert table.forward_ms.tolist() == [0.5, 2, 1.5, 2, 3, 4]
    assert table.input_ms.tolist() == [0, 4, 1, 4, 2, 5]
    assert table.weight_ms.tolist() == [0.25, 1, 1, 1, 0, 2]
    for name in ("activation_bytes", "stash_bytes", "static_bytes", "boundary_bytes", "workspace_bytes"):
        assert not getattr(table, name).any()
    assert table.tokens_per_micro_batch is None


def test_optional_keys_are_gibibytes(tmp_path):
    gib = float(1 << 30)
    extra = {
        "activation_gib": {**SAME, "M": 1},
        "stash_gib": SAME,
        "params_gib": dict.fromkeys("EM-*L", 2),
        "boundary_gib": 0.125,
        "workspace_gib": dict.fromkeys("EM-*L", 0.25),
        "tokens": 4096,
        "measured_on": "anything",
    }
    table = load_layer_times(write(tmp_path, json.dumps({**GOOD, **extra})))
    assert table.activation_bytes.tolist() == [gib / 2, gib, gib / 2, gib, gib / 2, gib / 2]
    assert table.stash_bytes.tolist() == [gib / 2] * 6 and table.static_bytes.tolist() == [2 * gib] * 6
    assert table.boundary_bytes.tolist() == [gib / 8] * 6 and table.workspace_bytes.tolist() == [gib / 4] * 6
    assert table.tokens_per_micro_batch == 4096


def test_the_authors_files_load_with_their_own_numbers(profiles):
    files = sorted(profiles.glob("*.json"))
    assert files
    for path in files:
        raw, table = json.loads(path.read_text()), load_layer_times(path)
        total = sum(raw[key][symbol] for key in ("forward_ms", "backward_ms", "weight_ms") for symbol in raw["pattern"])
        assert table.model == path.stem and table.layer_ms.sum() == pytest.approx(total)


def test_a_byte_order_mark_is_tolerated(tmp_path):
    assert load_layer_times(write(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode())).num_layers == 6


def change(**keys):
    return json.dumps({**GOOD, **keys})


BAD = {
    "empty": ("", ["is empty"]),
    "truncated": (json.dumps(GOOD)[:-20], ["JSON"]),
    "binary": (bytes(range(256)), ["JSON"]),
    "bad unicode": (b'{"pattern": "\xff"}', ["JSON"]),
    "list": ("[1, 2]", ["list", "object"]),
    "number": ("3", ["number", "object"]),
    "null": ("null", ["null"]),
    "deep lists": ("[" * 100_000, ["nested"]),
    "deep objects": ('{"a":' * 50_000 + "1" + "}" * 50_000, ["nested"]),
    "deep inside": ('{"pattern": ' + "[" * 100_000 + "]" * 100_000 + "}", ["nested"]),
    "no pattern": (json.dumps({k: v for k, v in GOOD.items() if k != "pattern"}), ["pattern", "missing"]),
    "pattern number": (change(pattern=7), ["pattern", "number"]),
    "pattern list": (change(pattern=["E", "L"]), ["pattern", "list"]),
    "pattern empty": (change(pattern=""), ["pattern", "empty"]),
    "pattern huge": (change(pattern="M" * 100_000), ["pattern", "100000"]),
    "pattern newline": (change(pattern="E\nL"), ["pattern", "position 1"]),
    "no forward": (
        json.dumps({k: v for k, v in GOOD.items() if k != "forward_ms"}),
        ["forward_ms", "missing"],
    ),
    "table list": (change(weight_ms=[1, 2]), ["weight_ms", "list"]),
    "symbol missing": (change(backward_ms={"E": 1, "M": 1, "-": 1, "L": 1}), ["backward_ms", "'*'"]),
    "negative": (change(forward_ms={**GOOD["forward_ms"], "M": -1}), ["forward_ms", "'M'", "-1"]),
    "nan": (change(forward_ms={**GOOD["forward_ms"], "M": float("nan")}), ["forward_ms", "'M'", "nan"]),
    "infinite": (change(weight_ms={**GOOD["weight_ms"], "L": float("inf")}), ["weight_ms", "'L'", "inf"]),
    "overflow": (change().replace("0.5", "1e999"), ["forward_ms", "'E'", "inf"]),
    "absurd": (change(weight_ms={**GOOD["weight_ms"], "L": 1e300}), ["weight_ms", "'L'"]),
    "big integer": (change(weight_ms={**GOOD["weight_ms"], "L": 10**400}), ["weight_ms", "'L'", "huge"]),
    "string number": (change(forward_ms={**GOOD["forward_ms"], "M": "2"}), ["forward_ms", "'M'", "string"]),
    "boolean": (change(forward_ms={**GOOD["forward_ms"], "M": True}), ["forward_ms", "'M'", "boolean"]),
    "stash above": (change(activation_gib=SAME, stash_gib={**SAME, "L": 0.75}), ["stash_gib", "'L'", "0.75"]),
    "stash alone": (change(stash_gib=SAME), ["stash_gib", "'E'", "activation_gib"]),
    "bytes negative": (change(params_gib={**SAME, "*": -2}), ["params_gib", "'*'"]),
    "bytes number": (change(params_gib=3), ["params_gib", "number"]),
    "boundary": (change(boundary_gib=-1), ["boundary_gib", "-1"]),
    "tokens zero": (change(tokens=0), ["tokens", "0"]),
    "tokens float": (change(tokens=1.5), ["tokens"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_line_with_file_key_and_remedy(case, tmp_path):
    text, words = BAD[case]
    path = write(tmp_path, text)
    with pytest.raises(OctoPipeError) as caught:
        load_layer_times(path)
    line = str(caught.value)
    assert line.startswith(str(path)) and ";" in line and "\n" not in line and len(line) < 600
    assert all(word in line for word in words), line


def test_paths_that_are_no_files(tmp_path):
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    fifo = tmp_path / "pipe.json"
    os.mkfifo(fifo)
    huge = tmp_path / "huge.json"
    with huge.open("wb") as f:
        f.truncate(1 << 30)
    for path, word in (
        (tmp_path, "directory"),
        (tmp_path / "none.json", "no such file"),
        (loop, "read"),
        (fifo, "regular"),
        (huge, "at most"),
        ("null\0byte.json", "read"),
        (tmp_path / ("x" * 5000), "read"),
        (tmp_path / "a\nb.json", "no such file"),
    ):
        with pytest.raises(OctoPipeError, match=word) as caught:
            load_layer_times(path)
        assert "\n" not in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet="EML*-\n", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("EM-*L"), inner, max_size=5),
    max_leaves=8,
)


@settings(deadline=None, max_examples=draws(200))
@given(st.dictionaries(st.sampled_from([*GOOD, "activation_gib", "stash_gib", "tokens", "x"]), json_values))
def test_any_object_loads_or_is_refused_in_one_line(changes):
    try:
        table = costs_of_layer_times({**GOOD, **changes}, name="any")
    except OctoPipeError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
    else:
        assert table.num_layers == len(table.symbols)


MOE = {
    "pattern": "EXL",
    "forward_ms": {"E": 0.1, "X": 4.0, "L": 1.0},
    "backward_ms": {"E": 0.0, "X": 5.0, "L": 1.0},
    "weight_ms": {"E": 0.1, "X": 2.0, "L": 1.0},
    "segments": {
        "forward": {"X": [["compute", 2.0], ["exchange", 0.8], ["beside", 0.3], ["compute", 0.4], ["exchange", 0.8]]},
        "backward": {"X": [["exchange", 1.0], ["compute", 4.0]]},
        "slows_compute": 0.1,
    },
}


def test_segments_say_what_is_exchanged() -> None:
    costs = costs_of_layer_times(MOE, name="moe")
    assert costs.exchanges and costs.segments is not None
    assert costs.segments.share("F", "exchange") * costs.forward_ms == pytest.approx([0.0, 1.6, 0.0])
    assert costs.segments.share("I", "exchange") * costs.input_ms == pytest.approx([0.0, 1.0, 0.0])
    again = profile_from_object(msgspec.json.decode(Profile(costs=costs).to_json()), name="moe").costs
    assert again.segments is not None and again.segments.slows_compute == 0.1
    for kind in "FI":
        assert again.segments.share(kind, "exchange") == pytest.approx(costs.segments.share(kind, "exchange"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"forward": {"X": [["compute", 1.0], ["exchange", 0.8]]}}, "make them equal"),
        ({"forward": {"X": [["network", 4.0]]}}, 'give \\["compute", ms\\]'),
        ({"forward": {"X": [["compute", 3.0], ["beside", 1.0]]}}, "directly after"),
        ({"forward": {"X": [["compute", -4.0]]}}, "number between"),
        ({"forward": [[], []]}, "one per layer"),
        ({"slows_compute": "much"}, "give a number"),
        ([], "give an object"),
    ],
)
def test_wrong_segments_are_one_line(change: object, words: str) -> None:
    segments = {**MOE["segments"], **change} if isinstance(change, dict) else change  # type: ignore[dict-item]
    with pytest.raises(OctoPipeError, match=words):
        costs_of_layer_times({**MOE, "segments": segments}, name="moe")


def test_a_models_config_is_not_a_profile(tmp_path):
    """`"pattern" is missing` would not say what is wrong."""
    from octopipe.costs.profile_file import load_profile

    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(OctoPipeError, match=r"a Hugging Face config, not a profile; `octopipe profile .*` writes one"):
        load_profile(path)
    path.write_text('{"format": "octopipe.plan/1", "num_layers": 4}')
    with pytest.raises(OctoPipeError, match=r"its format is 'octopipe.plan/1'; expected 'octopipe.profile/1'"):
        load_profile(path)
